"""Check that torch has a device."""

from functools import cache
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox.model.types import Device


def check_device(device: Device | None) -> None:
    """Check that tensors can be on a device; a device that passed is not checked again.

    Args:
        device: The device, or None for numpy arrays.

    Raises:
        InvalidRequestError: It is not a device of this machine.
    """
    if device is None or device == "cpu":
        return
    if not isinstance(device, str) and not hasattr(device, "type"):
        raise _invalid(device, "that is neither a text nor a torch.device")
    place: Any = device  # Torch's own annotation names its class, not what that is like.
    _try(place)


@cache
def _try(device: Any) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    # Torch without CUDA asserts, and says with a RuntimeError all that is wrong with a name.
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise _invalid(device, str(error).partition("\n")[0]) from error


def _invalid(device: object, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        "device",
        "must be None (numpy arrays), 'cpu', or a device that torch has on this machine, such as "
        f"'cuda' or 'cuda:1'; got {str(device)!r}: {why}",
    )
