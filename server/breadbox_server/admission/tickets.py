"""Producers' requests for tickets that wait: each gets its tickets once these are durable."""

import asyncio
from contextlib import suppress

from breadbox_server.access.authorization import Caller
from breadbox_server.base.errors import PermissionDeniedError, QuotaFullError
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.events import TicketsRefused, TicketsTaken, TicketWaitElapsed
from breadbox_server.core.model.ids import BufferName, CallerId, RequestId
from breadbox_server.core.model.inputs import CancelFetch, GiveBackTicket, TakeTickets
from breadbox_server.core.rules.tickets import GROUP_PREFIX
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.limits import TICKETS_HELD_MAX

Outcome = TicketsTaken | TicketWaitElapsed


class Tickets:
    """Have the core give tickets, and wake the requests that wait for them."""

    def __init__(self, core: DurableCore) -> None:
        self._core = core
        self._callers: dict[CallerId, asyncio.Future[Outcome]] = {}

    async def take(
        self,
        buffer: BufferName,
        request_id: RequestId,
        ticket_count: int,
        *,
        wait_s: float,
        lease_s: float,
        caller: Caller,
    ) -> Outcome:
        """Wait `wait_s` at most for tickets. A cancel gives those of its own tick back."""
        core, holder = self._core, caller.holder(buffer)
        if not caller.may_append_as(GROUP_PREFIX):
            patterns = ", ".join(caller.workers or ())
            raise PermissionDeniedError(
                f"token {caller.name!r}",
                f"append to groups {GROUP_PREFIX}*, as tickets name them; it is for {patterns}",
            )
        core.turns.check_room()
        core.check_serving()
        async with core.durable_refusals():
            held_count = core.buffers[buffer].tickets_of(holder, request_id)
            if held_count + ticket_count > TICKETS_HELD_MAX:
                raise QuotaFullError(holder, "tickets", TICKETS_HELD_MAX)
            command = TakeTickets(
                buffer,
                request_id=request_id,
                ticket_count=ticket_count,
                deadline_at=core.clock.now() + wait_s,
                lease_s=lease_s,
                holder=holder,
            )
            try:
                caller_id = core.decide(command)
            except BaseException:
                core.pump()
                raise
        future: asyncio.Future[Outcome]
        future = self._callers[caller_id] = asyncio.get_running_loop().create_future()
        core.pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                with suppress(DomainError):  # The buffer was deleted.
                    core.decide(CancelFetch(buffer, caller_id))
            elif future.exception() is None:
                self._give_back(future.result())
            core.pump()
            raise
        finally:
            del self._callers[caller_id]

    def wake(self, event: TicketsRefused | Outcome) -> None:
        """Wake the request that waits for an outcome, which is durable."""
        future = self._callers.get(event.caller_id)
        if future is None or future.done():
            self._give_back(event)
        elif isinstance(event, TicketsRefused):
            future.set_exception(event.error)
        else:
            future.set_result(event)

    def _give_back(self, outcome: TicketsRefused | Outcome) -> None:
        """Give back tickets that their caller, which has gone, never received."""
        if isinstance(outcome, TicketsTaken):
            for group in outcome.groups:
                with suppress(DomainError):  # It has ended.
                    self._core.decide(GiveBackTicket(outcome.buffer, group))
