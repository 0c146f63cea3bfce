"""Several environments stepped one after the other, into arrays; the inside of a process.

An environment that raises, or answers with what it may not, is closed, made again and reset; the
episode that it was in counts as aborted. Only if it cannot even be made or reset does the failure
leave this module, and with it the process.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.errors import TreeMismatchError
from breadbox.fragment import Tree
from breadbox_rollout.arrays import GroupArrays, Phase
from breadbox_rollout.environments import Environment
from breadbox_rollout.space_codec import Space

_DETAIL_CHARACTERS_MAX = 300


class FailureKind(Enum):
    """What an environment did wrong. A small closed set: it labels counters."""

    BUILD_RAISED = "build_raised"
    RESET_RAISED = "reset_raised"
    STEP_RAISED = "step_raised"
    OBSERVATION_MISMATCH = "observation_mismatch"
    NOT_FINITE = "not_finite"
    BUILD_HUNG = "build_hung"
    RESET_HUNG = "reset_hung"
    STEP_HUNG = "step_hung"
    DIED = "died"
    MEMORY_LIMIT = "memory_limit"
    FRUITLESS = "fruitless"
    """Too many failures in a row without one answered step."""
    CLOSE_RAISED = "close_raised"
    """Costs nothing: the environment was going anyway."""
    RECORDING_FAILED = "recording_failed"
    """Costs the recording, not the episode."""


@dataclass(slots=True)
class Notes:
    """What a turn brought besides arrays; empty almost always."""

    failures: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, "kind": ..., "detail": ...}."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, "task": name} where the episode that began says what it is about."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, ...} for each finished recording."""

    def __bool__(self) -> bool:
        return bool(self.failures or self.tasks or self.episodes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class EnvironmentFailedError(Exception):
    """An environment failed; never leaves the process it happened in."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail[:_DETAIL_CHARACTERS_MAX]
        self.notes: Notes | None = None
        """What else the turn brought, where the process ends with this."""


class Recorder(Protocol):
    """Somebody who watches the episodes of one environment from beside it."""

    def begin(self, env: Environment, obs: Tree, info: dict[str, Any], seed: int | None) -> None:
        """An episode starts."""

    def step(self, env: Environment, record: "StepRecord") -> None:
        """The environment answered."""

    def end(self) -> dict[str, Any] | None:
        """The episode is over; returns what to tell the worker, if anything."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How a group runs its environments."""

    seeds: tuple[int, ...]
    """One per environment, for its first reset."""
    seed_each_episode: bool = False
    """Reset every episode with a seed of its own, derived from the first."""
    episode_steps_max: int | None = None
    """Steps after which an episode is truncated; None: the environment decides."""
    rebuild_interval_s: float = 0.0
    """Seconds after which an environment is made anew, between episodes; 0: never."""


class EnvGroup:
    """N environments and the arrays they answer into.

    Args:
        make: Makes one environment.
        arrays: Shared; see there who writes what.
        observation_space: What observations are checked against.
        options: How to run them.
        clock: Monotonic seconds.
        recorders: One per environment, or None.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        arrays: GroupArrays,
        observation_space: Space,
        options: GroupOptions,
        clock: Callable[[], float],
        recorders: list[Recorder] | None = None,
    ) -> None:
        self._make = make
        self._arrays = arrays
        self._space = observation_space
        self._options = options
        self._clock = clock
        self._recorders = recorders
        count = len(options.seeds)
        self._envs: list[Environment | None] = [None] * count
        self._built_at = [0.0] * count
        self._step_counts = [0] * count
        self._episode_counts = [0] * count
        self._last_seeds: list[int | None] = [None] * count
        self.notes = Notes()

    def adopt(self, index: int, env: Environment) -> None:
        """Use an environment that has been made already, and has not been reset."""
        self._envs[index] = env
        self._built_at[index] = self._clock()

    def start(self) -> None:
        """Make and reset every environment that is not there yet.

        Raises:
            EnvironmentFailedError: One could not be made or reset.
        """
        for index in range(len(self._envs)):
            self._begin_episode(index)
        self._arrays.enter(Phase.IDLE)

    def step(self) -> Notes:
        """Take one turn with every environment; an episode that ends is followed by the next.

        Returns:
            What happened besides.

        Raises:
            EnvironmentFailedError: An environment failed and could not be made again. The arrays
                tell what had been answered before.
        """
        self.notes = Notes()
        for index in range(len(self._envs)):
            self._step_one(index)
        self._arrays.enter(Phase.IDLE)
        return self.notes

    def close(self) -> None:
        """Close every environment; whatever one of them raises is not let through."""
        for index in range(len(self._envs)):
            if self._recorders is not None:
                self._recorders[index].discard()
            self._close_one(index)

    def _step_one(self, index: int) -> None:
        try:
            ended = self._answer(index)
        except EnvironmentFailedError as failure:
            self._abort(index, failure)
            return
        if not ended:
            return
        try:
            self._begin_episode(index)
        except EnvironmentFailedError as failure:
            # The episode that ended was answered in full; only the next one is late.
            self._note_failure(index, failure)
            self._rebuild(index)

    def _answer(self, index: int) -> bool:
        """Step one environment and write what it answered; returns whether the episode ended."""
        arrays, env = self._arrays, self._envs[index]
        assert env is not None
        action = _row(arrays.action, index)
        arrays.enter(Phase.STEPPING)
        try:
            obs, reward, terminated, truncated, info = env.step(_clipped(env.action_space, action))
            reward = float(reward)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.STEP_RAISED, repr(error)) from error
        if not np.isfinite(reward):
            raise EnvironmentFailedError(FailureKind.NOT_FINITE, f"reward is {reward}")
        self._step_counts[index] += 1
        limit = self._options.episode_steps_max
        truncated = bool(truncated) or (limit is not None and self._step_counts[index] >= limit)
        ended = bool(terminated) or truncated
        self._write(arrays.final_obs if ended else arrays.obs, index, obs)
        arrays.reward[index] = reward
        arrays.terminated[index] = terminated
        arrays.truncated[index] = truncated
        arrays.answer_count[index] += 1
        if not ended:
            arrays.first[index] = False
            arrays.obs_count[index] += 1
        self._record_step(index, obs, action, bool(terminated), truncated, info)
        return ended

    def _record_step(
        self, index: int, obs: Tree, action: Tree, terminated: bool, truncated: bool, info: Any
    ) -> None:
        env = self._envs[index]
        if self._recorders is None or env is None:
            return
        recorder = self._recorders[index]
        record = StepRecord(
            obs=obs,
            action=action,
            value=float(self._arrays.value[index]),
            reward=float(self._arrays.reward[index]),
            terminated=terminated,
            truncated=truncated,
            info=dict(info),
        )
        try:
            recorder.step(env, record)
            finished = recorder.end() if terminated or truncated else None
        except Exception as error:  # noqa: BLE001 - disks and codecs fail in many ways
            self._recording_failed(index, error)
            return
        if finished is not None:
            self.notes.episodes.append({"env": index, **finished})

    def _record_begin(self, index: int, env: Environment, obs: Tree, info: Any) -> None:
        if self._recorders is None:
            return
        try:
            self._recorders[index].begin(env, obs, dict(info), self._last_seeds[index])
        except Exception as error:  # noqa: BLE001 - disks and codecs fail in many ways
            self._recording_failed(index, error)

    def _recording_failed(self, index: int, error: Exception) -> None:
        """Give up the recording; the episode itself goes on, since its answers are out."""
        assert self._recorders is not None
        self._recorders[index].discard()
        self._note_failure(index, EnvironmentFailedError(FailureKind.RECORDING_FAILED, repr(error)))

    def _abort(self, index: int, failure: EnvironmentFailedError) -> None:
        self._note_failure(index, failure)
        if self._recorders is not None:
            self._recorders[index].discard()
        self._arrays.abort_count[index] += 1
        self._rebuild(index)

    def _note_failure(self, index: int, failure: EnvironmentFailedError) -> None:
        self.notes.failures.append(
            {"env": index, "kind": failure.kind.value, "detail": failure.detail}
        )

    def _rebuild(self, index: int) -> None:
        self._close_one(index)
        self._begin_episode(index)

    def _begin_episode(self, index: int) -> None:
        """Reset an environment, making it first where there is none or its time is over."""
        interval_s = self._options.rebuild_interval_s
        if interval_s > 0 and self._clock() - self._built_at[index] >= interval_s:
            self._close_one(index)
        env = self._envs[index]
        if env is None:
            self._arrays.enter(Phase.BUILDING)
            try:
                env = self._make()
            except Exception as error:
                raise EnvironmentFailedError(FailureKind.BUILD_RAISED, repr(error)) from error
            self.adopt(index, env)
        seed = self._seed(index)
        self._arrays.enter(Phase.RESETTING)
        try:
            obs, info = env.reset(seed=seed)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.RESET_RAISED, repr(error)) from error
        self._write(self._arrays.obs, index, obs)
        self._arrays.first[index] = True
        self._arrays.obs_count[index] += 1
        self._step_counts[index] = 0
        self._episode_counts[index] += 1
        task = info.get("task") if isinstance(info, dict) else None
        if isinstance(task, str) and task:
            self.notes.tasks.append({"env": index, "task": task[:64]})
        self._last_seeds[index] = seed
        self._record_begin(index, env, obs, info)

    def _seed(self, index: int) -> int | None:
        """Return the seed of the next episode; None lets the environment go on by itself."""
        count = self._episode_counts[index]
        if count == 0:
            return self._options.seeds[index]
        if not self._options.seed_each_episode:
            return None
        sequence = np.random.SeedSequence([self._options.seeds[index], count])
        return int(sequence.generate_state(1)[0] >> 1)

    def _write(self, arrays: Tree, index: int, obs: Tree) -> None:
        try:
            _write_checked(arrays, index, obs, self._space, "")
        except TreeMismatchError as error:
            raise EnvironmentFailedError(FailureKind.OBSERVATION_MISMATCH, str(error)) from error

    def _close_one(self, index: int) -> None:
        env, self._envs[index] = self._envs[index], None
        if env is None:
            return
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - an environment that is going may say anything
            self._note_failure(index, EnvironmentFailedError(FailureKind.CLOSE_RAISED, repr(error)))


def _write_checked(arrays: Tree, index: int, obs: Tree, space: Space, path: str) -> None:
    """Copy an observation into its row; strict about keys and shapes, lenient about float width."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, dict) or obs.keys() != arrays.keys():
            got = f"keys {sorted(obs)}" if isinstance(obs, dict) else type(obs).__name__
            raise TreeMismatchError(path, f"keys {sorted(arrays)}", got)
        for key, part in space.items():
            _write_checked(arrays[key], index, obs[key], part, f"{path}/{key}")
        return
    if isinstance(space, spaces.Tuple):
        if not isinstance(obs, list | tuple) or len(obs) != len(arrays):
            raise TreeMismatchError(path, f"{len(arrays)} items", type(obs).__name__)
        for position, part in enumerate(space.spaces):
            _write_checked(arrays[position], index, obs[position], part, f"{path}/{position}")
        return
    _write_leaf(arrays, index, np.asarray(obs), path)


def _write_leaf(array: NDArray[Any], index: int, leaf: NDArray[Any], path: str) -> None:
    if leaf.shape != array.shape[1:] or not np.can_cast(leaf.dtype, array.dtype, "same_kind"):
        wanted = f"{array.dtype}{list(array.shape[1:])}"
        raise TreeMismatchError(path, wanted, f"{leaf.dtype}{list(leaf.shape)}")
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        raise EnvironmentFailedError(
            FailureKind.NOT_FINITE, f"observation{path} holds NaN or infinity"
        )
    array[index] = leaf


def _row(arrays: Tree, index: int) -> Tree:
    """Copy one row out, so that an environment that changes its action changes only its own."""
    if isinstance(arrays, dict):
        return {key: _row(array, index) for key, array in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(_row(array, index) for array in arrays)
    row = arrays[index]
    return row.copy() if isinstance(row, np.ndarray) else row


def _clipped(space: Space, action: Tree) -> Tree:
    """Return what the environment is given: a copy, with boxes clipped to their bounds."""
    if isinstance(space, spaces.Box):
        return np.clip(action, space.low, space.high)
    if isinstance(space, spaces.Dict):
        return {key: _clipped(part, action[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_clipped(part, a) for part, a in zip(space.spaces, action, strict=True))
    return action.copy() if isinstance(action, np.ndarray) else action
