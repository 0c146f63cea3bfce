"""Several environments stepped one after the other, into arrays; the inside of a process.

An environment that raises, or answers with what it may not, is closed, made again and reset; the
episodes that it was in count as aborted. Only if it cannot even be made or reset does the failure
leave this module, and with it the process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from breadbox_rollout.environments.arrays import GroupArrays, Phase
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind, Notes
from breadbox_rollout.environments.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How a group runs its environments."""

    seeds: tuple[int, ...]
    """One per environment, for its first reset."""
    seed_each_episode: bool = False
    """Reset every episode with a seed of its own, derived from the first."""
    episode_steps_max: int | None = None
    """Steps after which an episode is truncated, or None if the environment decides."""
    rebuild_interval_s: float = 0.0
    """Seconds after which an environment is made anew, between episodes; 0: never."""


class EnvGroup:
    """Environments and the arrays they answer into."""

    def __init__(
        self,
        make: Callable[[int], Unit],
        count: int,
        arrays: GroupArrays,
        options: GroupOptions,
        clock: Callable[[], float],
    ) -> None:
        self._make = make
        self._arrays = arrays
        self._options = options
        self._clock = clock
        self._units: list[Unit | None] = [None] * count
        self._built_at = [0.0] * count
        self._episode_counts = [0] * count
        self.notes = Notes()

    def adopt(self, index: int, unit: Unit) -> None:
        """Use a unit that has been made already, and has not begun."""
        self._units[index] = unit
        self._built_at[index] = self._clock()

    def start(self) -> None:
        """Make and reset every environment that is not there yet."""
        for index in range(len(self._units)):
            self._begin(index)
        self._arrays.enter(Phase.IDLE)

    def step(self) -> Notes:
        """Play one round with every environment; an episode that ends is followed by the next."""
        self.notes = Notes()
        for index in range(len(self._units)):
            self._step_one(index)
        self._arrays.enter(Phase.IDLE)
        return self.notes

    def close(self) -> None:
        """Close every environment; whatever one of them raises is not let through."""
        for index in range(len(self._units)):
            self._close_one(index)

    def _step_one(self, index: int) -> None:
        unit = self._units[index]
        assert unit is not None
        self._arrays.enter(Phase.STEPPING)
        try:
            ended = unit.answer(self.notes)
        except EnvironmentFailedError as failure:
            self.notes.add_failure(index, failure)
            unit.abort()
            self._rebuild(index)
            return
        if not ended:
            return
        try:
            self._begin(index)
        except EnvironmentFailedError as failure:
            # What ended was answered in full; only the next episode is late.
            self.notes.add_failure(index, failure)
            if not unit.can_begin_anew:
                unit.abort()
            self._rebuild(index)

    def _rebuild(self, index: int) -> None:
        self._close_one(index)
        self._begin(index)

    def _begin(self, index: int) -> None:
        """Begin the next episode, making the environment first if there is none or time is over."""
        interval_s = self._options.rebuild_interval_s
        if interval_s > 0 and self._clock() - self._built_at[index] >= interval_s:
            self._close_one(index)
        unit = self._units[index]
        if unit is None:
            self._arrays.enter(Phase.BUILDING)
            try:
                unit = self._make(index)
            except EnvironmentFailedError:
                raise
            except Exception as error:
                raise EnvironmentFailedError(FailureKind.BUILD_RAISED, repr(error)) from error
            self.adopt(index, unit)
        self._arrays.enter(Phase.RESETTING)
        unit.begin(self._seed(index), self.notes)
        self._episode_counts[index] += 1

    def _seed(self, index: int) -> int | None:
        """Return the seed of the next episode; None lets the environment go on by itself."""
        count = self._episode_counts[index]
        if count == 0:
            return self._options.seeds[index]
        if not self._options.seed_each_episode:
            return None
        sequence = np.random.SeedSequence([self._options.seeds[index], count])
        return int(sequence.generate_state(1)[0] >> 1)

    def _close_one(self, index: int) -> None:
        unit, self._units[index] = self._units[index], None
        if unit is None:
            return
        try:
            unit.close()
        except Exception as error:  # noqa: BLE001 - an environment that is going may say anything
            self.notes.add_failure(
                index, EnvironmentFailedError(FailureKind.CLOSE_RAISED, repr(error), error)
            )
