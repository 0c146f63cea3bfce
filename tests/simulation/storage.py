"""The store and the journal: what outlives a killed server.

Both are modelled as what they hold and the scripts that change it. A script is one method here,
and looks first whether whoever calls it still may, as the real ones do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from breadbox.model.errors import StoreFullError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation, Custody, StoreUsage
from breadbox.stores.disk import KEPT_SHARE
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.storage.claims import ALIVE_S, STARTING_S, Claim, Holder
from breadbox_server.journal.storage.disk_reserve import PART_COUNT, SHARE, Reserve
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    NO_PAYLOADS,
    JournalDamagedError,
    JournalFullError,
    JournalHeldError,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)
from simulation.faults import Fates, Link
from support.custody import KnownJournals

UNANNOUNCED_S = 20.0
"""Life of a payload that nobody confirms."""
DISK_BYTES = 100_000
BLOCK_BYTES = 2_000
PART_BYTES = DISK_BYTES // SHARE // PART_COUNT
SAVED_S = 12.0
"""A payload that came back as it was before it was confirmed, and lives for so long while a server
does, is saved."""


@dataclass(slots=True)
class StoreContents:
    """What a payload store holds."""

    expires_at: dict[str, float] = field(default_factory=dict)
    """Of the unannounced."""
    confirmed: set[str] = field(default_factory=set)
    epochs: dict[str, int] = field(default_factory=dict)
    """Latest of the journals that left word."""

    def copy(self) -> StoreContents:
        return StoreContents(dict(self.expires_at), set(self.confirmed), dict(self.epochs))


class SimulatedStore:
    """Payload ids, and whether each is confirmed."""

    def __init__(self, fates: Fates) -> None:
        self._rng = fates.rng("store")
        self._contents = StoreContents()
        self.journals = KnownJournals()
        self.lost: dict[str, float] = {}
        """What it forgot by itself, and when."""
        self.deleted: list[str] = []
        """What it was told to delete, in order."""
        self.starts = 1
        self._returned: set[str] = set()
        """What came back as it was before it was confirmed."""
        self._newest_epoch = 0
        """Of whoever took the store; known to the simulation alone."""
        self.is_needed: Callable[[str], bool] = lambda _: True
        """Whether the server that took it last still needs a payload."""
        self.has_room: Callable[[], bool] = lambda: True
        """Whether one more payload finds room."""

    @property
    def confirmed(self) -> set[str]:
        return self._contents.confirmed

    @property
    def payload_count(self) -> int:
        """Payloads that take room; what has expired was swept."""
        now = asyncio.get_running_loop().time()
        alive = sum(expires_at > now for expires_at in self._contents.expires_at.values())
        return alive + len(self.confirmed)

    @property
    def is_announcing(self) -> bool:
        """Whether a payload was written, and has not been confirmed yet."""
        return bool(self._contents.expires_at)

    def put(self, payload_id: str) -> None:
        now = asyncio.get_running_loop().time()
        self._contents.expires_at[payload_id] = now + UNANNOUNCED_S

    def has(self, payload_id: str) -> bool:
        now = asyncio.get_running_loop().time()
        held = self._contents
        return payload_id in held.confirmed or held.expires_at.get(payload_id, now) > now

    def is_accounted_for(self, payload_id: str) -> bool:
        """Whether a payload is there, or was lost by the store itself."""
        return self.has(payload_id) or payload_id in self.lost

    def lose_some(self, count: int) -> None:
        """Forget payloads: in a restart, which can be told, or just so."""
        self.starts += self._rng.random() < 0.5
        chosen = self._rng.sample(sorted(self.confirmed), min(count, len(self.confirmed)))
        for payload_id in chosen:
            self.confirmed.discard(payload_id)
        self.note_lost(chosen)

    def note_lost(self, payload_ids: Iterable[str]) -> None:
        """Take note that payloads are gone that nobody who may deleted."""
        now = asyncio.get_running_loop().time()
        for payload_id in payload_ids:
            self.lost.setdefault(payload_id, now)

    def copy(self) -> StoreContents:
        """What a copy made now holds."""
        contents = self._contents.copy()
        contents.epochs = dict(self.journals.epochs)
        return contents

    def restore(self, copy: StoreContents) -> None:
        """Come back from a copy, in a restart."""
        before = self._contents
        self._contents = copy.copy()
        self.journals.epochs = dict(copy.epochs)
        self.starts += 1
        # Also what had been deleted meanwhile: a journal that came back, too, may know it.
        had = {*before.confirmed, *before.expires_at, *copy.expires_at}
        self._returned = set(copy.expires_at)
        self.note_lost(had - copy.confirmed - self._returned)
        self.note_unsaved()

    def note_unsaved(self) -> None:
        """Take note of what came back unannounced, and is about to expire before it is saved.

        To be called when the store came back, and whenever a server starts: only one that lives
        for so long can confirm it once more.
        """
        saved_until = asyncio.get_running_loop().time() + SAVED_S
        left = {each: self._contents.expires_at.get(each, 0.0) for each in self._returned}
        self.note_lost(each for each in left.keys() - self.confirmed if left[each] <= saved_until)

    # --- scripts -----------------------------------------------------------------------------

    def take(self, custody: Custody | None) -> None:
        self.check(custody)
        if custody is not None:
            self._newest_epoch = max(self._newest_epoch, custody.epoch)

    def check(self, custody: Custody | None, *, is_alone: bool = False) -> None:
        """Refuse what is not this custody's to do."""
        self.journals.check(custody, is_alone=is_alone)

    def confirm(self, custody: Custody | None, payload_ids: Sequence[str]) -> list[Confirmation]:
        self.check(custody)
        answers = [self.has(payload_id) for payload_id in payload_ids]
        for payload_id, is_there in zip(payload_ids, answers, strict=True):
            if is_there:
                self.lost.pop(payload_id, None)
                self._contents.expires_at.pop(payload_id, None)
                self.confirmed.add(payload_id)
        return [Confirmation(is_there) for is_there in answers]

    def keep(self, custody: Custody | None, payload_ids: Sequence[str]) -> None:
        self.check(custody)
        for payload_id in payload_ids:
            if not self.has_room():
                raise StoreFullError("the simulated disk is full")
            self._keep(payload_id)

    def keep_with_turn(self, claim: Claim, payload_ids: Iterable[str]) -> None:
        """As one Redis does that journal and payloads are in, for whoever may write the journal."""
        self.journals.epochs[claim.journal] = max(
            self.journals.epochs.get(claim.journal, 0), claim.epoch
        )
        for payload_id in payload_ids:
            self._keep(payload_id)

    def _keep(self, payload_id: str) -> None:
        self.lost.pop(payload_id, None)
        self.confirmed.add(payload_id)

    def delete(
        self, custody: Custody | None, payload_ids: Sequence[str], *, is_alone: bool
    ) -> None:
        self.check(custody, is_alone=is_alone)
        epoch = self._newest_epoch if custody is None else custody.epoch
        for payload_id in payload_ids:
            is_there = self._contents.expires_at.pop(payload_id, None) is not None
            is_there = payload_id in self.confirmed or is_there
            self.confirmed.discard(payload_id)
            self.deleted.append(payload_id)
            is_stolen = is_there and epoch < self._newest_epoch and self.is_needed(payload_id)
            assert not is_stolen, "a replaced server deleted payloads"


class SimulatedCustodian:
    """Implements `PayloadCustodian` for one life of the server."""

    def __init__(self, store: SimulatedStore, fates: Fates, life: int) -> None:
        self._store = store
        probability = fates.plan.store_error_probability
        name = f"custodian {life}"
        self.link = Link(fates, "store", name, probability, StoreUnavailableError)
        self._custody: Custody | None = None

    def _sent(self) -> Custody | None:
        """The custody as it is when a command is sent."""
        return None if self._custody is None else replace(self._custody)

    async def take(self, custody: Custody) -> None:
        self._custody = custody
        await self.link.ask(partial(self._store.take, self._sent()))

    async def journals(self) -> set[str]:
        return await self.link.ask(lambda: set(self._store.journals.epochs))

    async def forget_other_journals(self) -> None:
        await self.link.ask(partial(self._store.journals.forget_others, self._sent()))

    async def ping(self) -> None:
        await self.link.ask(lambda: None)

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        ids = [reference.payload_id for reference in references]
        return await self.link.ask(partial(self._store.confirm, self._sent(), ids))

    async def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        ids = [reference.payload_id for reference, _ in payloads]
        await self.link.ask(partial(self._store.keep, self._sent(), ids))

    async def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        raise StoreUnavailableError("not simulated")

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        await self._delete([reference.payload_id for reference in references], is_alone=False)

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        await self._delete(list(payload_ids), is_alone=True)

    async def _delete(self, ids: Sequence[str], *, is_alone: bool) -> None:
        delete = partial(self._store.delete, self._sent(), ids, is_alone=is_alone)
        await self.link.ask(delete)

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        return await self.link.ask(
            lambda: [self._store.has(reference.payload_id) for reference in references]
        )

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        there = await self.present(references)
        return [each for each, is_there in zip(references, there, strict=True) if not is_there]

    async def confirmed(self) -> AsyncIterator[str]:
        """List in two portions, between which the world goes on."""
        ids = await self.link.ask(lambda: sorted(self._store.confirmed))
        for payload_id in ids[: len(ids) // 2]:
            yield payload_id
        later = ids[len(ids) // 2 :]
        there = await self.link.ask(lambda: set(later) & self._store.confirmed)
        for payload_id in later:
            if payload_id in there:
                yield payload_id

    async def sweep_unannounced(self) -> int:
        await self.link.ask(lambda: None)
        return 0

    async def incarnation(self) -> str:
        return await self.link.ask(lambda: str(self._store.starts))

    async def concerns(self) -> tuple[str, ...]:
        return ()

    async def usage(self) -> StoreUsage:
        raise StoreUnavailableError("not simulated")

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class JournalContents:
    """What the place of a journal holds."""

    owner: Claim | None = None
    """Of the server that may write."""
    alive: tuple[Holder, float] | None = None
    """Its sign of life, and until when that counts."""
    snapshot: tuple[int, bytes] | None = None
    turns: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """Data and epoch by sequence, in order; the newest stays in any case."""
    notes: dict[str, str] = field(default_factory=dict)

    def copy(self) -> JournalContents:
        return replace(self, turns=dict(self.turns), notes=dict(self.notes))


class SimulatedJournal:
    """A place for a journal, and its scripts.

    Args:
        now: Seconds.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self.contents = JournalContents()
        self.starts = 1
        self.newest_claim: Claim | None = None
        """Of all that were ever made; known to the simulation alone."""
        self.is_younger = False
        """Whether what was written since a copy was made is gone, and nobody wrote since it came
        back; known to the simulation alone."""

    @property
    def size_bytes(self) -> int:
        """What snapshot and turns take."""
        held = self.contents
        turns_bytes = sum(len(data) for data, _ in held.turns.values())
        return turns_bytes + (0 if held.snapshot is None else len(held.snapshot[1]))

    @property
    def newest(self) -> int | None:
        """Sequence of the newest turn."""
        return next(reversed(self.contents.turns), None)

    def restore(self, copy: JournalContents) -> None:
        """Come back from a copy."""
        self.is_younger = True
        self.starts += 1
        self.contents = copy.copy()

    # --- scripts -----------------------------------------------------------------------------

    def claim(self, holder: Holder, displaced: str) -> Claim:
        held, now = self.contents, self._now()
        alive = held.alive
        if alive is not None and alive[1] > now and alive[0].token not in (displaced, holder.token):
            raise JournalHeldError(alive[0], alive[1] - now)
        owner = held.owner
        claim = Claim(
            "simulated" if owner is None else owner.journal,
            self._epoch_after(0 if owner is None else owner.epoch),
            holder,
        )
        held.owner = self.newest_claim = claim
        held.alive = (holder, now + STARTING_S)
        return claim

    def _epoch_after(self, epoch: int) -> int:
        """Beyond the last one, also of a journal that came back without it: clocks go on."""
        return max(round(self._now() * 1000), epoch + 1)

    def claim_again(self, claim: Claim) -> Claim:
        held = self.contents
        owner = held.owner
        epoch = 0 if owner is None else owner.epoch
        if owner is not None and epoch >= claim.epoch and owner.holder != claim.holder:
            raise JournalTakenError("another server took the simulated journal")
        again = claim.raised(max(epoch, claim.epoch) + 1)
        held.owner = again
        if self.newest_claim is None or again.epoch > self.newest_claim.epoch:
            self.newest_claim = again
        held.alive = (claim.holder, self._now() + ALIVE_S)
        return again

    def check_ours(self, claim: Claim | None) -> None:
        """Begins scripts that write."""
        owner = self.contents.owner
        if owner == claim:
            return
        if owner is not None and (claim is None or owner.epoch >= claim.epoch):
            raise JournalTakenError("another server writes the simulated journal")
        raise JournalLostError("the simulated journal is older than it was")

    def append(self, claim: Claim, sequence: int, data: bytes) -> None:
        self.check_ours(claim)
        turns = self.contents.turns
        newest = self.newest
        if newest is None:
            raise JournalLostError("the simulated journal is empty")
        if newest == sequence:
            if turns[sequence] != (data, claim.epoch):
                raise JournalLostError("the simulated journal has another turn")
        elif newest != sequence - 1:
            raise JournalLostError("the simulated journal lacks turns")
        else:
            turns[sequence] = (data, claim.epoch)
        self.is_younger = False  # Whoever wrote this knows all that came before.

    def renew(self, claim: Claim, sequence: int) -> str:
        self.check_ours(claim)
        held = self.contents
        if held.snapshot is None or self.newest is None or self.newest < sequence:
            raise JournalLostError("the simulated journal lacks turns")
        if next(iter(held.turns)) > held.snapshot[0] + 1:
            raise JournalLostError("the simulated journal lacks turns behind its snapshot")
        held.alive = (claim.holder, self._now() + ALIVE_S)
        self.is_younger = False  # Nothing that its writer knows was lost.
        return str(self.starts)

    def begin(
        self,
        claim: Claim | None,
        sequence: int,
        data: bytes,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make a snapshot all there is."""
        self.check_ours(claim)
        self.contents.snapshot = (sequence, data)
        self.contents.turns = {sequence: (b"", 0 if claim is None else claim.epoch)}
        self.contents.notes.update(notes)
        self.is_younger = False

    def write_snapshot(self, claim: Claim | None, sequence: int, data: bytes) -> None:
        self.check_ours(claim)
        old = self.contents.snapshot
        if old is None or old[0] <= sequence:
            self.contents.snapshot = (sequence, data)

    def note(self, claim: Claim | None, name: str, text: str) -> None:
        self.check_ours(claim)
        self.contents.notes[name] = text

    def trim(self, claim: Claim, up_to: int) -> None:
        self.check_ours(claim)
        held = self.contents
        up_to = min(up_to, 0 if held.snapshot is None else held.snapshot[0])
        for old in [number for number in held.turns if number <= up_to and number != self.newest]:
            del held.turns[old]

    def release(self, claim: Claim) -> None:
        if self.contents.owner == claim:
            self.contents.alive = None


class SimulatedArchive:
    """Implements `JournalArchive`.

    Args:
        journal: Where it is.
        holder: Who claims with it; None: whoever says so.
    """

    shown = "the simulated journal"

    def __init__(self, journal: SimulatedJournal, holder: Holder | None = None) -> None:
        self._journal = journal
        self._holder = holder
        self._owner: Claim | None = None
        """Who had the journal when it was claimed, or first read."""
        self._has_seen_owner = False

    def _seen_owner(self) -> Claim | None:
        if not self._has_seen_owner:
            self._owner, self._has_seen_owner = self._journal.contents.owner, True
        return self._owner

    def identity(self) -> str:
        owner = self._journal.contents.owner
        return "" if owner is None else owner.journal

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        claim = self._journal.claim(self._holder or holder, displaced)
        self._owner, self._has_seen_owner = claim, True
        return claim

    def send_heartbeat(self) -> None:
        """No time passes in a start."""

    def is_begun(self) -> bool:
        return self._journal.contents.snapshot is not None or self._journal.newest is not None

    def begin(self, data: bytes) -> None:
        self._journal.begin(self._seen_owner(), BEGINNING, data)

    def read_snapshot(self) -> tuple[int, bytes]:
        self._seen_owner()
        if self._journal.contents.snapshot is None:
            raise JournalDamagedError(f"{self.shown} has no snapshot; delete it to start empty")
        return self._journal.contents.snapshot

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        expected = after + 1
        for sequence, (data, _) in self._journal.contents.turns.items():
            if sequence < expected:
                continue
            if sequence != expected:
                raise JournalDamagedError(
                    f"{self.shown} lacks turns {expected} to {sequence - 1}; "
                    "delete it to start empty"
                )
            yield sequence, data
            expected += 1

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self._journal.write_snapshot(self._seen_owner(), sequence, data)

    def read_note(self, name: str) -> str:
        return self._journal.contents.notes.get(name, "")

    def write_note(self, name: str, text: str) -> None:
        self._journal.note(self._seen_owner(), name, text)

    def close(self) -> None:
        pass


class SimulatedDisk:
    """One file system for journal and payloads, in bytes; and the reserve beside the journal.

    Args:
        journal: On it.
        store: On it too; each payload takes one block.
    """

    def __init__(self, journal: SimulatedJournal, store: SimulatedStore) -> None:
        self.journal = journal
        self._store = store
        self.parts: set[int] = set()
        """Of the reserve, that are there."""
        self.strangers_bytes = 0

    @property
    def free_bytes(self) -> int:
        used = self.journal.size_bytes + self._store.payload_count * BLOCK_BYTES
        return DISK_BYTES - used - len(self.parts) * PART_BYTES - self.strangers_bytes

    def has_room_for_payload(self) -> bool:
        """Whether a writer of payloads may take more: it leaves some room."""
        return self.free_bytes - BLOCK_BYTES >= DISK_BYTES // KEPT_SHARE


class SimulatedReserve(Reserve):
    """The real rules for giving up and taking room again, on a simulated disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__(Path(), clock=lambda: asyncio.get_running_loop().time())
        self._disk = disk

    def refill(self) -> int:
        for number in range(PART_COUNT):
            is_kept = self._disk.free_bytes - PART_BYTES >= DISK_BYTES // KEPT_SHARE // 2
            if number not in self._disk.parts and is_kept:
                self._disk.parts.add(number)
        return self._count()

    def _parts(self) -> list[Any]:
        return [_Part(self._disk.parts, number) for number in sorted(self._disk.parts)]


@dataclass(frozen=True, slots=True)
class _Part:
    parts: set[int]
    number: int

    def unlink(self) -> None:
        self.parts.remove(self.number)


class SimulatedWriter:
    """Implements `JournalWriter` for one life of the server.

    Args:
        journal: What it writes.
        claim: Under which.
        fates: Draw delays and failures.
        life: Of the server.
        disk: That the journal is on; None: it has all the room it wants.
        store: Where payloads go that are written with turns; None: none are.
    """

    def __init__(
        self,
        journal: SimulatedJournal,
        claim: Claim,
        fates: Fates,
        life: int,
        disk: SimulatedDisk | None = None,
        store: SimulatedStore | None = None,
    ) -> None:
        self._store = store
        self._journal = journal
        self._disk = disk
        self._reserve = None if disk is None else SimulatedReserve(disk)
        if self._reserve is not None:
            self._reserve.refill()
        self.claim = claim
        probability = fates.plan.journal_error_probability
        name = f"writer {life}"
        self.link = Link(fates, "journal", name, probability, JournalUnavailableError)

    def has_room(self) -> bool:
        return self._reserve is None or self._reserve.has_room()

    async def _ask(self, script: Callable[..., Any], *arguments: Any) -> Any:
        return await self.link.ask(partial(script, self.claim, *arguments))

    async def renew(self, sequence: int) -> str:
        incarnation: str = await self._ask(self._journal.renew, sequence)
        return incarnation

    @property
    def carries_payloads(self) -> bool:
        return self._store is not None

    async def append(
        self, sequence: int, data: bytes, payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS
    ) -> bool:
        await self._ask(self._append, sequence, data, list(payloads))
        return True

    def _append(
        self, claim: Claim, sequence: int, data: bytes, payload_ids: Sequence[PayloadId]
    ) -> None:
        def write() -> None:
            if self._disk is not None and self._disk.free_bytes < len(data):
                raise JournalFullError("the simulated disk is full")
            self._journal.append(claim, sequence, data)

        is_repeat = self._journal.newest == sequence
        if self._reserve is None:
            write()
        else:
            self._reserve.with_room(write)
        # Not with a repeat: they may have been deleted since.
        if self._store is not None and payload_ids and not is_repeat:
            self._store.keep_with_turn(claim, payload_ids)

    def compact(self) -> None:
        """Write a snapshot as the compactor does, and trim: where there is room for it."""
        assert self._disk is not None
        assert self._reserve is not None
        disk: SimulatedDisk = self._disk
        reserve: SimulatedReserve = self._reserve

        class Archive(SimulatedArchive):
            def write_snapshot(self, sequence: int, data: bytes) -> None:
                def write() -> None:
                    if disk.free_bytes < len(data):
                        raise JournalFullError("the simulated disk is full")
                    super(Archive, self).write_snapshot(sequence, data)

                reserve.with_room(write, is_snapshot=True)

        with suppress(JournalFullError, JournalTakenError, JournalLostError):
            found = compact(Archive(self._journal))
            self._journal.trim(self.claim, found.sequence)

    async def begin_again(
        self,
        sequence: int,
        snapshot: bytes,
        notes: Mapping[str, str],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> None:
        self.claim = await self._ask(self._journal.claim_again)
        if payloads:
            await self._ask(self._keep, list(payloads))
        await self._ask(self._journal.begin, sequence, snapshot, notes)

    def _keep(self, claim: Claim, payload_ids: Sequence[PayloadId]) -> None:
        assert self._store is not None
        self._journal.check_ours(claim)
        self._store.keep_with_turn(claim, payload_ids)

    async def trim(self, up_to: int) -> bool:
        with suppress(JournalLostError, JournalTakenError):
            await self._ask(self._journal.trim, up_to)
        return False

    async def close(self) -> None:
        await self._ask(self._journal.release)
