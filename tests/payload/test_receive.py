"""Receiving: small arrays together, blocks verified as they come, every byte in its place."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import PayloadCorruptError
from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentReference
from breadbox.payload import (
    decode_tree,
    encode_fragment,
    read_fragments,
    receive,
    write_fragments,
)
from breadbox.payload.format import PRELUDE_BYTES, head_bytes_of, parse_head
from breadbox.reading.batches import load_batch
from breadbox.stores.base import PayloadStore
from support.announced import metadata_of
from support.fake_store import FakeStore
from support.payload_trees import same

STEPS = 64
FRAME_BYTES = 20_000
"""So that the frames have several checksum blocks, and end within one."""


@pytest.fixture(params=[True, False], ids=["foreseen", "unforeseen"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    size_bytes = len(b"".join(encode_fragment(fragment_of(0))))
    monkeypatch.setattr(receive, "heads_met", {} if request.param else {size_bytes: None})
    return FakeStore()


def fragment_of(index: int) -> Fragment:
    """Large frames between small arrays, an empty one and one that is a single number."""
    rng = np.random.default_rng(index)
    return Fragment(
        worker_id="w",
        fragment_index=index,
        session_id="s",
        model_version_min=0,
        model_version_max=0,
        obs={
            "a": rng.random((STEPS, 3)).astype(np.float32),
            "frames": rng.integers(0, 256, (STEPS, FRAME_BYTES), dtype=np.uint8),
            "z": rng.integers(0, 9, (STEPS, 0), dtype=np.int16),
        },
        action=rng.integers(0, 4, STEPS),
        reward=rng.random(STEPS).astype(np.float32),
        terminated=rng.random(STEPS) < 0.5,
        truncated=rng.random(STEPS) < 0.5,
        first=rng.random(STEPS) < 0.5,
        episode_id=rng.integers(0, 9, STEPS),
        next_obs={
            "a": rng.random(3).astype(np.float32),
            "frames": rng.integers(0, 256, FRAME_BYTES, dtype=np.uint8),
            "z": np.zeros(0, np.int16),
        },
        in_state=(np.float64(rng.random()), rng.random((2, 5))),
    )


def stored(store: PayloadStore, count: int) -> list[FragmentReference]:
    fragments = [fragment_of(index) for index in range(count)]
    return [
        FragmentReference(metadata_of(fragment, payload), 0, 0, 1)
        for fragment, payload in zip(fragments, write_fragments(store, fragments), strict=True)
    ]


def test_rows_hold_what_was_written(store: FakeStore) -> None:
    batch = load_batch(store, stored(store, 3))
    for row in range(3):
        wanted = fragment_of(row)
        assert same(wanted.next_obs, {key: leaf[row] for key, leaf in batch.next_obs.items()})
        assert same(wanted.obs, {key: leaf[row] for key, leaf in batch.obs.items()})
        assert same(wanted.in_state[1], batch.in_state[1][row])
        assert wanted.in_state[0] == batch.in_state[0][row]
        for name in ("action", "reward", "terminated", "truncated", "first", "episode_id"):
            assert same(getattr(wanted, name), getattr(batch, name)[row])


def _arrays() -> list[tuple[str, int, int]]:
    """Name, first byte and last byte within the payload of every array that has bytes."""
    payload = memoryview(b"".join(encode_fragment(fragment_of(0))))
    head = parse_head(payload[: head_bytes_of(payload[:PRELUDE_BYTES])], len(payload))
    return [
        (each.name, head.body_offset + offset, head.body_offset + offset + size_bytes - 1)
        for each, offset, size_bytes in zip(
            head.layout.arrays, head.places.offsets, head.places.sizes, strict=True
        )
        if size_bytes
    ]


@pytest.mark.parametrize("read", [read_fragments, load_batch])
@pytest.mark.parametrize(("name", "first", "last"), _arrays())
def test_one_wrong_bit_is_found_and_its_array_is_named(
    store: FakeStore, read: Callable[..., Any], name: str, first: int, last: int
) -> None:
    references = stored(store, 2)
    payload_id = references[1].metadata.payload.payload_id
    for place in (first, (first + last) // 2, last):
        damaged = bytearray(store.payloads.unannounced[payload_id])
        damaged[place] ^= 1
        whole, store.payloads.unannounced[payload_id] = (
            store.payloads.unannounced[payload_id],
            bytes(damaged),
        )
        with pytest.raises(PayloadCorruptError, match=re.escape(f"'{name}'")):
            read(store, references)
        store.payloads.unannounced[payload_id] = whole
    read(store, references)


def test_mapped_and_received_are_alike() -> None:
    store = FakeStore()
    references = stored(store, 1)
    (mapped,) = read_fragments(store, references, is_mapped=True)
    (received,) = read_fragments(store, references)
    assert same(mapped.obs, received.obs)
    assert same(mapped.in_state[1], received.in_state[1])
    decoded, _ = decode_tree(store.payloads.unannounced[references[0].metadata.payload.payload_id])
    assert same(decoded["obs"], received.obs)
