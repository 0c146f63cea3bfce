"""Compares a journal with a payload store, from outside; never changes the journal.

While a server runs, journal and store differ for moments: a payload is confirmed before its
fragment is admitted, and deleted after its fragment was forgotten. So what looks wrong is looked at
again after a while, and only what still is wrong counts.

A journal holds inputs and grants; that a lease or an open chunk has expired since its last entry
follows from the time alone. So the state read from it is brought to the present before it is
compared. Whether it is a moment behind or ahead of the server's clock then does not matter: missing
is what it refers to now, and an orphan what it referred to neither at the last entry nor now.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time

from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian
from breadbox.stores.base import Custody, PayloadCustodian, StoreSharedError
from breadbox_server.base.conversion import payload_reference
from breadbox_server.base.errors import StartError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.journal.recovery import look
from breadbox_server.journal.storage.interface import JournalArchive
from breadbox_server.journal.storage.place import JournalPlace

DELETE_BATCH = 256


@dataclass(slots=True)
class Findings:
    """What was found."""

    referred: dict[str, PayloadReference] = field(default_factory=dict)
    """Every payload that the journal refers to at present, by id."""
    kept_count: int = 0
    """Confirmed payloads in the store."""
    missing: list[PayloadReference] = field(default_factory=list)
    """In the journal, and not whole in the store."""
    orphans: list[str] = field(default_factory=list)
    """Confirmed in the store, and not in the journal."""
    leaving_count: int = 0
    """Kept, and of no use since something expired; the server deletes them when it sees that."""
    deleted_count: int = 0
    """Orphans that were deleted."""

    @property
    def referred_bytes(self) -> int:
        """Bytes of every payload that the journal refers to."""
        return sum(reference.size_bytes for reference in self.referred.values())


def examine(store_url: str, journal: str = "auto", *, settle_s: float, repair: bool) -> Findings:
    """Compare books and store.

    Args:
        store_url: Of the payload store.
        journal: As for the server: "auto" is beside the payloads, else a URL.
        settle_s: Seconds after which what looks wrong is looked at again; 0: no server runs.
        repair: Whether to delete the orphans. What is missing is dropped by the server itself.

    Raises:
        StartError: There is no journal to compare with, or the orphans may be other journals'.
        StoreError, JournalError: Store or journal cannot be reached or read.
    """
    place = JournalPlace.choose(journal, store_url)
    if place is None:
        raise StartError("without a journal there is nothing to compare the store with")
    archive = place.open_archive()
    try:
        if not archive.is_begun():
            raise StartError(f"there is no journal at {archive.shown}; name it with --journal")
        return asyncio.run(_examine(store_url, archive, settle_s=settle_s, repair=repair))
    finally:
        archive.close()


def delete(store_url: str, payload_ids: Sequence[str]) -> None:
    """Delete payloads unconditionally; a server drops what refers to them when it starts.

    Raises:
        StoreError: The store cannot be reached.
    """
    asyncio.run(_delete(store_url, payload_ids))


async def _delete(store_url: str, payload_ids: Sequence[str]) -> None:
    custodian = open_custodian(store_url)
    try:
        await _delete_with(custodian, payload_ids)
    finally:
        await custodian.close()


async def _delete_with(custodian: PayloadCustodian, payload_ids: Sequence[str]) -> None:
    for start in range(0, len(payload_ids), DELETE_BATCH):
        await custodian.delete_ids(payload_ids[start : start + DELETE_BATCH])


async def _examine(
    store_url: str, archive: JournalArchive, *, settle_s: float, repair: bool
) -> Findings:
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


async def _compare(custodian: PayloadCustodian, archive: JournalArchive) -> Findings:
    """Look once. The store is listed first: what is admitted meanwhile is in the journal only."""
    kept = {payload_id async for payload_id in custodian.confirmed()}
    found = look(archive)
    recorded = set(_references(found.buffers))
    found.buffers.handle_timer(now=max(found.now, time()))
    referred = _references(found.buffers)
    doubtful = [reference for reference in referred.values() if reference.payload_id not in kept]
    present = await custodian.present(doubtful) if doubtful else []
    return Findings(
        referred=referred,
        kept_count=len(kept),
        missing=[
            reference for reference, is_there in zip(doubtful, present, strict=True) if not is_there
        ],
        orphans=sorted(kept - recorded),
        leaving_count=len((kept & recorded) - set(referred)),
    )


def _references(buffers: BufferSet) -> dict[str, PayloadReference]:
    """Every payload that the core refers to, by id."""
    return {
        payload.payload_id: payload_reference(payload)
        for name in buffers.names()
        for payload in buffers[name].payloads()
    }
