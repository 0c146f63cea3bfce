"""Encode spaces as plain JSON, so that a process can describe its environment to another."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import child_path

Space = gymnasium.Space[Any]


def encode_space(space: Space, path: str = "") -> dict[str, Any]:
    """Return plain data for `decode_space`."""
    match space:
        case spaces.Box():
            return {
                "kind": "box",
                "dtype": _encode_dtype(space),
                "shape": list(space.shape),
                "low": _encode_bounds(space.low),
                "high": _encode_bounds(space.high),
            }
        case spaces.Discrete():
            return {
                "kind": "discrete",
                "dtype": _encode_dtype(space),
                "n": int(space.n),
                "start": int(space.start),
            }
        case spaces.MultiDiscrete():
            return {
                "kind": "multi_discrete",
                "dtype": _encode_dtype(space),
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
            }
        case spaces.MultiBinary():
            return {"kind": "multi_binary", "n": np.asarray(space.n).tolist()}
        case spaces.Dict():
            named = [
                (key, encode_space(part, child_path(path, key))) for key, part in space.items()
            ]
            return {"kind": "dict", "parts": named}
        case spaces.Tuple():
            parts = [encode_space(part, child_path(path, i)) for i, part in enumerate(space.spaces)]
            return {"kind": "tuple", "parts": parts}
    where = f" at {path}" if path else ""
    raise InvalidRequestError(
        "space",
        f"{space}{where} is not supported: it has no array of one shape; wrap the environment",
    )


def _encode_dtype(space: Space) -> str:
    # Tensors have the machine's byte order only.
    return np.dtype(space.dtype).newbyteorder("=").str


def _encode_bounds(bounds: NDArray[Any]) -> Any:
    # JSON has no infinities of its own; Python writes and reads them as bare words.
    if bounds.size == 0 or (bounds == bounds.flat[0]).all():
        return bounds.flat[0].item() if bounds.size else 0
    return bounds.tolist()


def decode_space(data: dict[str, Any]) -> Space:
    """Undo `encode_space`."""
    dtype: Any = np.dtype(data.get("dtype", np.int64)).type
    match data["kind"]:
        case "box":
            shape = tuple(data["shape"])
            low, high = (np.asarray(data[key], dtype) for key in ("low", "high"))
            full = [np.broadcast_to(bound, shape).copy() for bound in (low, high)]
            return spaces.Box(full[0], full[1], shape, dtype)
        case "discrete":
            # Older releases of Gymnasium have int64 only, and no argument for it.
            own = {} if dtype is np.int64 else {"dtype": dtype}
            return spaces.Discrete(data["n"], start=data["start"], **own)
        case "multi_discrete":
            return spaces.MultiDiscrete(data["nvec"], dtype=dtype, start=data["start"])
        case "multi_binary":
            return spaces.MultiBinary(data["n"])
        case "dict":
            # A plain dict would be sorted by key; the order of the environment is kept.
            return spaces.Dict([(key, decode_space(part)) for key, part in data["parts"]])
        case "tuple":
            return spaces.Tuple([decode_space(part) for part in data["parts"]])
        case kind:
            raise InvalidRequestError("space", f"of unknown kind {kind!r}")
