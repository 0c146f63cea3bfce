"""H.264 for frames: uint8 arrays [T, H, W] or [T, H, W, 3], by way of PyAV.

Lossless by default: colour frames as RGB planes (libx264rgb at quantizer 0), grey ones as the
luma plane beside constant chroma. Both decode to the very same bytes. With a quality (1 best to 51
worst, as x264's crf) frames are lossy, for recordings and policies that bear it.

The encoded bytes are one Annex B stream, one packet per frame, no container.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, UnsupportedArrayError

QUALITIES: Final = range(1, 52)

_SIDE_MAX: Final = 8192
"""Pixels: beyond what level 6.2 of the standard allows."""

_BYTES_PER_FRAME_MIN: Final = 4
"""A frame is at least a start code and a header: bounds the frames that few bytes can claim."""

_PARAMETER: Final = "planes"
_LUMA: Final = "luma"
_RGB: Final = "rgb"
_LOSSY: Final = "lossy"


def is_video(shape: Sequence[int], type_name: str) -> bool:
    """Whether an array can be encoded: frames, at least one, of a size that H.264 knows."""
    is_frames = len(shape) == 3 or (len(shape) == 4 and shape[3] == 3)
    return (type_name == "|u1" and is_frames and shape[0] > 0 and min(shape[1:3]) > 0) and max(
        shape[1:3]
    ) <= _SIDE_MAX


def is_plausible(shape: Sequence[int], type_name: str, encoded_bytes: int) -> bool:
    """Whether a header's claim can be true: checked before memory is taken for the frames."""
    return is_video(shape, type_name) and shape[0] * _BYTES_PER_FRAME_MIN <= encoded_bytes


def encode_frames(
    frames: NDArray[np.uint8], quality: int | None
) -> tuple[bytes, Mapping[str, str]]:
    """Encode frames; returns the stream and what a decoder must know.

    Args:
        frames: uint8[T, H, W] or [T, H, W, 3], C-contiguous; see `is_video`.
        quality: None for lossless.

    Raises:
        UnsupportedArrayError: PyAV is not installed.
    """
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
    """Decode frames into uint8[T, H, W] or [T, H, W, 3].

    Raises:
        PayloadCorruptError: The stream does not decode, or to other frames than declared.
        UnsupportedArrayError: PyAV is not installed.
    """
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
    """A frame whose luma is the picture and whose chroma says grey; used again and again."""

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
