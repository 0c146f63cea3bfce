"""Units: what a process holds, each one environment and its rows of the arrays.

A row is one sequence of steps of one agent, with its own fragments. The kinds of units:

    unit                rows                                   see
    `SingleUnit`        1                                      gymnasium.Env
    `VectorUnit`        1 for each environment inside          gymnasium.vector.VectorEnv, EnvPool
    `ParallelUnit`      1 for each agent that may take part    pettingzoo.ParallelEnv

In each round a unit gets an action for every row, and answers for the rows that *act*. A row does
not act while its agent has no episode, and nothing of it is recorded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from breadbox.model.fragment import Tree
from breadbox.writing.clipping import clipped
from breadbox_rollout.environments.arrays import GroupArrays, Phase, row_of, write_checked
from breadbox_rollout.environments.environments import Environment
from breadbox_rollout.environments.failures import (
    EnvironmentFailedError,
    FailureKind,
    NoFramesError,
    RoundNotes,
)


class Unit(ABC):
    """One environment. Its methods raise only `EnvironmentFailedError`."""

    can_begin_anew = True
    """True if all its rows are between two episodes whenever `begin` is called."""

    @abstractmethod
    def begin(self, seed: int | None, notes: RoundNotes) -> None:
        """Reset the rows that have ended, at first all, and write the first observations."""

    @abstractmethod
    def answer(self, notes: RoundNotes) -> bool:
        """Take a step with the actions in the arrays; return True if `begin` must follow."""

    @abstractmethod
    def abort(self) -> None:
        """Count the episodes in progress as aborted."""

    @abstractmethod
    def close(self) -> None:
        """Close the environment; may raise anything."""


class Recorder(Protocol):
    """An observer of one environment's episodes."""

    def begin(self, env: Environment, obs: Tree, info: dict[str, Any], seed: int | None) -> None:
        """Begin an episode."""

    def step(self, env: Environment, record: "StepRecord") -> None:
        """Record an answer of the environment."""

    def end(self) -> dict[str, Any] | None:
        """End the episode; return what to report to the worker, or None."""

    def discard(self) -> None:
        """Abort the episode; leave nothing behind."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for a recorder."""

    obs: Tree
    """Observation after the step."""
    action: Tree
    """The policy's action, before any clipping."""
    value: float
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class SingleUnit(Unit):
    """A plain environment with one row."""

    def __init__(
        self,
        env: Environment,
        index: int,
        arrays: GroupArrays,
        steps_max: int | None,
        recorder: Recorder | None,
    ) -> None:
        self._env = env
        self._index = index
        self._arrays = arrays
        self._steps_max = steps_max
        self._recorder = recorder
        self._step_count = 0

    def begin(self, seed: int | None, notes: RoundNotes) -> None:
        index, arrays = self._index, self._arrays
        try:
            obs, info = self._env.reset(seed=seed)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.RESET_RAISED, repr(error)) from error
        write_checked(arrays.obs, index, obs)
        arrays.first[index] = arrays.acts[index] = True
        arrays.obs_count[index] += 1
        self._step_count = 0
        task = info.get("task") if isinstance(info, dict) else None
        if isinstance(task, str) and task:
            notes.tasks.append({"env": index, "task": task[:64]})
        if self._recorder is not None:
            try:
                self._recorder.begin(self._env, obs, dict(info), seed)
            except Exception as error:  # noqa: BLE001 - disks and codecs fail in many ways
                self._recording_failed(error, notes)

    def answer(self, notes: RoundNotes) -> bool:
        index, arrays, env = self._index, self._arrays, self._env
        action = row_of(arrays.action, index)
        try:
            obs, reward, terminated, truncated, info = env.step(clipped(env.action_space, action))
            reward = float(reward)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.STEP_RAISED, repr(error)) from error
        if not np.isfinite(reward):
            raise EnvironmentFailedError(FailureKind.NOT_FINITE, f"reward is {reward}")
        self._step_count += 1
        limit = self._steps_max
        truncated = bool(truncated) or (limit is not None and self._step_count >= limit)
        ended = bool(terminated) or truncated
        write_checked(arrays.final_obs if ended else arrays.obs, index, obs)
        arrays.reward[index] = reward
        arrays.terminated[index] = terminated
        arrays.truncated[index] = truncated
        arrays.answer_count[index] += 1
        if not ended:
            arrays.first[index] = False
            arrays.obs_count[index] += 1
        if self._recorder is not None:
            record = StepRecord(
                obs=obs,
                action=action,
                value=float(arrays.value[index]),
                reward=reward,
                terminated=bool(terminated),
                truncated=truncated,
                info=dict(info),
            )
            self._record(self._recorder, record, notes)
        return ended

    def _record(self, recorder: Recorder, record: StepRecord, notes: RoundNotes) -> None:
        try:
            recorder.step(self._env, record)
            finished = recorder.end() if record.terminated or record.truncated else None
        except Exception as error:  # noqa: BLE001 - disks and codecs fail in many ways
            self._recording_failed(error, notes)
            return
        if finished is not None:
            notes.episodes.append({"env": self._index, **finished})

    def _recording_failed(self, error: Exception, notes: RoundNotes) -> None:
        """Give up the recording; the episode continues, because its answers were written."""
        assert self._recorder is not None
        self._recorder.discard()
        is_unseen = isinstance(error, NoFramesError)
        kind = FailureKind.NO_FRAMES if is_unseen else FailureKind.RECORDING_FAILED
        detail = str(error) if is_unseen else repr(error)
        notes.add_failure(self._index, EnvironmentFailedError(kind, detail))

    def abort(self) -> None:
        if self._recorder is not None:
            self._recorder.discard()
        self._arrays.abort_count[self._index] += 1

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.discard()
        self._env.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How a group runs its environments."""

    seeds: tuple[int, ...]
    """Seed of each environment's first reset."""
    seed_each_episode: bool = False
    """True to reset every episode with its own seed, derived from the first."""
    episode_steps_max: int | None = None
    rebuild_interval_s: float = 0.0


class EnvGroup:
    """Environments and their arrays."""

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
        self.notes = RoundNotes()

    def adopt(self, index: int, unit: Unit) -> None:
        """Use a unit that was made already, but has not begun."""
        self._units[index] = unit
        self._built_at[index] = self._clock()

    def start(self) -> None:
        """Make missing environments, and reset all."""
        for index in range(len(self._units)):
            self._begin(index)
        self._arrays.enter(Phase.IDLE)

    def step(self) -> RoundNotes:
        """Play one round with every environment; an ended episode is followed by the next."""
        self.notes = RoundNotes()
        for index in range(len(self._units)):
            self._step_one(index)
        self._arrays.enter(Phase.IDLE)
        return self.notes

    def close(self) -> None:
        """Close every environment; count what they raise."""
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
            # The ended episode was answered in full; only the next one is late.
            self.notes.add_failure(index, failure)
            if not unit.can_begin_anew:
                unit.abort()
            self._rebuild(index)

    def _rebuild(self, index: int) -> None:
        self._close_one(index)
        self._begin(index)

    def _begin(self, index: int) -> None:
        """Begin the next episode; if the environment is missing or too old, make one before."""
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
        """Return the seed of the next episode, or None to let the environment choose."""
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
        except Exception as error:  # noqa: BLE001 - a closing environment may raise anything
            self.notes.add_failure(
                index, EnvironmentFailedError(FailureKind.CLOSE_RAISED, repr(error), error)
            )
