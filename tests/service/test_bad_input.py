"""What is wrong with a request is told, changes nothing, and leaves the server up."""

import math
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from breadbox.v1 import buffer_pb2, fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import BufferConfig
from support.served import CALL_S, info_of, reason_of, served, span

NAN = float("nan")
PAYLOAD_ID = "0123456789abcdef" * 2
BAD_NAMES = {
    "empty": "",
    "separator": "a/b",
    "backslash": "a\\b",
    "newline": "a\nb",
    "escape": "a\x1b[31m",
    "too-long": "x" * 129,
    "too-long-in-bytes": "é" * 65,
}


Call = tuple[str, Message]
"""A method and its request."""


def fetch(**fields: Any) -> Call:
    return (
        "FetchFragments",
        pb.FetchFragmentsRequest(**{"request_id": "r", "fragment_count": 2, **fields}),
    )


def config(**fields: Any) -> Call:
    return "CreateBuffer", pb.CreateBufferRequest(
        name="new", config=buffer_pb2.BufferConfig(**fields)
    )


def ratio(**fields: Any) -> Call:
    limiter = buffer_pb2.Limiter(
        sample_to_insert_ratio=buffer_pb2.SampleToInsertRatio(
            **{"ratio": 1, "error_chunks": 4, "minimum_chunk_count": 1, **fields}
        )
    )
    return config(limiter=limiter)


def append(**fields: Any) -> Call:
    payload = fragment_pb2.PayloadReference(payload_id=PAYLOAD_ID, size_bytes=10)
    metadata = {
        "worker_id": "w9",
        "fragment_index": 0,
        "session_id": "run",
        "step_count": 1,
        "payload": payload,
        **fields,
    }
    return "AppendFragments", pb.AppendFragmentsRequest(
        fragments=[fragment_pb2.FragmentMetadata(**metadata)]
    )


def payload(**fields: Any) -> Call:
    return append(
        payload=fragment_pb2.PayloadReference(
            **{"payload_id": PAYLOAD_ID, "size_bytes": 10, **fields}
        )
    )


def report(**fields: Any) -> Call:
    episode = pb.EpisodeReport(
        **{"worker_id": "w", "step_count": 1, "end": pb.EPISODE_END_TERMINATED, **fields}
    )
    return "ReportEpisodes", pb.ReportEpisodesRequest(episodes=[episode])


CASES = {
    "fetch of none": (*fetch(fragment_count=0), "ARGUMENT_INVALID", "fragment_count"),
    "fetch of fewer": (*fetch(fragment_count=-2), "ARGUMENT_INVALID", "fragment_count"),
    "fetch of half a chunk": (*fetch(fragment_count=3), "ARGUMENT_INVALID", "fragment_count"),
    "fetch of too many": (*fetch(fragment_count=2**40), "FETCH_EXCEEDS_CAPACITY", None),
    "fetch from nowhere": (*fetch(buffer="nowhere"), "BUFFER_NOT_FOUND", None),
    "fetch without an id": (*fetch(request_id=""), "ARGUMENT_INVALID", "request_id"),
    "fetch of a rank beyond": (*fetch(rank=2, world_size=2), "ARGUMENT_INVALID", "rank"),
    "fetch of a rank below": (*fetch(rank=-1), "ARGUMENT_INVALID", "rank"),
    "fetch of a large world": (*fetch(world_size=2**30), "ARGUMENT_INVALID", "world_size"),
    "fetch with a negative wait": (*fetch(max_wait=span(-1)), "ARGUMENT_INVALID", "max_wait"),
    "fetch with no lease": (
        *fetch(lease_duration=span(0)),
        "ARGUMENT_INVALID",
        "lease_duration",
    ),
    "publish without a version": (
        "PublishModel",
        pb.PublishModelRequest(session_id="run"),
        "ARGUMENT_INVALID",
        "model_version",
    ),
    "publish in another session": (
        "PublishModel",
        pb.PublishModelRequest(session_id="other", model_version=9),
        "SESSION_NOT_CURRENT",
        None,
    ),
    "publish backwards": (
        "PublishModel",
        pb.PublishModelRequest(session_id="run", model_version=2),
        "VERSION_REGRESSED",
        None,
    ),
    "publish below zero": (
        "PublishModel",
        pb.PublishModelRequest(session_id="run", model_version=-1),
        "ARGUMENT_INVALID",
        "model_version",
    ),
    "weights without an id": (
        "PublishModel",
        pb.PublishModelRequest(
            session_id="run", model_version=4, weights=fragment_pb2.PayloadReference()
        ),
        "ARGUMENT_INVALID",
        "weights.payload_id",
    ),
    "a version below zero": (
        *append(model_version_min=-1),
        "ARGUMENT_INVALID",
        "fragments[0].model_version_min",
    ),
    "crossed versions": (
        *append(model_version_min=3, model_version_max=1),
        "ARGUMENT_INVALID",
        "fragments[0].model_version_max",
    ),
    "a huge index": (
        *append(fragment_index=2**60),
        "ARGUMENT_INVALID",
        "fragments[0].fragment_index",
    ),
    "a negative index": (
        *append(fragment_index=-1),
        "ARGUMENT_INVALID",
        "fragments[0].fragment_index",
    ),
    "no steps": (*append(step_count=0), "ARGUMENT_INVALID", "fragments[0].step_count"),
    "no fragments": (
        "AppendFragments",
        pb.AppendFragmentsRequest(),
        "ARGUMENT_INVALID",
        "fragments",
    ),
    "a payload id that is a path": (
        *payload(payload_id="../../etc/passwd"),
        "ARGUMENT_INVALID",
        "fragments[0].payload.payload_id",
    ),
    "a payload of no bytes": (
        *payload(size_bytes=0),
        "ARGUMENT_INVALID",
        "fragments[0].payload.size_bytes",
    ),
    "a payload of endless bytes": (
        *payload(size_bytes=2**60),
        "ARGUMENT_INVALID",
        "fragments[0].payload.size_bytes",
    ),
    "a payload in endless pieces": (
        *payload(size_bytes=2**39, piece_size_bytes=1),
        "ARGUMENT_INVALID",
        "fragments[0].payload.piece_size_bytes",
    ),
    "an unknown lease renewed": (
        "RenewLease",
        pb.RenewLeaseRequest(lease_id="unknown"),
        "LEASE_NOT_FOUND",
        None,
    ),
    "an unknown lease released": (
        "ReleaseLease",
        pb.ReleaseLeaseRequest(lease_id="unknown", mode=pb.RELEASE_MODE_CONSUMED),
        "LEASE_NOT_FOUND",
        None,
    ),
    "a lease released somehow": (
        "ReleaseLease",
        pb.ReleaseLeaseRequest(lease_id="unknown"),
        "ARGUMENT_INVALID",
        "mode",
    ),
    "a priority that is no number": (
        "UpdatePriorities",
        pb.UpdatePrioritiesRequest(updates=[pb.PriorityUpdate(priority=math.nan)]),
        "ARGUMENT_INVALID",
        "updates[0].priority",
    ),
    "too many priorities": (
        "UpdatePriorities",
        pb.UpdatePrioritiesRequest(updates=[pb.PriorityUpdate()] * 2049),
        "ARGUMENT_INVALID",
        "updates",
    ),
    "too many chunks to delete": (
        "UpdatePriorities",
        pb.UpdatePrioritiesRequest(delete_chunk_ids=range(2049)),
        "ARGUMENT_INVALID",
        "delete_chunk_ids",
    ),
    "no request": (
        "GetPreparedFragments",
        pb.GetPreparedFragmentsRequest(),
        "ARGUMENT_INVALID",
        "request_id",
    ),
    "an unknown request": (
        "GetPreparedFragments",
        pb.GetPreparedFragmentsRequest(request_id="unknown"),
        "REQUEST_NOT_FOUND",
        None,
    ),
    "a buffer that is not there": (
        "GetBuffer",
        pb.GetBufferRequest(name="nowhere"),
        "BUFFER_NOT_FOUND",
        None,
    ),
    "a buffer's name that is a path": (
        "CreateBuffer",
        pb.CreateBufferRequest(name="../up"),
        "ARGUMENT_INVALID",
        "buffer",
    ),
    "a buffer's name that is empty": (
        "CreateBuffer",
        pb.CreateBufferRequest(),
        "ARGUMENT_INVALID",
        "buffer",
    ),
    "deleting nothing": (
        "DeleteBuffer",
        pb.DeleteBufferRequest(),
        "BUFFER_NOT_FOUND",
        None,
    ),
    "another default buffer": (
        "CreateBuffer",
        pb.CreateBufferRequest(name="default", config=buffer_pb2.BufferConfig(uses_max=99)),
        "BUFFER_EXISTS",
        None,
    ),
    "a capacity below one": (*config(capacity_chunks=0), "ARGUMENT_INVALID", "capacity_chunks"),
    "negative bytes": (*config(capacity_bytes=-1), "ARGUMENT_INVALID", "capacity_bytes"),
    "negative staleness": (*config(staleness_max=-1), "ARGUMENT_INVALID", "staleness_max"),
    "no uses": (*config(uses_max=0), "ARGUMENT_INVALID", "uses_max"),
    "a chunk too long": (
        *config(fragments_per_chunk=1025),
        "ARGUMENT_INVALID",
        "fragments_per_chunk",
    ),
    "a lease below zero": (*config(lease_duration=span(-1)), "ARGUMENT_INVALID", "lease_s"),
    "no sampler": (*config(sampler=buffer_pb2.Sampler()), "ARGUMENT_INVALID", "config.sampler"),
    "a page of less than nothing": (
        "ListBuffers",
        pb.ListBuffersRequest(page_size=-1),
        "ARGUMENT_INVALID",
        "page_size",
    ),
    "a token of no page": (
        "ListBuffers",
        pb.ListBuffersRequest(page_token="*"),
        "ARGUMENT_INVALID",
        "page_token",
    ),
    "a policy that is not one": (*config(full_policy=7), "ARGUMENT_INVALID", "full_policy"),
    "a ratio that is no number": (*ratio(ratio=NAN), "ARGUMENT_INVALID", "limiter.ratio"),
    "a band that is no number": (
        *ratio(error_chunks=NAN),
        "ARGUMENT_INVALID",
        "limiter.error_chunks",
    ),
    "a ratio below zero": (*ratio(ratio=-1), "ARGUMENT_INVALID", "limiter.ratio"),
    "a limiter that names none": (
        *config(limiter=buffer_pb2.Limiter()),
        "ARGUMENT_INVALID",
        "config.limiter",
    ),
    "an episode whose return is no number": (
        *report(return_sum=NAN),
        "ARGUMENT_INVALID",
        "episodes[0].return_sum",
    ),
    "an episode that did not end": (
        *report(end=pb.EPISODE_END_UNSPECIFIED),
        "ARGUMENT_INVALID",
        "episodes[0].end",
    ),
    "an episode of a task with a long name": (
        *report(task="t" * 65),
        "ARGUMENT_INVALID",
        "episodes[0].task",
    ),
    "no episodes": (
        "ReportEpisodes",
        pb.ReportEpisodesRequest(),
        "ARGUMENT_INVALID",
        "episodes",
    ),
    **{
        f"session name {kind}": (
            "StartSession",
            pb.StartSessionRequest(session_id=text),
            "ARGUMENT_INVALID",
            "session_id",
        )
        for kind, text in BAD_NAMES.items()
    },
    **{
        f"worker name {kind}": (
            *append(worker_id=text),
            "ARGUMENT_INVALID",
            "fragments[0].worker_id",
        )
        for kind, text in BAD_NAMES.items()
    },
}


@pytest.mark.parametrize("case", CASES)
async def test_bad_input_is_refused_and_changes_nothing(case: str) -> None:
    method, request, reason, field = CASES[case]
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start(model_version=3)
        await it.append(*(it.metadata(index, version=3) for index in range(5)))
        before = await it.buffer()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(it.stub, method)(request, timeout=CALL_S)
        after = await it.buffer()
    assert reason == reason_of(caught.value)
    if field is not None:
        assert field == info_of(caught.value).metadata["field"]
    assert before == after


async def test_one_malformed_fragment_refuses_the_whole_request() -> None:
    async with served() as it:
        await it.start()
        good, bad = it.metadata(0), it.metadata(1, step_count=0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(good, bad)
        buffer = await it.buffer()
    assert "fragments[1].step_count" == info_of(caught.value).metadata["field"]
    assert 0 == buffer.state.chunk_count
    assert set() == it.custodian.kept


async def test_more_fragments_than_one_request_may_hold_are_refused() -> None:
    async with served() as it:
        await it.start()
        fragment = it.metadata(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(*[fragment] * 4097)
    assert "fragments" == info_of(caught.value).metadata["field"]


async def test_a_gap_starts_a_new_chunk_and_refuses_nobody() -> None:
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start()
        reply = await it.append(it.metadata(0), it.metadata(5), it.metadata(6))
        buffer = await it.buffer()
    assert [fragment_pb2.ADMISSION_OUTCOME_ADMITTED] * 3 == [
        result.outcome for result in reply.results
    ]
    assert (1, 0) == (buffer.state.chunk_count, buffer.state.open_fragment_count)


async def test_a_session_that_ended_is_not_started_again() -> None:
    async with served() as it:
        await it.start("first")
        await it.start("second")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.start("first")
    assert "SESSION_NOT_CURRENT" == reason_of(caught.value)


async def test_the_same_request_with_another_size_is_refused() -> None:
    async with served() as it:
        await it.start()
        await it.fill(4)
        await it.fetch(2, request_id="same")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.fetch(4, request_id="same")
    assert "REQUEST_MISMATCH" == reason_of(caught.value)


async def test_metadata_beyond_the_limit_is_refused_and_the_server_stays_up() -> None:
    async with served() as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError):
            await it.stub.ListBuffers(
                pb.ListBuffersRequest(), metadata=[("noise", "x" * 2**20)], timeout=CALL_S
            )
        assert "run" == (await it.buffer()).session_id


async def test_a_message_beyond_the_limit_is_refused_and_the_server_stays_up() -> None:
    async with served() as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.StartSession(
                pb.StartSessionRequest(session_id="x" * 5 * 2**20), timeout=CALL_S
            )
        assert "run" == (await it.buffer()).session_id
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
