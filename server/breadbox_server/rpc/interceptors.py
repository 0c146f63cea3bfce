"""What every call goes through: authorization, limits, errors as statuses, and counts."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire.message_parts import check_few_parts
from breadbox_server.access.authorization import (
    ANONYMOUS,
    HEALTH,
    SERVICE,
    Caller,
    Gate,
    Role,
    bearer_token,
    called_by,
    caller_name,
    calls_as,
    check_request,
    current_process,
    used_buffer,
    used_session,
)
from breadbox_server.admission.looks import Looks
from breadbox_server.admission.precedence import Precedence
from breadbox_server.base.errors import PermissionDeniedError, StandbyError
from breadbox_server.core.model.errors import DomainError, InvalidArgumentError
from breadbox_server.gateway.transfers import READERS
from breadbox_server.limits import PARTS_MAX, UNTAKEN_SMALL_BYTES
from breadbox_server.metrics.clients import ClientCensus, role_of_call
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading.session_users import SessionUsers, User
from breadbox_server.reading.uses import Uses
from breadbox_server.rpc.status import NOT_DONE, DeadlineNearError, reply_budget_s, status_of
from breadbox_server.rpc.traffic import Call, PendingReply, Traffic

log = logging.getLogger(__name__)

MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour = Callable[[Any, Context], Awaitable[Any]]
Answer = Callable[[Call, Context], Awaitable[Any]]

_METHODS: Final = frozenset(
    SERVICE + method.name
    for method in pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods
)
"""Methods of the service: an unknown name is not refused here."""
RESERVED: Final = frozenset(
    {
        HEALTH + "Check",
        *(SERVICE + name for name in ("ListBuffers", "GetBuffer", "GetStoreConfig")),
        *(SERVICE + name for name in ("CreateBuffer", "UpdateBuffer", "DeleteBuffer")),
    }
)
"""Methods that have places when all others are taken."""

LEARNERS: Final = frozenset(
    SERVICE + name
    for name in (
        *("FetchFragments", "GetPreparedFragments", "ReleaseLease"),
        *("RenewLease", "UpdatePriorities", "PublishModel"),
    )
)
"""Methods of learners, which go before appends."""

_LOOKS: Final = frozenset(SERVICE + name for name in ("ListBuffers", "GetBuffer", "GetStoreConfig"))
"""Methods that only look; so do reads that say so, and every call of a viewer."""

LARGE: Final = frozenset(
    SERVICE + name
    for name in ("FetchFragments", "GetPreparedFragments", "ReadFragments", "ReadPayloads")
)
"""Methods whose answers may be large, and take as long to make."""


def _readable(method: str, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Return a deserializer that returns errors instead of raising: gRPC would log a traceback."""
    kind = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", ".")).input_type

    def read(data: bytes) -> Any:
        try:
            check_few_parts(data, kind, PARTS_MAX)
            return deserialize(data) if deserialize is not None else data
        except DecodeError:
            return InvalidArgumentError("request", "is no message of this method")
        except ValueError as error:
            return InvalidArgumentError("request", str(error))

    return read


def _sendable(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Return a serializer that also takes what is serialized already."""

    def write(message: Any) -> bytes:
        return message if type(message) is bytes or serialize is None else serialize(message)

    return write


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor: it reports every error of a handler (`status.status_of`)."""

    def __init__(
        self, metrics: Metrics, gate: Gate, census: ClientCensus, traffic: Traffic
    ) -> None:
        self._metrics = metrics
        self._gate = gate
        self._census = census
        self._traffic = traffic
        self._outage: Callable[[], Exception | None] = lambda: None
        self._held: Callable[[], DomainError] | None = None
        """Gives what refuses every call of the service, or None while they are let in."""
        self._precedence: Precedence | None = None
        self._looks = Looks()
        metrics.looks_waiting.set_function(lambda: float(len(self._looks)))
        self._uses: Uses | None = None
        self._users: SessionUsers | None = None
        self._known: dict[str, MaybeHandler] = {}
        self._running: set[Call] = set()

    def hold(self, refusal: Callable[[], DomainError], cut_off: Exception | None = None) -> None:
        """Refuse new calls, but for health's; `cut_off` ends those in progress, outcome unknown."""
        self._held = refusal
        for call in tuple(self._running):
            if call.method in _METHODS and cut_off is not None:
                call.refuse(cut_off)

    def _check_held(self, method: str) -> None:
        if self._held is not None and method in _METHODS:
            raise self._held()

    def serve(
        self,
        outage: Callable[[], Exception | None],
        precedence: Precedence,
        uses: Uses,
        users: SessionUsers,
    ) -> None:
        """Let calls in from now on, and ask `outage` what does not answer the server."""
        self._outage = outage
        self._precedence = precedence
        self._uses = uses
        self._users = users
        self._held = None

    def recheck(self) -> None:
        """End the calls in progress that would not be let in any more; others' tokens changed."""
        callers: dict[tuple[str, str], Caller | DomainError] = {}
        for call in tuple(self._running):
            key = (call.method, bearer_token(call.metadata))
            try:
                if key not in callers:
                    callers[key] = self._gate.admit(call.method, call.metadata)
                caller = callers[key]
                if isinstance(caller, DomainError):
                    raise caller
                check_request(caller, call.method, call.request)
            except DomainError as error:
                callers.setdefault(key, error)
                call.refuse(error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        """Wrap every method, in a form in which its message is asked for by us, or never."""
        method = handler_call_details.method
        if self._precedence is not None:
            self._precedence.arrived()
        is_held = self._held is not None and method in _METHODS
        known = self._known.get(method)
        # A server that does not lead may have no service yet, and refuses calls all the same.
        handler = None if is_held else known or await continuation(handler_call_details)
        if handler is None and not is_held:
            return None
        try:
            # A caller without the right to call learns nothing else.
            metadata = handler_call_details.invocation_metadata or ()
            calls_as(self._gate.admit(method, metadata))
            called_by(metadata)
            self._check_held(method)
        except DomainError as error:
            return self._refusal(method, error)
        if known is None:
            # Methods that exist are few; names that do not exist never get here.
            known = self._known[method] = self._wrapped(method, handler)
        return known

    def _refusal(self, method: str, error: DomainError) -> MaybeHandler:
        async def refuse(call: Call, context: Context) -> NoReturn:
            if isinstance(error, PermissionDeniedError | StandbyError):
                call.weight = 1
            raise error

        # In this form whether one answer was asked for or many: a refusal comes with none.
        return grpc.stream_unary_rpc_method_handler(self._told(method, refuse))

    def _wrapped(self, method: str, handler: Any) -> MaybeHandler:
        parse = READERS.get(method.removeprefix(SERVICE), handler.request_deserializer)
        read, write = _readable(method, parse), _sendable(handler.response_serializer)
        if handler.unary_unary is not None:
            answer = self._encoded(self._on_message(method, handler.unary_unary), write)
            return grpc.stream_unary_rpc_method_handler(self._told(method, answer), read, write)
        if handler.unary_stream is not None:
            behaviour = _writing(handler.unary_stream)
            answer = self._counted(self._on_message(method, behaviour), write)
        else:
            behaviour = _writing(handler.stream_stream)
            answer = self._counted(self._on_messages(method, behaviour), write)
        return grpc.stream_stream_rpc_method_handler(self._told(method, answer), read, write)

    # Each of the following wraps how a method is answered in one more thing.

    def _encoded(self, answer: Answer, encode: Callable[[Any], bytes]) -> Answer:

        async def encoded(call: Call, context: Context) -> bytes:
            data = encode(await answer(call, context))
            if len(data) > UNTAKEN_SMALL_BYTES:
                call.held = self._traffic.hold(call, len(data))
            return data

        return encoded

    def _counted(self, answer: Answer, encode: Callable[[Any], bytes]) -> Answer:

        async def counted(call: Call, context: Context) -> Any:
            counting: Any = _CountingContext(context, encode, partial(self._traffic.hold, call))
            return await answer(call, counting)

        return counted

    def _on_message(self, method: str, behaviour: Behaviour) -> Answer:
        answer = self._in_time_of(method)

        async def on_message(call: Call, context: Context) -> Any:
            request = await self._receive(method, call, context)
            if request is grpc.aio.EOF:
                raise InvalidArgumentError("request", "is missing")
            call.request = request
            return await answer(call, behaviour, request, context)

        return on_message

    def _on_messages(self, method: str, behaviour: Behaviour) -> Answer:
        answer = self._in_time_of(method)

        async def messages(first: Any, call: Call, context: Context) -> AsyncIterator[Any]:
            message = first
            while message is not grpc.aio.EOF:
                yield message
                if method.startswith(SERVICE):
                    # The gateway knows for how long, and how much of them may be on its way.
                    message = _checked(await context.read())
                else:
                    message = await self._receive(method, call, context)

        async def on_messages(call: Call, context: Context) -> Any:
            first = await self._receive(method, call, context)
            return await answer(call, behaviour, messages(first, call, context), context)

        return on_messages

    async def _receive(self, method: str, call: Call, context: Context) -> Any:
        request = _checked(await self._traffic.receive(call, context))
        if request is not grpc.aio.EOF:  # As it is of a call that was given up.
            self._traffic.admit(call, caller_name() or "", is_reserved=method in RESERVED)
        if method in LARGE:
            self._traffic.check_untaken(call)
        return request

    def _in_time_of(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Calls of health and reflection may take as long as they want."""
        is_long = not method.startswith(SERVICE) and method != HEALTH + "Check"
        return _at_leisure if is_long else self._in_time

    async def _in_time(
        self, call: Call, behaviour: Behaviour, request: Any, context: Context
    ) -> Any:
        """Answer before the caller's time is up, so that the answer reaches the client.

        The handler sees the deadline a moment early. So ends a call whose token is revoked while it
        waits, or all when they are held off.
        """
        # Again: its message may have come long after its headers.
        self._check_held(call.method)
        limit = call.limit = asyncio.timeout(reply_budget_s(context.time_remaining()))
        caller = ANONYMOUS
        if self._gate.asks_for_tokens:
            call.metadata = context.invocation_metadata() or ()
            caller = self._gate.admit(call.method, call.metadata)
            check_request(caller, call.method, request)
            calls_as(caller)
        role = role_of_call(call.method, caller.role)
        if role is not None:
            self._census.seen(context.peer(), role)
        self._running.add(call)
        # Not before its message is there and its caller known: headers alone hold up nobody.
        is_viewer, looks = caller.role is Role.VIEWER, self._looks
        is_look = is_viewer or call.method in _LOOKS or getattr(request, "is_look", False)
        if not is_look:
            looks.worked()
        precedence = self._precedence if call.method in LEARNERS and not is_viewer else None
        if precedence is not None:
            precedence.begin()
        try:
            with self._using(call, caller, role, request):
                async with limit:
                    if not is_look:
                        return await behaviour(request, context)
                    await looks.turn(caller.name or call.peer)
                    began_at = perf_counter()
                    answer = await behaviour(request, context)
                    if call.method in _LOOKS:  # Others wait for news, or for their caller.
                        looks.took(perf_counter() - began_at)
                    return answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise call.refusal or self._outage() or DeadlineNearError from None
        finally:
            self._running.discard(call)
            if precedence is not None:
                precedence.end()

    @contextmanager
    def _using(self, call: Call, caller: Caller, role: Role | None, request: Any) -> Iterator[None]:
        """Count a call as a use of its buffer, and of the session there, until it ends."""
        buffer, uses = used_buffer(caller, call.method, request), self._uses
        used, users = used_session(role, call.method, request), self._users
        user = None
        if buffer and uses is not None:
            uses.begin(buffer)
        if used is not None and role is not None and users is not None:
            user = User(role, current_process(call.peer), caller.name, used[1])
            users.begin(used[0], user)
        try:
            yield
        finally:
            if buffer and uses is not None:
                uses.end(buffer)
            if user is not None and used is not None and users is not None:
                users.end(used[0], user)

    def _told(self, path: str, answer: Answer) -> Behaviour:
        method = path.rpartition("/")[2]
        seconds = self._metrics.rpc_seconds.labels(method)
        answered = {
            code: self._metrics.rpcs.labels(method, code.name)
            for code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
        }

        async def carry_out(unread: Any, context: Context) -> Any:
            started = perf_counter()
            code = grpc.StatusCode.OK
            peer = context.peer()
            call = self._traffic.begin(path, peer)
            try:
                return await answer(call, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code() or grpc.StatusCode.UNKNOWN
                raise
            except DeadlineNearError:
                code = grpc.StatusCode.CANCELLED
                late = grpc.StatusCode.DEADLINE_EXCEEDED
                try:
                    await _end(context.abort(late, NOT_DONE))
                except grpc.aio.AbortError:
                    code = late
                    raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it as a status
                code, refusal = status_of(error, method)
                await _end(context.abort_with_status(rpc_status.to_status(refusal)))
            finally:
                # gRPC keeps the error that ended a call beside its context: a cycle, which would
                # keep the request as well until somebody looks for cycles.
                del unread, context
                call.request = None
                self._traffic.answered(call)
                elapsed_s = perf_counter() - started
                seconds.observe(elapsed_s)
                counter = answered.get(code)
                if counter is None:
                    counter = self._metrics.rpcs.labels(method, code.name)
                counter.inc()
                if (name := caller_name()) is not None:
                    self._metrics.count_token_call(name, code.name)
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%s %s %.1f ms", method, code.name, elapsed_s * 1e3)

        return carry_out


class _CountingContext:
    """The context of a call that answers with messages; counts each until it is taken."""

    def __init__(
        self, context: Context, encode: Callable[[Any], bytes], hold: Callable[[int], PendingReply]
    ) -> None:
        self._context = context
        self._encode = encode
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Send a message; return once it is taken, or on its way behind others that are."""
        data = self._encode(message)
        if len(data) <= UNTAKEN_SMALL_BYTES:
            await self._context.write(data)
            return
        with closing(self._hold(len(data))):
            await self._context.write(data)


def _checked(request: Any) -> Any:
    if isinstance(request, InvalidArgumentError):
        raise request
    return request


async def _at_leisure(call: Call, behaviour: Behaviour, request: Any, context: Context) -> Any:
    return await behaviour(request, context)


def _writing(behaviour: Any) -> Behaviour:
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour  # type: ignore[no-any-return]  # gRPC's other form of the same

    async def write(request: Any, context: Context) -> None:
        async for answer in behaviour(request, context):
            await context.write(answer)

    return write


async def _end(aborting: Awaitable[NoReturn]) -> NoReturn:
    """Report to a caller how its call ended; AbortError is what gRPC wants to see.

    CancelledError: the caller has gone, and gRPC is only about to cancel the call: a server that
    was stopped for a while sees both together.
    """
    try:
        await aborting
    except grpc.aio.AbortError as ended:
        ended.__context__ = None  # It leads to the request as well.
        raise
    except grpc.aio.InternalError as error:
        log.debug("the status of a call could not be sent: %s", error)
        raise asyncio.CancelledError from None
