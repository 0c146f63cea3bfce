"""The core behind the journal: what it decides takes effect once that is durable.

Only a `DurableCore` gives the core inputs, from the loop's thread, and every input runs to its end
without an `await`: there is no lock. A turn's effects (replies, grants, deletions) happen once it
is durable, immediately without a journal.

    call        give one input
    carry_out   look, and give inputs, in one step
    wait        give a request; its outcome comes later, as an event
    look        look, and give nothing
    decide      give one of several inputs; after the last the caller calls `pump`
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar, overload

from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.errors import AppendsFullError, QuotaExceededError, QuotaFullError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.errors import (
    BufferNotFoundError,
    DomainError,
    DrainingError,
    WaitersFullError,
)
from breadbox_server.core.model.events import (
    Event,
    FetchGranted,
    RequestRefused,
    TicketsTaken,
    TicketWaitElapsed,
    WaitElapsed,
)
from breadbox_server.core.model.ids import BufferName, CallerId
from breadbox_server.core.model.inputs import (
    Answer,
    CancelRequest,
    Fetch,
    Input,
    ModelState,
    TakeTickets,
    UndeliveredGrant,
    UndeliveredTicket,
)
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.journal.turns import Turns
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

Found = TypeVar("Found")

Outcome = FetchGranted | WaitElapsed | TicketsTaken | TicketWaitElapsed

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
        journal: TurnJournal | None,
        on_events: Callable[[Sequence[Event]], None],
        on_pumped: Callable[[], None],
    ) -> None:
        self.buffers = buffers
        """The core, to be read; inputs go through the methods."""
        self.clock = clock
        self._metrics = metrics
        self._on_events = on_events
        self._on_pumped = on_pumped
        self._timer: TimerHandle | None = None
        self._timer_at: float | None = None
        self.undurable_models = 0
        self._callers: dict[CallerId, asyncio.Future[Any]] = {}
        self.turns = Turns(journal, metrics=metrics, on_lost=self._snapshot, on_settled=self.pump)

    async def call(self, command: Input[Answer]) -> Answer:
        """Give the core one input; return its answer once durable. A cancel leaves it applied."""
        return await self.carry_out(partial(self.apply_now, command))

    async def carry_out(self, step: Callable[[], Found]) -> Found:
        """Run a step that looks at the core and gives it inputs; return its result once durable.

        The step runs to its end without an `await`. A cancel leaves what it gave applied.
        """
        self.turns.check_room()
        found = await self.look(step)
        await self.turns.settled()
        return found

    async def look(self, question: Callable[[], Found]) -> Found:
        """Return what a question finds in the core, durable or not.

        What it raises is raised once its cause is durable: see `durable_refusals`.
        """
        async with self.durable_refusals():
            return question()

    @overload
    async def wait(self, command: Fetch) -> FetchGranted | WaitElapsed: ...

    @overload
    async def wait(self, command: TakeTickets) -> TicketsTaken | TicketWaitElapsed: ...

    async def wait(self, command: Fetch | TakeTickets) -> Outcome:
        """Give the core a request that may wait; return its outcome once durable.

        A cancel gives a grant, or tickets, of its own tick back.
        """
        self.turns.check_room()
        async with self.durable_refusals():
            try:
                caller_id = self.decide(command)
            except BaseException:
                self.pump()
                raise
        future: asyncio.Future[Outcome]
        future = self._callers[caller_id] = asyncio.get_running_loop().create_future()
        self.pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._decide_if_it_lives(CancelRequest(command.buffer, caller_id))
            elif future.exception() is None:
                # The outcome landed in the tick that cancelled us: nobody else will hold it.
                self._give_back(future.result())
            self.pump()
            raise
        finally:
            del self._callers[caller_id]

    @property
    def waiting_count(self) -> int:
        """Number of requests in progress: those that wait, and those not yet resumed."""
        return len(self._callers)

    def take_back(self, granted: FetchGranted) -> None:
        """Undo a grant whose reply is not sent, because its caller went away."""
        self._give_back(granted)
        self.pump()

    def wake(self, event: Outcome | RequestRefused) -> None:
        """Wake the request that waits for an outcome, which is durable."""
        future = self._callers.get(event.caller_id)
        if future is None or future.done():
            self._give_back(event)
        elif isinstance(event, RequestRefused):
            future.set_exception(event.error)
        else:
            future.set_result(event)

    def _give_back(self, outcome: Outcome | RequestRefused) -> None:
        if isinstance(outcome, FetchGranted):
            self._decide_if_it_lives(UndeliveredGrant(outcome.buffer, outcome.lease_id))
        elif isinstance(outcome, TicketsTaken):
            for group in outcome.groups:
                self._decide_if_it_lives(UndeliveredTicket(outcome.buffer, group))

    def _decide_if_it_lives(
        self, command: CancelRequest | UndeliveredGrant | UndeliveredTicket
    ) -> None:
        try:
            self.decide(command)
        except BufferNotFoundError:
            log.debug("a caller's end was reported after that of what it had: %s", command)

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
        state = await self.look(lambda: self.buffers[buffer].model)
        if self.undurable_models:
            await self.turns.settled()
        return state

    def remaining_s(self, expires_at: float) -> float:
        """Return the seconds from now to an instant of the core, at least 0."""
        return max(0.0, expires_at - self.clock.now())

    def check_serving(self) -> None:
        """Raise DrainingError if the server takes no new work."""
        if self.buffers.is_draining:
            raise DrainingError

    def drain(self) -> None:
        """Refuse new fetches and fragments; `pump` is the caller's to call. Idempotent."""
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
