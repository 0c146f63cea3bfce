"""The asyncio client: the same operations as `breadbox.Client`, awaited.

```python
async with breadbox.aio.connect("localhost:50051") as client:
    await client.append(fragment)
    async with client.fetch(fragment_count=32, max_wait_s=30) as lease:
        async for batch in lease.batches(batch_size=8): ...
```

`connect` and `fetch` may also be awaited, for a client or a lease to be closed by hand.

Payloads move in threads, so that the loop never blocks on the store. Cancelling a call cancels it
on the server; a payload that is being moved at that moment is moved to its end in its thread, and
one that was not announced expires by itself.
"""

import asyncio
import contextvars
import logging
import random
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload
from uuid import uuid4

import grpc
from numpy.typing import NDArray

from breadbox import calls, errors, operations, status, types
from breadbox.async_loader import AsyncFragmentLoader, run_ahead
from breadbox.batches import Batch, Stack
from breadbox.errors import ClosedError, ReplayBufferError
from breadbox.fragment import Fragment
from breadbox.lease import (
    FRAGMENTS_PER_READ,
    RENEW_AT,
    UNREADABLE_ERRORS,
    RenewalFailures,
    lease_html,
    lease_state,
)
from breadbox.loader import LoaderKeywords, LoaderOptions
from breadbox.local import POLL_S, ServerOptions, own_server
from breadbox.operations import (
    Attempted,
    Both,
    Context,
    Do,
    Effect,
    Invoke,
    Operation,
    Sleep,
    StoreSlot,
)
from breadbox.options import CHANNEL_OPTIONS, ClientOptions, Tls, check_address
from breadbox.outages import Outages
from breadbox.side_stream import side_stream_for
from breadbox.stores.base import PayloadStore
from breadbox.stores.deadline import Deadline
from breadbox.types import FragmentReference, LeaseGrant, ReleaseMode
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
E = TypeVar("E", bound="Client | Lease")

ReadBatch = Callable[
    [
        Sequence[FragmentReference],
        Any,
        Sequence[str] | None,
        AbstractContextManager[None] | None,
    ],
    Awaitable[Batch],
]

THREADS_MAX = 16
"""Threads of one client that move payloads: as many as a store has connections."""

_log = logging.getLogger(__name__)


class Entering(Coroutine[Any, Any, E]):
    """What a call gives once it is awaited; `async with` awaits and enters it at once.

    A coroutine like that of an `async def`: it can be awaited once, or made a task.
    """

    __slots__ = ("_coroutine", "_entered")

    def __init__(self, coroutine: Coroutine[Any, Any, E]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, E]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.send(value)

    def throw(self, *raised: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.throw(*raised)

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""
        self._coroutine.close()

    async def __aenter__(self) -> E:
        self._entered = await self._coroutine
        await self._entered.__aenter__()
        return self._entered

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)


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
    """Make a client of the running loop; see `breadbox.connect` for arguments and errors.

    Use it as `async with connect(...) as client`, or `client = await connect(...)`.
    """
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
    checked = check_address(address)

    async def made() -> Client:
        return Client(checked, options)

    return Entering(made())


@asynccontextmanager
async def local_server(**options: Unpack[ServerOptions]) -> "AsyncIterator[Client]":
    """Run a server of one's own, and give a client of the running loop.

    ```python
    async with breadbox.aio.local_server() as client:
        await client.start_session("first-run")
    ```

    Args and Raises: as `breadbox.local_server`.
    """
    with own_server(options) as server:
        try:
            give_up_at = server.launch()
            while not server.is_ready(give_up_at):  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(POLL_S)
            server.forget_files()
            async with connect(server.address) as client:
                yield client
        finally:
            # Its end may take seconds, in which the loop goes on.
            await asyncio.to_thread(server.stop)


def open_channel(address: str, options: ClientOptions) -> grpc.aio.Channel:
    """A channel to the server, encrypted if the options say so."""
    if options.tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, options.tls.credentials(), options=CHANNEL_OPTIONS)


async def _in_thread(threads: Executor, function: Callable[[Deadline], T], deadline: Deadline) -> T:
    """Run a function in a thread; give up, if no thread was free for it by the deadline.

    One that has begun keeps to the deadline by itself, and is awaited: it may be writing into
    memory of the caller's.

    Raises:
        StoreUnavailableError: No thread was free: others wait for the store, too.
    """
    claim = threading.Lock()

    def run() -> T | None:
        return function(deadline) if claim.acquire(blocking=False) else None

    loop = asyncio.get_running_loop()
    try:
        running = loop.run_in_executor(threads, contextvars.copy_context().run, run)
    except RuntimeError as error:
        raise ClosedError("the client was closed") from error
    try:
        await asyncio.wait((running,), timeout=max(0.0, deadline.left_s()))
        if not running.done() and claim.acquire(blocking=False):
            late = errors.StoreUnavailableError("no thread was free for the store in time")
            late.was_silent = True
            raise late
        return cast(T, await running)
    except asyncio.CancelledError:
        running.cancel()
        raise


class Client:
    """A connection to one server, for the loop it was made in. Not thread-safe.

    Every method does and raises what its namesake of `breadbox.Client` does and raises.
    `asyncio.CancelledError` and the `TimeoutError` of `asyncio.timeout` are never converted.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        *,
        channel: grpc.aio.Channel | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
        store: PayloadStore | None = None,
    ) -> None:
        """Use `connect` instead; the collaborators are for tests."""
        self._sleep = sleep
        # Of its own: a store that is silent must not hold up what others run in threads.
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="breadbox-aio")
        self._channel = channel or open_channel(address, options)
        self._stub = ReplayBufferServiceStub(self._channel)
        self._metadata = options.metadata()
        self._context = Context(
            address=address,
            options=options,
            now=clock,
            rng=rng or random.Random(),
            new_id=lambda: uuid4().hex,
            outages=Outages(clock),
            slot=StoreSlot(store),
        )
        self.closed = False
        """Whether `close` was called."""

    # Life --------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Of the server."""
        return self._context.address

    @property
    def buffer(self) -> str:
        """Buffer that calls are about unless they say otherwise."""
        return self._context.options.buffer

    async def open_store(self) -> PayloadStore:
        """The payload store, opened on first use where the server says it is."""
        return await self._run(operations.opened_store(self._context))

    async def close(self) -> None:
        """Close connections. Idempotent. Calls under way fail with ClosedError."""
        if self.closed:
            return
        self.closed = True
        await self._channel.close()
        self._context.slot.close()
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<breadbox.aio.Client of {self.address}, buffer {self.buffer!r}{state}>"

    # The interpreter of operations -------------------------------------------------------------

    async def _run(self, operation: Operation[T]) -> T:
        if self.closed:
            raise ClosedError("the client was closed")
        try:
            effect = next(operation)
            while True:
                try:
                    result = await self._perform(effect)
                except ReplayBufferError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            answer: T = stop.value
            return answer
        finally:
            operation.close()

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Invoke(call=call, timeout_s=timeout_s):
                return call.decode(await self._send(call, timeout_s))
            case Sleep(duration_s=duration_s):
                return await self._sleep(duration_s)
            case Do(function=function, deadline=deadline):
                return await _in_thread(self._threads, function, deadline)
            case Both(invoke=invoke, do=do):
                async with asyncio.TaskGroup() as tasks:
                    sent = tasks.create_task(self._attempt(invoke))
                    done = tasks.create_task(self._attempt(do))
                return sent.result(), done.result()

    async def _attempt(self, effect: Effect) -> Attempted:
        try:
            return Attempted(result=await self._perform(effect))
        except ReplayBufferError as error:
            return Attempted(error=error)

    async def _send(self, call: calls.Call[Any], timeout_s: float) -> Any:
        method = getattr(self._stub, call.method)
        try:
            return await method(call.request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            encrypted = self._context.options.tls is not None
            raise status.from_rpc_error(error, self.address, encrypted=encrypted) from error
        except grpc.aio.UsageError as error:  # What gRPC raises on a closed channel.
            raise ClosedError(f"{call.method}: {error}") from error
        except asyncio.CancelledError:
            # Closing the channel cancels its calls although nobody cancelled the task.
            task = asyncio.current_task()
            if self.closed and (task is None or not task.cancelling()):
                raise ClosedError(f"{call.method}: the client was closed") from None
            raise

    async def _invoke(self, call: calls.Call[T]) -> T:
        return await self._run(operations.invoke(self._context, call))

    async def _invoke_once(self, call: calls.Call[T]) -> T:
        return await self._run(operations.invoke_once(self._context, call))

    # Sessions and models -----------------------------------------------------------------------

    async def start_session(
        self, session_id: str, *, model_version: int | None = None, buffer: str | None = None
    ) -> types.ModelState:
        """Make a session current; see `breadbox.Client.start_session`."""
        return await self._invoke(
            calls.start_session(buffer or self.buffer, session_id, model_version)
        )

    async def end_session(self, session_id: str, *, buffer: str | None = None) -> None:
        """End the session if it is current; see `breadbox.Client.end_session`."""
        await self._invoke(calls.end_session(buffer or self.buffer, session_id))

    async def publish_model(
        self,
        session_id: str,
        model_version: int,
        weights: types.PayloadReference | None = None,
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        """Move the version forward; see `breadbox.Client.publish_model`."""
        call = calls.publish_model(buffer or self.buffer, session_id, model_version, weights)
        return await self._invoke(call)

    async def publish(
        self,
        session_id: str,
        model_version: int,
        weights: Mapping[str, Any],
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        """Write weights and publish them; see `breadbox.Client.publish`."""
        return await self._run(
            operations.publish(
                self._context, buffer or self.buffer, session_id, model_version, weights
            )
        )

    async def watch_model(
        self,
        known: types.ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> types.ModelState | None:
        """Wait for another session or version; see `breadbox.Client.watch_model`."""
        return await self._run(
            operations.watch_model(self._context, buffer or self.buffer, known, max_wait_s)
        )

    async def load_weights(self, reference: types.PayloadReference) -> dict[str, Any]:
        """Read published weights; see `breadbox.Client.load_weights`."""
        return await self._run(operations.load_weights(self._context, reference))

    # Fragments in ------------------------------------------------------------------------------

    async def append_fragments(
        self, fragments: Sequence[types.FragmentMetadata], *, buffer: str | None = None
    ) -> types.AppendReply:
        """Announce written fragments; see `breadbox.Client.append_fragments`."""
        return await self._invoke(calls.append_fragments(buffer or self.buffer, fragments))

    async def append(
        self,
        fragment: Fragment,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> types.AppendResult:
        """Write a payload and announce it; see `breadbox.Client.append`."""
        return (await self.append_many([fragment], buffer=buffer, codecs=codecs))[0]

    async def append_many(
        self,
        fragments: Sequence[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> list[types.AppendResult]:
        """Write payloads and announce them; see `breadbox.Client.append_many`."""
        return await self._run(
            operations.append_many(self._context, buffer or self.buffer, list(fragments), codecs)
        )

    async def report_episodes(
        self, episodes: Sequence[types.EpisodeReport], *, buffer: str | None = None
    ) -> None:
        """Report finished episodes; see `breadbox.Client.report_episodes`."""
        await self._invoke(calls.report_episodes(buffer or self.buffer, episodes))

    # Batches out -------------------------------------------------------------------------------

    async def fetch_fragments(
        self,
        fragment_count: int,
        max_wait_s: float = 0.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> LeaseGrant:
        """Take fragments under a lease of the caller's; see `breadbox.Client.fetch_fragments`."""
        request = calls.FetchRequest(
            fragment_count=fragment_count,
            max_wait_s=max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
        )
        return await self._run(operations.fetch(self._context, buffer or self.buffer, request))

    def fetch(
        self,
        fragment_count: int,
        max_wait_s: float = 0.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> "Entering[Lease]":
        """Take fragments under a lease; see `breadbox.Client.fetch`.

        Use it as `async with client.fetch(...) as lease`, or `lease = await client.fetch(...)`.
        """

        async def granted() -> Lease:
            grant = await self.fetch_fragments(
                fragment_count,
                max_wait_s,
                rank=rank,
                world_size=world_size,
                request_id=request_id,
                lease_s=lease_s,
                buffer=buffer,
            )
            return Lease(
                self,
                buffer or self.buffer,
                grant,
                once=self._invoke_once,
                read_batch=self._read_batch,
            )

        return Entering(granted())

    async def get_prepared_fragments(
        self, request_id: str, *, buffer: str | None = None
    ) -> tuple[FragmentReference, ...]:
        """Read what a request got; see `breadbox.Client.get_prepared_fragments`."""
        return await self._invoke(calls.get_prepared_fragments(buffer or self.buffer, request_id))

    async def read_fragments(
        self,
        references: Sequence[FragmentReference],
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        is_mapped: bool = False,
    ) -> list[Fragment]:
        """Load payloads of granted fragments; see `breadbox.Client.read_fragments`."""
        return await self._run(
            operations.read_fragments(
                self._context, references, columns, steps, is_mapped=is_mapped
            )
        )

    async def describe_arrays(
        self, references: Sequence[FragmentReference]
    ) -> list[dict[str, types.ArrayType]]:
        """Read what arrays granted fragments have; see `breadbox.Client.describe_arrays`."""
        return await self._run(operations.describe_arrays(self._context, references))

    @overload
    async def load_batch(
        self,
        references: Sequence[FragmentReference],
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> "Batch[NDArray[Any]]": ...

    @overload
    async def load_batch(
        self,
        references: Sequence[FragmentReference],
        *,
        device: types.Device,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> "Batch[torch.Tensor]": ...

    async def load_batch(
        self,
        references: Sequence[FragmentReference],
        *,
        device: types.Device | None = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> Batch:
        """Load fragments into one stacked batch; see `breadbox.Client.load_batch`."""
        return await self._run(
            operations.read_batch(self._context, references, device, columns, into=into)
        )

    async def _read_batch(
        self,
        references: Sequence[FragmentReference],
        device: types.Device | None,
        columns: Sequence[str] | None,
        within: AbstractContextManager[None] | None,
    ) -> Batch:
        return await self._run(
            operations.read_batch(self._context, references, device, columns, within=within)
        )

    async def renew_lease(
        self, lease_id: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> float:
        """Let a lease live on; see `breadbox.Client.renew_lease`."""
        return await self._invoke(calls.renew_lease(buffer or self.buffer, lease_id, lease_s))

    async def release_lease(
        self,
        lease_id: str,
        mode: ReleaseMode = ReleaseMode.CONSUMED,
        *,
        buffer: str | None = None,
        unreadable: Sequence[str] = (),
    ) -> None:
        """End a lease; see `breadbox.Client.release_lease`."""
        await self._invoke(calls.release_lease(buffer or self.buffer, lease_id, mode, unreadable))

    # Operating ---------------------------------------------------------------------------------

    async def create_buffer(
        self, name: str, config: types.BufferConfig | None = None
    ) -> types.BufferDescription:
        """Create a buffer; see `breadbox.Client.create_buffer`."""
        return await self._invoke(calls.create_buffer(name, config or types.BufferConfig()))

    async def update_buffer(self, name: str, config: types.BufferConfig) -> types.BufferDescription:
        """Change limits; see `breadbox.Client.update_buffer`."""
        return await self._invoke(calls.update_buffer(name, config))

    async def delete_buffer(self, name: str) -> None:
        """Delete a buffer; see `breadbox.Client.delete_buffer`."""
        await self._run(operations.delete_buffer(self._context, name))

    async def list_buffers(self) -> tuple[types.BufferDescription, ...]:
        """Describe all buffers; see `breadbox.Client.list_buffers`."""
        return await self._invoke(calls.list_buffers())

    async def get_buffer(self, name: str | None = None) -> types.BufferDescription:
        """Describe one buffer; see `breadbox.Client.get_buffer`."""
        return await self._invoke(calls.get_buffer(name or self.buffer))

    async def get_store_config(self) -> types.StoreConfig:
        """Ask where payloads live; see `breadbox.Client.get_store_config`."""
        return await self._invoke(calls.get_store_config())


class Lease:
    """A granted batch; see `breadbox.Lease`. Use it as an async context manager.

    While it is open a task renews it. A clean exit consumes it; an exception, a cancellation
    included, returns it and goes on its way.
    """

    def __init__(
        self,
        client: Client,
        buffer: str,
        grant: LeaseGrant,
        *,
        once: Callable[[calls.Call[Any]], Awaitable[Any]],
        read_batch: ReadBatch,
    ) -> None:
        """Made by `Client.fetch`.

        Args:
            client: Who fetched it, and reads for it.
            buffer: Where it was fetched.
            grant: What the server granted.
            once: Sends a call once, without retries, so that an exit by exception stays quick.
            read_batch: Loads references, for a device, some columns, within a context.
        """
        self._client = client
        self._buffer = buffer
        self._once = once
        self._read_batch = read_batch
        self._tasks = asyncio.TaskGroup()
        self._renewal: asyncio.Task[None] | None = None
        self._unreadable: list[str] = []
        self.grant = grant
        """What the server granted."""
        self.released = False
        """Whether `release` was called."""
        self.expired = False
        """Whether a renewal found it gone: payloads may be deleted, chunks served again."""

    @property
    def lease_id(self) -> str:
        """The server's name for it."""
        return self.grant.lease_id

    @property
    def request_id(self) -> str:
        """Name of the fetch; other ranks ask with the same."""
        return self.grant.request_id

    @property
    def references(self) -> tuple[FragmentReference, ...]:
        """The granted fragments, in draw order."""
        return self.grant.fragments

    def __len__(self) -> int:
        return len(self.grant.fragments)

    async def fragments(
        self,
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
    ) -> AsyncIterator[Fragment]:
        """Load the granted fragments, in draw order; see `breadbox.Lease.fragments`."""

        async def read(references: Sequence[FragmentReference]) -> list[Fragment]:
            self._check_open()
            return await self._client.read_fragments(references, columns=columns, steps=steps)

        groups = [
            self.references[start : start + FRAGMENTS_PER_READ]
            for start in range(0, len(self), FRAGMENTS_PER_READ)
        ]
        async with aclosing(run_ahead(groups, read, tasks=1, depth=1, in_order=True)) as loaded:
            async for fragments in loaded:
                for fragment in fragments:
                    yield fragment

    @overload
    def batches(
        self,
        batch_size: int,
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> "AsyncGenerator[Batch[NDArray[Any]], None]": ...

    @overload
    def batches(
        self,
        batch_size: int,
        *,
        device: types.Device,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> "AsyncGenerator[Batch[torch.Tensor], None]": ...

    def batches(
        self,
        batch_size: int,
        *,
        device: types.Device | None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> AsyncGenerator[Batch, None]:
        """Load the granted fragments as stacked batches [batch_size, T, ...], ahead of their use.

        Args, options and errors: as `breadbox.Lease.batches`. Leaving the loop early cancels what
        is being loaded once the generator is closed; `contextlib.aclosing` does that at once.
        """
        side_stream = side_stream_for(device)

        async def load(references: Sequence[FragmentReference]) -> Batch:
            self._check_open()
            return await self._read_batch(references, device, columns, side_stream)

        loader = AsyncFragmentLoader(load, LoaderOptions(**options), side_stream=side_stream)
        return loader.batches(self.references, batch_size)

    async def renew(self, lease_s: float | None = None) -> float:
        """Let the lease live on from now; see `breadbox.Lease.renew`."""
        self._check_open()
        try:
            return await self._client.renew_lease(
                self.lease_id, lease_s=lease_s, buffer=self._buffer
            )
        except errors.LeaseExpiredError:
            self.expired = True
            raise

    async def unreadable(self) -> list[str]:
        """Name payloads that are there and cannot be read; see `breadbox.Lease.unreadable`."""
        found: list[str] = []
        for reference in self.references:
            try:
                await self._client.read_fragments([reference])
            except UNREADABLE_ERRORS:
                found.append(reference.metadata.payload.payload_id)
            except errors.PayloadMissingError:
                continue  # The server asks the store itself.
            except ReplayBufferError as error:
                _log.warning("lease %s was not read to its end: %s", self.lease_id, error)
                break
        self.refuse(found)
        return found

    def refuse(self, payload_ids: Iterable[str]) -> None:
        """Name payloads that can be read and not be used; see `breadbox.Lease.refuse`."""
        self._unreadable += [each for each in payload_ids if each not in self._unreadable]

    async def release(self, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
        """End the lease. Idempotent; see `breadbox.Lease.release`."""
        if self.released:
            return
        self.released = True
        await self._stop_renewing()
        await self._client.release_lease(
            self.lease_id, mode, buffer=self._buffer, unreadable=self._unreadable
        )

    async def _renew_in_time(self) -> None:
        delay_s = self.grant.remaining_s * RENEW_AT
        failures = RenewalFailures()
        while True:
            await asyncio.sleep(delay_s)
            try:
                remaining_s = await self._once(calls.renew_lease(self._buffer, self.lease_id, None))
            except (errors.LeaseExpiredError, errors.ClosedError) as error:
                self.expired = isinstance(error, errors.LeaseExpiredError)
                _log.warning("lease %s is not renewed any more: %s", self.lease_id, error)
                return
            except ReplayBufferError as error:
                failures.tell(self.lease_id, error)
                delay_s = 1.0
            else:
                failures.end()
                delay_s = remaining_s * RENEW_AT

    async def _stop_renewing(self) -> None:
        if self._renewal is None:
            return
        self._renewal.cancel()
        self._renewal = None
        # Not told of the body's error, which a group would wrap into an ExceptionGroup.
        await self._tasks.__aexit__(None, None, None)

    def _check_open(self) -> None:
        if self.released:
            raise ClosedError(f"lease {self.lease_id} was released")
        if self.expired:
            raise errors.LeaseExpiredError(self.lease_id)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._renewal = self._tasks.create_task(self._renew_in_time())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.release(ReleaseMode.CONSUMED)
            return
        if isinstance(error, UNREADABLE_ERRORS) and not self.released:
            await self.unreadable()
        await self._stop_renewing()
        if self.released:
            return
        self.released = True
        mode = ReleaseMode.RETURNED
        try:
            await self._once(
                calls.release_lease(self._buffer, self.lease_id, mode, self._unreadable)
            )
        except ReplayBufferError as problem:
            # The caller's own error matters more; the lease then ends by expiry.
            _log.warning("lease %s could not be returned: %s", self.lease_id, problem)

    def __repr__(self) -> str:
        return f"Lease({self.lease_id!r}, {len(self)} fragments, {lease_state(self)})"

    def _repr_html_(self) -> str:
        """Show the fragments as a table, in notebooks."""
        return lease_html(self)
