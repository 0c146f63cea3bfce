"""Vector environments: several in one object, which resets those that have ended by itself.

The autoreset mode determines what a step returns for a row at the end of its episode:

    mode        this step returns    the next episode begins
    NEXT_STEP   final observation    the next step ignores the row's action and resets it: the row
                                     does not act in that round
    SAME_STEP   first observation    with this step; the final one is in info["final_obs"]
    DISABLED    final observation    by reset(options={"reset_mask": ...}), which follows directly
"""

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model.fragment import Tree
from breadbox.model.trees import row as tree_row
from breadbox.writing.clipping import clipped
from breadbox_rollout.environments.arrays import GroupArrays, write_checked
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind, RoundNotes
from breadbox_rollout.environments.space_codec import Space
from breadbox_rollout.environments.units import Unit

_EVERY_ROW = slice(None)


class AutoresetMode(Enum):
    """Gymnasium's modes, which it has since 1.1."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"


def is_vector(env: object) -> bool:
    """Return True for a vector environment, by its attributes: not all are subclasses."""
    return hasattr(env, "num_envs") and hasattr(env, "single_observation_space")


class VectorUnit(Unit):
    """A vector environment of N environments, with all N rows of the arrays."""

    can_begin_anew = False

    def __init__(self, env: Any, arrays: GroupArrays, *, is_seeded: bool) -> None:
        self._env = env
        self._arrays = arrays
        self._is_seeded = is_seeded
        self._count = len(arrays.first)
        self._action_space: Space = env.single_action_space
        self._mode = _autoreset_mode(env)
        self._begun = False
        if env.num_envs != self._count:
            raise EnvironmentFailedError(
                FailureKind.BUILD_RAISED,
                f"the vector environment has {env.num_envs} environments inside, not "
                f"{self._count}: give its factory an argument num_envs, or say "
                f"--envs-per-process {env.num_envs}",
            )

    def begin(self, seed: int | None, notes: RoundNotes) -> None:
        arrays = self._arrays
        options: dict[str, Any] = {}
        rows: NDArray[np.bool_] = ~arrays.acts if self._begun else np.ones(self._count, np.bool_)
        if self._begun:
            options["options"] = {"reset_mask": rows.copy()}
        elif seed is not None and not self._is_seeded:
            options["seed"] = seed  # Environment i gets seed + i, by Gymnasium's convention.
        try:
            obs, _ = self._env.reset(**options)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.RESET_RAISED, repr(error)) from error
        write_checked(arrays.obs, rows, obs)
        self._show(rows, rows)
        arrays.acts[:] = True
        self._begun = True

    def answer(self, notes: RoundNotes) -> bool:
        acts = self._arrays.acts
        self._step()
        if self._mode is AutoresetMode.DISABLED:
            return not acts.all()
        if not acts.any():
            self._step()  # Every row is reset next, so the policy has nothing to decide.
        return False

    def _step(self) -> None:
        arrays, acted = self._arrays, self._arrays.acts.copy()
        try:
            obs, reward, terminated, truncated, info = self._env.step(
                clipped(self._action_space, arrays.action)
            )
            reward = np.asarray(reward, np.float64).reshape(self._count)
            terminated = np.asarray(terminated, np.bool_).reshape(self._count)
            truncated = np.asarray(truncated, np.bool_).reshape(self._count)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.STEP_RAISED, repr(error)) from error
        if not np.isfinite(reward[acted]).all():
            raise EnvironmentFailedError(FailureKind.NOT_FINITE, f"rewards are {reward[:8]}")
        ended = acted & (terminated | truncated)
        first = ~acted
        if self._mode is AutoresetMode.SAME_STEP:
            self._write_final(ended, info)
            first = ended
            write_checked(arrays.obs, _EVERY_ROW, obs)
        elif not ended.any():
            write_checked(arrays.obs, _EVERY_ROW, obs)
        else:
            write_checked(arrays.final_obs, ended, obs)
            write_checked(arrays.obs, ~ended, obs)
        # No array is written before everything is checked.
        arrays.reward[acted] = reward[acted]
        arrays.terminated[acted] = terminated[acted]
        arrays.truncated[acted] = truncated[acted]
        arrays.answer_count[acted] += 1
        if self._mode is AutoresetMode.SAME_STEP:
            self._show(_EVERY_ROW, first)
        else:
            self._show(~ended, first)
            arrays.acts[:] = ~ended

    def _show(self, rows: slice | NDArray[np.bool_], first: NDArray[np.bool_]) -> None:
        self._arrays.first[rows] = first[rows]
        self._arrays.obs_count[rows] += 1

    def _write_final(self, ended: NDArray[np.bool_], info: Any) -> None:
        """Copy final observations from the info of a step that has already reset its rows."""
        if not ended.any():
            return
        finals = info.get("final_obs", info.get("final_observation"))
        if finals is None:
            raise EnvironmentFailedError(
                FailureKind.OBSERVATION_MISMATCH,
                "the vector environment resets in the same step and its info has no final_obs",
            )
        for row in np.flatnonzero(ended).tolist():
            write_checked(self._arrays.final_obs, row, _of_row(finals, row))

    def abort(self) -> None:
        self._arrays.abort_count[self._arrays.acts] += 1

    def close(self) -> None:
        self._env.close()


def _of_row(finals: Any, row: int) -> Tree:
    """Return the final observation of a row: finals are an array of trees, or a tree of arrays."""
    return tree_row(finals, row) if isinstance(finals, dict | tuple) else finals[row]


def _autoreset_mode(env: Any) -> AutoresetMode:
    said = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    try:
        return AutoresetMode(getattr(said, "value", said))
    except ValueError as error:
        raise EnvironmentFailedError(
            FailureKind.BUILD_RAISED,
            'the vector environment does not say how it resets: metadata["autoreset_mode"] is '
            f"{said!r}, not one of gymnasium.vector.AutoresetMode",
        ) from error
