"""Between MineStudio's fragments and Breadbox's, and names of stored fragments."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import errors, types
from breadbox.model.fragment import Fragment, Tree
from breadbox_adapters.minestudio.datatypes import FragmentIndex, FragmentMetadata, SampleFragment
from breadbox_adapters.minestudio.recipes import (
    Aside,
    Recipe,
    put_together,
    take_apart,
    take_aside,
    unpack,
)

EPISODE_UUIDS = "episode_uuids"
"""Name among a fragment's extras: MineStudio names episodes by text, Breadbox by number."""
RECIPE = "minestudio"
"""Name among a fragment's extras: how the fragment becomes MineStudio's again; see `recipes`."""
_STEP_DTYPES: Mapping[str, type[np.generic]] = {
    "next_done": np.bool_,
    "reward": np.float32,
    "first": np.bool_,
}


def to_fragment(sample: SampleFragment, metadata: FragmentMetadata) -> Fragment:
    """Make a Breadbox fragment, from which `from_fragment` makes an equal one of MineStudio's.

    Arrays are shared, not copied.

    Raises:
        UnsupportedArrayError: It holds something that is stored only by pickling; names its path.
    """
    steps = {name: np.asarray(getattr(sample, name), kind) for name, kind in _STEP_DTYPES.items()}
    next_done = steps["next_done"]
    aside = Aside()
    recipe: dict[str, Recipe] = {}

    def apart(name: str, **how: Any) -> Tree:
        tree, recipe[name] = take_apart(getattr(sample, name), aside, name, **how)
        return tree

    fragment = Fragment(
        worker_id=metadata.worker_uuid,
        fragment_index=metadata.fid_in_worker,
        session_id=metadata.session_id,
        model_version_min=metadata.model_version,
        # The newest step's version is not told; the oldest is the one that the buffer judges by.
        model_version_max=metadata.model_version,
        obs=apart("obs", row_count=len(next_done)),
        action=apart("action", row_count=len(next_done)),
        reward=steps["reward"],
        terminated=next_done,
        truncated=np.zeros_like(next_done),
        first=steps["first"],
        episode_id=np.array([_episode_number(name) for name in sample.episode_uuids], np.int64),
        next_obs=apart("next_obs"),
        in_state=apart("in_state", drops_axis=_all_lead_with_one(sample.in_state)),
        extras={EPISODE_UUIDS: np.array([str(name) for name in sample.episode_uuids], np.str_)},
    )
    for name, kind in _STEP_DTYPES.items():
        value = getattr(sample, name)
        if type(value) is not np.ndarray or value.dtype != kind:
            recipe[name] = ["aside", take_aside(value, aside, name)]
    if fragment.extras[EPISODE_UUIDS].tolist() != sample.episode_uuids:
        recipe[EPISODE_UUIDS] = ["aside", take_aside(sample.episode_uuids, aside, EPISODE_UUIDS)]
    fragment.extras[RECIPE] = aside.packed(recipe, len(next_done))
    return fragment


def from_fragment(fragment: Fragment) -> SampleFragment:
    """Make a MineStudio fragment; also of one that was written without this module.

    Raises:
        PayloadCorruptError: Its recipe does not fit what is stored.
    """
    packed = fragment.extras.get(RECIPE)
    names = fragment.extras.get(EPISODE_UUIDS)
    sample = SampleFragment(
        obs=fragment.obs,
        action=fragment.action,
        next_done=fragment.ended,
        reward=fragment.reward,
        first=fragment.first,
        in_state=_with_batch_axis(fragment.in_state) if packed is None else fragment.in_state,
        worker_uuid=fragment.worker_id,
        fid_in_worker=fragment.fragment_index,
        next_obs=fragment.next_obs,
        episode_uuids=[str(name) for name in (fragment.episode_id if names is None else names)],
    )
    if packed is not None:
        recipe, aside = unpack(packed)
        try:
            for name, steps in recipe.items():
                setattr(sample, name, put_together(getattr(sample, name), steps, aside))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise errors.PayloadCorruptError("a fragment's recipe does not fit it") from error
    return sample


def _episode_number(name: str) -> int:
    """The same number for the same name, in every process; not negative."""
    digest = hashlib.blake2b(str(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _all_lead_with_one(state: Any) -> bool:
    """Whether a recurrent state is of arrays whose first axis is a batch of one, all of them."""
    match state:
        case dict():
            return all(map(_all_lead_with_one, state.values()))
        case list() | tuple():
            return all(map(_all_lead_with_one, state))
        case None:
            return True
        case _:
            return tuple(getattr(state, "shape", ())[:1]) == (1,)


def _with_batch_axis(state: Tree) -> Tree:
    match state:
        case None:
            return None
        case dict():
            return {key: _with_batch_axis(child) for key, child in state.items()}
        case list() | tuple():
            return type(state)(_with_batch_axis(child) for child in state)
        case _:
            row: NDArray[Any] = np.asarray(state)[np.newaxis]
            return row


# Names of stored fragments -----------------------------------------------------------------------


def named(references: Sequence[types.FragmentReference]) -> list[tuple[FragmentIndex, str]]:
    """What MineStudio calls records: each fragment's index, and the text to load it by."""
    return [
        (
            FragmentIndex(reference.metadata.worker_id, reference.metadata.fragment_index),
            fragment_id_of(reference),
        )
        for reference in references
    ]


def fragment_id_of(reference: types.FragmentReference) -> str:
    """A text that names a stored fragment and is enough to load it, in any process."""
    named = asdict(reference)
    del named["body"]
    return json.dumps(named, separators=(",", ":"))


def reference_of(fragment_id: str) -> types.FragmentReference:
    """Read the text that `fragment_id_of` made.

    Raises:
        InvalidRequestError: It is another text.
    """
    try:
        fields = json.loads(fragment_id)
        metadata = fields.pop("metadata")
        payload = types.PayloadReference(**metadata.pop("payload"))
        return types.FragmentReference(
            types.FragmentMetadata(**metadata, payload=payload), **fields
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.InvalidRequestError(
            "fragment_id", "is not one that fetch_fragments returned"
        ) from error
