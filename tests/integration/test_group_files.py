"""A server and its clients keep groups of small fragments in shared files, over crashes too."""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model.fragment import Fragment
from breadbox.stores.files import FileCustodian, FileStore
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.fsck_process import MUST_BE_0, fsck_report
from support.server_process import ServerProcess
from support.small_disk import CannotMountError, fill_up, small_disk

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GROUP = 64
CAPACITY = 100
DISK_BYTES = 48 * 2**20


def group(number: int, *, size: int = 64) -> list[Fragment]:
    def fragment(index: int) -> Fragment:
        return replace(vector_fragment(index), obs=np.full((4, size), index % 251, np.uint8))

    return [fragment(number * GROUP + each) for each in range(GROUP)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made) / "store"


def serve(stack: ExitStack, store: Path, log: Path, *options: str) -> ServerProcess:
    options = ("--store", f"file://{store}", "--capacity-chunks", str(CAPACITY), *options)
    return stack.enter_context(ServerProcess(*options, log=log))


def group_files(store: Path) -> list[str]:
    return os.listdir(store / "groups")


def check_agreement(store: Path) -> None:
    report = fsck_report("--store", f"file://{store}")
    assert [0] * len(MUST_BE_0) == [report[name] for name in MUST_BE_0]


def read(client: breadbox.Client, count: int) -> list[int]:
    """Take fragments out; return the numbers of those whose arrays are theirs."""
    with client.fetch(fragment_count=count, max_wait_s=30.0) as lease:
        found = [*lease.fragments()]
    assert all({each.fragment_index % 251} == {*np.unique(each.obs)} for each in found)
    return sorted(each.fragment_index for each in found)


def indexes(first: int, end: int) -> Sequence[int]:
    return [*range(first, end)]


def test_a_full_buffer_of_small_fragments_is_in_few_files_and_survives_a_crash(
    folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=60.0))
        client.start_session("s")
        for number in range(5):
            client.append_many(group(number))
        eventually_sync(lambda: len(group_files(folder)) == 2, "deletions")
        check_agreement(folder)
        server.kill()
        server.start()
        check_agreement(folder)
        client.append_many(group(5))
        eventually_sync(lambda: len(group_files(folder)) == 2, "deletions")
        assert indexes(6 * GROUP - CAPACITY, 6 * GROUP) == read(client, CAPACITY)
        eventually_sync(lambda: not group_files(folder), "deletions")
        check_agreement(folder)


def test_a_group_that_is_refused_in_part_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    """Half of it is there already."""
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address))
        client.start_session("s")
        client.append_many(group(0)[: GROUP // 2])
        results = client.append_many(group(0))
        outcomes = [each.outcome for each in results]
        expected = [breadbox.AdmissionOutcome.DUPLICATE, breadbox.AdmissionOutcome.ADMITTED]
        assert [each for each in expected for _ in range(GROUP // 2)] == outcomes
        assert indexes(0, GROUP) == read(client, GROUP)
        eventually_sync(lambda: not group_files(folder), "deletions")
        client.append_many(group(0))
        eventually_sync(lambda: not group_files(folder), "discards")


def test_a_store_that_loses_group_files_costs_their_fragments_and_the_next_ones_are_kept(
    folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=60.0))
        client.start_session("s")
        client.append_many(group(0))
        for name in group_files(folder):
            (folder / "groups" / name).unlink()
        eventually_sync(lambda: client.get_buffer().state.fragment_count == 0, "the loss")
        client.append_many(group(1))
        assert indexes(GROUP, 2 * GROUP) == read(client, GROUP)


def test_the_part_of_a_group_that_is_released_over_a_crash_goes_and_the_rest_stays(
    folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=60.0))
        client.start_session("s")
        client.append_many(group(0))
        with client.fetch(fragment_count=GROUP // 2, max_wait_s=30.0) as lease:
            gone = [each.metadata.fragment_index for each in lease.references]
            server.kill()
            server.start()
        (path,) = (folder / "groups").iterdir()
        eventually_sync(lambda: path.read_bytes()[:GROUP].count(0) == GROUP // 2, "deletions")
        check_agreement(folder)
        assert indexes(0, GROUP) == sorted([*gone, *read(client, GROUP // 2)])
        eventually_sync(lambda: not group_files(folder), "deletions")


def test_a_damaged_payload_of_a_group_is_found_and_deleted_alone(
    folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log")
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=60.0))
        client.start_session("s")
        client.append_many(group(0))
        server.stop()
        (path,) = (folder / "groups").iterdir()
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        report = fsck_report("--store", f"file://{folder}", "--repair")
        assert (1, 1) == (report["corrupt"], report["deleted_corrupt"])
        server.start()
        assert indexes(0, GROUP - 1) == read(client, GROUP - 1)


def test_payloads_of_a_group_that_were_confirmed_for_nothing_are_orphans(
    folder: Path, tmp_path: Path
) -> None:
    """A server died between the confirmation and the journal."""
    with ExitStack() as stack:
        server = serve(stack, folder, tmp_path / "log", "--unannounced-s", "1")
        server.kill()
        store = FileStore(str(folder))
        references = store.write_many([[memoryview(b"x" * 200)]] * GROUP)
        custodian = FileCustodian(str(folder), unannounced_s=1.0)
        asyncio.run(custodian.confirm(references[: GROUP // 2]))
        (path,) = (folder / "groups").iterdir()
        assert [2, 1] == [*dict.fromkeys(path.read_bytes()[:GROUP])]
        server.start()
        eventually_sync(lambda: path.read_bytes()[:GROUP].count(0) == GROUP // 2, "deletions")
        assert [0, 1] == [*dict.fromkeys(path.read_bytes()[:GROUP])]


def test_a_full_disk_takes_groups_again_once_it_has_room(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(tmp_path / "disk", size_bytes=DISK_BYTES))
        except CannotMountError as error:
            pytest.skip(f"a small file system cannot be mounted here: {error}")
        store = disk / "store"
        server = serve(stack, store, tmp_path / "log")
        client = stack.enter_context(
            breadbox.connect(server.address, reconnect_s=60.0, append_wait_s=3.0)
        )
        client.start_session("s")
        client.append_many(group(0, size=4000))
        before = sorted(group_files(store))
        filling = fill_up(disk)
        with pytest.raises((breadbox.errors.BackpressureError, breadbox.errors.StoreFullError)):
            client.append_many(group(1, size=4000))
        assert before == sorted(group_files(store))
        filling.unlink()
        client.append_many(group(1, size=4000))
        assert indexes(2 * GROUP - CAPACITY, 2 * GROUP) == read(client, CAPACITY)
        eventually_sync(lambda: not group_files(store), "deletions")
