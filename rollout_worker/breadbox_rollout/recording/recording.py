"""Records episodes of one environment, inside its process, and lists them for the worker."""

import json
import os
import secrets
import shutil
import zipfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox.model.paths import naming
from breadbox.model.trees import leaves
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.environments.environments import Environment
from breadbox_rollout.environments.failures import NoFramesError
from breadbox_rollout.environments.units import StepRecord
from breadbox_rollout.recording.media import (
    Frame,
    FrameWriter,
    ImageFolderWriter,
    VideoWriter,
    as_frame,
    with_text,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Which episodes are written, and how; plain data, sent to the environment processes."""

    folder: str
    """Where the files go; exists."""
    every: int = 1
    """Every so many-th episode of an environment, the first included."""
    env_count: int | None = None
    """Only environments with an index below this, or None for all."""
    overlay: bool = False
    """Write what the policy expects into each frame."""
    media: str = "h264"
    fps: int = 30
    crf: int = 0
    partial_prefix: str = ""
    """Names what belongs to this run, so that another may clean up after a killed process."""


class EpisodeRecorder:
    """A `Recorder` of one environment."""

    def __init__(
        self, options: RecordingOptions, env_index: int, arrays: GroupArrays, row: int
    ) -> None:
        self._options = options
        self._env_index = env_index
        self._arrays = arrays
        self._row = row
        self._seen_count = 0
        self._files: EpisodeFiles | None = None
        self._summary: dict[str, Any] = {}

    def begin(self, env: Environment, obs: Tree, info: dict[str, Any], seed: int | None) -> None:
        """See `Recorder.begin`."""
        self.discard()
        self._seen_count += 1
        count_max = self._options.env_count
        unwanted = count_max is not None and self._env_index >= count_max
        if unwanted or (self._seen_count - 1) % self._options.every:
            return
        episode_id = secrets.token_hex(8)
        folder = Path(self._options.folder)
        name = f".partial-{self._options.partial_prefix}-{self._env_index}-{episode_id}"
        options = FileOptions(
            media=self._options.media, fps=self._options.fps, crf=self._options.crf
        )
        self._files = EpisodeFiles(folder, episode_id, folder / name, options)
        self._summary = {
            "episode_id": episode_id,
            "env_index": self._env_index,
            "seed": seed,
            "step_count": 0,
            "return_sum": 0.0,
        }
        self._files.add_info({"step": 0, "info": _without_frame(info)})
        self._files.add_observation(obs)
        self._add_frame(env, obs, info, value=None)

    def step(self, env: Environment, record: StepRecord) -> None:
        """See `Recorder.step`."""
        if self._files is None:
            return
        summary = self._summary
        version = int(self._arrays.model_version[0])
        summary["step_count"] += 1
        summary["return_sum"] += record.reward
        summary["terminated"] = record.terminated
        summary["truncated"] = record.truncated
        summary.setdefault("model_version_min", version)
        summary["model_version_max"] = version
        self._files.add_step(
            record.action,
            {
                "reward": np.float64(record.reward),
                "terminated": np.bool_(record.terminated),
                "truncated": np.bool_(record.truncated),
                "value": np.float32(record.value),
            },
        )
        self._files.add_info(
            {
                "step": summary["step_count"],
                "reward": record.reward,
                "terminated": record.terminated,
                "truncated": record.truncated,
                "info": _without_frame(record.info),
            }
        )
        self._files.add_observation(record.obs)
        self._add_frame(env, record.obs, record.info, record.value)

    def end(self) -> dict[str, Any] | None:
        """See `Recorder.end`."""
        files, self._files = self._files, None
        return None if files is None else {**self._summary, **files.finish()}

    def discard(self) -> None:
        """See `Recorder.discard`."""
        files, self._files = self._files, None
        if files is not None:
            files.discard()

    def _add_frame(
        self, env: Environment, obs: Tree, info: dict[str, Any], value: float | None
    ) -> None:
        assert self._files is not None
        if not self._files.wants_frames:
            return
        frame = find_frame(env, obs, info)
        if self._options.overlay and value is not None:
            frame = with_text(frame, f"V {value:.3f}")
        self._files.add_frame(frame)


def find_frame(env: Environment, obs: Tree, info: dict[str, Any]) -> Frame:
    """Return what the environment looks like now.

    The info's "pov" (the ancestor's simulator gives one), else what `render` returns, else an
    observation that is an image, or that has one under "image".
    """
    image = info.get("pov")
    if image is None and env.render_mode == "rgb_array":
        image = env.render()
    if image is None:
        image = obs.get("image") if isinstance(obs, dict) else obs
    try:
        return as_frame(image)
    except InvalidRequestError as error:
        raise NoFramesError(error.field, error.problem) from error


def _without_frame(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key != "pov"}


MANIFEST = "manifest.jsonl"
"""One line per finished episode; names of files are relative to its folder."""
FAILURES = "failures.jsonl"
"""One line per failure."""
PATH_KEYS = ("info_path", "action_path", "video_path", "base_image_path")


class Recordings:
    """The folder that environment processes record into, seen from the worker."""

    def __init__(self, options: RecordingOptions, details: dict[str, Any]) -> None:
        self.options = options
        self._folder = Path(options.folder)
        self._details = details

    def add(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Append a line for a finished episode; returns it with full paths."""
        entry = {key: value for key, value in episode.items() if key != "env"} | self._details
        append_line(self._folder / MANIFEST, entry)
        paths = {key: str(self._folder / entry[key]) for key in PATH_KEYS if key in entry}
        return {**entry, **paths}

    def add_failure(self, failure: dict[str, Any]) -> None:
        """Append a line for a failure."""
        append_line(self._folder / FAILURES, failure)

    def clean(self, env_index: int | None = None) -> None:
        """Remove what a process that is gone had begun, or, given None, what any of ours had."""
        prefix = self.options.partial_prefix
        remove_partial(self._folder, prefix if env_index is None else f"{prefix}-{env_index}")
