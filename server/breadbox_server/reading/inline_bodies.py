"""Inline payloads of replies: from memory, or else from the store."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from breadbox.model.errors import StoreError
from breadbox.stores.base import PayloadCustodian
from breadbox_server.admission.payloads import RecentPayloads, StoreWatch
from breadbox_server.core.model.inputs import GrantedFragment, Payload
from breadbox_server.journal.turns import OUTAGE_S
from breadbox_server.limits import INLINE_REPLY_BYTES_MAX
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

BODIES_S: Final = 1.0
BODIES_READS_MAX: Final = 4
"""Replies whose payloads are read at a time: each takes one of the few connections to the store."""


@dataclass(repr=False, eq=False)
class InlineBodies:
    """Read the payloads that replies may carry, of at most `size_bytes_max` each."""

    custodian: PayloadCustodian
    recent: RecentPayloads
    store_watch: StoreWatch
    _: KW_ONLY
    metrics: Metrics
    size_bytes_max: int

    def __post_init__(self) -> None:
        self._reads = asyncio.Semaphore(BODIES_READS_MAX)

    async def read(self, granted: Sequence[GrantedFragment], bytes_max: int) -> list[bytes]:
        """Read small leased payloads, up to `bytes_max`, in `BODIES_S`; b"" for one not inline."""
        if not bytes_max:
            return []
        payloads = [each.fragment.payload for each in granted]
        bodies, absent = self.at_hand(payloads, bytes_max)
        if absent:
            await self.add(bodies, payloads, absent)
        return bodies if any(bodies) else []

    def at_hand(self, payloads: Sequence[Payload], bytes_max: int) -> tuple[list[bytes], list[int]]:
        """Return what is in memory, and positions of what only the store has."""
        left = min(bytes_max, INLINE_REPLY_BYTES_MAX)
        size_max = self.size_bytes_max
        get = self.recent.get
        bodies = [b""] * len(payloads)
        absent = []
        for position, payload in enumerate(payloads):
            size_bytes = payload.size_bytes
            if size_bytes <= size_max and size_bytes <= left and payload.piece_count == 1:
                bodies[position] = get(payload.payload_id)
                if not bodies[position]:
                    absent.append(position)
                left -= size_bytes
        return bodies, absent

    async def add(
        self, bodies: list[bytes], payloads: Sequence[Payload], positions: Sequence[int]
    ) -> None:
        """Read what is not at hand, unless the store is away."""
        if positions and self.store_watch.away_s < OUTAGE_S:
            for position, body in zip(
                positions, await self._read([payloads[each] for each in positions]), strict=True
            ):
                bodies[position] = body

    async def _read(self, payloads: Sequence[Payload]) -> list[bytes]:
        try:
            async with asyncio.timeout(BODIES_S), self._reads:
                with self.metrics.store_trip("read"):
                    return await self.custodian.read(payloads)
        except (TimeoutError, StoreError) as error:
            log.debug("a reply goes without inline payloads: %s", error)
            return [b""] * len(payloads)
