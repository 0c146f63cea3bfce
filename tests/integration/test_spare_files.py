"""Servers and clients write files of deleted payloads again, and readers keep what is theirs."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model.fragment import Fragment
from breadbox.stores.spare import SPARE_SIZE_BYTES_MIN
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.fsck_process import MUST_BE_0, fsck_report
from support.server_process import ServerProcess
from support.small_disk import CannotMountError, fill_up, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CAPACITY = 8
GROUP = 4
ROUNDS = 12
DISK_BYTES = 64 * 2**20


def large_fragment(index: int) -> Fragment:
    obs = np.full((4, SPARE_SIZE_BYTES_MIN // 2), index % 251, np.uint8)
    return replace(vector_fragment(index), obs=obs)


def group(number: int) -> list[Fragment]:
    return [large_fragment(number * GROUP + each) for each in range(GROUP)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made) / "store"


def serve(stack: ExitStack, store: Path, log: Path) -> ServerProcess:
    options = ("--store", f"file://{store}", "--capacity-chunks", str(CAPACITY))
    return stack.enter_context(ServerProcess(*options, log=log))


def payload_count(store: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(store / "payloads"))


def spare_count(store: Path) -> int:
    return len(os.listdir(store / "spare"))


def inodes(store: Path) -> set[int]:
    return {path.stat().st_ino for path in (store / "payloads").glob("*/*")}


def test_a_full_buffer_of_large_fragments_goes_on_in_the_same_files(
    folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address))
        client.start_session("s")
        held = []
        seen: set[int] = set()
        for number in range(ROUNDS):
            client.append_many(group(number))
            eventually_sync(lambda: payload_count(folder) <= CAPACITY, "deletions")
            seen |= inodes(folder)
            if number == 2:
                # Views of memory whose payloads leave the buffer soon, without their lease.
                with client.fetch(fragment_count=GROUP, max_wait_s=30.0) as lease:
                    held = client.load_fragments(lease.references, is_mapped=True)
            if number == ROUNDS // 2:
                report = fsck_report("--store", f"file://{folder}")
                assert [0] * len(MUST_BE_0) == [report[name] for name in MUST_BE_0]
        # Of 48 files most are written again; those mapped, and one group in between, are not.
        assert len(seen) <= CAPACITY + 4 * GROUP
        for fragment in held:
            assert {fragment.fragment_index % 251} == {*np.unique(fragment.obs).tolist()}
        with client.fetch(fragment_count=CAPACITY, max_wait_s=30.0) as lease:
            read = [*lease.fragments()]
        indexes = range((ROUNDS * GROUP) - CAPACITY, ROUNDS * GROUP)
        assert [*indexes] == sorted(int(each.obs[0, 0]) for each in read)


def test_spare_files_survive_a_crash_of_the_server_and_are_gone_after_its_end(
    folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=60.0))
        client.start_session("s")
        for number in range(3):
            client.append_many(group(number))
        eventually_sync(lambda: spare_count(folder) > 0, "spare files")
        server.kill()
        server.start()
        client.append_many(group(3))
        with client.fetch(fragment_count=CAPACITY, max_wait_s=30.0) as lease:
            assert [*range(8, 16)] == sorted(int(each.obs[0, 0]) for each in lease.fragments())
        server.stop()
    assert 0 == spare_count(folder)


def test_a_disk_that_another_program_fills_gets_the_room_of_spare_files(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(tmp_path / "disk", size_bytes=DISK_BYTES))
        except CannotMountError as error:
            pytest.skip(f"a small file system cannot be mounted here: {error}")
        store = disk / "store"
        server = serve(stack, store, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=60.0))
        client.start_session("s")
        for number in range(4):
            client.append_many(group(number))
        eventually_sync(lambda: spare_count(store) > 0, "spare files")
        filling = fill_up(disk)
        eventually_sync(lambda: spare_count(store) == 0, "room given back")
        filling.unlink()
        client.append_many(group(4))
        with client.fetch(fragment_count=CAPACITY, max_wait_s=30.0) as lease:
            assert [*range(12, 20)] == sorted(int(each.obs[0, 0]) for each in lease.fragments())
