"""What the steps of a fragment led to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.columns import Columns
from breadbox.mirror.storage.frames import Piece
from breadbox.model.fragment import Fragment


@dataclass(frozen=True, slots=True)
class End:
    """The end of an episode within a fragment."""

    row: int | None
    """Row of its true final observation, or None if that is unknown."""
    is_usable: bool
    """Whether the step can be learned from: what it led to is known, or is of no account."""


def ends_of(fragment: Fragment) -> dict[int, End]:
    """The steps of a fragment that ended an episode."""
    rows: dict[int, int] = {}
    if fragment.final_obs is not None and fragment.final_obs_step is not None:
        rows = {int(step): row for row, step in enumerate(fragment.final_obs_step)}
    return {
        step: End(rows.get(step), step in rows or bool(fragment.terminated[step]))
        for step in fragment.ended.nonzero()[0].tolist()
    }


def following(
    columns: Columns,
    fragment: Fragment,
    arrays: Mapping[str, NDArray[Any]],
    ends: Mapping[int, End],
) -> tuple[dict[str, NDArray[Any]], dict[str, list[Piece]]]:
    """What each step led to: small arrays by path, and pieces of the large ones.

    Args:
        columns: That they go to.
        fragment: Whose steps they are.
        arrays: Of the fragment, by path.
        ends: Of episodes in it.

    Raises:
        TreeMismatchError: The observations behind them differ from the others.
    """
    where = f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r}"
    count = fragment.step_count
    tails = {
        step: columns.observation_of(fragment.final_obs, end.row, where)
        for step, end in ends.items()
        if end.row is not None
    }
    if count - 1 not in ends:
        tails[count - 1] = columns.observation_of(fragment.next_obs, None, where)
    small: dict[str, NDArray[Any]] = {}
    pieces: dict[str, list[Piece]] = {}
    bounds = sorted({*ends, count - 1})
    for number, path in enumerate(columns.observation_paths()):
        array = arrays[path]
        if path in columns.rings:
            pieces[path] = [
                Piece(before + 1, step + 1, tails[step][number] if step in tails else None)
                for before, step in zip([-1, *bounds], bounds, strict=False)
            ]
            continue
        moved = np.empty_like(array)
        moved[:-1] = array[1:]
        for step in bounds:
            moved[step] = tails[step][number] if step in tails else array[step]
        small[path] = moved
    return small, pieces
