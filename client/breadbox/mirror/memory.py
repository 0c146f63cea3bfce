"""Steps in memory, to be sampled one by one, in sequences or as whole episodes."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.ahead import run_ahead
from breadbox.errors import InvalidRequestError, WaitElapsedError
from breadbox.fragment import Fragment, Tree
from breadbox.mirror.batches import Prioritised, SequenceBatch, StepBatch
from breadbox.mirror.columns import Columns
from breadbox.mirror.copying import copied, sequence_batch, stacked, step_batch
from breadbox.mirror.frames import FramePlan, Piece
from breadbox.mirror.hindsight import GoalStrategy, Relabel, relabelled_with
from breadbox.mirror.priorities import SumTree
from breadbox.mirror.tables import Table
from breadbox.trees import map_tree
from breadbox.types import Device

CHUNK_STEP_BITS: Final = 24
"""Of a handle, for the step within its chunk; the chunk's id is above."""
NONE: Final = -1
"""No fragment, no episode."""

_DRAWS_MAX: Final = 1000
"""Draws of fragments without a state before there are taken to be none."""

Numbers = NDArray[np.int64]
RewardMap = Callable[[NDArray[np.float32]], NDArray[Any]]
"""From rewards to as many others."""
Result = TypeVar("Result")


@dataclass(slots=True)
class _Stream:
    """Where one worker's steps stand."""

    fragment: int
    """Number of its latest fragment."""
    next_index: int
    episode: int
    """Number of the episode that goes on, or NONE: its beginning was not seen, or it ended."""
    ordinal: int
    """Steps of that episode so far."""


class StepMemory:
    """The latest steps of fragments, in columns that keep their types; sampled by step.

    One thread may extend it while others sample: they are not held up but for the moments in which
    steps are let go and taken in, and never see a step that is half written. Samples are copies.

    What is drawn follows from the seed, the calls and what was taken in, and in what order; with
    several threads that draw, from the order of their calls too.

    Args:
        capacity_steps: Steps that are kept; the oldest go first. Memory is taken as it fills.
        seed: Of all draws; None: another one each time.
        frame_stack: Path of an observation, such as "obs" or "obs.image", to the axis along which
            it is a stack of frames, the newest last, without the axis of steps. Each frame is then
            kept once. Observations that are no such stacks are kept whole, and none is altered.

    Raises:
        InvalidRequestError: `capacity_steps` is below 1.
    """

    def __init__(
        self,
        capacity_steps: int,
        *,
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
    ) -> None:
        if capacity_steps < 1:
            raise InvalidRequestError("capacity_steps", f"must be at least 1, got {capacity_steps}")
        self.capacity_steps = capacity_steps
        self.late_update_count = 0
        """Priorities that were updated of steps no longer kept: ignored."""
        self._frame_stack = dict(frame_stack or {})
        self._rng = np.random.default_rng(seed)
        self._writing = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        """Guards everything below but the columns' contents; told of each fragment."""
        self._columns: Columns | None = None
        self._low = 0
        """Number of the oldest step kept. Step s is in row s % capacity_steps."""
        self._high = 0
        """Number of the next step."""
        self._unusable: deque[int] = deque()
        """Steps kept of which nobody knows what they led to: never drawn by themselves."""
        self._failure: BaseException | None = None
        """What ended whoever fills it: raised by the next call that draws or waits."""
        self._inserted_count = 0
        self._sampled_count = 0
        self._next_handle = 0
        self._chunk_offset = 0
        """What is added to ids of chunks in handles."""
        self._forget()

    def _forget(self) -> None:
        self._is_fresh = True
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._fragments = Table(
            start=np.int64, count=np.int64, handle=np.int64, next=np.int64, episode=np.int64
        )
        self._owners: dict[int, tuple[str, str]] = {}
        self._states: dict[int, Any] = {}
        self._episodes = Table(fragment=np.int64, offset=np.int64, start=np.int64, count=np.int64)
        self._whole: list[int] = []
        self._tree: SumTree | None = None
        self._alpha = Prioritised().alpha
        self._priorities: NDArray[np.float64] | None = None
        self._priority_max = 1.0

    # What it holds -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps that can be sampled."""
        return self._high - self._low - len(self._unusable)

    @property
    def step_count(self) -> int:
        """Steps that are kept: those too of which nobody knows what they led to."""
        return self._high - self._low

    @property
    def inserted_step_count(self) -> int:
        """Steps taken in over its whole life."""
        return self._inserted_count

    @property
    def sampled_step_count(self) -> int:
        """Steps handed out by all draws over its whole life."""
        return self._sampled_count

    @property
    def size_bytes(self) -> int:
        """Bytes of memory for steps: all of the rows, and the frames that were written to."""
        return 0 if self._columns is None else self._columns.size_bytes

    def wait_until(self, steps: int, timeout_s: float | None = None) -> None:
        """Wait until so many steps can be sampled.

        Raises:
            WaitElapsedError: They could not within `timeout_s`.
            InvalidRequestError: It never holds as many.
        """
        if steps > self.capacity_steps:
            raise InvalidRequestError(
                "steps", f"must be at most capacity_steps, {self.capacity_steps}; got {steps}"
            )
        self._wait_for(lambda: len(self) >= steps, f"{steps} steps to sample", timeout_s)

    def _wait_for(self, is_there: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        begun_at = time.monotonic()
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._failure is not None or is_there(), timeout_s
            )
            self._raise_failure()
            if not is_over:
                waited_s = time.monotonic() - begun_at
                raise WaitElapsedError(waited_s, f"{what} wanted, {len(self)} there")

    # Taking in ---------------------------------------------------------------------------------

    def extend(self, fragment: Fragment, chunk_id: int | None = None) -> int:
        """Take in a fragment's steps, as one; the oldest make room.

        Fragments of one worker come in order of their index; where one is missing, or it says that
        it is a discontinuity, windows and sequences do not go on over the gap.

        Args:
            fragment: Its arrays are copied.
            chunk_id: Of the chunk it is of, no lower than the last one's; fragments of one chunk
                in order. None: a chunk of its own.

        Returns:
            The handle of its first step, which those of the others follow; -1: it has no step.

        Raises:
            InvalidRequestError: It has more steps than are kept, or its chunk came before.
            TreeMismatchError: Its arrays differ from those of the fragments before.
            UnsupportedArrayError: An array cannot be kept, or a truth of every fragment is absent.
        """
        if not fragment.step_count:
            return NONE
        with self._writing:
            return self._extend(fragment, chunk_id)

    def clear(self) -> None:
        """Forget all steps. Handles are not used again, and what is known of arrays goes."""
        with self._writing, self._changed:
            self._forget()
            self._columns = None
            self._low = self._high
            self._unusable.clear()
            self._changed.notify_all()

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
        where = f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r}"
        arrays = columns.leaves_of(fragment)
        ends = _ends_of(fragment)
        following, pieces = self._following(columns, fragment, arrays, ends, where)
        plans = columns.plans(arrays, pieces)
        number = self._fragments.end
        with self._changed:
            places = self._make_room(columns, plans, count, number)
        start = self._high
        positions = _slices(start % self.capacity_steps, count, self.capacity_steps)
        unusable = [step for step in ends if not ends[step].is_usable]
        usable = np.ones(count, dtype=np.bool_)
        usable[unusable] = False
        stream = self._stream_of(fragment, number)
        episodes, ordinals, ended = self._episodes_of(fragment, usable, stream, number, start)
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
            "fragment": number,
            "episode": episodes,
            "ordinal": ordinals,
        }
        values |= columns.small(arrays, following)
        for path, plan in plans.items():
            values |= columns.write_frames(path, plan, places[path])
        columns.write(positions, values)
        state = map_tree(copied, fragment.in_state)
        with self._changed:
            known = episodes[episodes != NONE] if ends or stream.episode != NONE else episodes[:0]
            lowest = int(known.min()) if len(known) else NONE
            self._publish(number, start, count, handle, stream, state, fragment, lowest)
            self._unusable.extend(step + start for step in unusable)
            for episode, length in ended:
                self._episodes.set("count", episode, length)
                self._whole.append(episode)
            if self._tree is not None:
                self._weigh_new(positions, usable)
            self._changed.notify_all()
        return handle

    def _handle_for(self, chunk_id: int | None, count: int) -> int:
        """The handle of a fragment's first step."""
        following = self._next_handle
        unused = -(-following >> CHUNK_STEP_BITS)
        if chunk_id is None:
            chunk_id = unused
        else:
            if self._is_fresh and chunk_id + self._chunk_offset < unused:
                # A server that lost its journal counts from 0 in its next session; handles do not.
                self._chunk_offset = unused - chunk_id
            chunk_id += self._chunk_offset
        if not 0 <= chunk_id < 1 << (63 - CHUNK_STEP_BITS):
            raise InvalidRequestError("chunk_id", f"{chunk_id} is out of range")
        handle = max(following, chunk_id << CHUNK_STEP_BITS)
        if handle + count > (chunk_id + 1) << CHUNK_STEP_BITS:
            is_before = handle >> CHUNK_STEP_BITS > chunk_id
            problem = "came before" if is_before else "has more steps than can be told apart"
            raise InvalidRequestError("chunk_id", f"{chunk_id} {problem}")
        return handle

    def _make_room(
        self, columns: Columns, plans: Mapping[str, FramePlan], count: int, number: int
    ) -> dict[str, int]:
        """Let the oldest steps go that are in the way; returns where frames go."""
        is_filling = self._high - self._low + count <= self.capacity_steps
        self._evict(columns, self._high + count - self.capacity_steps)
        places = {}
        for path, plan in plans.items():
            ring = columns.rings[path]
            ring.drop_from(number)
            while (place := ring.place(plan.frame_count, may_grow=is_filling)) is None:
                oldest = self._fragments.first
                start, steps = (self._fragments.get(name, oldest) for name in ("start", "count"))
                self._evict(columns, int(start + steps))
            ring.take_place(number, place, plan.frame_count)
            places[path] = place
        return places

    def _evict(self, columns: Columns, low: int) -> None:
        """Let the steps go that are older than *low*."""
        if low <= self._low:
            return
        if self._tree is not None:
            for positions in _slices(
                self._low % self.capacity_steps, low - self._low, self.capacity_steps
            ):
                self._tree.fill(positions.start, positions.stop, 0.0)
        self._low = low
        while self._unusable and self._unusable[0] < low:
            self._unusable.popleft()
        fragments = self._fragments
        while len(fragments):
            oldest = fragments.first
            if fragments.get("start", oldest) + fragments.get("count", oldest) > low:
                break
            owner = self._owners.pop(oldest)
            if self._streams[owner].fragment == oldest:
                del self._streams[owner]
            self._states.pop(oldest, None)
            fragments.drop_before(oldest + 1)
        for ring in columns.rings.values():
            ring.drop_before(fragments.first)

    def _following(
        self,
        columns: Columns,
        fragment: Fragment,
        arrays: Mapping[str, NDArray[Any]],
        ends: "Mapping[int, _End]",
        where: str,
    ) -> tuple[dict[str, NDArray[Any]], dict[str, list[Piece]]]:
        """What each step led to: small arrays by path, and pieces of the large ones."""
        count = fragment.step_count
        tails = {
            step: columns.observation_of(fragment.final_obs, end.row, where)
            for step, end in ends.items()
            if end.row is not None
        }
        if count - 1 not in ends:
            tails[count - 1] = columns.observation_of(fragment.next_obs, None, where)
        following: dict[str, NDArray[Any]] = {}
        pieces: dict[str, list[Piece]] = {}
        bounds = sorted({*ends, count - 1})
        for number, path in enumerate(columns.observation_paths()):
            array = arrays[path]
            if path in columns.rings:
                pieces[path] = [
                    Piece(before + 1, step + 1, tails[step][number] if step in tails else None)
                    for before, step in zip([-1, *bounds], bounds, strict=False)
                ]
                continue
            moved = np.empty_like(array)
            moved[:-1] = array[1:]
            for step in bounds:
                moved[step] = tails[step][number] if step in tails else array[step]
            following[path] = moved
        return following, pieces

    def _stream_of(self, fragment: Fragment, number: int) -> _Stream:
        """The worker's stream, at the end of this fragment but for its episode."""
        known = self._streams.get((fragment.session_id, fragment.worker_id))
        index = fragment.fragment_index
        if known is None or known.next_index != index or fragment.discontinuity:
            return _Stream(number, index + 1, NONE, 0)
        return _Stream(number, index + 1, known.episode, known.ordinal)

    def _episodes_of(
        self,
        fragment: Fragment,
        usable: NDArray[np.bool_],
        stream: _Stream,
        number: int,
        start: int,
    ) -> tuple[Numbers, Numbers, list[tuple[int, int]]]:
        """Number the steps of episodes whose beginning is known.

        Returns:
            For each step the episode's number, or NONE, and which of its steps it is; and the
            episodes that end here, with their numbers of steps.
        """
        count = fragment.step_count
        episodes = np.full(count, NONE, dtype=np.int64)
        ordinals = np.zeros(count, dtype=np.int64)
        whole: list[tuple[int, int]] = []
        ended = fragment.ended
        begins = fragment.first.copy()
        begins[1:] |= ended[:-1]
        # Before the records below are in use, so that none of this fragment's own is dropped.
        floor = self._episodes.end
        cuts = [*sorted({0, *begins.nonzero()[0].tolist()}), count]
        for begin, stop in itertools.pairwise(cuts):
            if begins[begin]:
                stream.episode = self._new_episode(number, begin, start + begin, floor)
                stream.ordinal = 0
            episodes[begin:stop] = stream.episode
            ordinals[begin:stop] = np.arange(stream.ordinal, stream.ordinal + stop - begin)
            stream.ordinal += stop - begin
            if ended[stop - 1]:
                # An episode of which nobody knows what its last step led to is not whole.
                if stream.episode != NONE and usable[stop - 1]:
                    whole.append((stream.episode, stream.ordinal))
                stream.episode, stream.ordinal = NONE, 0
        return episodes, ordinals, whole

    def _new_episode(self, fragment: int, offset: int, start: int, floor: int) -> int:
        """Number an episode; *floor* is the lowest number of those that begin in its fragment."""
        episodes = self._episodes
        with self._changed:
            if episodes.is_at_size:
                lowest = self._fragments.kept("episode")
                open_ = [each.episode for each in self._streams.values()]
                needed = [*open_, *lowest.tolist()]
                episodes.drop_before(min([floor, *(each for each in needed if each != NONE)]))
                self._whole = [each for each in self._whole if self._is_held_whole(each)]
            return episodes.append(fragment=fragment, offset=offset, start=start, count=0)

    def _is_held_whole(self, episode: int) -> bool:
        return episode >= self._episodes.first and bool(
            self._episodes.get("start", episode) >= self._low
        )

    def _publish(
        self,
        number: int,
        start: int,
        count: int,
        handle: int,
        stream: _Stream,
        state: Any,
        fragment: Fragment,
        episode: int,
    ) -> None:
        """Let readers see a fragment that is written; *episode* is its lowest, or NONE."""
        owner = (fragment.session_id, fragment.worker_id)
        before = self._streams.get(owner)
        follows = (
            before is not None
            and before.next_index == fragment.fragment_index
            and not fragment.discontinuity
        )
        if before is not None and follows:
            self._fragments.set("next", before.fragment, number)
        self._fragments.append(start=start, count=count, handle=handle, next=NONE, episode=episode)
        self._owners[number] = owner
        if state is not None:
            self._states[number] = state
        self._streams[owner] = stream
        self._next_handle = handle + count
        self._is_fresh = False
        self._high = start + count
        self._inserted_count += count

    # Looking up --------------------------------------------------------------------------------

    def _numbers_of(self, handles: Numbers) -> Numbers:
        """Numbers of the steps with these handles; NONE of those that are not kept."""
        fragments = self._fragments
        found = fragments.last_at_most("handle", handles)
        inside = found >= fragments.first
        found = np.where(inside, found, fragments.first)
        if not len(fragments):
            return np.full(len(handles), NONE, dtype=np.int64)
        offsets = handles - fragments.get("handle", found)
        inside &= offsets < fragments.get("count", found)
        numbers = fragments.get("start", found) + offsets
        return np.where(inside & (numbers >= self._low), numbers, NONE)

    def _window(self, starts: Numbers, length: int) -> tuple[Numbers, NDArray[np.bool_]]:
        """Numbers [B, length] of the steps from each start on, of the same worker.

        Returns:
            The numbers; where there are none, the start's, and False in the mask.
        """
        return self._onwards(starts, np.broadcast_to(np.arange(length), (len(starts), length)))

    def _onwards(self, starts: Numbers, offsets: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """Numbers [B, L] of the steps so many behind each start; see `_window`."""
        assert self._columns is not None
        fragments = self._fragments
        owner = self._columns.column("fragment")[starts % self.capacity_steps][:, None]
        owner = np.broadcast_to(owner, offsets.shape).copy()
        offset = starts[:, None] - fragments.get("start", owner) + offsets
        mask = np.ones(owner.shape, dtype=np.bool_)
        while True:
            counts = fragments.get("count", owner)
            beyond = mask & (offset >= counts)
            if not beyond.any():
                break
            following = fragments.get("next", owner)
            mask &= ~(beyond & (following == NONE))
            beyond &= mask
            offset[beyond] -= counts[beyond]
            owner[beyond] = following[beyond]
        numbers = fragments.get("start", owner) + offset
        return np.where(mask, numbers, starts[:, None]), mask

    # Drawing -----------------------------------------------------------------------------------

    def _draw(self, count: int) -> Numbers:
        """Draw steps uniformly, with replacement."""
        low, high = self._low, self._high
        drawn = self._rng.integers(low, high, count)
        if not self._unusable:
            return drawn
        assert self._columns is not None
        usable = self._columns.column("is_usable")
        while len(wrong := np.flatnonzero(~usable[drawn % self.capacity_steps])):
            drawn[wrong] = self._rng.integers(low, high, len(wrong))
        return drawn

    def _draw_by_priority(
        self, count: int, prioritised: Prioritised
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """Draw steps in proportion to their priorities, with replacement."""
        tree = self._tree_for(prioritised.alpha)
        total = tree.total
        if total <= 0.0:
            raise InvalidRequestError("prioritised", "finds all priorities 0: there is no draw")
        positions = tree.draw(self._rng.random(count))
        share = tree.weights(positions) / total * len(self)
        weight = share**-prioritised.beta
        numbers = self._low + (positions - self._low) % self.capacity_steps
        return numbers, (weight / weight.max()).astype(np.float32)

    def _tree_for(self, alpha: float) -> SumTree:
        if self._tree is not None and alpha == self._alpha:
            return self._tree
        assert self._columns is not None
        self._alpha = alpha
        self._tree = tree = SumTree(self.capacity_steps)
        if self._priorities is None:
            self._priorities = np.zeros(self.capacity_steps)
            rows = np.arange(self._low, self._high) % self.capacity_steps
            self._priorities[rows] = self._columns.column("is_usable")[rows]
        rows = np.arange(self._low, self._high) % self.capacity_steps
        kept = self._priorities[rows]
        tree.set(rows, np.where(kept > 0, kept**alpha, 0.0))
        return tree

    def _weigh_new(self, positions: list[slice], usable: NDArray[np.bool_]) -> None:
        """Give new steps the highest priority there was."""
        assert self._tree is not None
        assert self._priorities is not None
        weight = self._priority_max**self._alpha
        for each in positions:
            self._priorities[each] = self._priority_max
            self._tree.fill(each.start, each.stop, weight)
        if not usable.all():
            rows = np.concatenate([np.arange(each.start, each.stop) for each in positions])[~usable]
            self._priorities[rows] = 0.0
            self._tree.set(rows, np.zeros(len(rows)))

    def _attempt(self, choose: "Callable[[], tuple[Numbers, Callable[[], Result]]]") -> Result:
        """Choose steps and copy them, again if the oldest of them went meanwhile.

        Args:
            choose: Called under the lock; returns the steps that are read, and what copies them.
        """
        with self._changed:
            self._require_steps()
            steps, copy = choose()
        copied = copy()
        with self._changed:
            if not len(steps) or self._low <= steps.min():
                return copied
            self._require_steps()
            _, copy = choose()
            return copy()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _require_steps(self) -> None:
        self._raise_failure()
        if not len(self):
            raise InvalidRequestError("batch_size", "finds no step to sample; see wait_until")

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritised: bool | Prioritised = False,
        reward_map: RewardMap | None = None,
        device: Device | None = None,
    ) -> StepBatch:
        """Draw steps, with replacement.

        Steps of which nobody knows what they led to, such as the last one before an environment
        failed, are not drawn, and windows end before them.

        Args:
            batch_size: B, at least 1.
            n_step: Steps of a window, from 1 to 1024.
            gamma: Discount per step, from 0 to 1.
            prioritised: Draw in proportion to priorities: True for the usual exponents. The first
                such draw, and the first with another `alpha`, looks at all steps. New steps have
                the highest priority that there has been, 1 at first.
            reward_map: Called with the rewards of all windows, float32[B, n], before they are
                discounted and added: returns as many, such as scaled and clipped ones.
            device: None for numpy arrays; else where torch tensors are wanted.

        Raises:
            InvalidRequestError: An argument is out of its range, or there is no step to sample.
        """
        _check_range("batch_size", batch_size, 1, 1 << 24)
        _check_range("n_step", n_step, 1, 1024)
        _check_range("gamma", gamma, 0, 1)
        how = Prioritised() if prioritised is True else prioritised

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            if how:
                starts, weight = self._draw_by_priority(batch_size, how)
            else:
                starts, weight = self._draw(batch_size), np.ones(batch_size, np.float32)
            return starts, self._steps_at(starts, n_step, gamma, weight, device, reward_map)

        batch = self._attempt(choose)
        self._sampled_count += batch_size
        return batch

    def _steps_at(
        self,
        starts: Numbers,
        n_step: int,
        gamma: float,
        weight: NDArray[np.float32],
        device: Device | None = None,
        reward_map: RewardMap | None = None,
    ) -> Callable[[], StepBatch]:
        """Look up the windows that begin at some steps; what copies them."""
        assert self._columns is not None
        columns, count = self._columns, len(starts)
        rows = starts % self.capacity_steps
        if n_step == 1 and reward_map is None:
            discount = np.full(count, gamma, np.float32)
            return lambda: step_batch(columns, rows, rows, None, discount, weight, device)
        numbers, mask = self._window(starts, n_step)
        window = numbers % self.capacity_steps
        ended = columns.column("terminated")[window] | columns.column("truncated")[window]
        mask[:, 1:] &= columns.column("is_usable")[window[:, 1:]] & ~ended[:, :-1]
        mask = np.logical_and.accumulate(mask, axis=1)
        lengths = mask.sum(axis=1)
        last = window[np.arange(count), lengths - 1]
        powers = np.power(gamma, np.arange(n_step + 1), dtype=np.float64)
        rewards = columns.column("reward")[window]
        rewards = np.where(mask, rewards if reward_map is None else reward_map(rewards), 0.0)
        returns = (rewards * powers[:-1]).sum(axis=1).astype(np.float32)
        discount = powers[lengths].astype(np.float32)
        return lambda: step_batch(columns, rows, last, returns, discount, weight, device)

    def sample_sequences(
        self,
        batch_size: int,
        *,
        length: int,
        burn_in: int = 0,
        prioritised: bool | Prioritised = False,
        device: Device | None = None,
    ) -> SequenceBatch:
        """Draw sequences of consecutive steps of one worker, with replacement.

        Where fragments bring a recurrent state, sequences begin with a fragment, whose state is
        known; else with any step.

        Args:
            batch_size: B, at least 1.
            length: Steps to learn from, at least 1; with `burn_in` at most 65,536.
            burn_in: Steps before these, which only warm the recurrent state up.
            prioritised: Draw in proportion to the priority of the first step; where sequences begin
                with a fragment, to the sum over the fragment's steps.
            device: None for numpy arrays; else where torch tensors are wanted.

        Raises:
            InvalidRequestError: An argument is out of its range, or there is no step to sample.
        """
        _check_range("batch_size", batch_size, 1, 1 << 24)
        _check_range("length", length, 1, 1 << 16)
        _check_range("burn_in", burn_in, 0, (1 << 16) - length)
        how = Prioritised() if prioritised is True else prioritised

        def choose() -> tuple[Numbers, Callable[[], SequenceBatch]]:
            state: Tree = None
            weight = np.ones(batch_size, np.float32)
            if self._states:
                drawn, weight = self._draw_fragments(batch_size, how)
                states = [self._states[number] for number in drawn.tolist()]
                state = map_tree(lambda *leaves: stacked(leaves), *states)
                starts = self._fragments.get("start", drawn)
            elif how:
                starts, weight = self._draw_by_priority(batch_size, how)
            else:
                starts = self._draw(batch_size)
            numbers, mask = self._window(starts, burn_in + length)
            columns, rows = self._columns, numbers % self.capacity_steps
            assert columns is not None
            return starts, lambda: sequence_batch(columns, rows, mask, burn_in, state, weight)

        batch = self._attempt(choose)
        self._sampled_count += int(batch.mask.sum())
        return batch if device is None else batch.to_torch(device)

    def _draw_fragments(
        self, count: int, prioritised: Prioritised | Literal[False]
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """Draw fragments whose first step is kept, and whose recurrent state is known."""
        fragments = self._fragments
        drawn = np.full(count, NONE, dtype=np.int64)
        left = np.arange(count)
        for _ in range(_DRAWS_MAX):
            if prioritised:
                steps, _ = self._draw_by_priority(len(left), prioritised)
                assert self._columns is not None
                found = self._columns.column("fragment")[steps % self.capacity_steps]
            else:
                found = self._rng.integers(fragments.first, fragments.end, len(left))
            fits = fragments.get("start", found) >= self._low
            fits &= np.fromiter((number in self._states for number in found.tolist()), np.bool_)
            drawn[left[fits]] = found[fits]
            left = left[~fits]
            if not len(left):
                return drawn, self._weights_of(drawn, prioritised)
        raise InvalidRequestError("batch_size", "finds no fragment with its recurrent state")

    def _weights_of(
        self, drawn: Numbers, prioritised: Prioritised | Literal[False]
    ) -> NDArray[np.float32]:
        """Importance weights of fragments that were drawn by the sums of their steps."""
        if not prioritised:
            return np.ones(len(drawn), np.float32)
        tree = self._tree_for(prioritised.alpha)
        sums = np.empty(len(drawn))
        for place, number in enumerate(drawn.tolist()):
            start, count = (int(self._fragments.get(name, number)) for name in ("start", "count"))
            sums[place] = tree.weights(np.arange(start, start + count) % self.capacity_steps).sum()
        weight = (sums / tree.total * len(self._states)) ** -prioritised.beta
        normalised: NDArray[np.float32] = (weight / weight.max()).astype(np.float32)
        return normalised

    def sample_episodes(self, count: int, *, device: Device | None = None) -> list[StepBatch]:
        """Draw whole episodes, with replacement: each as its steps in order.

        Whole is what is kept from its first step to its end, without a gap.

        Args:
            count: At least 1.
            device: None for numpy arrays; else where torch tensors are wanted.

        Raises:
            InvalidRequestError: `count` is out of its range, or no whole episode is kept.
        """
        _check_range("count", count, 1, 1 << 16)

        def choose() -> tuple[Numbers, Callable[[], list[StepBatch]]]:
            whole = self._whole_episodes()
            drawn = whole[self._rng.integers(len(whole), size=count)]
            starts = self._episodes.get("start", drawn)
            lengths = self._episodes.get("count", drawn)
            copies = []
            for start, length in zip(starts, lengths, strict=True):
                numbers, mask = self._window(start[None], int(length))
                assert mask.all(), "an episode is whole"
                weight = np.ones(length, np.float32)
                copies.append(self._steps_at(numbers[0], 1, 1.0, weight, device))
            return starts, lambda: [copy() for copy in copies]

        episodes = self._attempt(choose)
        self._sampled_count += sum(map(len, episodes))
        return episodes

    def _whole_episodes(self) -> Numbers:
        """Numbers of the whole episodes; one at least, or it is an error."""
        self._whole = [each for each in self._whole if self._is_held_whole(each)]
        if not self._whole:
            raise InvalidRequestError("count", "finds no whole episode")
        return np.array(self._whole, dtype=np.int64)

    def sample_goals(
        self,
        batch_size: int,
        relabel: Relabel,
        *,
        strategy: GoalStrategy = "future",
        goals_per_step: int = 4,
        gamma: float = 0.99,
        device: Device | None = None,
    ) -> StepBatch:
        """Draw steps of whole episodes, most of them with a goal that was reached (HER).

        Observations are dicts with `achieved_goal` and `desired_goal`, as of gymnasium's goal
        environments. Of each `goals_per_step` + 1 steps, one keeps its goal.

        Args:
            batch_size: B, at least 1.
            relabel: Called with what the steps achieved, the goals in place of the desired ones,
                both [b, ...], and the extras; returns the rewards, float32[b].
            strategy: Which of the episode's achievements becomes the goal. "future": that of this
                step or a later one; "final": of the last; "episode": of any.
            goals_per_step: At least 0; 0 leaves all goals as they are.
            gamma: Discount per step, from 0 to 1.
            device: None for numpy arrays; else where torch tensors are wanted.

        Raises:
            InvalidRequestError: An argument is out of its range, or no whole episode is kept.
        """
        _check_range("batch_size", batch_size, 1, 1 << 24)
        _check_range("goals_per_step", goals_per_step, 0, 1 << 16)
        _check_range("gamma", gamma, 0, 1)
        if strategy not in get_args(GoalStrategy):
            raise InvalidRequestError(
                "strategy", f"must be one of {get_args(GoalStrategy)}, got {strategy!r}"
            )
        relabelled = batch_size * goals_per_step // (goals_per_step + 1)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            assert self._columns is not None
            columns = self._columns
            starts = self._draw_whole(batch_size)
            rows = starts[:relabelled] % self.capacity_steps
            episodes = columns.column("episode")[rows]
            first, counts = (self._episodes.get(name, episodes) for name in ("start", "count"))
            ordinals = columns.column("ordinal")[rows]
            if strategy == "final":
                chosen = counts - 1
            else:
                chosen = self._rng.integers(ordinals if strategy == "future" else 0, counts)
            goals, _ = self._onwards(first, chosen[:, None])
            copy = self._steps_at(starts, 1, gamma, np.ones(batch_size, np.float32))
            goal_rows = goals[:, 0] % self.capacity_steps
            return np.concatenate([starts, goals[:, 0]]), lambda: relabelled_with(
                copy(), columns.next_obs(columns.gather(goal_rows)), relabel
            )

        batch = self._attempt(choose)
        self._sampled_count += batch_size
        return batch if device is None else batch.to_torch(device)

    def _draw_whole(self, count: int) -> Numbers:
        """Draw steps of whole episodes, uniformly."""
        assert self._columns is not None
        whole = self._whole_episodes()
        ends = np.cumsum(self._episodes.get("count", whole))
        points = self._rng.integers(ends[-1], size=count)
        found = np.searchsorted(ends, points, side="right")
        starts = self._episodes.get("start", whole[found])
        offsets = points - (ends[found] - self._episodes.get("count", whole[found]))
        drawn, _ = self._onwards(starts, offsets[:, None])
        return drawn[:, 0]

    def batches(
        self,
        batch_size: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritised: bool | Prioritised = False,
        device: Device | None = None,
        prefetch: int = 2,
        samples_per_insert: float | None = None,
    ) -> Generator[StepBatch, None, None]:
        """Draw batch after batch in a thread, ahead of whoever works on them.

        The iterator has no end; leaving the loop, or its `close()`, ends the thread.

        Args:
            batch_size: As all that is not said here, of `sample`.
            n_step: Steps of a window.
            gamma: Discount per step.
            prioritised: Draw in proportion to priorities; updates that come after a batch was drawn
                ahead do not change it.
            device: None for numpy arrays; else where torch tensors are wanted.
            prefetch: Batches that are ready or being drawn beside the one handed out, 0 to 1024; 0
                draws when asked, in the iterating thread.
            samples_per_insert: At most so many steps are drawn for each that arrives from the first
                batch on; the next one waits until then. None: no bound.

        Raises:
            InvalidRequestError: An argument is out of its range, or there is no step to sample.
        """
        _check_range("prefetch", prefetch, 0, 1024)
        if samples_per_insert is not None and not samples_per_insert > 0:
            raise InvalidRequestError(
                "samples_per_insert", f"must be above 0, got {samples_per_insert}"
            )
        stopped = threading.Event()
        inserted_before, drawn = self._inserted_count, 0

        def draw(_: object) -> StepBatch:
            nonlocal drawn
            drawn += batch_size
            if samples_per_insert is not None:
                bound = samples_per_insert

                def is_there() -> bool:
                    arrived = self._inserted_count - inserted_before
                    return stopped.is_set() or drawn <= bound * arrived

                self._wait_for(is_there, f"{drawn / bound:.0f} steps to arrive", None)
            return self.sample(
                batch_size, n_step=n_step, gamma=gamma, prioritised=prioritised, device=device
            )

        ahead = run_ahead(itertools.repeat(None), draw, at_once=1, depth=prefetch, in_order=True)
        try:
            # `yield from` would close what waits before that is told to.
            for batch in ahead:  # noqa: UP028
                yield batch
        finally:
            stopped.set()
            with self._changed:
                self._changed.notify_all()
            ahead.close()

    def update_priorities(self, handles: ArrayLike, priorities: ArrayLike) -> int:
        """Give steps new priorities, such as the sizes of their errors.

        Args:
            handles: int64[B], or of any shape; negative ones stand for no step. Arrays or tensors.
            priorities: As many, each at least 0 and finite; 0: not drawn any more. Of a step that
                is named twice, the last counts.

        Returns:
            How many steps have one now. Those that are no longer kept are ignored, and counted in
            `late_update_count`.

        Raises:
            InvalidRequestError: Their numbers differ, or a priority is not in its range.
        """
        wanted = _flat(handles).astype(np.int64)
        values = _flat(priorities).astype(np.float64)
        if len(wanted) != len(values):
            raise InvalidRequestError("priorities", f"are {len(values)} for {len(wanted)} handles")
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise InvalidRequestError("priorities", "must be finite and at least 0")
        values, wanted = values[wanted >= 0], wanted[wanted >= 0]
        with self._changed:
            if self._columns is None:
                self.late_update_count += len(wanted)
                return 0
            tree = self._tree_for(self._alpha)
            assert self._priorities is not None
            numbers = self._numbers_of(wanted)
            is_kept = numbers != NONE
            self.late_update_count += int(len(numbers) - is_kept.sum())
            rows, values = numbers[is_kept] % self.capacity_steps, values[is_kept]
            usable = self._columns.column("is_usable")[rows]
            rows, values = rows[usable], values[usable]
            if not len(rows):
                return 0
            self._priorities[rows] = values
            tree.set(rows, np.where(values > 0, values**self._alpha, 0.0))
            self._priority_max = max(self._priority_max, float(values.max()))
            return len(rows)

    def priorities(self, handles: ArrayLike) -> NDArray[np.float64]:
        """Priorities of steps, float64[B]; NaN of those that are no longer kept."""
        with self._changed:
            if self._columns is None:
                return np.full(len(_flat(handles)), np.nan)
            self._tree_for(self._alpha)
            assert self._priorities is not None
            numbers = self._numbers_of(_flat(handles).astype(np.int64))
            kept = self._priorities[numbers % self.capacity_steps]
            return np.where(numbers != NONE, kept, np.nan)

    # Direct access -----------------------------------------------------------------------------

    def handles(self) -> Numbers:
        """Handles of all steps that are kept, the oldest first, int64[step_count]."""
        with self._changed:
            if self._columns is None:
                return np.empty(0, np.int64)
            rows = np.arange(self._low, self._high) % self.capacity_steps
            handles: Numbers = self._columns.column("handle")[rows]
            return handles

    def holds(self, handles: ArrayLike) -> NDArray[np.bool_]:
        """Whether each of some steps is kept, bool[B]."""
        with self._changed:
            return np.not_equal(self._numbers_of(_flat(handles).astype(np.int64)), NONE)

    def at(
        self,
        positions: ArrayLike,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        reward_map: RewardMap | None = None,
        device: Device | None = None,
    ) -> StepBatch:
        """Steps by position: 0 is the oldest that is kept, `step_count` - 1 the newest.

        Raises:
            InvalidRequestError: A position is out of range.
        """
        wanted = _flat(positions).astype(np.int64)
        _check_range("n_step", n_step, 1, 1024)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.step_count:
                raise InvalidRequestError("positions", f"must be from 0 to {self.step_count - 1}")
            starts = wanted + self._low
            weight = np.ones(len(starts), np.float32)
            return starts, self._steps_at(starts, n_step, gamma, weight, device, reward_map)

        return self._attempt(choose)

    def steps(
        self,
        handles: ArrayLike,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        device: Device | None = None,
    ) -> StepBatch:
        """Steps by handle.

        Raises:
            InvalidRequestError: One is no longer kept; `holds` tells which are.
        """
        wanted = _flat(handles).astype(np.int64)
        _check_range("n_step", n_step, 1, 1024)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            starts = self._numbers_of(wanted)
            if (gone := int((starts == NONE).sum())) > 0:
                raise InvalidRequestError("handles", f"name {gone} steps that are no longer kept")
            weight = np.ones(len(starts), np.float32)
            return starts, self._steps_at(starts, n_step, gamma, weight, device)

        return self._attempt(choose)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of an episode within a fragment."""

    row: int | None
    """Of its true final observation; None: nobody knows it."""
    is_usable: bool
    """Whether the step can be learned from: what it led to is known, or is of no account."""


def _ends_of(fragment: Fragment) -> dict[int, _End]:
    """The steps of a fragment that ended an episode."""
    rows: dict[int, int] = {}
    if fragment.final_obs is not None and fragment.final_obs_step is not None:
        rows = {int(step): row for row, step in enumerate(fragment.final_obs_step)}
    return {
        step: _End(rows.get(step), step in rows or bool(fragment.terminated[step]))
        for step in fragment.ended.nonzero()[0].tolist()
    }


def _slices(start: int, count: int, size: int) -> list[slice]:
    """The places of *count* items in a ring of *size*, from *start* on."""
    if start + count <= size:
        return [slice(start, start + count)]
    return [slice(start, size), slice(0, start + count - size)]


def _flat(values: ArrayLike) -> NDArray[Any]:
    """Numbers as one flat array; of tensors, on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values).reshape(-1)


def _check_range(name: str, value: float, least: float, most: float) -> None:
    """Raise if an argument is out of its range.

    Raises:
        InvalidRequestError: It is.
    """
    if not least <= value <= most:
        raise InvalidRequestError(name, f"must be from {least} to {most}, got {value}")
