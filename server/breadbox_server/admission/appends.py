"""Appends: fragments that a client sends, until the client is answered.

| result                                           | answered                                |
|--------------------------------------------------|-----------------------------------------|
| refused for want of room, quota, or at the end   | immediately (`TOLD_AT_ONCE`)            |
| a store that does not answer                     | immediately                             |
| refused otherwise, or an outcome WRONG_SESSION   | once no other server can have decided   |
|                                                  | otherwise (`Turns.known`)               |
| anything else                                    | once it, and the model told with it,    |
|                                                  | are durable                             |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from breadbox.stores.base import PayloadCustodian
from breadbox.stores.keys import new_payload_id
from breadbox_server.access.authorization import ANONYMOUS, Caller
from breadbox_server.admission.append_queue import AppendQueue
from breadbox_server.admission.deletions import DeletionQueue, UnownedPayloads
from breadbox_server.admission.inline_payloads import RecentPayloads
from breadbox_server.admission.quotas import UNCHARGED, Quotas
from breadbox_server.core.model.description import AppendCredit
from breadbox_server.core.model.ids import BufferName, PayloadId, SessionId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    DeclareSchema,
    Fragment,
    ModelState,
)
from breadbox_server.core.model.schemas import Schema
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.metrics.metrics import Metrics

_OF_UNKNOWN: Final = frozenset((AdmissionOutcome.WRONG_SESSION,))
"""Outcomes that rest on what the core does not know, as other refusals do."""


class Appends:
    """Takes appends in: charges quotas, tells the core their schemas, and queues them.

    Args:
        core: Decides them.
        custodian: The payload store.
        deletions: Payloads on their way out.
        unowned: Payloads that were confirmed and not admitted.
        recent: Where payloads that came inline are kept for replies.
        metrics: Shows what waits and what tokens use.
        fragments_max: Fragments that may wait for admission; further ones are refused.
        waiting_max: Appends that may wait for room.
        inline_size_bytes_max: Bytes of a payload that may come inline.
    """

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
        self._deletions = deletions
        self.quotas = Quotas(core.clock, metrics, core.buffers.fragments)
        self.is_written_by_another: Callable[[str, PayloadId], bool] = lambda name, payload_id: (
            False
        )
        """Whether another client wrote a payload through the gateway and has not announced it."""
        self.queue = AppendQueue(
            custodian,
            deletions,
            unowned,
            clock=core.clock,
            metrics=metrics,
            fragments_max=fragments_max,
            waiting_max=waiting_max,
            has_room=core.turns.has_room,
            inline_size_bytes_max=inline_size_bytes_max,
            recent=recent,
            carrier=core.turns,
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
        """Append fragments in order; return once that is durable. See `AppendQueue.submit`.

        Returns:
            What became of each fragment, None for a payload that is not there; and the model.

        Raises:
            AppendsFullError: Too much waits already.
            QuotaFullError, QuotaExceededError: The caller's token may have no more.
            DrainingError: The server is shutting down.
            BufferNotFoundError: No buffer has this name.
            SchemaMismatchError: One of the schemas is not the buffer's.
            PayloadSizeError: A payload in the store has another size than its fragment says.
            StoreUnavailableError: Payloads could not be confirmed, or the journal has not kept up.
        """
        core = self._core
        core.check_serving()
        core.turns.check_room()
        charge, job = UNCHARGED, None
        try:
            async with core.durable_refusals():
                session = core.buffers.model(buffer).session_id
                core.use(buffer)
                charge = self.quotas.charge(caller, buffer, session, fragments)
                if schemas:
                    self._tell_schemas(buffer, session, fragments, schemas)
                fragments = [
                    replace(
                        each, payload=replace(each.payload, payload_id=PayloadId(new_payload_id()))
                    )
                    if self.is_anothers(caller, buffer, each.payload.payload_id)
                    else each
                    for each in fragments
                ]
                job = self.queue.submit(buffer, fragments, charge, bodies, wait_s=wait_s)
                results = await job.done
        finally:
            if job is not None:
                self.queue.withdraw(job)
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
        """Let the core know what the fragments of the session are."""
        wanted = {each.schema_hash for each in fragments if each.session_id == session}
        for schema_hash, schema in schemas.items():
            if schema_hash in wanted:
                self._core.apply_now(DeclareSchema(buffer, session, schema_hash, schema))

    def is_anothers(self, caller: Caller, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Say whether a payload is of another buffer, or another client wrote it for theirs.

        To a client that names it in this buffer it is not there: whether there is one is not
        theirs to know.
        """
        buffers = self._core.buffers
        return buffers.refers_elsewhere(buffer, payload_id) or self.is_written_by_another(
            caller.name, payload_id
        )

    def hold(self) -> str:
        """Return why no fragments are admitted, whatever room buffers have, or "" if they are."""
        if self._deletions.is_full:
            return f"{len(self._deletions)} payloads wait for deletion, which the store is slow at"
        return self._core.turns.hold()

    def credit(self, buffer: BufferName, caller: Caller) -> AppendCredit:
        """Return what a producer may send now; nothing while deletions or the journal lack room."""
        if self.hold():
            return AppendCredit(0, 0)
        return self.quotas.left(caller, self._core.buffers.append_credit(buffer))
