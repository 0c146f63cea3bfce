"""Convert between Arrow columns and numpy trees, without a Python object per value."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding.images import (
    decode_frames,
    encode_frames,
    frames_bytes,
    is_frames,
    is_images,
)
from breadbox_offline.errors import OfflineDataError, placed
from breadbox_offline.limits import DataLimits, check_bytes

_EXTENSION_SHAPE = b"ARROW:extension:metadata"
_TUPLE_MARK = {b"breadbox:container": b"tuple"}
"""Metadata of a struct's first field, if the struct was a tuple; its fields are numbered."""
_EMPTY_MARK = b"breadbox:empty"
_EMPTY: dict[bytes, Tree] = {b"none": None, b"dict": {}, b"tuple": ()}
"""Values that every row has, by the mark of a field of nulls."""


def columns_of(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return a batch's columns: arrays [N, ...], of objects if lengths differ, or trees."""
    columns = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        try:
            columns[field.name] = _shaped(_values(array), field)
        except (pa.ArrowException, OfflineDataError, ValueError) as error:
            raise OfflineDataError(
                f"cannot be read as arrays: {error}", column=field.name
            ) from error
    return columns


def check_type(field: pa.Field, limits: DataLimits) -> int | None:
    """Return the bytes of a column's row, by its type, or None if rows may be of any length."""
    with placed(column=field.name):
        size_bytes = _row_bytes(field.type, limits.depth_max)
        check_bytes("a row", abs(size_bytes or 0), limits.array_bytes_max)
    return size_bytes


def _row_bytes(kind: pa.DataType, depth: int) -> int | None:
    if not depth:
        raise OfflineDataError("is nested too deeply")
    if isinstance(kind, pa.BaseExtensionType):
        return _row_bytes(kind.storage_type, depth)
    if pa.types.is_struct(kind):
        sizes = [_row_bytes(kind.field(i).type, depth - 1) for i in range(kind.num_fields)]
        return sum(size for size in sizes if size) if None not in sizes else None
    if pa.types.is_fixed_size_list(kind):
        each = _row_bytes(kind.value_type, depth - 1)
        return None if each is None else kind.list_size * max(1, each)
    if kind.num_fields:  # lists and maps
        for index in range(kind.num_fields):
            _row_bytes(kind.field(index).type, depth - 1)
        return None
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # text: its bytes are counted once decoded
        return 8


def leaf_count(kind: pa.DataType) -> int:
    """Return the number of columns of values that a nested column consists of."""
    branches = sum(leaf_count(kind.field(index).type) for index in range(kind.num_fields))
    return max(1, branches)


def expanded_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of a batch's values once decoded, counting shared ones once per row."""
    total = 0
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        with placed(column=name):
            total += _expanded_bytes(array)
    return total


def split_rows(batch: pa.RecordBatch, limits: DataLimits) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts of about `batch_bytes`, counting shared values once per row."""
    yield from _split_rows(batch, 0, limits)


def _split_rows(
    batch: pa.RecordBatch, first_row: int, limits: DataLimits
) -> Iterator[pa.RecordBatch]:
    sizes_bytes = [_expanded_bytes(array) for array in batch.columns]
    if sum(sizes_bytes) <= limits.batch_bytes:
        yield batch
    elif len(batch) > 1:
        half = len(batch) // 2
        yield from _split_rows(batch.slice(0, half), first_row, limits)
        yield from _split_rows(batch.slice(half), first_row + half, limits)
    else:
        for name, size_bytes in zip(batch.schema.names, sizes_bytes, strict=True):
            try:
                check_bytes("a row", size_bytes, limits.array_bytes_max)
            except OfflineDataError as error:
                error.row = first_row
                error.add_place(column=name)
                raise
        yield batch


def _expanded_bytes(array: pa.Array) -> int:
    """Return the bytes of an array's values, counting shared ones once per row."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _expanded_bytes(array.storage)
    if is_images(kind):
        return frames_bytes(array)
    if pa.types.is_struct(kind):
        return sum(_expanded_bytes(array.field(index)) for index in range(kind.num_fields))
    if pa.types.is_map(kind):
        start, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
        inside = [each.slice(start, stop - start) for each in (array.keys, array.items)]
        return 8 * len(array) + sum(map(_expanded_bytes, inside))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return 8 * len(array) + _expanded_bytes(array.flatten())
    if pa.types.is_dictionary(kind) and kind.value_type.num_fields == 0:
        lengths = _text_bytes(array.dictionary)
        held = len(array) * 8 if lengths is None else lengths.take(array.indices)
        return held if isinstance(held, int) else (compute.sum(held).as_py() or 0)
    return int(array.nbytes)


def _text_bytes(array: pa.Array) -> pa.Array | None:
    kind = array.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return compute.binary_length(array).cast(pa.int64())
    return None


def _values(array: pa.Array) -> Any:
    if isinstance(array, pa.ExtensionArray):
        if isinstance(array.type, pa.FixedShapeTensorType):
            return array.to_numpy_ndarray()
        return _values(array.storage)
    kind = array.type
    if is_images(kind) and not array.null_count:
        frames = decode_frames(array)
        is_even = len({each.shape for each in frames}) == 1
        return np.stack(frames) if is_even else _objects(frames)
    if pa.types.is_struct(kind):
        if array.null_count:
            return _objects(array.to_pylist())
        fields = [kind.field(i) for i in range(kind.num_fields)]
        marks = [(field.metadata or {}).get(_EMPTY_MARK) for field in fields]
        branches = {
            field.name: _EMPTY[mark] if mark in _EMPTY else _values(array.field(i))
            for i, (field, mark) in enumerate(zip(fields, marks, strict=True))
        }
        is_tuple = bool(fields) and (kind.field(0).metadata or {}).items() >= _TUPLE_MARK.items()
        return tuple(branches.values()) if is_tuple else branches
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_values(array)
    if pa.types.is_dictionary(kind):
        is_text = _text_bytes(array.dictionary) is not None
        return _shared_texts(array) if is_text else _values(array.dictionary_decode())
    types = pa.types
    is_numeric = types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)
    if is_numeric and not array.null_count:
        return array.to_numpy(zero_copy_only=False)
    # Nulls stay None, so that a caller that needs the value can name the row.
    return _objects(array.to_pylist())


def _list_values(array: pa.Array) -> Any:
    if array.null_count:
        return _objects(array.to_pylist())
    lengths = (
        np.full(len(array), array.type.list_size)
        if pa.types.is_fixed_size_list(array.type)
        else array.value_lengths().to_numpy(zero_copy_only=False)
    )
    inner = _values(array.flatten())
    if isinstance(inner, dict | tuple):
        return _objects(array.to_pylist())
    is_even = len(lengths) > 0 and bool((lengths == lengths[0]).all())
    if is_even and inner.dtype != object:
        reshaped: NDArray[Any] = inner.reshape(len(array), int(lengths[0]), *inner.shape[1:])
        return reshaped
    ends = np.cumsum(lengths)
    return _objects(np.split(inner, ends[:-1]) if len(ends) else [])


def _shared_texts(array: pa.DictionaryArray) -> NDArray[Any]:
    """Return texts; rows with the same text share one object."""
    texts = _objects([*array.dictionary.to_pylist(), None])
    rows = array.indices.fill_null(len(texts) - 1)
    shared: NDArray[Any] = texts[rows.to_numpy(zero_copy_only=False)]
    return shared


def _objects(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _shaped(values: Any, field: pa.Field) -> Any:
    """Reshape flat tensors with a shape in their field's metadata, as data libraries write it."""
    stated = (field.metadata or {}).get(_EXTENSION_SHAPE)
    if stated is None or not isinstance(values, np.ndarray) or values.ndim != 2:
        return values
    shape = json.loads(stated)
    shape = shape.get("shape") if isinstance(shape, dict) else shape
    if not isinstance(shape, list) or int(np.prod(shape)) != values.shape[1]:
        return values
    return values.reshape(len(values), *shape)


def to_arrow(tree: Tree, count: int, path: str) -> pa.Array:
    """Return a tree [N, ...] as one Arrow column; marks restore tuples and empty nodes."""
    if isinstance(tree, dict | tuple):
        named = enumerate(tree) if isinstance(tree, tuple) else sorted(tree.items())
        metadata = dict(_TUPLE_MARK) if isinstance(tree, tuple) else {}
        fields, branches = [], []
        for name, branch in named:
            if not isinstance(branch, np.ndarray) and not branch:
                metadata[_EMPTY_MARK] = next(mark for mark in _EMPTY if branch == _EMPTY[mark])
                branches.append(pa.nulls(count))
            else:
                branches.append(to_arrow(branch, count, trees.child_path(path, name)))
            fields.append(pa.field(str(name), branches[-1].type, metadata=metadata))
            metadata = {}
        return pa.StructArray.from_arrays(branches, fields=fields)
    try:
        if is_frames(tree):
            return encode_frames(tree)
        array = pa.array(np.ascontiguousarray(tree).reshape(-1))
        for size in reversed(tree.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise OfflineDataError(
            f"{tree.dtype}{list(tree.shape[1:])} cannot be stored in a column of steps: {error}; "
            "--layout episodes, or .msgpack, takes it",
            column=path,
        ) from error
    return array
