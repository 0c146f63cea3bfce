"""A `file://` store whose disk fills up goes on, whoever filled it: nobody is stuck for good."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.diagnosis import diagnose
from breadbox.model.errors import ReplayBufferError, WaitElapsedError
from breadbox.model.fragment import Fragment
from breadbox.model.presets import STORE_FULL_ADVICE
from breadbox.model.types import AdmissionOutcome
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.server_process import ServerProcess
from support.small_disk import CannotMountError, fill_up, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MIB = 2**20
DISK_BYTES = 24 * MIB
FRAGMENT_BYTES = 100_000
WITHIN_S = 30.0
STALL_S = 3.0
SMALL = ("--capacity-chunks", "100000")


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    inode_count = getattr(request, "param", None)
    try:
        with small_disk(
            tmp_path / "disk", size_bytes=DISK_BYTES, inode_count=inode_count
        ) as folder:
            yield folder
    except CannotMountError as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")


def fragment(index: int, size_bytes: int = FRAGMENT_BYTES) -> Fragment:
    obs = np.full((4, size_bytes // 4), index % 251, np.uint8)
    return replace(vector_fragment(index), obs=obs)


class World:
    """A server on a small disk, and a producer that never stops by itself."""

    def __init__(self, stack: ExitStack, disk: Path, log: Path, *arguments: str) -> None:
        self.disk = disk
        self.log = log
        self.server = ServerProcess("--store", f"file://{disk}/store", *arguments, log=log)
        stack.enter_context(self.server)
        self.client = stack.enter_context(breadbox.connect(self.server.address, reconnect_s=60.0))
        self.client.start_session("s")
        self.fragment_bytes = FRAGMENT_BYTES
        self.batch_count = 4
        self.appended = 0
        self._progress_at = time.monotonic()
        self.errors: list[BaseException] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)
        stack.callback(self.stop_producing)

    def produce(self) -> None:
        self._thread.start()

    def _produce(self) -> None:
        try:
            with breadbox.connect(self.server.address, reconnect_s=60.0) as client:
                while not self._ends.is_set():
                    first = self.appended
                    client.append_many(
                        [
                            fragment(first + k, size_bytes=self.fragment_bytes)
                            for k in range(self.batch_count)
                        ]
                    )
                    self.appended += self.batch_count
                    self._progress_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - told by the test's own thread
            self.errors.append(error)

    def await_appended(self, count: int) -> None:
        eventually_sync(lambda: self.appended >= count, f"{count} appended", within_s=WITHIN_S)

    def is_stalled(self) -> bool:
        """Whether the producer waits, and has for longer than any hiccup."""
        return self.appended > 0 and time.monotonic() - self._progress_at > STALL_S

    def stop_producing(self) -> None:
        self._ends.set()

    def consume(self, count: int) -> int:
        """Fetch, read and release one after another; gives how many came within `WITHIN_S`."""
        for done in range(count):
            try:
                with self.client.fetch(fragment_count=1, max_wait_s=WITHIN_S) as lease:
                    (read,) = lease.fragments()
            except WaitElapsedError:
                return done
            (reference,) = lease.references
            assert reference.metadata.fragment_index % 251 == read.obs[0, 0]
        return count


@pytest.fixture
def arguments(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return getattr(request, "param", ())


@pytest.fixture
def world(disk: Path, tmp_path: Path, arguments: tuple[str, ...]) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, disk, tmp_path / "log", *arguments)


def test_a_store_that_producers_filled_is_consumed_before_and_after_a_crash(world: World) -> None:
    world.produce()
    # More than fits: without a learner the oldest go, as on a disk of any size.
    world.await_appended(2 * DISK_BYTES // FRAGMENT_BYTES)
    assert 50 == world.consume(50)
    world.server.kill()
    world.server.start()
    assert 50 == world.consume(50)
    assert [] == world.errors


def test_capacity_is_capped_to_the_disk_and_said(world: World) -> None:
    config = world.client.get_buffer().config
    assert DISK_BYTES // 2 == config.capacity_bytes
    assert "buffers hold 12 MiB" in world.log.read_text()


@pytest.mark.parametrize("arguments", [(*SMALL, "--full-policy", "block")], indirect=True)
def test_tiny_fragments_that_fill_whole_blocks_are_consumed_before_and_after_a_crash(
    world: World,
) -> None:
    # The disk is full long before `capacity_bytes` is reached, and half of it is journal.
    world.fragment_bytes = 200
    world.batch_count = 100
    world.produce()
    eventually_sync(world.is_stalled, "the producer waiting", within_s=60.0)
    assert 200 == world.consume(200)
    world.server.kill()
    world.server.start()
    assert 200 == world.consume(200)
    before = world.appended
    while world.appended == before:
        assert 1 == world.consume(1)
    assert [] == world.errors


def test_what_is_held_is_consumed_while_somebody_else_fills_the_disk(world: World) -> None:
    world.produce()
    world.await_appended(50)
    theirs = fill_up(world.disk)
    assert 20 == world.consume(20)
    world.server.kill()
    fill_up(world.disk)
    world.server.start()
    assert 20 == world.consume(20)
    theirs.unlink()
    before = world.appended
    world.await_appended(before + 200)
    assert [] == world.errors


@pytest.mark.parametrize("arguments", [("--uses-max", "1000000")], indirect=True)
def test_a_disk_that_stays_full_is_told_and_everything_goes_on_when_it_is_not(world: World) -> None:
    # Nothing that is consumed is deleted: whatever is written stays, until even the reserve is out.
    world.client.append_many([fragment(index) for index in range(20)])
    theirs = fill_up(world.disk)
    told = "the journal's disk is full"
    rounds = 0
    with breadbox.connect(world.server.address, deadline_s=2.0, reconnect_s=2.0) as client:
        while told not in world.log.read_text():
            with suppress(ReplayBufferError), client.fetch(fragment_count=20, max_wait_s=0):
                rounds += 1
            assert rounds < 200_000, "the disk never came to its end"
    theirs.unlink()
    assert 20 == world.consume(20)
    world.produce()
    world.await_appended(100)
    assert [] == world.errors


def test_a_write_without_room_is_told_in_the_stores_words_by_client_server_and_explain(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # Room is left by the server's measure, and too little for a fragment.
    theirs = fill_up(world.disk, leaving_bytes=3 * MIB)
    world.fragment_bytes, world.batch_count = 4 * MIB, 1
    world.produce()
    words = "the payload directory is full (No space left on device: "
    eventually_sync(lambda: words in world.client.get_buffer().state.hold, within_s=WITHIN_S)
    told = f"writing payloads failed, trying again: {words}"
    assert 1 == caplog.text.count(told)
    described = world.client.get_buffer()
    why = diagnose(described, described, 1.0)
    assert ("HOLD", STORE_FULL_ADVICE) == (why.cause, why.advice[0])
    assert words in why.headline
    assert 1 == world.log.read_text().count("storing payloads failed, trying again: ")
    assert f" free). {STORE_FULL_ADVICE}" in world.log.read_text()

    theirs.unlink()
    world.await_appended(2)
    assert "" == world.client.get_buffer().state.hold
    world.stop_producing()
    eventually_sync(lambda: "storing payloads works again" in world.log.read_text(), within_s=30.0)
    assert [] == world.errors


@pytest.mark.parametrize("disk", [600], indirect=True)
def test_a_buffer_that_evicts_goes_on_where_inodes_run_out_before_bytes(world: World) -> None:
    world.fragment_bytes = 5000  # Larger than what is inline.
    world.produce()
    assert (600 - 256) // 2 == world.client.get_buffer().config.capacity_chunks
    world.await_appended(1200)
    world.server.kill()
    world.server.start()
    assert 50 == world.consume(50)
    world.await_appended(2400)
    assert [] == world.errors


@pytest.mark.parametrize("disk", [600], indirect=True)
def test_inodes_that_others_take_are_back_pressure_and_said(world: World) -> None:
    world.fragment_bytes = 5000
    world.produce()
    world.await_appended(100)
    theirs = [world.disk / f"theirs-{number}" for number in range(600)]
    with suppress(OSError):
        for path in theirs:
            path.touch()
    eventually_sync(lambda: "inodes are taken of" in world.client.get_buffer().state.hold)
    eventually_sync(world.is_stalled, "the producer waiting", within_s=60.0)
    assert 50 == world.consume(50)
    world.server.kill()
    world.server.start()
    assert 50 == world.consume(50)
    for path in theirs:
        path.unlink(missing_ok=True)
    world.await_appended(world.appended + 200)
    eventually_sync(lambda: "" == world.client.get_buffer().state.hold, "room", within_s=15.0)
    assert [] == world.errors


def test_one_append_of_more_than_the_disk_holds_goes_in_parts(world: World) -> None:
    size_bytes = DISK_BYTES // 20
    results = world.client.append_many([fragment(k, size_bytes=size_bytes) for k in range(40)])
    assert [AdmissionOutcome.ADMITTED] * 40 == [result.outcome for result in results]


def test_a_disk_that_is_full_at_the_first_start_is_named_with_a_remedy(
    disk: Path, tmp_path: Path
) -> None:
    fill_up(disk)
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="did not start"):
        ServerProcess("--store", f"file://{disk}/store", log=log).start()
    assert "free some room" in log.read_text()
    assert "Traceback" not in log.read_text()
