"""Fragments as MineStudio's workers make them."""

from typing import Any

import numpy as np
import torch

from breadbox_adapters.minestudio import FragmentMetadata, SampleFragment

STEP_COUNT = 6
CONFIG = {
    "max_chunks": 64,
    "max_staleness": 2,
    "max_reuse": 2,
    "fragments_per_chunk": 2,
    "fragments_per_report": 40,
    "database_config": {"path": "output/cache", "num_shards": 8},
}


def sample_fragment(fid: int = 0, worker: str = "env-0") -> SampleFragment:
    """A fragment as MineStudio's VPT workers make it."""
    rng = np.random.default_rng(fid)
    return SampleFragment(
        obs={
            "image": rng.integers(0, 256, (STEP_COUNT, 8, 8, 3), np.uint8),
            "task": ["shoot"] * STEP_COUNT,
        },
        action={
            "buttons": rng.integers(0, 8641, (STEP_COUNT, 1), np.int64),
            "camera": rng.integers(0, 121, (STEP_COUNT, 1), np.int64),
        },
        next_done=np.array([False, True, False, False, False, False]),
        reward=rng.random(STEP_COUNT).astype(np.float32),
        first=np.array([False, False, True, False, False, False]),
        in_state=[
            rng.random((1, 1, 4)) > 0.5,
            rng.random((1, 4, 3)).astype(np.float32),
            np.full((1, 4, 3), fid, np.float32),
        ],
        worker_uuid=worker,
        fid_in_worker=fid,
        next_obs={"image": rng.integers(0, 256, (8, 8, 3), np.uint8), "task": "shoot"},
        episode_uuids=["one", "one", "two", "two", "two", "two"],
    )


def metadata_of(sample: SampleFragment, version: int = 1, session: str = "run") -> FragmentMetadata:
    return FragmentMetadata(version, session, sample.worker_uuid, sample.fid_in_worker)


def alike(first: Any, second: Any) -> bool:
    """Equal in type, dtype, shape and value, through trees."""
    if type(first) is not type(second):
        return False
    match first:
        case np.ndarray() if first.dtype.kind == "O":
            return first.shape == second.shape and alike(list(first.flat), list(second.flat))
        case np.ndarray():
            return first.dtype == second.dtype and np.array_equal(first, second)
        case torch.Tensor():
            return first.dtype == second.dtype and torch.equal(first, second)
        case dict():
            return alike(list(first), list(second)) and all(
                alike(first[key], second[key]) for key in first
            )
        case list() | tuple():
            return len(first) == len(second) and all(
                alike(one, other) for one, other in zip(first, second, strict=True)
            )
        case SampleFragment():
            return alike(vars(first), vars(second))
        case _:
            return bool(first == second)
