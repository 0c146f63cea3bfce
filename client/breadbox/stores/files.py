"""Payloads as files in a directory, on shared memory or disk: the fast path on one host.

    DIR/unannounced/<id>       written, not yet confirmed; swept by age
    DIR/unannounced/.<id>      being written
    DIR/payloads/<2 hex>/<id>  confirmed
    DIR/groups/                small payloads that share files (`breadbox.stores.groups`)
    DIR/journals/<journal>     latest epoch of a journal whose payloads are kept here
    DIR/spare/                 files to write again (`breadbox.stores.spare`)

Both steps are renames within one file system, so a payload is seen whole or not at all.
`breadbox.stores.disk` says which users may read the files, and how much of a disk stays free.
"""

import errno
import math
import mmap
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from itertools import accumulate, compress
from operator import not_
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from breadbox.model.errors import (
    PayloadCorruptError,
    PayloadMissingError,
    StoreFullError,
    StoreUnavailableError,
    StoreUrlError,
)
from breadbox.model.types import PayloadReference
from breadbox.shared.threads import CallThreads, HungError
from breadbox.stores.base import (
    PRELUDE_BYTES,
    Confirmation,
    Custody,
    Foreseen,
    Part,
    PartsStore,
    PayloadReceiver,
    StoreSharedError,
    StoreTakenError,
    StoreUsage,
    check_sound,
)
from breadbox.stores.bulk import Blocks, File, read_files
from breadbox.stores.deadline import Deadline, current, in_force
from breadbox.stores.disk import (
    DiskRoom,
    can_hang,
    check_private_directory,
    make_private_directory,
    opener,
)
from breadbox.stores.groups import Group, GroupFiles, gathered, ids_together
from breadbox.stores.keys import group_of, is_payload_id, is_sound, new_payload_id, place_of
from breadbox.stores.reading import drop, head_bytes_of
from breadbox.stores.spare import SPARE_S, SPARE_SIZE_BYTES_MIN, SpareFiles, hold

_DIRECTORIES: Final = 256
_EPOCH_DIGITS: Final = 20
_BUFFERS_PER_CALL: Final = 1024
_BYTES_PER_CALL: Final = 32 * 2**20

LISTED_MAX: Final = 4
"""Names listed for a payload, beyond which it costs less to look for each by itself."""

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})

_GAP: Final = memoryview(bytearray(4096))

_HEAD_GUESS_BYTES: Final = 16 * 1024
"""First read of a payload; holds most heads."""

SMALL_BYTES_MAX: Final = 4 * 1024
"""Size up to which payloads cost less read whole, and then copied, than each into its places."""


class PayloadDirectory:
    """Where the files are."""

    def __init__(self, directory: str) -> None:
        self.root = Path(directory)
        self.unannounced = self.root / "unannounced"
        self.payloads = self.root / "payloads"
        self.journals = self.root / "journals"
        self.spare = SpareFiles(self.root / "spare")
        self.groups = GroupFiles(self.root / "groups", self.unannounced)

    def make(self) -> None:
        with _translated_errors():
            make_private_directory(self.root, has_parents=True)
            make_private_directory(self.unannounced)
            make_private_directory(self.payloads)
            make_private_directory(self.spare.directory)
            for number in range(_DIRECTORIES):
                make_private_directory(self.payloads / f"{number:02x}")

    def check(self) -> None:
        with _translated_errors():
            try:
                for path in (self.root, self.unannounced, self.payloads):
                    check_private_directory(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise StoreUrlError(
                    f"there is no payload store in {self.root} on this host: use a client on the "
                    "server's, or start the server with --gateway or a store that both reach"
                ) from error

    def confirmed_path(self, payload_id: str) -> str:
        """Return the path of a confirmed payload; its id must be well-formed."""
        return f"{self.payloads}/{payload_id[:2]}/{payload_id}"

    def unannounced_path(self, payload_id: str) -> str:
        return f"{self.unannounced}/{payload_id}"

    def hidden_path(self, payload_id: str) -> str:
        """Return the path of a payload that is being written."""
        return f"{self.unannounced}/.{payload_id}"

    def file(self, payload_id: str, memory: Sequence[memoryview], blocks: Blocks) -> File:
        """Describe a payload for `read_files`."""
        place = place_of(payload_id) if group_of(payload_id) else -1
        return File(self.places(payload_id), memory, blocks, place)

    def places(self, payload_id: str) -> tuple[str, str, str]:
        """Return where to look for a payload, which may be confirmed between two looks."""
        if group := group_of(payload_id):
            return (self.groups.path(group),) * 3
        confirmed = self.confirmed_path(payload_id)
        return confirmed, self.unannounced_path(payload_id), confirmed

    @contextmanager
    def open(self, reference: PayloadReference) -> Iterator[tuple[int, int]]:
        """Open a payload, yield descriptor and first byte.

        PayloadMissingError after the block if it was deleted meanwhile.
        """
        check_sound((reference,))
        with _translated_errors():
            descriptor, start = self._open(reference)
        try:
            yield descriptor, start
        except Exception:
            # Perhaps the bytes of another payload are at fault.
            self._check_there(reference, descriptor)
            raise
        else:
            self._check_there(reference, descriptor)
        finally:
            os.close(descriptor)

    def _check_there(self, reference: PayloadReference, descriptor: int) -> None:
        payload_id = reference.payload_id
        if group_of(payload_id):
            is_there = Group(descriptor).range_of(payload_id)[1] > 0
        else:
            is_there = reference.size_bytes < SPARE_SIZE_BYTES_MIN or any(
                map(os.path.lexists, self.places(payload_id))
            )
        if not is_there:
            raise PayloadMissingError(payload_id)

    def _open(self, reference: PayloadReference) -> tuple[int, int]:
        payload_id = reference.payload_id
        for path in self.places(payload_id):
            try:
                descriptor = os.open(path, _READ)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise PayloadCorruptError(f"payload {payload_id} is no file") from error
                raise
            seen = os.fstat(descriptor)
            is_file = stat.S_ISREG(seen.st_mode)
            start, size_bytes = 0, seen.st_size
            if is_file and group_of(payload_id):
                start, size_bytes = Group(descriptor).range_of(payload_id)
            if is_file and size_bytes == reference.size_bytes:
                return descriptor, start
            os.close(descriptor)
            if not is_file:
                raise PayloadCorruptError(f"payload {payload_id} is no file")
            if group_of(payload_id) and not size_bytes:
                break
            raise PayloadCorruptError(
                f"payload {payload_id} has {size_bytes} bytes where its reference says "
                f"{reference.size_bytes}"
            )
        raise PayloadMissingError(payload_id)


P = ParamSpec("P")
R = TypeVar("R")
THREADS_MAX: Final = 8
"""Calls of one store that may hang at a time; further ones wait for them, until their deadline."""


def _file_threads(directory: PayloadDirectory) -> CallThreads:
    return CallThreads(f"files-{directory.root.name}", THREADS_MAX)


def _within(deadline: Deadline, call: Callable[[], R]) -> Callable[[], R]:
    def run() -> R:
        with in_force(deadline):
            return call()

    return run


def _heard() -> None:
    """Note that the file system has answered, for a call that ends by silence, not slowness."""
    if (deadline := current()) is not None:
        deadline.heard(deadline.now())


def _silent(directory: PayloadDirectory) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"the disk of {directory.root} did not answer in time", was_silent=True
    )


def _bounded(
    method: Callable[Concatenate["FileStore", P], R],
) -> Callable[Concatenate["FileStore", P], R]:
    """Run a method of a store on a disk in a thread, which is left to itself at the deadline."""

    @wraps(method)
    def call(self: "FileStore", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.bounded(partial(method, self, *args, **kwargs))

    return call


class FileStore(PartsStore):
    """A `PayloadStore` in a directory. See `breadbox.stores.base` for the contract.

    A deadline holds on a disk, and there for all but the reading of a file that is open: the memory
    that it fills is the caller's.
    """

    def __init__(
        self, directory: str, *, silence_s: float = math.inf, must_exist: bool = False
    ) -> None:
        super().__init__(silence_s)
        self._directory = PayloadDirectory(directory)
        if must_exist:
            self._directory.check()
        else:
            self._directory.make()
        self._threads = _file_threads(self._directory) if can_hang(directory) else None

    def bounded(self, call: Callable[[], R]) -> R:
        """Make a call of files within the deadline, if it could hang."""
        deadline = self._begin()
        if self._threads is None:
            return call()
        try:
            return self._threads.call(_within(deadline, call), deadline.left_s)
        except HungError:
            raise _silent(self._directory) from None

    @_bounded
    def _reach(self, references: Sequence[PayloadReference]) -> None:
        """See that the files can be read, where that may hang."""
        if self._threads is not None:
            for each in references:
                with self._directory.open(each) as (descriptor, start), _translated_errors():
                    os.pread(descriptor, 1, start)
                _heard()

    def new_reference(self, size_bytes: int) -> PayloadReference:
        return PayloadReference(new_payload_id(), size_bytes)

    def _new_references(self, sizes: Sequence[int]) -> list[PayloadReference]:
        payload_ids = ids_together(sizes) if self._threads is None else []
        if payload_ids and self._directory.groups.directory.is_dir():
            return [*map(PayloadReference, payload_ids, sizes)]
        return super()._new_references(sizes)

    @_bounded
    def write_parts(self, parts: Sequence[Part]) -> None:
        path_of: Callable[[str], str] = self._directory.unannounced_path
        if parts and group_of(parts[0].reference.payload_id):  # And so are the others.
            parts, path_of = [*gathered(parts)], self._directory.groups.path
        size_bytes = sum(len(buffer) for part in parts for buffer in part.buffers)
        _check_room(self._directory, size_bytes, len(parts))
        with _translated_errors():
            for reference, offset_bytes, buffers in parts:
                path = path_of(reference.payload_id)
                _write(self._directory, reference, offset_bytes, buffers, path)

    @_bounded
    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        with _translated_errors():
            for each in references:
                with suppress(FileNotFoundError):
                    os.unlink(self._directory.hidden_path(each.payload_id))
        _delete(self._directory, [each.payload_id for each in references])

    def read_parts(self, parts: Sequence[Part]) -> None:
        self._reach([each.reference for each in parts])
        for reference, offset_bytes, buffers in parts:
            with self._directory.open(reference) as (descriptor, start):
                _read_fully(descriptor, buffers, start + offset_bytes, reference)

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        self._reach(references)
        check_sound(references)
        foreseen: list[tuple[int, Foreseen]] = []
        for position, reference in enumerate(references):
            each = receiver.foresee(position)
            if each is not None:
                foreseen.append((position, each))
                continue
            self._read_foreseen(references, foreseen, receiver)
            foreseen.clear()
            with self._directory.open(reference) as opened:
                _read(opened, position, reference, receiver)
            receiver.arrived(position)
        self._read_foreseen(references, foreseen, receiver)

    def _read_foreseen(
        self,
        references: Sequence[PayloadReference],
        foreseen: Sequence[tuple[int, Foreseen]],
        receiver: PayloadReceiver,
    ) -> None:
        file = self._directory.file
        read = read_files([file(references[at].payload_id, *each) for at, each in foreseen])
        for (position, (memory, _)), digests in zip(foreseen, read, strict=True):
            if digests is None:
                reference = references[position]
                with self._directory.open(reference) as (descriptor, start):
                    _read_fully(descriptor, memory, start, reference)
            receiver.arrived(position, digests)

    def at_hand(self, references: Sequence[PayloadReference]) -> list[bytes] | None:
        if any(each.size_bytes > SMALL_BYTES_MAX for each in references):
            return None
        check_sound(references)
        return self._read_small(references)

    @_bounded
    def _read_small(self, references: Sequence[PayloadReference]) -> list[bytes] | None:
        bodies = [bytearray(each.size_bytes) for each in references]
        file, pairs = self._directory.file, zip(references, bodies, strict=True)
        files = [file(each.payload_id, [memoryview(body)], ()) for each, body in pairs]
        return None if None in read_files(files) else [*map(bytes, bodies)]

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        self._reach(references)
        mapped = []
        for reference in references:
            with self._directory.open(reference) as (descriptor, start), _translated_errors():
                if start:  # There are other payloads on its pages, and holes come.
                    mapped.append(memoryview(bytearray(reference.size_bytes)))
                    _read_fully(descriptor, mapped[-1:], start, reference)
                    continue
                # The mapping has a copy of the descriptor, and so the lock.
                if not hold(descriptor):
                    return None
                mapping = mmap.mmap(descriptor, reference.size_bytes, access=mmap.ACCESS_COPY)
            # The view holds the mapping; it is unmapped when the last view is gone.
            mapped.append(memoryview(mapping))
        return mapped

    @_bounded
    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        _delete(self._directory, [reference.payload_id for reference in references])

    def within(self, deadline: Deadline) -> Self:
        return self if self._threads is None else super().within(deadline)


AT_ONCE_PAYLOADS: Final = 8
"""Payloads in memory that are confirmed without another thread."""


def _in_thread(
    method: Callable[Concatenate["FileCustodian", P], R],
) -> Callable[Concatenate["FileCustodian", P], Coroutine[Any, Any, R]]:

    @wraps(method)
    async def call(self: "FileCustodian", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.in_thread(partial(method, self, *args, **kwargs))

    return call


class FileCustodian:
    """A `PayloadCustodian` in a directory. See `breadbox.stores.base` for the contract.

    Silence of a disk ends a call after `answer_s`; what hangs goes on in a thread of this store.
    """

    def __init__(
        self,
        directory: str,
        *,
        unannounced_s: float,
        answer_s: float = 5.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = PayloadDirectory(directory)
        self._directory.make()
        self._answer_s = answer_s
        self._is_in_memory = not can_hang(directory)
        if self._is_in_memory:
            with _translated_errors():
                make_private_directory(self._directory.groups.directory)
        self._threads = _file_threads(self._directory)
        self._unannounced_s = unannounced_s
        self._wall_clock = wall_clock
        self._custody: Custody | None = None

    async def in_thread(self, call: Callable[[], R]) -> R:
        """Make a call of files in a thread of this store."""
        deadline = Deadline(self._answer_s)
        try:
            return await self._threads.run(_within(deadline, call), deadline.left_s)
        except HungError:
            raise _silent(self._directory) from None

    @_in_thread
    def take(self, custody: Custody) -> None:
        """On a full disk no new record is made."""
        self._custody = custody
        self._check_custody()

    @_in_thread
    def journals(self) -> set[str]:
        return {path.name for path in self._journals()}

    @_in_thread
    def forget_other_journals(self) -> None:
        with _translated_errors():
            for path in self._other_journals():
                path.unlink(missing_ok=True)

    @_in_thread
    def ping(self) -> None:
        with _translated_errors():
            os.stat(self._directory.unannounced)

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        """Few in memory are confirmed by the calling thread: handing them over would take more."""
        confirm = partial(self._confirm, references)
        is_at_once = self._is_in_memory and len(references) <= AT_ONCE_PAYLOADS
        return confirm() if is_at_once else await self.in_thread(confirm)

    def _confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        self._check_custody()
        with _translated_errors():
            groups = self._directory.groups
            return _each(references, groups.confirm, self._confirm_one, Confirmation.MISSING)

    @_in_thread
    def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        self._check_custody()
        size_bytes = sum(len(body) for _, body in payloads)
        _check_room(self._directory, size_bytes, len(payloads))
        with _translated_errors():
            for reference, body in payloads:
                path = self._directory.confirmed_path(reference.payload_id)
                _write(self._directory, reference, 0, [memoryview(body)], path)

    @_in_thread
    def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        bodies = []
        for reference in references:
            try:
                body = bytearray(reference.size_bytes)
                with self._directory.open(reference) as (descriptor, start):
                    _read_fully(descriptor, [memoryview(body)], start, reference)
                bodies.append(bytes(body))
            except (PayloadMissingError, PayloadCorruptError):
                bodies.append(b"")
        return bodies

    @_in_thread
    def delete(self, references: Sequence[PayloadReference]) -> None:
        self._check_custody()
        if self._is_in_memory:
            with _translated_errors():
                references = self._directory.spare.keep(references, self._directory.confirmed_path)
        _delete(self._directory, [each.payload_id for each in references])

    @_in_thread
    def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        with _translated_errors():
            return _each(references, self._directory.groups.present, self._is_present, False)

    @_in_thread
    def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        """For many, list whole directories, at a quarter of the cost, unless most are of others."""
        listed: set[str] = set()
        with _translated_errors():
            numbers = range(_DIRECTORIES if len(references) > _DIRECTORIES else 0)
            for number in numbers:
                listed.update(os.listdir(self._directory.payloads / f"{number:02x}"))
                _heard()
                # Each directory has an equal share of what is asked for, and of what is there.
                asked_count = len(references) * (number + 1) / _DIRECTORIES
                if len(listed) > LISTED_MAX * asked_count:
                    break

            def is_present(each: PayloadReference) -> bool:
                return each.payload_id in listed or self._is_present(each)

            present = _each(references, self._directory.groups.present, is_present, False)
            return [*compress(references, map(not_, present))]

    async def confirmed(self) -> AsyncIterator[str]:
        for prefix in ("", *(f"{number:02x}" for number in range(_DIRECTORIES))):
            for payload_id in await self._confirmed_in(prefix):
                yield payload_id

    @_in_thread
    def _confirmed_in(self, prefix: str) -> list[str]:
        with _translated_errors():
            if not prefix:
                return [*self._directory.groups.confirmed()]
            listed = os.listdir(self._directory.payloads / prefix)
            return [name for name in listed if is_payload_id(name)]

    @_in_thread
    def delete_ids(self, payload_ids: Iterable[str]) -> None:
        self._check_custody()
        if self._custody is not None and self._other_journals():
            raise StoreSharedError
        _delete(self._directory, payload_ids)

    @_in_thread
    def sweep_unannounced(self) -> int:
        oldest = self._wall_clock() - self._unannounced_s
        swept = 0
        with _translated_errors():
            for entry in os.scandir(self._directory.unannounced):
                _heard()
                try:
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
                        swept += 1
                except FileNotFoundError:
                    continue  # Confirmed or deleted meanwhile.
            swept += self._directory.groups.sweep(oldest)
            self._directory.spare.delete(self._wall_clock() - SPARE_S)
        return swept

    @_in_thread
    def usage(self) -> StoreUsage:
        """Return bytes used and their limit of the file system that the directory is on."""
        with _translated_errors():
            if not self._is_in_memory:
                # A disk that hangs still says how full it is; it changes no time.
                os.utime(self._directory.unannounced)
            room = _room(self._directory)
            spare_bytes, spare_count = self._directory.spare.usage()
        return StoreUsage(
            used_bytes=room.size_bytes - room.free_bytes - spare_bytes,
            limit_bytes=room.size_bytes - room.kept_bytes,
            capacity_bytes_max=room.capacity_bytes_max,
            used_file_count=room.inode_count - room.free_inode_count - spare_count,
            limit_file_count=room.inode_count - room.kept_inode_count,
            capacity_file_count_max=max(0, room.inode_count - _DIRECTORIES) // 2,
        )

    @_in_thread
    def incarnation(self) -> str:
        with _translated_errors():
            seen = os.stat(self._directory.payloads)
        return f"{seen.st_dev}:{seen.st_ino}"

    async def concerns(self) -> tuple[str, ...]:
        return ()

    async def close(self) -> None:
        """Payloads stay."""
        if self._is_in_memory:
            with suppress(StoreUnavailableError), _translated_errors():
                self._directory.spare.delete()

    def _check_custody(self) -> None:
        """Compare and record the epoch: not atomic, but for a deleted lock of the directory."""
        custody = self._custody
        if custody is None or not custody.epoch:
            return
        with _translated_errors():
            path = f"{self._directory.journals}/{custody.journal}"
            known = ""
            with suppress(FileNotFoundError), open(path, opener=opener) as file:
                known = file.read().strip()
            if known.isdigit() and int(known) > custody.epoch:
                raise StoreTakenError
            if known != str(custody.epoch):
                make_private_directory(self._directory.journals)
                # In place and of one length, so that it takes no room the second time.
                # "w" does not truncate: the opener leaves that out.
                with (
                    suppress(StoreFullError),
                    _translated_errors(),
                    open(path, "w", opener=opener) as file,
                ):
                    file.write(f"{custody.epoch:>{_EPOCH_DIGITS}}\n")

    def _journals(self) -> list[Path]:
        with _translated_errors():
            if not self._directory.journals.exists():
                return []
            return list(self._directory.journals.iterdir())

    def _other_journals(self) -> list[Path]:
        mine = "" if self._custody is None else self._custody.journal
        return [path for path in self._journals() if path.name != mine]

    def _confirm_one(self, reference: PayloadReference) -> Confirmation:
        confirmed = self._directory.confirmed_path(reference.payload_id)
        unannounced = self._directory.unannounced_path(reference.payload_id)
        try:
            is_right = _is_file(unannounced, reference.size_bytes)
            if is_right:
                os.rename(unannounced, confirmed)
        except FileNotFoundError:
            try:
                is_right = _is_file(confirmed, reference.size_bytes)
            except FileNotFoundError:
                return Confirmation.MISSING
        return Confirmation.THERE if is_right else Confirmation.OTHER_SIZE

    def _is_present(self, reference: PayloadReference) -> bool:
        for path in self._directory.places(reference.payload_id):
            with suppress(FileNotFoundError):
                if _is_file(path, reference.size_bytes):
                    return True
        return False


def _room(directory: PayloadDirectory, size_bytes: int = 0, file_count: int = 0) -> DiskRoom:
    """Look for room, for which spare files are deleted."""
    room = DiskRoom.of(directory.unannounced)
    if not room.has_room_for(size_bytes, file_count) and directory.spare.delete():
        room = DiskRoom.of(directory.unannounced)
    return room


def _check_room(directory: PayloadDirectory, size_bytes: int, file_count: int) -> None:
    """Refuse what takes the room that the journal needs to delete payloads."""
    with _translated_errors():
        room = _room(directory, size_bytes, file_count)
    if not room.has_room_for(size_bytes, file_count):
        raise StoreFullError(
            f"the payload directory is full ({os.strerror(errno.ENOSPC)}: {size_bytes} bytes to "
            f"write, {room.free_bytes} of {room.size_bytes} free, {room.kept_bytes} to be left; "
            f"inodes: {room.free_inode_count} of {room.inode_count} free)"
        )


def _write(
    directory: PayloadDirectory,
    reference: PayloadReference,
    offset_bytes: int,
    buffers: Sequence[memoryview],
    path: str,
) -> None:
    hidden = directory.hidden_path(reference.payload_id)
    begins = os.O_CREAT | os.O_EXCL if not offset_bytes else 0
    descriptor = None if offset_bytes else directory.spare.take(reference.size_bytes, hidden)
    if descriptor is None:
        descriptor = os.open(hidden, os.O_WRONLY | begins | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            if offset_bytes:
                os.lseek(descriptor, offset_bytes, os.SEEK_SET)
            for first in range(0, len(buffers), _BUFFERS_PER_CALL):
                rest = list(buffers[first : first + _BUFFERS_PER_CALL])
                while rest:
                    drop(rest, os.writev(descriptor, _portion(rest)))
                    _heard()
        finally:
            os.close(descriptor)
        if offset_bytes + sum(map(len, buffers)) == reference.size_bytes:
            os.rename(hidden, path)
    except BaseException:
        os.unlink(hidden)
        raise


def _read(
    opened: tuple[int, int], position: int, reference: PayloadReference, receiver: PayloadReceiver
) -> None:
    """Read the head, then the segments into place: a mapping makes a disk error a signal."""
    descriptor, first = opened
    guess = memoryview(bytearray(min(_HEAD_GUESS_BYTES, reference.size_bytes)))
    _read_fully(descriptor, [guess], first, reference)
    head_bytes = head_bytes_of(position, reference, guess[:PRELUDE_BYTES], receiver)
    head = guess[:head_bytes]
    if head_bytes > len(guess):
        head = memoryview(bytearray(head_bytes))
        _read_fully(descriptor, [head], first, reference)
    run: list[memoryview] = []
    run_start = end = 0
    for segment in receiver.segments(position, head):
        start, destination = segment
        if start + len(destination) <= len(guess):
            destination[:] = guess[start : start + len(destination)]
            continue
        if run and 0 <= start - end <= len(_GAP):
            # Near enough: reading the gap costs less than another call.
            run.append(_GAP[: start - end])
        else:
            _read_fully(descriptor, run, first + run_start, reference)
            run, run_start = [], start
        run.append(destination)
        end = start + len(destination)
    _read_fully(descriptor, run, first + run_start, reference)


def _read_fully(
    descriptor: int, destinations: Sequence[memoryview], offset: int, reference: PayloadReference
) -> None:
    rest = [destination for destination in destinations if len(destination)]
    with _translated_errors():
        while rest:
            count = os.preadv(descriptor, rest[:_BUFFERS_PER_CALL], offset)
            if not count:
                raise PayloadCorruptError(f"payload {reference.payload_id} ends at byte {offset}")
            offset += count
            drop(rest, count)


def _portion(buffers: list[memoryview]) -> list[memoryview]:
    """Return what one call of the system takes of buffers, for a disk to say that it goes on."""
    if len(buffers[0]) > _BYTES_PER_CALL:
        return [buffers[0][:_BYTES_PER_CALL]]
    ends = accumulate(map(len, buffers))
    return [each for each, end in zip(buffers, ends, strict=True) if end <= _BYTES_PER_CALL]


def _is_file(path: str, size_bytes: int) -> bool:
    _heard()
    seen = os.lstat(path)
    return seen.st_size == size_bytes and stat.S_ISREG(seen.st_mode)


def _each(
    references: Sequence[PayloadReference],
    of_group: Callable[[str, Sequence[PayloadReference]], Sequence[R]],
    of_file: Callable[[PayloadReference], R],
    unsound: R,
) -> list[R]:
    """Return an answer for each payload: of its group, of its file, or for an unsound reference."""
    answers = [unsound] * len(references)
    grouped: dict[str, list[int]] = {}
    for position, reference in enumerate(references):
        if not is_sound(reference):
            continue
        if group := group_of(reference.payload_id):
            grouped.setdefault(group, []).append(position)
        else:
            answers[position] = of_file(reference)
    for group, positions in grouped.items():
        found = of_group(group, [references[position] for position in positions])
        for position, answer in zip(positions, found, strict=True):
            answers[position] = answer
    return answers


def _delete(directory: PayloadDirectory, payload_ids: Iterable[str]) -> None:
    grouped: dict[str, list[str]] = {}
    with _translated_errors():
        for payload_id in payload_ids:
            _heard()
            if not is_payload_id(payload_id):
                continue
            if group := group_of(payload_id):
                grouped.setdefault(group, []).append(payload_id)
                continue
            for path in directory.places(payload_id):
                with suppress(FileNotFoundError):
                    os.unlink(path)
                    break
        for group, together in grouped.items():
            directory.groups.delete(group, together)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_ERRNOS:
            # Without the path: the text goes on to the server and into its descriptions of buffers.
            raise StoreFullError(f"the payload directory is full ({error.strerror})") from error
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        raise StoreUnavailableError(f"the payload directory failed ({what})") from error
