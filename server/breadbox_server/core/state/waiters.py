"""Fetches that cannot be met yet, in order of arrival (B8).

Invariants:

W1  A waiter has at least one caller; it leaves with its last one and leaves no trace.
W2  Waiters stand in order of their first caller's arrival; only the head is ever granted.
W3  A caller belongs to one waiter and has one deadline.
"""

from collections import OrderedDict
from collections.abc import Iterable

from breadbox_server.core.model.ids import CallerId, RequestId
from breadbox_server.core.model.lazy_heap import LazyHeap

RETRIES_MAX = 64
"""Callers that a waiter may have beyond one per rank; a client that sends more is broken."""


class Caller:
    """A caller that waits for the outcome: a rank, or a retry of one."""

    __slots__ = ("asked_at", "caller_id", "deadline_at", "lease_s", "rank")

    def __init__(
        self,
        caller_id: CallerId,
        *,
        rank: int,
        lease_s: float | None,
        asked_at: float,
        deadline_at: float,
    ) -> None:
        self.caller_id = caller_id
        self.rank = rank
        self.lease_s = lease_s
        """Life of its lease, or None for the buffer's `lease_s`."""
        self.asked_at = asked_at
        self.deadline_at = deadline_at


class Waiter:
    """One request, with all its callers."""

    __slots__ = ("callers", "fragment_count", "request_id", "world_size")

    def __init__(self, request_id: RequestId, fragment_count: int, world_size: int) -> None:
        self.request_id = request_id
        self.fragment_count = fragment_count
        """For all ranks together."""
        self.world_size = world_size
        self.callers: dict[CallerId, Caller] = {}
        """In order of arrival."""

    @property
    def is_crowded(self) -> bool:
        """Whether it takes no further caller."""
        return len(self.callers) >= self.world_size + RETRIES_MAX


class WaiterQueue:
    """The waiters of a buffer."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[RequestId, Waiter] = OrderedDict()
        self._request_of: dict[CallerId, RequestId] = {}
        self._by_deadline: LazyHeap[tuple[float, CallerId]] = LazyHeap(self._is_waiting)

    def __len__(self) -> int:
        """Count the waiters: requests, not callers."""
        return len(self._waiters)

    def find(self, request_id: RequestId) -> Waiter | None:
        """Give the waiter of a request, if it waits."""
        return self._waiters.get(request_id)

    def head(self) -> Waiter | None:
        """Return the first request in the queue, or None if none waits."""
        return next(iter(self._waiters.values())) if self._waiters else None

    def add(self, waiter: Waiter, caller: Caller) -> None:
        """Let a caller wait with its request, which goes to the end if it did not wait yet."""
        self._waiters.setdefault(waiter.request_id, waiter)
        waiter.callers[caller.caller_id] = caller
        self._request_of[caller.caller_id] = waiter.request_id
        self._by_deadline.push((caller.deadline_at, caller.caller_id))

    def __contains__(self, caller_id: CallerId) -> bool:
        """Whether a caller waits."""
        return caller_id in self._request_of

    def waiter_of(self, caller_id: CallerId) -> Waiter:
        """Give the waiter of a caller that waits."""
        return self._waiters[self._request_of[caller_id]]

    def remove_caller(self, caller_id: CallerId) -> Caller:
        """Let a caller go that waits, and its waiter if it was the last (W1)."""
        waiter = self.waiter_of(caller_id)
        del self._request_of[caller_id]
        caller = waiter.callers.pop(caller_id)
        if not waiter.callers:
            del self._waiters[waiter.request_id]
        self._by_deadline.compact(len(self._request_of))
        return caller

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter with all its callers, which the waiter still lists."""
        del self._waiters[waiter.request_id]
        for caller_id in waiter.callers:
            del self._request_of[caller_id]
        self._by_deadline.compact(len(self._request_of))

    def first_deadline(self) -> tuple[float, CallerId] | None:
        """Return the earliest deadline and its caller, of several the first to have come."""
        return self._by_deadline.first()

    def waiters(self) -> Iterable[Waiter]:
        """List the waiters in order of arrival."""
        return list(self._waiters.values())

    def check_invariants(self) -> None:
        """Assert W1 to W3; O(callers)."""
        callers: dict[CallerId, RequestId] = {}
        for request_id, waiter in self._waiters.items():
            assert waiter.request_id == request_id, "W2: key"
            assert waiter.callers, "W1: a waiter without callers"
            for caller_id in waiter.callers:
                assert caller_id not in callers, "W3: a caller with two waiters"
                callers[caller_id] = request_id
        assert callers == self._request_of, "W3: callers"
        deadlines = self._by_deadline.first_many(len(callers) + 1)
        assert sorted(caller_id for _, caller_id in deadlines) == sorted(callers), "W3: deadlines"

    def _is_waiting(self, entry: tuple[float, CallerId]) -> bool:
        return entry[1] in self._request_of
