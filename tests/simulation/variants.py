"""Planted bugs: each is a server that is wrong in one way that a restart or a cancel brings out."""

from collections.abc import Callable, Sequence
from typing import Any

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.inputs import ReleaseLease
from breadbox_server.driver import Driver
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.turns import Turns
from simulation.server import Variant
from simulation.storage import SimulatedWriter


class _ForgetfulJournal(TurnJournal):
    async def append(self, entries: Sequence[tuple[float, Any]]) -> None:
        kept = [each for each in entries if not isinstance(each[1], ReleaseLease)]
        await super().append(kept)


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


class _GreedyDriver(Driver):
    def _give_back(self, outcome: Any) -> None:
        """Forgotten."""


class KeepsUndelivered(Variant):
    """A grant whose caller has gone is not given back."""

    name = "keeps-undelivered"

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        return _GreedyDriver(buffers, **parts)


VARIANTS: dict[str, type[Variant]] = {
    kind.name: kind for kind in (Variant, SkipsAnEntry, AcknowledgesEarly, KeepsUndelivered)
}
