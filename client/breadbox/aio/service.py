"""The calls of the protocol, one method each; docstrings are in `breadbox.service`."""

from collections.abc import Sequence
from typing import Any, TypeVar

from breadbox.model import types
from breadbox.model.types import ReleaseMode
from breadbox.operations import calls, members, operations
from breadbox.transport.aio.interpreter import Interpreter

T = TypeVar("T")


class Service:
    """The calls of the protocol, as `breadbox.types.Service`, awaited."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._context = interpreter.context

    def _buffer(self, buffer: str | None) -> str:
        return buffer or self._context.options.buffer

    async def _invoke(self, call: calls.Call[T]) -> T:
        return await self._interpreter.run(operations.invoke(self._context, call))

    async def publish_model(
        self,
        session_id: str,
        model_version: int,
        weights: types.PayloadReference | None = None,
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        call = calls.publish_model(self._buffer(buffer), session_id, model_version, weights)
        return await self._invoke(call)

    async def append_fragments(
        self, fragments: Sequence[types.FragmentMetadata], *, buffer: str | None = None
    ) -> types.AppendReply:
        return await self._invoke(calls.append_fragments(self._buffer(buffer), fragments))

    async def fetch_fragments(
        self,
        fragment_count: int,
        max_wait_s: float | None = 0.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> types.LeaseGrant:
        request = calls.FetchRequest(
            fragment_count=fragment_count,
            max_wait_s=max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
        )
        return await self._interpreter.run(
            operations.fetch(self._context, self._buffer(buffer), request)
        )

    async def get_prepared_fragments(
        self, request_id: str, *, buffer: str | None = None
    ) -> tuple[types.FragmentReference, ...]:
        return await self._invoke(calls.get_prepared_fragments(self._buffer(buffer), request_id))

    async def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float = 0.0,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        is_look: bool = False,
        buffer: str | None = None,
    ) -> types.FragmentRead:
        request = calls.ReadRequest(
            after_chunk_id=after_chunk_id,
            chunk_count_max=chunk_count_max,
            max_wait_s=max_wait_s,
            lease_s=lease_s,
            known_session_id=known_session_id,
            subscription=subscription,
            is_look=is_look,
        )
        return await self._interpreter.run(
            operations.read(self._context, self._buffer(buffer), request)
        )

    async def load_weights(self, reference: types.PayloadReference) -> dict[str, Any]:
        return await self._interpreter.run(operations.load_weights(self._context, reference))

    async def renew_lease(
        self, lease_id: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> float:
        return await self._invoke(calls.renew_lease(self._buffer(buffer), lease_id, lease_s))

    async def release_lease(
        self,
        lease_id: str,
        mode: ReleaseMode = ReleaseMode.CONSUMED,
        *,
        buffer: str | None = None,
        unreadable: Sequence[str] = (),
    ) -> None:
        await self._invoke(calls.release_lease(self._buffer(buffer), lease_id, mode, unreadable))

    async def take_tickets(
        self,
        count: int,
        max_wait_s: float | None = 60.0,
        *,
        request_id: str | None = None,
        lease_s: float = 600.0,
        buffer: str | None = None,
    ) -> types.TicketGrant:
        return await self._interpreter.run(
            operations.take_tickets(
                self._context, self._buffer(buffer), count, max_wait_s, lease_s, request_id
            )
        )

    async def claim_members(
        self,
        lacking: str,
        count: int = 1,
        max_wait_s: float | None = 60.0,
        *,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> types.LeaseGrant:
        return await self._interpreter.run(
            members.claim(
                self._context, self._buffer(buffer), lacking, count, max_wait_s, lease_s
            )
        )

    async def renew_ticket(
        self, group: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> types.TicketRenewal:
        return await self._invoke(calls.renew_ticket(self._buffer(buffer), group, lease_s))

    async def give_back_ticket(
        self, group: str, member: int | None = None, *, buffer: str | None = None
    ) -> None:
        await self._invoke(calls.give_back_ticket(self._buffer(buffer), group, member))

    async def get_store_config(self) -> types.StoreConfig:
        return await self._invoke(calls.get_store_config())
