"""Rows through a real server: attached by any producer, listed, read and dropped by their keys."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.errors import (
    InvalidRequestError,
    MemberNotFoundError,
    PartConflictError,
    SessionEndedError,
)
from breadbox.types import MemberDescription
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ADMITTED, DUPLICATE = breadbox.AdmissionOutcome.ADMITTED, breadbox.AdmissionOutcome.DUPLICATE
ROWS = breadbox.BufferConfig(assembly=breadbox.AssemblyPolicy.GROUPS, fragments_per_chunk=0)
LARGE = 20_000
"""Numbers of an array that is not inline."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as started:
        yield started


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address, buffer="rows") as client:
        client.create_buffer("rows", ROWS)
        client.start_session("run")
        yield client


def ids(row: str, count: int = 3, **numbers: float | str) -> breadbox.Part:
    return breadbox.Part(row, 0, "ids", {"ids": np.arange(count)}, numbers)


def test_a_row_is_read_as_it_was_attached_part_by_part(client: breadbox.Client) -> None:
    first = client.attach(ids("a", 5, length=5, status="running"))
    reward = breadbox.Part("a", 0, "reward", {"scores": np.ones((2, 3), np.float32), "text": b"{}"})
    second = client.attach([reward, breadbox.Part("a", numbers={"status": "done"})])
    (row,) = client.read_members([("a", 0)])

    assert [each.outcome for each in first + second] == [ADMITTED] * 3
    assert client.members() == [
        MemberDescription("a", 0, ("ids", "reward"), {"length": 5, "status": "done"})
    ]
    assert {name: array.tolist() for name, array in row.items()} == {
        "ids": [0, 1, 2, 3, 4],
        "scores": [[1.0] * 3] * 2,
        "text": list(b"{}"),
    }
    assert row["scores"].dtype == np.float32
    (reward_alone,) = client.read_members([("a", 0)], ["reward"])
    assert set(reward_alone) == {"scores", "text"}


@pytest.mark.parametrize("count", [3, LARGE], ids=["inline", "in the store"])
def test_many_rows_come_back_in_the_order_asked_for(client: breadbox.Client, count: int) -> None:
    names = [f"row-{number}" for number in range(700 if count == 3 else 20)]
    client.attach(
        breadbox.Part(name, 0, "ids", {"ids": np.arange(count) + place})
        for place, name in enumerate(names)
    )
    wanted = [*reversed(names), names[3]]

    rows = client.read_members([(name, 0) for name in wanted], ["ids"])

    assert [int(row["ids"][0]) for row in rows] == [names.index(name) for name in wanted]
    assert {len(row["ids"]) for row in rows} == {count}
    assert [each.group for each in client.members()] == sorted(names)


def test_rows_are_listed_by_their_keys_in_the_order_asked_for(client: breadbox.Client) -> None:
    """More of them than a reply lists."""
    names = [f"row-{number}" for number in range(1500)]
    client.attach(breadbox.Part(name, numbers={"place": n}) for n, name in enumerate(names))
    listed = client.members(keys=[(name, 0) for name in [*reversed(names), "gone"]])
    assert [each.group for each in listed] == [*reversed(names)]
    assert [each.numbers["place"] for each in listed] == [*reversed(range(1500))]
    assert [] == client.members(keys=[])


def test_the_same_bytes_again_change_nothing_and_others_are_a_conflict(
    client: breadbox.Client,
) -> None:
    client.attach(ids("a", 3, version=1))
    (again,) = client.attach(ids("a", 3, version=2))
    with pytest.raises(PartConflictError, match="'ids' with other bytes"):
        client.attach([ids("a", 4), ids("b", 2)])

    assert again.outcome is DUPLICATE
    assert [each.numbers for each in client.members()] == [{"version": 1}, {}]
    assert [len(row["ids"]) for row in client.read_members([("a", 0), ("b", 0)])] == [3, 2]

    (replaced,) = client.attach(ids("a", 4, version=3), replace=True)
    (same,) = client.attach(ids("a", 4, version=3), replace=True)
    assert (replaced.outcome, same.outcome) == (ADMITTED, DUPLICATE)
    assert [len(row["ids"]) for row in client.read_members([("a", 0)])] == [4]
    assert client.members("a")[0].numbers == {"version": 3}


def test_numbers_of_two_writers_are_merged(client: breadbox.Client) -> None:
    client.attach(breadbox.Part("prompt", numbers={"is_prompt": True, "status": "pending"}))
    client.attach(breadbox.Part("prompt", numbers={"status": "running"}))
    client.attach(breadbox.Part("prompt", numbers={"global_steps": 7}))

    assert client.members() == [
        MemberDescription(
            "prompt", 0, (), {"is_prompt": True, "status": "running", "global_steps": 7}
        )
    ]
    assert client.read_members([("prompt", 0)]) == [{}]
    with pytest.raises(InvalidRequestError, match="are 17 with those of its member"):
        client.attach(breadbox.Part("prompt", numbers={f"n{each}": each for each in range(14)}))


def test_unknown_keys_and_parts_are_named(client: breadbox.Client) -> None:
    client.attach(ids("a"))
    with pytest.raises(MemberNotFoundError, match="member 0 of group 'b' cannot be read"):
        client.read_members([("a", 0), ("b", 0)])
    with pytest.raises(MemberNotFoundError, match="it has no part 'reward'"):
        client.read_members([("a", 0)], ["ids", "reward"])


def test_dropped_rows_are_gone_and_may_come_again(client: breadbox.Client) -> None:
    client.attach([ids("a"), ids("b"), breadbox.Part("b", 1, "ids", {"ids": np.arange(9)})])

    assert client.drop_members([("b", 0), ("b", 0), ("c", 0)]) == 1
    assert [(each.group, each.member) for each in client.members()] == [("a", 0), ("b", 1)]
    (result,) = client.attach(ids("b", 4))
    assert result.outcome is ADMITTED
    rows = client.read_members([("b", 0), ("b", 1)])
    assert [len(row["ids"]) for row in rows] == [4, 9]
    assert client.drop_members([("a", 0), ("b", 0), ("b", 1)]) == 3
    assert client.members() == []
    assert client.get_buffer("rows").state.payload_bytes == 0


def test_a_sequence_is_the_part_tokens_of_a_row(client: breadbox.Client) -> None:
    sequence = breadbox.Sequence(
        group="a",
        member=2,
        tokens={"ids": np.arange(4)},
        numbers={"reward": 0.5},
        model_version_min=0,
        model_version_max=0,
    )
    client.attach(breadbox.Part("a", 2, "score", {"score": np.ones(1)}, {"reward": 0.0, "by": "v"}))
    results = [client.append(sequence), client.append(sequence)]

    assert [each.outcome for each in results] == [ADMITTED, DUPLICATE]
    (described,) = client.members()
    assert (described.parts, described.numbers) == (
        ("score", "tokens"),
        {"reward": 0.5, "by": "v"},
    )
    (row,) = client.read_members([("a", 2)], ["tokens"])
    assert row["ids"].tolist() == [0, 1, 2, 3]


def test_rows_survive_a_killed_server(server: ServerProcess, client: breadbox.Client) -> None:
    client.attach([ids("a", 3, x=1), ids("b", LARGE)])
    client.attach([ids("a", 5, y=2), ids("c")], replace=True)
    client.attach(breadbox.Part("d", numbers={"status": "pending"}))
    client.drop_members([("c", 0)])
    before = client.members()
    server.kill()
    server.start()

    assert client.members() == before
    assert [each.group for each in before] == ["a", "b", "d"]
    assert [len(row["ids"]) for row in client.read_members([("b", 0), ("a", 0)])] == [LARGE, 5]
    with pytest.raises(PartConflictError):
        client.attach(ids("a", 3))
    assert client.attach(ids("a", 5))[0].outcome is DUPLICATE


def test_rows_need_a_session_and_go_with_it(client: breadbox.Client) -> None:
    client.attach(ids("a"))
    client.start_session("other")
    assert client.members() == []
    client.end_session("other")
    with pytest.raises(SessionEndedError):
        client.attach(ids("a"))


def test_rows_are_not_fetched(client: breadbox.Client) -> None:
    with pytest.raises(InvalidRequestError, match="keeps rows"):
        client.fetch(1, max_wait_s=0)


def test_asyncio_clients_do_the_same(server: ServerProcess, client: breadbox.Client) -> None:
    async def work() -> list[dict[str, object]]:
        async with breadbox.aio.connect(server.address, buffer="rows") as other:
            await other.attach([ids("x", 2, n=1), ids("y", 3)])
            assert [each.group for each in await other.members("x")] == ["x"]
            rows = await other.read_members([("y", 0), ("x", 0)])
            assert await other.drop_members([("x", 0)]) == 1
            return rows

    assert [len(row["ids"]) for row in asyncio.run(work())] == [3, 2]  # type: ignore[arg-type]


def test_threads_beside_one_whose_parts_are_refused_hear_that_theirs_are_attached(
    client: breadbox.Client,
) -> None:
    parts_max = 64
    client.attach(
        breadbox.Part("full", 0, f"p{each}", {"ids": np.arange(3)}) for each in range(parts_max)
    )

    def attach(thread: int) -> set[breadbox.AdmissionOutcome]:
        if thread == 0:
            for _ in range(100):
                with pytest.raises(InvalidRequestError):
                    client.attach(breadbox.Part("full", 0, "more", {"ids": np.arange(3)}))
            return set()
        return {
            client.attach(breadbox.Part(f"{thread}", each, "p", {"ids": np.arange(3)}))[0].outcome
            for each in range(100)
        }

    with ThreadPoolExecutor(32) as threads:
        outcomes = list(threads.map(attach, range(32)))
    assert outcomes == [set(), *[{ADMITTED}] * 31]
