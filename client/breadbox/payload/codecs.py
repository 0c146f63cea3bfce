"""How an array's bytes are encoded: raw, or compressed without loss.

A codec is named in text: "raw", "lz4", "zstd" or "zstd:LEVEL". Which array gets which is a mapping
from patterns over array names (`*` matches anything, the first match counts) to codecs, or one
codec for all.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import lz4.block
import zstandard
from numpy.typing import NDArray

from breadbox.errors import InvalidRequestError, PayloadCorruptError
from breadbox.payload.dtypes import byte_view
from breadbox.payload.limits import EXPANDED_BYTES_MAX
from breadbox.v1 import payload_pb2

Codecs = str | Mapping[str, str]
"""One codec for all arrays, or codecs by pattern; what no pattern matches stays raw."""

_ZSTD_LEVEL_DEFAULT: Final = 1
_ZSTD_LEVELS: Final = range(1, 20)
_LZ4_INPUT_BYTES_MAX: Final = 0x7E000000
_LZ4_EXPANSION_MAX: Final = 255
"""One byte of an lz4 block says at most so many bytes of output."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and its setting."""

    name: str
    level: int | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """An array's encoded bytes."""

    codec: int
    """A value of the wire's enum Codec."""
    buffer: memoryview
    parameters: Mapping[str, str]


def parse_codec(text: str) -> CodecChoice:
    """Read a codec's name.

    Raises:
        InvalidRequestError: There is no such codec, or its setting is out of range.
    """
    name, colon, setting = text.partition(":")
    if name in ("raw", "lz4") and not colon:
        return CodecChoice(name)
    if name == "zstd":
        if not colon:
            return CodecChoice(name, _ZSTD_LEVEL_DEFAULT)
        if setting.isdecimal() and int(setting) in _ZSTD_LEVELS:
            return CodecChoice(name, int(setting))
        raise InvalidRequestError(
            "codec", f"{text!r}: zstd levels are {_ZSTD_LEVELS[0]} to {_ZSTD_LEVELS[-1]}"
        )
    raise InvalidRequestError("codec", f"{text!r} is none of raw, lz4, zstd, zstd:LEVEL")


def choose(codecs: Codecs, path: str) -> CodecChoice:
    """Find the codec for an array.

    Raises:
        InvalidRequestError: The codec found is not one.
    """
    if isinstance(codecs, str):
        return parse_codec(codecs)
    for pattern, text in codecs.items():
        if fnmatchcase(path, pattern):
            return parse_codec(text)
    return CodecChoice("raw")


def encode(array: NDArray[Any], choice: CodecChoice) -> Encoded:
    """Encode a C-contiguous array; raw where the codec would save nothing."""
    raw = byte_view(array)
    if choice.name == "lz4" and 0 < len(raw) <= min(_LZ4_INPUT_BYTES_MAX, EXPANDED_BYTES_MAX):
        packed = lz4.block.compress(raw, store_size=False)
        if len(packed) < len(raw):
            return Encoded(payload_pb2.CODEC_LZ4, memoryview(packed), {})
    if choice.name == "zstd" and 0 < len(raw) <= EXPANDED_BYTES_MAX:
        packed = _zstd_compressor(choice.level or _ZSTD_LEVEL_DEFAULT).compress(raw)
        if len(packed) < len(raw):
            return Encoded(payload_pb2.CODEC_ZSTD, memoryview(packed), {})
    return Encoded(payload_pb2.CODEC_RAW, raw, {})


def require_plausible(codec: int, encoded_bytes: int, raw_bytes: int) -> None:
    """Check sizes that a header declares, before anything is allocated for them.

    Raises:
        PayloadCorruptError: The codec is unknown, or cannot have made so much of so little.
    """
    if codec == payload_pb2.CODEC_RAW:
        is_plausible = encoded_bytes == raw_bytes
    elif codec == payload_pb2.CODEC_LZ4:
        is_plausible = raw_bytes <= encoded_bytes * _LZ4_EXPANSION_MAX
    elif codec == payload_pb2.CODEC_ZSTD:
        is_plausible = encoded_bytes > 0 and raw_bytes <= EXPANDED_BYTES_MAX
    else:
        raise PayloadCorruptError(f"an array has codec {codec}, which this library does not know")
    if not is_plausible:
        raise PayloadCorruptError(
            f"an array declares {raw_bytes} bytes in {encoded_bytes} encoded ones"
        )


def decode_into(
    destination: NDArray[Any], encoded: memoryview, codec: int, parameters: Mapping[str, str]
) -> None:
    """Decode into a C-contiguous array of the declared shape and type.

    Raises:
        PayloadCorruptError: The bytes are not what the codec makes, or decode to another size.
    """
    del parameters
    raw = byte_view(destination)
    if codec == payload_pb2.CODEC_RAW:
        raw[:] = encoded
    elif codec == payload_pb2.CODEC_LZ4:
        _decode_lz4(raw, encoded)
    elif codec == payload_pb2.CODEC_ZSTD:
        _decode_zstd(raw, encoded)
    else:
        raise PayloadCorruptError(f"an array has codec {codec}, which this library does not know")


def names() -> Sequence[str]:
    """Names of all codecs, for help texts."""
    return ("raw", "lz4", "zstd")


def _decode_lz4(raw: memoryview, encoded: memoryview) -> None:
    try:
        unpacked = lz4.block.decompress(encoded, uncompressed_size=len(raw))
    except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
        raise PayloadCorruptError("an lz4 array does not decode") from error
    if len(unpacked) != len(raw):
        raise PayloadCorruptError(f"an lz4 array has {len(unpacked)} bytes, not {len(raw)}")
    raw[:] = unpacked


def _decode_zstd(raw: memoryview, encoded: memoryview) -> None:
    try:
        if zstandard.frame_content_size(encoded) != len(raw):
            raise PayloadCorruptError("a zstd array is of another size than its header says")
        with zstandard.ZstdDecompressor().stream_reader(encoded) as reader:
            filled = 0
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
