"""Read episodes that `breadbox generate` recorded: a manifest, and the files its lines name."""

import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model.paths import regular
from breadbox.model.trees import Tree, field_of, gather
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import OfflineDataError, named
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits, check_bytes, nested_at_most
from breadbox_offline.report import FindingKind, ValidationReport

MANIFEST_NAME = "manifest.jsonl"

_LINE_BYTES_MAX = 1 << 20


def read_manifest(
    path: Path, report: ValidationReport, *, limits: DataLimits = DEFAULT_LIMITS
) -> Iterator[Episode]:
    """Yield a manifest's episodes, of frames if it has no observations; report unreadable lines."""
    manifest = path / MANIFEST_NAME if path.is_dir() else path
    report.file = str(manifest)
    for row, line in enumerate(_lines(manifest)):
        try:
            yield _read_episode(manifest.parent, line, limits)
        except OfflineDataError as error:
            report.note(FindingKind.MALFORMED, error.problem, row=row, column=error.column)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            report.note(FindingKind.MALFORMED, str(error) or type(error).__name__, row=row)


def _lines(manifest: Path) -> Iterator[bytes]:
    try:
        with open(manifest, "rb", opener=regular) as file:
            while line := file.readline(_LINE_BYTES_MAX):
                if line.strip():
                    yield line
    except OSError as error:
        raise OfflineDataError(f"cannot be read: {error}", file=str(manifest)) from error


def _read_episode(folder: Path, line: bytes, limits: DataLimits) -> Episode:
    with nested_at_most():
        entry = json.loads(line)
    if not isinstance(entry, dict):
        raise OfflineDataError("a line of a manifest is an object")
    columns = _read_npz(_file_of(folder, entry, "action_path"), limits)
    observations = _read_observations(folder, entry, limits)
    action = _tree(columns, "action")
    terminated, truncated = columns["terminated"], columns["truncated"]
    return Episode(
        id=str(entry["episode_id"]),
        observations=observations,
        actions=action,
        rewards=columns["reward"],
        terminated=bool(terminated[-1]),
        truncated=bool(truncated[-1]),
        extra_model_outputs={"value": columns["value"]} if "value" in columns else {},
    )


def _file_of(folder: Path, entry: dict[str, Any], key: str) -> Path:
    """Return the path of a file that a line names, or refuse one outside the manifest's folder."""
    name = entry.get(key)
    if not isinstance(name, str):
        raise OfflineDataError("is not named", column=key)
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise OfflineDataError(f"{name!r} is outside the manifest's folder", column=key)
    return path


def _read_npz(path: Path, limits: DataLimits) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        for member in members:
            # Numpy trusts an array's header, which may state more than the file has.
            with archive.open(member) as held:
                stated_bytes = max(member.file_size, _stated_bytes(held))
            check_bytes(f"{path.name}: {member.filename}", stated_bytes, limits.array_bytes_max)
        total_bytes = sum(member.file_size for member in members)
        check_bytes(path.name, total_bytes, limits.array_bytes_max)
    with np.load(path, allow_pickle=False) as held:
        return dict(held)


def _stated_bytes(file: IO[bytes]) -> int:
    """Return the bytes of the array that a file states, or 0 if it is no array."""
    try:
        is_first = np.lib.format.read_magic(file) == (1, 0)
        headers = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
        shape, _, dtype = headers[0 if is_first else 1](file)
    except ValueError:
        return 0
    return math.prod(shape) * dtype.itemsize


def _read_observations(folder: Path, entry: dict[str, Any], limits: DataLimits) -> Tree:
    tree: Tree = None
    if "obs_path" in entry:
        tree = _tree(_read_npz(_file_of(folder, entry, "obs_path"), limits), "obs")
    if isinstance(tree, np.ndarray):
        return tree
    if "video_path" in entry:
        frames = _decode(_file_of(folder, entry, "video_path"), "mp4", limits)
    elif "base_image_path" in entry:
        frames = _read_images(_file_of(folder, entry, "base_image_path"), limits)
    elif tree is None:
        raise OfflineDataError("neither observations nor frames were recorded", column="obs_path")
    else:
        return tree
    return frames if tree is None else {**tree, "image": frames}


def _tree(columns: dict[str, NDArray[Any]], root: str) -> Tree:
    try:
        tree = gather({name: each for name, each in columns.items() if field_of(name) == root})
    except ValueError as error:
        raise OfflineDataError(f"holds columns of no tree: {error}") from error
    if root not in tree:
        raise OfflineDataError(f"holds no column {root!r}")
    return tree[root]


def _decode(path: Path, form: str, limits: DataLimits) -> NDArray[np.uint8]:
    """Decode all frames of a file of a given container; other containers can name more files."""
    import av

    frames: list[NDArray[np.uint8]] = []
    size_bytes = 0
    try:
        with path.open("rb") as file, av.open(file, "r", format=form) as container:
            # The decoder checks this limit before it allocates a frame of the stated size.
            stream = container.streams.video[0]
            stream.codec_context.options = {"max_pixels": str(limits.array_bytes_max // 3)}
            for frame in container.decode(stream):
                size_bytes += frame.width * frame.height * 3
                check_bytes(f"{path.name}: its frames", size_bytes, limits.array_bytes_max)
                frames.append(np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8))
    except (av.FFmpegError, IndexError) as error:
        raise OfflineDataError(f"{path.name} cannot be decoded: {error}") from error
    if not frames:
        raise OfflineDataError(f"{path.name} has no frames")
    return np.stack(frames)


def _read_images(folder: Path, limits: DataLimits) -> NDArray[np.uint8]:
    paths = sorted(folder.glob("*.jpeg"), key=lambda path: int(path.stem))
    frames: list[NDArray[np.uint8]] = []
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise OfflineDataError(f"{named(path.name)} is no file")
        frames.append(_decode(path, "jpeg_pipe", limits)[0])
        size_bytes = len(paths) * frames[0].nbytes
        check_bytes(f"{folder.name}: its images", size_bytes, limits.array_bytes_max)
    if not frames:
        raise OfflineDataError(f"{folder.name} has no images")
    return np.stack(frames)
