"""Between Arrow columns and numpy trees, without a Python object per value."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from breadbox_learner.offline.errors import OfflineDataError
from breadbox_learner.offline.trees import Tree

_EXTENSION_SHAPE = b"ARROW:extension:metadata"
_TUPLE_MARK = {b"breadbox:container": b"tuple"}
"""On the first field of a struct: it was a tuple, and its fields are numbered."""


def columns_of(batch: pa.RecordBatch) -> dict[str, Any]:
    """Every column of a batch: arrays [N, ...], lists of values, or dicts and tuples of these.

    Lists of one length become another axis; lists of different lengths, an object array of arrays.

    Raises:
        OfflineDataError: a column is of a type that holds no training data; names it.
    """
    columns = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        try:
            columns[field.name] = _shaped(_values(array), field)
        except (pa.ArrowException, OfflineDataError, ValueError) as error:
            raise OfflineDataError(
                f"cannot be read as arrays: {error}", column=field.name
            ) from error
    return columns


def _values(array: pa.Array) -> Any:
    if isinstance(array, pa.ExtensionArray):
        if isinstance(array.type, pa.FixedShapeTensorType):
            return array.to_numpy_ndarray()
        return _values(array.storage)
    kind = array.type
    if pa.types.is_struct(kind):
        if array.null_count:
            return _objects(array.to_pylist())
        fields = {kind.field(i).name: array.field(i) for i in range(kind.num_fields)}
        branches = {name: _values(field) for name, field in fields.items()}
        is_tuple = bool(fields) and (kind.field(0).metadata or {}).items() >= _TUPLE_MARK.items()
        return tuple(branches.values()) if is_tuple else branches
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_values(array)
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    if _is_numeric(kind) and not array.null_count:
        return array.to_numpy(zero_copy_only=False)
    # Nulls stay None, so that whoever needs the value can name the row.
    return _objects(array.to_pylist())


def _is_numeric(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind))


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


def _objects(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _shaped(values: Any, field: pa.Field) -> Any:
    """Flat tensors that say their shape in the field's metadata, as data libraries store them."""
    stated = (field.metadata or {}).get(_EXTENSION_SHAPE)
    if stated is None or not isinstance(values, np.ndarray) or values.ndim != 2:
        return values
    shape = json.loads(stated)
    shape = shape.get("shape") if isinstance(shape, dict) else shape
    if not isinstance(shape, list) or int(np.prod(shape)) != values.shape[1]:
        return values
    return values.reshape(len(values), *shape)


def to_arrow(tree: Tree) -> pa.Array:
    """A tree with leaves [N, ...] as one Arrow column.

    A tuple becomes a struct of `0`, `1` and so on, marked so that it comes back as one.

    Raises:
        OfflineDataError: a leaf is of a dtype that Arrow has no column for.
    """
    if isinstance(tree, dict | tuple):
        is_tuple = isinstance(tree, tuple)
        named = enumerate(tree) if isinstance(tree, tuple) else tree.items()
        branches = {str(name): to_arrow(branch) for name, branch in named}
        mark = _TUPLE_MARK if is_tuple else None
        return pa.StructArray.from_arrays(
            list(branches.values()),
            fields=[pa.field(name, each.type, metadata=mark) for name, each in branches.items()],
        )
    try:
        array = pa.array(np.ascontiguousarray(tree).reshape(-1))
        for size in reversed(tree.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
    except (pa.ArrowException, TypeError) as error:
        raise OfflineDataError(f"{tree.dtype} cannot be stored: {error}") from error
    return array
