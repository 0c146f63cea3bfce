"""CartPole-v1 without its velocities: only a policy with a memory can balance the pole."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

POSITIONS = [0, 2]
"""Cart position and pole angle; what is left out are their velocities."""


class HiddenVelocities(gymnasium.ObservationWrapper[NDArray[np.float32], Any, Any]):
    """Shows the positions alone, scaled so that an episode ends where one leaves -1 to 1."""

    def __init__(self, env: "gymnasium.Env[Any, Any]") -> None:
        super().__init__(env)
        whole = env.observation_space
        assert isinstance(whole, gymnasium.spaces.Box)
        # CartPole's own bounds are twice the limits at which an episode ends.
        self._limits = whole.high[POSITIONS] / 2
        self.observation_space = gymnasium.spaces.Box(-2.0, 2.0, (len(POSITIONS),), np.float32)

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Leave out the velocities."""
        return (observation[POSITIONS] / self._limits).astype(np.float32)


def make() -> "gymnasium.Env[Any, Any]":
    """Make one, for `--env bench.hidden_cartpole:make`."""
    return HiddenVelocities(gymnasium.make("CartPole-v1"))
