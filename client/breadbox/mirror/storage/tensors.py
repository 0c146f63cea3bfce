"""Leaves of samples as torch tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from breadbox.model.errors import UnsupportedArrayError
from breadbox.model.types import Device
from breadbox.reading.devices import check_device


def tensor_of(leaf: Any, device: Device) -> Any:
    """A leaf as a tensor on a device; on the CPU it shares the leaf's memory.

    Raises:
        UnsupportedArrayError: torch has no type for it, such as for text.
        InvalidRequestError: There is no such device.
    """
    import torch

    check_device(device)

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


def leaf_for(device: Device | None) -> Callable[[Any], Any]:
    """What makes a leaf of an array: itself without a device, else a tensor there."""
    return itself if device is None else partial(tensor_of, device=device)


def itself(array: Any) -> Any:
    """The array."""
    return array
