"""What a viewer's token does to what others hold: nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.served import Served, reason_of, served
from support.token_files import bearer, write_tokens

CONSUMED = pb.RELEASE_MODE_CONSUMED


@asynccontextmanager
async def looked_at(tmp_path: Path) -> AsyncIterator[tuple[Served, dict[str, Any]]]:
    """A server with two chunks, and the metadata of calls of an operator and of two viewers."""
    path = tmp_path / "tokens"
    tokens = write_tokens(path, "admin boss", "viewer one", "viewer other")
    callers = {
        name: {"metadata": bearer(token)}
        for name, token in zip(("boss", "one", "other"), tokens, strict=True)
    }
    async with served(tokens=path) as world:
        await world.stub.StartSession(pb.StartSessionRequest(session_id="run"), **callers["boss"])
        await world.stub.AppendFragments(
            pb.AppendFragmentsRequest(fragments=[world.metadata(0), world.metadata(1)]),
            **callers["boss"],
        )
        yield world, callers


async def refused(call: Any) -> str:
    """The reason that a call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return reason_of(error.value)


async def test_a_viewer_reads_by_a_cursor_and_ends_its_read(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (world, callers):
        read = await world.stub.ReadFragments(pb.ReadFragmentsRequest(), **callers["one"])
        release = pb.ReleaseLeaseRequest(lease_id=read.lease.lease_id, mode=CONSUMED)
        for _ in range(2):  # Again, for a reader that did not hear the answer.
            await world.stub.ReleaseLease(release, **callers["one"])
        state = (await world.stub.GetBuffer(pb.GetBufferRequest(), **callers["one"])).buffer.state

        assert 2 == len(read.fragments)
        assert 0 == len(world.server.driver.reading.leases)
    assert (2, 0) == (state.chunk_count, state.counters["uses"])


async def test_no_call_of_a_viewer_goes_before_appends(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (world, callers):
        read = await world.stub.ReadFragments(pb.ReadFragmentsRequest(), **callers["one"])
        release = pb.ReleaseLeaseRequest(lease_id=read.lease.lease_id, mode=CONSUMED)
        await world.stub.ReleaseLease(release, **callers["one"])

        assert not world.server.driver.appends.queue.precedence.has_learners


async def test_a_viewer_ends_neither_a_learners_lease_nor_another_viewers(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (world, callers):
        fetch = pb.FetchFragmentsRequest(request_id="r", fragment_count=1)
        granted = (await world.stub.FetchFragments(fetch, **callers["boss"])).grant
        read = await world.stub.ReadFragments(pb.ReadFragmentsRequest(), **callers["other"])
        for lease_id in (granted.lease.lease_id, read.lease.lease_id):
            for mode in (CONSUMED, pb.RELEASE_MODE_RETURNED):
                release = pb.ReleaseLeaseRequest(
                    lease_id=lease_id,
                    mode=mode,
                    unreadable_payload_ids=[granted.fragments[0].metadata.payload.payload_id],
                )
                call = world.stub.ReleaseLease(release, **callers["one"])
                assert "LEASE_NOT_FOUND" == await refused(call)
                own = await world.stub.ReadFragments(pb.ReadFragmentsRequest(), **callers["one"])
                release = pb.ReleaseLeaseRequest(
                    lease_id=own.lease.lease_id, mode=mode, further_lease_ids=[lease_id]
                )
                call = world.stub.ReleaseLease(release, **callers["one"])
                assert "LEASE_NOT_FOUND" == await refused(call)
                more = await world.stub.ReadFragments(pb.ReadFragmentsRequest(), **callers["one"])
                release.further_lease_ids[:] = [more.lease.lease_id]
                await world.stub.ReleaseLease(release, **callers["one"])
        seen = (await world.stub.GetBuffer(pb.GetBufferRequest(), **callers["boss"])).buffer.state

        assert 1 == len(world.server.driver.reading.leases)
    assert (1, 0) == (seen.lease_count, len(seen.quarantined))


async def test_a_viewers_report_of_an_unreadable_payload_counts_for_nothing(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (world, callers):
        for _ in range(5):
            read = await world.stub.ReadFragments(pb.ReadFragmentsRequest(), **callers["one"])
            release = pb.ReleaseLeaseRequest(
                lease_id=read.lease.lease_id,
                mode=pb.RELEASE_MODE_RETURNED,
                unreadable_payload_ids=[
                    each.metadata.payload.payload_id for each in read.fragments
                ],
            )
            await world.stub.ReleaseLease(release, **callers["one"])
        state = (await world.stub.GetBuffer(pb.GetBufferRequest(), **callers["one"])).buffer.state

    assert (2, 0) == (state.chunk_count, len(state.quarantined))


async def test_a_viewer_is_told_a_store_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    viewer, learner = write_tokens(path, "viewer one", "learner ann")
    client_store, viewer_store = "file:///dev/shm/theirs", "file:///dev/shm/looked-at"
    async with served(tokens=path, client_store=client_store, viewer_store=viewer_store) as world:
        told = [
            await world.stub.GetStoreConfig(pb.GetStoreConfigRequest(), metadata=bearer(token))
            for token in (viewer, learner)
        ]

    assert [viewer_store, client_store] == [each.store_url for each in told]
