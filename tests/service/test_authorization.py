"""Each call with each kind of credential: let in or refused as the table says."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.access.authorization import RULES, SERVICE, Caller, Gate, Role, bearer_token
from breadbox_server.base.errors import PermissionDeniedError, UnauthenticatedError
from support.served import (
    CALL_S,
    CLIENT_STREAMS,
    Served,
    code_of,
    empty_request,
    reason_of,
    served,
)
from support.token_files import bearer, write_token_file

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods]
# Written out once more, so that a change of the table is a change of two places.
PRODUCER = {
    "WatchModel", "GroupEnds", "AppendFragments", "ListBuffers", "GetBuffer", "GetStoreConfig",
    "TakeTickets", "RenewTicket", "GiveBackTicket", "Members", "ReadMembers", "DropMembers",
    "ReleaseLease", "RenewLease", "ClaimMembers",
    "ReportEpisodes", "WritePayloads", "ReadPayloads", "DiscardPayloads",
}  # fmt: skip
LEARNER = {
    "StartSession", "EndSession", "PublishModel", "WatchModel", "GroupEnds", "FetchFragments",
    "ReadFragments", "CreateSubscription", "AcknowledgeChunks", "DeleteSubscription",
    "GetPreparedFragments", "RenewLease", "ReleaseLease", "UpdatePriorities", "ListBuffers",
    "GetBuffer", "GetStoreConfig", "WritePayloads", "ReadPayloads", "DiscardPayloads",
    "Members", "ReadMembers", "DropMembers", "ClaimMembers",
}  # fmt: skip
VIEWER = {
    "WatchModel", "GroupEnds", "ReadFragments", "GetPreparedFragments", "ReleaseLease",
    "ListBuffers", "GetBuffer", "GetStoreConfig", "ReadPayloads", "Members", "ReadMembers",
}  # fmt: skip
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


def code_of_blocking(call: Any) -> grpc.StatusCode:
    """How a call ends, whatever messages its answer has."""
    with contextlib.suppress(grpc.RpcError):
        deque(call, maxlen=0)
    return call.code()


async def codes(world: Served, headers: Iterable[tuple[str, str]]) -> dict[str, grpc.StatusCode]:
    """The code that each method answers with to an empty request.

    Streams of requests are sent without asyncio, whose stub says INTERNAL now and then instead of
    what a call was refused for: where it was over before its first request was written.
    """
    answered = {}
    with grpc.insecure_channel(world.server.address) as channel:
        blocking = ReplayBufferServiceStub(channel)
        for name in METHODS:
            is_streamed = name in CLIENT_STREAMS
            request = iter(empty_request(name)) if is_streamed else empty_request(name)
            method = getattr(blocking if is_streamed else world.stub, name)
            call = method(request, metadata=tuple(headers), timeout=CALL_S)
            answered[name] = await (
                asyncio.to_thread(code_of_blocking, call) if is_streamed else code_of(call)
            )
    return answered


def test_the_table_has_every_method_of_the_service_and_no_other() -> None:
    ours = {method for method in RULES if method.startswith(SERVICE)}

    assert {SERVICE + name for name in METHODS} == ours


def test_an_admin_may_call_everything() -> None:
    assert all(Role.ADMIN in rule.roles for rule in RULES.values())


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.PRODUCER, PRODUCER),
        (Role.LEARNER, LEARNER),
        (Role.VIEWER, VIEWER),
        (Role.ADMIN, set(METHODS)),
    ],
    ids=lambda value: value.value if isinstance(value, Role) else "",
)
async def test_a_role_may_call_what_the_table_says_and_nothing_else(
    tmp_path: Path, role: Role, allowed: set[str]
) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    async with served(tokens=tmp_path / "tokens") as world:
        answered = await codes(world, bearer(tokens[role]))

    assert allowed == {name for name, code in answered.items() if code not in REFUSED}
    assert set(METHODS) - allowed == {
        name for name, code in answered.items() if code is grpc.StatusCode.PERMISSION_DENIED
    }


@pytest.mark.parametrize(
    "headers",
    [
        (),
        bearer("bbx_" + "A" * 43),
        bearer(""),
        bearer("x" * 4000),
        (("authorization", "Basic dXNlcjpwYXNz"),),
        (("authorization", "Bearer"),),
    ],
    ids=["no token", "wrong token", "empty token", "huge token", "other scheme", "scheme alone"],
)
async def test_nothing_is_answered_to_a_caller_who_is_not_known(
    tmp_path: Path, headers: tuple[tuple[str, str], ...]
) -> None:
    write_token_file(tmp_path / "tokens")
    async with served(tokens=tmp_path / "tokens") as world:
        answered = await codes(world, headers)

    assert {grpc.StatusCode.UNAUTHENTICATED} == set(answered.values())


async def test_a_second_token_in_the_same_call_is_not_tried(tmp_path: Path) -> None:
    """Or a proxy that appends its own header could be talked past."""
    tokens = write_token_file(tmp_path / "tokens")
    headers = (*bearer("wrong"), *bearer(tokens[Role.ADMIN]))
    async with served(tokens=tmp_path / "tokens") as world:
        answered = await codes(world, headers)

    assert {grpc.StatusCode.UNAUTHENTICATED} == set(answered.values())


async def test_a_refusal_says_why_and_shows_no_token(tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    async with served(tokens=tmp_path / "tokens") as world:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.stub.DeleteBuffer(
                pb.DeleteBufferRequest(name="default"), metadata=bearer(tokens[Role.PRODUCER])
            )
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await world.stub.GetStoreConfig(
                pb.GetStoreConfigRequest(), metadata=bearer("bbx_guess")
            )

    assert "PERMISSION_DENIED" == reason_of(refused.value)
    assert "role 'producer' may not call DeleteBuffer" == refused.value.details()
    assert "UNAUTHENTICATED" == reason_of(unknown.value)
    shown = str(refused.value) + str(unknown.value)
    assert tokens[Role.PRODUCER] not in shown
    assert "bbx_guess" not in shown


async def test_a_refused_call_changes_nothing(tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    async with served(tokens=tmp_path / "tokens") as world:
        with pytest.raises(grpc.aio.AioRpcError):
            await world.stub.StartSession(
                pb.StartSessionRequest(session_id="mine"), metadata=bearer(tokens[Role.PRODUCER])
            )
        session_id = world.server.driver.core.describe("default").model.session_id  # type: ignore[arg-type]

    assert "" == session_id


async def test_a_probe_needs_no_token(tmp_path: Path) -> None:
    write_token_file(tmp_path / "tokens")
    async with served(tokens=tmp_path / "tokens") as world:
        reply = await health_pb2_grpc.HealthStub(world.channel).Check(
            health_pb2.HealthCheckRequest()
        )

    assert health_pb2.HealthCheckResponse.SERVING == reply.status


async def test_reflection_needs_a_token(tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with served(tokens=tmp_path / "tokens") as world:
        stub = reflection_pb2_grpc.ServerReflectionStub(world.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        call = stub.ServerReflectionInfo(iter([request]), metadata=bearer(tokens[Role.LEARNER]))
        reply = await anext(aiter(call))

    assert grpc.StatusCode.UNAUTHENTICATED is refused.value.code()
    assert reply.list_services_response.service


async def test_the_count_of_refusals_is_in_the_metrics(tmp_path: Path) -> None:
    write_token_file(tmp_path / "tokens")
    async with served(tokens=tmp_path / "tokens") as world:
        await codes(world, ())
        labels = {"method": "GetBuffer", "code": "UNAUTHENTICATED"}
        counted = world.server.metrics.registry.get_sample_value("breadbox_rpcs_total", labels)

    assert 1 == counted


async def test_without_a_token_file_everybody_may_call() -> None:
    async with served() as world:
        answered = await codes(world, ())

    assert not REFUSED & set(answered.values())


class TestGate:
    """The decision alone."""

    class OneToken:
        def caller_of(self, token: str) -> Caller | None:
            return Caller("one", Role.ADMIN) if token == "right" else None

    def test_a_method_that_nobody_thought_of_is_refused_even_to_an_admin(self) -> None:
        gate = Gate(self.OneToken())
        with pytest.raises(PermissionDeniedError):
            gate.admit("/other.Service/Method", bearer("right"))

    def test_health_of_another_service_is_not_public(self) -> None:
        with pytest.raises(UnauthenticatedError):
            Gate(self.OneToken()).admit("/other.Health/Check", ())

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
    def test_the_scheme_may_be_written_in_any_case(self, scheme: str) -> None:
        assert "abc" == bearer_token([("authorization", f"{scheme} abc")])

    def test_a_binary_header_is_no_token(self) -> None:
        assert "" == bearer_token([("authorization", b"Bearer abc")])
