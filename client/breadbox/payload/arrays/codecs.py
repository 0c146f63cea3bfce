"""How an array's bytes are encoded.

A codec is named in text:

    raw             the elements themselves: no cost, received straight into place
    lz4             lossless, fast
    zstd            lossless, smaller; zstd:LEVEL with LEVEL 1 (default) to 19
    h264            frames without loss; h264:QUALITY with QUALITY 1 (best) to 51 is lossy
    auto            measures the first arrays of each kind and picks one of the lossless ones;
                    auto:MB_PER_S says what must be saved per second spent (default 250)

Which array gets which is one codec for all, or a mapping from patterns over array names (`*`
matches anything, the first match counts) to codecs; what no pattern matches stays raw. A codec that
does not fit an array, or saves nothing, gives way to raw.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError, PayloadCorruptError
from breadbox.payload.arrays import video
from breadbox.payload.arrays.dtypes import byte_view
from breadbox.payload.arrays.limits import (
    EXPANDED_BYTES_MAX_VARIABLE,
    Expansion,
    expanded_bytes_max,
)
from breadbox.v1 import payload_pb2

Codecs = str | Mapping[str, str]
"""One codec for all arrays, or codecs by pattern."""

NAMES: Final = ("raw", "lz4", "zstd", "h264", "auto")

_ZSTD_LEVEL_DEFAULT: Final = 1
_ZSTD_LEVELS: Final = range(1, 20)
_AUTO_MB_PER_S_DEFAULT: Final = 250
_AUTO_MB_PER_S: Final = range(1, 100_001)
_LZ4_INPUT_BYTES_MAX: Final = 0x7E000000
_LZ4_EXPANSION_MAX: Final = 255
"""One byte of an lz4 block says at most so many bytes of output."""
_ZSTD_EXPANSION_MAX: Final = 128 * 1024 // 4
"""A block of 128 KiB takes at least a header of three bytes and one to repeat."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and its setting."""

    name: str
    setting: int | None = None
    """zstd: level. h264: quality, or None for lossless. auto: MB saved per second spent."""

    def __str__(self) -> str:
        return self.name if self.setting is None else f"{self.name}:{self.setting}"


RAW: Final = CodecChoice("raw")


@dataclass(frozen=True, slots=True)
class Encoded:
    """An array's encoded bytes."""

    codec: int
    """A value of the wire's enum Codec."""
    buffer: memoryview
    """As long as the array's own bytes if it is these."""
    parameters: Mapping[str, str]


@lru_cache(maxsize=256)
def parse_codec(text: str) -> CodecChoice:
    """Read a codec's name.

    Raises:
        InvalidRequestError: There is no such codec, or its setting is out of range.
    """
    name, colon, setting = text.partition(":")
    ranges = {
        "zstd": (_ZSTD_LEVELS, _ZSTD_LEVEL_DEFAULT),
        "h264": (video.QUALITIES, None),
        "auto": (_AUTO_MB_PER_S, _AUTO_MB_PER_S_DEFAULT),
    }
    if name not in NAMES:
        raise InvalidRequestError("codec", f"{text!r} is none of {', '.join(NAMES)}")
    if not colon:
        return CodecChoice(name, ranges[name][1] if name in ranges else None)
    if name not in ranges:
        raise InvalidRequestError("codec", f"{text!r}: {name} has no setting")
    allowed = ranges[name][0]
    if not setting.isdecimal() or len(setting) > 9 or int(setting) not in allowed:
        raise InvalidRequestError(
            "codec", f"{text!r}: the setting must be {allowed[0]} to {allowed[-1]}"
        )
    return CodecChoice(name, int(setting))


def choose(codecs: Codecs, path: str) -> CodecChoice:
    """Find the codec for an array.

    Raises:
        InvalidRequestError: The codec found is not one.
    """
    if isinstance(codecs, str):
        return parse_codec(codecs)
    for pattern, text in codecs.items():
        if path == pattern or fnmatchcase(path, pattern):
            return parse_codec(text)
    return RAW


def encode(
    array: NDArray[Any], type_name: str, choice: CodecChoice, expansion: Expansion | None = None
) -> Encoded:
    """Encode a C-contiguous array.

    Its bytes stay as they are where the codec does not fit it or would save nothing, and where
    readers would refuse what the compressed arrays of its payload expand to. The codec is raw only
    if its elements have no say in that: so arrays of one kind have one codec.

    Args:
        array: What to encode.
        type_name: Of its elements.
        choice: Codec and parameters.
        expansion: Expansion of the payload that it becomes a part of, or None if it is alone.

    Raises:
        UnsupportedArrayError: The codec needs a package that is not installed.
    """
    raw = byte_view(array)
    expansion = expansion or Expansion()
    # What does not fit into the payload is not encoded for nothing.
    may_fit = expansion.expanded_bytes + len(raw) <= expanded_bytes_max()
    encoded = _encode(array, raw, type_name, choice) if raw and may_fit else None
    if encoded is None:
        return Encoded(payload_pb2.CODEC_RAW, raw, {})
    if len(encoded.buffer) >= len(raw) or not expansion.takes(len(encoded.buffer), len(raw)):
        return Encoded(encoded.codec, raw, encoded.parameters)
    return encoded


def require_plausible(
    codec: int,
    encoded_bytes: int,
    raw_bytes: int,
    shape: Sequence[int],
    type_name: str,
    expansion: Expansion,
) -> None:
    """Check what a payload declares of an encoded array, before anything is allocated for it.

    Raises:
        PayloadCorruptError: The codec is unknown, or cannot have made so much of so little; or the
            payload's compressed arrays would expand to more than they may.
    """
    if not 0 < encoded_bytes < raw_bytes:
        is_plausible = False
    elif codec == payload_pb2.CODEC_LZ4:
        is_plausible = raw_bytes <= encoded_bytes * _LZ4_EXPANSION_MAX
    elif codec == payload_pb2.CODEC_ZSTD:
        is_plausible = raw_bytes <= encoded_bytes * _ZSTD_EXPANSION_MAX
    elif codec == payload_pb2.CODEC_H264:
        is_plausible = video.is_plausible(shape, type_name, encoded_bytes)
    else:
        raise PayloadCorruptError(f"an array has codec {codec}, which this library does not know")
    if not is_plausible:
        raise PayloadCorruptError(
            f"an array of codec {codec} declares {raw_bytes} bytes in {encoded_bytes} encoded ones"
        )
    if not expansion.takes(encoded_bytes, raw_bytes):
        raise PayloadCorruptError(
            f"compressed arrays of a payload declare {expansion.expanded_bytes + raw_bytes} bytes "
            f"in {expansion.encoded_bytes + encoded_bytes} encoded ones, more than is taken; "
            f"{EXPANDED_BYTES_MAX_VARIABLE} is {expanded_bytes_max()}"
        )


def decode_into(
    destination: NDArray[Any], encoded: memoryview, codec: int, parameters: Mapping[str, str]
) -> None:
    """Decode into a C-contiguous array of the declared shape and type.

    Raises:
        PayloadCorruptError: The bytes are not what the codec makes, or decode to another size.
        UnsupportedArrayError: The codec needs a package that is not installed.
    """
    if codec == payload_pb2.CODEC_RAW:
        byte_view(destination)[:] = encoded
    elif codec == payload_pb2.CODEC_LZ4:
        _decode_lz4(byte_view(destination), encoded)
    elif codec == payload_pb2.CODEC_ZSTD:
        _decode_zstd(byte_view(destination), encoded)
    elif codec == payload_pb2.CODEC_H264:
        video.decode_frames_into(destination, encoded, parameters)
    else:
        raise PayloadCorruptError(f"an array has codec {codec}, which this library does not know")


def _encode(
    array: NDArray[Any], raw: memoryview, type_name: str, choice: CodecChoice
) -> Encoded | None:
    if choice.name == "lz4" and len(raw) <= _LZ4_INPUT_BYTES_MAX:
        packed = lz4.block.compress(raw, store_size=False)
        return Encoded(payload_pb2.CODEC_LZ4, memoryview(packed), {})
    if choice.name == "zstd":
        packed = _zstd_compressor(choice.setting or _ZSTD_LEVEL_DEFAULT).compress(raw)
        return Encoded(payload_pb2.CODEC_ZSTD, memoryview(packed), {})
    if choice.name == "h264" and video.is_video(array.shape, type_name):
        frames: NDArray[np.uint8] = array
        packed, parameters = video.encode_frames(frames, choice.setting)
        return Encoded(payload_pb2.CODEC_H264, memoryview(packed), parameters)
    return None


def _decode_lz4(raw: memoryview, encoded: memoryview) -> None:
    try:
        unpacked = lz4.block.decompress(encoded, uncompressed_size=len(raw))
    except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
        raise PayloadCorruptError("an lz4 array does not decode") from error
    if len(unpacked) != len(raw):
        raise PayloadCorruptError(f"an lz4 array has {len(unpacked)} bytes, not {len(raw)}")
    raw[:] = unpacked


def _decode_zstd(raw: memoryview, encoded: memoryview) -> None:
    filled = 0
    try:
        if zstandard.frame_content_size(encoded) != len(raw):
            raise PayloadCorruptError("a zstd array is of another size than its header says")
        with zstandard.ZstdDecompressor().stream_reader(encoded) as reader:
            while filled < len(raw):
                count = reader.readinto(raw[filled:])
                if not count:
                    break
                filled += count
    except zstandard.ZstdError as error:
        raise PayloadCorruptError("a zstd array does not decode") from error
    if filled != len(raw):
        raise PayloadCorruptError(f"a zstd array has {filled} bytes, not {len(raw)}")


def _zstd_compressor(level: int) -> zstandard.ZstdCompressor:
    compressors: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("zstd", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return compressors[level]
