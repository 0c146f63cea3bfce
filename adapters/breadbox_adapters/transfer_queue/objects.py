"""Values as arrays that the payload format knows: tensors as they are, anything else as JSON.

JSON has no tuples, bytes, arrays or keys other than text: each is a dict of one key that begins
with "$". Nothing is ever unpickled.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack

from breadbox.model.errors import UnsupportedArrayError
from breadbox.payload.dtypes import BFLOAT16, as_leaf, parse_dtype, stored_array

_JSON: Final = np.dtype("V1")
"""Type of an array that holds JSON; of no tensor."""


def stored(value: Any, path: str) -> Any:
    """Return a row's value of a column as an array.

    Raises:
        TypeError: It is, or holds, something that neither a tensor nor JSON can be. Has the path.
    """
    if isinstance(value, torch.Tensor):
        array, name = _array(value, path)
        return value.detach().cpu() if name == BFLOAT16 else array
    return np.frombuffer(json_of(value, path).encode("utf-8", "surrogatepass"), _JSON)


def json_of(value: Any, path: str) -> str:
    """Return a value as JSON; raises as `stored` does."""
    return json.dumps(_plain(value, path), ensure_ascii=False, separators=(",", ":"))


def _array(value: Any, path: str) -> tuple[NDArray[Any], str]:
    try:
        return stored_array(path, value)
    except UnsupportedArrayError as error:
        raise TypeError(str(error)) from None


def column_of(values: Sequence[Any]) -> Any:
    """Join the stored values of rows to what a TensorDict has for a column.

    Tensors of rows that have an axis make a jagged tensor, also where all have one length, as
    TransferQueue's users expect; of scalars a dense one. What no tensor can hold is a stack.
    """
    rows = [_loaded(each) for each in values]
    if not all(isinstance(row, torch.Tensor) for row in rows):
        return NonTensorStack(*rows)
    if len({(row.dtype, row.shape[1:], row.ndim) for row in rows}) == 1:
        if not rows[0].ndim:
            return torch.stack(rows)
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor([len(row) for row in rows]), 0, out=offsets[1:])
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)
    if len({(row.dtype, row.ndim) for row in rows}) == 1:
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    return NonTensorStack(*rows)


def _loaded(stored: Any) -> Any:
    """Return a tensor, or the value that was stored as JSON."""
    if isinstance(stored, torch.Tensor):
        return stored
    if stored.dtype == _JSON:
        return value_of(json.loads(stored.tobytes().decode("utf-8", "surrogatepass")))
    return torch.from_numpy(stored if stored.flags.writeable else stored.copy())


def _plain(value: Any, path: str) -> Any:
    """Return a value in terms that JSON has."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(each, f"{path}[{index}]") for index, each in enumerate(value)]
    if kind is tuple:
        return {"$tuple": _plain([*value], path)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _plain(each, f"{path}.{key}") for key, each in value.items()}
        pairs = [
            [_plain(key, f"{path} key"), _plain(each, f"{path}[{key!r}]")]
            for key, each in value.items()
        ]
        return {"$dict": pairs}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is np.str_:
        return str(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return {"$objects": [list(value.shape), _plain(list(value.flat), path)]}
    for name, types in _ARRAYS.items():
        if isinstance(value, types):
            array, dtype = _array(value, path)
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            return {name: [dtype, list(array.shape), data]}
    raise TypeError(f"{path}: {kind.__module__}.{kind.__qualname__} can be no tensor and no JSON")


_ARRAYS: Final[dict[str, Any]] = {
    "$tensor": torch.Tensor,
    "$scalar": np.generic,
    "$array": np.ndarray,
}


def value_of(plain: Any) -> Any:
    """Return the value that `json_of` had."""
    if isinstance(plain, list):
        return [value_of(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    content: Any
    name, content = next(iter(plain.items())) if len(plain) == 1 else ("", None)
    if name in _ARRAYS:
        dtype, shape, data = content
        raw = np.frombuffer(base64.b64decode(data), parse_dtype(dtype)).reshape(shape).copy()
        array = as_leaf(raw, dtype)
        if name == "$tensor":
            return _loaded(array)
        return array[()] if name == "$scalar" else array
    match name:
        case "$tuple":
            return tuple(value_of(content))
        case "$dict":
            return {value_of(key): value_of(each) for key, each in content}
        case "$bytes":
            return base64.b64decode(content)
        case "$objects":
            made: NDArray[np.object_] = np.empty(content[0], np.object_)
            for index, each in enumerate(content[1]):
                made.flat[index] = value_of(each)
            return made
    return {key: value_of(each) for key, each in plain.items()}
