"""Payloads like those met before are received at once, and those that only seem so are found."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.model.errors import PayloadCorruptError, PayloadMissingError
from breadbox.model.fragment import Appendable, Fragment
from breadbox.model.types import FragmentReference
from breadbox.payload import encode_fragment, receive, write_fragments
from breadbox.reading.batches import load_batch
from breadbox.reading.packed import PackedBatch, load_sequences
from breadbox.stores import bulk, files, open_store
from breadbox.stores.base import PayloadStore
from breadbox.stores.files import FileStore
from breadbox.stores.redis.wire import Wire
from support.announced import metadata_of
from support.compiler import needs_compiler
from support.redis_server import RedisServer
from support.sequences import sequence

PIECE_BYTES = 64 * 1024
STEPS = 8


@pytest.fixture(autouse=True)
def nothing_met() -> None:
    receive.heads_met.clear()


@pytest.fixture(params=["redis", "files"])
def store(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[PayloadStore]:
    # In memory: on a disk, which may hang, files are opened by threads first.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if request.param == "redis":
            opened = open_store(redis_server.url, piece_size_bytes=PIECE_BYTES)
        else:
            opened = FileStore(f"{folder}/payloads")
        yield opened
        opened.close()


def fragment_of(index: int, **other: Any) -> Fragment:
    rng = np.random.default_rng(index)
    fields: dict[str, Any] = {
        "obs": {
            "image": rng.integers(0, 256, (STEPS, 100, 100, 3), dtype=np.uint8),
            "speed": rng.random((STEPS, 3), dtype=np.float32),
            "depth": rng.integers(0, 2**16, (STEPS, 50, 50), dtype=np.uint16),
        },
        "action": rng.integers(0, 4, STEPS),
        "reward": rng.random(STEPS, dtype=np.float32),
        "terminated": rng.random(STEPS) < 0.5,
        "truncated": rng.random(STEPS) < 0.5,
        "first": rng.random(STEPS) < 0.5,
        "episode_id": rng.integers(0, 9, STEPS),
        "next_obs": {
            "image": rng.integers(0, 256, (100, 100, 3), dtype=np.uint8),
            "speed": rng.random(3, dtype=np.float32),
            "depth": rng.integers(0, 2**16, (50, 50), dtype=np.uint16),
        },
    }
    return Fragment(
        worker_id="w",
        fragment_index=index,
        session_id="s",
        model_version_min=0,
        model_version_max=0,
        **(fields | other),
    )


def other_kind(index: int) -> Fragment:
    """A fragment whose payload has as many bytes, and another layout."""
    like = fragment_of(index)
    assert isinstance(like.obs, dict)
    obs = {("depht" if key == "depth" else key): value for key, value in like.obs.items()}
    assert isinstance(like.next_obs, dict)
    next_obs = {("depht" if key == "depth" else key): leaf for key, leaf in like.next_obs.items()}
    return replace(like, obs=obs, next_obs=next_obs)


def written(store: PayloadStore, fragments: Sequence[Appendable]) -> list[FragmentReference]:
    return [
        FragmentReference(metadata_of(fragment, payload), 0, 0, 1)
        for fragment, payload in zip(fragments, write_fragments(store, fragments), strict=True)
    ]


def require_same(store: PayloadStore, fragments: Sequence[Fragment]) -> None:
    batch = load_batch(store, written(store, fragments))
    for row, fragment in enumerate(fragments):
        for name in ("action", "reward", "terminated", "truncated", "first", "episode_id"):
            np.testing.assert_array_equal(getattr(fragment, name), getattr(batch, name)[row])
        for part in ("obs", "next_obs"):
            for key, leaf in getattr(fragment, part).items():
                np.testing.assert_array_equal(leaf, getattr(batch, part)[key][row])


def test_a_batch_like_the_last_one_holds_what_was_written(store: PayloadStore) -> None:
    for first in (0, 4, 8):
        require_same(store, [fragment_of(first + at) for at in range(4)])


def sequences_of_all_lengths(first: int) -> list[breadbox.Sequence]:
    return [sequence(member=length, length=length) for length in range(first, first + 40)]


@needs_compiler
def test_small_payloads_of_sizes_never_met_are_received_by_one_call(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sequences_of_all_lengths(500)
    references = written(store, sent)
    calls: list[str] = []
    for owner, name in ((bulk, "receive"), (files, "read_files"), (os, "preadv")):
        called = getattr(owner, name)

        def noted(*given: Any, name: str = name, called: Any = called) -> Any:
            calls.append(name)
            return called(*given)

        monkeypatch.setattr(owner, name, noted)
    batch = load_sequences(PackedBatch, store, references, positions=range(40))
    assert calls in (["receive"], ["read_files"])
    joined = np.concatenate([each.tokens["ids"] for each in sent])
    np.testing.assert_array_equal(joined, batch.tokens["ids"])


@pytest.mark.parametrize("together_bytes_max", [0, 20_000])
def test_payloads_beyond_those_received_together_come_as_well(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch, together_bytes_max: int
) -> None:
    monkeypatch.setattr(receive, "WHOLE_BYTES_TOGETHER_MAX", together_bytes_max)
    sent = sequences_of_all_lengths(500)
    batch = load_sequences(PackedBatch, store, written(store, sent), positions=range(40))
    joined = np.concatenate([each.tokens["log_prob"] for each in sent])
    np.testing.assert_array_equal(joined, batch.tokens["log_prob"])


@pytest.mark.parametrize("at_fraction", [0.0, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_a_damaged_byte_of_a_size_never_met_is_noticed(
    store: PayloadStore, at_fraction: float
) -> None:
    sent = sequences_of_all_lengths(700)
    references = written(store, sent)
    payload = bytearray(b"".join(encode_fragment(sent[3])))
    payload[int(at_fraction * len(payload))] ^= 1
    (damaged,) = store.write_many([[memoryview(payload)]])
    metadata = replace(references[3].metadata, payload=damaged)
    references[3] = replace(references[3], metadata=metadata)
    with pytest.raises(PayloadCorruptError):
        load_sequences(PackedBatch, store, references, positions=range(40))


@needs_compiler
def test_a_batch_like_the_last_one_is_received_by_one_call(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a thread that holds the interpreter each call would take milliseconds."""
    references = written(store, [fragment_of(at) for at in range(36)])
    load_batch(store, references)
    calls: list[str] = []

    def note(owner: Any, name: str) -> None:
        called = getattr(owner, name)

        def noted(*given: Any) -> Any:
            calls.append(name)
            return called(*given)

        monkeypatch.setattr(owner, name, noted)

    for name in ("open", "preadv", "close"):
        note(os, name)
    for name in ("_receive", "_send_vector", "_let_kernel_wait"):
        note(Wire, name)
    note(bulk, "receive")
    note(files, "read_files")
    load_batch(store, references)
    assert calls in (["receive"], ["read_files"])


def test_without_the_compiled_module_payloads_come_one_by_one(
    store: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "is_compiled", False)
    for first in (0, 4):
        require_same(store, [fragment_of(first + at) for at in range(4)])


@pytest.mark.parametrize("first_kind", [fragment_of, other_kind])
def test_payloads_of_one_size_and_two_layouts_are_told_apart(
    store: PayloadStore, first_kind: Any
) -> None:
    second_kind = other_kind if first_kind is fragment_of else fragment_of
    assert len(b"".join(encode_fragment(fragment_of(0)))) == len(
        b"".join(encode_fragment(other_kind(0)))
    )
    require_same(store, [first_kind(at) for at in range(3)])
    require_same(store, [second_kind(at) for at in range(3)])
    require_same(store, [first_kind(at) for at in range(3)])


@pytest.mark.parametrize("gone", [0, 2, 3])
def test_a_payload_that_is_gone_is_named_at_once(store: PayloadStore, gone: int) -> None:
    references = written(store, [fragment_of(at) for at in range(4)])
    load_batch(store, references)
    lost = references[gone].metadata.payload
    store.delete_many([lost])
    began = time.monotonic()
    with pytest.raises(PayloadMissingError, match=lost.payload_id):
        load_batch(store, references)
    assert time.monotonic() - began < 5.0
    rest = [each for each in references if each.metadata.payload != lost]
    assert 3 == len(load_batch(store, rest))


@pytest.mark.parametrize("at_fraction", [0.0, 0.002, 0.3, 0.6, 0.9, 0.999])
def test_a_damaged_byte_is_noticed(store: PayloadStore, at_fraction: float) -> None:
    references = written(store, [fragment_of(at) for at in range(4)])
    load_batch(store, references)
    payload = bytearray(b"".join(encode_fragment(fragment_of(2))))
    payload[int(at_fraction * len(payload))] ^= 1
    (damaged,) = store.write_many([[memoryview(payload)]])
    metadata = replace(references[2].metadata, payload=damaged)
    with pytest.raises(PayloadCorruptError):
        load_batch(store, [references[0], replace(references[2], metadata=metadata)])


def test_sizes_that_were_met_are_bounded(store: PayloadStore) -> None:
    for count in range(receive.HEADS_MET_MAX + 10):
        obs = np.zeros((STEPS, 512 + 8 * count), np.uint8)
        fragment = fragment_of(0, obs=obs, next_obs=obs[0])
        load_batch(store, written(store, [fragment]))
    assert receive.HEADS_MET_MAX == len(receive.heads_met)
