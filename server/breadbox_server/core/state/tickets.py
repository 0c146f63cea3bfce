"""Tickets: groups, or chunks of one worker, that are reserved before they are begun (B33).

T1  A ticket ends once: with its group, given back, by expiry, or with its session.
T2  A ticket is in the expiry order if and only if it lives, and at its latest expiry only.
T3  Tickets of a request are known as long as one of them lives.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from breadbox_server.core.model.events import TicketEnd
from breadbox_server.core.model.ids import ModelVersion, RequestId, WorkerId
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.state.grants import Request


@dataclass(slots=True, eq=False)
class Ticket:
    """The right to fill one group or chunk, held by a client under a lease."""

    group: WorkerId
    """Its name, which is that of its group where the buffer makes groups."""
    request_id: RequestId
    holder: str
    model_version: ModelVersion
    """Current version when it was given."""
    lease_s: float
    """Its life from when it was given, and from a renewal that names no other."""
    expires_at: float
    given_back: set[int] = field(default_factory=set)
    """Members that will not come."""
    reported_count: int = 1
    """Callers it was reported to; not part of a snapshot, where it counts as reported once."""


@dataclass(slots=True, eq=False)
class TicketWaiter(Request):
    """A request for tickets."""

    ticket_count: int
    holder: str


class Tickets:
    """The tickets that live; `on_end` is called with how tickets ended, and how many."""

    def __init__(self, on_end: Callable[[TicketEnd, int], None]) -> None:
        self._on_end = on_end
        self.on_change: Callable[[WorkerId], None] = lambda group: None
        """Called with each group that got a ticket, or has none any more, but by `end_all`."""
        self.by_group: dict[WorkerId, Ticket] = {}
        self.unbegun: dict[WorkerId, Ticket] = {}
        """Those of groups without a member yet; where workers make chunks, all."""
        self.by_request: dict[RequestId, list[Ticket]] = {}
        """The tickets of each request that live, in the order in which they were given."""
        self.counts: Counter[str] = Counter()
        """Number of tickets of each holder."""
        self._by_expiry: LazyHeap[tuple[float, WorkerId]] = LazyHeap(self._is_in_order)

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Enter tickets of groups without a member yet."""
        for ticket in tickets:
            self.by_group[ticket.group] = self.unbegun[ticket.group] = ticket
            self.by_request.setdefault(ticket.request_id, []).append(ticket)
            self.counts[ticket.holder] += 1
            self._by_expiry.push((ticket.expires_at, ticket.group))
            self.on_change(ticket.group)

    def renew(self, ticket: Ticket, expires_at: float) -> None:
        """Move the expiry of a ticket, forward or back."""
        ticket.expires_at = expires_at
        self._by_expiry.push((expires_at, ticket.group))
        self._by_expiry.compact(len(self.by_group))

    def end(self, group: WorkerId, end: TicketEnd) -> None:
        """End the ticket of a group, if it has one."""
        ticket = self.by_group.pop(group, None)
        if ticket is None:
            return
        self.unbegun.pop(group, None)
        alike = self.by_request[ticket.request_id]
        alike.remove(ticket)
        if not alike:
            del self.by_request[ticket.request_id]
        self.counts[ticket.holder] -= 1
        if not self.counts[ticket.holder]:
            del self.counts[ticket.holder]
        self._by_expiry.compact(len(self.by_group))
        self.on_change(group)
        self._on_end(end, 1)

    def end_all(self, end: TicketEnd) -> None:
        """End every ticket."""
        count = len(self.by_group)
        for each in (self.by_group, self.unbegun, self.by_request, self.counts):
            each.clear()
        self._by_expiry.replace(())
        if count:
            self._on_end(end, count)

    def first_expiry(self) -> Ticket | None:
        """Return the ticket that expires first, or None if there is none."""
        entry = self._by_expiry.first()
        return None if entry is None else self.by_group[entry[1]]

    def check_invariants(self) -> None:
        """Assert T2 and T3; O(tickets)."""
        expected = sorted((each.expires_at, name) for name, each in self.by_group.items())
        assert self._by_expiry.first_many(len(expected) + 1) == expected, "T2: expiry order"
        alike = [each.group for tickets in self.by_request.values() for each in tickets]
        assert sorted(alike) == sorted(self.by_group), "T3: requests"
        assert self.counts == Counter(each.holder for each in self.by_group.values()), "T1: holders"

    def _is_in_order(self, entry: tuple[float, WorkerId]) -> bool:
        ticket = self.by_group.get(entry[1])
        return ticket is not None and ticket.expires_at == entry[0]
