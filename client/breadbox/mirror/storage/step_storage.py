"""The steps that a memory holds; fragments are added here."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.columns import Columns, Layout, step_trees
from breadbox.mirror.storage.frames import FramePlan, ends_of
from breadbox.mirror.storage.index import FilledIndex, Numbers, StepIndex
from breadbox.mirror.storage.priorities import StepPriorities, SumTree
from breadbox.mirror.storage.rings import Memory, StateLayout, States
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment, Tree

CHUNK_STEP_BITS: Final = 24
"""Low bits of a handle, for the step within its chunk; the chunk's id is above."""
STATE: Final = "in_state"
"""Name of the recurrent state in an example."""
SPARE_PART: Final = 16
"""Part of the capacity for which there are rows beyond it: a draw may still copy a removed step."""
Check = Callable[[int], bool]
"""Function that returns True while what was seen of a step, and of all after it, is unchanged."""


class StepStorage:
    """Columns, index, priorities; step s is in row s % row_count. Called under the lock."""

    index: StepIndex
    priorities: StepPriorities

    def __init__(self, capacity_steps: int) -> None:
        self.capacity_steps = capacity_steps
        self.row_count = capacity_steps + capacity_steps // SPARE_PART
        self.changed = threading.Condition(threading.RLock())
        """Guards everything but the columns' contents; notified of every change."""
        self.inserted_count = 0
        self.size_bytes = 0
        """Bytes of memory for steps: all rows, and the frames written to."""
        self._columns: Columns | None = None

    @property
    def columns(self) -> Columns:
        """Memory of the steps; there has to be a step."""
        assert self._columns is not None
        return self._columns

    @property
    def step_count(self) -> int:
        """Number of steps that are kept."""
        return self.index.high - self.index.low

    def rows(self, numbers: Numbers) -> Numbers:
        """Return the rows of steps."""
        return numbers % self.row_count

    def kept_rows(self) -> Numbers:
        """Return the rows of all steps that are kept, the oldest first."""
        return self.rows(np.arange(self.index.low, self.index.high))

    def tree(self, alpha: float) -> SumTree:
        """Return the sum tree of priorities to the power of *alpha*, by row; make a missing one."""
        self._keep_priorities_up()
        tree = self.priorities.tree(alpha)
        if tree is None:
            rows = self.kept_rows()
            tree = self.priorities.weigh(alpha, rows, self.columns.column("is_usable")[rows])
        return tree

    def _keep_priorities_up(self) -> None:
        known, low, high = self.priorities, self.index.low, self.index.high
        if known.are_kept:
            known.drop(self.slices(known.low, min(low, known.high) - known.low))
            start = max(low, known.high)
            rows = self.rows(np.arange(start, high))
            unusable = rows[~self.columns.column("is_usable")[rows]]
            known.add(self.slices(start, high - start), unusable)
        known.low, known.high = low, high

    def slices(self, number: int, count: int) -> list[slice]:
        """Return the rows of so many steps, from this one on."""
        if count <= 0:
            return []
        size = self.row_count
        start = number % size
        if start + count <= size:
            return [slice(start, start + count)]
        return [slice(start, size), slice(0, start + count - size)]

    def refresh(self) -> Check:
        """Read which steps there are; return a check of that, to call later without the lock."""
        return lambda number: self.index.floor <= number

    def is_steady(self) -> bool:
        """Return True if nothing that can be looked up has gone since `refresh`."""
        return True

    def held_up(self) -> AbstractContextManager[Any]:
        """Return a context in which no step is removed; for moments only."""
        return self.changed

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until *is_there* returns True, and return whether it did in time."""
        return self.changed.wait_for(is_there, timeout_s)

    def extend(self, fragment: Fragment, chunk_id: int | None) -> int:
        """Add a fragment; see `StepMemory.extend`. Called without the lock."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove all steps; numbers and handles are not used again. Called without the lock."""
        raise NotImplementedError


class FilledStepStorage(StepStorage):
    """Steps that this process adds itself."""

    index: FilledIndex

    def __init__(self, capacity_steps: int, frame_stack: Mapping[str, int], memory: Memory) -> None:
        super().__init__(capacity_steps)
        self.on_change: Callable[[], None] = lambda: None
        """Called under the lock with every change that readers can see."""
        self.example: dict[str, Tree] = {}
        self.places: dict[str, int] = {}
        self.generation = 0
        self.layout_count = 0
        self._frame_stack = dict(frame_stack)
        self._memory = memory
        self._writing = threading.Lock()
        self._next_handle = 0
        self._chunk_offset = 0
        self._forget(0)

    def _forget(self, next_number: int) -> None:
        self._is_fresh = True
        self._columns, self.example, self.places = None, {}, {}
        self.size_bytes = 0
        self.index = FilledIndex(next_number, self._memory, self.changed, self.notify)
        self.priorities = StepPriorities(self.row_count, next_number)

    def notify(self) -> None:
        """Show readers the steps that there are."""
        self.on_change()
        self.changed.notify_all()

    def clear(self) -> None:
        """See `StepStorage.clear`."""
        with self._writing, self.changed:
            with self._memory.letting_go():
                self._forget(self.index.high)
                self.generation += 1
                self.layout_count += 1
                self.notify()
            self._memory.forget()

    def extend(self, fragment: Fragment, chunk_id: int | None) -> int:
        """See `StepStorage.extend`."""
        with self._writing:
            return self._extend(fragment, chunk_id)

    def _extend(self, fragment: Fragment, chunk_id: int | None) -> int:
        count = fragment.step_count
        if count > self.capacity_steps:
            raise InvalidRequestError(
                "capacity_steps", f"is {self.capacity_steps}, and a fragment has {count} steps"
            )
        handle = self._handle_for(chunk_id, count)
        if self._columns is None:
            self._begin(step_trees(fragment))
        columns = self.columns
        arrays = columns.leaves_of(fragment)
        ends = ends_of(fragment)
        small, plans = columns.outcomes(fragment, arrays, ends)
        state = self._state_of(fragment)
        with self.changed:
            places = self._make_room(columns, plans, count)
        unusable = [step for step in ends if not ends[step].is_usable]
        usable = np.ones(count, dtype=np.bool_)
        usable[unusable] = False
        arrival = self.index.arrival(fragment, usable)
        versions = fragment.model_version
        values: dict[str, Any] = {
            "reward": fragment.reward,
            "terminated": fragment.terminated,
            "truncated": fragment.truncated,
            "first": fragment.first,
            "is_usable": usable,
            "episode_id": fragment.episode_id,
            "model_version": fragment.model_version_min if versions is None else versions,
            "handle": np.arange(handle, handle + count),
            "fragment": arrival.number,
            "episode": arrival.episodes,
            "ordinal": arrival.ordinals,
            **small,
        }
        for path, plan in plans.items():
            values |= columns.write_frames(path, plan, places[path])
        columns.write(self.slices(arrival.start, count), values)
        with self.changed:
            self.index.add(arrival, count=count, handle=handle, state=state, unusable=unusable)
            self._next_handle = handle + count
            self._is_fresh = False
            self.inserted_count += count
            self.size_bytes = columns.size_bytes
            self.notify()
        return handle

    def _begin(self, example: dict[str, Tree]) -> None:

        def array_for(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
            array, place = self._memory.array(shape, dtype)
            self.places[name] = place
            return array

        columns = Columns(Layout.of(example, self._frame_stack), self.row_count, array_for)
        with self.changed:
            self._columns, self.example = columns, example
            self.layout_count += 1

    def _state_of(self, fragment: Fragment) -> list[NDArray[Any]] | None:
        if fragment.in_state is None:
            return None
        if self.index.states is None:
            states = States(StateLayout.of(fragment.in_state), self.index.fragments.end)
            with self.changed:
                self.index.states = states
                self.example[STATE] = deepcopy(fragment.in_state)
                self.layout_count += 1
        else:
            states = self.index.states
        where = f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r}"
        return states.checked(fragment.in_state, where)

    def _handle_for(self, chunk_id: int | None, count: int) -> int:
        unused = -(-self._next_handle >> CHUNK_STEP_BITS)
        if chunk_id is None:
            chunk_id = unused
        else:
            if self._is_fresh and chunk_id + self._chunk_offset < unused:
                # A server that lost its journal counts from 0 in its next session; handles do not.
                self._chunk_offset = unused - chunk_id
            chunk_id += self._chunk_offset
        if not 0 <= chunk_id < 1 << (63 - CHUNK_STEP_BITS):
            raise InvalidRequestError("chunk_id", f"{chunk_id} is out of range")
        handle = max(self._next_handle, chunk_id << CHUNK_STEP_BITS)
        if handle + count > (chunk_id + 1) << CHUNK_STEP_BITS:
            is_before = handle >> CHUNK_STEP_BITS > chunk_id
            problem = "came before" if is_before else "has more steps than handles can number"
            raise InvalidRequestError("chunk_id", f"{chunk_id} {problem}")
        return handle

    def _make_room(
        self, columns: Columns, plans: Mapping[str, FramePlan], count: int
    ) -> dict[str, int]:
        index = self.index
        number = index.fragments.end
        is_filling = index.high - index.floor + count <= self.row_count
        index.retire_before(index.high + count - self.capacity_steps)
        self._evict(columns, index.high + count - self.row_count)
        places = {}
        for path, plan in plans.items():
            ring = columns.rings[path]
            ring.drop_from(number)
            while (place := ring.place(plan.frame_count, may_grow=is_filling)) is None:
                self._evict(columns, index.end_of(index.fragments.first))
            ring.take_place(number, place, plan.frame_count)
            places[path] = place
        return places

    def _evict(self, columns: Columns, floor: int) -> None:
        index = self.index
        if floor <= index.floor:
            return
        with self._memory.letting_go():
            index.drop_before(floor)
            for ring in columns.rings.values():
                ring.drop_before(index.fragments.first)
            self.notify()
