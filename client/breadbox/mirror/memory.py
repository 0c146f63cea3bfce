"""Steps in memory, to be sampled one by one, in sequences or as whole episodes."""

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.ahead import run_ahead
from breadbox.errors import InvalidRequestError, WaitElapsedError
from breadbox.fragment import Fragment, Tree
from breadbox.mirror.batches import Prioritised, SequenceBatch, StepBatch
from breadbox.mirror.copying import sequence_batch
from breadbox.mirror.drawing import Draws, RewardMap
from breadbox.mirror.hindsight import GoalStrategy, Relabel, relabelled_with
from breadbox.mirror.holdings import FilledHoldings, Holdings
from breadbox.mirror.index import NONE, Numbers
from breadbox.mirror.memory_map import PrivateMemory
from breadbox.types import Device

_log = logging.getLogger(__name__)

WAIT_PERIOD_S: Final = 30.0
"""Seconds between two lines about a wait that goes on."""

ATTEMPTS: Final = 4
"""Times that something is drawn or looked up before whoever fills the memory is held up for it."""

Result = TypeVar("Result")


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
        InvalidRequestError: `capacity_steps` is no whole number of at least 1.
    """

    def __init__(
        self,
        capacity_steps: int,
        *,
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
    ) -> None:
        check_whole("capacity_steps", capacity_steps, 1)
        self._begin(FilledHoldings(capacity_steps, frame_stack or {}, PrivateMemory()), seed)

    def _begin(self, held: Holdings, seed: int | None) -> None:
        self.capacity_steps = held.capacity_steps
        self.late_update_count = 0
        """Priorities that were updated of steps no longer kept: ignored."""
        self._held = held
        self._changed = held.changed
        """Guards everything below but the columns' contents; told of each fragment."""
        self._draws = Draws(held, np.random.default_rng(seed))
        self._sampled_count = 0

    # What it holds -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Steps that can be sampled."""
        with self._changed:
            self._held.refresh()
            return self._held.index.usable_count

    @property
    def step_count(self) -> int:
        """Steps that are kept: those too of which nobody knows what they led to."""
        with self._changed:
            self._held.refresh()
            return self._held.step_count

    @property
    def inserted_step_count(self) -> int:
        """Steps taken in over its whole life."""
        with self._changed:
            self._held.refresh()
            return self._held.inserted_count

    @property
    def sampled_step_count(self) -> int:
        """Steps handed out by all draws over its whole life."""
        return self._sampled_count

    @property
    def size_bytes(self) -> int:
        """Bytes of memory for steps: all of the rows, and the frames that were written to."""
        with self._changed:
            self._held.refresh()
            return self._held.size_bytes

    def wait_until(self, steps: int, timeout_s: float | None = None) -> None:
        """Wait until so many steps can be sampled. Logs what is awaited every 30 s.

        Raises:
            WaitElapsedError: They could not within `timeout_s`.
            InvalidRequestError: It never holds as many.
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
        """Wait for steps, and log every `WAIT_PERIOD_S` which, and why they are not there.

        Args:
            is_there: Whether it is over.
            what: What is awaited.
            timeout_s: None: without end.
            count: How many of these are there; None: as can be sampled.

        Raises:
            WaitElapsedError: They were not there within `timeout_s`.
        """
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
        """While somebody waits for steps."""
        return nullcontext()

    def _raise_failure(self) -> None:
        """Raise what ended whoever fills it."""

    def _why_nothing_comes(self) -> str:
        """What keeps whoever fills it from doing so, as far as it knows."""
        return ""

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
        return self._held.extend(fragment, chunk_id)

    def clear(self) -> None:
        """Forget all steps. Handles are not used again, and what is known of arrays goes."""
        self._held.clear()

    # Drawing -----------------------------------------------------------------------------------

    def _attempt(self, choose: "Callable[[], tuple[Numbers, Callable[[], Result]]]") -> Result:
        """Choose steps and copy them, again if the oldest of them went meanwhile.

        Args:
            choose: Called under the lock; returns the steps that are read, and what copies them.
        """
        held = self._held
        for _ in range(ATTEMPTS):
            with self._changed:
                still_has = held.refresh()
                self._require_steps()
                try:
                    steps, copy = choose()
                except (InvalidRequestError, AssertionError, IndexError, ValueError):
                    # What it looked at was written over meanwhile, by another process.
                    if held.is_steady():
                        raise
                    continue
            copied = copy()
            if not len(steps) or still_has(int(steps.min())):
                return copied
        with self._changed, held.held_up():
            held.refresh()
            self._require_steps()
            _, copy = choose()
            return copy()

    def _look_up(self, look: Callable[[], Result]) -> Result:
        """Look something up, again if something went meanwhile; called under the lock.

        Args:
            look: Changes nothing.
        """
        held = self._held
        for _ in range(ATTEMPTS):
            held.refresh()
            found = look()
            if held.is_steady():
                return found
        with held.held_up():
            held.refresh()
            return look()

    def _require_steps(self) -> None:
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
            InvalidRequestError: An argument is out of its range, there is no such device, or there
                is no step to sample.
        """
        check_whole("batch_size", batch_size, 1, 1 << 24)
        check_whole("n_step", n_step, 1, 1024)
        _check_number("gamma", gamma, 0, 1)
        how = _how(prioritised)

        def choose() -> tuple[Numbers, Callable[[], StepBatch]]:
            if how:
                starts, weight = self._draws.by_priority(batch_size, how)
            else:
                starts, weight = self._draws.steps(batch_size), np.ones(batch_size, np.float32)
            return starts, self._draws.windows_at(starts, n_step, gamma, weight, device, reward_map)

        batch = self._attempt(choose)
        self._sampled_count += batch_size
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
            InvalidRequestError: An argument is out of its range, there is no such device, or there
                is no step to sample.
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
        self._sampled_count += int(batch.mask.sum())
        return batch if device is None else batch.to_torch(device)

    def sample_episodes(self, count: int, *, device: Device | None = None) -> list[StepBatch]:
        """Draw whole episodes, with replacement: each as its steps in order.

        Whole is what is kept from its first step to its end, without a gap.

        Args:
            count: At least 1.
            device: None for numpy arrays; else where torch tensors are wanted.

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
        self._sampled_count += sum(map(len, episodes))
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
        check_whole("batch_size", batch_size, 1, 1 << 24)
        check_whole("goals_per_step", goals_per_step, 0, 1 << 16)
        _check_number("gamma", gamma, 0, 1)
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
        self._sampled_count += batch_size
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
            samples_per_insert: At most so many steps are drawn for each that arrives once the first
                batch was asked for; each batch, the first one too, waits until then, and every 30 s
                a line is logged of what it waits for. None: no bound.

        Raises:
            InvalidRequestError: An argument is out of its range, there is no such device, or there
                is no step to sample.
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
        """Priorities of steps, float64[B]; NaN of those that are no longer kept."""
        held, wanted = self._held, _flat(handles).astype(np.int64)
        with self._changed:
            numbers = self._look_up(lambda: held.index.numbers_of(wanted))
            if not held.step_count:
                return np.full(len(wanted), np.nan)
            held.tree(held.priorities.alpha)  # Made now, if there was no draw by priority yet.
            return np.where(numbers != NONE, held.priorities.of(held.rows(numbers)), np.nan)

    # Direct access -----------------------------------------------------------------------------

    def handles(self) -> Numbers:
        """Handles of all steps that are kept, the oldest first, int64[step_count]."""
        held = self._held

        def look() -> Numbers:
            if not held.step_count:
                return np.empty(0, np.int64)
            handles: Numbers = held.columns.column("handle")[held.kept_rows()]
            return handles

        with self._changed:
            return self._look_up(look)

    def holds(self, handles: ArrayLike) -> NDArray[np.bool_]:
        """Whether each of some steps is kept, bool[B]."""
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
        """Steps by position: 0 is the oldest that is kept, `step_count` - 1 the newest.

        Raises:
            InvalidRequestError: A position is out of range.
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
        """Steps by handle.

        Raises:
            InvalidRequestError: One is no longer kept; `holds` tells which are.
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
    """Numbers as one flat array; of tensors, on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values).reshape(-1)


def _how(prioritised: bool | Prioritised) -> Prioritised | Literal[False]:
    """The exponents of a draw; False: it looks at no priorities.

    Raises:
        InvalidRequestError: It is neither.
    """
    if isinstance(prioritised, Prioritised):
        return prioritised
    if not isinstance(prioritised, bool | np.bool_):
        raise InvalidRequestError(
            "prioritised",
            "must be True, False, or Prioritised(alpha, beta) of breadbox.mirror, got "
            f"{prioritised!r}",
        )
    return Prioritised() if prioritised else False


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise if an argument is not a whole number in its range.

    Raises:
        InvalidRequestError: It is not.
    """
    if not isinstance(value, int | np.integer):
        raise InvalidRequestError(name, f"must be a whole number, got {value!r}")
    if most is None and value < least:
        raise InvalidRequestError(name, f"must be at least {least}, got {value}")
    if most is not None:
        _check_number(name, value, least, most)


def _check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise if an argument is not a number in its range.

    Raises:
        InvalidRequestError: It is not.
    """
    if not isinstance(value, int | float | np.number) or not least <= value <= most:
        raise InvalidRequestError(name, f"must be from {least} to {most}, got {value!r}")
