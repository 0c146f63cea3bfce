"""Record episodes of one environment, inside its process, and list them for the worker.

Encoding slows the environment down, but not inference. Files get their names when complete, and
reading one executes nothing. The files, by their keys in the manifest:

    info_path         JSON lines: one for the reset, one for each step
    action_path       npz without objects: action (by leaf), reward, terminated, truncated, value
    obs_path          npz without objects: obs (by leaf), one row for the reset and one for each
                      step; without images, which are in the frames; absent if nothing is left
    video_path        MP4, one frame for the reset and one for each step
    base_image_path   instead of video_path: a folder of 0.jpeg, 1.jpeg and so on
"""

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
    ImageFolderWriter,
    VideoWriter,
    as_frame,
    with_text,
)

MANIFEST = "manifest.jsonl"
"""Name of the list of finished episodes, a line each; its paths are relative to its folder."""
FAILURES = "failures.jsonl"
PATH_KEYS = ("info_path", "action_path", "video_path", "base_image_path")

_TEXT_CHARACTERS_MAX = 1000
_ARRAY_ELEMENTS_MAX = 256
_COPY_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Which episodes to write, and how; plain data, sent to the environment processes."""

    folder: str
    """Existing folder of the files."""
    every: int = 1
    """Record every *every*-th episode of an environment, beginning with the first."""
    env_count: int | None = None
    """Record only environments with a lower index, or None for all."""
    overlay: bool = False
    media: str = "h264"
    fps: int = 30
    crf: int = 0
    partial_prefix: str = ""
    """Prefix of this run's unfinished files, so that they can be removed after a kill."""


class EpisodeRecorder:
    """The `Recorder` of one environment: *row* of its group's arrays, *env_index* of the worker."""

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
        self.discard()
        self._seen_count += 1
        count_max = self._options.env_count
        unwanted = count_max is not None and self._env_index >= count_max
        if unwanted or (self._seen_count - 1) % self._options.every:
            return
        episode_id = secrets.token_hex(8)
        name = f".partial-{self._options.partial_prefix}-{self._env_index}-{episode_id}"
        self._files = EpisodeFiles(self._options, episode_id, name)
        self._summary = {
            "episode_id": episode_id,
            "env_index": self._env_index,
            "seed": seed,
            "step_count": 0,
            "return_sum": 0.0,
        }
        self._add_result(self._files, env, obs, info, {"step": 0}, value=None)

    def step(self, env: Environment, record: StepRecord) -> None:
        if self._files is None:
            return
        summary, version = self._summary, int(self._arrays.model_version[0])
        summary["step_count"] += 1
        summary["return_sum"] += record.reward
        ends = {"terminated": record.terminated, "truncated": record.truncated}
        summary.update(ends, model_version_max=version)
        summary.setdefault("model_version_min", version)
        columns = {name: np.bool_(flag) for name, flag in ends.items()}
        self._files.add_step(
            record.action,
            {"reward": np.float64(record.reward), **columns, "value": np.float32(record.value)},
        )
        line = {"step": summary["step_count"], "reward": record.reward, **ends}
        self._add_result(self._files, env, record.obs, record.info, line, record.value)

    def end(self) -> dict[str, Any] | None:
        files, self._files = self._files, None
        return None if files is None else {**self._summary, **files.finish()}

    def discard(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.discard()

    def _add_result(
        self,
        files: "EpisodeFiles",
        env: Environment,
        obs: Tree,
        info: dict[str, Any],
        line: dict[str, Any],
        value: float | None,
    ) -> None:
        shown = {key: each for key, each in info.items() if key != "pov"}
        files.add_info({**line, "info": shown})
        files.add_observation(obs)
        if files.wants_frames:
            frame = _find_frame(env, obs, info)
            if self._options.overlay and value is not None:
                frame = with_text(frame, f"V {value:.3f}")
            files.add_frame(frame)


def _find_frame(env: Environment, obs: Tree, info: dict[str, Any]) -> Frame:
    """Return the frame: info's "pov", else `render`, else an image; or raise NoFramesError."""
    image = info.get("pov")
    if image is None and env.render_mode == "rgb_array":
        image = env.render()
    if image is None:
        image = obs.get("image") if isinstance(obs, dict) else obs
    try:
        return as_frame(image)
    except InvalidRequestError as error:
        raise NoFramesError(error.field, error.problem) from error


class EpisodeFiles:
    """Write one episode, step by step. End with `finish` or `discard`."""

    def __init__(self, options: RecordingOptions, episode_id: str, partial: str) -> None:
        """Make the temporary folder *partial* in the folder of the files."""
        self._folder = Path(options.folder)
        self._episode_id = episode_id
        self._partial = self._folder / partial
        self._partial.mkdir(parents=True)
        self._infos = (self._partial / "info").open("w")
        self._columns = _ColumnSpool(self._partial / "columns")
        self._observations = _ColumnSpool(self._partial / "observations")
        self._media = options.media
        self._frames: VideoWriter | ImageFolderWriter | None = None
        if options.media == "h264":
            self._frames = VideoWriter(self._partial / "video.mp4", options.fps, options.crf)
        elif options.media == "jpeg":
            self._frames = ImageFolderWriter(self._partial / "images")

    @property
    def wants_frames(self) -> bool:
        """True if `add_frame` must be called."""
        return self._frames is not None

    def add_frame(self, frame: Frame) -> None:
        """Encode the frame of the reset or of a step."""
        assert self._frames is not None
        self._frames.add(frame)

    def add_info(self, info: dict[str, Any]) -> None:
        """Write one line."""
        self._infos.write(json.dumps(plain(info), allow_nan=False) + "\n")

    def add_step(self, action: Tree, columns: dict[str, Any]) -> None:
        """Write the action of a step, and its numbers."""
        self._columns.add({"action": action, **columns})

    def add_observation(self, obs: Tree) -> None:
        """Write the observation of the reset or of a step, without its images."""
        self._observations.add({"obs": _without_images(obs)})

    def finish(self) -> dict[str, str]:
        """Rename the files to their final names; return these by key."""
        self._close()
        self._columns.write(self._partial / "action")
        names = {
            "info_path": ("info", f"info_{self._episode_id}.jsonl"),
            "action_path": ("action", f"action_{self._episode_id}.npz"),
        }
        if self._observations.files:
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
        """Remove everything, even after an error such as a full disk."""
        with suppress(OSError):
            self._close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _close(self) -> None:
        with ExitStack() as closing:  # Close each one, even if another one raises.
            if self._frames is not None:
                closing.callback(self._frames.close)
            for spool in (self._observations, self._columns):
                for file, _, _ in spool.files.values():
                    closing.callback(file.close)
            closing.callback(self._infos.close)


class _ColumnSpool:
    """Spool rows of numbers to disk, column by column; write an npz at the end."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.files: dict[str, tuple[BinaryIO, np.dtype[Any], tuple[int, ...]]] = {}
        self._count = 0

    def add(self, row: Tree) -> None:
        for name, value in leaves(row):
            leaf = np.asarray(value)
            if name not in self.files:
                path = self._folder / f"column-{len(self.files)}"
                self.files[name] = (path.open("w+b"), leaf.dtype, leaf.shape)
            file, dtype, shape = self.files[name]
            if (leaf.dtype, leaf.shape) != (dtype, shape):
                raise ValueError(
                    f"{name} was {dtype}{list(shape)}, is {leaf.dtype}{list(leaf.shape)}"
                )
            file.write(leaf.tobytes())
        self._count += 1

    def write(self, path: Path) -> None:
        """Write an archive of the rows, empty without any."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for index, (name, (_, dtype, shape)) in enumerate(self.files.items()):
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


def _without_images(tree: Tree) -> Tree:
    """Return the tree without leaves that are images (uint8[H, W, channels]); {} for an image."""
    if isinstance(tree, list | tuple):
        tree = {str(index): branch for index, branch in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: _without_images(branch) for key, branch in tree.items()}
    leaf = np.asarray(tree)
    return {} if leaf.dtype == np.uint8 and leaf.ndim == 3 else leaf


def plain(value: Any) -> Any:
    """Return *value* for JSON: large arrays described, objects as text, NaN as null."""
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
    """Append one JSON line, and return once it is complete and durable."""
    left = memoryview((json.dumps(plain(data), allow_nan=False) + "\n").encode())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        with naming(path):
            while left:  # A full disk may take a part before it fails.
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Recordings:
    """The worker's view of the folder that environment processes record into."""

    def __init__(self, options: RecordingOptions, details: dict[str, Any]) -> None:
        """Add *details* to each line; the processes have the same *options*."""
        self.options = options
        self._folder = Path(options.folder)
        self._details = details

    def add(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Append a line for a finished episode; return it with full paths."""
        entry = {key: value for key, value in episode.items() if key != "env"} | self._details
        append_line(self._folder / MANIFEST, entry)
        paths = {key: str(self._folder / entry[key]) for key in PATH_KEYS if key in entry}
        return {**entry, **paths}

    def add_failure(self, failure: dict[str, Any]) -> None:
        """Append a line for a failure."""
        append_line(self._folder / FAILURES, failure)

    def clean(self, env_index: int | None = None) -> None:
        """Remove unfinished files of one environment, or with None of all of this run."""
        prefix = self.options.partial_prefix
        own = prefix if env_index is None else f"{prefix}-{env_index}"
        for partial in self._folder.glob(f".partial-{own}-*"):
            shutil.rmtree(partial, ignore_errors=True)
