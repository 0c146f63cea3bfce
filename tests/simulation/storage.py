"""The store and the journal: what outlives a killed server."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from breadbox.errors import StoreUnavailableError
from breadbox.stores.base import Custody, StoreUsage
from breadbox.types import PayloadReference
from breadbox_server.journal.claims import Claim, Holder
from breadbox_server.journal.storage import (
    BEGINNING,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)
from simulation.faults import Fates
from support.custody import KnownJournals

UNANNOUNCED_S = 20.0
"""Life of a payload that nobody confirms."""


class SimulatedStore:
    """Payload ids, and whether each is confirmed."""

    def __init__(self, fates: Fates) -> None:
        self._rng = fates.rng("store")
        self._expires_at: dict[str, float] = {}
        """Of the unannounced."""
        self.confirmed: set[str] = set()
        self.journals = KnownJournals()
        self.lost: set[str] = set()
        """What it forgot by itself."""
        self.starts = 1

    def put(self, payload_id: str) -> None:
        self._expires_at[payload_id] = asyncio.get_running_loop().time() + UNANNOUNCED_S

    def has(self, payload_id: str) -> bool:
        now = asyncio.get_running_loop().time()
        return payload_id in self.confirmed or self._expires_at.get(payload_id, now) > now

    def is_accounted_for(self, payload_id: str) -> bool:
        """Whether a payload is there, or was lost by the store itself."""
        return self.has(payload_id) or payload_id in self.lost

    def confirm(self, payload_id: str) -> bool:
        if not self.has(payload_id):
            return False
        self._expires_at.pop(payload_id, None)
        self.confirmed.add(payload_id)
        return True

    def delete(self, payload_id: str) -> None:
        self._expires_at.pop(payload_id, None)
        self.confirmed.discard(payload_id)

    def lose_some(self, count: int) -> None:
        """Forget payloads: in a restart, which can be told, or just so."""
        self.starts += self._rng.random() < 0.5
        for payload_id in self._rng.sample(sorted(self.confirmed), min(count, len(self.confirmed))):
            self.confirmed.discard(payload_id)
            self.lost.add(payload_id)


class SimulatedCustodian:
    """Implements `PayloadCustodian` for one life of the server."""

    def __init__(self, store: SimulatedStore, fates: Fates, life: int) -> None:
        self._store = store
        self._fates = fates
        self._rng = fates.rng(f"custodian {life}")
        self._custody: Custody | None = None
        self.is_dead = False
        """The process that it belongs to was killed: no call of it reaches anything."""

    async def _trip(self) -> None:
        await self._fates.store_trip(self._rng)
        if self.is_dead:
            await asyncio.Event().wait()

    async def take(self, custody: Custody) -> None:
        await self._trip()
        self._custody = custody
        self._store.journals.check(custody)

    async def forget_other_journals(self) -> None:
        await self._trip()
        self._store.journals.forget_others(self._custody)

    async def ping(self) -> None:
        await self._trip()

    async def confirm(self, references: Sequence[PayloadReference]) -> list[bool]:
        await self._trip()
        self._store.journals.check(self._custody)
        answers = [self._store.confirm(reference.payload_id) for reference in references]
        await self._trip()
        return answers

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        await self._delete([reference.payload_id for reference in references], is_alone=False)

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        await self._delete(list(payload_ids), is_alone=True)

    async def _delete(self, ids: Sequence[str], *, is_alone: bool) -> None:
        await self._trip()
        self._store.journals.check(self._custody, is_alone=is_alone)
        for payload_id in ids:
            self._store.delete(payload_id)
        await self._trip()

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        await self._trip()
        return [self._store.has(reference.payload_id) for reference in references]

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        there = await self.present(references)
        return [each for each, is_there in zip(references, there, strict=True) if not is_there]

    async def confirmed(self) -> AsyncIterator[str]:
        """List in two portions, between which the world goes on."""
        await self._trip()
        ids = sorted(self._store.confirmed)
        for payload_id in ids[: len(ids) // 2]:
            yield payload_id
        await self._trip()
        for payload_id in ids[len(ids) // 2 :]:
            if payload_id in self._store.confirmed:
                yield payload_id

    async def sweep_unannounced(self) -> int:
        await self._trip()
        return 0

    async def incarnation(self) -> str:
        await self._trip()
        return str(self._store.starts)

    async def concerns(self) -> tuple[str, ...]:
        return ()

    async def usage(self) -> StoreUsage:
        raise StoreUnavailableError("not simulated")

    async def close(self) -> None:
        pass


class SimulatedArchive:
    """Implements `JournalArchive`: records that outlive the server."""

    shown = "the simulated journal"

    def __init__(self) -> None:
        self.snapshot: tuple[int, bytes] | None = None
        self.records: dict[int, bytes] = {}
        self.owner: Claim | None = None
        """Of the server that may write."""

    def identity(self) -> str:
        return "simulated"

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        epoch = 0 if self.owner is None else self.owner.epoch
        self.owner = Claim("simulated", epoch + 1, holder)
        return self.owner

    def is_begun(self) -> bool:
        return self.snapshot is not None

    def begin(self, data: bytes) -> None:
        self.snapshot = (BEGINNING, data)

    def read_snapshot(self) -> tuple[int, bytes]:
        assert self.snapshot is not None
        return self.snapshot

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        sequence = after + 1
        while sequence in self.records:
            yield sequence, self.records[sequence]
            sequence += 1
        assert not any(later > sequence for later in self.records), "a gap in the journal"

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self.snapshot = (sequence, data)
        for old in [number for number in self.records if number <= sequence]:
            del self.records[old]

    def read_note(self, name: str) -> str:
        return ""

    def write_note(self, name: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedWriter:
    """Implements `JournalWriter` for one life of the server."""

    def __init__(self, archive: SimulatedArchive, fates: Fates, life: int) -> None:
        self._archive = archive
        self._fates = fates
        self._rng = fates.rng(f"writer {life}")
        self.is_dead = False
        self.claim = archive.claim(Holder(str(life)))

    async def renew(self, sequence: int) -> None:
        await asyncio.sleep(self._fates.delay_s(self._rng))
        if self.is_dead:
            await asyncio.Event().wait()
        self._check_owner()

    def has_room(self) -> bool:
        return True

    async def append(self, sequence: int, data: bytes) -> None:
        await asyncio.sleep(self._fates.delay_s(self._rng))
        if self.is_dead:
            await asyncio.Event().wait()
        self._check_owner()
        if self._fails():
            raise JournalUnavailableError("the simulated journal is away")
        self._archive.records[sequence] = data
        await asyncio.sleep(self._fates.delay_s(self._rng))
        if self.is_dead:
            await asyncio.Event().wait()
        if self._fails():
            raise JournalUnavailableError("the simulated journal's answer was lost")

    async def begin_again(self, sequence: int, snapshot: bytes) -> None:
        self._check_owner()
        self._archive.records.clear()
        self._archive.snapshot = (sequence, snapshot)

    async def trim(self, up_to: int) -> bool:
        return False

    async def close(self) -> None:
        pass

    def _fails(self) -> bool:
        return self._fates.happens(self._rng, self._fates.plan.journal_error_probability)

    def _check_owner(self) -> None:
        owner = self._archive.owner
        if owner is not None and owner.epoch > self.claim.epoch:
            raise JournalTakenError("another server writes the simulated journal")
        if owner != self.claim:
            raise JournalLostError("the simulated journal is older than it was")
