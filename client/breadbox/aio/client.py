"""The asyncio client; docstrings of its methods are in `breadbox.client`."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, overload

from numpy.typing import NDArray

from breadbox.aio.lease import Lease, Ticket
from breadbox.aio.service import Service
from breadbox.model import types
from breadbox.model.errors import WaitElapsedError
from breadbox.model.fragment import Appendable, Fragment, Part
from breadbox.model.options import ClientOptions, Tls, check_addresses
from breadbox.operations import calls, members, operations
from breadbox.operations.connected import Connected
from breadbox.operations.cursor_reads import LoadedRead, Tail
from breadbox.reading.batches import Batch, Stack
from breadbox.stores.base import PayloadStore
from breadbox.transport.aio.entering import Entering
from breadbox.transport.aio.interpreter import Interpreter

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")


def connect(
    address: str,
    *,
    buffer: str = "default",
    tls: Tls | None = None,
    token: str | None = None,
    deadline_s: float = 10.0,
    reconnect_s: float = 30.0,
    append_wait_s: float = 300.0,
    codecs: str | Mapping[str, str] = "raw",
    store_url: str | None = None,
) -> "Entering[Client]":
    options = ClientOptions(
        buffer=buffer,
        tls=tls,
        token=token,
        deadline_s=deadline_s,
        reconnect_s=reconnect_s,
        append_wait_s=append_wait_s,
        codecs=codecs,
        store_url=store_url,
    )
    return Entering(_made(check_addresses(address), options))


async def _made(address: str, options: ClientOptions) -> "Client":
    return Client(address, options)


class Client(Connected):
    """The client of one event loop: as `breadbox.Client`, awaited.

    Not thread-safe. `close` makes calls of other tasks fail with ClosedError.
    `asyncio.CancelledError` and the `TimeoutError` of `asyncio.timeout` are never converted.
    """

    service: Service
    _interpreter: Interpreter

    def _begin(self) -> None:
        self._interpreter = Interpreter(self._context)
        self.service = Service(self._interpreter)

    # Life --------------------------------------------------------------------------------------

    async def open_store(self) -> PayloadStore:
        return await self._interpreter.run(operations.opened_store(self._context))

    async def close(self) -> None:
        await self._interpreter.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _invoke(self, call: calls.Call[T]) -> T:
        return await self._interpreter.run(operations.invoke(self._context, call))

    async def _run(
        self,
        operation: "Callable[Concatenate[operations.Context, str, P], operations.Operation[T]]",
        buffer: str | None,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        begun = operation(self._context, buffer or self.buffer, *arguments, **named)
        return await self._interpreter.run(begun)

    # Sessions and models -----------------------------------------------------------------------

    async def start_session(
        self,
        session_id: str | None = None,
        *,
        model_version: int | None = None,
        buffer: str | None = None,
        take_over: bool = False,
    ) -> types.ModelState:
        return await self._invoke(
            calls.start_session(
                buffer or self.buffer, session_id, model_version, take_over=take_over
            )
        )

    async def end_session(self, session_id: str, *, buffer: str | None = None) -> None:
        await self._invoke(calls.end_session(buffer or self.buffer, session_id))

    async def publish(
        self,
        session_id: str,
        model_version: int,
        weights: Mapping[str, Any],
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        return await self._run(operations.publish, buffer, session_id, model_version, weights)

    async def watch_model(
        self,
        known: types.ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> types.ModelState | None:
        return await self._run(operations.watch_model, buffer, known, max_wait_s)

    async def group_ends(
        self, after: int = 0, *, max_wait_s: float = 0.0, buffer: str | None = None
    ) -> list[types.GroupEnd]:
        return await self._run(operations.group_ends, buffer, after, max_wait_s)

    async def tickets(
        self,
        count: int = 1,
        max_wait_s: float | None = 60.0,
        *,
        lease_s: float = 600.0,
        buffer: str | None = None,
    ) -> list[Ticket]:
        grant = await self._run(operations.take_tickets, buffer, count, max_wait_s, lease_s)
        made = buffer or self.buffer
        return [Ticket(self._interpreter, made, group, grant) for group in grant.groups]

    async def attach(
        self, parts: Part | Iterable[Part], *, buffer: str | None = None, replace: bool = False
    ) -> list[types.AppendResult]:
        return await self._run(members.attach, buffer, parts, replace=replace)

    async def members(
        self,
        prefix: str = "",
        *,
        keys: Sequence[tuple[str, int]] | None = None,
        buffer: str | None = None,
    ) -> list[types.MemberDescription]:
        return await self._run(members.members, buffer, prefix, keys)

    async def read_members(
        self,
        keys: Sequence[tuple[str, int]],
        parts: Sequence[str] | None = None,
        *,
        buffer: str | None = None,
    ) -> list[dict[str, Any]]:
        return await self._run(members.read_members, buffer, keys, parts)

    def claim(
        self,
        lacking: str,
        count: int = 1,
        max_wait_s: float | None = 60.0,
        *,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> "Entering[Lease]":
        grant = self.service.claim_members(
            lacking, count, max_wait_s, lease_s=lease_s, buffer=buffer
        )
        return Entering(self._leased(buffer or self.buffer, grant))

    async def drop_members(
        self, keys: Iterable[tuple[str, int]], *, buffer: str | None = None
    ) -> int:
        return await self._run(members.drop_members, buffer, keys)

    async def load_model(
        self,
        newer_than: types.ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> tuple[types.ModelState, dict[str, Any]] | None:
        return await self._run(operations.load_model, buffer, newer_than, max_wait_s)

    # Writing fragments -------------------------------------------------------------------------

    async def append(
        self,
        fragment: Appendable,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> types.AppendResult:
        results = await self.append_many([fragment], buffer=buffer, codecs=codecs)
        return results[0]

    async def append_many(
        self,
        fragments: Iterable[Appendable],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[types.AppendResult]], None] | None = None,
    ) -> list[types.AppendResult]:
        return await self._run(operations.append_many, buffer, fragments, codecs, answered)

    async def report_episodes(
        self,
        episodes: Sequence[types.EpisodeReport],
        *,
        workers: Sequence[types.WorkerSteps] = (),
        buffer: str | None = None,
    ) -> None:
        await self._invoke(calls.report_episodes(buffer or self.buffer, episodes, workers))

    # Reading fragments -------------------------------------------------------------------------

    def fetch(
        self,
        fragment_count: int,
        max_wait_s: float | None = 60.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> "Entering[Lease]":
        grant = self.service.fetch_fragments(
            fragment_count,
            max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
            buffer=buffer,
        )
        return Entering(self._leased(buffer or self.buffer, grant))

    async def _leased(self, buffer: str, grant: Awaitable[types.LeaseGrant]) -> Lease:
        return Lease(self._interpreter, buffer, await grant)

    @overload
    def batches(
        self,
        batch_size: int,
        max_wait_s: float | None = None,
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        buffer: str | None = None,
    ) -> "AsyncGenerator[Batch[NDArray[Any]], None]": ...

    @overload
    def batches(
        self,
        batch_size: int,
        max_wait_s: float | None = None,
        *,
        device: types.Device,
        columns: Sequence[str] | None = None,
        buffer: str | None = None,
    ) -> "AsyncGenerator[Batch[torch.Tensor], None]": ...

    async def batches(
        self,
        batch_size: int,
        max_wait_s: float | None = None,
        *,
        device: types.Device | None = None,
        columns: Sequence[str] | None = None,
        buffer: str | None = None,
    ) -> AsyncGenerator[Batch, None]:
        while True:
            try:
                lease = await self.fetch(batch_size, max_wait_s, buffer=buffer)
            except WaitElapsedError:
                return
            async with lease:
                batch = await self.load_batch(lease.references, device=device, columns=columns)
                try:
                    yield batch
                except GeneratorExit:  # The caller has this batch: it counts as used.
                    return

    async def tail(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float | None = None,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        is_acknowledging: bool = True,
        columns: Sequence[str] | None = None,
        is_mapped: bool = False,
        buffer: str | None = None,
    ) -> AsyncIterator[LoadedRead]:
        tail = Tail(
            self._context,
            buffer or self.buffer,
            calls.ReadRequest(
                after_chunk_id=after_chunk_id,
                chunk_count_max=chunk_count_max,
                lease_s=lease_s,
                known_session_id=known_session_id,
                subscription=subscription,
            ),
            is_acknowledging=is_acknowledging,
            max_wait_s=max_wait_s,
            columns=columns,
            is_mapped=is_mapped,
        )
        while (read := await self._interpreter.run(tail.next())) is not None:
            yield read

    async def create_subscription(
        self,
        name: str,
        *,
        retaining: bool = False,
        after_chunk_id: int | None = None,
        buffer: str | None = None,
    ) -> types.Subscription:
        call = calls.create_subscription(
            buffer or self.buffer, name, retaining=retaining, after_chunk_id=after_chunk_id
        )
        return await self._invoke(call)

    async def acknowledge_chunks(
        self, subscription: str, chunk_id: int, *, buffer: str | None = None
    ) -> None:
        call = calls.acknowledge_chunks(buffer or self.buffer, subscription, chunk_id)
        await self._invoke(call)

    async def delete_subscription(self, name: str, *, buffer: str | None = None) -> None:
        await self._run(operations.delete_subscription, buffer, name)

    async def load_fragments(
        self,
        references: Sequence[types.FragmentReference],
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        is_mapped: bool = False,
    ) -> list[Fragment]:
        return await self._interpreter.run(
            operations.load_fragments(
                self._context, references, columns, steps, is_mapped=is_mapped
            )
        )

    async def describe_arrays(
        self, references: Sequence[types.FragmentReference]
    ) -> list[dict[str, types.ArrayType]]:
        return await self._interpreter.run(operations.describe_arrays(self._context, references))

    @overload
    async def load_batch(
        self,
        references: Sequence[types.FragmentReference],
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> "Batch[NDArray[Any]]": ...

    @overload
    async def load_batch(
        self,
        references: Sequence[types.FragmentReference],
        *,
        device: types.Device,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> "Batch[torch.Tensor]": ...

    async def load_batch(
        self,
        references: Sequence[types.FragmentReference],
        *,
        device: types.Device | None = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> Batch:
        return await self._interpreter.run(
            operations.read_batch(self._context, references, device, columns, into=into)
        )

    async def update_priorities(
        self,
        priorities: Mapping[int, float],
        *,
        delete: Iterable[int] = (),
        buffer: str | None = None,
    ) -> types.PrioritiesReply:
        return await self._run(operations.update_priorities, buffer, priorities, list(delete))

    # Operating ---------------------------------------------------------------------------------

    async def create_buffer(
        self, name: str, config: types.BufferConfig | None = None
    ) -> types.BufferDescription:
        return await self._invoke(calls.create_buffer(name, config or types.BufferConfig()))

    async def update_buffer(
        self, name: str, config: types.BufferConfig | None = None, *, reset: Iterable[str] = ()
    ) -> types.BufferDescription:
        return await self._invoke(calls.update_buffer(name, config or types.BufferConfig(), reset))

    async def delete_buffer(self, name: str) -> None:
        await self._interpreter.run(operations.delete_buffer(self._context, name))

    async def list_buffers(self) -> tuple[types.BufferDescription, ...]:
        return await self._interpreter.run(operations.list_buffers(self._context))

    async def get_buffer(
        self,
        name: str | None = None,
        *,
        events_after: int | None = None,
        with_workers: bool = False,
    ) -> types.BufferDescription:
        return await self._invoke(calls.get_buffer(name or self.buffer, events_after, with_workers))
