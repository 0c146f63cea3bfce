"""Leases of those who read without consuming: payloads that they load stay for a while (B16).

Kept here and not in the core, since a read decides nothing: chunks leave the buffer as if nobody
read, and only the deletion of what a reader is about to load is put off. Not durable: after a
restart a reader may find a payload gone, and reads on from its cursor.

Invariants:

R1  A payload is pinned while a lease that lives has it.
R2  What is held back was let go by its buffer, is pinned, and stands among the payloads that are on
    their way out, so that nobody takes it for an orphan or confirms it.
R3  Leases that live are at most `leases_max`, and bytes held back at most `kept_bytes_max`: at the
    limit those end first that would end first.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

from breadbox_server.clock import Clock, TimerHandle
from breadbox_server.core.config import check_duration
from breadbox_server.core.errors import LeaseNotFoundError
from breadbox_server.core.ids import BufferName, LeaseId, PayloadId
from breadbox_server.core.inputs import Payload
from breadbox_server.core.lazy_heap import LazyHeap
from breadbox_server.metrics import Metrics

LEASE_ID_BYTES: Final = 16
RELEASED_REMEMBERED_MAX: Final = 4096
"""Leases that were released, and may be released again by who did not hear the answer."""


class ReadLease(NamedTuple):
    """What a reader was told of its lease."""

    lease_id: LeaseId
    expires_at: float
    lease_s: float
    buffer: BufferName
    payload_ids: tuple[PayloadId, ...]


class ReadLeases:
    """Which payloads readers are loading, and what had to wait for them with its deletion.

    Args:
        clock: Ends leases.
        metrics: Shows how many there are, and what they hold back.
        delete: Takes payloads whose deletion was put off, and is due.
        leases_max: Leases that live at a time.
        kept_bytes_max: Bytes held back.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        metrics: Metrics,
        delete: Callable[[Sequence[Payload]], None],
        leases_max: int,
        kept_bytes_max: int,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._delete = delete
        self._leases_max = leases_max
        self._kept_bytes_max = kept_bytes_max
        self._leases: dict[LeaseId, ReadLease] = {}
        self._released: OrderedDict[LeaseId, None] = OrderedDict()
        self._by_expiry: LazyHeap[tuple[float, LeaseId]] = LazyHeap(self._is_in_order)
        self._pins: dict[PayloadId, int] = {}
        """Leases that live, by payload."""
        self._buffers: dict[PayloadId, BufferName] = {}
        """Of each pinned payload; it has one, since no other may take it before it is deleted."""
        self._kept: dict[PayloadId, Payload] = {}
        """What was let go and is pinned."""
        self._kept_bytes = 0
        self._timer: TimerHandle | None = None
        self._timer_at = inf
        metrics.read_leases.set_function(lambda: float(len(self._leases)))
        metrics.read_kept_bytes.set_function(lambda: float(self._kept_bytes))

    def __len__(self) -> int:
        """Count the leases that live."""
        return len(self._leases)

    @property
    def kept_bytes(self) -> int:
        """Bytes whose deletion is put off."""
        return self._kept_bytes

    def __contains__(self, lease_id: LeaseId) -> bool:
        """Whether this is, or was a short while ago, a lease of a reader."""
        return lease_id in self._leases or lease_id in self._released

    def pins(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Whether a reader of a buffer holds a payload."""
        return self._buffers.get(payload_id) == buffer

    def take(self, buffer: BufferName, payloads: Iterable[Payload], lease_s: float) -> ReadLease:
        """Begin a lease on payloads that the buffer refers to now."""
        while len(self._leases) >= self._leases_max:
            self._end_first("crowded")
        lease_id = LeaseId(secrets.token_hex(LEASE_ID_BYTES))
        payload_ids = tuple([each.payload_id for each in payloads])
        lease = ReadLease(lease_id, self._clock.now() + lease_s, lease_s, buffer, payload_ids)
        for payload_id in payload_ids:
            self._pins[payload_id] = self._pins.get(payload_id, 0) + 1
            self._buffers[payload_id] = buffer
        self._enter(lease)
        return lease

    def renew(self, lease_id: LeaseId, lease_s: float | None) -> float:
        """Let a lease live on, and give its new expiry.

        Raises:
            InvalidArgumentError: The duration is out of range.
            LeaseNotFoundError: It was released.
        """
        if lease_s is not None:
            check_duration("lease_s", lease_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFoundError(lease_id)
        expires_at = self._clock.now() + (lease.lease_s if lease_s is None else lease_s)
        self._enter(lease._replace(expires_at=expires_at))
        return expires_at

    def release(self, lease_id: LeaseId) -> None:
        """End a lease; nothing happens if it was released before."""
        if lease_id not in self._leases:
            return
        self._end(lease_id, "released")
        self._released[lease_id] = None
        if len(self._released) > RELEASED_REMEMBERED_MAX:
            self._released.popitem(last=False)

    def hold_back(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Keep those payloads that a reader holds, let go as they are; gives the others."""
        if not self._pins:
            return list(payloads)
        left = []
        for payload in payloads:
            if payload.payload_id not in self._pins:
                left.append(payload)
            elif payload.payload_id not in self._kept:
                self._kept[payload.payload_id] = payload
                self._kept_bytes += payload.size_bytes
        while self._kept_bytes > self._kept_bytes_max:
            self._end_first("crowded")
        return left

    def end_of(self, buffer: BufferName) -> None:
        """End all leases of a buffer, which is no more."""
        for lease in [each for each in self._leases.values() if each.buffer == buffer]:
            self._end(lease.lease_id, "ended")

    def end_all(self) -> None:
        """End all leases, and hold nothing back any more."""
        while self._leases:
            self._end_first("ended")

    def expire(self) -> None:
        """End the leases that are over."""
        now = self._clock.now()
        while (entry := self._by_expiry.first()) is not None and entry[0] <= now:
            self._end(entry[1], "expired")
        self._rearm()

    def _enter(self, lease: ReadLease) -> None:
        self._leases[lease.lease_id] = lease
        self._by_expiry.push((lease.expires_at, lease.lease_id))
        self._by_expiry.compact(len(self._leases))
        self._rearm()

    def _end_first(self, end: str) -> None:
        entry = self._by_expiry.first()
        assert entry is not None, "R1: payloads are pinned, and no lease lives"
        self._end(entry[1], end)

    def _end(self, lease_id: LeaseId, end: str) -> None:
        lease = self._leases.pop(lease_id)
        self._by_expiry.compact(len(self._leases))
        self._metrics.read_leases_ended.labels(end).inc()
        due = []
        for payload_id in lease.payload_ids:
            left = self._pins[payload_id] - 1
            if left:
                self._pins[payload_id] = left
                continue
            del self._pins[payload_id], self._buffers[payload_id]
            kept = self._kept.pop(payload_id, None)
            if kept is not None:
                self._kept_bytes -= kept.size_bytes
                due.append(kept)
        if due:
            self._delete(due)

    def _rearm(self) -> None:
        """Have the clock call no later than the first lease ends; a call too early harms nobody."""
        entry = self._by_expiry.first()
        if entry is None or entry[0] >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = entry[0]
        self._timer = self._clock.call_at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        self.expire()

    def _is_in_order(self, entry: tuple[float, LeaseId]) -> bool:
        lease = self._leases.get(entry[1])
        return lease is not None and lease.expires_at == entry[0]
