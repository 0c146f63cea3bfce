"""Groups of sequences through a real server to ranks, which pack them into micro-batches."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox import aio
from breadbox.model.errors import InvalidRequestError
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE = 4
GROUPS = 16
TOKENS_MAX = 900
RANK = Path(__file__).parent.parent / "support" / "packed_rank.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--preset", "groups"),
        *("--fragments-per-chunk", str(SIZE), "--open-chunk-s", "1", "--group-min", "2"),
        log=tmp_path / "log",
    ) as started:
        yield started


def sequence(group: int, member: int, *, longest: int = 600) -> breadbox.Sequence:
    """Return a sequence that only its name decides."""
    rng = np.random.default_rng([group, member])
    length = int(rng.integers(1, longest))
    return breadbox.Sequence(
        group=f"prompt-{group}",
        member=member,
        tokens={"ids": rng.integers(0, 50_000, length), "log_prob": rng.random(length, np.float32)},
        context={"prompt": rng.integers(0, 50_000, 3 + group)},
        numbers={"reward": float(rng.random())},
        model_version_min=0,
        model_version_max=0,
    )


def append(client: breadbox.Client, sequences: list[breadbox.Sequence]) -> None:
    results = client.append_many(sequences)
    assert {breadbox.AdmissionOutcome.ADMITTED} == {each.outcome for each in results}


def taken_by_ranks(server: ServerProcess, ranks: int, draws: int) -> list[Any]:
    """Return what each rank took: draws of micro-batches of rows."""
    per_draw = str(GROUPS * SIZE // draws)
    arguments = [str(ranks), per_draw, str(draws), str(TOKENS_MAX)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), server.address, str(rank), *arguments],
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [0] * ranks == [process.returncode for process in processes]
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_take_equal_counts_of_micro_batches_and_each_sequence_once(
    server: ServerProcess, ranks: int
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    # A quarter of the groups lack members, so that shares have different numbers of sequences.
    named = [(group, m) for group in range(GROUPS) for m in range(SIZE if group % 4 else 2)]
    random.Random(seed).shuffle(named)
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        append(client, [sequence(*name) for name in named])
        draws = 2
        taken = taken_by_ranks(server, ranks, draws)
    for draw in range(draws):
        assert 1 == len({len(rank[draw]) for rank in taken})
    batches = [batch for rank in taken for micro in rank for batch in micro]
    assert all(sum(len(row["ids"]) for row in batch) <= TOKENS_MAX for batch in batches)
    rows = [row for batch in batches for row in batch]
    assert sorted(named) == sorted((int(row["group"][7:]), row["member"]) for row in rows)
    for row in rows:
        wanted = sequence(int(row["group"][7:]), row["member"])
        assert wanted.tokens["ids"].tolist() == row["ids"]
        assert wanted.context["prompt"].tolist() == row["prompt"]
        assert wanted.numbers["reward"] == row["reward"]


def test_a_sequence_above_the_tokens_is_named_before_anything_is_loaded_on_every_rank(
    server: ServerProcess,
) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        append(client, [sequence(group, member) for group in range(2) for member in range(SIZE)])
        leases = [
            client.fetch(2 * SIZE, 10, rank=rank, world_size=2, request_id="r") for rank in (0, 1)
        ]
        lengths = {
            (each.metadata.worker_id, each.metadata.fragment_index): each.metadata.step_count
            for lease in leases
            for each in lease.references
        }
        (group, member), longest = max(lengths.items(), key=lambda item: item[1])
        told = []
        for lease in leases:
            client.store.delete_many([each.metadata.payload for each in lease.references])
            with pytest.raises(InvalidRequestError) as caught:
                lease.packed(max_tokens=longest - 1)
            told.append(str(caught.value))
            lease.release()
        own = next(
            n for n, lease in enumerate(leases) if lease.references[0].metadata.worker_id == group
        )
        assert f"member {member} of group {group!r} has {longest} tokens" in told[own]
        assert f"a sequence of rank {own} has {longest} tokens" in told[1 - own]


def test_numbers_have_one_name_and_type_in_all_micro_batches(server: ServerProcess) -> None:
    numbers: list[dict[str, Any]] = [
        {"reward": 1, "task": "sum"},
        {"reward": 0.5},
        {"reward": 0, "steps": 3},
        {"good": True},
    ]
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        sequences = [sequence(0, member) for member in range(SIZE)]
        for number, each in enumerate(sequences):
            each.numbers = numbers[number % 4]
        append(client, sequences)
        with client.fetch(SIZE, 10) as lease:
            (whole,) = lease.packed()
            batches = list(lease.packed(max_tokens=max(whole.lengths.tolist())))
    assert len(batches) > 1
    for batch in batches:
        assert ["reward", "task", "steps", "good"] == list(batch.numbers)
        for name, column in batch.numbers.items():
            wanted = [whole.numbers[name][place] for place in batch.position]
            assert getattr(whole.numbers[name], "dtype", list) == getattr(column, "dtype", list)
            assert repr(wanted) == repr(list(column))


async def test_asyncio_leases_pack_and_pad_as_blocking_ones(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        append(client, [sequence(0, member) for member in range(SIZE)])
        with client.fetch(SIZE, 10) as lease:
            lease.refuse([])
            packed = list(lease.packed(max_tokens=TOKENS_MAX, columns=["tokens.ids"]))
            padded = list(lease.padded(columns=["ids"], device="cpu"))
            lease.release(breadbox.ReleaseMode.RETURNED)
    async with aio.connect(server.address) as other, await other.fetch(SIZE, 10) as held:
        again = [each async for each in held.packed(max_tokens=TOKENS_MAX, columns=["ids"])]
        again_padded = [each async for each in held.padded(columns=["ids"], device="cpu")]
    assert len(packed) == len(again)
    for one, same in zip(packed, again, strict=True):
        np.testing.assert_array_equal(one.tokens["ids"], same.tokens["ids"])
        np.testing.assert_array_equal(one.position, same.position)
        assert ({}, ["ids"]) == (same.context, [*same.tokens])
    assert (1, 1) == (len(padded), len(again_padded))
    assert padded[0].tokens["ids"].equal(again_padded[0].tokens["ids"])
    assert padded[0].mask.sum() == sum(len(sequence(0, m).tokens["ids"]) for m in range(SIZE))
