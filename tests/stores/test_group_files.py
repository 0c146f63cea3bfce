"""Small payloads that one call writes in memory share files, as if each had one of its own."""

import asyncio
import ctypes
import errno
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import pytest

from breadbox.model.errors import PayloadCorruptError, PayloadMissingError, StoreFullError
from breadbox.model.types import PayloadReference
from breadbox.stores import bulk, groups
from breadbox.stores import files as files_module
from breadbox.stores.base import Confirmation, Part
from breadbox.stores.bulk import read_files
from breadbox.stores.disk import DiskRoom
from breadbox.stores.files import FileCustodian, FileStore, PayloadDirectory
from breadbox.stores.groups import (
    GROUP_BYTES_MAX,
    GROUPED_SIZE_BYTES_MAX,
    TABLE_BYTES,
)
from breadbox.stores.keys import GROUP_PLACES, group_of, new_group
from support.compiler import needs_compiler
from support.crashes import CRASHED, crash_at, in_child, on_first_call
from support.store_contract import in_buffers, payload_of, read_back

THERE, MISSING = Confirmation.THERE, Confirmation.MISSING
SIZE_BYTES = 1900
UNANNOUNCED_S = 600.0
PAGE_BYTES = 4096
EXCHANGE_ROUNDS = 60
EXCHANGE_PROCESSES = 3


class World:
    """A store in memory, as its clients and the server see it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.custodian = self.open_custodian()
        self.store = FileStore(str(folder))

    def open_custodian(self, now: Callable[[], float] = time.time) -> FileCustodian:
        return FileCustodian(str(self.root), unannounced_s=UNANNOUNCED_S, wall_clock=now)

    def reopen(self) -> None:
        """Open the custodian anew, later: its threads are not in a copy of this process."""
        self.custodian = self.open_custodian(lambda: time.time() + UNANNOUNCED_S + 1)

    def write(self, payloads: Sequence[bytes]) -> list[PayloadReference]:
        return self.store.write_many([in_buffers(each) for each in payloads])

    def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        return asyncio.run(self.custodian.confirm(references))

    def confirmed(self, payloads: Sequence[bytes]) -> list[PayloadReference]:
        references = self.write(payloads)
        assert [THERE] * len(payloads) == self.confirm(references)
        return references

    def delete(self, references: Sequence[PayloadReference]) -> None:
        asyncio.run(self.custodian.delete(references))

    def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        return asyncio.run(self.custodian.present(references))

    def sweep(self, after_s: float = UNANNOUNCED_S + 1) -> int:
        """Sweep as a server does that has just started, so long after now."""
        return asyncio.run(self.open_custodian(lambda: time.time() + after_s).sweep_unannounced())

    def listed(self) -> set[str]:
        async def listed() -> set[str]:
            return {each async for each in self.custodian.confirmed()}

        return asyncio.run(listed())

    @property
    def files(self) -> list[Path]:
        """All files of payloads."""
        return [path for path in self.root.rglob("*") if path.is_file()]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(groups, "GROUP_COUNT_MIN", 4)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield World(Path(folder))


def payloads_of(count: int, size_bytes: int = SIZE_BYTES) -> list[bytes]:
    return [payload_of(size_bytes) for _ in range(count)]


def groups_of(references: Sequence[PayloadReference]) -> list[str | None]:
    return sorted({group_of(each.payload_id) for each in references}, key=str)


def test_small_payloads_of_a_call_share_a_file_and_are_read_as_any(world: World) -> None:
    payloads = [payload_of(size) for size in (1100, 1, SIZE_BYTES, 50_000)] + payloads_of(100)
    payloads[1] = payload_of(60)
    references = world.write(payloads)
    assert [1, 1] == [len(world.files), len(groups_of(references))]
    assert 0o600 == world.files[0].stat().st_mode & 0o777
    assert sum(map(len, payloads)) + TABLE_BYTES == world.files[0].stat().st_size
    assert payloads == read_back(world.store, references)
    assert payloads == read_back(world.store, references, wants_whole=False)
    assert payloads[4:] == world.store.at_hand(references[4:])
    assert payloads[4:][::-1] == world.store.at_hand(references[4:][::-1])
    assert payloads == asyncio.run(world.custodian.read(references))
    assert payloads == [bytes(each) for each in world.store.map_many(references) or ()]
    assert set() == world.listed()
    assert [THERE] * 3 == world.confirm(references[5:8])
    assert {each.payload_id for each in references[5:8]} == world.listed()
    assert payloads == read_back(world.store, references)


@pytest.mark.parametrize(
    "sizes", [[SIZE_BYTES] * 3, [SIZE_BYTES] * 9 + [GROUPED_SIZE_BYTES_MAX + 1]]
)
def test_few_payloads_and_those_beside_a_large_one_have_files_of_their_own(
    world: World, sizes: Sequence[int]
) -> None:
    references = world.confirmed([payload_of(size) for size in sizes])
    assert [None] == groups_of(references)
    assert len(sizes) == len(world.files)


def test_a_file_ends_at_its_bound_of_bytes_and_of_places(world: World) -> None:
    large = payloads_of(48, GROUPED_SIZE_BYTES_MAX)  # Three files that are filled to the byte.
    many = payloads_of(2 * GROUP_PLACES + 1, 60)
    references = world.confirmed(large)
    assert 48 * GROUPED_SIZE_BYTES_MAX / GROUP_BYTES_MAX == len(world.files)
    assert all(path.stat().st_size <= TABLE_BYTES + GROUP_BYTES_MAX for path in world.files)
    assert large == read_back(world.store, references)
    references = world.confirmed(many)
    assert 3 == len(groups_of(references))
    assert many == read_back(world.store, references)
    assert many == world.store.at_hand(references)


def test_payloads_on_a_disk_have_files_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "can_hang", lambda directory: True)
    store = FileStore(str(world.root))
    references = store.write_many([in_buffers(each) for each in payloads_of(20)])
    assert [None] == groups_of(references)


def test_beside_a_server_that_does_not_know_group_files_none_is_written(world: World) -> None:
    """Such a server made no folder for them."""
    world.root.joinpath("groups").rmdir()
    store = FileStore(str(world.root))
    references = store.write_many([in_buffers(each) for each in payloads_of(20)])
    assert ([None], False) == (groups_of(references), world.root.joinpath("groups").exists())


def test_a_file_copied_to_a_disk_is_read_and_deleted_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = payloads_of(20)
    references = world.confirmed(payloads)
    monkeypatch.setattr(files_module, "can_hang", lambda directory: True)
    assert payloads == read_back(FileStore(str(world.root)), references)
    custodian = world.open_custodian()
    assert [THERE] * 20 == asyncio.run(custodian.confirm(references))
    asyncio.run(custodian.delete(references))
    assert [] == world.files


def test_a_straggler_keeps_the_pages_that_it_lies_on_and_no_more(world: World) -> None:
    references = world.confirmed(payloads_of(GROUP_PLACES))
    (path,) = world.files
    full_bytes = path.stat().st_blocks * 512
    straggler = references.pop(100)
    world.delete(references[:50])
    assert path.stat().st_blocks * 512 <= full_bytes - 50 * SIZE_BYTES + 2 * PAGE_BYTES
    world.delete(references[50:])
    assert path.stat().st_blocks * 512 <= 4 * PAGE_BYTES
    assert [SIZE_BYTES] == list(map(len, read_back(world.store, [straggler])))
    world.delete([straggler])
    assert [] == world.files


@pytest.mark.parametrize("seed", range(3))
def test_payloads_that_go_in_any_order_leave_the_others_whole(world: World, seed: int) -> None:
    rng = random.Random(seed)
    payloads = dict(enumerate(payload_of(rng.randint(60, 9000)) for _ in range(120)))
    references = world.confirmed([*payloads.values()])
    (path,) = world.files
    while payloads:
        going = rng.sample([*payloads], min(len(payloads), rng.choice([1, 1, 2, 30])))
        world.delete([references[each] for each in going])
        for each in going:
            del payloads[each]
        left = [references[each] for each in payloads]
        assert [*payloads.values()] == read_back(world.store, left)
        assert [each in payloads for each in range(120)] == world.present(references)
        assert {each.payload_id for each in left} == world.listed()
        if payloads:
            pages = sum(2 + len(each) // PAGE_BYTES for each in payloads.values())
            assert path.stat().st_blocks * 512 <= (pages + 1) * PAGE_BYTES
    assert [] == world.files


def test_deleted_payloads_of_a_file_that_stays_are_missing_in_every_way(world: World) -> None:
    references = world.confirmed(payloads_of(10))
    gone = references[4]
    world.delete([gone])
    for act in (
        lambda: read_back(world.store, [gone]),
        lambda: world.store.read_parts([Part(gone, 500, [memoryview(bytearray(9))])]),
        lambda: world.store.map_many([gone]),
    ):
        with pytest.raises(PayloadMissingError, match=gone.payload_id):
            act()
    assert None is world.store.at_hand(references)
    assert [b""] == asyncio.run(world.custodian.read([gone]))
    assert [MISSING] == world.confirm([gone])
    assert [gone] == asyncio.run(world.custodian.missing(references))
    assert [gone] * 300 == asyncio.run(world.custodian.missing(references * 300))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_size_than_its_reference_says_is_corrupt_and_not_confirmed(
    world: World, change: int
) -> None:
    payloads = payloads_of(5)
    references = world.write(payloads)
    wrong = PayloadReference(references[2].payload_id, SIZE_BYTES + change)
    assert [Confirmation.OTHER_SIZE, THERE] == world.confirm([wrong, references[1]])
    with pytest.raises(PayloadCorruptError):
        read_back(world.store, [wrong])
    assert None is world.store.at_hand([wrong])
    assert {references[1].payload_id} == world.listed()


def test_a_place_that_no_payload_has_is_missing(world: World) -> None:
    references = world.confirmed(payloads_of(5))
    beyond = PayloadReference(f"{references[0].payload_id[:-2]}ff", SIZE_BYTES)
    assert [MISSING] == world.confirm([beyond])
    with pytest.raises(PayloadMissingError):
        read_back(world.store, [beyond])
    assert None is world.store.at_hand([beyond])
    world.delete([beyond])
    assert [True] * 5 == world.present(references)


@pytest.mark.parametrize("way", ["whole", "parts", "server", "map"])
def test_a_reader_that_comes_too_late_finds_its_payload_missing(
    world: World, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its file is open, and has a hole in the payload's place by the time that it reads."""
    references = world.confirmed(payloads_of(10))
    old = references[5]
    on_first_call(monkeypatch, os, "preadv", lambda: world.delete(references[1:]))
    if way == "server":
        assert [b""] == asyncio.run(world.custodian.read([old]))
        return
    act: Callable[[], Any] = {
        "whole": lambda: read_back(world.store, [old]),
        "parts": lambda: world.store.read_parts([Part(old, 9, [memoryview(bytearray(100))])]),
        "map": lambda: world.store.map_many([old]),
    }[way]
    with pytest.raises(PayloadMissingError, match=old.payload_id):
        act()


@needs_compiler
@pytest.mark.parametrize("is_last", [False, True])
def test_the_compiled_reader_that_comes_too_late_reads_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """Also while it has the file open for the payload before."""
    references = world.confirmed(payloads_of(4))
    going = references if is_last else references[1:]
    deleted: list[PayloadReference] = []

    def delete_and_digest(address: int, count: int) -> int:
        del address, count
        if not deleted:
            world.delete(going)
            deleted.extend(going)
        return 7

    prototype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
    digest = prototype(delete_and_digest)
    monkeypatch.setattr(bulk, "_digest", ctypes.cast(digest, ctypes.c_void_p))
    file = PayloadDirectory(str(world.root)).file
    blocks = [(0, SIZE_BYTES)]
    files = [
        file(each.payload_id, [memoryview(bytearray(SIZE_BYTES))], blocks) for each in references
    ]
    expected = [None if each in going else [7] for each in references]
    assert expected == read_files(files)


def test_a_view_stays_as_it_is_when_its_payload_and_the_file_are_gone(world: World) -> None:
    payloads = payloads_of(10)
    references = world.confirmed(payloads)
    views = world.store.map_many(references) or []
    world.delete(references[1:])
    world.delete(references)
    assert payloads == [bytes(each) for each in views]
    views[0][:3] = b"any"


def test_a_group_that_is_admitted_in_part_goes_when_the_client_and_the_server_are_done(
    world: World,
) -> None:
    references = world.write(payloads_of(10))
    world.confirm(references[:4])
    world.store.delete_many(references[6:])  # Refused.
    world.delete(references[:2])
    assert [False] * 2 + [True] * 4 + [False] * 4 == world.present(references)
    assert [THERE] * 2 == world.confirm(references[4:6])
    world.delete(references[2:6])
    assert [] == world.files


def test_what_is_not_announced_expires_once_nothing_else_of_its_file_is_confirmed(
    world: World,
) -> None:
    payloads = payloads_of(10)
    references = world.confirmed(payloads[:5])[:0] + world.write(payloads)
    world.delete([PayloadReference(each, SIZE_BYTES) for each in world.listed()])
    world.confirm(references[:4])
    assert 0 == world.sweep()
    assert [True] * 10 == world.present(references)
    world.delete(references[:4])
    assert 0 == world.sweep(after_s=UNANNOUNCED_S - 1)
    assert [False] * 4 + [True] * 6 == world.present(references)
    assert 6 == world.sweep()
    assert [] == world.files


def test_what_is_no_file_among_the_groups_holds_up_neither_sweep_nor_list(world: World) -> None:
    folder = world.root / "groups"
    (folder / new_group()).mkdir()
    (folder / new_group()).symlink_to(folder / "nothing")
    os.mkfifo(folder / new_group())
    confirmed = world.confirmed(payloads_of(5))
    world.write(payloads_of(6))
    assert {each.payload_id for each in confirmed} == world.listed()
    assert 6 == world.sweep()


def test_a_server_looks_at_a_file_once_after_each_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = world.confirmed(payloads_of(4))
    late = world.write(payloads_of(4))
    now = [time.time() + UNANNOUNCED_S + 1]
    custodian = world.open_custodian(lambda: now[0])
    opened: list[str] = []
    original = os.open

    def count(path: Any, *arguments: Any, **options: Any) -> int:
        opened.extend([str(path)] if "groups/" in str(path) else [])
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", count)
    assert 4 == asyncio.run(custodian.sweep_unannounced())
    assert 2 == len(opened)
    now[0] += 60.0
    assert 0 == asyncio.run(custodian.sweep_unannounced())
    assert 2 == len(opened)
    now[0] -= 3600.0  # The clock was set.
    assert 0 == asyncio.run(custodian.sweep_unannounced())
    monkeypatch.setattr(os, "open", original)
    assert [True] * 4 + [False] * 4 == world.present([*references, *late])


def test_a_confirmation_that_the_sweep_sees_keeps_the_file_and_one_that_comes_later_misses_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = payloads_of(5)
    references = world.write(payloads)
    answers: list[list[Confirmation]] = []

    def confirm() -> None:
        answers.append(FileCustodian._confirm(world.custodian, references[:1]))  # noqa: SLF001

    on_first_call(monkeypatch, os, "rename", confirm)
    assert 0 == world.sweep()
    assert [[THERE]] == answers
    assert payloads == read_back(world.store, references)
    world.delete(references[:1])
    on_first_call(monkeypatch, os, "unlink", confirm)
    assert 4 == world.sweep()
    assert [MISSING] == answers[-1]
    # It finds the file, and marks it when it has been swept.
    references = world.write(payloads)
    directory = PayloadDirectory(str(world.root))
    on_first_call(monkeypatch, os, "pwrite", lambda: directory.groups.sweep(math.inf))
    assert ([MISSING] * 5, []) == (world.confirm(references), world.files)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_full_disk_leaves_nothing_of_a_group_behind(
    world: World, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """A call may write several files; this holds for each."""
    bystanders = world.confirmed(payloads_of(5))
    before = world.files
    original, calls = os.writev, [0]

    def full(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] > fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreFullError) as caught:
        world.write(payloads_of(40, GROUPED_SIZE_BYTES_MAX))
    assert GROUPED_SIZE_BYTES_MAX == caught.value.payload_bytes
    monkeypatch.undo()
    assert before == world.files
    assert [True] * 5 == world.present(bystanders)


def test_a_group_asks_for_the_room_of_one_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def has_room_for(room: DiskRoom, size_bytes: int, file_count: int) -> bool:
        asked.append((size_bytes, file_count))
        return True

    monkeypatch.setattr(DiskRoom, "has_room_for", has_room_for)
    world.write(payloads_of(200))
    assert {(200 * SIZE_BYTES + TABLE_BYTES, 1)} == {*asked}


def write(world: World, references: Sequence[PayloadReference], payloads: list[bytes]) -> None:
    del references
    world.write(payloads)


def confirm(world: World, references: Sequence[PayloadReference], payloads: list[bytes]) -> None:
    del payloads
    world.confirm(references)


def delete_some(
    world: World, references: Sequence[PayloadReference], payloads: list[bytes]
) -> None:
    del payloads
    world.delete(references[::2])


def delete_all(world: World, references: Sequence[PayloadReference], payloads: list[bytes]) -> None:
    del payloads
    world.delete(references)


def discard(world: World, references: Sequence[PayloadReference], payloads: list[bytes]) -> None:
    del payloads
    world.store.delete_many(references[4:])


def sweep(world: World, references: Sequence[PayloadReference], payloads: list[bytes]) -> None:
    del references, payloads
    asyncio.run(world.custodian.sweep_unannounced())


ACTS = {
    "write": write,
    "confirm": confirm,
    "delete some": delete_some,
    "delete all": delete_all,
    "discard": discard,
    "sweep": sweep,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("act", ACTS)
def test_a_crash_at_any_step_leaves_payloads_whole_and_files_that_are_swept(
    world: World, act: str
) -> None:
    others = payloads_of(6)
    bystanders = world.confirmed(others)
    for step in range(400):
        payloads = payloads_of(10)
        references = world.write(payloads)
        if act in ("delete some", "delete all"):
            world.confirm(references)
        elif act == "discard":
            world.confirm(references[:4])
        code = crash_at(step, partial(ACTS[act], world, references, payloads_of(10)), world.reopen)
        # What is there is whole, and nothing is taken away that was not to go.
        there = [*compress(references, world.present(references))]
        expected = dict(zip(references, payloads, strict=True))
        assert [expected[each] for each in there] == read_back(world.store, there), step
        stays = {"delete some": references[1::2], "discard": references[:4]}
        stays |= {"write": references, "confirm": references}
        assert set(stays.get(act, ())) <= set(there), step
        # The next server's list has what it may have to delete; the sweep takes the rest.
        listed = world.listed() - {each.payload_id for each in bystanders}
        asyncio.run(world.custodian.delete_ids(listed))
        world.sweep(after_s=2 * UNANNOUNCED_S)
        world.sweep(after_s=2 * UNANNOUNCED_S)
        assert 1 == len(world.files), (step, world.files)
        assert others == read_back(world.store, bystanders)
        if code != CRASHED:
            break
    assert 0 == code
    assert step >= 4


def body_of(reference: PayloadReference) -> bytes:
    """A payload that says which it is, everywhere."""
    return (reference.payload_id.encode() * 200)[: reference.size_bytes]


def exchange(folder: Path, seed: int) -> None:
    """Write, confirm and delete payloads, and read those of others meanwhile."""
    rng = random.Random(seed)
    world = World(folder)
    mine: list[PayloadReference] = []
    held: list[tuple[bytes, memoryview]] = []
    for _ in range(EXCHANGE_ROUNDS):
        sizes = [rng.randint(60, 6000) for _ in range(rng.randint(4, 40))]
        references = world.store._new_references(sizes)  # noqa: SLF001
        parts = [Part(each, 0, [memoryview(body_of(each))]) for each in references]
        world.store.write_parts(parts)
        cut = rng.randint(1, len(references))
        assert [THERE] * cut == asyncio.run(world.custodian.confirm(references[:cut]))
        world.store.delete_many(references[cut:])
        mine += references[:cut]
        half = folder / f"{seed}.half"
        half.write_text("\n".join(f"{each.payload_id} {each.size_bytes}" for each in mine))
        half.rename(folder / f"{seed}.list")
        for path in folder.glob("*.list"):
            known = [PayloadReference(a, int(b)) for a, b in map(str.split, path.open())]
            look(world, rng.sample(known, min(8, len(known))), rng, held)
        rng.shuffle(mine)
        while len(mine) > 60:
            count = rng.randint(1, 30)
            world.delete(mine[:count])
            del mine[:count]
        while len(held) > 9:
            expected, view = held.pop(rng.randrange(len(held)))
            assert expected == bytes(view), "a view changed"
    assert [True] * len(mine) == world.present(mine)
    world.delete(mine)


def look(
    world: World,
    references: Sequence[PayloadReference],
    rng: random.Random,
    held: list[tuple[bytes, memoryview]],
) -> None:
    way = rng.choice(["parts", "compiled", "map"])
    memories = [memoryview(bytearray(each.size_bytes)) for each in references]
    file = PayloadDirectory(str(world.root)).file
    files = [
        file(each.payload_id, [memory], ())
        for each, memory in zip(references, memories, strict=True)
    ]
    read = read_files(files) if way == "compiled" else []
    for position, (reference, memory) in enumerate(zip(references, memories, strict=True)):
        with suppress(PayloadMissingError):
            if way == "compiled" and read[position] is None:
                continue
            if way == "parts":
                world.store.read_parts([Part(reference, 0, [memory])])
            elif way == "map":
                held += [(body_of(reference), view) for view in world.store.map_many([reference])]
                continue
            assert body_of(reference) == bytes(memory), f"{way}: another payload's bytes"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [0, 100])
def test_processes_that_write_read_and_delete_at_the_same_time_see_their_payloads_alone(
    world: World, seed: int
) -> None:
    children = []
    for number in range(EXCHANGE_PROCESSES):
        child = os.fork()
        if not child:
            os._exit(in_child(partial(exchange, world.root, seed + number)))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert [0] * EXCHANGE_PROCESSES == codes
    assert [] == [path for path in world.files if path.suffix != ".list"]
