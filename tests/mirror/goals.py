"""Episodes of a worker that has goals: its position is a number that grows by one each step."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from breadbox.model.fragment import Fragment
from support.fragments import vector_fragment

EPISODE_STEPS = 7
GOAL = 1000.0


def goal_fragments(count: int, *, step_count: int = 5) -> Iterator[Fragment]:
    """Fragments of episodes of seven steps. Step number n of the worker begins at position n."""
    for index in range(count):
        numbers = np.arange(index * step_count, (index + 1) * step_count)
        ended = numbers % EPISODE_STEPS == EPISODE_STEPS - 1
        finals = np.flatnonzero(ended)
        yield replace(
            vector_fragment(index, step_count=step_count),
            obs=observation(numbers),
            next_obs={name: leaf[0] for name, leaf in observation(numbers[-1:] + 1).items()},
            truncated=ended,
            first=numbers % EPISODE_STEPS == 0,
            episode_id=numbers // EPISODE_STEPS,
            final_obs_step=finals.astype(np.int32) if len(finals) else None,
            final_obs=observation(numbers[finals] + 1) if len(finals) else None,
            reward=np.full(step_count, -1, np.float32),
        )


def observation(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """What the worker sees at some positions."""
    position = numbers[:, None].astype(np.float32)
    return {
        "observation": np.repeat(position, 3, axis=1),
        "achieved_goal": position,
        "desired_goal": np.full_like(position, GOAL),
    }
