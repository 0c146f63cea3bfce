"""The steps that a memory holds, and how fragments get there."""

import threading
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.errors import InvalidRequestError
from breadbox.fragment import Fragment
from breadbox.mirror.columns import Columns
from breadbox.mirror.copying import copied
from breadbox.mirror.frames import FramePlan
from breadbox.mirror.index import StepIndex
from breadbox.mirror.outcomes import ends_of, following
from breadbox.mirror.priorities import StepPriorities, SumTree
from breadbox.trees import map_tree

CHUNK_STEP_BITS: Final = 24
"""Of a handle, for the step within its chunk; the chunk's id is above."""


class Holdings:
    """Columns, index and priorities of the latest steps. Step s is in row s % capacity_steps.

    Args:
        capacity_steps: Steps that are kept; the oldest go first.
        frame_stack: Paths of observations that are stacks of frames, and their axes.
    """

    def __init__(self, capacity_steps: int, frame_stack: Mapping[str, int]) -> None:
        self.capacity_steps = capacity_steps
        self.changed = threading.Condition(threading.RLock())
        """Guards everything but the columns' contents; told of each fragment."""
        self.inserted_count = 0
        """Steps taken in over its whole life."""
        self._frame_stack = dict(frame_stack)
        self._writing = threading.Lock()
        self._columns: Columns | None = None
        self._next_handle = 0
        self._chunk_offset = 0
        """What is added to ids of chunks in handles."""
        self._forget(0)

    def _forget(self, next_number: int) -> None:
        self._is_fresh = True
        self.index = StepIndex(self.changed, next_number)
        self.priorities = StepPriorities(self.capacity_steps)

    @property
    def columns(self) -> Columns:
        """Where the steps are; there are none before the first one is."""
        assert self._columns is not None
        return self._columns

    @property
    def step_count(self) -> int:
        """Steps that are kept."""
        return self.index.high - self.index.low

    @property
    def size_bytes(self) -> int:
        """Bytes of memory for steps: all of the rows, and the frames that were written to."""
        return 0 if self._columns is None else self._columns.size_bytes

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of steps."""
        return numbers % self.capacity_steps

    def kept_rows(self) -> NDArray[np.int64]:
        """Rows of all steps that are kept, the oldest first."""
        return self.rows(np.arange(self.index.low, self.index.high))

    def tree(self, alpha: float) -> SumTree:
        """Priorities to the power of *alpha*, by row."""
        tree = self.priorities.tree(alpha)
        if tree is None:
            rows = self.kept_rows()
            tree = self.priorities.weigh(alpha, rows, self.columns.column("is_usable")[rows])
        return tree

    def clear(self) -> None:
        """Forget all steps; numbers and handles are not used again."""
        with self._writing, self.changed:
            self._forget(self.index.high)
            self._columns = None
            self.changed.notify_all()

    def extend(self, fragment: Fragment, chunk_id: int | None) -> int:
        """Take in a fragment; see `StepMemory.extend`."""
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
            self._columns = Columns(fragment, self.capacity_steps, self._frame_stack)
        columns = self._columns
        arrays = columns.leaves_of(fragment)
        ends = ends_of(fragment)
        small, pieces = following(columns, fragment, arrays, ends)
        plans = columns.plans(arrays, pieces)
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
        }
        values |= columns.small(arrays, small)
        for path, plan in plans.items():
            values |= columns.write_frames(path, plan, places[path])
        positions = self._slices(arrival.start, count)
        columns.write(positions, values)
        state = map_tree(copied, fragment.in_state)
        with self.changed:
            self.index.add(arrival, count=count, handle=handle, state=state, unusable=unusable)
            self.priorities.add(positions, usable)
            self._next_handle = handle + count
            self._is_fresh = False
            self.inserted_count += count
            self.changed.notify_all()
        return handle

    def _handle_for(self, chunk_id: int | None, count: int) -> int:
        """The handle of a fragment's first step."""
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
            problem = "came before" if is_before else "has more steps than can be told apart"
            raise InvalidRequestError("chunk_id", f"{chunk_id} {problem}")
        return handle

    def _make_room(
        self, columns: Columns, plans: Mapping[str, FramePlan], count: int
    ) -> dict[str, int]:
        """Let the oldest steps go that are in the way; returns where frames go."""
        index = self.index
        number = index.fragments.end
        is_filling = self.step_count + count <= self.capacity_steps
        self._evict(columns, index.high + count - self.capacity_steps)
        places = {}
        for path, plan in plans.items():
            ring = columns.rings[path]
            ring.drop_from(number)
            while (place := ring.place(plan.frame_count, may_grow=is_filling)) is None:
                self._evict(columns, index.end_of(index.fragments.first))
            ring.take_place(number, place, plan.frame_count)
            places[path] = place
        return places

    def _evict(self, columns: Columns, low: int) -> None:
        """Let the steps go that are older than *low*."""
        index = self.index
        if low <= index.low:
            return
        self.priorities.drop(self._slices(index.low, low - index.low))
        index.drop_before(low)
        for ring in columns.rings.values():
            ring.drop_before(index.fragments.first)

    def _slices(self, number: int, count: int) -> list[slice]:
        """The rows of so many steps, from this one on."""
        size = self.capacity_steps
        start = number % size
        if start + count <= size:
            return [slice(start, start + count)]
        return [slice(start, size), slice(0, start + count - size)]
