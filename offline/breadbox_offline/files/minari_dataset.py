"""Read and write Minari datasets, if the package minari is installed."""

import io
import json
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.paths import read_regular
from breadbox.model.trees import Tree
from breadbox.shared.extras import how_to_install
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import (
    OfflineDataError,
    SchemaError,
    SpaceMismatchError,
    UnsupportedDatasetError,
    named,
    placed,
)
from breadbox_offline.files.writers import WrittenCounts
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits, check_bytes, nested_at_most

MINARI_SCHEME = "minari:"

_EPISODES_PER_WRITE = 64
_UNSOUND = (
    *(ArithmeticError, AssertionError, AttributeError, KeyError, IndexError, NotImplementedError),
    *(OSError, RecursionError, RuntimeError, TypeError, ValueError),
)
"""Errors that the package raises for datasets that it does not expect."""


def read_minari(path: str, *, limits: DataLimits = DEFAULT_LIMITS) -> Iterator[Episode]:
    """Yield episodes of `minari:NAME`; OfflineDataError for bad names, code, sizes or shapes."""
    minari = _import_minari(path)
    name = path.removeprefix(MINARI_SCHEME)
    try:
        from minari.storage.datasets_root_dir import get_dataset_path

        folder = get_dataset_path(name) / "data"
        if folder.is_dir():
            check_sound(folder, limits)
        dataset = minari.load_dataset(name)
    except ImportError as error:
        raise _missing_package(path) from error
    except OfflineDataError as error:
        error.add_place(file=path)
        raise
    except _UNSOUND as error:
        raise UnsupportedDatasetError(f"cannot be opened: {error}", file=path) from error
    episodes = iter(dataset.iterate_episodes())
    while True:
        try:
            held = next(episodes, None)
        except _UNSOUND as error:
            raise OfflineDataError(
                f"cannot be read: {type(error).__name__} {error}".splitlines()[0], file=path
            ) from error
        if held is None:
            return
        with placed(file=path):
            episode = _episode_of(held, name, dataset, limits)
        yield episode


def _episode_of(held: Any, dataset_name: str, dataset: Any, limits: DataLimits) -> Episode:
    terminations, truncations = np.asarray(held.terminations), np.asarray(held.truncations)
    is_empty = not len(terminations)
    return Episode(
        id=f"{dataset_name}/{held.id}",
        observations=_arrays(held.observations, dataset.observation_space, limits),
        actions=_arrays(held.actions, dataset.action_space, limits),
        rewards=np.asarray(held.rewards),
        terminated=not is_empty and bool(terminations[-1]),
        truncated=not is_empty and bool(truncations[-1]),
    )


def _arrays(held: Any, space: Any, limits: DataLimits) -> Tree:
    """Return recorded samples as arrays; text as wide as its space allows, in all episodes."""
    if isinstance(held, dict | tuple):
        parts = getattr(space, "spaces", {})
        keyed = [*held.items()] if isinstance(held, dict) else [*enumerate(held)]
        made = {key: _arrays(each, parts[key], limits) for key, each in keyed}
        return made if isinstance(held, dict) else tuple(made.values())
    array = np.asarray(held)
    if not isinstance(space, spaces.Text) or array.dtype.kind != "U":
        return array
    width = max(space.max_length, array.dtype.itemsize // 4)
    check_bytes("text", 4 * width * array.size, limits.array_bytes_max)
    return array.astype(f"<U{width}")


def write_minari(
    episodes: Iterable[Episode], path: str, *, env_id: str | None = None
) -> WrittenCounts:
    """Write episodes to the new local dataset `minari:NAME`; remove it if that fails.

    Images are stored uncompressed. A Minari dataset cannot hold extra model outputs, infos and
    agent ids; they are left out.

    Args:
        episodes: Any number; a few are in memory at a time.
        path: `minari:` and a Minari dataset id, such as `minari:cartpole/expert-v0`.
        env_id: A Gymnasium environment that the dataset takes its spaces from and can recover; or
            None for boxes with the limits of the first episode's dtypes.

    Raises:
        UnsupportedDatasetError: minari is not installed, the id is invalid, a dataset of that name
            exists, or there is no such environment.
        SpaceMismatchError: An episode does not fit the spaces.
        SchemaError: There is no episode, or one has arrays that Minari has no space for.
    """
    minari = _import_minari(path)
    remaining = iter(episodes)
    first = next(remaining, None)
    if first is None:
        raise SchemaError("there are no episodes to take the spaces from", file=path)
    dataset = _create_dataset(minari, path, first, env_id)
    episode_count = step_count = 0
    everything = chain([first], remaining)
    try:
        while group := list(islice(everything, _EPISODES_PER_WRITE)):
            for episode in group:
                _check_spaces(episode, dataset, path)
            dataset.update_dataset_from_buffer([_to_minari(minari, each) for each in group])
            episode_count += len(group)
            step_count += sum(len(episode) for episode in group)
    except BaseException:
        shutil.rmtree(Path(dataset.storage.data_path).parent)
        raise
    return WrittenCounts(episode_count, step_count)


def _import_minari(path: str) -> ModuleType:
    try:
        import minari
    except ImportError as error:
        raise _missing_package(path) from error
    module: ModuleType = minari
    return module


def _missing_package(path: str) -> UnsupportedDatasetError:
    return UnsupportedDatasetError(
        f"needs the packages minari and h5py: {how_to_install('minari')}", file=path
    )


def _create_dataset(minari: ModuleType, path: str, first: Episode, env_id: str | None) -> Any:
    if env_id is None:
        held: dict[str, Any] = {
            "observation_space": _space_of(first.observations, path),
            "action_space": _space_of(first.actions, path),
        }
    else:
        try:
            held = {"env": gymnasium.make(env_id)}
        except gymnasium.error.Error as error:
            raise UnsupportedDatasetError(
                f"environment {env_id!r} cannot be made: {error}", file=path
            ) from error
    try:
        with warnings.catch_warnings():
            # It warns of a missing author, code and so on, which the user may not know.
            warnings.simplefilter("ignore", UserWarning)
            return minari.create_dataset_from_buffers(
                path.removeprefix(MINARI_SCHEME), [], jpeg_encoding=False, **held
            )
    except ImportError as error:
        raise _missing_package(path) from error
    except (OSError, ValueError) as error:
        raise UnsupportedDatasetError(f"cannot be written: {error}", file=path) from error


def _space_of(tree: Tree, path: str) -> spaces.Space[Any]:
    if isinstance(tree, dict):
        return spaces.Dict({str(key): _space_of(branch, path) for key, branch in tree.items()})
    if isinstance(tree, tuple):
        return spaces.Tuple([_space_of(branch, path) for branch in tree])
    leaf: NDArray[Any] = tree
    shape, dtype = leaf.shape[1:], leaf.dtype
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, shape, dtype.type)
    if dtype.kind == "b" and shape:
        return spaces.MultiBinary(shape)
    if dtype.kind == "b":
        return spaces.Discrete(2)
    raise SchemaError(f"there is no Minari space for arrays of {dtype}", file=path)


def _check_spaces(episode: Episode, dataset: Any, path: str) -> None:
    pairs = (
        ("observation", dataset.observation_space, episode.own_observations()),
        ("action", dataset.action_space, episode.own_actions()),
    )
    for name, space, tree in pairs:
        sample = trees.map_tree(lambda leaf: _sample(leaf[0]), tree)
        with warnings.catch_warnings():
            # The error below replaces its warning.
            warnings.simplefilter("ignore", UserWarning)
            fits = space.contains(sample)
        if not fits:
            raise SpaceMismatchError(
                f"the {name} of episode {episode.id!r} does not fit {space}", file=path
            )


def _sample(value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.int8) if array.dtype == np.bool_ else array


def _to_minari(minari: ModuleType, episode: Episode) -> Any:
    last = np.arange(len(episode)) == len(episode) - 1
    done = episode.as_truncated()
    return minari.data_collector.EpisodeBuffer(
        observations=episode.own_observations(),
        actions=episode.own_actions(),
        rewards=episode.own_rewards(),
        terminations=last & done.terminated,
        truncations=last & done.truncated,
    )


_METADATA_BYTES_MAX = 1 << 26
_FRAMES_AT_ONCE = 64
_JPEG = b"\xff\xd8\xff"


def check_sound(folder: Path, limits: DataLimits) -> None:
    """Refuse a dataset that could execute code or exhaust memory when opened."""
    metadata = _read_metadata(folder)
    for name in ("observation_space", "action_space"):
        space = metadata.get(name)
        if not isinstance(space, str):
            raise OfflineDataError(
                "is missing: making the environment instead would run code that the data names",
                column=name,
            )
        with placed(column=name), nested_at_most():
            _check_space(json.loads(space), limits)
    file = folder / "main_data.hdf5"
    if metadata.get("data_format") == "hdf5":
        _check_count(metadata, _check_file(file, limits))
    else:
        _check_count(metadata, sum(1 for _ in folder.iterdir()))


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    check_bytes("its metadata", path.stat().st_size, _METADATA_BYTES_MAX)
    with nested_at_most():
        metadata = json.loads(read_regular(path))
    if not isinstance(metadata, dict):
        raise OfflineDataError("its metadata are no object")
    return metadata


def _check_count(metadata: dict[str, Any], held: int) -> None:
    count = metadata.get("total_episodes")
    if type(count) is not int or not 0 <= count <= held:
        raise OfflineDataError(f"holds {held} episodes, but states another number of them")


def _check_space(space: Any, limits: DataLimits) -> None:
    if not isinstance(space, dict):
        raise OfflineDataError("a space is no object")
    branches = space.get("subspaces", ())
    for each in branches.values() if isinstance(branches, dict) else branches:
        _check_space(each, limits)
    # A discrete space has no shape; its `n` is the number of its values.
    stated = space.get("shape", 1 if space.get("type") == "Discrete" else space.get("n", 1))
    sizes: list[Any] = stated if isinstance(stated, list) else [stated]
    count = 1
    for size in sizes:
        if type(size) is not int or size < 0:
            raise OfflineDataError("a space has an invalid shape")
        count *= size
    check_bytes("a space", 8 * count, limits.array_bytes_max)


def _check_file(path: Path, limits: DataLimits) -> int:
    """Check everything in an HDF5 file; return the number of groups at its top."""
    import h5py

    seen: set[Any] = set()
    with h5py.File(path, "r") as file:
        for name in file:
            size_bytes = _size_of(file, name, name, seen, limits, limits.depth_max)
            check_bytes(f"{named(name)}", size_bytes, limits.memory_bytes_max)
        return len(file)


def _size_of(
    group: Any, name: str, path: str, seen: set[Any], limits: DataLimits, depth: int
) -> int:
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
    with placed(column=path):
        return _dataset_bytes(held, limits)


def _dataset_bytes(held: Any, limits: DataLimits) -> int:
    """Return the bytes of an array when it is read, or of decoded frames."""
    if held.shape is None:
        return 0
    size_bytes = math.prod(held.shape) * held.dtype.itemsize
    check_bytes("an array", size_bytes, limits.array_bytes_max)
    if held.dtype.kind == "O":
        # Rows of any length, which may all be the same bytes of the file.
        for row in _rows(held):
            size_bytes += len(row) if isinstance(row, bytes) else getattr(row, "nbytes", 0)
            check_bytes("an array", size_bytes, limits.array_bytes_max)
    if held.dtype.kind == "O" or (held.dtype == np.uint8 and held.ndim == 2):
        first = next(iter(_rows(held)), None)
        if isinstance(first, np.ndarray) and first.tobytes()[:3] == _JPEG:
            width, height = _jpeg_size(first.tobytes())
            check_bytes("frames", len(held) * width * height * 3, limits.array_bytes_max)
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
