"""The rules of tickets, and of fetches that wait for what has one, in the naive model's lists."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from breadbox_server.core.model.config import BufferConfig, FullPolicy, StalePolicy
from breadbox_server.core.model.errors import (
    DomainError,
    InvalidArgumentError,
    TicketNotFoundError,
    WaitersFullError,
)
from breadbox_server.core.model.ids import CallerId
from breadbox_server.core.model.inputs import TakeTickets
from core.naive_model import NaiveBuffer, NaiveCaller, NaiveGrant, NaiveLease, NaiveWaiter


@dataclass
class NaiveTicket:
    group: str
    request_id: str
    version: int
    lease_s: float
    expires_at: float
    reported_count: int = 1
    given_back: set[int] = field(default_factory=set)


class NaiveTickets(NaiveBuffer):
    """Chunks of workers, with tickets that their holders end."""

    def __init__(self, config: BufferConfig) -> None:
        super().__init__(config)
        self.tickets: list[NaiveTicket] = []
        self.ticket_waiters: list[NaiveWaiter] = []
        self.given_count = 0
        self.tickets_ended = Counter[str]()
        self.delivered_at: list[tuple[str, str, int]] = []
        """Session, request and version of each use that was granted, and not given back."""
        self.granted_at: dict[str, int] = {}

    @property
    def under_way(self) -> list[tuple[int, str]]:
        """Version and name of each ticket."""
        return [(each.version, each.group) for each in self.tickets]

    @property
    def delivered_now(self) -> int:
        here = (self.session, self.version)
        return sum(each[::2] == here for each in self.delivered_at)

    def waited_for(self, count: int) -> str | None:
        """The group that comes too late if a fetch takes so many chunks now.

        Each that is under way and older than what is taken gets the next place of a learner that
        takes so many for each version.
        """
        config = self.config
        if config.stale is not StalePolicy.WAIT or any(each.waits for each in self.line):
            return None
        is_full = len(self.held) >= config.capacity_chunks
        if is_full and config.full_policy is FullPolicy.BLOCK:
            return None
        taken = sorted(self.held, key=lambda chunk: (chunk.version, chunk.number))[:count]
        per_version = config.groups_per_version
        places = [self.version] * max(0, per_version - self.delivered_now - count)
        for later in range(1, config.staleness_max + 1):
            places += [self.version + later] * per_version
        for version, name in sorted(self.under_way):
            if self.oldest_fresh <= version < taken[-1].version:
                place = places.pop(0) if places else math.inf
                if place > version + config.staleness_max:
                    return name
        return None

    def find_ticket(self, name: str) -> NaiveTicket | None:
        return next((each for each in self.tickets if each.group == name), None)

    @property
    def free_tickets(self) -> int:
        if not self.session:
            return 0
        taken = len(self.under_way) + len(self.held) + self.delivered_now
        versions = self.config.lead_versions + 1
        return versions * self.config.groups_per_version - taken

    def expect_tickets(self, take: TakeTickets) -> type[DomainError] | str:
        if not self.config.groups_per_version:
            return InvalidArgumentError
        if any(each.request_id == take.request_id for each in self.tickets):
            return "repeated"
        is_known = any(each.request_id == take.request_id for each in self.ticket_waiters)
        if not is_known and len(self.ticket_waiters) >= self.config.waiters_max:
            return WaitersFullError
        return "asks"

    def wait_for_ticket(self, take: TakeTickets, caller_id: CallerId) -> None:
        known = [each for each in self.ticket_waiters if each.request_id == take.request_id]
        if not known:
            known = [NaiveWaiter(take.request_id, take.ticket_count, 1)]
            self.ticket_waiters += known
        known[0].callers.append(NaiveCaller(caller_id, 0, take.deadline_at, take.lease_s))

    def give_tickets(self, now: float, series: str) -> list[str]:
        """Give tickets to the head of the queue; returns the names of their groups."""
        head = self.ticket_waiters.pop(0)
        names: list[str] = []
        number = self.given_count
        count = min(self.free_tickets, head.fragment_count)
        while len(names) < count:
            number += 1
            name = f"{series}-{number}"
            if name not in self.workers and self.find_ticket(name) is None:
                names.append(name)
        self.given_count += count
        lease_s = max(each.lease_s or 0.0 for each in head.callers)
        shared = head.request_id, self.version, lease_s, now + lease_s, len(head.callers)
        self.tickets += [NaiveTicket(name, *shared) for name in names]
        return names

    def remove_ticket_caller(self, caller_id: CallerId) -> NaiveCaller | None:
        for waiter in self.ticket_waiters:
            for caller in waiter.callers:
                if caller.caller_id == caller_id:
                    waiter.callers.remove(caller)
                    if not waiter.callers:
                        self.ticket_waiters.remove(waiter)
                    return caller
        return None

    def end_ticket(self, name: str, reason: str) -> None:
        ticket = self.find_ticket(name)
        if ticket is not None:
            self.tickets.remove(ticket)
            self.tickets_ended[reason] += 1

    def renew_ticket(
        self, name: str, lease_s: float | None, now: float
    ) -> type[DomainError] | None:
        ticket = self.find_ticket(name)
        if ticket is None:
            return TicketNotFoundError
        ticket.expires_at = now + (lease_s or ticket.lease_s)
        return None

    def give_back_ticket(
        self, name: str, member: int | None, now: float
    ) -> type[DomainError] | None:
        del now
        if member is not None:
            return InvalidArgumentError
        if self.find_ticket(name) is None:
            return TicketNotFoundError
        self.end_ticket(name, "given_back")
        return None

    def expire_ticket(self, ticket: NaiveTicket) -> None:
        self.end_ticket(ticket.group, "expired")

    def grant(self, numbers: Sequence[int], lease_ids: Sequence[str], now: float) -> NaiveGrant:
        grant = super().grant(numbers, lease_ids, now)
        self.granted_at[grant.request_id] = self.version
        use = (self.session, grant.request_id, self.version)
        self.delivered_at += [use] * len(numbers)
        return grant

    def end_lease(self, grant: NaiveGrant, lease: NaiveLease, end: str, gives_back: bool) -> None:
        use = (grant.session_id, grant.request_id, self.granted_at[grant.request_id])
        for _ in lease.chunks if gives_back else ():
            self.delivered_at.remove(use)
        super().end_lease(grant, lease, end, gives_back)

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self.tickets

    def lose_callers(self) -> None:
        super().lose_callers()
        self.ticket_waiters.clear()
        for ticket in self.tickets:
            ticket.reported_count = 1

    def end(self, session: str) -> None:
        if self.session and session == self.session:
            self.tickets_ended["session_ended"] += len(self.tickets)
            self.tickets.clear()
        super().end(session)

    def discard_silent(self, now: float) -> None:
        for ticket in list(self.tickets):
            if ticket.expires_at <= now:
                self.expire_ticket(ticket)
        super().discard_silent(now)
