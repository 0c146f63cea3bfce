"""What stands around every call: who may make it, how errors are told, what is counted."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from breadbox.message_parts import require_few_parts
from breadbox_server import status
from breadbox_server.authorization import (
    SERVICE,
    Caller,
    Gate,
    bearer_token,
    calls_as,
    check_request,
)
from breadbox_server.clients import ClientCensus, role_of_method
from breadbox_server.core.errors import DomainError, InvalidArgumentError
from breadbox_server.errors import InternalError
from breadbox_server.gateway import READERS
from breadbox_server.limits import PARTS_MAX
from breadbox_server.metrics import Metrics

log = logging.getLogger(__name__)

MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Behaviour = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]

REQUEST_ID_BYTES: Final = 8
ANSWER_MARGIN_S: Final = 0.15
"""Kept free before a call's deadline, so that the reason for no answer still reaches the caller;
less than what a wait that was asked for keeps free."""


def _readable(method: str, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer that gives an error for what is refused: gRPC would log a traceback."""
    kind = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", ".")).input_type

    def read(data: bytes) -> Any:
        try:
            require_few_parts(data, kind, PARTS_MAX)
            return deserialize(data) if deserialize is not None else data
        except DecodeError:
            return InvalidArgumentError("request", "is no message of this method")
        except ValueError as error:
            return InvalidArgumentError("request", str(error))

    return read


def _sendable(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """A serializer that takes what is serialized already."""

    def write(message: Any) -> bytes:
        return message if type(message) is bytes or serialize is None else serialize(message)

    return write


class _NotDoneError(Exception):
    """The caller's time is almost up, and nothing else is the matter."""


def _form_of(method: str, handler: Any) -> tuple[Callable[..., Any], Behaviour] | None:
    """What makes a handler of a method's form, and what it does; None: not to be wrapped."""
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler, handler.unary_unary
    if not method.startswith(SERVICE):
        return None
    # Of ours these are coroutines that write by way of their context, not generators.
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.stream_stream_rpc_method_handler, handler.stream_stream


@dataclass(eq=False, slots=True)
class _Running:
    """A call in progress."""

    method: str
    request: Any
    metadata: Iterable[tuple[str, str | bytes]]
    limit: asyncio.Timeout
    refusal: DomainError | None = None

    def refuse(self, error: DomainError | None) -> None:
        """End it with an error; None: let it go on. Idempotent."""
        if error is not None and not self.limit.expired():
            self.refusal = error
            self.limit.reschedule(asyncio.get_running_loop().time())


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor: nothing that a handler raises passes it untold.

    An exception without a row in `status` is our bug. The caller gets INTERNAL with a request id,
    never the exception's text; the log has both.

    Args:
        metrics: Takes count and latency of calls, by method and code.
        gate: Asked about every call before its request is even read; None: all may pass.
        census: Told of every caller whose call says what it is here for.
        outage: Says what does not answer the server, if anything; a call that is about to run out
            of time is told.
    """

    def __init__(
        self,
        metrics: Metrics,
        gate: Gate | None = None,
        census: ClientCensus | None = None,
        outage: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._gate = gate or Gate(None)
        self._census = census or ClientCensus(perf_counter)
        self._outage = outage
        self._known: dict[str, MaybeHandler] = {}
        self._running: set[_Running] = set()

    def recheck(self) -> None:
        """End the calls in progress that would not be let in any more; others' tokens changed."""
        callers: dict[tuple[str, str], Caller | DomainError] = {}
        for call in tuple(self._running):
            key = (call.method, bearer_token(call.metadata))
            if key not in callers:
                callers[key] = self._caller_of(call)
            call.refuse(_verdict(call, callers[key]))

    def _caller_of(self, call: _Running) -> Caller | DomainError:
        try:
            return self._gate.admit(call.method, call.metadata)
        except DomainError as error:
            return error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        """Wrap our methods; those of health and reflection, once let in, pass as they are."""
        method = handler_call_details.method
        known = self._known.get(method)
        handler = known or await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            calls_as(self._gate.admit(method, handler_call_details.invocation_metadata or ()))
        except DomainError as error:
            return self._refusal(method, handler, error)
        form = _form_of(method, handler)
        if known is not None or form is None:
            return handler
        make, behaviour = form
        wrapped: MaybeHandler = make(
            self._wrap(method, behaviour),
            request_deserializer=_readable(
                method, READERS.get(method.removeprefix(SERVICE), handler.request_deserializer)
            ),
            response_serializer=_sendable(handler.response_serializer),
        )
        # Methods that exist are few; names that do not exist never get here.
        self._known[method] = wrapped
        return wrapped

    def _refusal(self, method: str, handler: Any, error: DomainError) -> MaybeHandler:
        """A handler that refuses one call, in the method's own form; its request stays unread."""

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            raise error

        async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await _end(context.abort_with_status(rpc_status.to_status(status.to_status(error))))

        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._wrap(method, refuse))
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(refuse_stream)
        return grpc.stream_stream_rpc_method_handler(refuse_stream)

    async def _in_time(
        self,
        method: str,
        behaviour: Behaviour,
        request: Any,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Any:
        """Answer before the caller's time is up: else nobody would say what it waited for.

        For the handler it is the end that the deadline itself would bring a moment later. So is
        that of a call whose token is taken back while it waits.
        """
        left_s = context.time_remaining()
        if left_s is not None:
            left_s -= min(ANSWER_MARGIN_S, left_s / 4)
        if isinstance(request, InvalidArgumentError):
            raise request
        limit = asyncio.timeout(left_s)
        call = _Running(method, request, (), limit)
        if self._gate.asks_for_tokens:
            call.metadata = context.invocation_metadata() or ()
            # Again: its message may have come long after its headers.
            caller = self._gate.admit(method, call.metadata)
            check_request(caller, method, request)
            calls_as(caller)
            self._running.add(call)
        try:
            async with limit:
                return await behaviour(request, context)
        except TimeoutError:
            if not limit.expired():
                raise
            if call.refusal is not None:
                raise call.refusal from None
            raise self._outage() or _NotDoneError from None
        finally:
            self._running.discard(call)

    def _wrap(self, path: str, behaviour: Behaviour) -> Behaviour:
        method = path.rpartition("/")[2]
        role = role_of_method(path)
        seconds = self._metrics.rpc_seconds.labels(method)
        answered = {
            code: self._metrics.rpcs.labels(method, code.name)
            for code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
        }

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = perf_counter()
            code = grpc.StatusCode.OK
            if role is not None:
                self._census.seen(context.peer(), role)
            try:
                return await self._in_time(path, behaviour, request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code() or grpc.StatusCode.UNKNOWN
                raise
            except _NotDoneError:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                await _end(context.abort(code, "the server was not done in time"))
            except status.TELLABLE as error:
                code = status.code_of(error)
                await _end(context.abort_with_status(rpc_status.to_status(status.to_status(error))))
            except Exception:
                code = grpc.StatusCode.INTERNAL
                told = InternalError(secrets.token_hex(REQUEST_ID_BYTES))
                log.exception("%s failed; told as request id %s", method, told.request_id)
                await _end(context.abort_with_status(rpc_status.to_status(status.to_status(told))))
            finally:
                # gRPC keeps the error that ended a call beside its context: a cycle, which would
                # keep the request as well until somebody looks for cycles.
                del request, context
                elapsed_s = perf_counter() - started
                seconds.observe(elapsed_s)
                counter = answered.get(code)
                if counter is None:
                    counter = self._metrics.rpcs.labels(method, code.name)
                counter.inc()
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%s %s %.1f ms", method, code.name, elapsed_s * 1e3)

        return call


def _verdict(call: _Running, caller: Caller | DomainError) -> DomainError | None:
    """Why a call in progress would not be let in any more; None: it would."""
    if isinstance(caller, DomainError):
        return caller
    try:
        check_request(caller, call.method, call.request)
    except DomainError as error:
        return error
    return None


async def _end(aborting: Awaitable[NoReturn]) -> NoReturn:
    """Tell a caller how its call ended.

    Raises:
        AbortError: It was told; gRPC wants to see this.
        asyncio.CancelledError: It has gone, and gRPC, which can send it nothing any more, is only
            about to cancel the call: a server that was stopped for a while sees both at once.
    """
    try:
        await aborting
    except grpc.aio.AbortError as told:
        told.__context__ = None  # It leads to the request as well.
        raise
    except grpc.aio.InternalError as error:
        log.debug("nobody could be told how a call ended: %s", error)
        raise asyncio.CancelledError from None
