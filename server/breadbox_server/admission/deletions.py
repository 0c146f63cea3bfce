"""Payloads on their way out of the store: a bounded queue, emptied in batches (B13)."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from breadbox.model.errors import StoreError
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import PayloadCustodian
from breadbox_server.base.conversion import payload_reference
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.model.inputs import Payload
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

BATCH_PAYLOADS: Final = 256
"""Payloads deleted in one round trip; so many that the trip is cheap, so few that it is short."""
GATHER_S: Final = 0.05
"""After a trip, as long as less than a batch waits: what comes meanwhile shares the next one."""
GATHER_BYTES_MAX: Final = 8 * 2**20
"""Bytes of what may wait for that: the store needs the room."""
RETRY_DELAY_S: Final = 0.5
"""Seconds between attempts while the store cannot be reached."""


async def _at_once() -> None:
    """Nobody else has a say."""


class DeletionQueue:
    """Deletes payloads off the request path.

    At `limit` payloads `is_full` tells the appends to refuse fragments until the store has caught
    up, so the queue never holds more than `limit` and what the buffers held at that moment.

    A payload that is on its way out must not be confirmed for somebody, nor one be sent on its way
    out while it is being confirmed: it would be lost. Both sides tell each other here. It is on its
    way out from when that is decided, although it goes only once that is durable: until then nobody
    else may delete it either, for a server that recovers the journal would still refer to it.

    Args:
        custodian: The payload store.
        metrics: Shows how many wait.
        limit: Payloads at which nothing more should be taken in.
        hold_back: Gives those payloads that may be deleted now; the others come again.
        forget: Told of payloads whose end is decided.
        until_ours: Returns once no other server can have claimed the payloads meanwhile; the store
            looks for itself, but may be one that does not know of the other any more.
    """

    def __init__(
        self,
        custodian: PayloadCustodian,
        *,
        metrics: Metrics,
        limit: int,
        hold_back: Callable[[Sequence[Payload]], Sequence[Payload]] = lambda payloads: payloads,
        forget: Callable[[Sequence[PayloadId]], None] = lambda payload_ids: None,
        until_ours: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        self._hold_back = hold_back
        self._forget = forget
        self._custodian = custodian
        self._until_ours = until_ours
        self._metrics = metrics
        self._limit = limit
        self._payloads: deque[Payload] = deque()
        self._bytes = 0
        """Of all of them."""
        self._leaving: set[PayloadId] = set()
        self._confirming: set[PayloadId] = set()
        self._outage = OutageLog(log, "deleting payloads")
        self._wake = asyncio.Event()
        self._is_urgent = asyncio.Event()
        """A batch is full, or somebody waits until nothing is left."""
        self._awaiting_count = 0
        """Of these."""
        self._empty = asyncio.Event()
        self._empty.set()
        metrics.pending_deletions.set_function(lambda: len(self._payloads))

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be taken in."""
        return len(self._payloads) >= self._limit

    def __len__(self) -> int:
        return len(self._payloads)

    def announce(self, payloads: Iterable[Payload]) -> None:
        """Take note of payloads that will be put here once their end is durable."""
        payload_ids = [each.payload_id for each in payloads]
        self._leaving.update(payload_ids)
        self._forget(payload_ids)

    def put(self, payloads: Iterable[Payload]) -> None:
        """Queue payloads that nothing refers to any more, which is durable."""
        payloads = list(payloads)
        self.announce(payloads)
        going = self._hold_back(payloads)
        self._payloads.extend(going)
        self._bytes += sum([each.size_bytes for each in going])
        if self._payloads:
            self._empty.clear()
            self._wake.set()
            if not self._may_gather():
                self._is_urgent.set()

    def is_leaving(self, payload_id: PayloadId) -> bool:
        """Whether a payload's end was decided, and it has not been deleted yet."""
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
        """Delete payloads that no book knows, but for those being confirmed or leaving right now.

        Returns:
            How many were deleted.

        Raises:
            StoreUnavailableError: The store cannot be reached; some may be deleted.
        """
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
        self._metrics.deleted.inc(len(payload_ids))
        return len(payload_ids)

    async def wait_empty(self) -> None:
        """Return when everything that was queued has been deleted."""
        self._awaiting_count += 1
        self._is_urgent.set()
        try:
            await self._empty.wait()
        finally:
            self._awaiting_count -= 1

    async def run(self) -> None:
        """Delete what is queued, for ever. A store that cannot be reached is tried again."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._payloads:
                await self._delete_batch()
            self._empty.set()
            await self._gather()

    def _may_gather(self) -> bool:
        """Whether what is queued may wait for more."""
        return (
            len(self._payloads) < BATCH_PAYLOADS
            and self._bytes < GATHER_BYTES_MAX
            and not self._awaiting_count
        )

    async def _gather(self) -> None:
        self._is_urgent.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                await self._is_urgent.wait()

    async def _delete_batch(self) -> None:
        count = min(BATCH_PAYLOADS, len(self._payloads))
        batch = [payload_reference(self._payloads[position]) for position in range(count)]
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
        for _ in range(count):
            payload = self._payloads.popleft()
            self._leaving.discard(payload.payload_id)
            self._bytes -= payload.size_bytes
        self._metrics.deleted.inc(count)


class UnownedPayloads:
    """Payloads that were confirmed for something that was then refused; oldest first.

    Their sender may well send them again, so they are kept for a while, and deleted then, unless
    something refers to them by that time.

    Args:
        deletions: Where they go.
        keep_s: Seconds they are kept.
        is_referenced: Whether any buffer refers to a payload: who named it may have been wrong.
    """

    LIMIT: Final = 65_536
    """At the limit the oldest is deleted early; if sent again it is PAYLOAD_MISSING."""

    def __init__(
        self,
        deletions: DeletionQueue,
        *,
        keep_s: float,
        is_referenced: Callable[[PayloadId], bool],
    ) -> None:
        self._deletions = deletions
        self._keep_s = keep_s
        self._is_referenced = is_referenced
        self._payloads: dict[PayloadId, tuple[float, Payload]] = {}

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
        """Delete what nobody sent again in time."""
        while self._payloads and next(iter(self._payloads.values()))[0] <= now:
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        payload_id = next(iter(self._payloads))
        _, payload = self._payloads.pop(payload_id)
        is_leaving = self._deletions.is_leaving(payload_id)
        if not is_leaving and not self._is_referenced(payload_id):
            self._deletions.put([payload])
