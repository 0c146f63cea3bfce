"""Store frames in columns of images, `{bytes, path}`, as data libraries do: PNG, without loss.

A column of uint8[H, W, C] with 1, 3 or 4 channels becomes one, and is read back the same.
"""

import io
import json
import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from breadbox_offline.errors import OfflineDataError

IMAGE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Type of a column of images. Nothing is read from where a path leads."""
_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's names of images, by their channels."""
_SIDE_MIN: Final = 8
"""Smallest side of an image; smaller arrays stay columns of numbers."""
_VALUES: Final = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Names of Arrow's types in `datasets`, where they differ."""
_FORMATS: Final = ("PNG", "JPEG")
_Taken = TypeVar("_Taken")


def is_frames(array: NDArray[Any]) -> bool:
    """Return True if an array [N, ...] holds frames that become images."""
    shape = array.shape[1:]
    is_image = len(shape) == 3 and shape[2] in _MODES and min(shape[:2]) >= _SIDE_MIN
    return bool(array.dtype == np.uint8 and is_image)


def is_images(kind: pa.DataType) -> bool:
    """Return True if a column is one of images."""
    if not pa.types.is_struct(kind) or [each.name for each in kind] != ["bytes", "path"]:
        return False
    held = kind.field(0).type
    held = held.value_type if pa.types.is_dictionary(held) else held
    return bool(pa.types.is_binary(held) or pa.types.is_large_binary(held))


def image_features(schema: pa.Schema) -> dict[str, str]:
    """Return metadata by which Hugging Face's `datasets` decode a schema's images."""
    found = {each.name: _feature_of(each.type) for each in schema if _has_images(each.type)}
    return {"huggingface": json.dumps({"info": {"features": found}})} if found else {}


def _has_images(kind: pa.DataType) -> bool:
    fields = [kind.field(index).type for index in range(kind.num_fields)]
    return is_images(kind) or any(map(_has_images, fields))


def _feature_of(kind: pa.DataType) -> dict[str, Any]:
    if is_images(kind):
        return {"_type": "Image"}
    if pa.types.is_struct(kind):
        return {each.name: _feature_of(each.type) for each in kind}
    if pa.types.is_fixed_size_list(kind):
        feature = _feature_of(kind.value_type)
        return {"_type": "Sequence", "feature": feature, "length": kind.list_size}
    return {"_type": "Value", "dtype": _VALUES.get(str(kind), str(kind))}


def encode_frames(frames: NDArray[np.uint8]) -> pa.Array:
    """Return frames [N, H, W, C] as a column of images."""
    from PIL import Image

    rows = []
    for frame in frames:
        out = io.BytesIO()
        pixels = np.ascontiguousarray(frame[:, :, 0] if frame.shape[2] == 1 else frame)
        Image.fromarray(pixels).save(out, "PNG", compress_level=1)
        rows.append(out.getvalue())
    return pa.StructArray.from_arrays(
        [pa.array(rows, pa.binary()), pa.nulls(len(rows), pa.string())], fields=list(IMAGE)
    )


def decode_frames(images: pa.Array) -> list[NDArray[np.uint8]]:
    """Return a column's images as uint8[H, W, C] each, which `frames_bytes` has measured."""

    def decode(image: Any) -> NDArray[np.uint8]:
        mode = image.mode if image.mode in _MODES.values() else "RGB"
        frame = np.asarray(image.convert(mode))
        return frame[:, :, None] if frame.ndim == 2 else frame

    return [_read(data, decode) for data in images.field(0)]


def frames_bytes(images: pa.Array) -> int:
    """Return the bytes that a column's images state to have once they are decoded."""
    channels = {mode: count for count, mode in _MODES.items()}

    def measure(image: Any) -> int:
        return int(image.width * image.height * channels.get(image.mode, 3))

    return sum(_read(data, measure) for data in images.field(0))


def _read(data: pa.Scalar, take: Callable[[Any], _Taken]) -> _Taken:
    """Return what `take` makes of an image, which is opened but not decoded yet."""
    from PIL import Image

    if not data.is_valid:
        raise OfflineDataError("holds an image without bytes; files that it names are not read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Bounded by ours.
            with Image.open(io.BytesIO(data.as_py()), formats=_FORMATS) as image:
                return take(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        formats = " or ".join(_FORMATS)
        raise OfflineDataError(f"holds an image that is no {formats}: {error}") from error
