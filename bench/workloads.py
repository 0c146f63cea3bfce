"""The reference workloads: one fragment of each, made once, with random contents."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from breadbox.model.fragment import Fragment
from breadbox.payload import encode_fragment

SESSION_ID = "bench"


def vpt_fragment() -> Fragment:
    """Make 256 steps of 128x128 RGB frames, with 8 MiB of recurrent state in 12 arrays."""
    rng = np.random.default_rng(0)
    steps = 256
    state: list[np.ndarray] = []
    for _ in range(4):
        state.append(rng.random((2, 128, 1024), dtype=np.float32))
        state.append(rng.random((2, 128, 1024), dtype=np.float32))
        state.append(np.zeros((1, 128), dtype=np.bool_))
    frames = rng.integers(0, 256, (steps, 128, 128, 3), dtype=np.uint8)
    return _fragment(
        steps,
        obs={"image": frames},
        action={
            "buttons": np.zeros((steps, 1), np.int64),
            "camera": np.zeros((steps, 1), np.int64),
        },
        next_obs={"image": frames[0]},
        in_state=state,
    )


def atari_fragment() -> Fragment:
    """Make 128 steps of 84x84 grey frames."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (128, 84, 84), dtype=np.uint8)
    return _fragment(128, obs=frames, action=np.zeros(128, np.int64), next_obs=frames[0])


def vector_fragment() -> Fragment:
    """Make 32 steps of 4 numbers."""
    rng = np.random.default_rng(0)
    numbers = rng.random((32, 4), dtype=np.float32)
    return _fragment(32, obs=numbers, action=np.zeros(32, np.int8), next_obs=numbers[0])


WORKLOADS: dict[str, Callable[[], Fragment]] = {
    "vpt": vpt_fragment,
    "atari": atari_fragment,
    "vector": vector_fragment,
}


def payload_bytes(fragment: Fragment) -> int:
    """Bytes of the fragment's payload."""
    return sum(len(buffer) for buffer in encode_fragment(fragment))


def numbered(fragment: Fragment, worker_id: str) -> Iterator[Fragment]:
    """The same fragment over and over, as successive ones of one worker."""
    index = 0
    while True:
        yield replace(fragment, worker_id=worker_id, fragment_index=index)
        index += 1


def _fragment(steps: int, **fields: Any) -> Fragment:
    flags = np.zeros(steps, np.bool_)
    return Fragment(
        worker_id="bench",
        fragment_index=0,
        session_id=SESSION_ID,
        model_version_min=0,
        model_version_max=0,
        reward=np.zeros(steps, np.float32),
        terminated=flags,
        truncated=flags.copy(),
        first=flags.copy(),
        episode_id=np.zeros(steps, np.int64),
        **fields,
    )
