"""A disk that does not answer: calls end at their deadlines, and the loop serves others."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from breadbox.model.errors import StoreUnavailableError
from breadbox.stores import Deadline, open_store
from breadbox.stores import files as files_module
from breadbox.stores.base import Confirmation
from breadbox.stores.disk import can_hang
from breadbox.stores.files import THREADS_MAX, FileCustodian
from support.hung_files import hung
from support.store_contract import in_buffers, payload_of, read_back

SILENCE_S = 0.3


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the folders of tests are on here."""
    monkeypatch.setattr(files_module, "can_hang", lambda directory: True)


def test_shared_memory_cannot_hang_and_other_file_systems_can() -> None:
    assert (False, True) == (can_hang("/dev/shm"), can_hang("/proc"))


def test_a_write_on_a_hung_disk_ends_at_its_deadline_and_later_ones_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    payload = payload_of(3000)
    with hung(str(tmp_path), monkeypatch):
        began_at = time.monotonic()
        with pytest.raises(StoreUnavailableError) as caught:
            store.within(Deadline(SILENCE_S)).write_many([in_buffers(payload)])
        assert SILENCE_S <= time.monotonic() - began_at < 10 * SILENCE_S
    assert caught.value.was_silent
    assert [payload] == read_back(store, store.write_many([in_buffers(payload)]))


def test_a_read_and_a_deletion_on_a_hung_disk_end_at_their_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    payload = payload_of(30_000)
    references = store.write_many([in_buffers(payload)])
    with hung(str(tmp_path), monkeypatch):
        bounded = store.within(Deadline(SILENCE_S))
        with pytest.raises(StoreUnavailableError):
            read_back(bounded, references)
        with pytest.raises(StoreUnavailableError):
            store.within(Deadline(SILENCE_S)).delete_many(references)


def test_more_calls_than_threads_end_at_their_deadlines_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    errors: list[StoreUnavailableError] = []

    def write() -> None:
        try:
            store.within(Deadline(SILENCE_S)).write_many([in_buffers(payload_of(100))])
        except StoreUnavailableError as error:
            errors.append(error)

    with hung(str(tmp_path), monkeypatch):
        writers = [threading.Thread(target=write) for _ in range(2 * THREADS_MAX)]
        for each in writers:
            each.start()
        for each in writers:
            each.join(20)
    assert 2 * THREADS_MAX == len(errors)
    assert 1 == len(store.write_many([in_buffers(payload_of(100))]))


def test_a_slow_disk_is_no_silent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many files takes a while, and all of them longer than a silence may last."""
    store = open_store(f"file://{tmp_path}")
    original = files_module._is_file  # noqa: SLF001 - made slow

    def slow(path: str, size_bytes: int) -> bool:
        time.sleep(0.02)
        return original(path, size_bytes)

    async def confirm() -> list[Confirmation]:
        custodian = FileCustodian(str(tmp_path), unannounced_s=600.0, answer_s=SILENCE_S)
        return await custodian.confirm(references)

    references = store.write_many([in_buffers(payload_of(10)) for _ in range(50)])
    monkeypatch.setattr(files_module, "_is_file", slow)
    assert [Confirmation.THERE] * 50 == asyncio.run(confirm())


async def test_a_hung_confirmation_holds_up_no_loop_and_counts_once_the_disk_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = open_store(f"file://{tmp_path}").write_many([in_buffers(payload_of(10))])
    custodian = FileCustodian(str(tmp_path), unannounced_s=600.0, answer_s=SILENCE_S)
    with hung(str(tmp_path), monkeypatch):
        confirming = asyncio.get_running_loop().create_task(custodian.confirm(references))
        turns = 0
        while not confirming.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(StoreUnavailableError):
            await confirming
    assert turns > 3
    # What hung may have been done meanwhile, and confirming twice does no harm.
    assert [Confirmation.THERE] == await custodian.confirm(references)


async def test_in_memory_few_are_confirmed_by_the_loop_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "can_hang", lambda directory: False)
    references = open_store(f"file://{tmp_path}").write_many([in_buffers(payload_of(10))])
    custodian = FileCustodian(str(tmp_path), unannounced_s=600.0)
    threads: set[threading.Thread] = set()
    original = files_module._is_file  # noqa: SLF001 - made slow

    def seen(path: str, size_bytes: int) -> bool:
        threads.add(threading.current_thread())
        return original(path, size_bytes)

    monkeypatch.setattr(files_module, "_is_file", seen)
    assert [Confirmation.THERE] == await custodian.confirm(references)
    assert {threading.current_thread()} == threads
