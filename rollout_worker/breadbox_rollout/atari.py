"""Atari games in the usual form for learning: every fourth frame, grey, 84 by 84.

`--env breadbox_rollout.atari:make --env-options '{"game": "Pong"}'`. Frames are not stacked: a
recurrent policy has a memory, and a fragment would contain every frame four times.
"""

from typing import Any

import ale_py
import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZE = 84


class GreyFrames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Return the maximum of two raw frames (some sprites blink), made smaller by averaging."""

    def __init__(self, env: gymnasium.Env[Any, Any], frame_skip: int, noop_max: int) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
        self._frame_skip = frame_skip
        self._noop_max = noop_max

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start a game, and take no action for a random number of frames."""
        frame, info = self.env.reset(seed=seed, options=options)
        if self._noop_max > 0:
            for _ in range(int(self.env.unwrapped.np_random.integers(self._noop_max + 1))):
                frame, _, terminated, truncated, info = self.env.step(0)
                if terminated or truncated:
                    frame, info = self.env.reset()
        return _small(frame), info

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Repeat the action for some raw frames and add up their rewards."""
        reward_sum = 0.0
        frames: list[NDArray[np.uint8]] = []
        for _ in range(self._frame_skip):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            reward_sum += float(reward)
            if terminated or truncated:
                break
        shown = np.maximum(frames[-1], frames[-2]) if len(frames) > 1 else frames[-1]
        return _small(shown), reward_sum, bool(terminated), bool(truncated), info


def _small(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(frame).resize((SIZE, SIZE), Image.Resampling.BOX))


def make(
    game: str = "Pong",
    frame_skip: int = 4,
    noop_max: int = 30,
    repeat_action_probability: float = 0.0,
    render_mode: str | None = None,
) -> gymnasium.Env[Any, Any]:
    """Make a game.

    Args:
        game: Name as in "ALE/Pong-v5".
        frame_skip: Raw frames per step, at least 1.
        noop_max: Most raw frames without an action at the start of an episode.
        repeat_action_probability: Probability that a raw frame repeats the action before.
        render_mode: "rgb_array" to record the console's own picture.
    """
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(
        f"ALE/{game}-v5",
        obs_type="grayscale",
        frameskip=1,
        repeat_action_probability=repeat_action_probability,
        render_mode=render_mode,
        disable_env_checker=True,
    )
    return GreyFrames(env, frame_skip, noop_max)
