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
    gives_back,
    methods,
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

_METHODS: Final = frozenset(
    SERVICE + method.name
    for method in pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods
)
"""Methods of the service: an unknown name is not refused here."""
_LOOKS: Final = methods("ListBuffers", "GetBuffer", "GetStoreConfig")
"""Methods that only look; so do reads that say so, and every call of a viewer."""
RESERVED: Final = (
    _LOOKS | methods("CreateBuffer", "UpdateBuffer", "DeleteBuffer") | {HEALTH + "Check"}
)
"""Methods that have places when all others are taken."""

APPEND: Final = SERVICE + "AppendFragments"
LEARNERS: Final = methods(
    *("FetchFragments", "GetPreparedFragments", "ReleaseLease"),
    *("RenewLease", "UpdatePriorities", "PublishModel"),
)
"""Methods of learners, which go before appends."""

LARGE: Final = methods("FetchFragments", "GetPreparedFragments", "ReadFragments", "ReadPayloads")
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
        self.metrics = metrics
        self.gate = gate
        self.census = census
        self.traffic = traffic
        self.outage: Callable[[], Exception | None] = lambda: None
        """Returns what does not answer the server."""
        self.looks = Looks()
        metrics.looks_waiting.set_function(lambda: float(len(self.looks)))
        self._held: Callable[[], DomainError] | None = None
        """Gives what refuses every call of the service, or None while they are let in."""
        self.precedence: Precedence | None = None
        self.uses: Uses | None = None
        self.users: SessionUsers | None = None
        self._known: dict[str, MaybeHandler] = {}
        self.running: set[Call] = set()

    def hold(self, refusal: Callable[[], DomainError], cut_off: Exception | None = None) -> None:
        """Refuse new calls, but for health's; `cut_off` ends those in progress, outcome unknown."""
        self._held = refusal
        for call in tuple(self.running):
            if call.method in _METHODS and cut_off is not None:
                call.refuse(cut_off)

    def check_held(self, method: str) -> None:
        """Raise what refuses the method's calls at present."""
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
        self.outage = outage
        self.precedence = precedence
        self.uses = uses
        self.users = users
        self._held = None

    def recheck(self) -> None:
        """End the calls in progress that would not be let in any more; others' tokens changed."""
        callers: dict[tuple[str, str], Caller | DomainError] = {}
        for call in tuple(self.running):
            key = (call.method, bearer_token(call.metadata))
            try:
                if key not in callers:
                    callers[key] = self.gate.admit(call.method, call.metadata)
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
        if self.precedence is not None:
            self.precedence.arrived(is_append=method == APPEND)
        is_held = self._held is not None and method in _METHODS
        known = self._known.get(method)
        # A server that does not lead may have no service yet, and refuses calls all the same.
        handler = None if is_held else known or await continuation(handler_call_details)
        if handler is None and not is_held:
            return None
        try:
            # A caller without the right to call learns nothing else.
            metadata = handler_call_details.invocation_metadata or ()
            calls_as(self.gate.admit(method, metadata))
            called_by(metadata)
            self.check_held(method)
        except DomainError as error:
            return self._handler(_Method(method, self.metrics, None, error))
        if known is None:
            # Methods that exist are few; names that do not exist never get here.
            known = self._known[method] = self._handler(_Method(method, self.metrics, handler))
        return known

    def _handler(self, method: "_Method") -> MaybeHandler:
        async def handle(unread: Any, context: Context) -> Any:
            handling = _Handling(self, method, context)
            # gRPC keeps the error that ended a call beside its context: a cycle, which would keep
            # the request as well until cycles are collected.
            del unread, context
            return await handling.carry_out()

        if method.answers_many:
            return grpc.stream_stream_rpc_method_handler(handle, method.read, method.write)
        return grpc.stream_unary_rpc_method_handler(handle, method.read, method.write)


class _Method:
    """How the calls of one method are handled: as the service does, or all refused."""

    def __init__(
        self, path: str, metrics: Metrics, handler: Any, refusal: DomainError | None = None
    ) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]
        self.refusal = refusal
        # Refused in this form whether one answer was asked for or many: a refusal comes with none.
        self.takes_many = self.answers_many = False
        self.read: Any = None
        self.write: Any = None
        if handler is not None:
            self.takes_many = handler.request_streaming
            self.answers_many = handler.response_streaming
            parse = READERS.get(path.removeprefix(SERVICE), handler.request_deserializer)
            self.read, self.write = _readable(path, parse), _sendable(handler.response_serializer)
            many = handler.unary_stream or handler.stream_stream
            self.behaviour: Behaviour = handler.unary_unary or _writing(many)
        self.is_of_service = path.startswith(SERVICE)
        self.is_timed = self.is_of_service or path == HEALTH + "Check"
        """False if calls may take as long as they want."""
        self.seconds = metrics.rpc_seconds.labels(self.name)
        self.answered = {
            code: metrics.rpcs.labels(self.name, code.name)
            for code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
        }


class _Handling:
    """One call: its message is received, its caller let in, its handler run, and it is answered."""

    def __init__(self, house: CallInterceptor, method: _Method, context: Context) -> None:
        self._house = house
        self._method = method
        self._context: Any = context
        self._call = house.traffic.begin(method.path, context.peer())
        self._code = grpc.StatusCode.OK

    async def carry_out(self) -> Any:
        """Answer the call; whatever goes wrong reaches the caller as a status."""
        started = perf_counter()
        try:
            return await self._answer()
        except asyncio.CancelledError:
            self._code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            self._code = self._context.code() or grpc.StatusCode.UNKNOWN
            raise
        except DeadlineNearError:
            self._code = grpc.StatusCode.CANCELLED
            late = grpc.StatusCode.DEADLINE_EXCEEDED
            try:
                await _end(self._context.abort(late, NOT_DONE))
            except grpc.aio.AbortError:
                self._code = late
                raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it as a status
            self._code, refusal = status_of(error, self._method.name)
            await _end(self._context.abort_with_status(rpc_status.to_status(refusal)))
        finally:
            self._finish(perf_counter() - started)

    def _finish(self, elapsed_s: float) -> None:
        method, call, metrics, code = self._method, self._call, self._house.metrics, self._code
        self._context = call.request = None
        self._house.traffic.answered(call)
        method.seconds.observe(elapsed_s)
        counter = method.answered.get(code)
        if counter is None:
            counter = metrics.rpcs.labels(method.name, code.name)
        counter.inc()
        if (name := caller_name()) is not None:
            metrics.count_token_call(name, code.name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s %s %.1f ms", method.name, code.name, elapsed_s * 1e3)

    async def _answer(self) -> bytes | None:
        method, call, traffic = self._method, self._call, self._house.traffic
        if method.refusal is not None:
            if isinstance(method.refusal, PermissionDeniedError | StandbyError):
                call.weight = 1
            raise method.refusal
        request = await self._receive()
        if method.takes_many:
            request = self._messages(request)
        elif request is grpc.aio.EOF:
            raise InvalidArgumentError("request", "is missing")
        else:
            call.request = request
        context = self._context
        if method.answers_many:
            context = _CountingContext(context, method.write, partial(traffic.hold, call))
        run = self._run_in_time if method.is_timed else method.behaviour
        answer = await run(request, context)
        if method.answers_many:
            return None
        data: bytes = method.write(answer)
        if len(data) > UNTAKEN_SMALL_BYTES:
            call.held = traffic.hold(call, len(data))
        return data

    async def _receive(self) -> Any:
        call, traffic = self._call, self._house.traffic
        request = _checked(await traffic.receive(call, self._context))
        if request is not grpc.aio.EOF:  # As it is of a call that was given up.
            traffic.admit(call, caller_name() or "", is_reserved=call.method in RESERVED)
        if call.method in LARGE:
            traffic.check_untaken(call)
        return request

    async def _messages(self, message: Any) -> AsyncIterator[Any]:
        while message is not grpc.aio.EOF:
            yield message
            if self._method.is_of_service:
                # The gateway knows for how long, and how much of them may be on its way.
                message = _checked(await self._context.read())
            else:
                message = await self._receive()

    async def _run_in_time(self, request: Any, context: Any) -> Any:
        """Answer before the caller's time is up, so that the answer reaches the client.

        The handler sees the deadline a moment early. So ends a call whose token is revoked while it
        waits, or all when they are held off.
        """
        house, call, behaviour = self._house, self._call, self._method.behaviour
        # Again: its message may have come long after its headers.
        house.check_held(call.method)
        limit = call.limit = asyncio.timeout(reply_budget_s(context.time_remaining()))
        caller, role = self._admit(request)
        house.running.add(call)
        # Not before its message is there and its caller known: headers alone hold up nobody.
        is_viewer, looks = caller.role is Role.VIEWER, house.looks
        is_look = is_viewer or call.method in _LOOKS or getattr(request, "is_look", False)
        if not is_look:
            looks.worked()
        precedence = house.precedence if call.method in LEARNERS and not is_viewer else None
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
            raise call.refusal or house.outage() or DeadlineNearError from None
        finally:
            house.running.discard(call)
            if precedence is not None:
                precedence.end()

    @contextmanager
    def _using(self, call: Call, caller: Caller, role: Role | None, request: Any) -> Iterator[None]:
        """Count a call as a use of its buffer, and of the session there, until it ends."""
        buffer, uses = used_buffer(caller, call.method, request), self._house.uses
        used, users = used_session(role, call.method, request), self._house.users
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
                users.end(used[0], user, gave_back=gives_back(call.method, request))

    def _admit(self, request: Any) -> tuple[Caller, Role | None]:
        house, call = self._house, self._call
        caller = ANONYMOUS
        if house.gate.asks_for_tokens:
            call.metadata = self._context.invocation_metadata() or ()
            caller = house.gate.admit(call.method, call.metadata)
            check_request(caller, call.method, request)
            calls_as(caller)
        role = role_of_call(call.method, caller.role)
        if role is not None:
            house.census.seen(call.peer, role)
        return caller, role


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
