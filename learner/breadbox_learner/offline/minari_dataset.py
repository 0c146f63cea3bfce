"""Minari datasets, when the package minari is installed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from breadbox_learner.offline import trees
from breadbox_learner.offline.episode import Episode
from breadbox_learner.offline.errors import OfflineDataError, UnsupportedDatasetError
from breadbox_learner.offline.trees import Tree

MINARI_SCHEME = "minari:"


def read_minari(path: str) -> Iterator[Episode]:
    """Episodes of `minari:NAME`, one at a time.

    Raises:
        UnsupportedDatasetError: minari is not installed, or there is no such local dataset.
        OfflineDataError: an episode's parts do not fit together.
    """
    try:
        import minari
    except ImportError as error:
        raise UnsupportedDatasetError(
            'needs the package minari: pip install "minari[hdf5]"', file=path
        ) from error
    name = path.removeprefix(MINARI_SCHEME)
    try:
        dataset = minari.load_dataset(name)
    except (FileNotFoundError, ValueError) as error:
        raise UnsupportedDatasetError(f"cannot be opened: {error}", file=path) from error
    for held in dataset.iterate_episodes():
        try:
            yield episode_from_minari(held, name)
        except OfflineDataError as error:
            error.add_place(file=path)
            raise


def episode_from_minari(held: Any, dataset_name: str) -> Episode:
    """One `minari.EpisodeData` as an episode.

    Raises:
        OfflineDataError: its parts do not fit together.
    """
    terminations, truncations = np.asarray(held.terminations), np.asarray(held.truncations)
    is_empty = not len(terminations)
    return Episode(
        id=f"{dataset_name}/{held.id}",
        observations=_arrays(held.observations),
        actions=_arrays(held.actions),
        rewards=np.asarray(held.rewards),
        terminated=not is_empty and bool(terminations[-1]),
        truncated=not is_empty and bool(truncations[-1]),
    )


def _arrays(tree: Tree) -> Tree:
    return trees.map_tree(np.asarray, tree)
