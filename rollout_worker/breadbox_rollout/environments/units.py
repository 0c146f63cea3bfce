"""What a process holds: units, each one environment with the rows of the arrays it answers into.

A row is one sequence of steps with fragments of its own: what one agent of one environment sees and
does. There are three kinds of units, which differ in what their environment offers:

    unit                rows                                   see
    `SingleUnit`        1                                      gymnasium.Env
    `VectorUnit`        1 for each environment inside          gymnasium.vector.VectorEnv, EnvPool
    `ParallelUnit`      1 for each agent that may take part    pettingzoo.ParallelEnv

In each round a unit is given an action for every row and answers for those that *act*: a row does
not act while its agent has no episode to be in, as between the end of an episode and the reset that
comes with the next step, or after an agent's end until the others have ended too. Nothing is
recorded of a row that does not act.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from breadbox.model.fragment import Tree
from breadbox.writing.clipping import clipped
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.environments.environments import Environment
from breadbox_rollout.environments.failures import (
    EnvironmentFailedError,
    FailureKind,
    NoFramesError,
    Notes,
)
from breadbox_rollout.environments.rows import row_of, write_checked
from breadbox_rollout.environments.space_codec import Space


class Unit(ABC):
    """One environment. Its methods raise `EnvironmentFailedError`, and nothing else."""

    can_begin_anew = True
    """Whether all its rows are between two episodes whenever `begin` is called."""

    @abstractmethod
    def begin(self, seed: int | None, notes: Notes) -> None:
        """Reset what has ended, or all the first time, and show the first observations."""

    @abstractmethod
    def answer(self, notes: Notes) -> bool:
        """Take the step whose actions are in the arrays; return whether `begin` has to follow."""

    @abstractmethod
    def abort(self) -> None:
        """Note in the arrays that the episodes under way are given up."""

    @abstractmethod
    def close(self) -> None:
        """Close the environment; may raise whatever it raises."""


class Recorder(Protocol):
    """An observer of one environment's episodes, beside it."""

    def begin(self, env: Environment, obs: Tree, info: dict[str, Any], seed: int | None) -> None:
        """An episode starts."""

    def step(self, env: Environment, record: "StepRecord") -> None:
        """The environment answered."""

    def end(self) -> dict[str, Any] | None:
        """End the episode; return what to report to the worker, or None if nothing."""

    def discard(self) -> None:
        """The episode was aborted; leave nothing behind."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as a recorder sees it."""

    obs: Tree
    """After the step."""
    action: Tree
    """As the policy chose it, before any clipping."""
    value: float
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class SingleUnit(Unit):
    """A plain environment and its row."""

    def __init__(
        self,
        env: Environment,
        index: int,
        arrays: GroupArrays,
        space: Space,
        steps_max: int | None,
        recorder: Recorder | None,
    ) -> None:
        self._env = env
        self._index = index
        self._arrays = arrays
        self._space = space
        self._steps_max = steps_max
        self._recorder = recorder
        self._step_count = 0

    def begin(self, seed: int | None, notes: Notes) -> None:
        """See `Unit.begin`."""
        index, arrays = self._index, self._arrays
        try:
            obs, info = self._env.reset(seed=seed)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.RESET_RAISED, repr(error)) from error
        write_checked(arrays.obs, index, obs, self._space)
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

    def answer(self, notes: Notes) -> bool:
        """See `Unit.answer`."""
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
        write_checked(arrays.final_obs if ended else arrays.obs, index, obs, self._space)
        arrays.reward[index] = reward
        arrays.terminated[index] = terminated
        arrays.truncated[index] = truncated
        arrays.answer_count[index] += 1
        if not ended:
            arrays.first[index] = False
            arrays.obs_count[index] += 1
        if self._recorder is not None:
            self._record(self._recorder, obs, action, bool(terminated), truncated, info, notes)
        return ended

    def _record(
        self,
        recorder: Recorder,
        obs: Tree,
        action: Tree,
        terminated: bool,
        truncated: bool,
        info: Any,
        notes: Notes,
    ) -> None:
        record = StepRecord(
            obs=obs,
            action=action,
            value=float(self._arrays.value[self._index]),
            reward=float(self._arrays.reward[self._index]),
            terminated=terminated,
            truncated=truncated,
            info=dict(info),
        )
        try:
            recorder.step(self._env, record)
            finished = recorder.end() if terminated or truncated else None
        except Exception as error:  # noqa: BLE001 - disks and codecs fail in many ways
            self._recording_failed(error, notes)
            return
        if finished is not None:
            notes.episodes.append({"env": self._index, **finished})

    def _recording_failed(self, error: Exception, notes: Notes) -> None:
        """Give up the recording; the episode itself goes on, since its answers are out."""
        assert self._recorder is not None
        self._recorder.discard()
        is_unseen = isinstance(error, NoFramesError)
        kind = FailureKind.NO_FRAMES if is_unseen else FailureKind.RECORDING_FAILED
        detail = str(error) if is_unseen else repr(error)
        notes.add_failure(self._index, EnvironmentFailedError(kind, detail))

    def abort(self) -> None:
        """See `Unit.abort`."""
        if self._recorder is not None:
            self._recorder.discard()
        self._arrays.abort_count[self._index] += 1

    def close(self) -> None:
        """See `Unit.close`."""
        if self._recorder is not None:
            self._recorder.discard()
        self._env.close()
