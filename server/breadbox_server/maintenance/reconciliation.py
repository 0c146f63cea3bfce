"""Compare the core with the payload store, both ways.

References to a payload that the store lacks are dropped (PAYLOAD_LOST). A payload unknown to the
core was left by a crash between two steps; its producer may still announce it, so it is deleted
later. Lists may miss payloads that move between nodes, so payloads are looked up by name.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Final

from breadbox.model.errors import StoreError
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import PayloadCustodian
from breadbox_server.base.clock import Clock
from breadbox_server.core.model.errors import BufferNotFoundError
from breadbox_server.core.model.ids import BufferName, PayloadId
from breadbox_server.core.model.inputs import Payload
from breadbox_server.driver import Driver
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Seconds between checks of a few payloads of each buffer."""
LOOK_PAYLOADS: Final = 8
"""Payloads of a buffer in one check: enough to notice a store that was emptied."""
LOOK_BATCH: Final = 16_384
"""Payloads looked up in one batch: tens of milliseconds of the loop; one read of a directory."""
BEGIN_BATCH: Final = 2**18
"""Payloads in one batch before the server answers calls, when only the total time counts."""
CONFIRM_BATCH: Final = 4096
"""Payloads confirmed again in one batch; each costs more than a lookup."""
ORPHANS_HELD_MAX: Final = 65_536
"""Most orphans that are remembered; more are searched for after these are deleted."""
REST_S: Final = 5.0
"""Least seconds between two comparisons on mere suspicion,"""
REST_FACTOR: Final = 20.0
"""and at least this many times the duration of one."""
DELETE_BATCH: Final = 256
ORPHANS_MAX: Final = 1024
"""Orphans that a crash may leave: payloads confirmed and not yet admitted."""
ORPHANS_SHARE_MAX: Final = 0.5
"""Their share of all payloads, if that is more. Beyond both, the journal has lost entries: their
payloads are not deleted without --delete-orphans."""


@dataclass(repr=False, eq=False)
class Reconciler:
    """Keep core and store in agreement, at the start and while the server runs.

    Unknown payloads are deleted after `orphan_s`. `deletes_orphans`: no other server uses the
    store. `is_asked`: delete any number. `let_go`: payloads that the core is about to delete.
    """

    driver: Driver
    custodian: PayloadCustodian
    _: KW_ONLY
    clock: Clock
    metrics: Metrics
    orphan_s: float
    deletes_orphans: bool
    is_asked: bool = False
    let_go: frozenset[PayloadId] = frozenset()
    _orphans: set[PayloadId] = field(default_factory=set, init=False)
    _orphans_due_at: float = field(default=0.0, init=False)
    _has_more: bool = field(default=False, init=False)
    _is_compared: bool = field(default=True, init=False)
    _incarnation: str = field(default="", init=False)
    """The store's incarnation at the last comparison."""
    _suspicion_count: int = field(default=0, init=False)
    _rest_until: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._outage = OutageLog(log, "comparing the buffers and the store")

    async def begin(self, watched: str = "") -> None:
        """Drop what was lost while no server ran; skip a store (`watched`) the leader compared."""
        self._incarnation = await self.custodian.incarnation()
        if not watched or self._incarnation != watched:
            await self._drop_missing(BEGIN_BATCH)
        self._is_compared = False

    async def reconcile(self) -> None:
        """Compare everything: drop references to lost payloads, remember orphans."""
        incarnation = await self.custodian.incarnation()
        suspicion_count = self.driver.losses.suspicion_count
        # A store restored from an older copy may have payloads from before they
        # were confirmed: they exist, and are about to expire.
        await self._each_batch(CONFIRM_BATCH, self.driver.losses.confirm_again)
        self._suspicion_count = suspicion_count
        self._orphans = await self._find_orphans() if self.deletes_orphans else set()
        self._orphans_due_at = self.clock.now() + self.orphan_s
        self._is_compared = True
        # The incarnation from before: a store that restarted meanwhile is compared again.
        self._incarnation = incarnation
        if self._orphans:
            log.info("%d payloads in the store are of no buffer", len(self._orphans))

    async def _each_batch(
        self, size: int, look: Callable[[BufferName, list[Payload]], Awaitable[int]]
    ) -> None:
        for buffer in self.driver.core.buffers.names():
            for payloads in self.driver.core.buffers[buffer].payload_batches(size):
                if payloads:
                    await look(buffer, payloads)

    async def _find_orphans(self) -> set[PayloadId]:
        """Return at most `ORPHANS_HELD_MAX` orphans, or none if there are suspiciously many."""
        orphans: set[PayloadId] = set()
        kept_count = doubtful_count = 0
        with self.metrics.store_trip("list"):
            async for payload_id in self.custodian.confirmed():
                kept_count += 1
                if self.driver.losses.is_known(payload_id):
                    continue
                is_doubtful = payload_id not in self.let_go
                doubtful_count += is_doubtful
                if not is_doubtful or doubtful_count <= ORPHANS_HELD_MAX:
                    orphans.add(payload_id)
        self._has_more = doubtful_count > ORPHANS_HELD_MAX
        believable_count = max(ORPHANS_MAX, ORPHANS_SHARE_MAX * kept_count)
        if self.is_asked or doubtful_count <= believable_count:
            return orphans
        log.warning(
            "%d of %d payloads in the store are of no buffer, which is more than a crash leaves: "
            "they are kept; put the journal back that knows them, or start with --delete-orphans",
            doubtful_count,
            kept_count,
        )
        self._has_more = False
        return orphans & self.let_go

    @property
    def orphan_count(self) -> int:
        """Number of remembered orphans, which are deleted after `orphan_s`."""
        return len(self._orphans)

    async def run(self) -> None:
        """Check until cancelled; try an unreachable store again."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
                self._outage.succeeded()
            except StoreError as error:
                self._outage.failed(error)
            except BufferNotFoundError as error:
                log.debug("%s went while it was compared; trying again", error.buffer)

    async def look(self) -> None:
        """Compare everything if a payload is or may be missing; delete orphans that are due."""
        if await self._may_have_lost():
            self._is_compared = False
        if not self._is_compared:
            await self.reconcile()
        elif self._is_suspicious():
            await self._drop_missing()
        await self._delete_orphans()

    async def _may_have_lost(self) -> bool:
        if await self.custodian.incarnation() != self._incarnation:
            log.warning("the payload store was restarted or replaced: comparing buffers and store")
            return True
        for buffer in self.driver.core.buffers.names():
            few = islice(self.driver.core.buffers[buffer].payloads(), LOOK_PAYLOADS)
            if await self.driver.losses.drop_missing(buffer, few):
                return True
        return False

    def _is_suspicious(self) -> bool:
        """Return True if a client reported a loss, and a comparison is affordable again."""
        return (
            self.driver.losses.suspicion_count != self._suspicion_count
            and self.clock.now() >= self._rest_until
        )

    async def _drop_missing(self, batch: int | None = None) -> None:
        started_at = self.clock.now()
        suspicion_count = self.driver.losses.suspicion_count
        await self._each_batch(batch or LOOK_BATCH, self.driver.losses.drop_missing)
        self._suspicion_count = suspicion_count
        took_s = self.clock.now() - started_at
        self._rest_until = self.clock.now() + max(REST_S, REST_FACTOR * took_s)

    async def _delete_orphans(self) -> None:
        if not self._orphans or self.clock.now() < self._orphans_due_at:
            return
        # Payloads that the core is deleting now are no orphans.
        self.driver.core.pump()
        batch = list(islice(self._orphans, DELETE_BATCH))
        is_known = self.driver.losses.is_known
        unknown = [payload_id for payload_id in batch if not is_known(payload_id)]
        await self.driver.deletions.delete_orphans(unknown)
        self._orphans.difference_update(batch)
        if self._has_more and not self._orphans:
            self._is_compared = False
