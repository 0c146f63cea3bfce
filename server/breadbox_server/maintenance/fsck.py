"""`breadbox fsck`: compare a payload store with the journal, without changing the journal.

Beside a running server they differ for moments, so each finding is checked a second time and only
counts if it is still there. Leases may have expired since the last entry, so the state is advanced
to the present: payloads it refers to now can be missing; those of neither state are orphans.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time

import numpy as np

from breadbox.cli import frame
from breadbox.cli.base import Bug, Unusable
from breadbox.cli.command import command
from breadbox.cli.settings import Settings, of_one_call, setting
from breadbox.model.errors import PayloadCorruptError, PayloadFormatError, PayloadMissingError
from breadbox.model.types import PayloadReference
from breadbox.payload.format import Head
from breadbox.payload.receive import Placement, receive
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Custody, PayloadCustodian, StoreSharedError
from breadbox_server.base.errors import BugError, StartError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.journal.recovery import recover_while_written
from breadbox_server.journal.storage.interface import JournalArchive, JournalError
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.settings import Settings as ServeSettings
from breadbox_server.settings import default_store_url

DELETE_BATCH = 256


@dataclass(slots=True)
class _Findings:
    referred: dict[str, PayloadReference] = field(default_factory=dict)
    """Every payload that the journal refers to at present, by id."""
    kept_count: int = 0
    missing: list[PayloadReference] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    leaving_count: int = 0
    """Stored, and unused since a lease or chunk expired; the server will delete them."""
    deleted_count: int = 0


def _examine(store_url: str, journal: str, *, settle_s: float, repair: bool) -> _Findings:
    place = JournalPlace.choose(journal, store_url)
    if place is None:
        raise StartError("without a journal there is nothing to compare the store with")
    archive = place.open_archive()
    try:
        if not archive.is_begun():
            raise StartError(f"there is no journal at {archive.shown}; name it with --journal")
        return asyncio.run(_look(store_url, archive, settle_s=settle_s, repair=repair))
    finally:
        archive.close()


async def _delete(store_url: str, payload_ids: Sequence[str]) -> None:
    """Delete payloads unconditionally; a server drops references to them when it starts."""
    custodian = open_custodian(store_url)
    try:
        await _delete_with(custodian, payload_ids)
    finally:
        await custodian.close()


async def _delete_with(custodian: PayloadCustodian, payload_ids: Sequence[str]) -> None:
    for start in range(0, len(payload_ids), DELETE_BATCH):
        await custodian.delete_ids(payload_ids[start : start + DELETE_BATCH])


async def _look(
    store_url: str, archive: JournalArchive, *, settle_s: float, repair: bool
) -> _Findings:
    custodian = open_custodian(store_url)
    try:
        found = await _compare(custodian, archive)
        if settle_s > 0 and (found.missing or found.orphans):
            await asyncio.sleep(settle_s)
            again = await _compare(custodian, archive)
            was_missing = {reference.payload_id for reference in found.missing}
            was_orphan = set(found.orphans)
            again.missing = [each for each in again.missing if each.payload_id in was_missing]
            again.orphans = [each for each in again.orphans if each in was_orphan]
            found = again
        if repair:
            await _delete_orphans(custodian, archive, found.orphans)
            found.deleted_count = len(found.orphans)
        return found
    finally:
        await custodian.close()


async def _delete_orphans(
    custodian: PayloadCustodian, archive: JournalArchive, orphans: Sequence[str]
) -> None:
    await custodian.take(Custody(archive.identity(), epoch=0))
    try:
        await _delete_with(custodian, orphans)
    except StoreSharedError as error:
        raise StartError(
            f"{error}: what the journal at {archive.shown} does not know may be theirs; if they "
            "are gone, start the server with --delete-orphans"
        ) from error


async def _compare(custodian: PayloadCustodian, archive: JournalArchive) -> _Findings:
    """Compare once. The store is listed first, so later admissions are in the journal alone."""
    kept = {payload_id async for payload_id in custodian.confirmed()}
    found = recover_while_written(archive)
    recorded = set(_references(found.buffers))
    found.buffers.handle_timer(now=max(found.now, time()))
    referred = _references(found.buffers)
    doubtful = [reference for reference in referred.values() if reference.payload_id not in kept]
    present = await custodian.present(doubtful) if doubtful else []
    return _Findings(
        referred=referred,
        kept_count=len(kept),
        missing=[
            reference for reference, is_there in zip(doubtful, present, strict=True) if not is_there
        ],
        orphans=sorted(kept - recorded),
        leaving_count=len((kept & recorded) - set(referred)),
    )


def _references(buffers: BufferSet) -> dict[str, PayloadReference]:
    return {
        payload.payload_id: payload
        for name in buffers.names()
        for payload in buffers[name].payloads()
    }


class FsckSettings(Settings):
    """Options of `breadbox fsck`."""

    store: str = setting("", secret=True, metavar="URL", shown="as of serve")
    """Payload store of the server."""
    journal: str = setting("auto", secret=True, metavar="URL")
    """Journal of the server; auto: beside the payloads."""
    repair: bool = of_one_call(False)
    """Delete payloads that the journal does not know, and those that fail their checksums; the
    server drops references to the latter when it starts."""
    no_checksums: bool = of_one_call(False)
    """Do not read the payloads."""
    settle_s: float = of_one_call(5.0, ge=0, le=3600)
    """Seconds after which findings are checked again, since a server may be running; 0: none is."""
    as_json: bool = of_one_call(False, option="json")
    """Print one JSON object."""


@command(FsckSettings, reads_variable=True, shares_file_of=ServeSettings)
def fsck(settings: FsckSettings) -> int:
    """Compare the server's journal with the payloads in the store.

    It finds both by the options, variables and file of `breadbox serve`.

    Reports missing payloads (in the journal and not in the store), orphans (in the store and
    not in the journal) and corrupt ones (damaged, or of a format version that this Breadbox cannot
    read). It does not report payloads that the server is about to delete, such as those of an
    expired lease.

    With --repair, orphans and damaged payloads are deleted; those of another format version are
    kept. Only the server changes the journal: when it starts, it drops and counts references to
    missing payloads, the deleted ones included.

    Exit code 0: they agree. 1: they differ, and the counts say how. 2: they could not be compared.
    70: the comparison failed because of a bug in Breadbox.
    """
    store = settings.store or default_store_url(is_ephemeral=False)
    repair = settings.repair
    try:
        found = _examine(store, settings.journal, settle_s=settings.settle_s, repair=repair)
    except JournalError as error:
        raise Unusable(str(error)) from error
    except BugError as error:
        raise Bug(str(error)) from error
    damaged, unreadable = _corrupt(
        store, () if settings.no_checksums else [*found.referred.values()]
    )
    deleted = []
    if repair and damaged:
        # Check again before deleting, since the first finding may have been temporary.
        deleted = _corrupt(store, [found.referred[each] for each in damaged])[0]
        asyncio.run(_delete(store, deleted))
    corrupt = [*damaged, *unreadable]
    report = {
        "books": len(found.referred),
        "book_bytes": sum(each.size_bytes for each in found.referred.values()),
        "kept": found.kept_count,
        "missing": len(found.missing),
        "orphans": len(found.orphans),
        "leaving": found.leaving_count,
        "corrupt": len(corrupt),
        "deleted": found.deleted_count,
        "deleted_corrupt": len(deleted),
    }
    if settings.as_json:
        frame.print_json(report)
    else:
        _print(report, found, corrupt)
    wrong = report["missing"] + report["orphans"] - report["deleted"] + report["corrupt"]
    return 1 if wrong else 0


def _corrupt(store_url: str, references: Sequence[PayloadReference]) -> tuple[list[str], list[str]]:
    damaged, unreadable = [], []
    store = open_store(store_url)
    try:
        for reference in references:
            try:
                receive(store, [reference], _everything)
            except PayloadMissingError:
                continue  # Released meanwhile, or counted as missing already.
            except PayloadCorruptError:
                damaged.append(reference.payload_id)
            except PayloadFormatError:
                unreadable.append(reference.payload_id)
    finally:
        store.close()
    return damaged, unreadable


def _everything(position: int, head: Head) -> list[Placement]:
    del position
    return [
        Placement(index, np.empty(stored.shape, stored.dtype))
        for index, stored in enumerate(head.layout.arrays)
    ]


def _print(report: dict[str, int], found: _Findings, corrupt: Sequence[str]) -> None:
    console = frame.console()
    console.print(
        f"journal: {report['books']} payloads, {frame.size_text(report['book_bytes'])}; "
        f"store: {report['kept']} payloads"
    )
    for name, ids in (
        ("missing", [each.payload_id for each in found.missing]),
        ("orphans", found.orphans),
        ("corrupt", corrupt),
    ):
        shown = f": {', '.join(ids[:5])}{' ...' if len(ids) > 5 else ''}" if ids else ""
        console.print(f"{name}: {len(ids)}{shown}", highlight=False)
    if report["leaving"]:
        console.print(f"leaving: {report['leaving']}; of leases that have expired, for instance")
    if report["deleted"]:
        console.print(f"deleted {report['deleted']} orphans")
    if report["deleted_corrupt"]:
        console.print(f"deleted {report['deleted_corrupt']} damaged payloads")
    if report["missing"] or report["deleted_corrupt"]:
        console.print("the server drops chunks of missing payloads when it starts")
