"""Leaves of samples as torch tensors."""

from typing import Any

import numpy as np

from breadbox.errors import UnsupportedArrayError
from breadbox.types import Device


def tensor_of(leaf: Any, device: Device) -> Any:
    """A leaf as a tensor on a device; on the CPU it shares the leaf's memory.

    Raises:
        UnsupportedArrayError: torch has no type for it, such as for text.
    """
    import torch

    if isinstance(leaf, np.ndarray):
        try:
            leaf = torch.from_numpy(leaf)
        except TypeError:
            raise UnsupportedArrayError(
                "", f"torch has no type for {leaf.dtype}; sample without a device"
            ) from None
    if device == "cpu":
        return leaf
    place: Any = device  # Torch's own annotation names its class, not what that is like.
    return leaf.to(place, non_blocking=True)
