"""An environment of several agents that follow scripts, in the form of PettingZoo's parallel ones.

Observations and rewards are those of `scripted_env`, per agent, so that `check_fragment` holds of
every agent's fragments. A letter is read per agent and step: "t", "c", "." and "!" as there, "v"
(vanishes without a word). An agent that has ended waits until all have; scripts go on where they
were.
"""

import itertools
import os
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE

BLUE_ACTIONS = spaces.Discrete(2)


class Episodes:
    """Numbers that no other episode has, over all processes."""

    counter: ClassVar[Any] = itertools.count(1)


class ScriptedParallelEnv:
    """See the module. Agents whose names begin with "blue" have fewer actions."""

    metadata: ClassVar[dict[str, Any]] = {"name": "scripted"}
    render_mode = None

    def __init__(self, scripts: dict[str, str], late: list[str] | None = None) -> None:
        self.possible_agents = list(scripts)
        self.agents: list[str] = []
        self._scripts = {agent: itertools.cycle(script) for agent, script in scripts.items()}
        self._late = late or []
        self._times: dict[str, tuple[int, int]] = {}
        self._steps = 0

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION_SPACE

    def action_space(self, agent: str) -> Any:
        return BLUE_ACTIONS if agent.startswith("blue") else ACTION_SPACE

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = [agent for agent in self.possible_agents if agent not in self._late]
        self._steps = 0
        self._times = {agent: (self._new_episode(), 0) for agent in self.agents}
        return {agent: self._observe(agent) for agent in self.agents}, {}

    def _new_episode(self) -> int:
        return os.getpid() * 1_000_000 + next(Episodes.counter)

    def step(self, actions: dict[str, Any]) -> Any:
        assert sorted(actions) == sorted(self.agents), (actions, self.agents)
        letters = {agent: next(self._scripts[agent]) for agent in self.agents}
        if "!" in letters.values():
            raise RuntimeError("no step today")
        self._steps += 1
        rewards = {
            agent: self._times[agent][1] + float(action) / 10 for agent, action in actions.items()
        }
        for agent in self.agents:
            episode, time = self._times[agent]
            self._times[agent] = (episode, time + 1)
        seen = {agent: self._observe(agent) for agent in self.agents}
        over = {agent: letter == "t" for agent, letter in letters.items()}
        cut = {agent: letter == "c" for agent, letter in letters.items()}
        self.agents = [agent for agent in self.agents if letters[agent] == "."]
        if self._steps == 2:
            for agent in self._late:
                self.agents.append(agent)
                self._times[agent] = (self._new_episode(), 0)
                seen[agent] = self._observe(agent)
        return seen, rewards, over, cut, {}

    def close(self) -> None:
        pass

    def _observe(self, agent: str) -> Any:
        episode, time = self._times[agent]
        return {
            "clock": np.array([episode, time], np.int64),
            "level": np.array([time / 2], np.float32),
        }


def make(scripts: dict[str, str], late: list[str] | None = None) -> ScriptedParallelEnv:
    """The factory that tests name."""
    return ScriptedParallelEnv(scripts, late)


class TurnBased:
    """Agents that act in turn, which the worker does not take."""

    possible_agents: ClassVar[list[str]] = ["a", "b"]
    agent_selection = "a"


def make_turn_based() -> TurnBased:
    return TurnBased()
