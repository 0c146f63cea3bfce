"""Weights as payloads: one array of bytes that are a safetensors file, for any tool to read."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, UnsupportedArrayError
from breadbox.model.types import PayloadReference
from breadbox.payload.codecs import Codecs
from breadbox.payload.dtypes import BFLOAT16, as_leaf, parse_dtype, stored_array
from breadbox.payload.format import Head, encode_tree
from breadbox.payload.receive import Placement, receive
from breadbox.stores.base import PayloadStore

_ARRAY: Final = "safetensors"
_KIND: Final = "weights"

_STORED_NAMES: Final = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "BF16": BFLOAT16,
}


def encode_weights(weights: Mapping[str, Any]) -> bytes:
    """Return named arrays or tensors as the bytes of a safetensors file."""
    import safetensors.numpy

    arrays = {}
    for name, leaf in weights.items():
        array, type_name = stored_array(name, leaf)
        if type_name not in _STORED_NAMES.values():
            raise UnsupportedArrayError(name, f"safetensors has no type for {type_name}")
        arrays[name] = as_leaf(np.ascontiguousarray(array).reshape(array.shape), type_name)
    if all(isinstance(array, np.ndarray) for array in arrays.values()):
        return bytes(safetensors.numpy.save(arrays))
    import safetensors.torch
    import torch

    return bytes(
        safetensors.torch.save({name: torch.as_tensor(array) for name, array in arrays.items()})
    )


def decode_weights(raw: bytes) -> dict[str, Any]:
    """Return the arrays of a safetensors file; bfloat16 ones as torch tensors."""
    import safetensors

    try:
        entries: Any = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise PayloadCorruptError("the weights are not a safetensors file") from error
    weights = {}
    for name, entry in entries:
        if entry["dtype"] not in _STORED_NAMES:
            raise PayloadCorruptError(f"weights {name!r} are of unknown type {entry['dtype']!r}")
        type_name = _STORED_NAMES[entry["dtype"]]
        array = np.frombuffer(bytearray(entry["data"]), dtype=parse_dtype(type_name))
        weights[name] = as_leaf(array.reshape(entry["shape"]), type_name)
    return weights


def write_weights(
    store: PayloadStore, weights: Mapping[str, Any], *, codecs: Codecs = "raw"
) -> PayloadReference:
    """Write named arrays or torch tensors to a store, unannounced."""
    packed = np.frombuffer(encode_weights(weights), dtype=np.uint8)
    buffers = encode_tree({_ARRAY: packed}, attributes={"kind": _KIND}, codecs=codecs)
    return store.write_many([buffers])[0]


def read_weights(store: PayloadStore, reference: PayloadReference) -> dict[str, Any]:
    """Read weights: numpy arrays by name, torch tensors where they are bfloat16."""
    packed: list[NDArray[np.uint8]] = []

    def place(position: int, head: Head) -> list[Placement]:
        del position
        if head.layout.structure != {_ARRAY: 0} or head.layout.arrays[0].type_name != "|u1":
            raise PayloadCorruptError("the payload does not hold weights")
        packed[:] = [np.empty(head.layout.arrays[0].shape, dtype=np.uint8)]
        return [Placement(0, packed[0])]

    receive(store, [reference], place)
    return decode_weights(packed[0].tobytes())
