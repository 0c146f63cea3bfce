"""The core behind the journal: what it decides takes effect once that is durable.

Only holders of a `DurableCore` touch the core, from the loop's thread, and every input runs to its
end without an `await`: there is no lock. A turn's effects (replies, grants, deletions) happen once
it is durable, immediately without a journal.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.errors import AppendsFullError, QuotaExceededError, QuotaFullError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.errors import DomainError, DrainingError, WaitersFullError
from breadbox_server.core.model.events import Event
from breadbox_server.core.model.ids import BufferName, CallerId
from breadbox_server.core.model.inputs import Answer, Input, ModelState
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.turns import Journal, Turns
from breadbox_server.metrics.metrics import Metrics

TOLD_AT_ONCE: Final = (
    AppendsFullError,
    DrainingError,
    QuotaExceededError,
    QuotaFullError,
    WaitersFullError,
)
"""Refusals that rest on nothing but what this server has room for, and that it ends."""


class DurableCore:
    """A `BufferSet` with its journal and its timer. Not thread-safe: for the loop's thread only.

    `on_events` is called with decisions before they are durable: effects belong into
    `turns.when_settled`. `on_pumped` follows each `pump`. journal None: decisions take effect
    immediately.
    """

    def __init__(
        self,
        buffers: BufferSet,
        *,
        clock: Clock,
        metrics: Metrics,
        journal: Journal | None,
        on_events: Callable[[Sequence[Event]], None],
        on_pumped: Callable[[], None],
    ) -> None:
        self.buffers = buffers
        """The core, to be read; inputs go through `apply`, `apply_now` or `decide`."""
        self.clock = clock
        self._metrics = metrics
        self._on_events = on_events
        self._on_pumped = on_pumped
        self._timer: TimerHandle | None = None
        self._timer_at: float | None = None
        self._is_draining = False
        self.undurable_models = 0
        self.turns = Turns(journal, metrics=metrics, on_lost=self._snapshot, on_settled=self.pump)

    async def apply(self, command: Input[Answer]) -> Answer:
        """Give the core one input; return its answer once durable. A cancel leaves it applied."""
        self.turns.check_room()
        async with self.durable_refusals():
            answer = self.apply_now(command)
        await self.turns.settled()
        return answer

    def apply_now(self, command: Input[Answer]) -> Answer:
        """Give the core one input and carry out, or queue, what comes of it."""
        try:
            return self.decide(command)
        finally:
            self.pump()

    def decide(self, command: Input[Answer]) -> Answer:
        """Give the core one input of several; `pump` after the last is the caller's to call."""
        return self.buffers.apply(command, now=self.clock.now())

    @asynccontextmanager
    async def durable_refusals(self) -> AsyncIterator[None]:
        """Delay refusals raised inside until their cause is durable, but for `TOLD_AT_ONCE`.

        Else a caller might learn what a crash takes back, or another server decided otherwise.
        """
        try:
            yield
        except TOLD_AT_ONCE:
            raise
        except DomainError:
            await self.turns.known()
            raise

    def describe(self, buffer: BufferName) -> BufferDescription:
        """Return limits, gauges and counters of a buffer; see `BufferSet.describe`."""
        return self.buffers.describe(buffer, now=self.clock.now())

    def call_up(self) -> Iterator[CallerId]:
        """Call up the appends that there is room for; see `BufferSet.call_up`."""
        return self.buffers.call_up(now=self.clock.now())

    async def durable_model(self, buffer: BufferName) -> ModelState:
        """Return the model once it is durable; this waits only right after a change."""
        async with self.durable_refusals():
            state = self.buffers[buffer].model
        if self.undurable_models:
            await self.turns.settled()
        return state

    def when_settled(self, effect: Callable[[], None]) -> None:
        """Call an effect once everything decided so far is durable; see `Turns.when_settled`."""
        self.turns.when_settled(effect)

    def remaining_s(self, expires_at: float) -> float:
        """Return the seconds from now to an instant of the core, at least 0."""
        return max(0.0, expires_at - self.clock.now())

    def check_serving(self) -> None:
        """Raise DrainingError if the server takes no new work."""
        if self._is_draining:
            raise DrainingError

    def drain(self) -> None:
        """Refuse new fetches and fragments; `pump` is the caller's to call. Idempotent."""
        self._is_draining = True
        self.buffers.drain(now=self.clock.now())

    def pump(self) -> None:
        """Take what the core decided, have it made durable and carried out, and arm the timer."""
        while True:
            # Entries before events: an effect must wait for the entries that it follows from.
            entries = self.buffers.take_entries()
            if self.turns.is_journalled:
                self.turns.add(entries)
            events = self.buffers.take_events()
            if not events:
                break
            self._metrics.observe(events)
            self._on_events(events)
        self._on_pumped()
        self._rearm_timer()

    def _snapshot(self) -> tuple[tuple[BufferSnapshot, ...], float]:
        """Return the core's state, and its instant.

        What came due in a mere look is taken into the turn that this snapshot replaces: nothing in
        it may stand in a later turn.
        """
        self.pump()
        return self.buffers.snapshot(), self.clock.now()

    def _rearm_timer(self) -> None:
        timer_at = self.buffers.next_timer()
        if timer_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = timer_at
        self._timer = None if timer_at is None else self.clock.call_at(timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        self.buffers.handle_timer(now=self.clock.now())
        self.pump()
