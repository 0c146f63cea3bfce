"""One episode into files, step by step, readable by anybody without executing anything.

Everything is written into a folder of its own and moved into place when the episode is over, so
that a file under its final name is complete. Files, by their keys in the manifest:

    info_path         JSON lines: one for the reset, one for each step
    action_path       npz without objects: action (by leaf), reward, terminated, truncated, value
    obs_path          npz without objects: obs (by leaf), one row for the reset and one for each
                      step; without images, which are in the frames; absent if nothing is left
    video_path        MP4, one frame for the reset and one for each step
    base_image_path   instead of video_path: a folder of 0.jpeg, 1.jpeg and so on
"""

import json
import os
import shutil
import zipfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from breadbox.model.fragment import Tree
from breadbox.model.paths import naming
from breadbox.model.trees import leaves
from breadbox_rollout.recording.media import Frame, FrameWriter, ImageFolderWriter, VideoWriter

_TEXT_CHARACTERS_MAX = 1000
_ARRAY_ELEMENTS_MAX = 256
_COPY_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """What is written of an episode."""

    media: str = "h264"
    """"h264", "jpeg" or "none"."""
    fps: int = 30
    crf: int = 0
    """Constant rate factor of H.264; 0 is lossless."""


class EpisodeFiles:
    """Writes one episode. End with `finish` or `discard`."""

    def __init__(self, folder: Path, episode_id: str, partial: Path, options: FileOptions) -> None:
        self._folder = folder
        self._episode_id = episode_id
        self._partial = partial
        partial.mkdir(parents=True)
        self._infos = (partial / "info").open("w")
        self._columns = _ColumnSpool(partial / "columns")
        self._observations = _ColumnSpool(partial / "observations")
        self._media = options.media
        self._frames: FrameWriter | None = None
        if options.media == "h264":
            self._frames = VideoWriter(partial / "video.mp4", options.fps, options.crf)
        elif options.media == "jpeg":
            self._frames = ImageFolderWriter(partial / "images")

    @property
    def wants_frames(self) -> bool:
        """Whether `add_frame` shall be called."""
        return self._frames is not None

    def add_frame(self, frame: Frame) -> None:
        """Encode the frame of the reset, or of a step."""
        assert self._frames is not None
        self._frames.add(frame)

    def add_info(self, info: dict[str, Any]) -> None:
        """Write one line."""
        self._infos.write(json.dumps(plain(info), allow_nan=False) + "\n")

    def add_step(self, action: Tree, columns: dict[str, Any]) -> None:
        """Write what was done, and numbers that came of it."""
        self._columns.add({"action": action, **columns})

    def add_observation(self, obs: Tree) -> None:
        """Write the observation of the reset, or of a step, without its images."""
        self._observations.add({"obs": without_images(obs)})

    def finish(self) -> dict[str, str]:
        """Put the files in place; returns their names by key."""
        self._close()
        self._columns.write(self._partial / "action")
        names = {
            "info_path": ("info", f"info_{self._episode_id}.jsonl"),
            "action_path": ("action", f"action_{self._episode_id}.npz"),
        }
        if not self._observations.is_empty:
            self._observations.write(self._partial / "obs")
            names["obs_path"] = ("obs", f"obs_{self._episode_id}.npz")
        if self._media == "h264":
            names["video_path"] = ("video.mp4", f"video_{self._episode_id}.mp4")
        elif self._media == "jpeg":
            names["base_image_path"] = ("images", f"images_{self._episode_id}")
        for source, target in names.values():
            (self._partial / source).rename(self._folder / target)
        shutil.rmtree(self._partial)
        return {key: target for key, (_, target) in names.items()}

    def discard(self) -> None:
        """Leave nothing behind, also where there was no room for what is still to be written."""
        with suppress(OSError):
            self._close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _close(self) -> None:
        with ExitStack() as closing:  # Each, also where another one cannot write its rest.
            if self._frames is not None:
                closing.callback(self._frames.close)
            closing.callback(self._observations.close)
            closing.callback(self._columns.close)
            closing.callback(self._infos.close)


class _ColumnSpool:
    """Rows of numbers to disk, column by column; an npz in the end."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._files: dict[str, tuple[BinaryIO, np.dtype[Any], tuple[int, ...]]] = {}
        self._count = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is not a single column."""
        return not self._files

    def add(self, row: Tree) -> None:
        for name, value in leaves(row):
            leaf = np.asarray(value)
            if name not in self._files:
                path = self._folder / f"column-{len(self._files)}"
                self._files[name] = (path.open("w+b"), leaf.dtype, leaf.shape)
            file, dtype, shape = self._files[name]
            if (leaf.dtype, leaf.shape) != (dtype, shape):
                raise ValueError(
                    f"{name} was {dtype}{list(shape)}, is {leaf.dtype}{list(leaf.shape)}"
                )
            file.write(leaf.tobytes())
        self._count += 1

    def write(self, path: Path) -> None:
        """Write what was added; with nothing added, an empty archive."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for index, (name, (_, dtype, shape)) in enumerate(self._files.items()):
                description = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (self._count, *shape),
                }
                raw = self._folder / f"column-{index}"
                with (
                    archive.open(f"{name}.npy", "w", force_zip64=True) as out,
                    raw.open("rb") as source,
                ):
                    np.lib.format.write_array_header_2_0(out, description)
                    shutil.copyfileobj(source, out, _COPY_BYTES)

    def close(self) -> None:
        with ExitStack() as closing:
            for file, _, _ in self._files.values():
                closing.callback(file.close)


def without_images(tree: Tree) -> Tree:
    """Return the tree without leaves that are images (uint8[H, W, channels]); {} for an image."""
    if isinstance(tree, dict):
        return {key: without_images(branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return {str(index): without_images(branch) for index, branch in enumerate(tree)}
    leaf = np.asarray(tree)
    return {} if leaf.dtype == np.uint8 and leaf.ndim == 3 else leaf


def plain(value: Any) -> Any:
    """Return *value* as JSON can hold it: large arrays described, objects as text, NaN as null."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        if value.size > _ARRAY_ELEMENTS_MAX or value.dtype.hasobject:
            return f"{value.dtype}{list(value.shape)}"
        return plain(value.tolist())
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)[:_TEXT_CHARACTERS_MAX]


def append_line(path: Path, data: dict[str, Any]) -> None:
    """Append one JSON line, whole and safely on disk before this returns."""
    left = memoryview((json.dumps(plain(data), allow_nan=False) + "\n").encode())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        with naming(path):
            while left:  # What has room for a part only is written in part, and then fails.
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path, prefix: str) -> None:
    """Remove what a process that was killed had begun."""
    for partial in folder.glob(f".partial-{prefix}-*"):
        shutil.rmtree(partial, ignore_errors=True)
