"""Open the payload store of a server: lock it, check that it answers, limit the capacity."""

import fcntl
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from breadbox.model.errors import StoreError, StoreUnavailableError, StoreUrlError
from breadbox.stores import open_custodian
from breadbox.stores.base import PayloadCustodian
from breadbox.stores.disk import MIB, UnsafePathError, make_private_directory, opener
from breadbox.stores.urls import parse_store_url, redact
from breadbox_server.base.errors import StartError
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.settings import Settings

log = logging.getLogger(__name__)

SILENCE_TOLD_S: Final = 5.0


@contextmanager
def store_needed(settings: Settings) -> Iterator[None]:
    """Turn the store's errors inside the block into a StartError."""
    try:
        yield
    except StoreError as error:
        raise StartError(
            f"--store {settings.store_shown} cannot be used: {error}; start again"
        ) from error


@contextmanager
def told_of_silence(what: str) -> Iterator[None]:
    """Log once, from a thread, that the block waits: a call of a disk that hangs may never end."""
    text = "the start waits for %s, for %.0f s now: check that its disk, or its Redis, answers"
    timer = threading.Timer(SILENCE_TOLD_S, log.warning, (text, what, SILENCE_TOLD_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def hold_directory(settings: Settings, leftovers: ExitStack) -> Iterator[None]:
    """Lock a store's directory; raise StartError if it is in use, or ephemeral and not empty."""
    # An ephemeral directory is deleted however the process ends, so it is a leftover, too.
    try:
        parsed = parse_store_url(settings.store)
    except StoreUrlError as error:
        raise StartError(f"--store cannot be used: {error}") from error
    if not parsed.directory:
        if settings.is_ephemeral:
            raise StartError("--ephemeral is for stores in a directory; leave it out")
        yield
        return
    directory = Path(parsed.directory)
    try:
        if settings.is_ephemeral and directory.exists() and any(directory.iterdir()):
            raise StartError(
                f"--ephemeral would delete {directory}, which is not empty; "
                "name a new directory, or delete it"
            )
        make_private_directory(directory, has_parents=True)
        lock = open(directory / "server.lock", "w", opener=opener)  # noqa: SIM115 - held below
    except UnsafePathError as error:
        raise StartError(f"--store cannot be used: {error.strerror}") from error
    except OSError as error:
        raise StartError(
            f"--store {settings.store_shown} cannot be used: {error.strerror}; "
            "give a directory that this user may write"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartError(
                f"--store {settings.store_shown} is in use by another server; stop that one (which "
                "--take-over cannot displace from a directory) or give another directory"
            ) from error
        if settings.is_ephemeral:
            leftovers.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            yield
        finally:
            if settings.is_ephemeral:
                shutil.rmtree(directory, ignore_errors=True)


async def open_store(
    settings: Settings, custodian: PayloadCustodian | None
) -> tuple[PayloadCustodian, list[str], Settings]:
    """Open the payload store, or use the given one; check that it answers, or close it.

    Returns the store, warnings about how store or journal may lose data, and the settings
    with `capacity_bytes` and `capacity_chunks` lowered to what the store can hold.
    """
    try:
        if custodian is None:
            custodian = open_custodian(settings.store, unannounced_s=settings.unannounced_s)
        await custodian.ping()
    except StoreUrlError as error:
        raise StartError(f"--store cannot be used: {error}") from error
    except StoreError as error:
        if custodian is not None:
            await custodian.close()
        raise StartError(f"--store {settings.store_shown} {_why_not(error)}") from error
    try:
        with store_needed(settings):
            return (
                custodian,
                await _concerns(settings, custodian),
                await _fitted(settings, custodian),
            )
    except BaseException:
        await custodian.close()
        raise


def _why_not(error: StoreError) -> str:
    answer = error.answer if isinstance(error, StoreUnavailableError) else ""
    if "loading" in answer.lower():
        return f"is not ready: {answer}; start this server once Redis has read its data"
    if answer:
        return f"refuses: {answer}; give a primary's URL, and a user with the rights of SECURITY.md"
    return (
        f"does not answer: {error}; "
        "start it, or give another URL, with user and password if it needs them"
    )


async def _concerns(settings: Settings, custodian: PayloadCustodian) -> list[str]:
    found = [f"--store {settings.store_shown}: {each}" for each in await custodian.concerns()]
    # The journal's own start refuses one that cannot be used.
    with suppress(StoreUrlError, StoreError):
        place = JournalPlace.choose(settings.journal, settings.store)
        if place is not None and place.is_shared and place.where != settings.store:
            async with AsyncExitStack() as stack:
                journal = open_custodian(place.where)
                stack.push_async_callback(journal.close)
                shown = redact(place.where)
                found += [f"--journal {shown}: {each}" for each in await journal.concerns()]
    for each in found:
        log.warning("%s", each)
    return found


async def _fitted(settings: Settings, custodian: PayloadCustodian) -> Settings:
    usage = await custodian.usage()
    settings = _fitted_to_files(settings, usage.capacity_file_count_max)
    fitting = usage.capacity_bytes_max
    if not fitting or settings.capacity_bytes <= fitting:
        return settings
    directory = parse_store_url(settings.store).directory
    if not directory:
        remedy = "give Redis more maxmemory"
    elif directory.startswith("/dev/shm/"):
        remedy = "give /dev/shm more room (in a container docker run --shm-size)"
    else:
        remedy = "give the directory a larger file system"
    log.warning(
        "--capacity-bytes is %.0f MiB, and the store takes %.0f in all: buffers hold %.0f MiB; "
        "for more, %s",
        settings.capacity_bytes / MIB,
        usage.limit_bytes / MIB,
        fitting / MIB,
        remedy,
    )
    return settings.model_copy(update={"capacity_bytes": fitting})


def _fitted_to_files(settings: Settings, file_count_max: int) -> Settings:
    """Lower `capacity_chunks`: a file system may lack inodes before it lacks bytes."""
    fitting = max(1, file_count_max // settings.fragments_per_chunk)
    if not file_count_max or settings.capacity_chunks <= fitting:
        return settings
    log.warning(
        "--capacity-chunks is %d, and half of the store's inodes are for payloads: buffers hold %d "
        "chunks; for more, give it a file system with more inodes",
        settings.capacity_chunks,
        fitting,
    )
    return settings.model_copy(update={"capacity_chunks": fitting})
