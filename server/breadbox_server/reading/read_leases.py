"""Leases of readers that consume nothing: payloads that they load stay for a while (B16).

Not in the core, since a read decides nothing: only a deletion is put off. Not durable: after a
restart a reader may find a payload gone, and reads on from its cursor.

R1 A payload is pinned while a live lease has it.
R2 What is held back was let go by its buffer, is pinned, and counts as leaving, so that it is
   neither taken for an orphan nor confirmed.
R3 Live leases are at most `leases_max`, bytes held back at most `kept_bytes_max`: at the limit the
   oldest lease ends of the holder that has the most.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.core.model.config import check_duration
from breadbox_server.core.model.errors import LeaseNotFoundError
from breadbox_server.core.model.ids import BufferName, LeaseId, PayloadId
from breadbox_server.core.model.inputs import Payload
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading.uses import Uses

LEASE_ID_BYTES: Final = 16
RELEASED_REMEMBERED_MAX: Final = 4096
"""Released leases remembered, for a caller that did not hear the answer and releases again."""


class ReadLease(NamedTuple):
    """A lease as its reader gets it."""

    lease_id: LeaseId
    expires_at: float
    lease_s: float
    buffer: BufferName
    holder: str
    payload_ids: tuple[PayloadId, ...]
    is_look: bool


@dataclass(slots=True)
class _Pinned:
    buffer: BufferName
    leases: Counter[str] = field(default_factory=Counter)
    """Live leases that have it, by holder."""
    kept: Payload | None = None
    """The payload, once its buffer let it go."""


class ReadLeases:
    """Payloads that readers are loading, and deletions put off for them."""

    def __init__(
        self,
        clock: Clock,
        *,
        metrics: Metrics,
        delete: Callable[[Sequence[Payload]], None],
        leases_max: int,
        kept_bytes_max: int,
        uses: Uses,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._delete = delete
        self._uses = uses
        self._leases_max = leases_max
        self._kept_bytes_max = kept_bytes_max
        self._leases: dict[LeaseId, ReadLease] = {}
        self._leases_of: dict[str, OrderedDict[LeaseId, None]] = {}
        """Leases by holder, the least recently taken or renewed first."""
        self._kept_bytes_of: Counter[str] = Counter()
        """Bytes held back, by holder; what two hold counts for both."""
        self._released: OrderedDict[LeaseId, tuple[BufferName, str]] = OrderedDict()
        """Buffer and holder of released leases."""
        self._by_expiry: LazyHeap[tuple[float, LeaseId]] = LazyHeap(self._is_in_order)
        self._pinned: dict[PayloadId, _Pinned] = {}
        """Each is of one buffer: no other may take it before it is deleted."""
        self.kept_bytes = 0
        """Bytes whose deletion is put off."""
        self._timer: TimerHandle | None = None
        self._timer_at = inf
        self.on_end: Callable[[ReadLease], None] = lambda lease: None
        """Called with each lease that has ended."""
        metrics.read_leases.set_function(lambda: float(len(self._leases)))
        metrics.read_kept_bytes.set_function(lambda: float(self.kept_bytes))

    def __len__(self) -> int:
        return len(self._leases)

    def knows(self, buffer: BufferName, lease_id: LeaseId, holder: str | None = None) -> bool:
        """Return True for a live or recent lease of a reader (or one holder) of this buffer."""
        lease = self._leases.get(lease_id)
        found = self._released.get(lease_id) if lease is None else (lease.buffer, lease.holder)
        return found is not None and found[0] == buffer and holder in (None, found[1])

    def pins(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Return True if a reader of a buffer holds a payload."""
        pinned = self._pinned.get(payload_id)
        return pinned is not None and pinned.buffer == buffer

    def is_held_by(self, holder: str, payload_id: PayloadId) -> bool:
        """Return True if a lease of a holder has a payload."""
        pinned = self._pinned.get(payload_id)
        return pinned is not None and pinned.leases[holder] > 0

    def take(
        self,
        buffer: BufferName,
        payloads: Iterable[Payload],
        lease_s: float,
        holder: str,
        *,
        is_look: bool = False,
    ) -> ReadLease:
        """Lease payloads that are read; `holder`: see `Caller.holder`. A look uses no buffer."""
        while len(self._leases) >= self._leases_max:
            self._end_oldest_of_largest(
                Counter({of: len(has) for of, has in self._leases_of.items()})
            )
        lease_id = LeaseId(secrets.token_hex(LEASE_ID_BYTES))
        payload_ids = tuple([each.payload_id for each in payloads])
        expires_at = self._clock.now() + lease_s
        lease = ReadLease(lease_id, expires_at, lease_s, buffer, holder, payload_ids, is_look)
        for payload_id in payload_ids:
            pinned = self._pinned.get(payload_id)
            if pinned is None:
                pinned = self._pinned[payload_id] = _Pinned(buffer)
            pinned.leases[holder] += 1
        if not is_look:
            self._uses.begin(buffer)
        self._enter(lease)
        return lease

    def renew(self, lease_id: LeaseId, lease_s: float | None) -> float:
        """Extend a lease; return its new expiry. Raises LeaseNotFoundError."""
        if lease_s is not None:
            check_duration("lease_s", lease_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFoundError(lease_id)
        expires_at = self._clock.now() + (lease.lease_s if lease_s is None else lease_s)
        self._enter(lease._replace(expires_at=expires_at))
        return expires_at

    def release(self, lease_id: LeaseId) -> None:
        """End a lease. Idempotent."""
        if lease_id not in self._leases:
            return
        lease = self._leases[lease_id]
        self._released[lease_id] = (lease.buffer, lease.holder)
        self._end(lease_id, "released")
        if len(self._released) > RELEASED_REMEMBERED_MAX:
            self._released.popitem(last=False)

    def hold_back(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Keep the payloads that a reader holds, and return the others."""
        if not self._pinned:
            return list(payloads)
        left = []
        for payload in payloads:
            pinned = self._pinned.get(payload.payload_id)
            if pinned is None:
                left.append(payload)
            elif pinned.kept is None:
                pinned.kept = payload
                self.kept_bytes += payload.size_bytes
                for holder in pinned.leases:
                    self._kept_bytes_of[holder] += payload.size_bytes
        while self.kept_bytes > self._kept_bytes_max:
            self._end_oldest_of_largest(self._kept_bytes_of)
        return left

    def end_of(self, buffer: BufferName) -> None:
        """End all leases of a deleted buffer."""
        for lease in [each for each in self._leases.values() if each.buffer == buffer]:
            self._end(lease.lease_id, "ended")

    def end_all(self) -> None:
        """End all leases, and hold nothing back."""
        for lease_id in list(self._leases):
            self._end(lease_id, "ended")

    def expire(self) -> None:
        """End the leases that are over."""
        now = self._clock.now()
        while (entry := self._by_expiry.first()) is not None and entry[0] <= now:
            self._end(entry[1], "expired")
        self._rearm()

    def _enter(self, lease: ReadLease) -> None:
        self._leases[lease.lease_id] = lease
        of_holder = self._leases_of.setdefault(lease.holder, OrderedDict())
        of_holder[lease.lease_id] = None
        of_holder.move_to_end(lease.lease_id)
        self._by_expiry.push((lease.expires_at, lease.lease_id))
        self._by_expiry.compact(len(self._leases))
        self._rearm()

    def _end_oldest_of_largest(self, shares: Counter[str]) -> None:
        ((largest, _),) = shares.most_common(1)
        self._end(next(iter(self._leases_of[largest])), "crowded")

    def _end(self, lease_id: LeaseId, end: str) -> None:
        lease = self._leases.pop(lease_id)
        holder = lease.holder
        del self._leases_of[holder][lease_id]
        if not self._leases_of[holder]:
            del self._leases_of[holder]
        self._by_expiry.compact(len(self._leases))
        self._metrics.read_leases_ended.labels(end).inc()
        if not lease.is_look:
            self._uses.end(lease.buffer)
        due = []
        for payload_id in lease.payload_ids:
            pinned = self._pinned[payload_id]
            pinned.leases[holder] -= 1
            if pinned.leases[holder]:
                continue
            del pinned.leases[holder]
            if pinned.kept is not None:
                self._kept_bytes_of[holder] -= pinned.kept.size_bytes
            if pinned.leases:
                continue
            del self._pinned[payload_id]
            if pinned.kept is not None:
                self.kept_bytes -= pinned.kept.size_bytes
                due.append(pinned.kept)
        if not self._kept_bytes_of[holder]:
            del self._kept_bytes_of[holder]
        if due:
            self._delete(due)
        self.on_end(lease)

    def _rearm(self) -> None:
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
