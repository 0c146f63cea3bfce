"""Clip actions to what an environment accepts. Importing it imports gymnasium, and not torch."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from breadbox.model.fragment import Tree


def clipped(space: "gymnasium.Space[Any]", action: Tree) -> Tree:
    """Return a copy of an action, of one or several environments, boxes clipped to their bounds."""
    if isinstance(space, spaces.Box):
        return np.asarray(np.clip(action, space.low, space.high))
    if isinstance(space, spaces.Dict):
        return {key: clipped(part, action[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(clipped(part, a) for part, a in zip(space.spaces, action, strict=True))
    return action.copy() if isinstance(action, np.ndarray) else action
