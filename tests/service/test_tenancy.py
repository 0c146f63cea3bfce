"""Every call with every credential on every buffer: a token's buffers are all there is for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from breadbox.v1 import buffer_pb2, fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.access.authorization import RULES, SERVICE, Role, matches
from breadbox_server.access.tokens import new_token
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.rpc import traffic
from support.eventually import eventually
from support.served import (
    CALL_S,
    CLIENT_STREAMS,
    Served,
    info_in,
    reason_of,
    served,
    span,
    status_of,
)
from support.token_files import bearer, line_of, write_tokens

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods]
OWN, OTHERS, DEFAULT = "team-a-1", "team-b-1", "default"
OWN_MISSING, OTHERS_MISSING = "team-a-2", "team-b-2"
BUFFERS = (OWN, OTHERS, "", OWN_MISSING, OTHERS_MISSING)
"""That a call names; empty is the default buffer, which is no team's."""

REQUESTS: dict[str, Callable[[str], Any]] = {
    "StartSession": lambda name: pb.StartSessionRequest(buffer=name, session_id="taken"),
    "EndSession": lambda name: pb.EndSessionRequest(buffer=name, session_id="run"),
    "PublishModel": lambda name: pb.PublishModelRequest(
        buffer=name, session_id="run", model_version=1
    ),
    "WatchModel": lambda name: pb.WatchModelRequest(buffer=name),
    "GroupEnds": lambda name: pb.GroupEndsRequest(buffer=name),
    "TakeTickets": lambda name: pb.TakeTicketsRequest(buffer=name),
    "RenewTicket": lambda name: pb.RenewTicketRequest(buffer=name, group="g"),
    "GiveBackTicket": lambda name: pb.GiveBackTicketRequest(buffer=name, group="g"),
    "Members": lambda name: pb.MembersRequest(buffer=name),
    "ReadMembers": lambda name: pb.ReadMembersRequest(buffer=name, keys=[pb.MemberKey(group="g")]),
    "ClaimMembers": lambda name: pb.ClaimMembersRequest(buffer=name, member_count=1),
    "DropMembers": lambda name: pb.DropMembersRequest(buffer=name, keys=[pb.MemberKey(group="g")]),
    "AppendFragments": lambda name: pb.AppendFragmentsRequest(
        buffer=name, fragments=[fragment(name)]
    ),
    "FetchFragments": lambda name: pb.FetchFragmentsRequest(
        buffer=name, request_id="mine", fragment_count=1
    ),
    "GetPreparedFragments": lambda name: pb.GetPreparedFragmentsRequest(buffer=name),
    "ReadFragments": lambda name: pb.ReadFragmentsRequest(buffer=name),
    "CreateSubscription": lambda name: pb.CreateSubscriptionRequest(buffer=name, name="mine"),
    "AcknowledgeChunks": lambda name: pb.AcknowledgeChunksRequest(
        buffer=name, subscription="mine", chunk_id=-1
    ),
    "DeleteSubscription": lambda name: pb.DeleteSubscriptionRequest(buffer=name, name="mine"),
    "RenewLease": lambda name: pb.RenewLeaseRequest(buffer=name, lease_id="1"),
    "ReleaseLease": lambda name: pb.ReleaseLeaseRequest(
        buffer=name, lease_id="1", mode=pb.RELEASE_MODE_RETURNED
    ),
    "UpdatePriorities": lambda name: pb.UpdatePrioritiesRequest(
        buffer=name, updates=[pb.PriorityUpdate(chunk_id=0, priority=2.0)], delete_chunk_ids=[1]
    ),
    "CreateBuffer": lambda name: pb.CreateBufferRequest(name=name),
    "UpdateBuffer": lambda name: pb.UpdateBufferRequest(name=name),
    "DeleteBuffer": lambda name: pb.DeleteBufferRequest(name=name),
    "ListBuffers": lambda name: pb.ListBuffersRequest(),
    "GetBuffer": lambda name: pb.GetBufferRequest(name=name),
    "GetStoreConfig": lambda name: pb.GetStoreConfigRequest(),
    "ReportEpisodes": lambda name: pb.ReportEpisodesRequest(
        buffer=name, episodes=[pb.EpisodeReport(worker_id="w", end=pb.EPISODE_END_TERMINATED)]
    ),
    "WritePayloads": lambda name: [pb.WritePayloadsRequest(size_bytes=[3], data=b"abc")],
    "ReadPayloads": lambda name: pb.ReadPayloadsRequest(
        ranges=[pb.PayloadRange(payload=fragment(name).payload, length_bytes=8)]
    ),
    "DiscardPayloads": lambda name: pb.DiscardPayloadsRequest(payload_ids=["0" * 32]),
}
"""A request of every method that names a buffer, if the method names any."""
CREDENTIALS = {
    "none": None,
    "unknown": "",
    "revoked": "admin",
    "producer of all": "producer",
    "learner of all": "learner",
    "viewer of all": "viewer",
    "admin of all": "admin",
    "producer of the team": "producer buffers=team-a-*",
    "learner of the team": "learner buffers=team-a-*",
    "viewer of the team": "viewer buffers=team-a-*",
    "admin of the team": "admin buffers=team-a-*",
}
"""The line behind a token without its name; None: no token, empty: one that stands nowhere."""
OPEN_TO_ALL = {
    "ListBuffers", "GetStoreConfig", "WritePayloads", "ReadPayloads", "DiscardPayloads",
}  # fmt: skip
"""Methods that name no buffer, written out so that another one is a change of two places. What may
be read and discarded by the last ones is for tests of the gateway."""


def fragment(buffer: str) -> fragment_pb2.FragmentMetadata:
    """One whose payload nobody has."""
    return fragment_pb2.FragmentMetadata(
        worker_id="w",
        session_id="run",
        model_version_min=0,
        model_version_max=0,
        step_count=8,
        payload=fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=8),
    )


@asynccontextmanager
async def tenants(
    tmp_path: Path, config: BufferConfig | None = None
) -> AsyncIterator[tuple[Served, dict[str, str | None]]]:
    """A server with a buffer of each team, each with a fragment that is leased; and tokens."""
    path = tmp_path / "tokens"
    known = {name: line for name, line in CREDENTIALS.items() if line}
    lines = [
        " ".join((role, name.replace(" ", "-"), *bounds))
        for name, (role, *bounds) in ((name, line.split()) for name, line in known.items())
    ]
    made = write_tokens(path, *lines)
    tokens: dict[str, str | None] = {"none": None, "unknown": new_token()}
    tokens |= dict(zip(known, made, strict=True))
    kept = [(line, token) for line, token in zip(lines, made, strict=True) if "revoked" not in line]
    async with served(config, tokens=path) as world:
        admin = bearer(tokens["admin of all"])
        for buffer in (OWN, OTHERS):
            await world.stub.CreateBuffer(pb.CreateBufferRequest(name=buffer), metadata=admin)
        for buffer in (OWN, OTHERS, DEFAULT):
            await world.stub.StartSession(
                pb.StartSessionRequest(buffer=buffer, session_id="run"), metadata=admin
            )
        path.write_text("".join(line_of(line, token) for line, token in kept))

        while "OK" == await answer(world, "ListBuffers", "", tokens["revoked"]):
            pass
        yield world, tokens


async def answer(world: Served, method: str, buffer: str, token: str | None) -> str:
    """The reason that a call is refused with, or OK."""
    if method in CLIENT_STREAMS:
        refusal = await refusal_of_stream(world, method, buffer, token)
        return "OK" if refusal is None else info_in(refusal).reason
    call = getattr(world.stub, method)(
        REQUESTS[method](buffer), metadata=bearer(token), timeout=CALL_S
    )
    if await call.code() is grpc.StatusCode.OK:
        return "OK"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (anext(aiter(call)) if method == "ReadPayloads" else call)
    return reason_of(refused.value)


async def refusal_of_stream(
    world: Served, method: str, buffer: str, token: str | None
) -> status_pb2.Status | None:
    """With what a call that sends a stream was refused.

    Without asyncio, whose stub says INTERNAL now and then instead of what a call was refused for:
    where it was over before its first request was written.
    """

    def ask() -> status_pb2.Status | None:
        with grpc.insecure_channel(world.server.address) as channel:
            call = getattr(ReplayBufferServiceStub(channel), method)(
                iter(REQUESTS[method](buffer)), metadata=bearer(token), timeout=CALL_S
            )
            try:
                list(call)
            except grpc.RpcError as refused:
                return status_of(refused)
        return None

    return await asyncio.to_thread(ask)


def expected(method: str, buffer: str, credential: str) -> str | None:
    """The reason with which a call has to be refused; None: it is let in, whatever it answers."""
    line = CREDENTIALS[credential]
    if not line or credential == "revoked":
        return "UNAUTHENTICATED"
    role, *bounds = line.split()
    if Role(role) not in RULES[SERVICE + method].roles:
        return "PERMISSION_DENIED"
    if bounds and method not in OPEN_TO_ALL and buffer not in (OWN, OWN_MISSING):
        return "PERMISSION_DENIED"
    return None


def test_every_method_has_a_request_here() -> None:
    assert set(METHODS) == set(REQUESTS)


def test_every_method_whose_request_names_a_buffer_is_bound_by_it() -> None:
    """By the contract's own fields, so that a method that is new cannot be forgotten."""
    for method in METHODS:
        fields = pb.DESCRIPTOR.message_types_by_name[f"{method}Request"].fields_by_name
        # A name is the buffer's own, unless that has a field of its own.
        named = {"buffer"} & set(fields) or {"name"} & set(fields)
        assert named == ({RULES[SERVICE + method].buffer} - {""}), method
        workers = {
            name
            for name, field in fields.items()
            if field.message_type
            and {"worker_id", "group"} & set(field.message_type.fields_by_name)
            and name != "after"  # What was listed before.
        }
        rule = RULES[SERVICE + method]
        assert workers == ({rule.workers, rule.more_workers} - {""}), method
    assert OPEN_TO_ALL == {name for name in METHODS if not RULES[SERVICE + name].buffer}


@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_a_call_is_let_in_for_whom_it_is_meant_and_for_nobody_else(
    tmp_path: Path, credential: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever asks everything of a server that does not know them is hung up on before the end.
    monkeypatch.setattr(traffic, "FRUITLESS_MAX", 10**6)
    async with tenants(tmp_path) as (world, tokens):
        for method, buffer in product(METHODS, BUFFERS):
            told = await answer(world, method, buffer, tokens[credential])
            wanted = expected(method, buffer, credential)
            if wanted is None:
                assert told not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), (method, buffer)
            else:
                assert wanted == told, (method, buffer)


async def test_what_is_refused_does_not_tell_whether_there_is_such_a_buffer(
    tmp_path: Path,
) -> None:
    async with tenants(tmp_path) as (world, tokens):
        for method in set(METHODS) - OPEN_TO_ALL:
            told = set()
            for buffer in (OTHERS, OTHERS_MISSING):
                token = tokens["admin of the team"]
                if method in CLIENT_STREAMS:
                    refusal = await refusal_of_stream(world, method, buffer, token)
                    assert refusal is not None
                    told.add(refusal.message.replace(buffer, "?"))
                    continue
                call = getattr(world.stub, method)(REQUESTS[method](buffer), metadata=bearer(token))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                told.add(str(refused.value.details()).replace(buffer, "?"))
            assert {
                "token 'admin-of-the-team' may not use buffer '?'; it is for team-a-*"
            } == told, method


async def test_calls_on_another_teams_buffer_change_nothing_of_it(tmp_path: Path) -> None:
    async with tenants(tmp_path) as (world, tokens):
        before = world.server.driver.core.describe(OTHERS)  # type: ignore[arg-type]
        for method, role in product(METHODS, Role):
            await answer(world, method, OTHERS, tokens[f"{role.value} of the team"])
        after = world.server.driver.core.describe(OTHERS)  # type: ignore[arg-type]

        assert before == after
        assert (OTHERS_MISSING) not in world.server.driver.core.buffers.names()


async def test_a_team_sees_its_own_buffers_only(tmp_path: Path) -> None:
    async with tenants(tmp_path) as (world, tokens):
        seen = {}
        for credential in ("learner of the team", "learner of all"):
            reply = await world.stub.ListBuffers(
                pb.ListBuffersRequest(), metadata=bearer(tokens[credential])
            )
            seen[credential] = [buffer.name for buffer in reply.buffers]

    assert [OWN] == seen["learner of the team"]
    assert [DEFAULT, OWN, OTHERS] == seen["learner of all"]


@pytest.mark.parametrize("is_read", [False, True], ids=["of a fetch", "of a read"])
async def test_a_lease_of_another_team_is_none_in_a_buffer_of_ones_own(
    tmp_path: Path, is_read: bool
) -> None:
    async with tenants(tmp_path) as (world, tokens):
        admin = bearer(tokens["admin of all"])
        await world.stub.AppendFragments(
            pb.AppendFragmentsRequest(buffer=OTHERS, fragments=[world.metadata(0)]), metadata=admin
        )
        if is_read:
            lease = (
                await world.stub.ReadFragments(
                    pb.ReadFragmentsRequest(buffer=OTHERS), metadata=admin
                )
            ).lease
        else:
            granted = await world.stub.FetchFragments(
                pb.FetchFragmentsRequest(buffer=OTHERS, request_id="theirs", fragment_count=1),
                metadata=admin,
            )
            lease = granted.grant.lease
        lease_id = lease.lease_id
        requests: Iterable[tuple[str, Any]] = (
            ("RenewLease", pb.RenewLeaseRequest(buffer=OWN, lease_id=lease_id)),
            (
                "ReleaseLease",
                pb.ReleaseLeaseRequest(
                    buffer=OWN, lease_id=lease_id, mode=pb.RELEASE_MODE_CONSUMED
                ),
            ),
            (
                "GetPreparedFragments",
                pb.GetPreparedFragmentsRequest(buffer=OWN, request_id="theirs"),
            ),
        )
        told = []
        for method, request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(world.stub, method)(
                    request, metadata=bearer(tokens["admin of the team"])
                )
            told.append(reason_of(refused.value))
        kept = await world.stub.RenewLease(
            pb.RenewLeaseRequest(buffer=OTHERS, lease_id=lease_id), metadata=admin
        )

    assert ["LEASE_NOT_FOUND", "LEASE_NOT_FOUND", "REQUEST_NOT_FOUND"] == told
    assert lease_id == kept.lease.lease_id


READER_A, READER_B = "learner buffers=team-a-*", "learner buffers=team-b-*"


async def test_a_team_that_reads_much_ends_its_own_read_leases_and_no_other_teams(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens"
    admin, *readers = write_tokens(
        path,
        "admin admin",
        *(
            line.replace(" ", f" {name} ")
            for name, line in zip("ab", (READER_A, READER_B), strict=True)
        ),
    )
    async with served(BufferConfig(capacity_bytes=8 * 250), tokens=path) as world:
        leases = {}
        for buffer, reader, lease_s, count in (
            (OTHERS, readers[1], 5, 1),
            (OWN, readers[0], 86_400, 4),
        ):
            for method, request in (
                ("CreateBuffer", pb.CreateBufferRequest(name=buffer)),
                ("StartSession", pb.StartSessionRequest(buffer=buffer, session_id="run")),
                (
                    "AppendFragments",
                    pb.AppendFragmentsRequest(
                        buffer=buffer, fragments=[world.metadata(index) for index in range(count)]
                    ),
                ),
            ):
                await getattr(world.stub, method)(request, metadata=bearer(admin))
            for after in range(-1, count - 1):
                reply = await world.stub.ReadFragments(
                    pb.ReadFragmentsRequest(
                        buffer=buffer,
                        after_chunk_id=after,
                        chunk_count_max=1,
                        lease_duration=span(lease_s),
                    ),
                    metadata=bearer(reader),
                )
                leases[buffer, after] = reply.lease.lease_id
        # 500 bytes are read and 250 may be kept. Of all leases that of the other team ends first.
        for buffer in (OTHERS, OWN):
            await world.stub.EndSession(
                pb.EndSessionRequest(buffer=buffer, session_id="run"), metadata=bearer(admin)
            )
        assert 200 == world.server.driver.reading.leases.kept_bytes
        kept = await world.stub.RenewLease(
            pb.RenewLeaseRequest(buffer=OTHERS, lease_id=leases[OTHERS, -1]),
            metadata=bearer(readers[1]),
        )
        ended = []
        for after in range(-1, 3):
            call = world.stub.RenewLease(
                pb.RenewLeaseRequest(buffer=OWN, lease_id=leases[OWN, after]),
                metadata=bearer(readers[0]),
            )
            ended.append(await call.code() is not grpc.StatusCode.OK)

    assert leases[OTHERS, -1] == kept.lease.lease_id
    assert [True, True, True, False] == ended


async def test_a_payload_of_another_team_is_none_whoever_names_its_id(tmp_path: Path) -> None:
    async with tenants(tmp_path) as (world, tokens):
        admin, team = bearer(tokens["admin of all"]), bearer(tokens["admin of the team"])
        theirs = world.metadata(0)
        await world.stub.AppendFragments(
            pb.AppendFragmentsRequest(buffer=OTHERS, fragments=[theirs]), metadata=admin
        )
        told = []
        for payload_id in (theirs.payload.payload_id, "0" * 32):
            named = world.metadata(0)
            named.payload.payload_id = payload_id
            request = pb.AppendFragmentsRequest(buffer=OWN, fragments=[named])
            reply = await world.stub.AppendFragments(request, metadata=team)
            publish = pb.PublishModelRequest(
                buffer=OWN, session_id="run", model_version=1, weights=named.payload
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await world.stub.PublishModel(publish, metadata=team)
            details = refused.value.details() or ""
            told.append((reply, reason_of(refused.value), details.replace(payload_id, "ID")))
        world.clock.advance(3600.0)
        world.server.driver.tidy()
        await world.server.driver.deletions.wait_empty()

    assert "PAYLOAD_MISSING" == told[0][1]
    assert told[0] == told[1]
    assert theirs.payload.payload_id not in world.custodian.deleted


async def test_calls_are_counted_by_token_as_long_as_it_is_known(tmp_path: Path) -> None:
    async with tenants(tmp_path) as (world, tokens):
        await answer(world, "GetBuffer", OWN, tokens["producer of the team"])
        for _ in range(2):
            await answer(world, "GetBuffer", OTHERS, tokens["producer of the team"])

        def counted() -> dict[tuple[str, str], float]:
            return {
                (sample.labels["token"], sample.labels["code"]): sample.value
                for metric in world.server.metrics.token_calls.collect()
                for sample in metric.samples
                if sample.name == "breadbox_token_calls_total"
            }

        # A call is counted once its answer is on its way.
        refused = ("producer-of-the-team", "PERMISSION_DENIED")
        await eventually(lambda: counted().get(refused, 0) >= 2)
        found = counted()

    assert (1, 2) == (found["producer-of-the-team", "OK"], found[refused])
    assert "revoked" not in {token for token, _ in found}, "though it had called"


async def test_no_team_takes_all_the_buffers_that_there_may_be(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    of_a, of_b = write_tokens(path, "admin a buffers=team-a-*", "admin b buffers=team-b-*")
    async with served(tokens=path, buffers_max=9) as world:

        async def create_all(team: str, token: str | None) -> list[str]:
            told = []
            for index in range(9):
                request = pb.CreateBufferRequest(name=f"team-{team}-{index}")
                try:
                    await world.stub.CreateBuffer(request, metadata=bearer(token))
                except grpc.aio.AioRpcError as refused:
                    told.append(reason_of(refused))
            return told

        assert ["BUFFERS_FULL"] * 5 == await create_all("a", of_a)  # The default one is no team's.
        assert ["BUFFERS_FULL"] * 7 == await create_all("b", of_b)
        # What there is already is no more of them.
        again = pb.CreateBufferRequest(name="team-a-0")
        await world.stub.CreateBuffer(again, metadata=bearer(of_a))


async def test_a_teams_admin_makes_buffers_that_are_the_teams(tmp_path: Path) -> None:
    async with tenants(tmp_path) as (world, tokens):
        made = await world.stub.CreateBuffer(
            pb.CreateBufferRequest(name=OWN_MISSING, config=buffer_pb2.BufferConfig()),
            metadata=bearer(tokens["admin of the team"]),
        )

    assert OWN_MISSING == made.buffer.name


@pytest.mark.parametrize("method", ["AppendFragments", "ReportEpisodes"])
async def test_a_token_for_some_workers_lets_nobody_pass_as_another(
    tmp_path: Path, method: str
) -> None:
    (token,) = write_tokens(tmp_path / "tokens", "producer a workers=a-*")
    field = RULES[SERVICE + method].workers
    async with served(tokens=tmp_path / "tokens") as world:

        async def told(*workers: str) -> str:
            request = REQUESTS[method]("")
            (one,) = getattr(request, field)
            del getattr(request, field)[:]
            for worker in workers:
                one.worker_id = worker
                getattr(request, field).append(one)
            call = getattr(world.stub, method)(request, metadata=bearer(token))
            return str(await call.details())

        refused = [await told(*workers) for workers in (("b-1",), ("a-1", "b-1", "a-2"))]
        let_in = await told("a-1", "a-2")

    assert ["token 'a' may not use worker 'b-1'; it is for a-*"] * 2 == refused
    assert "token" not in let_in


async def test_a_token_for_some_workers_reports_no_steps_of_another(tmp_path: Path) -> None:
    (token,) = write_tokens(tmp_path / "tokens", "producer a workers=a-*")
    async with served(tokens=tmp_path / "tokens") as world:

        async def told(*workers: str) -> str:
            rows = [buffer_pb2.WorkerSteps(worker_id=worker) for worker in workers]
            request = pb.ReportEpisodesRequest(workers=rows)
            call = world.stub.ReportEpisodes(request, metadata=bearer(token))
            return str(await call.details())

        assert "" == await told("a-1")
        assert "token 'a' may not use worker 'b-1'; it is for a-*" == await told("a-1", "b-1")


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("team-a", ["team-a"], ["team-a1", "xteam-a", "team-", ""]),
        ("team-a-*", ["team-a-", "team-a-1", "team-a-*"], ["team-a", "xteam-a-1", "team-b-1"]),
        ("*", ["", "anything"], []),
        ("*-a", ["-a", "x-a", "-a-a"], ["a", "x-a1"]),
        ("a*a", ["aa", "aba"], ["a", "ab"]),
        ("a*b*c", ["abc", "axbxc", "abbcc"], ["acb", "ab", "abcd"]),
        ("a.b", ["a.b"], ["axb"]),
        ("[ab]", ["[ab]"], ["a"]),
    ],
)
def test_a_star_stands_for_any_run_of_characters_and_nothing_else_for_another(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    assert fitting == [name for name in (*fitting, *others) if matches([pattern], name)]
