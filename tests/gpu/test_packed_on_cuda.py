"""Packed and padded batches on a CUDA device, against arrays joined by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.local import start_server
from breadbox.model.types import FragmentMetadata, FragmentReference
from breadbox.payload import write_fragments
from breadbox.reading.packed import PackedBatch, PaddedBatch, load_sequences
from breadbox.stores import PayloadStore, open_store

DEVICE = "cuda"

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"
    ),
    pytest.mark.timeout(120),
]

GROUPS = 8
MEMBERS = 4
HEADS, WIDTH = 2, 16


def sequence(number: int) -> breadbox.Sequence:
    """Return a sequence whose every element is decided by its number; of 1 to 700 tokens."""
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, 700))
    tokens: dict[str, Any] = {
        "ids": rng.integers(0, 50_000, length),
        "log_prob": rng.random(length, np.float32),
        "mask": rng.random(length) < 0.5,
        "state": torch.from_numpy(rng.normal(size=(length, HEADS, WIDTH))).bfloat16(),
    }
    context: dict[str, Any] = {
        "prompt": rng.integers(0, 50_000, 1 + number % 5),
        "scale": np.float32(number),
    }
    return breadbox.Sequence(
        group=f"prompt-{number // MEMBERS}",
        member=number % MEMBERS,
        tokens=tokens,
        context=context,
        numbers={"reward": number / 4, "number": number, "good": number % 2 == 0, "task": "sum"},
        model_version_min=0,
        model_version_max=0,
    )


SEQUENCES = [sequence(number) for number in range(GROUPS * MEMBERS)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PayloadStore]:
    store = open_store(f"file://{tmp_path}/store")
    yield store
    store.close()


@pytest.fixture
def references(store: PayloadStore) -> list[FragmentReference]:
    payloads = write_fragments(store, SEQUENCES)
    return [
        FragmentReference(
            FragmentMetadata(
                each.group,
                each.member,
                "s",
                0,
                0,
                payload,
                each.step_count,
                numbers=each.numbers,
            ),
            chunk_id=0,
            staleness_when_granted=0,
            use_count=1,
        )
        for each, payload in zip(SEQUENCES, payloads, strict=True)
    ]


@pytest.fixture(scope="module")
def filled() -> Iterator[breadbox.Client]:
    """A client of a server that holds the sequences, which may be fetched many times."""
    with start_server() as server, breadbox.connect(server.address) as client:
        config = breadbox.BufferConfig.preset("groups", fragments_per_chunk=MEMBERS, uses_max=1000)
        client.create_buffer("groups", config)
        client.start_session("s", buffer="groups")
        client.append_many(SEQUENCES, buffer="groups")
        yield client


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a field; texts, None and Python's own numbers are none."""
    if isinstance(value, dict):
        return [tensor for held in value.values() for tensor in tensors_of(held)]
    if isinstance(value, list):
        return [tensor for held in value for tensor in tensors_of(held)]
    assert not isinstance(value, np.ndarray)
    return [value] if isinstance(value, torch.Tensor) else []


def check_place(batch: Any) -> None:
    """All of a batch's arrays are on the device, and contiguous."""
    for field in fields(batch):
        for tensor in tensors_of(getattr(batch, field.name)):
            assert torch.device(DEVICE).type == tensor.device.type, field.name
            assert tensor.is_contiguous(), field.name


def joined(sequences: Sequence[breadbox.Sequence], name: str) -> torch.Tensor:
    return torch.cat([torch.as_tensor(each.tokens[name]) for each in sequences])


def check_packed(batch: Any, sequences: Sequence[breadbox.Sequence]) -> None:
    """A packed batch on the device has exactly what these sequences have."""
    check_place(batch)
    lengths = [each.step_count for each in sequences]
    ends = np.cumsum([0, *lengths]).tolist()
    assert (torch.int32, ends) == (batch.cu_seqlens.dtype, batch.cu_seqlens.tolist())
    assert (torch.int32, lengths) == (batch.lengths.dtype, batch.lengths.tolist())
    assert max(lengths) == batch.max_seqlen
    places = [at for length in lengths for at in range(length)]
    assert (torch.int64, places) == (batch.position_ids.dtype, batch.position_ids.tolist())
    for name in ("ids", "log_prob", "mask", "state"):
        wanted = joined(sequences, name)
        assert wanted.dtype == batch.tokens[name].dtype
        assert torch.equal(wanted, batch.tokens[name].cpu()), name
    check_rest(batch, sequences)


def check_rest(batch: Any, sequences: Sequence[breadbox.Sequence]) -> None:
    for name in ("prompt", "scale"):
        for each, got in zip(sequences, batch.context[name], strict=True):
            assert torch.equal(torch.as_tensor(each.context[name]), got.cpu()), name
    assert [each.numbers["reward"] for each in sequences] == batch.numbers["reward"].tolist()
    assert [each.numbers["good"] for each in sequences] == batch.numbers["good"].tolist()
    assert ["sum"] * len(sequences) == batch.numbers["task"]


def check_padded(batch: Any, sequences: Sequence[breadbox.Sequence]) -> None:
    check_place(batch)
    longest = max(each.step_count for each in sequences)
    assert (len(sequences), longest) == tuple(batch.mask.shape)
    for name, column in batch.tokens.items():
        assert (len(sequences), longest) == tuple(column.shape[:2])
        assert torch.equal(joined(sequences, name), column[batch.mask].cpu()), name
        assert 0 == int(column[~batch.mask].count_nonzero())
    check_rest(batch, sequences)


@pytest.mark.parametrize("by", ["device", "to"])
@pytest.mark.parametrize(
    ("kind", "check"), [(PackedBatch, check_packed), (PaddedBatch, check_padded)]
)
def test_every_array_is_on_the_device_as_it_was_sent(
    store: PayloadStore, references: list[FragmentReference], kind: Any, check: Any, by: str
) -> None:
    for _ in range(3):  # The later ones reuse memory of the earlier.
        device = DEVICE if by == "device" else None
        positions = range(len(references))
        batch = load_sequences(kind, store, references, positions=positions, device=device)
        check(batch if by == "device" else batch.to(DEVICE), SEQUENCES)


def test_a_batch_of_no_sequence_is_on_the_device(
    store: PayloadStore, references: list[FragmentReference]
) -> None:
    for kind in (PackedBatch, PaddedBatch):
        batch: Any = load_sequences(kind, store, references[:1], positions=[], device=DEVICE)
        check_place(batch)
        assert 0 == len(batch) == len(batch.tokens["state"])
        assert torch.bfloat16 == batch.tokens["state"].dtype


def by_number(batch: Any) -> list[breadbox.Sequence]:
    return [SEQUENCES[number] for number in batch.numbers["number"].tolist()]


@pytest.mark.parametrize("max_tokens", [None, 1000])
@pytest.mark.parametrize("is_padded", [False, True])
def test_micro_batches_of_a_lease_have_each_sequence_once(
    filled: breadbox.Client, max_tokens: int | None, is_padded: bool
) -> None:
    taken = []
    with filled.fetch(len(SEQUENCES), 30, buffer="groups") as lease:
        load = lease.padded if is_padded else lease.packed
        for batch in load(max_tokens=max_tokens, device=DEVICE):
            (check_padded if is_padded else check_packed)(batch, by_number(batch))
            size = batch.mask.numel() if is_padded else int(batch.cu_seqlens[-1])
            assert size <= (max_tokens or size)
            taken += batch.numbers["number"].tolist()
    assert [*range(len(SEQUENCES))] == sorted(taken)


def test_micro_batches_are_copied_beside_a_computation(filled: breadbox.Client) -> None:
    """Copies wait for nothing, so their memory must not be used again before they are done."""
    busy = torch.rand(2048, 2048, device=DEVICE)
    sums: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for _ in range(5):
        with filled.fetch(len(SEQUENCES), 30, buffer="groups") as lease:
            for batch in lease.packed(max_tokens=1000, device=DEVICE):
                for _ in range(20):
                    busy = (busy @ busy).clamp(0, 1)
                wanted = sum(int(each.tokens["ids"].sum()) for each in by_number(batch))
                last = batch.cu_seqlens[1:].long() - 1
                ends = batch.position_ids[last] + 1 - batch.lengths
                sums.append((wanted, batch.tokens["ids"].sum(), ends.abs().sum()))
                del batch  # Its memory may be given to the next copy, not before it was read.
    assert [(wanted, 0) for wanted, _, _ in sums] == [
        (int(ids), int(ends)) for _, ids, ends in sums
    ]


def test_cu_seqlens_are_the_offsets_of_a_jagged_tensor(
    store: PayloadStore, references: list[FragmentReference]
) -> None:
    batch: Any = load_sequences(
        PackedBatch, store, references, positions=range(len(references)), device=DEVICE
    )
    jagged = torch.nested.nested_tensor_from_jagged(
        batch.tokens["state"], batch.cu_seqlens, max_seqlen=batch.max_seqlen
    )
    assert torch.device(DEVICE).type == jagged.device.type
    for each, row in zip(SEQUENCES, jagged.unbind(), strict=True):
        assert torch.equal(torch.as_tensor(each.tokens["state"]), row.cpu())


def test_attention_of_variable_lengths_is_that_of_each_sequence(
    store: PayloadStore, references: list[FragmentReference]
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch 2.10 or later")
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("variable-length attention needs a device of compute capability 8 or later")
    batch: Any = load_sequences(
        PackedBatch, store, references, positions=range(len(references)), device=DEVICE
    )
    x, ends, longest = batch.tokens["state"], batch.cu_seqlens, batch.max_seqlen
    got = varlen.varlen_attn(x, x, x, ends, ends, longest, longest)
    alone = [torch.as_tensor(each.tokens["state"]).to(DEVICE).float() for each in SEQUENCES]
    heads_first = [each.transpose(0, 1)[None] for each in alone]
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = torch.cat([attention(each, each, each)[0].transpose(0, 1) for each in heads_first])
    torch.testing.assert_close(got.float(), wanted, atol=2e-2, rtol=2e-2)
