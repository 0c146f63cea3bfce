"""Files of deleted payloads are written again, and never under a reader of the payload before."""

import asyncio
import ctypes
import errno
import fcntl
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from breadbox.model.errors import PayloadMissingError, StoreFullError
from breadbox.model.types import PayloadReference
from breadbox.stores import bulk, spare
from breadbox.stores import files as files_module
from breadbox.stores.base import Confirmation, Part
from breadbox.stores.bulk import File, read_files
from breadbox.stores.disk import DiskRoom
from breadbox.stores.files import FileCustodian, FileStore
from breadbox.stores.spare import SPARE_S, SPARE_SIZE_BYTES_MIN
from support.compiler import needs_compiler
from support.crashes import CRASHED, crash_at, in_child, on_first_call
from support.store_contract import in_buffers, payload_of, read_back

SIZE_BYTES = SPARE_SIZE_BYTES_MIN + 4097
SMALL_BYTES = SPARE_SIZE_BYTES_MIN - 1
EXCHANGE_ROUNDS = 60
EXCHANGE_PROCESSES = 3


class World:
    """A store in memory, as its clients and the server see it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.store = FileStore(str(folder))
        self.custodian = self.open_custodian()

    def open_custodian(self, now: Callable[[], float] = time.time) -> FileCustodian:
        return FileCustodian(str(self.root), unannounced_s=600.0, wall_clock=now)

    def reopen(self) -> None:
        """Open the custodian anew: its threads are not in a copy of this process."""
        self.custodian = self.open_custodian()

    def confirmed(self, *payloads: bytes) -> list[PayloadReference]:
        references = self.store.write_many([in_buffers(each) for each in payloads])
        found = asyncio.run(self.custodian.confirm(references))
        assert [Confirmation.THERE] * len(payloads) == found
        return references

    def delete(self, references: Sequence[PayloadReference]) -> None:
        asyncio.run(self.custodian.delete(references))

    def path(self, reference: PayloadReference) -> Path:
        payload_id = reference.payload_id
        return self.root / "payloads" / payload_id[:2] / payload_id

    def inode(self, reference: PayloadReference) -> int:
        return self.path(reference).stat().st_ino

    @property
    def spare(self) -> list[str]:
        return sorted(os.listdir(self.root / "spare"))

    def replace(self, reference: PayloadReference) -> PayloadReference:
        """Delete a payload, and write another of the same size, into its file if that may be."""
        self.delete([reference])
        return self.confirmed(payload_of(reference.size_bytes))[0]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # Every write looks for spare files, however soon after the last.
    monkeypatch.setattr(spare, "_LOOK_S", 0.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield World(Path(folder))


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, SIZE_BYTES + 5000, SIZE_BYTES - 3000])
def test_the_file_of_a_deleted_payload_has_the_next_one_of_about_its_size(
    world: World, size_bytes: int
) -> None:
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    inode = world.inode(old)
    world.delete([old])
    assert [f"{SIZE_BYTES}.{old.payload_id}"] == world.spare
    payload = payload_of(size_bytes)
    (new,) = world.confirmed(payload)
    assert (inode, []) == (world.inode(new), world.spare)
    assert [payload] == read_back(world.store, [new])
    assert size_bytes == world.path(new).stat().st_size
    assert 0o600 == world.path(new).stat().st_mode & 0o777
    with pytest.raises(PayloadMissingError):
        read_back(world.store, [old])


def test_parts_of_a_payload_go_into_one_spare_file(world: World) -> None:
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    inode = world.inode(old)
    world.delete([old])
    payload = payload_of(SIZE_BYTES)
    reference = world.store.new_reference(SIZE_BYTES)
    cut = SIZE_BYTES // 2
    for start, end in ((0, cut), (cut, SIZE_BYTES)):
        world.store.write_parts([Part(reference, start, [memoryview(payload)[start:end]])])
    assert [payload] == read_back(world.store, [reference])
    assert inode == (world.root / "unannounced" / reference.payload_id).stat().st_ino


@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, 3 * SIZE_BYTES])
def test_a_payload_of_quite_another_size_gets_a_file_of_its_own(
    world: World, size_bytes: int
) -> None:
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    world.delete([old])
    world.confirmed(payload_of(size_bytes))
    assert 1 == len(world.spare)


def test_files_of_small_payloads_and_of_unconfirmed_ones_are_deleted(world: World) -> None:
    world.delete(world.confirmed(payload_of(SMALL_BYTES)))
    world.delete(world.store.write_many([in_buffers(payload_of(SIZE_BYTES))]))
    world.store.delete_many(world.confirmed(payload_of(SIZE_BYTES)))
    asyncio.run(
        world.custodian.delete_ids(
            [each.payload_id for each in world.confirmed(payload_of(SIZE_BYTES))]
        )
    )
    assert [] == [path for path in world.root.rglob("*") if path.is_file()]


def test_files_on_a_disk_are_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "can_hang", lambda directory: True)
    references = world.confirmed(payload_of(SIZE_BYTES))
    asyncio.run(world.open_custodian().delete(references))
    assert [] == world.spare


def test_a_reference_that_leads_elsewhere_makes_no_file_spare(world: World) -> None:
    outside = world.root.parent / f"{world.root.name}.outside"
    outside.write_bytes(payload_of(SIZE_BYTES))
    try:
        world.delete([PayloadReference(f"../../../{outside.name}", SIZE_BYTES)])
        assert (True, []) == (outside.exists(), world.spare)
    finally:
        outside.unlink()


def test_a_mapped_payload_never_changes_and_its_file_is_free_once_no_view_is_left(
    world: World,
) -> None:
    payload = payload_of(SIZE_BYTES)
    (old,) = world.confirmed(payload)
    inode = world.inode(old)
    (view,) = world.store.map_many([old]) or []
    part = view[1000:2000]
    del view
    new = world.replace(old)
    assert inode != world.inode(new)
    assert payload[1000:2000] == bytes(part)
    assert 1 == len(world.spare)
    del part
    assert inode == world.inode(world.confirmed(payload_of(SIZE_BYTES))[0])


def test_a_file_that_became_spare_after_the_last_look_is_found_behind_locked_ones(
    world: World,
) -> None:
    references = world.confirmed(*[payload_of(SIZE_BYTES) for _ in range(4)])
    mapped = world.store.map_many(references[:3])
    world.delete(references[:3])
    # Sees the mapped ones; of these it tries one after another, and all are locked.
    world.store._directory.spare._found = {SIZE_BYTES.bit_length(): world.spare}  # noqa: SLF001
    inode = world.inode(references[3])
    assert inode == world.inode(world.replace(references[3]))
    assert 3 == len(mapped or ())


def test_a_mapping_that_a_child_inherited_keeps_its_file(world: World) -> None:
    payload = payload_of(SIZE_BYTES)
    (old,) = world.confirmed(payload)
    mapped = world.store.map_many([old])
    told, tell = os.pipe()
    answer, answered = os.pipe()
    child = os.fork()
    if not child:
        assert mapped is not None
        os.read(told, 1)
        os.write(answered, b"y" if payload == bytes(mapped[0]) else b"n")
        os._exit(0)
    del mapped
    new = world.replace(old)
    os.write(tell, b"x")
    assert b"y" == os.read(answer, 1)
    os.waitpid(child, 0)
    assert world.path(new).exists()
    for each in (told, tell, answer, answered):
        os.close(each)


def test_a_file_with_another_name_is_not_written_again(world: World) -> None:
    """Such as that of a backup by hard links."""
    payload = payload_of(SIZE_BYTES)
    (old,) = world.confirmed(payload)
    backup = world.root / "backup"
    os.link(world.path(old), backup)
    world.replace(old)
    assert payload == backup.read_bytes()


def test_a_reader_that_comes_too_late_finds_its_payload_missing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is open, and has a whole other payload by the time that it reads."""
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    inode, written = world.inode(old), []
    on_first_call(monkeypatch, os, "preadv", lambda: written.append(world.replace(old)))
    with pytest.raises(PayloadMissingError, match=old.payload_id):
        read_back(world.store, [old])
    assert [inode] == [world.inode(each) for each in written]


def test_a_reader_whose_head_is_overwritten_finds_its_payload_missing_not_damaged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = world.confirmed(payload_of(SIZE_BYTES))

    class Confused:
        wants_whole = True

        def foresee(self, position: int) -> None:
            """Foresee nothing."""

        def head_bytes(self, position: int, prelude: memoryview) -> int:
            raise ValueError("the bytes are no payload of mine")

    on_first_call(monkeypatch, os, "preadv", lambda: world.replace(old))
    with pytest.raises(PayloadMissingError, match=old.payload_id):
        world.store.read_many([old], Confused())  # type: ignore[arg-type]
    (new,) = world.confirmed(payload_of(SIZE_BYTES))
    with pytest.raises(ValueError, match="no payload of mine"):
        world.store.read_many([new], Confused())  # type: ignore[arg-type]


def test_a_gateway_passes_on_nothing_of_a_payload_that_is_written_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may have a payload of another tenant by then."""
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    on_first_call(monkeypatch, os, "preadv", lambda: world.replace(old))
    with pytest.raises(PayloadMissingError, match=old.payload_id):
        world.store.read_parts([Part(old, 5000, [memoryview(bytearray(1000))])])


def test_the_server_reads_nothing_of_a_payload_that_is_written_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    on_first_call(monkeypatch, os, "preadv", lambda: world.replace(old))
    assert [b""] == asyncio.run(world.custodian.read([old]))


@needs_compiler
@pytest.mark.parametrize("size_bytes", [SPARE_SIZE_BYTES_MIN, SIZE_BYTES])
def test_the_compiled_reader_that_comes_too_late_reads_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    (old,) = world.confirmed(payload_of(size_bytes))
    replaced: list[PayloadReference] = []

    def replace_and_digest(address: int, count: int) -> int:
        del address, count
        if not replaced:
            replaced.append(world.replace(old))
        return 7

    prototype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
    digest = prototype(replace_and_digest)
    monkeypatch.setattr(bulk, "_digest", ctypes.cast(digest, ctypes.c_void_p))

    def read(reference: PayloadReference) -> list[Any]:
        paths = (str(world.path(reference)), "/nonexistent", "/nonexistent")
        memory = memoryview(bytearray(size_bytes))
        return [*read_files([File(paths, [memory], [(0, size_bytes)])])]

    assert [None] == read(old)
    assert [[7]] == read(replaced[0])


def test_a_mapper_that_comes_too_late_finds_its_payload_missing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    on_first_call(monkeypatch, files_module, "hold", lambda: world.replace(old))
    with pytest.raises(PayloadMissingError, match=old.payload_id):
        world.store.map_many([old])


def test_a_file_that_is_being_written_is_not_mapped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader opened it as the payload before; a copy, which is made instead, is missing."""
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    taken: list[int | None] = []

    def take() -> None:
        world.delete([old])
        path = str(world.root / "unannounced" / ".another")
        taken.append(spare.SpareFiles(world.root / "spare").take(SIZE_BYTES, path))

    on_first_call(monkeypatch, files_module, "hold", take)
    with suppress(PayloadMissingError):
        assert None is world.store.map_many([old])
    (descriptor,) = taken
    assert descriptor is not None
    os.close(descriptor)


def test_of_two_clients_that_open_one_spare_file_one_takes_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other comes when the file has been written, confirmed and let go."""
    (old,) = world.confirmed(payload_of(SIZE_BYTES))
    inode = world.inode(old)
    world.delete([old])
    payloads, first = [payload_of(SIZE_BYTES + 9), payload_of(SIZE_BYTES)], []
    on_first_call(monkeypatch, fcntl, "flock", lambda: first.extend(world.confirmed(payloads[0])))
    references = [*world.confirmed(payloads[1]), *first]
    assert [payloads[1], payloads[0]] == read_back(world.store, references)
    assert [False, True] == [inode == world.inode(each) for each in references]


def test_where_files_cannot_be_locked_copies_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    references = world.confirmed(payload_of(SIZE_BYTES))
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert None is world.store.map_many(references)


def test_spare_files_are_within_a_bound_of_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "SPARE_BYTES_MAX", 3 * SIZE_BYTES)
    references = world.confirmed(*[payload_of(SIZE_BYTES) for _ in range(5)])
    world.delete(references[:2])
    world.delete(references[2:])
    assert 3 == len(world.spare)
    assert [] == [path for path in (world.root / "payloads").rglob("*") if path.is_file()]


def test_the_latest_deletions_keep_their_files_at_the_cost_of_files_of_other_sizes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_bytes = 4 * SIZE_BYTES
    monkeypatch.setattr(spare, "SPARE_BYTES_MAX", 5 * SIZE_BYTES)
    small = world.confirmed(*[payload_of(SIZE_BYTES) for _ in range(5)])
    large = world.confirmed(payload_of(large_bytes), payload_of(large_bytes))
    world.delete(small)
    assert 5 == len(world.spare)
    inode = world.inode(large[0])
    world.delete(large[:1])
    sizes = sorted(int(name.partition(".")[0]) for name in world.spare)
    assert [SIZE_BYTES, large_bytes] == sizes
    world.delete(large[1:])  # Of its own size there is one already.
    assert f"{large_bytes}.{large[0].payload_id}" in world.spare
    (new,) = world.confirmed(payload_of(large_bytes))
    assert inode == world.inode(new)


def test_a_full_folder_is_listed_once_for_all_that_leave_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each: a batch has 256, and the folder some hundred."""
    monkeypatch.setattr(spare, "SPARE_BYTES_MAX", 2 * SIZE_BYTES)
    references = world.confirmed(*[payload_of(SIZE_BYTES) for _ in range(8)])
    world.delete(references[:2])
    looks, listdir = list[str](), os.listdir

    def counted(path: Any = ".") -> list[str]:
        looks.append(str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    world.delete(references[2:])
    assert [str(world.root / "spare")] == [each for each in looks if each.endswith("spare")]
    assert 2 == len(world.spare)


def test_spare_files_count_as_free_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one among them does not keep a large payload out."""
    references = world.confirmed(*[payload_of(SIZE_BYTES) for _ in range(3)])
    usage = world.custodian.usage
    before = asyncio.run(usage())
    world.delete(references)
    after = asyncio.run(usage())
    assert after.used_bytes <= before.used_bytes - 3 * SIZE_BYTES + 10 * 2**20
    assert (after.used_file_count - before.used_file_count) <= 0
    original = DiskRoom.of

    def full_while_spare(directory: Any) -> DiskRoom:
        room = original(directory)
        return replace(room, free_bytes=0) if world.spare else room

    monkeypatch.setattr(DiskRoom, "of", full_while_spare)
    last = world.confirmed(payload_of(SIZE_BYTES))
    assert [] == world.spare
    world.delete(last)
    assert 1 == len(world.spare)
    asyncio.run(usage())
    assert [] == world.spare
    monkeypatch.setattr(
        DiskRoom, "of", lambda directory: replace(original(directory), free_bytes=0)
    )
    with pytest.raises(StoreFullError):
        world.store.write_many([in_buffers(payload_of(SIZE_BYTES))])


async def test_old_spare_files_are_swept_and_young_ones_kept(world: World) -> None:
    references = world.store.write_many([in_buffers(payload_of(SIZE_BYTES)) for _ in range(2)])
    await world.custodian.confirm(references)
    await world.custodian.delete(references)
    assert 0 == await world.custodian.sweep_unannounced()
    assert 2 == len(world.spare)
    later = world.open_custodian(lambda: time.time() + SPARE_S + 1)
    assert 0 == await later.sweep_unannounced()
    assert [] == world.spare


async def test_a_server_that_ends_leaves_no_spare_file(world: World) -> None:
    references = world.store.write_many([in_buffers(payload_of(SIZE_BYTES)) for _ in range(2)])
    await world.custodian.confirm(references)
    await world.custodian.delete(references[:1])
    await world.custodian.close()
    await world.custodian.close()
    assert ([], [True]) == (world.spare, await world.custodian.present(references[1:]))


async def test_spare_files_are_no_payloads_to_fsck_and_reconciliation(world: World) -> None:
    references = world.store.write_many([in_buffers(payload_of(SIZE_BYTES))])
    await world.custodian.confirm(references)
    await world.custodian.delete(references)
    assert 1 == len(world.spare)
    assert [] == [each async for each in world.custodian.confirmed()]
    assert references == await world.custodian.missing(references)
    assert [False] == await world.custodian.present(references)
    assert [Confirmation.MISSING] == await world.custodian.confirm(references)


def test_a_folder_of_spare_files_that_vanishes_costs_no_payload(world: World) -> None:
    references = world.confirmed(payload_of(SIZE_BYTES), payload_of(SIZE_BYTES))
    (world.root / "spare").rmdir()
    world.delete(references[:1])
    payload = payload_of(SIZE_BYTES)
    assert [payload] == read_back(world.store, world.confirmed(payload))
    assert 0 <= asyncio.run(world.custodian.usage()).used_bytes


def write(world: World, old: PayloadReference, payload: bytes) -> None:
    del old
    world.store.write_many([in_buffers(payload)])


def delete(world: World, old: PayloadReference, payload: bytes) -> None:
    del payload
    asyncio.run(world.custodian.delete([old]))


ACTS = {"write": write, "delete": delete}


@pytest.mark.parametrize("act", ACTS)
def test_a_crash_at_any_step_leaves_payloads_whole_and_files_that_are_swept(
    world: World, act: str
) -> None:
    payload, next_payload = payload_of(SIZE_BYTES), payload_of(SIZE_BYTES + 999)
    (bystander,) = world.confirmed(payload)
    for step in range(100):
        (old,) = world.confirmed(payload_of(SIZE_BYTES))
        if act == "write":
            world.delete([old])
        code = crash_at(step, partial(ACTS[act], world, old, next_payload), world.reopen)
        written = [
            PayloadReference(name, len(next_payload))
            for name in os.listdir(world.root / "unannounced")
            if not name.startswith(".")
        ]
        assert [next_payload] * len(written) == read_back(world.store, written), step
        assert [payload] == read_back(world.store, [bystander])
        world.delete([old])
        assert [next_payload] == read_back(world.store, world.confirmed(next_payload))
        later = world.open_custodian(lambda: time.time() + 601)
        asyncio.run(later.sweep_unannounced())
        assert ([], []) == (world.spare, os.listdir(world.root / "unannounced"))
        if code != CRASHED:
            break
    assert 0 == code
    assert step >= {"write": 8, "delete": 1}[act]


def body_of(payload_id: str) -> bytes:
    """A payload that says which it is, everywhere."""
    return payload_id.encode() * (SPARE_SIZE_BYTES_MIN // len(payload_id))


def exchange(folder: Path, seed: int) -> None:
    """Write, confirm and delete payloads, and read and map those of others meanwhile."""
    rng = random.Random(seed)
    world = World(folder)
    mine: list[PayloadReference] = []
    held: list[tuple[bytes, memoryview]] = []
    for _ in range(EXCHANGE_ROUNDS):
        reference = world.store.new_reference(SPARE_SIZE_BYTES_MIN)
        body = memoryview(body_of(reference.payload_id))
        world.store.write_parts([Part(reference, 0, [body])])
        asyncio.run(world.custodian.confirm([reference]))
        mine.append(reference)
        names = [path.name for path in (folder / "payloads").glob("*/*")]
        for name in rng.sample(names, min(3, len(names))):
            look(world, PayloadReference(name, SPARE_SIZE_BYTES_MIN), rng, held)
        while len(mine) > 4:
            world.delete([mine.pop(rng.randrange(len(mine)))])
        while len(held) > 3:
            expected, view = held.pop(rng.randrange(len(held)))
            assert expected == bytes(view), "a mapping changed"


def look(
    world: World,
    reference: PayloadReference,
    rng: random.Random,
    held: list[tuple[bytes, memoryview]],
) -> None:
    memory = memoryview(bytearray(reference.size_bytes))
    body = body_of(reference.payload_id)
    way = rng.choice(["parts", "compiled", "map"])
    try:
        if way == "parts":
            world.store.read_parts([Part(reference, 0, [memory])])
        elif way == "map":
            held += [(body, view) for view in world.store.map_many([reference]) or ()]
            return
        elif read_files([File((str(world.path(reference)),) * 3, [memory], ())]) == [None]:
            return
    except PayloadMissingError:
        return
    assert body == bytes(memory), f"{way}: another payload's bytes"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 100])
def test_processes_that_write_read_map_and_delete_at_the_same_time_see_their_payloads_alone(
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
