"""Run operations in the calling thread; see `breadbox.operations.operations`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc

from breadbox.model.errors import ClosedError, DeadlineExceededError, ReplayBufferError
from breadbox.model.options import open_channel
from breadbox.operations.calls import Call
from breadbox.operations.operations import (
    Concurrently,
    Context,
    Effect,
    Invoke,
    Operation,
    RunBlocking,
    Sleep,
)
from breadbox.operations.sharing import SharedCalls, Sharer, TogetherError
from breadbox.shared.process_bound import ProcessBound
from breadbox.transport.background import BackgroundRunner
from breadbox.transport.background import BackgroundTask as BackgroundTask
from breadbox.wire.connections import Connections, Line
from breadbox.wire.status import received

T = TypeVar("T")

INTERRUPTED_S = 1.0
"""Seconds beyond a call's own time after which those that share it believe it ended unheard."""


class Interpreter(ProcessBound):
    """Run the operations of one client, over a connection to each address. Thread-safe."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._closed = threading.Event()
        addresses = context.route.addresses
        credentials = context.options.credentials()

        def open_line(address: str, is_another: bool) -> Line:
            return Line(
                open_channel(
                    *(address, credentials),
                    is_one_of_many=len(addresses) > 1,
                    is_shared=not is_another,
                )
            )

        self._lines = Connections(addresses, open_line)
        self._metadata = context.options.metadata()
        self._shared = SharedCalls(context.now)
        self._background = BackgroundRunner(self._perform, context.now)

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Close connections and end background operations. Idempotent. Running operations fail."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._is_here:
            return
        for line in self._lines.end():
            line.channel.close()
        self._background.close()
        self.context.slot.close()

    def run_in_background(self, operation: Operation[None]) -> BackgroundTask:
        """Run an operation in the background until it returns, is ended, or the client closes."""
        return self._background.start(operation)

    def run(self, operation: Operation[T]) -> T:
        """Run an operation to its end."""
        self._check_process()
        if self._closed.is_set():
            raise ClosedError("the client was closed")
        try:
            effect = next(operation)
            while True:
                try:
                    result = self._perform(effect)
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

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Invoke(call=call, timeout_s=timeout_s, is_shared=True):
                return call.decode(self._send_together(call, timeout_s))
            case Invoke(call=call, timeout_s=timeout_s):
                with self._line(call.method) as method:
                    response = received(
                        method(call.request, timeout=timeout_s, metadata=self._metadata)
                    )
                return call.decode(response)
            case Sleep(duration_s=duration_s):
                return self._sleep(duration_s)
            case RunBlocking(function=function, deadline=deadline):
                return function(deadline)
            case Concurrently(invoke=invoke, blocking=blocking):
                return self._perform_concurrently(invoke, blocking)

    def _perform_concurrently(self, invoke: Invoke, blocking: RunBlocking) -> Any:
        call = invoke.call
        with self._line(call.method) as method:
            future = method.future(call.request, timeout=invoke.timeout_s, metadata=self._metadata)
            try:
                with suppress(ReplayBufferError):
                    blocking.function(blocking.deadline)
            except BaseException:
                future.cancel()
                raise
            response = received(future.result())
        return call.decode(response)

    def _send_together(self, call: Call[Any], timeout_s: float) -> Any:
        woken, shared, ends_at = threading.Lock(), self._shared, self.context.now() + timeout_s
        woken.acquire()
        own = Sharer(call, woken.release)
        outcome: Any = None
        try:
            wait_s = min(shared.enter(own), timeout_s / 2)
            is_left = wait_s > 0 and not (
                woken.acquire(timeout=wait_s)
                or shared.leave(own)
                # It is in a call, which ends, or leads; but its leader may be interrupted.
                or woken.acquire(timeout=min(timeout_s + INTERRUPTED_S, threading.TIMEOUT_MAX))
            )
            if is_left and own.answer is None:
                own.answer = TogetherError("is sent again, alone")
            if own.answer is None:
                request = shared.lead(own)
                left_s = ends_at - self.context.now()
                with self._line(call.method) as method:
                    outcome = received(method(request, timeout=left_s, metadata=self._metadata))
        except ReplayBufferError as error:
            outcome = error
        finally:  # Also of one that goes away when it is to lead.
            shared.end(own, outcome)
        return own.result()

    @contextmanager
    def _line(self, method: str) -> Iterator[Any]:
        """Yield a method of the server to call, and translate the errors of gRPC."""
        place = self.context.route.place
        line = self._lines.take(place)
        try:
            yield getattr(line.stub, method)
        except grpc.RpcError as error:
            if self.closed:
                raise ClosedError(f"{method}: the client was closed") from error
            translated = self.context.failed_call(place, error)
            if isinstance(translated, DeadlineExceededError):
                self._lines.replace(place, line)
            raise translated from error
        except (grpc.FutureCancelledError, ValueError) as error:  # Of a closed channel.
            if not self.closed:
                raise
            raise ClosedError(f"{method}: {error}") from error
        finally:
            if self._lines.give_back(line):
                line.channel.close()

    def _sleep(self, duration_s: float) -> None:
        if self._closed.wait(duration_s):
            raise ClosedError("the client was closed")
