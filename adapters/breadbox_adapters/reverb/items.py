"""Items as fragments and back.

An item is a fragment of one step, and with one fragment to a chunk also a chunk: its `chunk_id` is
the item's key. The whole trajectory is what that step has in `extras`, so each of its arrays has
one more axis in front than Reverb's; trajectories of any lengths are fragments of one length.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentReference
from breadbox_adapters.reverb.structures import map_leaves, restored, stored

PRIORITY_MAX = 1e30
"""A larger one is a loss that diverged."""
ITEM = "item"
"""The entry of `extras` in which an item is."""
_NOTHING = np.zeros(1, np.float32)
_NO = np.zeros(1, np.bool_)


class SampleInfo(NamedTuple):
    """What is known of an item that was drawn."""

    key: int
    """Of the item, for `mutate_priorities`."""
    probability: float
    """Of being the one that was drawn, at the draw."""
    table_size: int
    """Items in the table at the draw."""
    priority: float
    """At the draw."""
    times_sampled: int
    """Draws of the item, this one included."""


class ReplaySample(NamedTuple):
    """An item, or one of its steps, that was drawn."""

    info: SampleInfo
    data: Any
    """Arrays, in a flat list or in the structure of the trajectory."""


def check_priority(priority: float) -> float:
    """Refuse what can be no priority before anything is changed.

    Raises:
        ValueError: It is negative, above 1e30, or not a number.
    """
    value = float(priority)
    if not 0 <= value <= PRIORITY_MAX:
        raise ValueError(f"a priority must be from 0 to {PRIORITY_MAX:g}, got {priority}")
    return value


def fragment_of(tree: Any, priority: float, *, worker_id: str, index: int) -> Fragment:
    """The fragment that holds an item. Its session is told when it is sent.

    Args:
        tree: The trajectory: arrays in a structure.
        priority: As checked.
        worker_id: Of the writer.
        index: Of the item among the writer's for this table.
    """
    return Fragment(
        worker_id=worker_id,
        fragment_index=index,
        session_id="",
        model_version_min=0,
        model_version_max=0,
        obs=None,
        action=None,
        reward=_NOTHING,
        terminated=_NO,
        truncated=_NO,
        first=_NO,
        episode_id=np.zeros(1, np.int64),
        next_obs=None,
        extras={ITEM: stored(map_leaves(lambda leaf: np.asarray(leaf)[None], tree))},
        # Items have nothing to do with one another.
        discontinuity=True,
        priority=priority,
    )


def tree_of(fragment: Fragment, known: dict[tuple[str, ...], type]) -> Any:
    """The trajectory that a fragment holds.

    Raises:
        ValueError: It holds none: somebody else appended it.
    """
    if ITEM not in fragment.extras:
        raise ValueError(
            f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r} is no item: "
            "it was not written by breadbox_adapters.reverb, so read it with breadbox.Client"
        )
    return restored(map_leaves(_without_step, fragment.extras[ITEM]), known)


def _without_step(array: NDArray[Any]) -> NDArray[Any]:
    inner: NDArray[Any] = array[0]
    return inner


def info_of(reference: FragmentReference) -> SampleInfo:
    """What a draw says of an item."""
    return SampleInfo(
        key=reference.chunk_id,
        probability=reference.probability,
        table_size=reference.population,
        priority=reference.priority,
        times_sampled=reference.use_count,
    )
