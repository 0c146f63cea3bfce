"""Write frames as they come: H.264 in MP4, or one JPEG per frame. Memory does not grow."""

from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from breadbox.model.errors import InvalidRequestError

Frame = NDArray[np.uint8]
"""uint8[height, width, 3], red first."""


class VideoWriter:
    """Write an MP4 file of H.264."""

    def __init__(self, path: Path, fps: int, crf: int = 0) -> None:
        self._path = path
        self._fps = fps
        self._crf = crf
        self._container: av.container.OutputContainer | None = None
        self._stream: VideoStream | None = None

    def add(self, frame: Frame) -> None:
        """Encode one frame; all have the same size."""
        if self._crf > 0:
            # The lossy format halves colour in both directions, so it needs even sides.
            frame = np.pad(
                frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), "edge"
            )
        if self._stream is None or self._container is None:
            self._container, self._stream = self._open(frame)
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        self._container.mux(self._stream.encode(picture))

    def close(self) -> None:
        """Complete the file, even without a frame. Idempotent."""
        container, self._container = self._container, None
        if container is not None and self._stream is not None:
            container.mux(self._stream.encode(None))
            container.close()

    def _open(self, frame: Frame) -> tuple["av.container.OutputContainer", VideoStream]:
        container = av.open(str(self._path), "w")
        codec = "libx264" if self._crf > 0 else "libx264rgb"
        quality = {"crf": str(self._crf)} if self._crf > 0 else {"qp": "0"}
        options = {**quality, "preset": "ultrafast"}
        stream = cast(VideoStream, container.add_stream(codec, rate=self._fps, options=options))
        stream.height, stream.width = frame.shape[:2]
        stream.pix_fmt = "yuv420p" if self._crf > 0 else "rgb24"
        # One thread, because each environment has a process already.
        stream.thread_count = 1
        return container, stream


class ImageFolderWriter:
    """Write a folder of 0.jpeg, 1.jpeg and so on."""

    def __init__(self, folder: Path, quality: int = 95) -> None:
        self._folder = folder
        self._quality = quality
        self._count = 0
        folder.mkdir(parents=True)

    def add(self, frame: Frame) -> None:
        """Write one frame."""
        path = self._folder / f"{self._count}.jpeg"
        Image.fromarray(frame).save(path, quality=self._quality)
        self._count += 1

    def close(self) -> None:
        """Do nothing: each file is complete."""


def as_frame(image: object) -> Frame:
    """Return an image of an environment as a frame."""
    array = np.asarray(image)
    if array.dtype == np.uint8 and array.ndim == 2:
        array = array[:, :, None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        got = f"{array.dtype}{list(array.shape)}"
        raise InvalidRequestError("frame", f"must be uint8[height, width, 3], got {got}")
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return array[:, :, :3]


def with_text(frame: Frame, text: str) -> Frame:
    """Return a copy of the frame with *text* in its upper left corner."""
    image = Image.fromarray(frame)
    draw = ImageDraw.Draw(image)
    draw.text((2, 1), text, fill=(255, 255, 255), stroke_width=1, stroke_fill=(0, 0, 0))
    return np.asarray(image)
