"""Appends: fragments that a client sends, until the client is answered.

A call of AppendFragments and an append of a stream are the same here: `Appends.begin` starts it,
and the `Appending` that it returns is the one place that says when its client may be answered:

| what became of it                                | answered                                |
|--------------------------------------------------|-----------------------------------------|
| refused for want of room, quota, or at the end   | at once (`TOLD_AT_ONCE`)                |
| a store that does not answer, a payload's size   | at once                                 |
| refused otherwise, or an outcome WRONG_SESSION   | once no other server can have decided   |
|                                                  | otherwise (`Turns.known`)               |
| anything else                                    | once it, and the model told with it,    |
|                                                  | are durable                             |
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from breadbox.stores.base import PayloadCustodian
from breadbox.stores.keys import new_payload_id
from breadbox_server.access.authorization import ANONYMOUS, Caller
from breadbox_server.admission.append_queue import AppendQueue, Job
from breadbox_server.admission.deletions import DeletionQueue, UnownedPayloads
from breadbox_server.admission.inline_payloads import RecentPayloads
from breadbox_server.admission.quotas import UNCHARGED, Quotas
from breadbox_server.core.model.description import AppendCredit
from breadbox_server.core.model.errors import BufferNotFoundError, DomainError
from breadbox_server.core.model.ids import BufferName, PayloadId, SessionId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    DeclareSchema,
    Fragment,
    ModelState,
)
from breadbox_server.core.model.schemas import Schema
from breadbox_server.journal.durable_core import TOLD_AT_ONCE, DurableCore
from breadbox_server.metrics.metrics import Metrics

_OF_UNKNOWN: Final = frozenset((AdmissionOutcome.WRONG_SESSION,))
"""Outcomes that rest on what the core does not know, as other refusals do."""


class Appending:
    """One append on its way. `end` is the caller's to call, whatever becomes of it.

    Args:
        core: Decides it.
        buffer: Where its fragments go.
        done: Gives what became of each fragment, or the error, once that is durable.
        on_end: Called when it ends.
    """

    __slots__ = ("_buffer", "_core", "_model", "_on_end", "done")

    def __init__(
        self,
        core: DurableCore,
        buffer: BufferName,
        done: "asyncio.Future[list[Appended | None]]",
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._buffer = buffer
        self._on_end = on_end
        self._model: ModelState | None = None
        self.done = done
        """What became of each fragment, once that is durable."""

    def is_settled(self) -> bool:
        """Say whether the client may be answered, now that it is done; else `settle` first."""
        error = self.done.exception()
        if error is not None:
            return isinstance(error, TOLD_AT_ONCE) or not isinstance(error, DomainError)
        if self._core.undurable_models or self._rests_on_unknown():
            return False
        try:
            self._model = self._core.buffers.model(self._buffer)
        except BufferNotFoundError:  # Which is told once that is durable.
            return False
        return True

    async def settle(self) -> None:
        """Return once the client may be answered.

        Raises:
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        error = self.done.exception()
        if error is not None or self._rests_on_unknown():
            await self._core.turns.known()
        if error is None:
            self._model = await self._core.durable_model(self._buffer)

    async def wait(self) -> None:
        """Return once it is done and settled: for a caller that waits for nothing else.

        Raises:
            StoreUnavailableError: Payloads could not be confirmed.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        with suppress(DomainError):  # `answer` raises it, once it may be told.
            await self.done
        if not self.is_settled():
            await self.settle()

    def answer(self) -> tuple[list[Appended | None], ModelState]:
        """Return what became of each fragment, None for a payload that is not there; and the model.

        Raises:
            BufferNotFoundError: No buffer has this name.
            SchemaMismatchError: One of the schemas is not the buffer's.
            PayloadSizeError, StoreUnavailableError: See `AppendQueue.submit`.
        """
        results = self.done.result()
        assert self._model is not None, "it is not settled"
        return results, self._model

    def end(self) -> None:
        """Let go of it, whatever became of it. Idempotent."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def _rests_on_unknown(self) -> bool:
        return any(each is not None and each.outcome in _OF_UNKNOWN for each in self.done.result())


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

    def begin(
        self,
        buffer: BufferName,
        fragments: list[Fragment],
        caller: Caller = ANONYMOUS,
        schemas: Mapping[int, Schema] | None = None,
        bodies: Sequence[bytes] = (),
        *,
        wait_s: float = 0.0,
    ) -> Appending:
        """Begin to append fragments in order; see `AppendQueue.submit`. Does not block.

        Raises:
            AppendsFullError: Too much waits already.
            QuotaFullError, QuotaExceededError: The caller's token may have no more.
            DrainingError: The server is shutting down.
            StoreUnavailableError: The journal has not kept up for long.
        """
        core = self._core
        core.check_serving()
        core.turns.check_room()
        charge = UNCHARGED
        try:
            session = core.buffers.model(buffer).session_id
            core.use(buffer)
            charge = self.quotas.charge(caller, buffer, session, fragments)
            if schemas:
                self._tell_schemas(buffer, session, fragments, schemas)
            fragments = [
                replace(each, payload=replace(each.payload, payload_id=PayloadId(new_payload_id())))
                if self.is_anothers(caller, buffer, each.payload.payload_id)
                else each
                for each in fragments
            ]
            job = self.queue.submit(buffer, fragments, charge, bodies, wait_s=wait_s)
        except DomainError as error:
            charge.end()
            if isinstance(error, TOLD_AT_ONCE):
                raise
            refused: asyncio.Future[list[Appended | None]]
            refused = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return Appending(core, buffer, refused)
        return Appending(core, buffer, job.done, partial(self._end, job))

    def _end(self, job: Job) -> None:
        self.queue.withdraw(job)
        job.charge.end()

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
