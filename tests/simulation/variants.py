"""Planted bugs: each is a server, a journal or a store that is wrong in one way, which a restart, a
cancel, a second server or a copy that comes back brings out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from breadbox.model.types import PayloadReference
from breadbox.stores.base import Custody
from breadbox_server.admission.lost_payloads import LostPayloads
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.ids import BufferName, ChunkId, PayloadId
from breadbox_server.core.model.inputs import Input, Payload, ReleaseLease, UpdatePriorities
from breadbox_server.core.rules.reading import ReadSpec
from breadbox_server.core.state.chunks import Chunk
from breadbox_server.driver import Driver
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.journal.storage.claims import Claim
from breadbox_server.journal.storage.interface import (
    NO_PAYLOADS,
    JournalLostError,
    JournalTakenError,
)
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.journal.turns import Turns
from breadbox_server.reading.reads import ReadBody, ReadResult, Reads
from simulation.faults import World
from simulation.server import Variant
from simulation.storage import SimulatedJournal, SimulatedStore, SimulatedWriter


class _ForgetfulJournal(TurnJournal):
    async def append(
        self,
        entries: Sequence[tuple[float, Any]],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> bool:
        kept = [each for each in entries if not isinstance(each[1], ReleaseLease)]
        return await super().append(kept, payloads)


class SkipsAnEntry(Variant):
    """Releases are not written down."""

    name = "skips-an-entry"

    def make_journal(self, writer: SimulatedWriter, sequence: int, chain: int) -> TurnJournal:
        return _ForgetfulJournal(writer, sequence, chain)


class _HastyTurns(Turns):
    def when_settled(self, effect: Callable[[], None]) -> None:
        effect()

    async def settled(self) -> None:
        return


class AcknowledgesEarly(Variant):
    """Effects do not wait for the commit."""

    name = "acknowledges-early"

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.turns.__class__ = _HastyTurns
        return driver


class _GreedyCore(DurableCore):
    def _give_back(self, outcome: Any) -> None:
        """Forgotten."""


class KeepsUndelivered(Variant):
    """A grant whose caller has gone is not given back."""

    name = "keeps-undelivered"

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.core.__class__ = _GreedyCore
        return driver


class _TrustingJournal(SimulatedJournal):
    def append(self, claim: Claim, sequence: int, data: bytes) -> None:
        self.check_ours(claim)
        if self.newest != sequence:
            super().append(claim, sequence, data)


class RecoversBeforeClaiming(Variant):
    """A server reads its journal, then claims it; and a turn of the same number is a repeat."""

    name = "recovers-before-claiming"
    world = World.RIVALS
    journal_type = _TrustingJournal
    claims_first = False


class _OpenJournal(SimulatedJournal):
    def check_ours(self, claim: Claim | None) -> None:
        """Anybody may write."""

    def append(self, claim: Claim, sequence: int, data: bytes) -> None:
        self.contents.turns.setdefault(sequence, (data, claim.epoch))


class DoesNotFenceJournal(Variant):
    """Whoever has claimed a journal goes on writing it, beside those who claimed it later."""

    name = "does-not-fence-journal"
    world = World.RIVALS
    journal_type = _OpenJournal


class _OpenStore(SimulatedStore):
    def check(self, custody: Custody | None, *, is_alone: bool = False) -> None:
        """Anybody may delete."""


class DoesNotFenceDeletions(Variant):
    """A server that was replaced goes on confirming and deleting."""

    name = "does-not-fence-deletions"
    world = World.RIVALS
    store_type = _OpenStore


class _TrustingLosses(LostPayloads):
    async def _drop_lost(self, buffer: BufferName, missing: list[PayloadReference]) -> int:
        return 0


class HandsOutMissingPayloads(Variant):
    """What the store lost is granted all the same."""

    name = "hands-out-missing-payloads"
    world = World.YOUNGER

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.losses.__class__ = _TrustingLosses
        return driver


class _JealousJournal(SimulatedJournal):
    def check_ours(self, claim: Claim | None) -> None:
        try:
            super().check_ours(claim)
        except JournalLostError as error:
            raise JournalTakenError("another server writes the simulated journal") from error


class TakesOlderForTaken(Variant):
    """A journal that came back with an older owner counts as another server's."""

    name = "takes-older-for-taken"
    world = World.YOUNGER
    journal_type = _JealousJournal


class _HastyReads(Reads):
    async def read(self, buffer: BufferName, spec: ReadSpec, **_: Any) -> ReadResult:
        found = self._core.buffers[buffer].read(spec)
        return ReadResult(found, ReadBody([]), None)


class TellsReadersEarly(Variant):
    """Readers are told of chunks that are not durable, whose ids others get after a crash."""

    name = "tells-readers-early"
    world = World.SILENCE

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.reading.__class__ = _HastyReads
        return driver


def _all(payloads: Sequence[Payload]) -> list[Payload]:
    return list(payloads)


def _nobody(chunk: Chunk) -> bool:
    return False


class IgnoresReaders(Variant):
    """What somebody reads is deleted all the same."""

    name = "ignores-readers"

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.reading.leases.hold_back = _all  # type: ignore[method-assign]
        return driver


class RetainsNothing(Variant):
    """Subscriptions are known, and nothing is kept or counted for them."""

    name = "retains-nothing"

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        # Deep inside is where this bug would be.
        buffer = buffers._buffers[DEFAULT_BUFFER]  # noqa: SLF001
        subscriptions = buffer._state.holdings.subscriptions  # noqa: SLF001
        subscriptions.wants = _nobody  # type: ignore[method-assign]
        return Driver(buffers, **parts)


class _SureTurns(Turns):
    async def known(self) -> None:
        await self.settled()


class RefusesFromMemory(Variant):
    """A server that was displaced refuses, for a while, what its successor knows."""

    name = "refuses-from-memory"
    world = World.RIVALS

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.turns.__class__ = _SureTurns
        return driver


class _MistakenCore(DurableCore):
    async def call(self, command: Input[Any]) -> Any:
        if isinstance(command, UpdatePriorities):
            others = [(ChunkId(number + 1), priority) for number, priority in command.priorities]
            return await super().call(replace(command, priorities=tuple(others)))
        return await super().call(command)


class MeetsAnotherChunk(Variant):
    """A priority is set for the chunk that came next."""

    name = "meets-another-chunk"
    world = World.SELECTION

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        driver = Driver(buffers, **parts)
        driver.core.__class__ = _MistakenCore
        return driver


VARIANTS: dict[str, type[Variant]] = {
    kind.name: kind
    for kind in (
        Variant,
        SkipsAnEntry,
        AcknowledgesEarly,
        KeepsUndelivered,
        RecoversBeforeClaiming,
        DoesNotFenceJournal,
        DoesNotFenceDeletions,
        HandsOutMissingPayloads,
        TakesOlderForTaken,
        TellsReadersEarly,
        IgnoresReaders,
        RetainsNothing,
        MeetsAnotherChunk,
        RefusesFromMemory,
    )
}
