"""Bytes that are no message are refused as any other bad input, and fill no log."""

import asyncio
import gc
import logging
from typing import Any

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.access.authorization import SERVICE
from support.served import CALL_S, reason_of, served

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods]


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\x7f", b"\x07"], ids=repr)
async def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with served() as world:
            reasons = set()
            for name in METHODS:
                method: Any = world.channel.unary_unary(SERVICE + name)
                call = method(data, timeout=CALL_S)
                with pytest.raises(grpc.RpcError) as refused:
                    await call
                reasons.add(reason_of(refused.value))

    assert {"ARGUMENT_INVALID"} == reasons
    assert [] == [record for record in caplog.records if record.exc_info]


async def test_a_refused_request_is_let_go_at_once() -> None:
    def requests() -> int:
        return sum(type(each) is pb.AppendFragmentsRequest for each in gc.get_objects())

    async with served() as world:
        append: Any = world.channel.unary_unary(SERVICE + "AppendFragments")
        gc.collect()
        before = requests()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(grpc.RpcError):
                    await append(b"\x12\x00" * 5000, timeout=CALL_S)
            await asyncio.sleep(0)
            kept_count = requests() - before
        finally:
            gc.enable()
    assert 0 == kept_count
