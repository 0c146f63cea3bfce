"""Copy to a CUDA device on a stream of its own, concurrently with computation."""

import threading
from importlib import import_module
from types import TracebackType
from typing import Any

from breadbox.model.trees import flatten


def side_stream_for(device: Any) -> "SideStream | None":
    """Return a stream for batches on *device*, or None if that is not a CUDA device."""
    return SideStream(device) if str(device).partition(":")[0] == "cuda" else None


class SideStream:
    """A CUDA stream on which batches are made, for use on another stream. Thread-safe.

    As a context manager it makes itself the thread's current stream within the block.
    """

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
        """Make *batch* ready for use on the caller's current stream.

        Args:
            batch: A dataclass or tree with tensors, made on this stream.
        """
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
