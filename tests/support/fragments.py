"""Small fragments for tests."""

from dataclasses import replace
from typing import Any

import numpy as np

from breadbox.model.fragment import Fragment


def large_fragment(fragment_index: int = 0, **fields: Any) -> Fragment:
    """As `vector_fragment`, and too large to ride along with a call: it goes to the store."""
    fragment = vector_fragment(fragment_index, **fields)
    return replace(fragment, obs=np.full((fragment.step_count, 4200), fragment_index, "<f4"))


def vector_fragment(
    fragment_index: int = 0,
    *,
    worker_id: str = "w0",
    session_id: str = "s",
    model_version: int = 0,
    step_count: int = 4,
) -> Fragment:
    """A fragment whose observations all hold its index."""
    flags = np.zeros(step_count, dtype=np.bool_)
    return Fragment(
        worker_id=worker_id,
        fragment_index=fragment_index,
        session_id=session_id,
        model_version_min=model_version,
        model_version_max=model_version,
        obs=np.full((step_count, 3), fragment_index, np.float32),
        action=np.zeros(step_count, np.int64),
        reward=np.ones(step_count, np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
        episode_id=np.zeros(step_count, np.int64),
        next_obs=np.zeros(3, np.float32),
    )
