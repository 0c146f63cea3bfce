"""Appends: fragments that a client sends, until the client is answered.

Refusals for want of room or quota, at the end, or by a silent store are immediate (`TOLD_AT_ONCE`).
Other refusals, and WRONG_SESSION, wait until no other server can have decided otherwise
(`Turns.known`). All else waits until it, and the model reported with it, are durable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from breadbox.model.errors import PayloadMissingError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox.stores.keys import new_payload_id
from breadbox_server.access.authorization import ANONYMOUS, Caller
from breadbox_server.admission.append_queue import AppendQueue
from breadbox_server.admission.payloads import DeletionQueue, RecentPayloads, UnownedPayloads
from breadbox_server.admission.quotas import UNCHARGED, Quotas
from breadbox_server.admission.store_trips import StoreTrips
from breadbox_server.base.conversion import payload_reference
from breadbox_server.base.errors import PayloadSizeError
from breadbox_server.core.model.ids import BufferName, PayloadId, SessionId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    DeclareSchema,
    Fragment,
    ModelState,
    Payload,
    Published,
    PublishModel,
)
from breadbox_server.core.model.schemas import Schema
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.metrics.metrics import Metrics

NO_SESSION: Final = SessionId("none")
_OF_UNKNOWN: Final = frozenset((AdmissionOutcome.WRONG_SESSION,))
"""Outcomes that rest on what the core does not know, as other refusals do."""


class Appends:
    """Charge quotas for appends, declare their schemas, queue their fragments; publish versions."""

    def __init__(
        self,
        core: DurableCore,
        custodian: PayloadCustodian,
        deletions: DeletionQueue,
        unowned: UnownedPayloads,
        recent: RecentPayloads,
        *,
        metrics: Metrics,
        fragments_max: int,
        waiting_max: int,
        inline_size_bytes_max: int,
    ) -> None:
        self._core = core
        self._custodian = custodian
        self._deletions = deletions
        self._unowned = unowned
        self._metrics = metrics
        buffers = core.buffers
        self.quotas = Quotas(
            *(core.clock, metrics, buffers.fragments),
            lambda name, worker: name in buffers and buffers[name].has_ended(worker),
        )
        self.is_written_by_another: Callable[[str, PayloadId], bool] = lambda name, payload_id: (
            False
        )
        """True if another client wrote a payload through the gateway and has not announced it."""
        self.queue = AppendQueue(
            StoreTrips(
                *(custodian, deletions, unowned, recent, core.turns),
                clock=core.clock,
                metrics=metrics,
            ),
            clock=core.clock,
            metrics=metrics,
            fragments_max=fragments_max,
            waiting_max=waiting_max,
            is_held=lambda: bool(self.hold()),
            inline_size_bytes_max=inline_size_bytes_max,
        )

    async def append(
        self,
        buffer: BufferName,
        fragments: list[Fragment],
        caller: Caller = ANONYMOUS,
        schemas: Mapping[int, Schema] | None = None,
        bodies: Sequence[bytes] = (),
        *,
        wait_s: float = 0.0,
    ) -> tuple[list[Appended | None], ModelState]:
        """Append fragments in order; return results (None: no payload) and the model once durable.

        Also raises DrainingError, and StoreUnavailableError if the journal has not kept up.
        """
        core = self._core
        core.check_serving()
        core.turns.check_room()
        charge, pending = UNCHARGED, None
        try:
            async with core.durable_refusals():
                session = core.buffers[buffer].model.session_id
                charge = self.quotas.charge(caller, buffer, session, fragments)
                if schemas:
                    self._tell_schemas(buffer, session, fragments, schemas)
                for position, each in enumerate(fragments):
                    if not each.session_id:  # Of a part: of the current one.
                        each.session_id = session or NO_SESSION
                    is_inline = bodies and bodies[position]  # Its id is of this server.
                    if not is_inline and self.is_anothers(caller, buffer, each.payload.payload_id):
                        unknown = replace(each.payload, payload_id=PayloadId(new_payload_id()))
                        fragments[position] = replace(each, payload=unknown)
                pending = self.queue.submit(buffer, fragments, charge, bodies, wait_s=wait_s)
                results = await pending.done
        finally:
            if pending is not None:
                self.queue.withdraw(pending)
            charge.end()
        if any(each is not None and each.outcome in _OF_UNKNOWN for each in results):
            await core.turns.known()
        return results, await core.durable_model(buffer)

    def _tell_schemas(
        self,
        buffer: BufferName,
        session: SessionId,
        fragments: list[Fragment],
        schemas: Mapping[int, Schema],
    ) -> None:
        wanted = {each.schema_hash for each in fragments if each.session_id == session}
        for schema_hash, schema in schemas.items():
            if schema_hash in wanted:
                self._core.apply_now(DeclareSchema(buffer, session, schema_hash, schema))

    def is_anothers(self, caller: Caller, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Whether another buffer refers to a payload, or another token wrote it: it is missing."""
        buffers = self._core.buffers
        return buffers.refers_elsewhere(buffer, payload_id) or self.is_written_by_another(
            caller.name, payload_id
        )

    def hold(self) -> str:
        """Return why no fragments are admitted, whatever room buffers have, or "" if they are."""
        if self._deletions.is_full:
            return f"{len(self._deletions)} payloads wait for deletion, which the store is slow at"
        return self._core.turns.hold()

    async def publish(self, command: PublishModel, caller: Caller = ANONYMOUS) -> Published:
        """Publish a version; confirm its weights, if there are any, first.

        Another client's weights raise PayloadMissingError. Weights of a refused version are deleted
        after a while.
        """
        self._core.turns.check_room()
        weights = command.weights
        taken = False
        if weights is not None and self.is_anothers(caller, command.buffer, weights.payload_id):
            raise PayloadMissingError(weights.payload_id)
        try:
            if weights is not None and not await self._confirm_weights(weights):
                raise PayloadMissingError(weights.payload_id)
            published = await self._core.call(command)
            taken = published.weights_taken
        finally:
            # Also when the store's answer was lost, or the caller left meanwhile: the
            # weights may have been confirmed all the same.
            if weights is not None and not taken:
                self._unowned.add(weights, self._core.clock.now())
        return published

    async def _confirm_weights(self, weights: Payload) -> bool:
        if self._deletions.is_leaving(weights.payload_id):
            return False
        self._unowned.discard(weights.payload_id)
        with self._deletions.confirming([weights.payload_id]), self._metrics.store_trip("confirm"):
            (found,) = await self._custodian.confirm([payload_reference(weights)])
        if found == Confirmation.OTHER_SIZE:
            raise PayloadSizeError("weights", weights)
        return found == Confirmation.THERE and not self._deletions.is_leaving(weights.payload_id)
