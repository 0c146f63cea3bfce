"""Environments whose observations say which actions are allowed; a forbidden one costs a point.

The mask differs at each step: often one action is allowed, and after the last step none is.
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from breadbox_policies import PolicyModule, make_policy

ACTIONS: dict[str, gymnasium.Space[Any]] = {
    "discrete": spaces.Discrete(5, start=2),
    "multi": spaces.MultiDiscrete([3, 2, 4]),
    "mixed": spaces.Dict(
        {"aim": spaces.Box(-1, 1, (2,), np.float32), "go": spaces.Discrete(4),
         "use": spaces.MultiBinary(2)}
    ),
}  # fmt: skip
COUNTS = {"discrete": [5], "multi": [3, 2, 4], "mixed": [4, 2, 2]}
"""Number of options of each independent choice."""


def choices_of(kind: str, action: Any) -> list[int]:
    """The index of each independent choice of an action."""
    if kind == "discrete":
        return [int(action) - 2]
    if kind == "multi":
        return [int(each) for each in action]
    return [int(action["go"]), *map(int, action["use"])]


def is_allowed(kind: str, mask: Any, action: Any) -> bool:
    """Whether the mask allows an action, by counting through it."""
    start = 0
    for count, choice in zip(COUNTS[kind], choices_of(kind, action), strict=True):
        if not mask[start + choice]:
            return False
        start += count
    return True


class Masked(gymnasium.Env[Any, Any]):
    """Episodes of six steps."""

    def __init__(self, kind: str = "discrete", blocks_at: int = -1) -> None:
        self.kind = kind
        self.blocks_at = blocks_at
        self.action_space = ACTIONS[kind]
        count = sum(COUNTS[kind])
        self.observation_space = spaces.Dict(
            {"legal": spaces.Box(0, 1, (count,), np.int8), "seen": spaces.Box(-1, 1, (3,))}
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        reward = 0.0 if is_allowed(self.kind, self.mask, action) else -1.0
        self.time += 1
        return self._look(), reward, self.time == 6, False, {}

    def _look(self) -> dict[str, Any]:
        parts = []
        for count in COUNTS[self.kind]:
            part = self.np_random.integers(0, 2, count).astype(np.int8)
            part[self.np_random.integers(count)] = 1
            if self.np_random.random() < 0.5:
                part[:] = 0
                part[self.np_random.integers(count)] = 1
            parts.append(part)
        self.mask = np.concatenate(parts)
        if self.time in (6, self.blocks_at):
            self.mask[:] = 0
        return {"legal": self.mask.copy(), "seen": self.np_random.random(3, np.float32)}


def make_vector(kind: str, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Several of them; the step after the last one of an episode only resets."""
    return gymnasium.vector.SyncVectorEnv([lambda: Masked(kind)] * num_envs)


def policy(observations: Any, actions: Any) -> PolicyModule:
    """A policy that minds the mask, far from uniform."""
    made: Any = make_policy("mlp", observations, actions, action_mask="legal")
    made.actor[-1].weight.data.mul_(1000)
    return made


def recurrent(observations: Any, actions: Any) -> PolicyModule:
    """The same with memory."""
    return make_policy("lstm", observations, actions, action_mask="legal")


class LateAgent:
    """Two agents in the form of PettingZoo's parallel ones; the second joins after three steps."""

    metadata: ClassVar[dict[str, Any]] = {"name": "late"}
    possible_agents: ClassVar[list[str]] = ["early", "late"]
    render_mode = None

    def __init__(self, kind: str) -> None:
        self._alone = {agent: Masked(kind) for agent in self.possible_agents}
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return self._alone[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self._alone[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["early"]
        return {"early": self._alone["early"].reset(seed=seed)[0]}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        steps = {agent: self._alone[agent].step(action) for agent, action in actions.items()}
        seen, rewards, over, cut, _ = (
            {agent: step[part] for agent, step in steps.items()} for part in range(5)
        )
        if self._alone["early"].time == 3:
            seen["late"] = self._alone["late"].reset()[0]
            self.agents.append("late")
        self.agents = [agent for agent in self.agents if not over.get(agent)]
        return seen, rewards, over, cut, {}

    def close(self) -> None:
        pass


class Team(LateAgent):
    """The same with a mask of its own kind for each agent; a forbidden step costs all a point."""

    def __init__(self, early: str, late: str) -> None:
        super().__init__(early)
        self._alone["late"] = Masked(late)

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, over, cut, infos = super().step(actions)
        return seen, dict.fromkeys(rewards, sum(rewards.values())), over, cut, infos
