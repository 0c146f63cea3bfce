"""What the core decided, made durable before it takes effect.

A *turn* gathers what is decided while the last is being written, so that all calls share one write
(group commit). Its effects happen, in order, once it is durable.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Final

from breadbox.model.errors import StoreUnavailableError
from breadbox.shared.outages import OutageLog
from breadbox_server.base.errors import JOURNAL
from breadbox_server.base.gathering import Gathering
from breadbox_server.base.unforeseen import unforeseen_as
from breadbox_server.core.model.entries import Entry
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.storage.claims import ALIVE_S, RENEW_S
from breadbox_server.journal.storage.interface import (
    JournalError,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

RETRY_DELAY_S: Final = 0.2
"""Seconds between attempts while the journal cannot be reached."""
OUTAGE_S: Final = 1.0
"""Seconds without an answer after which journal or store count as away."""
CONTEND_S: Final = 4 * RENEW_S
"""Seconds for a later server to find that its journal came back as an earlier one's, and reclaim
it."""
ENTRIES_MAX: Final = 65_536
"""Entries that may wait while the journal cannot be reached; beyond, new work is refused."""
TURN_PAYLOADS_MAX: Final = 1024
"""Payloads that are written with one turn,"""
TURN_PAYLOAD_BYTES_MAX: Final = 2**20
"""and bytes of them: Redis does nothing else meanwhile."""


@dataclass(slots=True, eq=False)
class _Turn:
    entries: list[tuple[float, Entry]] = field(default_factory=list)
    payloads: dict[PayloadId, bytes] = field(default_factory=dict)
    payload_bytes: int = 0
    effects: list[Callable[[], None]] = field(default_factory=list)
    durable: asyncio.Event = field(default_factory=asyncio.Event)
    began_at: float = field(default_factory=perf_counter)
    is_gathered: bool = False
    """True if no more is to be waited for: what it has was gathered before it was decided."""


class Turns:
    """Put decisions through a journal. For the loop's thread only.

    `journal` None: they take effect immediately. `on_lost` gives the core's state and instant when
    the journal was lost; `on_settled` is called when a turn's effects have happened.
    """

    def __init__(
        self,
        journal: TurnJournal | None,
        *,
        metrics: Metrics,
        on_lost: Callable[[], tuple[tuple[BufferSnapshot, ...], float]],
        on_settled: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._metrics = metrics
        self._on_lost = on_lost
        self._on_settled = on_settled
        self._open = _Turn()
        self._committing: _Turn | None = None
        self._committing_since: float | None = None
        self._wake = asyncio.Event()
        self._gathering = Gathering()
        self._outage = OutageLog(log, "writing the journal")
        """The outage of turns and heartbeats: a server with nothing to write reports one, too."""
        self._is_lost = False
        """Whether the journal was found lost while nothing was being written."""
        self._call = asyncio.Lock()
        self._ours_at: float | None = None
        """When the journal was last asked and then certainly ours, on the loop's clock. None if not
        since the claim, minus infinity if not since it was lost."""
        self._certain_at: float | None = None
        """When it was last so, or this server began to lead, on the loop's clock; else None."""
        self._found_ours = asyncio.Event()
        self._doubted = asyncio.Event()
        """Set when a caller needs the journal's owner before the next heartbeat."""
        self._waited_since: float | None = None
        self._effects: list[Callable[[], None]] = []
        """Effects of no turn, which wait for the next heartbeat."""
        self._incarnation: str | None = None
        """Incarnation of the store that the journal is in, or None if not asked for yet."""
        self._contested_until: float | None = None
        """Until when another server may still say that the journal is its own."""
        self.has_payload_room = True
        """Whether there was room for the latest payloads; True once they had it elsewhere."""

    @property
    def is_journalled(self) -> bool:
        """Whether there is a journal."""
        return self._journal is not None

    def hold(self) -> str:
        """Return why no fragments may be admitted, or "" if the journal has room."""
        return "" if self._journal is None else self._journal.hold()

    def check_room(self) -> None:
        """Refuse new work while the journal has not kept up for long."""
        if len(self._open.entries) >= ENTRIES_MAX:
            raise StoreUnavailableError("the journal cannot be reached")

    def add(self, entries: list[tuple[float, Entry]]) -> None:
        """Take entries into the turn that is open."""
        if not entries:
            return
        if not self._open.entries:
            self._open.began_at = perf_counter()
        self._open.entries += entries
        self._gathering.arrived()
        self._wake.set()

    def hurry(self) -> None:
        """Have what was decided so far written without waiting for more to go with it."""
        self._open.is_gathered = bool(self._open.entries)

    def can_carry(self, payload_count: int, size_bytes: int) -> bool:
        """Whether so many payloads may be written with the turn that is open."""
        return (
            self._journal is not None
            and self._journal.carries_payloads
            and self.has_payload_room
            and len(self._open.payloads) + payload_count <= TURN_PAYLOADS_MAX
            and self._open.payload_bytes + size_bytes <= TURN_PAYLOAD_BYTES_MAX
        )

    def carry(self, payload_id: PayloadId, body: bytes) -> None:
        """Have a payload written with the turn that is open, which has the entry that names it."""
        self._open.payloads[payload_id] = body
        self._open.payload_bytes += len(body)

    def carries(self, payload_id: PayloadId) -> bool:
        """Whether a payload is on its way into the store with a turn."""
        return payload_id in self._open.payloads or (
            self._committing is not None and payload_id in self._committing.payloads
        )

    def when_settled(self, effect: Callable[[], None]) -> None:
        """Call an effect once everything decided so far is durable; see `settled` for claims."""
        turn = self._pending()
        if turn is not None:
            turn.effects.append(effect)
        elif self._may_be_replaced(asyncio.get_running_loop().time()):
            self._effects.append(effect)
        else:
            effect()

    async def settled(self) -> None:
        """Return once everything decided so far is durable, perhaps immediately.

        Not before others respect this server's claim: a server that was stopped, and replaced
        meanwhile, would report what is outdated.
        """
        turn = self._pending()
        if turn is not None:
            await turn.durable.wait()
        await self.ours()

    async def settled_or_away(self) -> None:
        """Wait as `settled`, but no longer than until an outage would be noticed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self.away_s >= OUTAGE_S else OUTAGE_S):
                await self.settled()

    async def ours(self) -> None:
        """Return once others have to respect this server's claim; at once where they do already."""
        while self._may_be_replaced(asyncio.get_running_loop().time()):
            await self._look()

    async def _look(self) -> None:
        """Return when the journal has named its owner; until then it counts as owing an answer."""
        if self._waited_since is None:
            self._waited_since = asyncio.get_running_loop().time()
        await self._found_ours.wait()

    async def known(self) -> None:
        """Wait as `settled`, and until the journal has named its owner since the call began.

        A refusal may rest on what this server does not know: one started with `--take-over`, which
        has not waited for this claim's expiry, may have granted a lease. So the journal is asked
        for its owner, once for all callers waiting, unless a turn written since has asked.
        """
        since = asyncio.get_running_loop().time()
        await self.settled()
        while self._journal is not None and (self._ours_at is None or self._ours_at < since):
            self._doubted.set()
            await self._look()

    def _may_be_replaced(self, now: float) -> bool:
        return self._ours_at is not None and now - self._ours_at >= ALIVE_S

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Wrap a call of the journal that ends well only where the journal says it is ours.

        That is certain where no other server may have claimed it since it was last so.
        """
        async with self._call:
            asked_at = asyncio.get_running_loop().time()
            with unforeseen_as(JournalUnavailableError, (JournalError,), "a call of the journal"):
                yield
            if not self._may_be_replaced(asked_at):
                self._be_certain(asked_at)

    def _be_certain(self, asked_at: float) -> None:
        self._ours_at = self._certain_at = asked_at
        self._waited_since = None
        self._wake_waiting()
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    def _wake_waiting(self) -> None:
        self._found_ours.set()
        self._found_ours = asyncio.Event()

    async def _renew(self, journal: TurnJournal) -> None:
        """Send a heartbeat, after which the journal's owner is certain.

        Not if another server may have claimed it in a store that was restarted: it may have come
        back from before that claim. Then this server shows itself, and gives the other time to do
        so with a later epoch.
        """
        async with self._asking():
            asked_at = asyncio.get_running_loop().time()
            incarnation = await journal.renew()
            is_another = incarnation != (self._incarnation or incarnation)
            self._incarnation = incarnation
            if not self._may_be_replaced(asked_at):
                self._contested_until = None
                return
            if is_another:
                self._contested_until = asked_at + CONTEND_S
            if self._contested_until is None or asked_at >= self._contested_until:
                self._contested_until = None
                self._be_certain(asked_at)

    @property
    def lag_s(self) -> float:
        """Seconds for which the oldest decision has waited to become durable; 0: none waits."""
        oldest = self._committing or (self._open if self._open.entries else None)
        return 0.0 if oldest is None else perf_counter() - oldest.began_at

    @property
    def refusal(self) -> str:
        """What the journal's store says instead of writing, or empty if it writes or is away."""
        error = self._outage.failing()
        return error.answer if isinstance(error, JournalUnavailableError) else ""

    @property
    def away_s(self) -> float:
        """Return the seconds for which the journal has owed a caller or heartbeat an answer."""
        since = [each for each in (self._committing_since, self._waited_since) if each is not None]
        if self._certain_at is not None and self.doubtful_s >= ALIVE_S:
            since.append(self._certain_at)
        return asyncio.get_running_loop().time() - min(since) if since else 0.0

    async def run(self) -> None:
        """Make one turn after the other durable, for ever."""
        if self._journal is None:
            return
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._open.entries or self._is_lost:
                if not (self._open.is_gathered or self._is_lost):
                    await self._gathering.wait()
                await self._commit(self._journal)

    def lose(self, error: JournalError) -> None:
        """Begin the journal again from memory: what is in it now could not be read back."""
        log.error("%s: beginning it again from memory", error)
        self._metrics.journal_begun_again.inc()
        self._is_lost = True
        self._ours_at = -inf
        self._wake.set()
        self._wake_waiting()

    async def keep_claim(self) -> None:
        """Send heartbeats, for ever: a server with nothing to write must learn of its end too."""
        if self._journal is None:
            return
        while True:
            self._doubted.clear()
            try:
                if not self._is_lost:
                    await self._renew(self._journal)
            except JournalTakenError as error:
                # Immediately: waiting callers may keep this server from its end for a while.
                log.error("%s: this one ends", error)  # noqa: TRY400 - expected
                raise
            except JournalLostError as error:
                self.lose(error)
            except JournalUnavailableError as error:
                self._fail(error)
                await asyncio.sleep(RENEW_S)
                continue
            if self._committing is None:
                self._outage.succeeded()
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._doubted.wait()

    async def watch_claim(self, report: Callable[[bool], None]) -> None:
        """Report when the claim is no longer certain, and when it is again.

        Others may claim after `ALIVE_S`. Two looks in a row must agree: a loop that was held up
        finds at the second what was answered meanwhile.
        """
        if self._journal is None:
            return
        self._certain_at = asyncio.get_running_loop().time()
        is_certain, doubt_count = True, 0
        while True:
            await asyncio.sleep(RENEW_S)
            doubt_count = doubt_count + 1 if self.doubtful_s >= ALIVE_S else 0
            if doubt_count > 1 if is_certain else not doubt_count:
                is_certain = not is_certain
                report(is_certain)

    @property
    def doubtful_s(self) -> float:
        """Seconds since it was last certain that the journal is this server's."""
        since = self._certain_at
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    async def _commit(self, journal: TurnJournal) -> None:
        turn, self._open = self._open, _Turn()
        self._gathering.was_shared = len(turn.entries) > 1 and not turn.is_gathered
        self._committing = turn
        self._committing_since = asyncio.get_running_loop().time()
        while True:
            try:
                if self._is_lost:
                    await self._begin_again(journal, turn)
                else:
                    async with self._asking():
                        had_room = await journal.append(turn.entries, turn.payloads)
                    if turn.payloads:
                        self.has_payload_room = had_room
                if await self._is_settled():
                    break
            except JournalLostError as error:
                self.lose(error)
            except JournalUnavailableError as error:
                self._fail(error)
                await asyncio.sleep(RETRY_DELAY_S)
        self._outage.succeeded()
        self._committing = self._committing_since = None
        self._metrics.journal_seconds.observe(perf_counter() - turn.began_at)
        self._metrics.journal_entries.inc(len(turn.entries))
        turn.durable.set()
        for effect in turn.effects:
            effect()
        self._on_settled()

    def _fail(self, error: JournalUnavailableError) -> None:
        self._outage.failed(error)
        if error.answer:
            self._metrics.count_refusal(JOURNAL)

    async def _is_settled(self) -> bool:
        while not self._is_lost and self._may_be_replaced(asyncio.get_running_loop().time()):
            await self._found_ours.wait()
        return not self._is_lost

    async def _begin_again(self, journal: TurnJournal, turn: _Turn) -> None:
        """Write down the core as it is now, which settles this turn and the one behind it."""
        buffers, now = self._on_lost()
        later, self._open = self._open, _Turn()
        turn.payloads |= later.payloads
        # In this order: what was decided first takes effect first.
        turn.effects += later.effects
        turn.effects.append(later.durable.set)
        while True:
            try:
                async with self._asking():
                    await journal.begin_again(buffers, now, turn.payloads)
                break
            except JournalUnavailableError as error:
                self._fail(error)
                await asyncio.sleep(RETRY_DELAY_S)
        self._is_lost = False

    def _pending(self) -> _Turn | None:
        if self._open.entries:
            return self._open
        return self._committing
