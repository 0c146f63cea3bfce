"""Run operations on the running loop; payloads move in threads, which a cancel lets finish."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import grpc

from breadbox.model.errors import (
    ClosedError,
    DeadlineExceededError,
    ReplayBufferError,
    StoreUnavailableError,
)
from breadbox.model.options import channel_options
from breadbox.operations import calls
from breadbox.operations.operations import (
    Concurrently,
    Context,
    Effect,
    Invoke,
    Operation,
    RunBlocking,
    Sleep,
)
from breadbox.operations.sharing import SharedCalls, Sharer
from breadbox.shared.process_bound import ProcessBound
from breadbox.shared.tasks import end_tasks
from breadbox.stores.deadline import Deadline
from breadbox.wire.connections import Connections, Line
from breadbox.wire.status import received

T = TypeVar("T")

THREADS_MAX = 16
"""Most threads of one client that move payloads: as many as a store has connections."""


async def _in_thread(threads: Executor, function: Callable[[Deadline], T], deadline: Deadline) -> T:
    """Run a function in a thread; StoreUnavailableError if none is free by the deadline."""
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
            raise StoreUnavailableError("no thread was free for the store in time", was_silent=True)
        return cast(T, await running)
    except asyncio.CancelledError:
        running.cancel()
        raise


class BackgroundTask:
    """An operation that runs in a task until it returns, or `end` is called."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    async def end(self) -> None:
        """End the operation."""
        await end_tasks([self._task])


class Interpreter(ProcessBound):
    """Run the operations of one client, in the loop that it was created in."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # Threads of its own: a silent store must not block the loop's default executor.
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="breadbox-aio")
        addresses = context.route.addresses
        credentials = context.options.credentials()

        def open_line(address: str, is_another: bool) -> Line:
            arguments = channel_options(
                address, is_one_of_many=len(addresses) > 1, is_shared=not is_another
            )
            if credentials is None:
                return Line(grpc.aio.insecure_channel(address, options=arguments))
            return Line(grpc.aio.secure_channel(address, credentials, options=arguments))

        self._lines = Connections(addresses, open_line)
        self._metadata = context.options.metadata()
        self._shared = SharedCalls(context.now)
        self._kept: set[asyncio.Task[None]] = set()
        self.closed = False

    async def close(self) -> None:
        """Close connections and end background operations. Idempotent. Running operations fail."""
        if self.closed:
            return
        self.closed = True
        try:
            await end_tasks(self._kept)
        finally:
            for line in self._lines.end():
                await line.channel.close()
            self.context.slot.close()
            self._threads.shutdown(wait=False)

    def run_in_background(self, operation: Operation[None]) -> BackgroundTask:
        """Run an operation in the background until it returns, is ended, or the client closes."""

        async def kept() -> None:
            with contextlib.suppress(ClosedError):
                await self.run(operation)

        return BackgroundTask(self._keep(kept()))

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation to its end."""
        self._check_process()
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
        except ReplayBufferError as error:
            # The library's own frames would hide the caller's.
            raise error.with_traceback(None)  # noqa: B904 - it is the same error
        finally:
            operation.close()

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Invoke(call=call, timeout_s=timeout_s, is_shared=True):
                return call.decode(await self._send_together(call, timeout_s))
            case Invoke(call=call, timeout_s=timeout_s):
                return call.decode(await self._send(call.method, call.request, timeout_s))
            case Sleep(duration_s=duration_s):
                return await asyncio.sleep(duration_s)
            case RunBlocking(function=function, deadline=deadline):
                return await _in_thread(self._threads, function, deadline)
            case Concurrently(invoke=invoke, blocking=blocking):
                async with asyncio.TaskGroup() as tasks:
                    sent = tasks.create_task(self._attempt(invoke))
                    tasks.create_task(self._attempt(blocking))
                if isinstance(answer := sent.result(), ReplayBufferError):
                    raise answer
                return answer

    async def _attempt(self, effect: Effect) -> Any:
        try:
            return await self._perform(effect)
        except ReplayBufferError as error:
            return error

    async def _send_together(self, call: calls.Call[Any], timeout_s: float) -> Any:
        woken, shared, ends_at = asyncio.Event(), self._shared, self.context.now() + timeout_s
        own = Sharer(call, woken.set)
        if wait_s := min(shared.enter(own), timeout_s / 2):
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await woken.wait()
                if not (woken.is_set() or shared.leave(own)):
                    await woken.wait()  # It is in a call, which ends, or leads.
            except BaseException:
                shared.end(own, None)  # It may be woken already, to lead.
                raise
        if own.answer is None:
            request = shared.lead(own)
            sending = self._lead(own, call.method, request, ends_at - self.context.now())
            if len(own.company) == 1:
                await sending
            else:  # A caller that goes away leaves the call to the others.
                task = self._keep(sending)
                # One that is cancelled before it runs answers nobody.
                task.add_done_callback(lambda _: shared.end(own, None))
                await asyncio.wait((task,))
        return own.result()

    async def _lead(self, own: Sharer, name: str, request: Any, timeout_s: float) -> None:
        outcome: Any = None
        try:
            outcome = await self._send(name, request, timeout_s)
        except ReplayBufferError as error:
            outcome = error
        finally:
            self._shared.end(own, outcome)

    async def _send(self, name: str, request: Any, timeout_s: float) -> Any:
        place = self.context.route.place
        line = self._lines.take(place)
        method = getattr(line.stub, name)
        try:
            return received(await method(request, timeout=timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            if self.closed:
                raise ClosedError(f"{name}: the client was closed") from error
            translated = self.context.failed_call(place, error)
            if isinstance(translated, DeadlineExceededError):
                self._lines.replace(place, line)
            raise translated from error
        except grpc.aio.UsageError as error:  # What gRPC raises on a closed channel.
            raise ClosedError(f"{name}: {error}") from error
        except asyncio.CancelledError:
            # Closing the channel cancels its calls, without a cancellation of the task.
            task = asyncio.current_task()
            if self.closed and (task is None or not task.cancelling()):
                raise ClosedError(f"{name}: the client was closed") from None
            raise
        finally:
            if self._lines.give_back(line):
                await line.channel.close()
