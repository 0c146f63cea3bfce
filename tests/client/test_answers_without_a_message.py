"""A call that ends well, and without its message: gRPC's where a channel closes, or a proxy's."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from breadbox.model import types
from breadbox.model.errors import UnavailableError
from breadbox.stores import open_store
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.callers import Caller, make_caller
from support.fake_service import FakeService
from support.fragments import vector_fragment


def nothing(request: Any, context: Any) -> None:
    del request, context


def admit_all(request: Any, context: Any) -> pb.AppendFragmentsResponse:
    del context
    admitted = pb.AppendResult(outcome=fragment_pb2.ADMISSION_OUTCOME_ADMITTED)
    return pb.AppendFragmentsResponse(results=[admitted] * len(request.fragments))


async def test_a_call_is_sent_again_that_was_answered_by_nothing(
    caller: Caller, fake: FakeService
) -> None:
    fake.will("ListBuffers", nothing, nothing)
    assert () == await caller.call("list_buffers")
    assert 3 == len(fake.requests("ListBuffers"))


@pytest.mark.parametrize("count", [1, 600], ids=["one, which may be shared", "groups"])
async def test_appends_are_sent_again_that_were_answered_by_nothing(
    caller: Caller, fake: FakeService, tmp_path: Path, count: int
) -> None:
    open_store(f"file://{tmp_path}").close()
    config = pb.GetStoreConfigResponse(
        store_url=f"file://{tmp_path}",
        unannounced_duration=Duration(seconds=600),
        inline_size_bytes_max=2**16,
    )
    fake.will("GetStoreConfig", nothing, config)
    fake.will("AppendFragments", nothing, nothing, *[admit_all] * 10)
    results = await caller.call(
        "append_many", [vector_fragment(index) for index in range(count)], buffer="b"
    )
    assert [types.AdmissionOutcome.ADMITTED] * count == [each.outcome for each in results]


async def test_a_server_that_never_says_anything_is_not_reached(
    kind: str, address: str, fake: FakeService
) -> None:
    fake.will("GetBuffer", *[nothing] * 100)
    async with make_caller(kind, address, deadline_s=2.0, reconnect_s=0.3) as caller:
        with pytest.raises(UnavailableError, match="the call ended without one"):
            await caller.call("get_buffer")
