"""Payloads in memory that are alike are read together: with the same outcome as one by one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import PayloadCorruptError, ReplayBufferError
from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentReference, PayloadReference
from breadbox.payload import encode_fragment, read_fragments
from breadbox.payload.alike import verify_and_group
from breadbox.reading.batches import Batch, load_batch
from breadbox.stores.base import PayloadStore
from breadbox.stores.files import SMALL_BYTES_MAX, FileStore
from breadbox.stores.reading import InlineStore
from support.fake_store import FakeStore
from support.payload_trees import same
from support.rich_fragments import (
    STEPS,
    arrays_of,
    plain_fragment,
    reference_to,
    rich_fragment,
    stored,
)

FIELDS = ("obs", "action", "reward", "next_obs", "in_state", "extras", "model_version")
ENDS = ("final_obs", "final_obs_row", "final_obs_step")


def bodies_of(fragments: Sequence[Fragment], codecs: Any = "raw") -> list[bytes]:
    return [b"".join(encode_fragment(each, codecs=codecs)) for each in fragments]


def riding(
    fragments: Sequence[Fragment], bodies: Sequence[bytes]
) -> tuple[InlineStore, list[FragmentReference]]:
    """A store of payloads that came along, and what refers to them."""
    payloads = [PayloadReference(f"{k:032x}", len(each)) for k, each in enumerate(bodies)]
    found = {each.payload_id: body for each, body in zip(payloads, bodies, strict=True)}
    references = [reference_to(*pair) for pair in zip(fragments, payloads, strict=True)]
    return InlineStore(found, FakeStore()), references


def one_by_one(store: InlineStore, references: Sequence[FragmentReference]) -> Batch:
    """The same, each read by itself."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("breadbox.reading.batches.verify_and_group", lambda payloads: None)
        return load_batch(store, references)


def test_payloads_of_several_layouts_are_stacked_as_one_by_one() -> None:
    """Final observations are as many as episodes end, so layouts differ within a batch."""
    several = np.arange(2, dtype=np.int32)
    one = np.zeros(1, np.int32)
    pictures = np.random.default_rng(0).integers(0, 255, (2, 64, 64, 3), np.uint8)
    fragments = [
        rich_fragment(0, final_obs_step=several, final_obs={"image": pictures}),
        rich_fragment(1, final_obs_step=one, final_obs={"image": pictures[:1]}),
        rich_fragment(2, final_obs_step=None, final_obs=None),
        rich_fragment(1000, final_obs_step=several, final_obs={"image": pictures[::-1]}),
    ]
    bodies = bodies_of(fragments)
    groups = verify_and_group(bodies)
    assert groups is not None
    assert [[0, 3], [1], [2]] == [each.positions for each in groups]
    store, references = riding(fragments, bodies)
    together, apart = load_batch(store, references), one_by_one(store, references)
    for name in (*FIELDS, *ENDS):
        assert same(getattr(apart, name), getattr(together, name)), name


@pytest.mark.parametrize("count", [1, 2])
def test_arrays_without_elements_are_stacked_as_one_by_one(count: int) -> None:
    """A worker whose episodes do not end in a fragment may say so by an empty list of steps."""
    nothing = np.zeros(0, np.int32)
    fragments = [
        plain_fragment(index, final_obs_step=nothing, extras={"empty": np.zeros((STEPS, 0))})
        for index in range(count)
    ]
    store, references = riding(fragments, bodies_of(fragments))
    together, apart = load_batch(store, references), one_by_one(store, references)
    for name in (*FIELDS, *ENDS):
        assert same(getattr(apart, name), getattr(together, name)), name


def test_lengths_of_attributes_differ_and_layouts_do_not() -> None:
    bodies = bodies_of([plain_fragment(index) for index in (9, 10, 10**9, 3)])
    (group,) = verify_and_group(bodies) or []
    assert [0, 1, 2, 3] == group.positions


@pytest.mark.parametrize("is_alone", [False, True])
def test_damage_anywhere_is_told_as_one_by_one(is_alone: bool) -> None:
    fragments = [
        plain_fragment(index, obs=np.zeros((STEPS, 3))) for index in range(1 if is_alone else 3)
    ]
    sound = bodies_of(fragments)
    damaged = sound[-1]
    for position in range(0, len(damaged), 1 + len(damaged) // 400):
        for changed in (
            damaged[:position] + bytes([damaged[position] ^ 4]) + damaged[position + 1 :],
            damaged[:position],
        ):
            store, references = riding(fragments, [*sound[:-1], changed])
            assert told(load_batch, store, references) == told(one_by_one, store, references)


def told(load: Any, store: PayloadStore, references: Sequence[FragmentReference]) -> object:
    """What came of loading: an error, or the rewards."""
    try:
        return load(store, references).reward.tolist()
    except ReplayBufferError as error:
        return type(error), str(error)


@pytest.mark.parametrize("codecs", ["zstd", {"obs.image": "lz4"}], ids=str)
def test_encoded_arrays_are_read_one_by_one(codecs: Any) -> None:
    fragments = [rich_fragment(index) for index in range(2)]
    bodies = bodies_of(fragments, codecs)
    assert verify_and_group(bodies) is None
    store, references = riding(fragments, bodies)
    assert same(fragments[1].obs["image"], load_batch(store, references).obs["image"][1])


def test_payloads_are_at_hand_where_all_are_and_of_the_size_that_is_said() -> None:
    fragments = [plain_fragment(index) for index in range(2)]
    store, references = riding(fragments, bodies_of(fragments))
    payloads = [each.metadata.payload for each in references]
    assert list(store.bodies.values()) == store.at_hand(payloads)
    longer = replace(payloads[1], size_bytes=payloads[1].size_bytes + 1)
    elsewhere = replace(payloads[1], payload_id="f" * 32)
    for other in (longer, elsewhere):
        assert store.at_hand([payloads[0], other]) is None


def test_fragments_of_several_layouts_are_read_as_one_by_one() -> None:
    fragments = [rich_fragment(0), plain_fragment(1), rich_fragment(2), plain_fragment(10)]
    store, references = riding(fragments, bodies_of(fragments))
    together = read_fragments(store, references)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("breadbox.payload.fragments.verify_and_group", lambda payloads: None)
        apart = read_fragments(store, references)
    for expected, actual in zip(apart, together, strict=True):
        assert expected.worker_id == actual.worker_id
        for name, value in arrays_of(expected).items():
            assert same(value, arrays_of(actual)[name]), name
    together[0].reward[:] = 7.0
    assert same(apart[2].reward, together[2].reward)
    assert together[1].reward.flags.writeable


def test_a_fragment_of_other_steps_than_its_reference_says_is_corrupt() -> None:
    fragments = [plain_fragment(index) for index in range(2)]
    store, references = riding(fragments, bodies_of(fragments))
    metadata = replace(references[1].metadata, step_count=STEPS + 1)
    with pytest.raises(PayloadCorruptError, match="rows"):
        read_fragments(store, [references[0], replace(references[1], metadata=metadata)])


@pytest.mark.parametrize("codecs", ["raw", "zstd"])
def test_small_payloads_of_a_directory_are_read_as_large_ones(tmp_path: Path, codecs: str) -> None:
    store = FileStore(str(tmp_path))
    fragments = [vector_fragment(3), vector_fragment(3), vector_fragment(999)]
    references = stored(store, *fragments, codecs=codecs)
    sizes = [each.metadata.payload.size_bytes for each in references]
    assert sizes[0] <= SMALL_BYTES_MAX
    assert (sizes[2] > SMALL_BYTES_MAX) == (codecs == "raw")
    together, apart = (
        as_small(limit, read_fragments, store, [*references, references[0]])
        for limit in (SMALL_BYTES_MAX, 0)
    )
    for expected, actual in zip(apart, together, strict=True):
        for name, value in arrays_of(expected).items():
            assert same(value, arrays_of(actual)[name]), name
    batches = [as_small(limit, load_batch, store, references[:2]) for limit in (SMALL_BYTES_MAX, 0)]
    for name in (*FIELDS, *ENDS):
        assert same(getattr(batches[1], name), getattr(batches[0], name)), name


@pytest.mark.parametrize("damage", ["gone", "cut", "longer", "changed"])
def test_a_small_file_that_is_damaged_is_told_as_a_large_one(tmp_path: Path, damage: str) -> None:
    store = FileStore(str(tmp_path))
    references = stored(store, *[vector_fragment(3)] * 3)
    (path,) = tmp_path.rglob(references[1].metadata.payload.payload_id)
    body = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        changed = {"cut": body[:-1], "longer": body + b"\0", "changed": body[:-1] + b"\7"}
        path.chmod(0o600)
        path.write_bytes(changed[damage])
    small, large = (
        as_small(limit, told, load_batch, store, references) for limit in (SMALL_BYTES_MAX, 0)
    )
    assert large == small
    assert isinstance(small, tuple)


def vector_fragment(width: int) -> Fragment:
    return plain_fragment(obs=np.ones((STEPS, width)), next_obs=np.ones(width))


def as_small(limit: int, read: Any, *arguments: Any) -> Any:
    """Call a function while files of at most `limit` bytes are small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("breadbox.stores.files.SMALL_BYTES_MAX", limit)
        return read(*arguments)
