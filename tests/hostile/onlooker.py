"""A viewer that looks without end, as a process: `python -m hostile.onlooker ADDRESS CALL COUNT`.

It keeps so many calls in flight, with the token in BREADBOX_TOKEN, and ends on SIGTERM.
"""

import asyncio
import os
import sys
from typing import Any

import grpc

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from support.token_files import bearer

OF_CONNECTION = 200
"""Calls in flight on a connection: fewer than one takes."""


async def look(stub: Any, method: str, metadata: Any) -> None:
    request = getattr(pb, f"{method}Request")()
    while True:
        try:
            await getattr(stub, method)(request, metadata=metadata, timeout=60.0)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.01)


async def main(address: str, method: str, count: int) -> None:
    metadata = bearer(os.environ["BREADBOX_TOKEN"])
    async with asyncio.TaskGroup() as looks:
        for first in range(0, count, OF_CONNECTION):
            # Not one connection for all channels of an address.
            options = [("grpc.use_local_subchannel_pool", 1)]
            stub = ReplayBufferServiceStub(grpc.aio.insecure_channel(address, options))
            for _ in range(first, min(count, first + OF_CONNECTION)):
                looks.create_task(look(stub, method, metadata))
        sys.stdout.write("looking\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
