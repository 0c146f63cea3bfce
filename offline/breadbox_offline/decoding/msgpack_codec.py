"""Encode msgpack with numpy arrays in RLlib's layout; kinds O (pickle) and V are refused."""

from typing import Any

import msgpack
import numpy as np

from breadbox_offline.decoding.dtypes import array_from_bytes, plain_dtype, plain_shape
from breadbox_offline.errors import EpisodeStateError, named
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits


def unpack_message(data: bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """Return the plain value in `data`; its arrays are read-only views."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise EpisodeStateError(f"a serialized episode is bytes, not {type(data).__name__}")
    if len(data) > limits.episode_bytes_max:
        raise EpisodeStateError(
            f"{len(data)} bytes; the limit of an episode is {limits.episode_bytes_max}"
        )
    try:
        return msgpack.unpackb(
            data, object_hook=lambda held: _decode(held, limits), ext_hook=_refuse_extension
        )
    except EpisodeStateError:
        raise
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        problem = str(error) or type(error).__name__
        raise EpisodeStateError(f"not a serialized episode: {problem}") from error


def pack_message(value: Any) -> bytes:
    """Return plain values, arrays and numpy scalars as msgpack."""
    try:
        packed: bytes = msgpack.packb(value, default=_encode)
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeStateError(f"cannot be serialized: {error}") from error
    return packed


def _encode(value: Any) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray):
        plain_dtype(value.dtype.str)
        return {
            b"nd": True,
            b"type": value.dtype.str,
            b"kind": b"",
            b"shape": list(value.shape),
            b"data": np.ascontiguousarray(value).tobytes(),
        }
    if isinstance(value, np.generic):
        plain_dtype(value.dtype.str)
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"a {type(value).__name__}")


def _decode(held: dict[Any, Any], limits: DataLimits) -> Any:
    if b"nd" in held:
        return _decode_numpy({_text(key): value for key, value in held.items()}, limits)
    if b"complex" in held:
        return complex(_text(held[b"data"]))
    return held


def _decode_numpy(held: dict[str, Any], limits: DataLimits) -> Any:
    kind = _text(held.get("kind", ""))
    if kind:
        raise EpisodeStateError(f"an array of kind {named(kind)} is refused: it would execute code")
    dtype = plain_dtype(held["type"])
    contents = held["data"]
    shape = plain_shape(held["shape"]) if held["nd"] else ()
    array = array_from_bytes(contents, dtype, shape, bytes_max=limits.array_bytes_max)
    return array if held["nd"] else array[()]


def _text(value: Any) -> str:
    return value.decode("ascii", errors="replace") if isinstance(value, bytes) else str(value)


def _refuse_extension(code: int, _data: bytes) -> None:
    raise EpisodeStateError(f"extension type {code} is refused")
