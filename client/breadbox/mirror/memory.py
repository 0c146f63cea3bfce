"""Keep steps in memory; sample single steps, sequences or whole episodes."""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.mirror.batches import Prioritised, SequenceBatch, StepBatch
from breadbox.mirror.drawing import (
    Draws,
    GoalStrategy,
    Relabel,
    RewardMap,
    relabelled_with,
    sequence_batch,
)
from breadbox.mirror.storage.index import NONE, Numbers
from breadbox.mirror.storage.rings import Memory
from breadbox.mirror.storage.step_storage import FilledStepStorage, StepStorage
from breadbox.model.checks import check_number, check_whole
from breadbox.model.errors import InvalidRequestError, UnavailableError, WaitElapsedError
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.types import Device
from breadbox.transport.prefetch import prefetched

_log = logging.getLogger(__name__)

WAIT_PERIOD_S: Final = 30.0
"""Seconds between two lines of the log about a wait that goes on."""
ATTEMPTS: Final = 4
"""Attempts at a draw or look-up before the writer of the memory is blocked for it."""
FORCED_ATTEMPTS: Final = 50
"""Attempts with the writer blocked: it may have been stopped in the middle of a change, for which
each waits for 0.2 s."""
Result = TypeVar("Result")


class StepMemory:
    """The latest steps of fragments, in columns that keep their types; sampled by step.

    ```python
    memory = StepMemory(100_000, seed=1)
    memory.extend(fragment)
    batch = memory.sample(32, n_step=3)
    ```

    One thread may extend it while others sample. A sampling thread blocks only for the moments in
    which steps are removed or added, and never sees a half-written step. Samples are copies.

    The seed, the fragments and the calls, in their order, determine all draws.

    Args:
        capacity_steps: Most steps that are kept; the oldest are removed first. Memory is allocated
            as it fills.
        seed: Seed of all draws, or None for a random one.
        frame_stack: Axis along which an observation is a stack of frames, the newest last, by its
            path, such as "obs" or "obs.image". The axis does not count the axis of steps. Each
            frame is then kept once. Observations that are no such stacks are kept whole; none is
            altered.

    Raises:
        InvalidRequestError: `capacity_steps` is not an integer of at least 1.
    """

    def __init__(
        self,
        capacity_steps: int,
        *,
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
    ) -> None:
        check_whole("capacity_steps", capacity_steps, 1)
        self._begin(FilledStepStorage(capacity_steps, frame_stack or {}, Memory()), seed)

    def _begin(self, held: StepStorage, seed: int | None) -> None:
        self.capacity_steps = held.capacity_steps
        self.late_update_count = 0
        self._held = held
        self._changed = held.changed
        """Guards everything below but the columns' contents; notified of each fragment."""
        self._draws = Draws(held, np.random.default_rng(seed))
        self.sampled_step_count = 0

    # Contents ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._changed:
            self._held.refresh()
            return self._held.index.usable_count

    @property
    def step_count(self) -> int:
        """Number of kept steps, including those without a known next observation."""
        with self._changed:
            self._held.refresh()
            return self._held.step_count

    @property
    def inserted_step_count(self) -> int:
        """Number of steps added over its whole life."""
        with self._changed:
            self._held.refresh()
            return self._held.inserted_count

    @property
    def size_bytes(self) -> int:
        """Bytes of memory for steps: all rows, and the frames that were written."""
        with self._changed:
            self._held.refresh()
            return self._held.size_bytes

    def wait_until(self, steps: int, timeout_s: float | None = None) -> None:
        """Block until `steps` steps can be sampled. Logs every 30 s what is missing, and why.

        ```python
        memory.wait_until(100, timeout_s=60)
        ```

        Raises:
            WaitElapsedError: There were fewer after `timeout_s`; None waits without a limit.
            InvalidRequestError: `steps` is more than `capacity_steps`.
        """
        if steps > self.capacity_steps:
            raise InvalidRequestError(
                "steps", f"must be at most capacity_steps, {self.capacity_steps}; got {steps}"
            )
        self._wait_for(lambda: len(self) >= steps, f"{steps} steps to sample", timeout_s)

    def _wait_for(
        self,
        is_there: Callable[[], bool],
        what: str,
        timeout_s: float | None,
        count: Callable[[], int] | None = None,
    ) -> None:
        """Wait, logging every `WAIT_PERIOD_S` how many of *what* are there, by *count*, and why."""
        self._raise_failure()
        count = count or self.__len__
        begun_at = time.monotonic()
        waited_s = 0.0

        def is_over() -> bool:
            self._raise_failure()
            return is_there()

        while True:
            left_s = WAIT_PERIOD_S if timeout_s is None else timeout_s - waited_s
            with self._waiting(), self._changed:
                if self._held.wait_for(is_over, min(left_s, WAIT_PERIOD_S)):
                    return
            waited_s = time.monotonic() - begun_at
            reason = f"{what} wanted, {count()} there"
            if why := self._why_nothing_comes():
                reason = f"{reason}; {why}"
            if timeout_s is not None and waited_s >= timeout_s:
                raise WaitElapsedError(waited_s, reason)
            if left_s >= WAIT_PERIOD_S:
                _log.warning("waited %.0f s so far: %s", waited_s, reason)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _raise_failure(self) -> None:
        """Raise the error that ended the source of the steps, if one did."""

    def _why_nothing_comes(self) -> str:
        return ""

    # Adding ------------------------------------------------------------------------------------

    def extend(self, fragment: Fragment, chunk_id: int | None = None) -> int:
        """Add a fragment's steps, atomically; the oldest steps make room. Copies its arrays.

        ```python
        first_handle = memory.extend(fragment)
        ```

        Fragments of one worker must come in order of their index. Windows and sequences do not
        continue over a missing fragment, nor into one that is marked as a discontinuity. `chunk_id`
        is the id of its chunk, not below the last one's, or None for a chunk of its own. Returns
        the handle of the first step, which the handles of the others follow, or -1 if it has no
        step.

        Raises:
            InvalidRequestError: It has more steps than `capacity_steps`, its chunk came before, or
                another process fills this mirror.
            TreeMismatchError: Its arrays differ from those of the fragments before.
            UnsupportedArrayError: An array cannot be kept, or a required array is absent.
        """
        if not isinstance(fragment, Fragment):
            raise InvalidRequestError("fragment", "is a sequence; a mirror keeps steps")
        if not fragment.step_count:
            return NONE
        return self._held.extend(fragment, chunk_id)

    def clear(self) -> None:
        """Remove all steps, and the known types of arrays. Handles are not used again.

        ```python
        memory.clear()
        ```

        Raises nothing but ClosedError, if this is a mirror and its process has ended.
        """
        self._held.clear()

    # Drawing -----------------------------------------------------------------------------------

    def _attempt(self, choose: "Callable[[], tuple[Numbers, Callable[[], Result]]]") -> Result:
        """Choose steps under the lock and copy them; repeat if they were removed meanwhile."""
        held = self._held
        self._raise_failure()  # In a forked process the lock may be held for ever.
        for attempt in self._attempts():
            with attempt:
                with self._changed:
                    still_has = held.refresh()
                    self._check_steps()
                    try:
                        steps, copy = choose()
                    except (InvalidRequestError, AssertionError, IndexError, ValueError):
                        # Another process may have overwritten what it read.
                        if held.is_steady():
                            raise
                        continue
                copied = copy()
                # Also by force: of a writer that was stopped midway only an older head is known.
                if not len(steps) or still_has(int(steps.min())):
                    return copied
        raise _stopped_midway()

    def _look_up(self, look: Callable[[], Result]) -> Result:
        """Look something up under the lock; repeat if steps were removed meanwhile."""
        held = self._held
        for attempt in self._attempts():
            with attempt:
                held.refresh()
                found = look()
                if held.is_steady():
                    return found
        raise _stopped_midway()

    def _attempts(self) -> Iterator[AbstractContextManager[None]]:
        """Yield a context for each attempt; in the later ones no step is removed."""
        yield from itertools.repeat(nullcontext(), ATTEMPTS)
        for _ in range(FORCED_ATTEMPTS):
            yield self._by_force()

    @contextmanager
    def _by_force(self) -> Iterator[None]:
        with self._changed, self._held.held_up():
            yield

    def _check_steps(self) -> None:
        self._raise_failure()
        if not self._held.index.usable_count:
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
        """Draw steps, with replacement. Does not wait for steps; see `wait_until`.

        ```python
        batch = memory.sample(256, n_step=3, prioritised=True)
        ```

        Steps without a known next observation, such as the last before an environment failed,
        are not drawn, and windows end before them. Returns steps, leaves [B, ...].

        Args:
            batch_size: B, at least 1.
            n_step: Steps of a window, from 1 to 1024.
            gamma: Discount per step, from 0 to 1.
            prioritised: True to draw in proportion to priorities with the usual exponents, or the
                exponents. The first such draw, and the first with another `alpha`, reads all steps.
                New steps get the highest priority so far, 1 at first.
            reward_map: Function to scale or clip rewards, or None. It gets the rewards of all
                windows, float32[B, n], before they are discounted and added, and returns as many.
            device: Device of torch tensors, or None for numpy arrays.

        Raises:
            InvalidRequestError: An argument is out of its range, there is no such device, or there
                is no step to sample.
        """
        check_whole("batch_size", batch_size, 1, 1 << 24)
        check_whole("n_step", n_step, 1, 1024)
        check_number("gamma", gamma, 0, 1)
        how = _how(prioritised)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            if how:
                starts, weight = self._draws.by_priority(batch_size, how)
            else:
                starts, weight = self._draws.steps(batch_size), np.ones(batch_size, np.float32)
            return starts, self._draws.windows_at(starts, n_step, gamma, weight, device, reward_map)

        batch = self._attempt(choose)
        self.sampled_step_count += batch_size
        return batch

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

        ```python
        sequences = memory.sample_sequences(16, length=8, burn_in=4)
        ```

        Sequences begin with any step. If fragments have a recurrent state, sequences begin with the
        first step of a fragment: its state is known. Returns leaves [B, burn_in + length, ...],
        and a mask of existing steps. Raises the errors of `sample`; see it for `device`, too.

        Learn from the last `length` steps, at least 1. The `burn_in` steps before them only warm up
        the recurrent state; together they are at most 65,536. With `prioritised`, the priority of
        the first step counts, or the sum over a fragment if sequences begin with one.
        """
        check_whole("batch_size", batch_size, 1, 1 << 24)
        check_whole("length", length, 1, 1 << 16)
        check_whole("burn_in", burn_in, 0, (1 << 16) - length)
        how = _how(prioritised)

        def choose() -> tuple[Numbers, Callable[[], SequenceBatch]]:
            state: Tree = None
            weight = np.ones(batch_size, np.float32)
            index = self._held.index
            if index.states is not None and index.state_count:
                drawn, weight = self._draws.fragments(batch_size, how)
                state = index.states.stacked(drawn)
                starts = index.fragments.get("start", drawn)
            elif how:
                starts, weight = self._draws.by_priority(batch_size, how)
            else:
                starts = self._draws.steps(batch_size)
            numbers, mask = self._draws.window(starts, burn_in + length)
            columns, rows = self._held.columns, self._held.rows(numbers)
            return starts, lambda: sequence_batch(columns, rows, mask, burn_in, state, weight)

        batch = self._attempt(choose)
        self.sampled_step_count += int(batch.mask.sum())
        return batch if device is None else batch.to_torch(device)

    def sample_episodes(self, count: int, *, device: Device | None = None) -> list[StepBatch]:
        """Draw `count` whole episodes, with replacement, each as its steps in order.

        ```python
        returns = [episode.reward.sum() for episode in memory.sample_episodes(8)]
        ```

        An episode is whole if all its steps are kept, from the first to the end, without a gap.

        Raises:
            InvalidRequestError: `count` is out of its range, or no whole episode is kept.
        """
        check_whole("count", count, 1, 1 << 16)

        def choose() -> tuple[Numbers, Callable[[], list[StepBatch]]]:
            starts, lengths = self._draws.whole_episodes(count)
            copies = []
            for start, length in zip(starts, lengths, strict=True):
                numbers, mask = self._draws.window(start[None], int(length))
                assert mask.all(), "an episode is whole"
                weight = np.ones(length, np.float32)
                copies.append(self._draws.windows_at(numbers[0], 1, 1.0, weight, device))
            return starts, lambda: [copy() for copy in copies]

        episodes = self._attempt(choose)
        self.sampled_step_count += sum(map(len, episodes))
        return episodes

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

        ```python
        def reward_of(achieved, desired, extras):
            return -(achieved != desired).any(axis=1).astype(np.float32)
        batch = memory.sample_goals(256, reward_of)
        ```

        Observations are dicts with `achieved_goal` and `desired_goal`, of one shape and dtype, as
        in gymnasium's goal environments. Of each `goals_per_step` + 1 steps, one keeps its goal;
        with 0 all do.
        `batch_size`, `gamma` and `device` are those of `sample`.

        `relabel` is called with the achieved goals and the new desired goals, both [b, ...], and
        the extras, and returns the rewards, float32[b]. `strategy` names the step of the episode
        that the desired goal is taken from: "future" for this step or a later one, "final"
        for the last, "episode" for any.

        Raises:
            InvalidRequestError: An argument is out of its range, or no whole episode is kept.
        """
        check_whole("batch_size", batch_size, 1, 1 << 24)
        check_whole("goals_per_step", goals_per_step, 0, 1 << 16)
        check_number("gamma", gamma, 0, 1)
        if strategy not in get_args(GoalStrategy):
            raise InvalidRequestError(
                "strategy", f"must be one of {get_args(GoalStrategy)}, got {strategy!r}"
            )
        relabelled = batch_size * goals_per_step // (goals_per_step + 1)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            columns, index = self._held.columns, self._held.index
            starts = self._draws.steps_of_whole_episodes(batch_size)
            rows = self._held.rows(starts[:relabelled])
            episodes = columns.column("episode")[rows]
            first, counts = (index.episodes.get(name, episodes) for name in ("start", "count"))
            ordinals = columns.column("ordinal")[rows]
            if strategy == "final":
                chosen = counts - 1
            else:
                chosen = self._draws.rng.integers(ordinals if strategy == "future" else 0, counts)
            goals, _ = self._draws.onwards(first, chosen[:, None])
            copy = self._draws.windows_at(starts, 1, gamma, np.ones(batch_size, np.float32))
            goal_rows = self._held.rows(goals[:, 0])
            return np.concatenate([starts, goals[:, 0]]), lambda: relabelled_with(
                copy(), columns.next_obs(columns.gather(goal_rows)), relabel
            )

        batch = self._attempt(choose)
        self.sampled_step_count += batch_size
        return batch if device is None else batch.to_torch(device)

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
        """Yield batches without end, drawn in a thread ahead of the learner; see `sample`.

        ```python
        for update, batch in zip(range(10), memory.batches(256, prefetch=2)):
            print(update, batch.reward.mean())
        ```

        Leaving the loop, or the iterator's `close()`, ends the thread. Each iteration blocks until
        the next batch is drawn. Takes arguments and raises errors like `sample`. Later updates of
        priorities do not change a batch that was drawn ahead.

        `prefetch` batches, 0 to 1024, are drawn ahead; with 0 the iterating thread draws each one.
        At most `samples_per_insert` steps, or any number if None, are drawn for each step that
        arrives after the first batch was requested. A batch, even the first, waits until enough
        have arrived, and logs every 30 s what it waits for.
        """
        check_whole("prefetch", prefetch, 0, 1024)
        if samples_per_insert is not None and not (
            isinstance(samples_per_insert, int | float | np.number) and samples_per_insert > 0
        ):
            raise InvalidRequestError(
                "samples_per_insert", f"must be above 0, got {samples_per_insert!r}"
            )
        stopped = threading.Event()
        inserted_before, drawn = self._held.inserted_count, 0

        def draw(_: object) -> StepBatch:
            nonlocal drawn
            drawn += batch_size
            if samples_per_insert is not None:
                bound = samples_per_insert

                def is_there() -> bool:
                    arrived = self._held.inserted_count - inserted_before
                    return stopped.is_set() or drawn <= bound * arrived

                self._wait_for(
                    is_there,
                    f"{math.ceil(drawn / bound)} new steps, by samples_per_insert,",
                    None,
                    lambda: self._held.inserted_count - inserted_before,
                )
            return self.sample(
                batch_size, n_step=n_step, gamma=gamma, prioritised=prioritised, device=device
            )

        ahead = prefetched(itertools.repeat(None), draw, at_once=1, depth=prefetch, in_order=True)
        try:
            # `yield from` would close `ahead` before `stopped` is set, and block.
            for batch in ahead:  # noqa: UP028
                yield batch
        finally:
            stopped.set()
            with self._changed:
                self._changed.notify_all()
            ahead.close()

    def update_priorities(self, handles: ArrayLike, priorities: ArrayLike) -> int:
        """Set priorities of steps, such as the sizes of their errors.

        ```python
        batch = memory.sample(256, prioritised=True)
        memory.update_priorities(batch.handle, abs(batch.reward))
        ```

        Returns how many steps were updated. Steps that are not kept any more are counted in
        `late_update_count`.

        Args:
            handles: int64[B], or of any shape; negative ones stand for no step. Arrays or tensors.
            priorities: As many, each finite and at least 0; a step with 0 is not drawn any more. If
                a handle occurs twice, the last priority counts.

        Raises:
            InvalidRequestError: The lengths differ, or a priority is out of its range.
        """
        wanted = _flat(handles).astype(np.int64)
        values = _flat(priorities).astype(np.float64)
        if len(wanted) != len(values):
            raise InvalidRequestError("priorities", f"are {len(values)} for {len(wanted)} handles")
        if not (np.isfinite(values).all() and (values >= 0).all()):
            place = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
            raise InvalidRequestError(
                "priorities",
                f"must be finite and at least 0, got {values[place]} at place {place}, for handle "
                f"{wanted[place]}",
            )
        values, wanted = values[wanted >= 0], wanted[wanted >= 0]
        held = self._held

        def look() -> tuple[NDArray[np.bool_], Numbers, NDArray[np.bool_]]:
            numbers = held.index.numbers_of(wanted)
            is_kept = np.not_equal(numbers, NONE)
            rows = held.rows(numbers[is_kept])
            # Without a step there are no columns either.
            usable = held.columns.column("is_usable")[rows] if len(rows) else is_kept[:0]
            return is_kept, rows, usable

        with self._changed:
            is_kept, rows, usable = self._look_up(look)
            self.late_update_count += int(len(is_kept) - is_kept.sum())
            if not held.step_count:
                return 0
            held.tree(held.priorities.alpha)  # Made now, if there was no draw by priority yet.
            rows, values = rows[usable], values[is_kept][usable]
            if len(rows):
                held.priorities.update(rows, values)
            return len(rows)

    def priorities(self, handles: ArrayLike) -> NDArray[np.float64]:
        """Return priorities, float64[B], NaN for steps that are not kept any more. Raises nothing.

        ```python
        mean = np.nanmean(memory.priorities(memory.handles()))
        ```
        """
        held, wanted = self._held, _flat(handles).astype(np.int64)
        with self._changed:
            numbers = self._look_up(lambda: held.index.numbers_of(wanted))
            if not held.step_count:
                return np.full(len(wanted), np.nan)
            held.tree(held.priorities.alpha)  # Made now, if there was no draw by priority yet.
            return np.where(numbers != NONE, held.priorities.of(held.rows(numbers)), np.nan)

    # Direct access -----------------------------------------------------------------------------

    def handles(self) -> Numbers:
        """Return the handles of all kept steps, oldest first, int64[step_count]. Raises nothing.

        ```python
        newest = memory.steps(memory.handles()[-32:])
        ```
        """
        held = self._held

        def look() -> Numbers:
            if not held.step_count:
                return np.empty(0, np.int64)
            handles: Numbers = held.columns.column("handle")[held.kept_rows()]
            return handles

        with self._changed:
            return self._look_up(look)

    def holds(self, handles: ArrayLike) -> NDArray[np.bool_]:
        """Return bool[B]: True for handles of steps that are kept. Raises nothing.

        ```python
        batch = memory.sample(256)
        kept = batch.handle[memory.holds(batch.handle)]
        ```
        """
        wanted = _flat(handles).astype(np.int64)
        with self._changed:
            return np.not_equal(self._look_up(lambda: self._held.index.numbers_of(wanted)), NONE)

    def at(
        self,
        positions: ArrayLike,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        reward_map: RewardMap | None = None,
        device: Device | None = None,
    ) -> StepBatch:
        """Return steps by position: 0 is the oldest that is kept, `step_count` - 1 the newest.

        ```python
        oldest = memory.at(range(32))
        ```

        Arguments are those of `sample`. Raises InvalidRequestError for a position out of range.
        """
        wanted = _flat(positions).astype(np.int64)
        check_whole("n_step", n_step, 1, 1024)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self._held.step_count:
                raise InvalidRequestError(
                    "positions", f"must be from 0 to {self._held.step_count - 1}"
                )
            starts = wanted + self._held.index.low
            weight = np.ones(len(starts), np.float32)
            return starts, self._draws.windows_at(starts, n_step, gamma, weight, device, reward_map)

        return self._attempt(choose)

    def steps(
        self,
        handles: ArrayLike,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        device: Device | None = None,
    ) -> StepBatch:
        """Return steps by handle.

        ```python
        again = memory.steps(memory.sample(256).handle, n_step=3)
        ```

        Arguments are those of `sample`. Raises InvalidRequestError for a step that is gone;
        `holds` returns which are.
        """
        wanted = _flat(handles).astype(np.int64)
        check_whole("n_step", n_step, 1, 1024)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            starts = self._held.index.numbers_of(wanted)
            if (gone := int((starts == NONE).sum())) > 0:
                raise InvalidRequestError("handles", f"name {gone} steps that are no longer kept")
            weight = np.ones(len(starts), np.float32)
            return starts, self._draws.windows_at(starts, n_step, gamma, weight, device)

        return self._attempt(choose)


def _flat(values: ArrayLike) -> NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values).reshape(-1)


def _how(prioritised: bool | Prioritised) -> Prioritised | Literal[False]:
    if isinstance(prioritised, Prioritised):
        return prioritised
    if not isinstance(prioritised, bool | np.bool_):
        raise InvalidRequestError(
            "prioritised",
            "must be True, False, or Prioritised(alpha, beta) of breadbox.mirror, got "
            f"{prioritised!r}",
        )
    return Prioritised() if prioritised else False


def _stopped_midway() -> UnavailableError:
    return UnavailableError(
        "the process that fills the mirror was stopped in the middle of a change: let it continue"
    )
