"""Sequences as payloads: written and read whole and in part, one layout for all lengths."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import breadbox
from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadFormatError,
    TreeMismatchError,
)
from breadbox.model.types import FragmentMetadata, FragmentReference
from breadbox.payload import decode_tree, encode_fragment, encode_tree, read_fragments, receive
from breadbox.payload.format import parse_head
from breadbox.payload.fragments import write_and_describe
from breadbox.reading.batches import load_batch
from breadbox.stores import PayloadStore, open_store
from breadbox.stores.reading import InlineStore
from support.fake_store import FakeStore
from support.fragments import vector_fragment
from support.sequences import same_sequence, sequence


@pytest.fixture(params=["fake", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PayloadStore]:
    store = FakeStore() if request.param == "fake" else open_store(f"file://{tmp_path}/store")
    yield store
    store.close()


def stored(
    store: PayloadStore, sequences: list[breadbox.Sequence], codecs: Any = "raw"
) -> list[FragmentReference]:
    written = write_and_describe(store, sequences, codecs=codecs)
    return [reference(each, it.payload) for each, it in zip(sequences, written, strict=True)]


def reference(each: breadbox.Sequence, payload: Any) -> FragmentReference:
    metadata = FragmentMetadata(
        each.group,
        each.member,
        "s",
        each.model_version_min,
        each.model_version_max,
        payload,
        each.step_count,
        numbers=each.numbers,
    )
    return FragmentReference(metadata, 0, 0, 1)


def joined(each: breadbox.Sequence, codecs: Any = "raw") -> bytes:
    return b"".join(encode_fragment(each, codecs=codecs))


ARRAYS: list[dict[str, Any]] = [
    {},
    {"tokens": {"ids": np.arange(5)}, "context": {}, "numbers": {}},
    {"tokens": {"a.b": np.arange(5, dtype=">i2"), "empty": np.zeros((5, 0))}},
    {
        "tokens": {"logits": np.ones((4, 3, 2), np.float16), "c": np.ones(4, np.complex64)},
        "context": {"image": np.zeros((2, 3, 3), np.uint8), "scalar": np.float32(1.5)},
    },
    {"tokens": {"text": np.array(["a", "bc"]), "at": np.zeros(2, "M8[s]")}},
    {"tokens": {"brain": torch.ones(3, dtype=torch.bfloat16)}, "context": {"t": torch.zeros(())}},
    {"tokens": {"strided": np.arange(20)[::2]}, "context": {"turned": np.ones((3, 4)).T}},
    {"tokens": {"large": np.arange(200_000)}, "context": {"none": np.zeros((0, 4))}},
]


@pytest.mark.parametrize("codecs", ["raw", "zstd", {"tokens.ids": "lz4"}], ids=str)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_sequences_come_back_as_they_were(
    store: PayloadStore, codecs: Any, is_mapped: bool
) -> None:
    sent = [sequence("g", member, **arrays) for member, arrays in enumerate(ARRAYS)]
    references = stored(store, sent, codecs)
    read = read_fragments(store, references, is_mapped=is_mapped)
    assert [True] * len(sent) == [same_sequence(*pair) for pair in zip(sent, read, strict=True)]


def test_sequences_of_unequal_lengths_come_back_from_memory_at_hand() -> None:
    """Send two sequences of each length, and more lengths than a cache holds."""
    sent = [sequence("g", member, 1 + member % 700) for member in range(1400)]
    bodies = {f"{each.member:032x}": joined(each) for each in sent}
    references = [
        reference(each, breadbox.types.PayloadReference(name, len(body)))
        for each, (name, body) in zip(sent, bodies.items(), strict=True)
    ]
    read = read_fragments(InlineStore(bodies, FakeStore()), references)
    assert [True] * len(sent) == [same_sequence(*pair) for pair in zip(sent, read, strict=True)]


def test_payloads_of_one_size_and_other_lengths_are_told_apart(store: PayloadStore) -> None:
    """Padding hides lengths: 5 and 6 tokens, or a context of 2 by 3 and of 3 by 2, are as large."""
    shapes = [(5, (2, 3)), (6, (3, 2)), (5, (3, 2)), (6, (2, 3))] * 20
    sent = [
        sequence(
            "g", member, tokens={"ids": np.arange(length)}, context={"c": np.full(shape, member)}
        )
        for member, (length, shape) in enumerate(shapes)
    ]
    assert 1 == len({len(joined(each)) for each in sent})
    receive.heads_met.clear()
    for _ in range(2):  # The second time what was met before is foreseen.
        read = read_fragments(store, stored(store, sent))
        assert [True] * len(sent) == [same_sequence(*pair) for pair in zip(sent, read, strict=True)]
    assert set(receive.heads_met.values()) <= {None}, "a size that says nothing is foreseen once"


def test_512_lengths_have_one_layout_and_one_schema() -> None:
    sent = [sequence("g", 0, length) for length in range(1, 513)]
    payloads = [joined(each) for each in sent]
    hashes = {payload[16:24] for payload in payloads}
    layouts = {parse_head(memoryview(each), len(each)).layout.raw for each in payloads}
    schemas = {each.schema.hash for each in write_and_describe(FakeStore(), sent) if each.schema}
    assert (1, 1, 1) == (len(hashes), len(layouts), len(schemas))


def test_a_schema_has_types_and_shapes_of_tokens_and_ranks_of_the_context() -> None:
    sent = sequence(
        tokens={"ids": np.zeros(7, np.int32), "logits": np.zeros((7, 5), np.float32)},
        context={"image": np.zeros((4, 6), np.uint8), "score": np.float32(0)},
    )
    (written,) = write_and_describe(FakeStore(), [sent])
    assert written.schema is not None
    assert {
        "context.image": ("|u1", [-1, -1]),
        "context.score": ("<f4", []),
        "tokens.ids": ("<i4", []),
        "tokens.logits": ("<f4", [5]),
    } == {each.path: (each.dtype, list(each.shape)) for each in written.schema.message.arrays}


def test_only_the_columns_asked_for_are_read(store: PayloadStore) -> None:
    sent = sequence("g", 4, 9)
    references = stored(store, [sent])
    (read,) = read_fragments(store, references, ["tokens.ids"])
    assert (["ids"], []) == (list(read.tokens), list(read.context))
    (read,) = read_fragments(store, references, ["context"])
    assert ([], ["prompt"]) == (list(read.tokens), list(read.context))
    assert (0, sent.numbers) == (read.step_count, read.numbers)
    (read,) = read_fragments(store, references, ["tokens"], (2, 5))
    assert sent.tokens["ids"][2:5].tolist() == read.tokens["ids"].tolist()
    with pytest.raises(InvalidRequestError, match="'reward' is none of"):
        read_fragments(store, references, ["reward"])


def test_sequences_are_not_stacked_and_not_taken_for_damage(store: PayloadStore) -> None:
    references = stored(store, [sequence()])
    for is_mapped in (False, True):
        with pytest.raises(InvalidRequestError, match=r"lease\.sequences\(\)"):
            load_batch(store, references, is_mapped=is_mapped)


def test_a_changed_length_is_damage() -> None:
    payload = bytearray(joined(sequence(tokens={"ids": np.arange(5)}, context={})))
    assert 5 == payload[48]
    payload[48] = 6
    with pytest.raises(PayloadCorruptError, match="head fails its checksum"):
        parse_head(memoryview(payload), len(payload))


@pytest.mark.parametrize("length", [2, 4, 2**40, 2**63, 2**64 - 1])
def test_a_forged_length_is_refused(length: int) -> None:
    payload = bytearray(joined(sequence(tokens={"ids": np.arange(300)}, context={})))
    payload[48:56] = length.to_bytes(8, "little")
    own_bytes = sum(int.from_bytes(payload[at : at + 4], "little") for at in (24, 28))
    own = bytes(payload[:40] + payload[48 : 48 + own_bytes])
    payload[40:48] = xxhash.xxh3_64_intdigest(own).to_bytes(8, "little")
    with pytest.raises(PayloadCorruptError, match=r"declares a body|impossible shape|checksums"):
        parse_head(memoryview(payload), len(payload))


def test_lengths_and_version_belong_together() -> None:
    with_lengths = bytearray(joined(sequence()))
    assert (2, 4) == (with_lengths[8], with_lengths[10])
    with_lengths[8] = 1
    without = bytearray(b"".join(encode_tree({"a": np.arange(3)})))
    assert (1, 0) == (without[8], without[10])
    without[8] = 2
    for payload in (with_lengths, without):
        with pytest.raises(PayloadCorruptError, match="lengths"):
            decode_tree(payload)
    without[8] = 3
    with pytest.raises(PayloadFormatError, match="3"):
        decode_tree(without)


def test_tokens_of_other_than_the_announced_length_are_damage(store: PayloadStore) -> None:
    (right,) = stored(store, [sequence(length=3)])
    right.metadata.step_count = 4
    with pytest.raises(PayloadCorruptError, match="does not have 4 rows"):
        read_fragments(store, [right])


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"tokens": {}}, InvalidRequestError, "at least one array"),
        ({"tokens": [1]}, InvalidRequestError, "must be a mapping"),
        ({"tokens": {"": np.ones(2)}}, InvalidRequestError, "a name that is no text"),
        ({"tokens": {"a": np.ones(0)}}, TreeMismatchError, r"tokens\.a"),
        ({"tokens": {"a": np.float32(1)}}, TreeMismatchError, r"tokens\.a"),
        ({"tokens": {"a": np.ones(2), "b": np.ones(3)}}, TreeMismatchError, r"tokens\.b"),
        ({"tokens": {"a": np.ones(2)}, "context": {"a": 1}}, InvalidRequestError, "as well"),
        ({"numbers": 7}, InvalidRequestError, "numbers must be a mapping"),
        ({"numbers": [("a", 1)]}, InvalidRequestError, "numbers must be a mapping"),
        ({"numbers": {str(n): n for n in range(17)}}, InvalidRequestError, "are 17; the limit"),
        ({"numbers": {"a" * 65: 1}}, InvalidRequestError, "1 to 64 bytes"),
        ({"numbers": {"ä" * 33: 1}}, InvalidRequestError, "1 to 64 bytes"),
        ({"numbers": {"a": "b" * 65}}, InvalidRequestError, r"numbers\.a"),
        ({"numbers": {"a": 2**63}}, InvalidRequestError, r"numbers\.a"),
        ({"numbers": {"a": None}}, InvalidRequestError, r"numbers\.a"),
        ({"numbers": {"a": np.ones(2)}}, InvalidRequestError, r"numbers\.a"),
        ({"numbers": {"a": "\ud800"}}, InvalidRequestError, r"numbers\.a"),
    ],
)
def test_what_is_no_sequence_is_refused_with_its_name(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        sequence(**wrong)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"group": 7}, "group must be text, got 7"),
        ({"group": None}, "group must be text, got None"),
        ({"group": ["g"]}, "group must be text"),
        ({"session_id": 3}, "session_id must be text, got 3"),
        ({"member": "0"}, "member must be a whole number, got '0'"),
        ({"member": None}, "member must be a whole number, got None"),
    ],
)
def test_an_identity_of_a_wrong_type_is_refused_with_its_name(
    wrong: dict[str, Any], text: str
) -> None:
    member, fragment = sequence(), vector_fragment(0)
    of_steps = {"group": "worker_id", "member": "fragment_index"}
    for name, value in wrong.items():
        setattr(member, name, value)
        setattr(fragment, of_steps.get(name, name), value)
        with pytest.raises(InvalidRequestError, match=text):
            encode_fragment(member)
        with pytest.raises(InvalidRequestError, match=of_steps.get(name, name)):
            encode_fragment(fragment)


def test_numbers_become_plain_values() -> None:
    numbers = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": np.array(2)}
    got = sequence(numbers=numbers).numbers
    assert {"a": 0.5, "b": 3, "c": True, "d": 2} == got
    assert [float, int, bool, int] == [type(value) for value in got.values()]


def test_random_sequences_come_back(store: PayloadStore) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = np.random.default_rng(seed)
    types = [np.int8, np.float64, np.bool_, np.uint16]
    sent = []
    for member in range(60):
        length = int(rng.integers(1, 3000))
        tokens: dict[str, Any] = {
            f"t{i}": rng.random((length, *rng.integers(0, 3, rng.integers(0, 3)))).astype(
                types[int(rng.integers(4))]
            )
            for i in range(int(rng.integers(1, 4)))
        }
        context = {
            f"c{i}": rng.random(tuple(rng.integers(0, 6, rng.integers(0, 4)))).astype(np.float32)
            for i in range(int(rng.integers(0, 3)))
        }
        sent.append(sequence("g", member, tokens=tokens, context=context))
    read = read_fragments(store, stored(store, sent))
    assert [True] * len(sent) == [same_sequence(*pair) for pair in zip(sent, read, strict=True)]


def test_a_fragment_beside_sequences_is_read_as_a_fragment(store: PayloadStore) -> None:
    fragment = vector_fragment(0)
    (written,) = write_and_describe(store, [fragment])
    assert written.payload is not None
    metadata = FragmentMetadata("w", 0, "s", 0, 0, written.payload, fragment.step_count)
    references = [*stored(store, [sequence()]), FragmentReference(metadata, 0, 0, 1)]
    read = read_fragments(store, references)
    assert [breadbox.Sequence, breadbox.Fragment] == [type(each) for each in read]


def test_video_of_any_length_has_one_layout_and_is_read(store: PayloadStore) -> None:
    pytest.importorskip("av", reason="the codec h264 needs the package av")
    sent = [
        sequence("g", length, tokens={"frames": np.full((length, 32, 48, 3), 90, np.uint8)})
        for length in (3, 5)
    ]
    read = read_fragments(store, stored(store, sent, {"tokens.frames": "h264"}))
    assert [(3, 32, 48, 3), (5, 32, 48, 3)] == [each.tokens["frames"].shape for each in read]
    assert abs(int(read[1].tokens["frames"][4, 9, 9, 1]) - 90) < 4
    payloads = [joined(each, {"tokens.frames": "h264"}) for each in sent]
    assert 1 == len({each[16:24] for each in payloads})
