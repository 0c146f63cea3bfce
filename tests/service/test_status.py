"""The error table: total, unique, and the same on the other side of a channel."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib import import_module
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from prometheus_client import CollectorRegistry

from breadbox.model import errors as library_errors
from breadbox.v1 import errors_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire.status import from_rpc_error
from breadbox_server.access.authorization import Gate
from breadbox_server.base import errors as shell_errors
from breadbox_server.core.model import errors as core_errors
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.model.inputs import Payload
from breadbox_server.metrics.clients import ClientCensus
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.rpc import status
from breadbox_server.rpc.interceptors import CallInterceptor
from breadbox_server.rpc.listening import PortConnections
from breadbox_server.rpc.traffic import Traffic
from support.served import CALL_S, info_of, status_of

EXAMPLES = [
    core_errors.InvalidArgumentError("fragment_count", "must be positive"),
    core_errors.FetchExceedsCapacityError(requested=9, capacity=8),
    core_errors.BufferNotFoundError("b"),
    core_errors.BufferExistsError("b"),
    core_errors.BuffersFullError(64),
    core_errors.SessionNotCurrentError("old", "new"),
    core_errors.SchemaMismatchError("s", "obs", "float32[4]", "float64[4]"),
    core_errors.VersionRegressedError(current=5, announced=4),
    shell_errors.SessionInUseError("run", "a learner called 2 s ago"),
    core_errors.LeaseNotFoundError("l"),
    core_errors.TicketNotFoundError("l"),
    core_errors.RequestNotFoundError("r"),
    core_errors.SubscriptionNotFoundError("s"),
    core_errors.SubscriptionExistsError("s", True),
    core_errors.SubscriptionsFullError(9),
    core_errors.RequestMismatchError("r", "fragment_count", 8, 4),
    core_errors.WaitersFullError(1024),
    core_errors.WorkersFullError(65536),
    core_errors.DrainingError(),
    shell_errors.StandbyError("process 7 on a", 5, 2, 0.4),
    shell_errors.AppendsFullError(10),
    shell_errors.WatchersFullError(10),
    shell_errors.ServerBusyError("no place"),
    shell_errors.PayloadSizeError("fragments[0].payload", Payload(PayloadId("0" * 32), 8)),
    shell_errors.QuotaFullError("team-a", "bytes_held_max", 1 << 30),
    shell_errors.QuotaExceededError("team-a", "workers_max", 8),
    shell_errors.GatewayOffError(),
    shell_errors.GatewayFullError("8 bytes are not announced"),
    shell_errors.GatewayStalledError(),
    shell_errors.UnauthenticatedError(),
    shell_errors.PermissionDeniedError("role 'producer'", "call DeleteBuffer"),
    shell_errors.InternalError("0123"),
    shell_errors.OutageError(["journal"], 12.3, {"payload store": "MISCONF"}),
    library_errors.StoreUnavailableError("redis://:secret@10.0.0.1:6379 does not answer"),
    library_errors.StoreFullError("OOM at 10.0.0.1"),
    library_errors.PayloadMissingError("0" * 32),
    library_errors.PayloadCorruptError("a payload is shorter than its reference says"),
]
WITH_RETRY = {
    "WAITERS_FULL",
    "APPENDS_FULL",
    "SERVER_BUSY",
    "WATCHERS_FULL",
    "STORE_FULL",
    "GATEWAY_FULL",
    "QUOTA_FULL",
}


def test_every_error_has_a_row_and_an_example() -> None:
    wanted = {
        *_errors_of(core_errors),
        *_errors_of(shell_errors),
        library_errors.StoreUnavailableError,
        library_errors.StoreFullError,
        library_errors.PayloadMissingError,
        library_errors.PayloadCorruptError,
        shell_errors.OutageError,
    }
    assert wanted == set(status.TABLE)
    assert wanted == {type(error) for error in EXAMPLES}


def _errors_of(module: ModuleType) -> set[type[Exception]]:
    return {
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, core_errors.DomainError)
        and kind is not core_errors.DomainError
        and kind.__module__ == module.__name__
    }


def test_reasons_are_unique_and_upper_case() -> None:
    reasons = [
        errors_pb2.ErrorReason.Name(status.TABLE[type(error)].reason)
        for error in EXAMPLES
        if type(error).__base__ not in status.TABLE  # A kind of another one shares its reason.
    ]
    assert len(reasons) == len(set(reasons))
    assert all(reason == reason.upper() and reason for reason in reasons)


def test_an_error_without_a_row_is_not_told() -> None:
    with pytest.raises(KeyError):
        status.to_status(ValueError("secret"))


def test_what_varies_in_the_message_is_in_the_metadata() -> None:
    told = status.to_status(core_errors.SessionNotCurrentError("old", "new"))
    info = error_details_pb2.ErrorInfo()
    assert told.details[0].Unpack(info)
    assert {"session": "old", "current": "new"} == dict(info.metadata)


def test_a_huge_value_is_cut_so_that_the_error_still_fits_the_trailers() -> None:
    told = status.to_status(core_errors.BufferNotFoundError("b" * 100_000))
    assert told.ByteSize() < 4096


class Raiser(replay_buffer_service_pb2_grpc.ReplayBufferServiceServicer):
    """Fails every ListBuffers with the error that it was given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def ListBuffers(  # noqa: N802
        self, request: pb.ListBuffersRequest, context: object
    ) -> None:
        raise self.error


def interceptor(metrics: Metrics) -> CallInterceptor:
    traffic = Traffic(metrics, PortConnections(), 1)
    return CallInterceptor(metrics, Gate(None), ClientCensus(monotonic), traffic)


async def call_failing_with(error: Exception, metrics: Metrics) -> grpc.aio.AioRpcError:
    server = grpc.aio.server(interceptors=[interceptor(metrics)])
    replay_buffer_service_pb2_grpc.add_ReplayBufferServiceServicer_to_server(Raiser(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListBuffers(pb.ListBuffersRequest(), timeout=CALL_S)
            return caught.value
    finally:
        # With a grace: the handler counts its call after the caller has the answer.
        await server.stop(CALL_S)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
async def test_an_error_comes_through_a_channel_as_its_row_says(error: Exception) -> None:
    metrics = Metrics(CollectorRegistry())
    row = status.TABLE[type(error)]
    told = await call_failing_with(error, metrics)
    info = info_of(told)
    reason = errors_pb2.ErrorReason.Name(row.reason)
    assert (row.code, status.DOMAIN, reason) == (told.code(), info.domain, info.reason)
    delays = [retry for retry in map(_retry_info, status_of(told).details) if retry is not None]
    assert (1 if reason in WITH_RETRY else 0) == len(delays)
    assert "secret" not in str(told)
    assert "10.0.0.1" not in str(told)
    labels = {"method": "ListBuffers", "code": row.code.name}
    assert 1 == metrics.registry.get_sample_value("breadbox_rpcs_total", labels)


@pytest.mark.parametrize(
    "error",
    [
        core_errors.FetchExceedsCapacityError(9, 8),
        core_errors.FetchExceedsCapacityError(900, 800, "bytes"),
    ],
)
async def test_a_fetch_beyond_capacity_is_told_by_the_library_in_the_words_of_the_server(
    error: core_errors.FetchExceedsCapacityError,
) -> None:
    told = await call_failing_with(error, Metrics(CollectorRegistry()))
    raised = from_rpc_error(told, "localhost:1", encrypted=False)
    assert (library_errors.InvalidRequestError, str(error)) == (type(raised), str(raised))


async def test_a_bad_argument_names_its_field_for_machines() -> None:
    error = core_errors.InvalidArgumentError("fragment_count", "must be positive")
    told = await call_failing_with(error, Metrics(CollectorRegistry()))
    requests = [error_details_pb2.BadRequest() for _ in status_of(told).details]
    found = [
        request
        for request, detail in zip(requests, status_of(told).details, strict=True)
        if detail.Unpack(request)
    ]
    assert ["fragment_count"] == [
        violation.field for request in found for violation in request.field_violations
    ]


async def test_a_bug_is_told_as_internal_and_its_text_only_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        told = await call_failing_with(ZeroDivisionError("secret 42"), Metrics(CollectorRegistry()))
    info = info_of(told)
    assert (grpc.StatusCode.INTERNAL, "INTERNAL") == (told.code(), info.reason)
    assert "secret" not in str(told)
    assert info.metadata["request_id"] in caplog.text
    assert "secret 42" in caplog.text


def _retry_info(detail: any_pb2.Any) -> error_details_pb2.RetryInfo | None:
    retry = error_details_pb2.RetryInfo()
    return retry if detail.Unpack(retry) else None


ExecuteBatchError: type[Exception] = import_module("grpc._cython.cygrpc").ExecuteBatchError
"""What gRPC raises when it has nobody to answer; it has no public name, and no types."""


class GoneContext:
    """A call whose caller has gone: gRPC can send nothing any more, and has not said so yet."""

    def __init__(self, left_s: float | None = None) -> None:
        self.left_s = left_s

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> pb.ListBuffersRequest:
        return pb.ListBuffersRequest()

    def time_remaining(self) -> float | None:
        return self.left_s

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def code(self) -> grpc.StatusCode | None:
        return None

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise ExecuteBatchError('Failed "execute_batch"')

    async def abort_with_status(self, told: grpc.Status) -> None:
        raise ExecuteBatchError('Failed "execute_batch"')


async def forever(request: pb.ListBuffersRequest, context: object) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("behaviour", "left_s", "logged", "code"),
    [
        (forever, 0.01, 0, "CANCELLED"),
        (Raiser(core_errors.BufferNotFoundError("b")).ListBuffers, None, 0, "NOT_FOUND"),
        (Raiser(ZeroDivisionError()).ListBuffers, None, 1, "INTERNAL"),
    ],
)
async def test_a_caller_that_went_before_its_answer_is_no_bug(
    caplog: pytest.LogCaptureFixture,
    behaviour: Callable[[pb.ListBuffersRequest, object], Awaitable[None]],
    left_s: float | None,
    logged: int,
    code: str,
) -> None:
    metrics = Metrics(CollectorRegistry())

    async def continuation(details: object) -> "grpc.RpcMethodHandler[Any, Any]":
        return grpc.unary_unary_rpc_method_handler(behaviour)

    method = "/breadbox.v1.ReplayBufferService/ListBuffers"
    details = SimpleNamespace(method=method, invocation_metadata=())
    handler = await interceptor(metrics).intercept_service(continuation, details)
    serve: Any = handler.stream_unary  # grpc's types know handlers of its blocking server only.
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await serve(None, GoneContext(left_s))
    assert logged == len(caplog.records)
    labels = {"method": "ListBuffers", "code": code}
    assert 1 == metrics.registry.get_sample_value("breadbox_rpcs_total", labels)
