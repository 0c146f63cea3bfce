"""Environments of several agents that act at the same time, like PettingZoo's parallel ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from breadbox.writing.clipping import clipped
from breadbox_rollout.environments.arrays import GroupArrays, row_of, write_checked
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind, RoundNotes
from breadbox_rollout.environments.space_codec import Space
from breadbox_rollout.environments.units import Unit


def is_parallel(env: object) -> bool:
    """Return True for an environment of several agents that act at the same time."""
    return hasattr(env, "possible_agents") and not hasattr(env, "agent_selection")


@dataclass(frozen=True, slots=True)
class Seat:
    """The row of the arrays for an agent's steps, and its action space."""

    arrays: GroupArrays
    row: int
    actions: Space


class ParallelUnit(Unit):
    """An environment of several agents: a row each, idle from its agent's end to the reset."""

    def __init__(self, env: Any, seats: Mapping[str, Seat], steps_max: int | None) -> None:
        self._env = env
        self._seats = seats
        self._steps_max = steps_max
        self._step_count = 0

    def begin(self, seed: int | None, notes: RoundNotes) -> None:
        try:
            obs, _ = self._env.reset(seed=seed)
            agents = list(self._env.agents)
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.RESET_RAISED, repr(error)) from error
        if not agents:
            raise EnvironmentFailedError(FailureKind.RESET_RAISED, "no agent takes part")
        self._step_count = 0
        for agent in agents:
            seat = self._seat(agent)
            write_checked(seat.arrays.obs, seat.row, self._of(agent, obs))
        for agent in agents:
            self._show(self._seat(agent), first=True)

    def answer(self, notes: RoundNotes) -> bool:
        acting = {agent: seat for agent, seat in self._seats.items() if seat.arrays.acts[seat.row]}
        actions = {
            agent: clipped(seat.actions, row_of(seat.arrays.action, seat.row))
            for agent, seat in acting.items()
        }
        try:
            obs, rewards, terminated, truncated, _ = self._env.step(actions)
            agents = set(self._env.agents)
            rewards = {agent: float(rewards[agent]) for agent in acting}
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.STEP_RAISED, repr(error)) from error
        if not all(np.isfinite(reward) for reward in rewards.values()):
            raise EnvironmentFailedError(FailureKind.NOT_FINITE, f"rewards are {rewards}")
        self._step_count += 1
        cut_off = self._steps_max is not None and self._step_count >= self._steps_max
        over = {agent: bool(terminated.get(agent, False)) for agent in acting}
        # An agent that leaves without an end flag is truncated, not terminated.
        cut = {
            agent: bool(truncated.get(agent, False))
            or (cut_off and not over[agent])
            or (agent not in agents and not over[agent])
            for agent in acting
        }
        for agent, seat in acting.items():
            into = seat.arrays.final_obs if over[agent] or cut[agent] else seat.arrays.obs
            write_checked(into, seat.row, self._of(agent, obs))
        joining = [] if cut_off else sorted(agents - acting.keys())
        for agent in joining:
            seat = self._seat(agent)
            write_checked(seat.arrays.obs, seat.row, self._of(agent, obs))
        # No array is written before everything is checked.
        for agent, seat in acting.items():
            arrays, row = seat.arrays, seat.row
            arrays.reward[row] = rewards[agent]
            arrays.terminated[row], arrays.truncated[row] = over[agent], cut[agent]
            arrays.answer_count[row] += 1
            if over[agent] or cut[agent]:
                arrays.acts[row] = False
            else:
                self._show(seat, first=False)
        for agent in joining:
            self._show(self._seat(agent), first=True)
        return not any(seat.arrays.acts[seat.row] for seat in self._seats.values())

    def _show(self, seat: Seat, *, first: bool) -> None:
        seat.arrays.first[seat.row] = first
        seat.arrays.acts[seat.row] = True
        seat.arrays.obs_count[seat.row] += 1

    def _seat(self, agent: str) -> Seat:
        try:
            return self._seats[agent]
        except KeyError:
            raise EnvironmentFailedError(
                FailureKind.OBSERVATION_MISMATCH, f"{agent!r} is not among the possible agents"
            ) from None

    def _of(self, agent: str, obs: Mapping[str, Any]) -> Any:
        try:
            return obs[agent]
        except (KeyError, TypeError):
            raise EnvironmentFailedError(
                FailureKind.OBSERVATION_MISMATCH, f"nothing is observed by {agent!r}"
            ) from None

    def abort(self) -> None:
        for seat in self._seats.values():
            if seat.arrays.acts[seat.row]:
                seat.arrays.abort_count[seat.row] += 1
                seat.arrays.acts[seat.row] = False

    def close(self) -> None:
        self._env.close()
