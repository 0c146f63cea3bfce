"""The limit of appends one at a time: a bare gRPC server whose call stores what it is sent.

`python -m bench.bare_calls SOCKET` serves: each message is stored in the Redis behind the socket
under a key of its own, and what came in a turn of the loop is noted in one entry of a Redis stream,
before any of it is answered. It checks nothing, decides nothing and keeps nothing.
"""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import redis.asyncio

METHOD = "/bench.Bare/Append"


class BareCaller:
    """One caller of it, which appends one after the other."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._append: Any = self._channel.unary_unary(METHOD)

    def append(self, data: bytes) -> None:
        """Store something, and wait until it is."""
        self._append(data)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


@contextlib.contextmanager
def bare_call_server(path: Path) -> Iterator[str]:
    """A server of it over a Redis socket; its address."""
    command = [sys.executable, "-m", "bench.bare_calls", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


class _Store:
    """Stores what comes in a turn of the loop by one round trip."""

    def __init__(self, path: str) -> None:
        self._redis = redis.asyncio.Redis(unix_socket_path=path)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._has_more = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Return once it is stored."""
        stored = asyncio.get_running_loop().create_future()
        self._waiting.append((data, stored))
        self._has_more.set()
        await stored

    async def run(self) -> None:
        """Store, for ever."""
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            turn, self._waiting = self._waiting, []
            async with self._redis.pipeline(transaction=False) as pipe:
                for data, _ in turn:
                    pipe.set(f"bare:{next(self._numbers)}", data, px=600_000)
                pipe.xadd("bare", {"e": len(turn)})
                await pipe.execute()
            for _, stored in turn:
                stored.set_result(None)


async def _serve(path: str) -> None:
    store = _Store(path)

    async def append(data: bytes, context: Any) -> bytes:
        await store.put(data)
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler(append)
    service, _, name = METHOD[1:].partition("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await store.run()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
