"""Sequences for tests: of any length, with arrays of several types and ranks."""

from typing import Any

import numpy as np

import breadbox


def sequence(
    group: str = "prompt", member: int = 0, length: int = 3, seed: int = 0, **more: Any
) -> breadbox.Sequence:
    """Make a sequence whose arrays depend on seed, length and member."""
    rng = np.random.default_rng((seed, length, member))
    more.setdefault(
        "tokens",
        {
            "ids": rng.integers(0, 50_000, length, dtype=np.int32),
            "log_prob": rng.normal(size=length).astype(np.float32),
            "mask": rng.random(length) < 0.5,
        },
    )
    more.setdefault("context", {"prompt": rng.integers(0, 9, 2 + length % 3)})
    more.setdefault("numbers", {"reward": float(member), "correct": member % 2 == 0})
    more.setdefault("model_version_min", 0)
    more.setdefault("model_version_max", more["model_version_min"])
    return breadbox.Sequence(group=group, member=member, **more)


def same_sequence(first: breadbox.Sequence, second: breadbox.Sequence) -> bool:
    """Return whether two sequences are equal, types and shapes of their arrays included."""
    fields = ("group", "member", "numbers", "model_version_min", "model_version_max")
    return all(getattr(first, name) == getattr(second, name) for name in fields) and all(
        {name: _described(leaf) for name, leaf in getattr(first, field).items()}
        == {name: _described(leaf) for name, leaf in getattr(second, field).items()}
        for field in ("tokens", "context")
    )


def _described(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, np.ndarray) and str(leaf.dtype) != "torch.bfloat16":
        leaf = leaf.numpy()
    elements = leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf.tolist())
    return str(leaf.dtype), tuple(leaf.shape), elements
