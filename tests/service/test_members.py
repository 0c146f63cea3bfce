"""Members of groups over gRPC: tokens bound to groups, bounds on what is named, and claims."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.reading import reads
from support.eventually import eventually
from support.served import CALL_S, Served, served, span
from support.token_files import bearer, write_tokens

ROWS = BufferConfig(assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=0)
ROLES = ("admin all", "producer team workers=a-*", "producer other workers=b-*")


def key(group: str, member: int = 0) -> pb.MemberKey:
    return pb.MemberKey(group=group, member=member)


def sequence(it: Served, group: str) -> fragment_pb2.FragmentMetadata:
    written = it.custodian.write()
    payload = fragment_pb2.PayloadReference(
        payload_id=written.payload_id, size_bytes=written.size_bytes
    )
    return fragment_pb2.FragmentMetadata(
        worker_id=group, session_id="run", step_count=4, payload=payload
    )


async def start(it: Served, tmp_path: Path, admin: str) -> None:
    headers = bearer(admin)
    await it.stub.StartSession(pb.StartSessionRequest(session_id="run"), metadata=headers)
    fragments = [sequence(it, group) for group in ("a-1", "b-1")]
    await it.stub.AppendFragments(
        pb.AppendFragmentsRequest(fragments=fragments), timeout=CALL_S, metadata=headers
    )


async def test_a_token_lists_reads_claims_and_drops_members_of_its_own_groups_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens"
    admin, team, other = write_tokens(path, *ROLES)
    async with served(ROWS, tokens=path) as it:
        await start(it, tmp_path, admin)

        def refused(call: Any) -> Any:
            return pytest.raises(grpc.aio.AioRpcError, match="token 'team' may not use worker")

        more: dict[str, Any] = {"timeout": CALL_S, "metadata": bearer(team)}
        listed = await it.stub.Members(pb.MembersRequest(), **more)
        assert [each.group for each in listed.members] == ["a-1"]
        read = await it.stub.ReadMembers(pb.ReadMembersRequest(keys=[key("a-1")]), **more)
        assert list(read.part_counts) == [1]
        claimed = await it.stub.ClaimMembers(
            pb.ClaimMembersRequest(lacking="reward", member_count=9), **more
        )
        assert [each.metadata.worker_id for each in claimed.grant.fragments] == ["a-1"]
        for method, request in (
            ("ReadMembers", pb.ReadMembersRequest(keys=[key("a-1"), key("b-1")])),
            ("DropMembers", pb.DropMembersRequest(keys=[key("b-1")])),
        ):
            with refused(method):
                await getattr(it.stub, method)(request, **more)

        # A producer renews and ends the leases of its own reads, and finds no others.
        lease_id = claimed.grant.lease.lease_id
        renew = pb.RenewLeaseRequest(lease_id=lease_id)
        await it.stub.RenewLease(renew, **more)
        with pytest.raises(grpc.aio.AioRpcError, match="lease"):
            await it.stub.RenewLease(renew, timeout=CALL_S, metadata=bearer(other))
        release = pb.ReleaseLeaseRequest(lease_id=lease_id, mode=pb.RELEASE_MODE_CONSUMED)
        with pytest.raises(grpc.aio.AioRpcError, match="lease"):
            await it.stub.ReleaseLease(release, timeout=CALL_S, metadata=bearer(other))
        await it.stub.ReleaseLease(release, **more)
        dropped = await it.stub.DropMembers(pb.DropMembersRequest(keys=[key("a-1")]), **more)
        assert dropped.dropped_count == 1


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ReadMembers", pb.ReadMembersRequest()),
        ("DropMembers", pb.DropMembersRequest(keys=[key("g")] * 4097)),
        ("ClaimMembers", pb.ClaimMembersRequest(lacking="reward", member_count=1025)),
    ],
    ids=["no key", "too many keys", "too many members"],
)
async def test_requests_beyond_their_bounds_are_refused(method: str, request_: Any) -> None:
    async with served(ROWS) as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(it.stub, method)(request_, timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def reward(it: Served, group: str) -> fragment_pb2.FragmentMetadata:
    """A part that names no session: it is of the current one."""
    written = it.custodian.write()
    payload = fragment_pb2.PayloadReference(
        payload_id=written.payload_id, size_bytes=written.size_bytes
    )
    return fragment_pb2.FragmentMetadata(
        worker_id=group, part="reward", step_count=1, payload=payload
    )


def claim(it: Served, count: int = 9, *, wait_s: float = 0.0, **fields: Any) -> Any:
    request = pb.ClaimMembersRequest(
        lacking="reward", member_count=count, max_wait=span(wait_s), **fields
    )
    return it.stub.ClaimMembers(request, timeout=CALL_S)


def groups_of(reply: pb.ClaimMembersResponse) -> list[str]:
    return [each.metadata.worker_id for each in reply.grant.fragments]


async def test_numbers_alone_need_no_session_and_no_trip_to_the_store() -> None:
    async with served(ROWS) as it:
        await it.start()
        await it.append(sequence(it, "a"))
        trips = list(it.custodian.confirm_trips)
        numbers = fragment_pb2.FragmentMetadata(
            worker_id="a", step_count=1, numbers='{"status": 1}'
        )
        reply = await it.append(numbers)
        assert [fragment_pb2.ADMISSION_OUTCOME_ADMITTED] == [each.outcome for each in reply.results]
        assert trips == it.custodian.confirm_trips
        (member,) = (await it.stub.Members(pb.MembersRequest(), timeout=CALL_S)).members
        assert {"status": 1} == json.loads(member.numbers)


async def test_claimed_members_are_no_others_until_their_lease_ends() -> None:
    async with served(ROWS) as it:
        await it.start()
        await it.append(*(sequence(it, group) for group in ("a", "b", "c")))
        first, second = await claim(it, 1), await claim(it, 1)
        assert [["a"], ["b"]] == [groups_of(first), groups_of(second)]
        await it.append(reward(it, "c"))
        refused = await claim(it)
        assert not refused.HasField("grant")
        assert refused.waiting_reason == (
            "no member has its sequence and lacks a part 'reward' (2 are claimed)"
        )
        # A waiting claim is told of the end of another.
        waiting = claim(it, wait_s=60)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        release = pb.ReleaseLeaseRequest(
            lease_id=first.grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
        )
        await it.stub.ReleaseLease(release, timeout=CALL_S)
        assert ["a"] == groups_of(await waiting)


async def test_a_claim_that_has_waited_its_time_is_told_why() -> None:
    async with served(ROWS) as it:
        await it.start()
        waiting = claim(it, wait_s=5)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        it.clock.advance(5.0)
        assert "(0 are claimed)" in (await waiting).waiting_reason


async def test_a_claim_whose_caller_leaves_is_free_at_once() -> None:
    async with served(ROWS) as it:
        await it.start()
        await it.append(sequence(it, "a"))
        it.custodian.may_read.clear()
        leaving = claim(it, inline_bytes_max=1000)
        await eventually(lambda: bool(it.custodian.read_trips))
        assert "(1 are claimed)" in (await claim(it)).waiting_reason
        leaving.cancel()
        await eventually(lambda: not len(it.server.driver.reading.leases))
        it.custodian.may_read.set()
        assert ["a"] == groups_of(await claim(it))


async def test_a_read_ends_with_as_many_parts_as_a_reply_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "READ_FRAGMENTS_MAX", 2)
    async with served(ROWS) as it:
        await it.start()
        await it.append(*(sequence(it, group) for group in ("a", "b", "c")))
        keys = [key(group) for group in ("a", "b", "c")]
        read = await it.stub.ReadMembers(pb.ReadMembersRequest(keys=keys), timeout=CALL_S)
        assert [1, 1] == list(read.part_counts)


async def test_numbers_alone_leave_nothing_in_a_tokens_account(tmp_path: Path) -> None:
    """They have no payload that could be let go of; looked for when the server is at rest."""
    path = tmp_path / "tokens"
    admin, team = write_tokens(path, "admin all", "producer team workers=a-* bytes_held_max=1000")
    async with served(ROWS, tokens=path) as it:
        await start(it, tmp_path, admin)
        numbers = fragment_pb2.FragmentMetadata(
            worker_id="a-1", step_count=1, numbers='{"status": 1}'
        )
        for _ in range(3):
            reply = await it.stub.AppendFragments(
                pb.AppendFragmentsRequest(fragments=[numbers]),
                timeout=CALL_S,
                metadata=bearer(team),
            )
            assert fragment_pb2.ADMISSION_OUTCOME_ADMITTED == reply.results[0].outcome
