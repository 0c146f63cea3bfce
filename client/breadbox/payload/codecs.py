"""How an array's bytes are encoded.

A codec is named in text:

    raw             the elements themselves: no cost, received straight into place
    lz4             lossless, fast
    zstd            lossless, smaller; zstd:LEVEL with LEVEL 1 (default) to 19
    h264            frames without loss; h264:QUALITY with QUALITY 1 (best) to 51 is lossy

Which array gets which is one codec for all, or a mapping from patterns over array names (`*`
matches anything, the first match counts) to codecs; what no pattern matches stays raw. A codec that
does not fit an array, or saves nothing, gives way to raw.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError, PayloadCorruptError, UnsupportedArrayError
from breadbox.payload.dtypes import byte_view
from breadbox.payload.limits import EXPANDED_BYTES_MAX_VARIABLE, Expansion, expanded_bytes_max
from breadbox.v1 import payload_pb2

Codecs = str | Mapping[str, str]
"""One codec for all arrays, or codecs by pattern."""
NAMES: Final = ("raw", "lz4", "zstd", "h264")
_ZSTD_LEVEL_DEFAULT: Final = 1
_ZSTD_LEVELS: Final = range(1, 20)
_LZ4_INPUT_BYTES_MAX: Final = 0x7E000000
_LZ4_EXPANSION_MAX: Final = 255
_ZSTD_EXPANSION_MAX: Final = 128 * 1024 // 4
"""A block of 128 KiB takes at least a header of three bytes and one to repeat."""
_local = threading.local()


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and its setting."""

    name: str
    setting: int | None = None
    """zstd: level. h264: quality, or None for lossless."""

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
    """Read a codec's name."""
    name, colon, setting = text.partition(":")
    ranges = {"zstd": (_ZSTD_LEVELS, _ZSTD_LEVEL_DEFAULT), "h264": (QUALITIES, None)}
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
    """Return the codec of an array."""
    if isinstance(codecs, str):
        return parse_codec(codecs)
    for pattern, text in codecs.items():
        if path == pattern or fnmatchcase(path, pattern):
            return parse_codec(text)
    return RAW


def encode(
    array: NDArray[Any], type_name: str, choice: CodecChoice, expansion: Expansion | None = None
) -> Encoded:
    """Encode a C-contiguous array of a payload that has expanded so far, or stands alone."""
    # Raw if the codec does not fit or saves nothing, or readers would refuse the expansion, but
    # named raw only if the elements have no say in that: arrays of one kind have one codec.
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


def check_plausible(
    codec: int,
    encoded_bytes: int,
    raw_bytes: int,
    shape: Sequence[int],
    type_name: str,
    expansion: Expansion,
) -> None:
    """Check what a payload declares of an encoded array, before anything is allocated for it."""
    if not 0 < encoded_bytes < raw_bytes:
        is_plausible = False
    elif codec == payload_pb2.CODEC_LZ4:
        is_plausible = raw_bytes <= encoded_bytes * _LZ4_EXPANSION_MAX
    elif codec == payload_pb2.CODEC_ZSTD:
        is_plausible = raw_bytes <= encoded_bytes * _ZSTD_EXPANSION_MAX
    elif codec == payload_pb2.CODEC_H264:
        is_plausible = is_plausible_video(shape, type_name, encoded_bytes)
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
    """Decode into a C-contiguous array of the declared shape and type."""
    if codec == payload_pb2.CODEC_RAW:
        byte_view(destination)[:] = encoded
    elif codec == payload_pb2.CODEC_LZ4:
        _decode_lz4(byte_view(destination), encoded)
    elif codec == payload_pb2.CODEC_ZSTD:
        _decode_zstd(byte_view(destination), encoded)
    elif codec == payload_pb2.CODEC_H264:
        decode_frames_into(destination, encoded, parameters)
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
    if choice.name == "h264" and is_video(array.shape, type_name):
        frames: NDArray[np.uint8] = array
        packed, parameters = encode_frames(frames, choice.setting)
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


QUALITIES: Final = range(1, 52)

_SIDE_MAX: Final = 8192
"""Pixels; more than level 6.2 of the standard allows."""
_BYTES_PER_FRAME_MIN: Final = 4
"""A start code and a header: bounds the frames that few bytes can claim."""
_PARAMETER: Final = "planes"
_LUMA: Final = "luma"
_RGB: Final = "rgb"
_LOSSY: Final = "lossy"


def is_video(shape: Sequence[int], type_name: str) -> bool:
    """Return whether an array is frames, at least one, of a size that H.264 knows."""
    is_frames = len(shape) == 3 or (len(shape) == 4 and shape[3] == 3)
    return (type_name == "|u1" and is_frames and shape[0] > 0 and min(shape[1:3]) > 0) and max(
        shape[1:3]
    ) <= _SIDE_MAX


def is_plausible_video(shape: Sequence[int], type_name: str, encoded_bytes: int) -> bool:
    """Return whether a head's claim can be true, before memory is taken for the frames."""
    return is_video(shape, type_name) and shape[0] * _BYTES_PER_FRAME_MIN <= encoded_bytes


def encode_frames(
    frames: NDArray[np.uint8], quality: int | None
) -> tuple[bytes, Mapping[str, str]]:
    """Encode frames, without loss if quality is None; return stream and decoder's parameters."""
    av = _require_av()
    is_colour = frames.ndim == 4
    height, width = frames.shape[1:3]
    # Chroma at half the size needs even sides.
    planar = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
    if is_colour and quality is None:
        name, pixel_format, planes = "libx264rgb", "rgb24", _RGB
    else:
        name, pixel_format, planes = "libx264", planar, _LOSSY if is_colour else _LUMA
    context = av.CodecContext.create(name, "w")
    context.width, context.height, context.pix_fmt = width, height, pixel_format
    context.time_base = Fraction(1, 30)
    context.thread_count = 1  # The caller's threads are its own to count.
    rate = {"qp": "0"} if quality is None else {"crf": str(quality)}
    context.options = {"preset": "ultrafast", "bf": "0", **rate}
    packets = []
    grey = _GreyFrame(av, width, height, planar) if not is_colour else None
    for position, pixels in enumerate(frames):
        if grey is not None:
            frame = grey.filled(pixels)
        else:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if pixel_format != "rgb24":
                frame = frame.reformat(format=pixel_format)
        frame.pts = position
        packets += [bytes(packet) for packet in context.encode(frame)]
    packets += [bytes(packet) for packet in context.encode(None)]
    return b"".join(packets), {_PARAMETER: planes}


def decode_frames_into(
    destination: NDArray[np.uint8], encoded: memoryview, parameters: Mapping[str, str]
) -> None:
    """Decode frames into uint8[T, H, W] or [T, H, W, 3]."""
    av = _require_av()
    height, width = destination.shape[1:3]
    planes = parameters.get(_PARAMETER, "")
    if planes not in ((_LUMA,) if destination.ndim == 3 else (_RGB, _LOSSY)):
        raise PayloadCorruptError(f"video has planes {planes!r}, which do not fit its shape")
    context = av.CodecContext.create("h264", "r")
    context.thread_count = 1
    # Whatever size the stream claims, no frame larger than the declared one, in whole
    # macroblocks, is allocated.
    context.options = {"max_pixels": str((height + 31) * (width + 31) + 4096)}
    count = 0
    try:
        for frame in _decoded(context, encoded):
            if count == len(destination) or (frame.height, frame.width) != (height, width):
                raise PayloadCorruptError("video decodes to other frames than its header says")
            destination[count] = _pixels(frame, planes)
            count += 1
    except av.FFmpegError as error:
        raise PayloadCorruptError("a video array does not decode") from error
    if count != len(destination):
        raise PayloadCorruptError(f"video has {count} frames, not {len(destination)}")


class _GreyFrame:
    """A frame whose luma is the picture, and whose chroma is grey; reused."""

    def __init__(self, av: Any, width: int, height: int, planar: str) -> None:
        self._frame = av.VideoFrame(width, height, planar)
        luma, *chroma = self._frame.planes
        for plane in chroma:
            plane.update(bytes([128]) * plane.buffer_size)
        self._padded = np.zeros((height, luma.line_size), np.uint8)
        self._width = width

    def filled(self, pixels: NDArray[np.uint8]) -> Any:
        self._padded[:, : self._width] = pixels
        luma = self._frame.planes[0]
        luma.update(self._padded.tobytes().ljust(luma.buffer_size, b"\0"))
        return self._frame


def _decoded(context: Any, encoded: memoryview) -> Any:
    for packet in [*context.parse(bytes(encoded)), *context.parse(b"")]:
        yield from context.decode(packet)
    yield from context.decode(None)


def _pixels(frame: Any, planes: str) -> NDArray[np.uint8]:
    if planes == _LUMA:
        # Straight from the plane: a conversion to a grey format would stretch the range.
        luma = frame.planes[0]
        rows = np.frombuffer(luma, np.uint8)[: luma.line_size * frame.height]
        if not frame.format.name.startswith("yuv"):
            raise PayloadCorruptError(f"grey video decodes to {frame.format.name}")
        return rows.reshape(frame.height, luma.line_size)[:, : frame.width]
    if planes == _RGB and frame.format.name != "gbrp":
        raise PayloadCorruptError(f"RGB video decodes to {frame.format.name}")
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    return pixels


def _require_av() -> Any:
    try:
        import av
    except ImportError:
        raise UnsupportedArrayError("", "codec h264 needs the package av (PyAV)") from None
    return av
