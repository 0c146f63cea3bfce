"""Looks at a Minari dataset before the package minari does, which believes what it says.

What is refused: spaces that are left out, because the environment that the dataset names would be
made for them, with whatever code it names; links, into other files above all; and sizes that are
stated beyond the limits.
"""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from breadbox_offline.errors import OfflineDataError, named
from breadbox_offline.limits import DataLimits, demand_bytes, nested_at_most

_METADATA_BYTES_MAX = 1 << 26
_FRAMES_AT_ONCE = 64
_JPEG = b"\xff\xd8\xff"


def demand_sound(folder: Path, limits: DataLimits) -> None:
    """Refuse a dataset that must not be opened."""
    metadata = _read_metadata(folder)
    for name in ("observation_space", "action_space"):
        space = metadata.get(name)
        if not isinstance(space, str):
            raise OfflineDataError(
                "is missing: making the environment instead would run code that the data names",
                column=name,
            )
        try:
            with nested_at_most():
                _demand_space(json.loads(space), limits)
        except OfflineDataError as error:
            error.add_place(column=name)
            raise
    file = folder / "main_data.hdf5"
    if metadata.get("data_format") == "hdf5":
        _demand_count(metadata, _demand_file(file, limits))
    else:
        _demand_count(metadata, sum(1 for _ in folder.iterdir()))


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    demand_bytes("its metadata", path.stat().st_size, _METADATA_BYTES_MAX)
    with nested_at_most():
        metadata = json.loads(path.read_bytes())
    if not isinstance(metadata, dict):
        raise OfflineDataError("its metadata are no object")
    return metadata


def _demand_count(metadata: dict[str, Any], held: int) -> None:
    """Refuse more episodes than there are: they are numbered in an array."""
    count = metadata.get("total_episodes")
    if type(count) is not int or not 0 <= count <= held:
        raise OfflineDataError(f"holds {held} episodes, but states another number of them")


def _demand_space(space: Any, limits: DataLimits) -> None:
    if not isinstance(space, dict):
        raise OfflineDataError("a space is no object")
    branches = space.get("subspaces", ())
    for each in branches.values() if isinstance(branches, dict) else branches:
        _demand_space(each, limits)
    # A discrete space has no shape; its `n` is how many values there are.
    stated = space.get("shape", 1 if space.get("type") == "Discrete" else space.get("n", 1))
    sizes: list[Any] = stated if isinstance(stated, list) else [stated]
    count = 1
    for size in sizes:
        if type(size) is not int or size < 0:
            raise OfflineDataError("a space has a shape that is none")
        count *= size
    demand_bytes("a space", 8 * count, limits.array_bytes_max)


def _demand_file(path: Path, limits: DataLimits) -> int:
    """Look at everything in an HDF5 file; returns how many groups are at its top."""
    import h5py

    seen: set[Any] = set()
    with h5py.File(path, "r") as file:
        for name in file:
            size_bytes = _size_of(file, name, name, seen, limits, limits.depth_max)
            demand_bytes(f"{named(name)}", size_bytes, limits.memory_bytes_max)
        return len(file)


def _size_of(
    group: Any, name: str, path: str, seen: set[Any], limits: DataLimits, depth: int
) -> int:
    """Bytes of everything behind a link."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise OfflineDataError("is a link to somewhere else", column=path)
    if not depth:
        raise OfflineDataError("is nested too deeply", column=path)
    held = group[name]
    address = h5py.h5o.get_info(held.id).addr
    if address in seen:
        raise OfflineDataError("is held in two places", column=path)
    seen.add(address)
    if isinstance(held, h5py.Group):
        return sum(_size_of(held, each, f"{path}/{each}", seen, limits, depth - 1) for each in held)
    if not isinstance(held, h5py.Dataset):
        return 0
    if held.external or held.is_virtual:
        raise OfflineDataError("is held in other files", column=path)
    try:
        return _dataset_bytes(held, limits)
    except OfflineDataError as error:
        error.add_place(column=path)
        raise


def _dataset_bytes(held: Any, limits: DataLimits) -> int:
    """Bytes of an array when it is read; of frames, when they are decoded."""
    if held.shape is None:
        return 0
    size_bytes = math.prod(held.shape) * held.dtype.itemsize
    demand_bytes("an array", size_bytes, limits.array_bytes_max)
    if held.dtype.kind == "O":
        # Rows of any length, which may be the same bytes of the file again and again.
        for row in _rows(held):
            size_bytes += len(row) if isinstance(row, bytes) else getattr(row, "nbytes", 0)
            demand_bytes("an array", size_bytes, limits.array_bytes_max)
    if held.dtype.kind == "O" or (held.dtype == np.uint8 and held.ndim == 2):
        first = next(iter(_rows(held)), None)
        if isinstance(first, np.ndarray) and first.tobytes()[:3] == _JPEG:
            width, height = _jpeg_size(first.tobytes())
            demand_bytes("frames", len(held) * width * height * 3, limits.array_bytes_max)
        elif isinstance(first, np.ndarray) and held.dtype.kind == "O":
            raise OfflineDataError("holds rows of different lengths that are no JPEG")
    return int(size_bytes)


def _rows(held: Any) -> Any:
    if held.ndim == 0:
        yield held[()]
        return
    for start in range(0, len(held), _FRAMES_AT_ONCE):
        yield from held[start : start + _FRAMES_AT_ONCE].reshape(
            -1, *(() if held.dtype.kind == "O" else held.shape[1:])
        )


def _jpeg_size(data: bytes) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            return image.size
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise OfflineDataError("holds a frame that is no JPEG") from error
