"""`breadbox fsck`: exit codes and counts, on real stores, with and without a server."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

import breadbox
from breadbox.cli.main import cli
from breadbox.stores import open_store
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess, plain_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

FRAGMENTS = 6


class World:
    """A store with some fragments in it, and the server that admitted them."""

    def __init__(self, stack: ExitStack, url: str, log: Path, *arguments: str) -> None:
        self.url = url
        self.server = stack.enter_context(ServerProcess("--store", url, *arguments, log=log))
        self.client = stack.enter_context(breadbox.connect(self.server.address))
        self.client.start_session("s")
        self.client.append_many([vector_fragment(index) for index in range(FRAGMENTS)])

    def fsck(self, *arguments: str) -> tuple[int, dict[str, int]]:
        """Exit code and report; of the command in this process."""
        command = ["fsck", "--json", "--store", self.url, "--settle-s", "0", *arguments]
        done = CliRunner().invoke(cli, command)
        assert done.exit_code in (0, 1), done.stderr
        return done.exit_code, json.loads(done.stdout)


def fsck_process(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The command as one runs it."""
    return subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", "fsck", *arguments],
        env=plain_environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def redis_world(tmp_path: Path) -> Iterator[tuple[World, RedisServer]]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        yield World(stack, redis.url, tmp_path / "log"), redis


def counts(report: dict[str, int], *names: str) -> list[int]:
    return [report[name] for name in names]


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_books_and_store_that_agree_are_told_so(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        if kind == "redis":
            url = stack.enter_context(RedisServer()).url
        else:
            url = f"file://{tmp_path}/store"
        world = World(stack, url, tmp_path / "log")
        done = fsck_process("--json", "--store", url, "--settle-s", "0")
        status, report = world.fsck()
        held = world.client.get_buffer().state.payload_bytes
    assert (0, report) == (done.returncode, json.loads(done.stdout)), done.stderr
    assert 0 == status
    assert [FRAGMENTS, FRAGMENTS, 0, 0, 0] == counts(
        report, "books", "kept", "missing", "orphans", "corrupt"
    )
    assert held == report["book_bytes"]


@pytest.mark.parametrize("way", ["BREADBOX_CONFIG", "--config", "BREADBOX_STORE"])
def test_it_finds_store_and_journal_as_the_server_does(way: str, tmp_path: Path) -> None:
    """By the server's own file, with options that are the server's alone, or its variables."""
    with ExitStack() as stack:
        payloads, journal = (stack.enter_context(RedisServer()).url for _ in range(2))
        world = World(stack, payloads, tmp_path / "log", "--journal", journal)
        config = tmp_path / "config.yml"
        config.write_text(f"store: {payloads}\njournal: {journal}\ncapacity-chunks: 7\n")
        environment = {"BREADBOX_STORE": payloads, "BREADBOX_JOURNAL": journal}
        done = fsck_process(
            *("--json", "--settle-s", "0", *(["--config", str(config)] if way[0] == "-" else [])),
            **({"BREADBOX_CONFIG": str(config)} if way == "BREADBOX_CONFIG" else {}),
            **(environment if way == "BREADBOX_STORE" else {}),
        )
        assert (0, world.fsck("--journal", journal)[1]) == (
            done.returncode,
            json.loads(done.stdout),
        )
        config.write_text(f"store: {payloads}\nno-such-option: 7\n")
        refused = fsck_process("--config", str(config))

    assert (2, True) == (refused.returncode, "unknown options: no_such_option" in refused.stderr)


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "killed"])
def test_what_a_lease_held_that_expired_after_the_journals_last_entry_is_not_missed(
    tmp_path: Path, is_running: bool
) -> None:
    """Expiry is no entry of its own: whoever reads the journal has to do what is due since."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        arguments = ("--lease-expiry-policy", "consume", "--lease-s", "0.5")
        world = World(stack, redis.url, tmp_path / "log", *arguments)
        inspector = stack.enter_context(redis.client())

        def kept_count() -> int:
            return len(inspector.keys("breadbox:{*}:0"))

        world.client.service.fetch_fragments(2)  # Nobody renews this lease.
        if is_running:
            eventually_sync(lambda: FRAGMENTS - 2 == kept_count(), "the server deleting two")
        else:
            world.server.kill()
            time.sleep(0.6)  # The lease has to run out with nobody there to see it.
        status, report = world.fsck()
        kept, leaving = (FRAGMENTS - 2, 0) if is_running else (FRAGMENTS, 2)
        names = ("books", "kept", "missing", "orphans", "leaving")
        assert (0, [FRAGMENTS - 2, kept, 0, 0, leaving]) == (status, counts(report, *names))
        assert (0, kept) == (world.fsck("--repair")[0], kept_count())


def test_an_orphan_is_told_and_repaired(redis_world: tuple[World, RedisServer]) -> None:
    world, redis = redis_world
    store = open_store(world.url)
    (orphan,) = store.write_many([[memoryview(b"x" * 100)]])
    store.close()
    with redis.client() as client:
        client.persist(f"breadbox:{{{orphan.payload_id}}}:0")
    status, report = world.fsck()
    assert (1, 1) == (status, report["orphans"])
    status, report = world.fsck("--repair")
    assert (0, [1, 1]) == (status, counts(report, "orphans", "deleted"))
    assert 0 == world.fsck()[0]


def test_orphans_that_may_be_another_journals_are_kept(
    redis_world: tuple[World, RedisServer], tmp_path: Path
) -> None:
    world, _ = redis_world
    other = ServerProcess(
        *("--store", world.url, "--journal", f"file://{tmp_path}/journal"), log=tmp_path / "other"
    )
    with other, breadbox.connect(other.address) as client:
        client.start_session("s")
        client.append(vector_fragment(0))
        status, report = world.fsck()
        assert (1, 1) == (status, report["orphans"])
        with pytest.raises(AssertionError, match="--delete-orphans"):
            world.fsck("--repair")
        assert 1 == client.get_buffer().state.chunk_count
        assert 1 == world.fsck()[1]["orphans"]


def test_missing_and_damaged_payloads_are_told(redis_world: tuple[World, RedisServer]) -> None:
    world, redis = redis_world
    world.server.stop()
    with redis.client() as client:
        lost, damaged, *_ = sorted(client.keys("breadbox:{*}:0"))
        client.delete(lost)
        value = bytearray(client.get(damaged))
        value[-1] ^= 0xFF
        client.set(damaged, bytes(value))
    status, report = world.fsck()
    assert 1 == status
    assert [1, 0, 1] == counts(report, "missing", "orphans", "corrupt")
    status, report = world.fsck("--no-checksums")
    assert [1, 0] == counts(report, "missing", "corrupt")


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_a_damaged_payload_is_deleted_by_repair_and_dropped_by_the_server(
    kind: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if kind == "redis":
            redis = stack.enter_context(RedisServer())
            world = World(stack, redis.url, tmp_path / "log")
            with redis.client() as client:
                damaged, newer, *_ = sorted(client.keys("breadbox:{*}:0"))
                for key, place in ((damaged, -1), (newer, 8)):
                    client.setrange(key, client.strlen(key) + place if place < 0 else place, b"~")
        else:
            world = World(stack, f"file://{tmp_path}/store", tmp_path / "log")
            damaged, newer, *_ = sorted(tmp_path.glob("store/payloads/*/*"))
            for path, place in ((damaged, -1), (newer, 8)):
                value = bytearray(path.read_bytes())
                value[place] = ord("~")
                path.write_bytes(value)
        world.server.stop()
        status, report = world.fsck()
        assert (1, [0, 2, 0]) == (status, counts(report, "missing", "corrupt", "deleted_corrupt"))
        # One of another format version is told, and kept for a Breadbox that can read it.
        status, report = world.fsck("--repair")
        assert (1, [2, 1]) == (status, counts(report, "corrupt", "deleted_corrupt"))
        status, report = world.fsck()
        assert (1, [1, 1]) == (status, counts(report, "missing", "corrupt"))
        world.server.start()
        state = world.client.get_buffer().state
        assert (FRAGMENTS - 1, 1) == (
            state.chunk_count,
            state.counters["chunks_evicted_payload_lost"],
        )
        status, report = world.fsck()
        assert (1, [0, 1]) == (status, counts(report, "missing", "corrupt"))


def test_repair_without_checksums_looks_for_no_damage(
    redis_world: tuple[World, RedisServer],
) -> None:
    world, redis = redis_world
    with redis.client() as client:
        key, *_ = sorted(client.keys("breadbox:{*}:0"))
        client.setrange(key, client.strlen(key) - 1, b"~")
        status, report = world.fsck("--repair", "--no-checksums")
        assert (0, [0, 0]) == (status, counts(report, "corrupt", "deleted_corrupt"))
        assert client.exists(key)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--store", "redis://:hunter2@127.0.0.1:1/0"], "cannot be used"),
        (["--store", "ftp://x"], "no known kind"),
        (["--store", "file:///nonexistent-by-far/x/y", "--journal", "none"], "nothing to compare"),
    ],
    ids=["unreachable", "malformed", "without a journal"],
)
def test_what_cannot_be_compared_is_told_in_one_line(arguments: list[str], wanted: str) -> None:
    done = fsck_process(*arguments)
    assert 2 == done.returncode, done.stderr
    assert 1 == len(done.stderr.strip().splitlines()), done.stderr
    assert wanted in done.stderr
    assert "hunter2" not in done.stderr


def test_an_empty_store_without_a_journal_is_told(tmp_path: Path) -> None:
    done = fsck_process("--store", f"file://{tmp_path}/store")
    assert 2 == done.returncode
    assert "no journal" in done.stderr
