"""Payloads in a directory: never half-written, never readable by others, swept by age."""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from breadbox.model.errors import PayloadMissingError, StoreFullError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation
from breadbox.stores.files import FileCustodian
from breadbox.stores.keys import new_payload_id
from support.store_contract import in_buffers, payload_of, read_back


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_a_full_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    original = os.writev
    calls = 0

    def writev(descriptor: int, buffers: Sequence[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(descriptor, buffers)

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(StoreFullError):
        store.write_many([in_buffers(payload_of(5000)) for _ in range(4)])
    assert [] == files_in(tmp_path)


def test_a_write_that_the_kernel_takes_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.writev
    monkeypatch.setattr(
        os,
        "writev",
        lambda descriptor, buffers: original(descriptor, [next(b for b in buffers if b)[:7]]),
    )
    store = open_store(f"file://{tmp_path}")
    payload = payload_of(3000)
    assert [payload] == read_back(store, store.write_many([in_buffers(payload)]))


def test_a_payload_being_written_is_seen_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    seen: list[list[str]] = []
    original = os.rename

    def rename(old: str, new: str) -> None:
        seen.append(files_in(tmp_path))
        original(old, new)

    monkeypatch.setattr(os, "rename", rename)
    (reference,) = store.write_many([in_buffers(payload_of(1000))])
    assert [[f".{reference.payload_id}"]] == seen
    assert [reference.payload_id] == files_in(tmp_path)


def test_files_and_directories_are_the_owners_only(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_store(f"file://{root}")
    store.write_many([in_buffers(payload_of(1000))])
    for path in [root, *root.rglob("*")]:
        assert 0 == stat.S_IMODE(path.stat().st_mode) & 0o077, path


async def test_old_unannounced_payloads_are_swept_and_young_or_confirmed_ones_kept(
    tmp_path: Path,
) -> None:
    now = 1_000_000.0
    store = open_store(f"file://{tmp_path}")
    custodian = FileCustodian(str(tmp_path), unannounced_s=600.0, wall_clock=lambda: now)
    old, young, confirmed = store.write_many([in_buffers(payload_of(1000)) for _ in range(3)])
    await custodian.confirm([confirmed])
    half_written = tmp_path / "unannounced" / ".crashed"
    half_written.write_bytes(b"x")
    for name in (old.payload_id, half_written.name):
        os.utime(tmp_path / "unannounced" / name, (now - 601, now - 601))
    os.utime(tmp_path / "unannounced" / young.payload_id, (now - 599, now - 599))
    assert 2 == await custodian.sweep_unannounced()
    assert [False, True, True] == await custodian.present([old, young, confirmed])
    assert not half_written.exists()


def test_a_payload_confirmed_while_it_is_opened_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader looks in payloads/ first; the confirm comes before it looks in unannounced/."""
    store = open_store(f"file://{tmp_path}")
    payload = payload_of(1000)
    (reference,) = store.write_many([in_buffers(payload)])
    unannounced = tmp_path / "unannounced" / reference.payload_id
    confirmed = tmp_path / "payloads" / reference.payload_id[:2] / reference.payload_id
    original = os.open

    def confirm_then_open(path: str, *arguments: int) -> int:
        if path == str(unannounced):
            unannounced.rename(confirmed)
        return original(path, *arguments)

    monkeypatch.setattr(os, "open", confirm_then_open)
    assert [payload] == read_back(store, [reference])


async def test_a_payload_confirmed_while_it_is_deleted_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"file://{tmp_path}")
    (reference,) = store.write_many([in_buffers(payload_of(1000))])
    unannounced = tmp_path / "unannounced" / reference.payload_id
    confirmed = tmp_path / "payloads" / reference.payload_id[:2] / reference.payload_id
    original = os.unlink
    looks = 0

    def confirm_between_two_looks(path: str) -> None:
        nonlocal looks
        looks += 1
        if looks == 2 and unannounced.exists():
            unannounced.rename(confirmed)
        original(path)

    monkeypatch.setattr(os, "unlink", confirm_between_two_looks)
    store.delete_many([reference])
    assert (3, []) == (looks, files_in(tmp_path))


async def test_a_payload_of_another_size_than_was_announced_is_not_confirmed(
    tmp_path: Path,
) -> None:
    store = open_store(f"file://{tmp_path}")
    custodian = open_custodian(f"file://{tmp_path}")
    (reference,) = store.write_many([in_buffers(payload_of(1000))])
    for size_bytes in (999, 1001):
        assert [Confirmation.OTHER_SIZE] == await custodian.confirm(
            [replace(reference, size_bytes=size_bytes)]
        )
    assert [Confirmation.THERE] == await custodian.confirm([reference])
    assert [Confirmation.OTHER_SIZE] == await custodian.confirm(
        [replace(reference, size_bytes=999)]
    )


def test_what_is_written_into_a_mapping_stays_there(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    payload = payload_of(10_000)
    references = store.write_many([in_buffers(payload)])
    mapped, other = store.map_many(references), store.map_many(references)
    assert mapped is not None
    assert other is not None
    mapped[0][:5] = b"mine!"
    assert b"mine!" + payload[5:] == bytes(mapped[0])
    assert payload == bytes(other[0])


def test_mappings_outlive_their_file(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    payload = payload_of(10_000)
    references = store.write_many([in_buffers(payload)])
    mapped = store.map_many(references)
    store.delete_many(references)
    assert mapped is not None
    assert payload == bytes(mapped[0])
    with pytest.raises(PayloadMissingError):
        store.map_many(references)


async def test_a_directory_that_cannot_be_used_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for open_one in (open_store, open_custodian):
        with pytest.raises(StoreUnavailableError, match="file"):
            open_one(f"file://{tmp_path}/file/store")


async def test_a_directory_that_vanishes_is_unavailable(tmp_path: Path) -> None:
    root = tmp_path / "store"
    custodian = open_custodian(f"file://{root}")
    await custodian.ping()
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError):
        await custodian.ping()


@pytest.mark.parametrize("other_count", [0, 10_000])
async def test_looking_for_payloads_lists_no_more_the_more_others_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_count: int
) -> None:
    """As for each buffer of many, when a server starts or a lease is returned."""
    custodian = FileCustodian(str(tmp_path), unannounced_s=60.0)
    asked = [PayloadReference(new_payload_id(), 1) for _ in range(400)]
    others = [PayloadReference(new_payload_id(), 1) for _ in range(other_count)]
    for each in asked[100:] + others:
        (tmp_path / "payloads" / each.payload_id[:2] / each.payload_id).write_bytes(b"1")
    original, listed = os.listdir, list[str]()

    def listdir(path: Path) -> list[str]:
        names = original(path)
        listed.extend(names)
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    assert asked[:100] == await custodian.missing(asked)
    assert len(listed) <= 2 * len(asked)
