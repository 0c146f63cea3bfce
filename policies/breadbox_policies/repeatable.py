"""Runs that can be repeated to the bit: a worker and a learner in turns, with `--deterministic`."""

import os

import torch

from breadbox.model.errors import ReplayBufferError


class NotRepeatableError(ReplayBufferError):
    """Something happened that a second run of the same seeds would not repeat."""


def compute_repeatably() -> None:
    """Have torch return equal bits for equal numbers; call it before the first product."""
    # Otherwise MKL's products depend on where arrays lie in memory, and cuBLAS's on streams.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
