"""Fragments with every field in use, or with as few as may be, and their way into a store."""

from dataclasses import replace
from typing import Any

import numpy as np

from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentMetadata, FragmentReference, PayloadReference
from breadbox.payload import write_fragments
from breadbox.payload.fragments import FIELDS
from breadbox.stores import PayloadStore

STEPS = 8


def rich_fragment(index: int = 0, *, steps: int = STEPS, **changes: Any) -> Fragment:
    """A fragment with every field in use."""
    rng = np.random.default_rng(index)
    fragment = Fragment(
        worker_id="w",
        fragment_index=index,
        session_id="s",
        model_version_min=3,
        model_version_max=5,
        obs={
            "image": rng.integers(0, 256, (steps, 64, 64, 3), dtype=np.uint8),
            "more": [rng.random((steps, 3)), (np.array(["go"] * steps),)],
        },
        action=rng.integers(0, 4, steps),
        reward=rng.random(steps).astype(np.float32),
        terminated=rng.random(steps) < 0.5,
        truncated=rng.random(steps) < 0.5,
        first=rng.random(steps) < 0.5,
        episode_id=np.arange(steps),
        next_obs={
            "image": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
            "more": [rng.random(3), (np.array("go"),)],
        },
        in_state=(rng.random(4), [rng.random((2, 2)) < 0.5]),
        final_obs_step=np.array([2, 5], np.int32),
        final_obs={"image": rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)},
        log_prob=rng.random(steps).astype(np.float32),
        value=rng.random(steps).astype(np.float32),
        model_version=np.linspace(3, 5, steps).astype(np.int64),
        extras={"task": np.array(["dig"] * steps)},
        discontinuity=True,
    )
    return replace(fragment, **changes)


def plain_fragment(index: int = 0, **changes: Any) -> Fragment:
    """A fragment with only what every fragment has."""
    absent = dict.fromkeys(("final_obs_step", "final_obs", "log_prob", "value", "model_version"))
    return rich_fragment(index, **{**absent, "in_state": None, "extras": {}, **changes})


def reference_to(fragment: Fragment, payload: PayloadReference) -> FragmentReference:
    metadata = FragmentMetadata(
        worker_id=fragment.worker_id,
        fragment_index=fragment.fragment_index,
        session_id=fragment.session_id,
        model_version_min=fragment.model_version_min,
        model_version_max=fragment.model_version_max,
        payload=payload,
        step_count=fragment.step_count,
        discontinuity=fragment.discontinuity,
    )
    return FragmentReference(metadata, chunk_id=1, staleness_when_granted=0, use_count=1)


def stored(
    store: PayloadStore, *fragments: Fragment, codecs: Any = "raw"
) -> list[FragmentReference]:
    payloads = write_fragments(store, fragments, codecs=codecs)
    return [reference_to(*pair) for pair in zip(fragments, payloads, strict=True)]


def arrays_of(fragment: Fragment) -> dict[str, Any]:
    return {name: getattr(fragment, name) for name in FIELDS}
