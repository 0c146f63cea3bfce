"""What appends have of the payload store: confirmed, or stored where they travelled inline.

A payload that was confirmed in vain is kept for a while, as it may be sent again. An inline one is
deleted: sent again it has another id.
"""

from breadbox.model.errors import StoreError, StoreFullError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox_server.admission.payloads import DeletionQueue, RecentPayloads, UnownedPayloads
from breadbox_server.admission.slices import Item, PendingAppend
from breadbox_server.base.clock import Clock
from breadbox_server.base.conversion import payload_reference
from breadbox_server.journal.turns import Turns
from breadbox_server.metrics.metrics import Metrics


class StoreTrips:
    """Confirm and store the payloads of slices; let go of those that were not admitted."""

    def __init__(
        self,
        custodian: PayloadCustodian,
        deletions: DeletionQueue,
        unowned: UnownedPayloads,
        recent: RecentPayloads,
        carrier: Turns,
        *,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._custodian = custodian
        self._deletions = deletions
        self._unowned = unowned
        self._clock = clock
        self._metrics = metrics
        self._recent = recent
        self.carrier = carrier

    async def ask(self, items: list[Item]) -> None:
        """Find out which payloads are there; store those that are inline.

        If the store fails, so do all appends that need it.
        """
        try:
            await self._keep(items)
            await self._confirm(items)
        except StoreError as error:
            # The store may have done it all the same, and only its answer was lost.
            self._doubt(items)
            for item in items:
                item.pending.error = error

    async def _keep(self, items: list[Item]) -> None:
        """Store inline payloads under fresh ids, in one trip with a turn's entries if it can."""
        riding = []
        for item in items:
            if item.body:
                item.is_there = item.fragment.payload.payload_id in item.pending.kept
                if not item.is_there:
                    riding.append(item)
        if not riding:
            return
        carrier = self.carrier
        if carrier.can_carry(len(riding), sum(len(item.body) for item in riding)):
            for item in riding:
                item.is_there = item.is_carried = True
            return
        payloads = [(payload_reference(item.fragment.payload), item.body) for item in riding]
        payload_ids = [item.fragment.payload.payload_id for item in riding]
        words: str | None = None
        with self._deletions.confirming(payload_ids), self._metrics.store_trip("keep"):
            try:
                await self._custodian.keep(payloads)
            except StoreFullError as error:
                words = error.what
            else:
                carrier.has_payload_room = True
        found_no_room = words is not None
        if words is not None:
            self._metrics.on_store_full(words)
        for item in riding:
            # Without room for all of them, some may be there all the same.
            item.is_there, item.found_no_room = True, found_no_room
            item.pending.kept[item.fragment.payload.payload_id] = item.fragment.payload

    async def _confirm(self, items: list[Item]) -> None:
        is_leaving = self._deletions.is_leaving
        # What is on its way out is as good as not there: its sender writes it once more.
        wanted = [
            item
            for item in items
            if not item.body and not is_leaving(item.fragment.payload.payload_id)
        ]
        for item in items:
            if not item.fragment.payload.size_bytes:  # Numbers alone.
                item.is_there = True
        wanted = [item for item in wanted if not item.is_there]
        if not wanted:
            return
        payload_ids = [item.fragment.payload.payload_id for item in wanted]
        for payload_id in payload_ids:
            self._unowned.discard(payload_id)  # Sent again in time.
        references = [payload_reference(item.fragment.payload) for item in wanted]
        with self._deletions.confirming(payload_ids), self._metrics.store_trip("confirm"):
            answers = await self._custodian.confirm(references)
        for item, payload_id, answer in zip(wanted, payload_ids, answers, strict=True):
            item.is_there = answer == Confirmation.THERE and not is_leaving(payload_id)
            item.has_other_size = answer == Confirmation.OTHER_SIZE
        self._doubt([item for item in wanted if item.is_there])

    def _doubt(self, items: list[Item]) -> None:
        """Have payloads deleted after a while unless admitted; inline ones are their append's."""
        now = self._clock.now()
        for item in items:
            payload = item.fragment.payload
            if not (item.is_carried or payload.payload_id in item.pending.kept):
                self._unowned.add(payload, now)

    def admitted(self, item: Item) -> None:
        """Note that a payload belongs to a fragment from now on."""
        payload_id = item.fragment.payload.payload_id
        if item.is_carried:
            self.carrier.carry(payload_id, item.body)
            self._recent.add(payload_id, item.body)
        elif item.pending.kept.pop(payload_id, None) is not None:
            self._recent.add(payload_id, item.body)
        else:
            self._unowned.discard(payload_id)

    def let_go(self, pending: PendingAppend) -> None:
        """Delete inline payloads that were not admitted: sent again, they have other ids."""
        self._deletions.put(pending.kept.values())
        pending.kept = {}
