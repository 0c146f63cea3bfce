"""Array types, as numpy's dtype strings ("<f4"); "bfloat16" is 16 bits, read as a torch tensor."""

import re
import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, UnsupportedArrayError
from breadbox.model.trees import plain_array

BFLOAT16: Final = "bfloat16"

_NAME = re.compile(
    r"[<>|][?biufcSUV][0-9]{1,9}"
    r"|[<>][mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)


def stored_array(path: str, leaf: Any) -> tuple[NDArray[Any], str]:
    """Return a leaf as an array of its stored type, and that type's name; copy if needed."""
    if is_tensor(leaf):
        return _stored_tensor(path, leaf)
    if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        raise UnsupportedArrayError(path, f"{type(leaf).__name__} is not an array")
    array = plain_array(leaf, path)
    if array.dtype.kind == "V" and array.dtype.name == BFLOAT16:  # From the package ml_dtypes.
        return array.view(np.uint16), BFLOAT16
    if array.dtype.hasobject:
        raise UnsupportedArrayError(
            path, f"{array.dtype} arrays hold Python objects{_remedy(array)}"
        )
    if array.dtype.names is not None:
        raise UnsupportedArrayError(path, "a structured array; store its fields as a dict")
    name = array.dtype.str
    if not _NAME.fullmatch(name) or np.dtype(name) != array.dtype:
        raise UnsupportedArrayError(path, f"dtype {array.dtype} cannot be stored")
    return array, name


def _remedy(array: NDArray[Any]) -> str:
    held = next(iter(array.flat), None) if array.dtype == object else None
    if isinstance(held, dict):
        return "; of dicts, stack per key: {'key': array[T, ...], ...}"
    if isinstance(held, (np.ndarray, list, tuple)):
        return "; arrays of different shapes cannot be stacked: pad them to one shape"
    return ""


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the stored type that a header names."""
    if name == BFLOAT16:
        return np.dtype("<u2")
    try:
        # The pattern comes first: numpy's own parser knows objects, structures and more.
        if _NAME.fullmatch(name):
            dtype = np.dtype(name)
            if dtype.str == name and dtype.itemsize > 0:
                return dtype
    except (TypeError, ValueError):
        pass
    raise PayloadCorruptError(f"array type {name[:40]!r} is not one of the payload format")


def as_leaf(array: NDArray[Any], name: str) -> Any:
    """Return a stored array as users see it; of bfloat16, as a torch tensor of its memory."""
    if name != BFLOAT16:
        return array
    try:
        import torch
    except ImportError:
        raise UnsupportedArrayError("", "bfloat16 arrays need torch to be read") from None
    if not array.flags.writeable:
        array = array.copy()  # torch has no read-only tensors.
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def as_numpy(leaf: Any) -> NDArray[Any]:
    """Return a leaf of a fragment as a numpy array; of bfloat16, widened to float32."""
    return leaf.float().numpy() if is_tensor(leaf) else np.asarray(leaf)


def byte_view(array: NDArray[Any]) -> memoryview:
    """Return the memory of a C-contiguous array as bytes."""
    if array.ndim and array.size and array.dtype.kind in "uif" and array.dtype.isnative:
        return array.data.cast("B")  # Cheaper, where buffers know the type.
    if array.nbytes == 0:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data


def is_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a torch tensor, without importing torch."""
    # While another thread imports torch, the module is there, and Tensor is not; nor is any tensor.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(leaf, tensor)


def _stored_tensor(path: str, tensor: Any) -> tuple[NDArray[Any], str]:
    import torch

    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.uint16), BFLOAT16
        array = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise UnsupportedArrayError(
            path, f"a torch tensor of {tensor.dtype}, {tensor.layout} cannot be stored"
        ) from error
    return array, array.dtype.str
