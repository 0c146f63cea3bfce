"""Members of groups over gRPC: tokens that are bound to groups, and bounds on what is named."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from support.served import CALL_S, Served, served
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
