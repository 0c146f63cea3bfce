"""Torch devices: check them, and copy to one, on CUDA concurrently with computation."""

import threading
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any

import numpy as np

from breadbox.model.errors import InvalidRequestError, UnsupportedArrayError
from breadbox.model.trees import flatten
from breadbox.model.types import Device


def check_device(device: Device | None) -> None:
    """Check that tensors can be on a device; a device that passed is not checked again."""
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


def tensor_of(leaf: Any, device: Device) -> Any:
    """Return a leaf as a tensor on a device; on the CPU it shares the leaf's memory."""
    import torch

    check_device(device)
    if isinstance(leaf, np.ndarray):
        try:
            leaf = torch.from_numpy(leaf)
        except TypeError:
            raise UnsupportedArrayError(
                "", f"torch has no type for {leaf.dtype}; leave the device out"
            ) from None
    if device == "cpu":
        return leaf.cpu()
    place: Any = device  # Torch's own annotation names its class, not what that is like.
    return leaf.to(place, non_blocking=True)


def side_stream_for(device: Any) -> "SideStream | None":
    """Return a stream for batches on *device*, or None if that is not a CUDA device."""
    return SideStream(device) if str(device).partition(":")[0] == "cuda" else None


class SideStream:
    """A CUDA stream to make batches on, current within the `with` block. Thread-safe."""

    def __init__(self, device: Any) -> None:
        self._torch: Any = import_module("torch")
        self._stream = self._torch.cuda.Stream(device)
        self._entered = threading.local()

    def __enter__(self) -> None:
        context = self._torch.cuda.stream(self._stream)
        context.__enter__()
        self._entered.context = context

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.context.__exit__(kind, error, trace)

    def hand_over(self, batch: Any) -> None:
        """Make *batch* ready for use on the caller's current stream."""
        current = self._torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        fields = getattr(batch, "__dataclass_fields__", None)
        tree = batch if fields is None else [getattr(batch, name) for name in fields]
        for tensor in _tensors(self._torch, tree):
            # Or the allocator could give the memory to the next copy while it is still read.
            tensor.record_stream(current)


def _tensors(torch: Any, tree: Any) -> list[Any]:
    _, leaves = flatten(tree)
    return [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
