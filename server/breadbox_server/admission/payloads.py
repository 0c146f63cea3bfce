"""The payload store as admission sees it: deletions (B13), recent inline payloads, its health."""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from time import perf_counter
from typing import Final

from breadbox.model.errors import StoreError
from breadbox.model.presets import STORE_FULL_ADVICE
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import PayloadCustodian, StoreUsage
from breadbox_server.base.clock import Clock
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.model.inputs import Payload
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
SWEEP_PERIOD_S: Final = 60.0
BATCH_PAYLOADS: Final = 256
RETRY_DELAY_S: Final = 0.5
REFUSED_S: Final = 10.0
"""Seconds for which a write that found no room is shown; writers that wait repeat it sooner."""
GATHER_S: Final = 0.05
"""Seconds for which payloads wait for others, to be deleted with them in one round trip."""


async def _no_wait() -> None:
    """Return without waiting."""


class DeletionQueue:
    """Delete payloads off the request path.

    At `limit` payloads `is_full` makes appends refuse fragments until the store has caught up,
    which bounds the queue. A leaving payload must not be confirmed, nor one being confirmed leave:
    it would be lost. It counts as leaving from when that is decided, but goes only once that is
    durable: an older journal would still refer to it.

    `hold_back` returns what may be deleted now; the rest come again. `until_ours` returns once no
    other server can have claimed the payloads.
    """

    def __init__(
        self,
        custodian: PayloadCustodian,
        *,
        metrics: Metrics,
        limit: int,
        hold_back: Callable[[Sequence[Payload]], Sequence[Payload]] = lambda payloads: payloads,
        forget: Callable[[Sequence[PayloadId]], None] = lambda payload_ids: None,
        until_ours: Callable[[], Awaitable[None]] = _no_wait,
    ) -> None:
        self._hold_back = hold_back
        self._forget = forget
        self._custodian = custodian
        self._until_ours = until_ours
        self._metrics = metrics
        self._limit = limit
        self._payloads: deque[Payload] = deque()
        self._leaving: set[PayloadId] = set()
        self._confirming: set[PayloadId] = set()
        self._outage = OutageLog(log, "deleting payloads")
        self._wake = asyncio.Event()
        self._is_due = asyncio.Event()
        """Set when a batch is full, or must not wait for others."""
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.pending_deletions.set_function(lambda: len(self._payloads))

    @property
    def is_full(self) -> bool:
        """True if appends must refuse fragments."""
        return len(self._payloads) >= self._limit

    def __len__(self) -> int:
        return len(self._payloads)

    def announce(self, payloads: Iterable[Payload]) -> None:
        """Note payloads that will be queued once their end is durable."""
        payload_ids = [each.payload_id for each in payloads]
        self._leaving.update(payload_ids)
        self._forget(payload_ids)

    def put(self, payloads: Iterable[Payload]) -> None:
        """Queue payloads for deletion; that nothing refers to them any more must be durable."""
        payloads = list(payloads)
        self.announce(payloads)
        self.queue(payloads)

    def queue(self, payloads: Sequence[Payload]) -> None:
        """Queue announced payloads: a full batch goes immediately, a smaller one by `GATHER_S`."""
        self._payloads.extend(self._hold_back(payloads))
        if self._payloads:
            self._empty.clear()
            self._wake.set()
        if len(self._payloads) >= BATCH_PAYLOADS:
            self._is_due.set()

    def is_leaving(self, payload_id: PayloadId) -> bool:
        """Return True from when a payload's end is decided until it is deleted."""
        return payload_id in self._leaving

    @contextmanager
    def confirming(self, payload_ids: Iterable[PayloadId]) -> Iterator[None]:
        """Keep payloads from being taken for orphans while they are confirmed."""
        payload_ids = list(payload_ids)
        self._confirming.update(payload_ids)
        try:
            yield
        finally:
            self._confirming.difference_update(payload_ids)

    async def delete_orphans(self, payload_ids: Iterable[PayloadId]) -> int:
        """Delete unknown payloads, but those being confirmed or leaving; return how many."""
        payload_ids = [
            each
            for each in payload_ids
            if each not in self._confirming and each not in self._leaving
        ]
        self._leaving.update(payload_ids)
        try:
            await self._until_ours()
            with self._metrics.store_trip("delete"):
                await self._custodian.delete_ids(payload_ids)
        finally:
            self._leaving.difference_update(payload_ids)
        self._metrics.payloads_deleted.inc(len(payload_ids))
        return len(payload_ids)

    async def wait_empty(self) -> None:
        """Return when everything that was queued has been deleted, without gathering more."""
        self._is_due.set()
        await self._empty.wait()

    async def run(self) -> None:
        """Delete what is queued, for ever; retry while the store cannot be reached."""
        while True:
            await self._wake.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._is_due.wait()
            self._wake.clear()
            self._is_due.clear()
            while self._payloads:
                await self._delete_batch()
            self._empty.set()

    async def _delete_batch(self) -> None:
        batch = list(islice(self._payloads, BATCH_PAYLOADS))
        await self._until_ours()
        try:
            with self._metrics.store_trip("delete"):
                await self._custodian.delete(batch)
        except StoreError as error:
            self._outage.failed(error)
            await asyncio.sleep(RETRY_DELAY_S)
            return
        self._outage.succeeded()
        # Only now: a batch whose deletion failed stays at the head, and is tried again whole.
        for _ in batch:
            self._leaving.discard(self._payloads.popleft().payload_id)
        self._metrics.payloads_deleted.inc(len(batch))


class UnownedPayloads:
    """Payloads confirmed for what was then refused: kept for `keep_s`, as they may come again."""

    LIMIT: Final = 65_536
    """At the limit the oldest is deleted early; if sent again it is PAYLOAD_MISSING."""

    def __init__(
        self, deletions: DeletionQueue, *, keep_s: float, is_referenced: Callable[[PayloadId], bool]
    ) -> None:
        self._deletions = deletions
        self._keep_s = keep_s
        self._is_referenced = is_referenced
        # Ordered: the first of a plain one is behind the places of all that left.
        self._payloads: OrderedDict[PayloadId, tuple[float, Payload]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, payload: Payload, now: float) -> None:
        """Keep a payload that nothing refers to for another `keep_s`."""
        self._payloads.pop(payload.payload_id, None)
        self._payloads[payload.payload_id] = (now + self._keep_s, payload)
        if len(self._payloads) > self.LIMIT:
            self._delete_oldest()

    def discard(self, payload_id: PayloadId) -> None:
        """Forget a payload that something refers to now."""
        self._payloads.pop(payload_id, None)

    def delete_overdue(self, now: float) -> None:
        """Delete what was not sent again in time."""
        while self._payloads and next(iter(self._payloads.values()))[0] <= now:
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        payload_id, (_, payload) = self._payloads.popitem(last=False)
        is_leaving = self._deletions.is_leaving(payload_id)
        if not is_leaving and not self._is_referenced(payload_id):
            self._deletions.put([payload])


class RecentPayloads:
    """Copies of the latest inline payloads, up to `bytes_max`: a dying store may lose the last."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bodies: OrderedDict[PayloadId, bytes] = OrderedDict()
        self.size_bytes = 0

    def add(self, payload_id: PayloadId, body: bytes) -> None:
        """Keep a payload, under an id that is not here yet."""
        self._bodies[payload_id] = body
        self.size_bytes += len(body)
        while self.size_bytes > self._bytes_max:
            self.size_bytes -= len(self._bodies.popitem(last=False)[1])

    def get(self, payload_id: PayloadId) -> bytes:
        """Return the payload, or b"" if it is not here."""
        return self._bodies.get(payload_id, b"")

    def forget(self, payload_ids: Iterable[PayloadId]) -> None:
        """Let go of payloads; unknown ones are ignored."""
        if self._bodies:
            for payload_id in payload_ids:
                self.size_bytes -= len(self._bodies.pop(payload_id, b""))


class StoreWatch:
    """Ask the store every second how full it is, and sweep it every minute."""

    def __init__(self, custodian: PayloadCustodian, *, clock: Clock, metrics: Metrics) -> None:
        self._custodian = custodian
        self._clock = clock
        self._metrics = metrics
        self._refused_at, self._words = 0.0, ""
        self._full = OutageLog(log, "storing payloads", now=clock.now)
        metrics.on_store_full = self.refused
        self.usage = StoreUsage(0, 0, 0)
        """How full the store was when it last answered."""
        self._silent_since: float | None = None
        """Time on the loop's clock since when the store owes an answer, or None."""

    def hold(self) -> str:
        """Return why the store takes no more payloads, as of its last answers, or ""."""
        is_refused = (
            self._refused_at > self._metrics.store_written_at
            and self._full.failing(within_s=REFUSED_S) is not None
        )
        refused = f"the payload store has no room for a write: {self._words}" if is_refused else ""
        return self._usage_hold() or refused

    def _usage_hold(self) -> str:
        for used, limit, unit in (
            (self.usage.used_bytes, self.usage.limit_bytes, "bytes"),
            (self.usage.used_file_count, self.usage.limit_file_count, "inodes"),
        ):
            if used >= limit > 0:
                return f"the payload store has no room: {used} {unit} are taken of {limit}"
        return ""

    def refused(self, words: str) -> None:
        """Take note of the store's words to a write without room, of a client or of this server."""
        self._refused_at, self._words = perf_counter(), words
        self._full.failed(StoreError(f"{words}. {STORE_FULL_ADVICE}"))

    def _log_room(self) -> None:
        if hold := self._usage_hold():
            self._full.failed(StoreError(f"{hold}. {STORE_FULL_ADVICE}"))
        elif self._full.failing(within_s=REFUSED_S) is None:
            self._full.succeeded()

    @property
    def away_s(self) -> float:
        """Seconds for which the store has owed an answer."""
        since = self._silent_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    async def watch_usage(self) -> None:
        """Ask again and again how full the store is, and notice when it does not answer."""
        while True:
            await self._refresh_usage()
            await asyncio.sleep(PERIOD_S)

    async def sweep(self) -> None:
        """Delete, once a minute, payloads that were written and never announced."""
        due_at = self._clock.now() + SWEEP_PERIOD_S
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._clock.now() >= due_at:
                due_at = self._clock.now() + SWEEP_PERIOD_S
                await self._sweep()

    async def _sweep(self) -> None:
        try:
            with self._metrics.store_trip("sweep"):
                count = await self._custodian.sweep_unannounced()
        except StoreError as error:
            log.warning("unannounced payloads could not be swept: %s", type(error).__name__)
            return
        if count:
            log.info("deleted %d payloads that were never announced", count)

    async def _refresh_usage(self) -> None:
        if self._silent_since is None:
            self._silent_since = asyncio.get_running_loop().time()
        try:
            with self._metrics.store_trip("usage"):
                self.usage = await self._custodian.usage()
            self._metrics.set_store_usage(self.usage)
            self._silent_since = None
            self._log_room()
        except StoreError:
            # Counted as a store error; a call that needs the store gets the error itself.
            log.debug("the store does not say how full it is")
