"""Rows of a server that is killed: what was acknowledged is there, and nothing else is stored."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import breadbox
from breadbox.cli.main import cli
from support.eventually import eventually_sync
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROWS = breadbox.BufferConfig(assembly=breadbox.AssemblyPolicy.GROUPS, fragments_per_chunk=0)
SIZES = (1, 3, 20_000)
"""Numbers of an array: inline, and in the store."""
CALLS, KILLS = 60, 3
State = dict[str, dict[str, int]]


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        is_redis = request.param == "redis"
        yield stack.enter_context(RedisServer()).url if is_redis else f"file://{tmp_path}/store"


def fsck(url: str) -> dict[str, int]:
    done = CliRunner().invoke(cli, ["fsck", "--json", "--store", url, "--settle-s", "0"])
    assert done.exit_code in (0, 1), done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def has_books_alone(url: str) -> bool:
    found = fsck(url)
    others = [found[name] for name in ("missing", "orphans", "corrupt")]
    return found["kept"] == found["books"] and others == [0, 0, 0]


def value(number: int) -> np.ndarray:
    return np.full(SIZES[number % len(SIZES)], number)


class Writer:
    """Attaches, replaces and drops rows of its own, and knows what was acknowledged."""

    def __init__(self, address: str, name: str, rng: random.Random) -> None:
        self.address, self.name, self.rng = address, name, rng
        self.rows: State = {}
        self.numbers: dict[str, dict[str, int]] = {}
        self.error: BaseException | None = None
        self.call_count = 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def has_made(self, calls: float) -> bool:
        return self.call_count >= calls or self.error is not None

    def _run(self) -> None:
        try:
            with breadbox.connect(self.address, buffer="rows", reconnect_s=60) as client:
                for self.call_count in range(CALLS):
                    self._call(client)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.error = error

    def _call(self, client: breadbox.Client) -> None:
        names = [f"{self.name}-{each}" for each in self.rng.sample(range(12), 4)]
        if self.rng.random() < 0.25:
            client.drop_members([(each, 0) for each in names])
            for each in names:
                self.rows.pop(each, None)
                self.numbers.pop(each, None)
            return
        parts = []
        for each in names:
            part, number = self.rng.choice("abc"), self.rng.randrange(10**6)
            numbers = {"n": number} if self.rng.random() < 0.5 else {}
            parts.append(breadbox.Part(each, 0, part, {part: value(number)}, numbers))
            self.rows.setdefault(each, {})[part] = number
            self.numbers.setdefault(each, {}).update(numbers)
        client.attach(parts, replace=True)


def check(client: breadbox.Client, writers: list[Writer]) -> None:
    rows = {name: row for each in writers for name, row in each.rows.items()}
    numbers = {name: row for each in writers for name, row in each.numbers.items()}
    listed = client.members()
    assert {each.group: set(each.parts) for each in listed} == {
        name: set(row) for name, row in rows.items()
    }
    assert {each.group: each.numbers for each in listed} == numbers
    names = sorted(rows)
    for name, read in zip(names, client.read_members([(each, 0) for each in names]), strict=True):
        assert {part: (array.size, array[0]) for part, array in read.items()} == {
            part: (value(number).size, number) for part, number in rows[name].items()
        }
    stored = sum(len(row) for row in rows.values())
    assert stored == client.get_buffer("rows").state.counters["fragments_admitted"] - sum(
        client.get_buffer("rows").state.counters[f"fragments_discarded_{why}"]
        for why in ("replaced", "dropped")
    )


def test_what_was_acknowledged_before_a_kill_is_there_and_what_was_dropped_is_gone(
    url: str, tmp_path: Path
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    with ServerProcess(*("--store", url, "--unannounced-s", "5"), log=tmp_path / "log") as server:
        with breadbox.connect(server.address, buffer="rows") as client:
            client.create_buffer("rows", ROWS)
            client.start_session("run")
            writers = [Writer(server.address, name, random.Random(seed)) for name in "xyz"]
            for each in writers:
                each.thread.start()
            for kill in range(KILLS):
                until = (kill + rng.random()) * CALLS / KILLS
                eventually_sync(partial(writers[0].has_made, until))
                server.kill()
                server.start()
            for each in writers:
                each.thread.join()
            assert [None] * 3 == [each.error for each in writers]
            check(client, writers)
            eventually_sync(lambda: has_books_alone(url), within_s=60)
        server.kill()
        server.start()
        with breadbox.connect(server.address, buffer="rows") as client:
            check(client, writers)
            eventually_sync(lambda: has_books_alone(url), within_s=60)
            client.drop_members([(each.group, 0) for each in client.members()])
            eventually_sync(lambda: fsck(url)["kept"] == 0, within_s=60)


ROUNDS = 150


def test_rows_that_are_replaced_sent_again_dropped_and_made_anew_leave_nothing_behind(
    url: str, tmp_path: Path
) -> None:
    with ServerProcess("--store", url, log=tmp_path / "log") as server:
        with breadbox.connect(server.address, buffer="rows") as client:
            client.create_buffer("rows", ROWS)
            client.start_session("run")
            for number in range(ROUNDS):
                replaced = breadbox.Part("a", 0, "x", {"x": value(number)}, {"n": number})
                again = breadbox.Part("a", 0, "same", {"same": value(1)})
                client.attach([replaced, again, replaced], replace=True)
                client.attach([again, breadbox.Part("b", 0, "y", {"y": value(number)})])
                assert 1 == client.drop_members([("b", 0), ("c", 0)])
            client.attach(breadbox.Part("b", 0, "y", {"y": value(0)}))
            eventually_sync(lambda: has_books_alone(url), within_s=60)
            before = client.members(), client.get_buffer("rows").state.payload_bytes, fsck(url)
        server.kill()
        server.start()
        with breadbox.connect(server.address, buffer="rows") as client:
            found = client.members(), client.get_buffer("rows").state.payload_bytes, fsck(url)
            assert before == found
            assert [("a", ("same", "x")), ("b", ("y",))] == [
                (each.group, tuple(sorted(each.parts))) for each in found[0]
            ]
            assert (3, found[1]) == (found[2]["kept"], found[2]["book_bytes"])
