"""Run operations in the calling thread; see `breadbox.operations.operations`."""

import threading
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from breadbox.model.errors import ClosedError, ReplayBufferError
from breadbox.model.options import open_channel
from breadbox.operations.operations import (
    Concurrently,
    Context,
    Effect,
    Invoke,
    Operation,
    RunBlocking,
    Sleep,
)
from breadbox.shared.process_bound import ProcessBound
from breadbox.transport.background import BackgroundRunner
from breadbox.transport.background import BackgroundTask as BackgroundTask
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub

T = TypeVar("T")

_CALL_ERRORS: Final = (grpc.RpcError, grpc.FutureCancelledError, ValueError)
"""Errors that gRPC raises for a call; `ValueError` on a closed channel."""


class Interpreter(ProcessBound):
    """Run the operations of one client, over a connection to each address. Thread-safe."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._closed = threading.Event()
        addresses = context.route.addresses
        self._channels = [
            open_channel(each, context.options, is_one_of_many=len(addresses) > 1)
            for each in addresses
        ]
        self._stubs = [ReplayBufferServiceStub(channel) for channel in self._channels]
        self._metadata = context.options.metadata()
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
        for channel in self._channels:
            channel.close()
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
            case Invoke(call=call, timeout_s=timeout_s):
                place = self.context.route.place
                method = getattr(self._stubs[place], call.method)
                try:
                    response = method(call.request, timeout=timeout_s, metadata=self._metadata)
                except _CALL_ERRORS as error:
                    raise self._translated(error, call.method, place) from error
                return call.decode(response)
            case Sleep(duration_s=duration_s):
                return self._sleep(duration_s)
            case RunBlocking(function=function, deadline=deadline):
                return function(deadline)
            case Concurrently(invoke=invoke, blocking=blocking):
                return self._perform_concurrently(invoke, blocking)

    def _perform_concurrently(self, invoke: Invoke, blocking: RunBlocking) -> Any:
        call, place = invoke.call, self.context.route.place
        method = getattr(self._stubs[place], call.method)
        try:
            future = method.future(call.request, timeout=invoke.timeout_s, metadata=self._metadata)
        except _CALL_ERRORS as error:
            raise self._translated(error, call.method, place) from error
        try:
            with suppress(ReplayBufferError):
                blocking.function(blocking.deadline)
        except BaseException:
            future.cancel()
            raise
        try:
            response = future.result()
        except _CALL_ERRORS as error:
            raise self._translated(error, call.method, place) from error
        return call.decode(response)

    def _translated(self, error: Exception, method: str, place: int) -> ReplayBufferError:
        if not isinstance(error, grpc.RpcError):  # The channel is closed.
            return ClosedError(f"{method}: {error}")
        if self.closed:
            return ClosedError(f"{method}: the client was closed")
        return self.context.failed_call(place, error)

    def _sleep(self, duration_s: float) -> None:
        if self._closed.wait(duration_s):
            raise ClosedError("the client was closed")
