"""Payloads of one open layout are verified and placed together, as one by one would do it."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.payload.unequal import verify_unequal
from breadbox.reading.packed import PackedBatch, PaddedBatch, load_sequences
from support.forged_payloads import Parts, changed, sections_of
from support.fragments import vector_fragment
from support.packed_outcomes import alike, bodies_of, held, one_by_one, outcome
from support.sequences import sequence

LENGTHS = [3, 9, 1, 3, 40]


def groups_of(bodies: Sequence[bytes]) -> list[list[int]]:
    return [
        [*each.positions]
        for each in verify_unequal(dict(enumerate([memoryview(each) for each in bodies])))
    ]


def several(seed: int, count: int = 30) -> list[breadbox.Sequence]:
    """Make sequences of many lengths, with contexts of one rank and any shapes."""
    rng = np.random.default_rng(seed)
    made = []
    for member in range(count):
        length = int(rng.integers(1, 300))
        tokens: dict[str, Any] = {
            "ids": rng.integers(0, 9, length),
            "big": rng.integers(0, 9, (length, 2, 3)).astype(">i2"),
            "none": np.zeros((length, 0), np.float32),
            "half": torch.from_numpy(rng.normal(size=(length, 2))).bfloat16(),
        }
        context = {
            "image": rng.random(tuple(rng.integers(0, 5, 3))),
            "score": np.float32(member),
            "brain": torch.ones(member % 3, dtype=torch.bfloat16),
        }
        made.append(sequence("g", member, tokens=tokens, context=context))
    return made


@pytest.mark.parametrize("kind", [PackedBatch, PaddedBatch, None])
def test_any_lengths_are_loaded_as_one_by_one(kind: Any) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    sequences = several(seed)
    bodies = bodies_of(sequences)
    assert [[*range(30)]] == groups_of(bodies)
    with one_by_one():
        wanted = outcome(kind, sequences, bodies)
    assert alike(wanted, outcome(kind, sequences, bodies))


def test_layouts_are_told_apart_and_what_is_not_open_is_left_to_others() -> None:
    other = {"ids": np.arange(4)}
    bodies = bodies_of(
        [
            sequence("g", 0, 3),
            sequence("g", 1, tokens=other),
            sequence("g", 2, 5),
            vector_fragment(0),  # type: ignore[list-item]
            sequence("g", 3, tokens={"ids": np.arange(9)}),
        ]
    )
    bodies += bodies_of([sequence("g", 4, 50)], "zstd")
    bodies += [b"", b"BREADBOX", bytes(100)]
    assert [[0, 2], [1, 4]] == groups_of(bodies)


def test_contexts_are_writable_and_each_sequences_own() -> None:
    sequences = [sequence("g", member, length) for member, length in enumerate(LENGTHS)]
    store, references = held(sequences, bodies_of(sequences))
    batch = load_sequences(PackedBatch, store, references, positions=range(len(LENGTHS)))
    before = [each.context["prompt"].tolist() for each in sequences]
    batch.context["prompt"][0][:] = 77
    assert before[1:] == [each.tolist() for each in batch.context["prompt"][1:]]


@pytest.mark.parametrize("kind", [PackedBatch, None])
def test_damage_anywhere_has_the_outcome_of_one_by_one(kind: Any) -> None:
    sequences = [sequence("g", member, length) for member, length in enumerate(LENGTHS)]
    sound = bodies_of(sequences)
    for which in (0, 3):
        damaged = sound[which]
        for at in range(0, len(damaged), 1 + len(damaged) // 300):
            for broken in (
                damaged[:at] + bytes([damaged[at] ^ 4]) + damaged[at + 1 :],
                damaged[:at],
            ):
                bodies = [*sound[:which], broken, *sound[which + 1 :]]
                with one_by_one():
                    wanted = outcome(kind, sequences, bodies)
                assert alike(wanted, outcome(kind, sequences, bodies)), at


def test_any_damage_that_is_found_leaves_the_payload_out() -> None:
    sequences = [sequence("g", member, length) for member, length in enumerate(LENGTHS)]
    sound = bodies_of(sequences)
    for at in range(len(sound[1])):
        broken = bytearray(sound[1])
        broken[at] ^= 1
        is_padding = all(
            [a == b for a, b in zip(_checked(sound[1]), _checked(broken), strict=True)]
        )
        groups = groups_of([sound[0], bytes(broken), *sound[2:]])
        assert is_padding == ([[0, 1, 2, 3, 4]] == groups), at


def _checked(payload: bytes | bytearray) -> tuple[bytes, ...]:
    """Return the parts of a payload that have a checksum: all but padding."""
    layout, figures, attributes, body = sections_of(payload)
    arrays = [body[at : at + size] for at, size in ((0, 36), (64, 36), (128, 9), (192, 16))]
    return bytes(payload[:48]), layout, figures, attributes, *arrays


LIES: dict[str, Any] = {
    "a length": lambda parts: _figure(parts, 0, lambda old: old + 1),
    "a length without end": lambda parts: _figure(parts, 0, lambda _: 2**64 - 1),
    "a product without end": lambda parts: _figure(parts, 1, lambda _: 2**36),
    "a length of nothing": lambda parts: _figure(parts, 0, lambda _: 0),
    "a checksum": lambda parts: _figure(parts, -1, lambda old: old ^ 1),
    "a checksum more": lambda parts: parts.figures.append(0),
    "a checksum fewer": lambda parts: parts.figures.pop(),
    "no figures": lambda parts: parts.figures.clear(),
    "a longer body": lambda parts: setattr(parts, "body", parts.body + bytes(64)),
    "no body": lambda parts: setattr(parts, "body", b""),
}


def _figure(parts: Parts, at: int, change: Any) -> None:
    parts.figures[at] = change(parts.figures[at])


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("which", [0, 2])
def test_heads_that_lie_with_right_checksums_have_the_outcome_of_one_by_one(
    lie: str, which: int
) -> None:
    sequences = [sequence("g", member, length) for member, length in enumerate(LENGTHS)]
    bodies = bodies_of(sequences)
    bodies[which] = changed(bodies[which], LIES[lie])
    with one_by_one():
        wanted = outcome(PackedBatch, sequences, bodies)
    assert isinstance(wanted, str)
    assert wanted == outcome(PackedBatch, sequences, bodies)


@pytest.mark.parametrize("count", [64, 65])
def test_payloads_of_many_arrays_are_left_to_one_by_one(count: int) -> None:
    tokens = {f"t{number}": np.zeros(2) for number in range(count)}
    bodies = bodies_of([sequence(tokens=tokens, context={})] * 3)
    assert ([[0, 1, 2]] if count == 64 else []) == groups_of(bodies)


def test_tokens_of_other_than_the_announced_length_are_damage_within_a_batch() -> None:
    sequences = [sequence("g", member, length) for member, length in enumerate(LENGTHS)]
    store, references = held(sequences, bodies_of(sequences))
    references[2].metadata.step_count += 1
    with pytest.raises(breadbox.errors.PayloadCorruptError, match="does not have 2 rows"):
        load_sequences(PackedBatch, store, references, positions=range(len(LENGTHS)))
