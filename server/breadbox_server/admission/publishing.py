"""Model versions that a learner publishes: weights are confirmed before the core knows them."""

from collections.abc import Callable

from breadbox.model.errors import PayloadMissingError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox_server.access.authorization import ANONYMOUS, Caller
from breadbox_server.admission.deletions import DeletionQueue, UnownedPayloads
from breadbox_server.base.conversion import payload_reference
from breadbox_server.base.errors import PayloadSizeError
from breadbox_server.core.model.ids import BufferName, PayloadId
from breadbox_server.core.model.inputs import Payload, Published, PublishModel
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.metrics.metrics import Metrics


class Publishing:
    """Publishes versions.

    Args:
        core: Decides them.
        custodian: The payload store.
        deletions: Payloads on their way out.
        unowned: Payloads that were confirmed and not taken.
        metrics: Takes the time of confirmations.
        is_anothers: Whether a payload is not the caller's to name; see `Appends.is_anothers`.
    """

    def __init__(
        self,
        core: DurableCore,
        custodian: PayloadCustodian,
        deletions: DeletionQueue,
        unowned: UnownedPayloads,
        *,
        metrics: Metrics,
        is_anothers: Callable[[Caller, BufferName, PayloadId], bool],
    ) -> None:
        self._core = core
        self._custodian = custodian
        self._deletions = deletions
        self._unowned = unowned
        self._metrics = metrics
        self._is_anothers = is_anothers

    async def publish(self, command: PublishModel, caller: Caller = ANONYMOUS) -> Published:
        """Publish a version whose weights, if any, are confirmed first.

        Raises:
            PayloadMissingError: The store does not have the weights, or they are another client's.
            PayloadSizeError: The weights in the store have another size.
            StoreUnavailableError: The weights could not be confirmed.
            DomainError: The core refuses the version; its weights are deleted after a while.
        """
        self._core.turns.check_room()
        weights = command.weights
        taken = False
        if weights is not None and self._is_anothers(caller, command.buffer, weights.payload_id):
            raise PayloadMissingError(weights.payload_id)
        try:
            if weights is not None and not await self._confirm_weights(weights):
                raise PayloadMissingError(weights.payload_id)
            async with self._core.durable_refusals():
                published = self._core.apply_now(command)
            taken = published.weights_taken
        finally:
            # Also when the store's answer was lost, or the caller left meanwhile: the
            # weights may have been confirmed all the same.
            if weights is not None and not taken:
                self._unowned.add(weights, self._core.clock.now())
        await self._core.turns.settled()
        return published

    async def _confirm_weights(self, weights: Payload) -> bool:
        """Confirm one payload; return whether it is there, and not on its way out.

        Raises:
            PayloadSizeError: It has another size than its reference says.
        """
        if self._deletions.is_leaving(weights.payload_id):
            return False
        self._unowned.discard(weights.payload_id)
        with (
            self._deletions.confirming([weights.payload_id]),
            self._metrics.store_trip("confirm"),
        ):
            (found,) = await self._custodian.confirm([payload_reference(weights)])
        if found == Confirmation.OTHER_SIZE:
            raise PayloadSizeError("weights", weights)
        return found == Confirmation.THERE and not self._deletions.is_leaving(weights.payload_id)
