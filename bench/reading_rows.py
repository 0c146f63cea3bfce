"""Rows about reading without consuming: what it costs the server, in its own processor time.

Processor time, since who reads and who appends share a machine with the server here.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice

import breadbox
import breadbox.aio
from bench.measure import Figure
from bench.processes import Server, breadbox_server, redis_server
from bench.workloads import SESSION_ID, numbered, vector_fragment
from breadbox.model.types import BufferConfig

_READ = 32
"""Chunks of a read, and fragments of a fetch."""
_BATCH = 1024
_SUBSCRIPTIONS = 100
_TAILS = 100
_PAUSE_S = 0.3
"""Between two appends: all tails wait again before the next."""
_CAPACITY = 8 * _BATCH


def reading_rows(*, rounds: int) -> Iterator[Figure]:
    """Measure a read beside a fetch, and appends with subscriptions beside appends without."""
    yield _read_row(rounds=rounds)
    yield asyncio.run(_tail_row(rounds=rounds))
    yield from _append_rows(rounds=rounds)


def _read_row(*, rounds: int) -> Figure:
    """A read of small payloads, beside a fetch of as many and the end of its lease."""
    with (
        redis_server() as path,
        breadbox_server(
            f"unix://{path}", "--capacity-chunks", str(_CAPACITY), "--uses-max", "1000000"
        ) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        successive = numbered(vector_fragment(), "bench")
        for _ in range(_CAPACITY // _BATCH):
            client.append_many(list(islice(successive, _BATCH)))

        def read(number: int) -> None:
            after = number * _READ % (_CAPACITY - _READ) - 1
            found = client.service.read_fragments(after, chunk_count_max=_READ)
            assert len(found.fragments) == _READ
            assert found.lease_id is None  # They are small, and came along.

        def fetch(_: int) -> None:
            grant = client.service.fetch_fragments(_READ, max_wait_s=10.0)
            client.service.release_lease(grant.lease_id)

        spent = _spent_s(server, {"read": read, "fetch": fetch}, rounds=rounds, count=100)
    return Figure(
        name=f"read of {_READ} chunks by a cursor",
        workload="vector",
        value=1e6 * spent["read"],
        unit="us of the server",
        limit=1e6 * spent["fetch"],
        limit_is=f"fetch of {_READ} fragments, and the end of its lease",
        reach=1.0,
        is_lower_better=True,
    )


async def _tail_row(*, rounds: int) -> Figure:
    """What each of very many who follow a buffer costs for each append, beside a call of each."""
    with redis_server() as path, breadbox_server(f"unix://{path}") as server:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(breadbox.aio.connect(server.address))
                for _ in range(_TAILS)
            ]
            await clients[0].start_session(SESSION_ID)
            successive = numbered(vector_fragment(), "bench")
            latest = -1
            spent: dict[str, list[float]] = {"alone": [], "tails": [], "calls": []}
            for number in range(rounds + 1):
                for name, times in spent.items():
                    async with _tails(clients if name == "tails" else [], latest):
                        before_s = server.cpu_s
                        for _ in range(5):
                            if name == "calls":
                                async with asyncio.TaskGroup() as group:
                                    for client in clients:
                                        group.create_task(client.service.get_store_config())
                            else:
                                await clients[0].append(next(successive))
                                latest += 1
                            await asyncio.sleep(_PAUSE_S)
                        if number:
                            times.append((server.cpu_s - before_s) / 5)
    each = {name: statistics.median(times) for name, times in spent.items()}
    return Figure(
        name=f"an append to each of {_TAILS} tails of its buffer",
        workload="vector",
        value=1e6 * (each["tails"] - each["alone"]) / _TAILS,
        unit="us of the server per tail",
        limit=1e6 * each["calls"] / _TAILS,
        limit_is="a call that asks where payloads live",
        reach=1.25,
        is_lower_better=True,
    )


@asynccontextmanager
async def _tails(clients: list[breadbox.aio.Client], after: int) -> AsyncIterator[None]:
    """Let clients follow the buffer, from what comes next on."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_follow(client, after)) for client in clients]
        await asyncio.sleep(_PAUSE_S)
        yield
        for task in tasks:
            task.cancel()


async def _follow(client: breadbox.aio.Client, after: int) -> None:
    async for _ in client.tail(after):
        pass


def _append_rows(*, rounds: int) -> Iterator[Figure]:
    """Appends to a full buffer that nobody follows, and to those that very many follow.

    Subscriptions whose readers are gone cost the most: at capacity each appended chunk is missed by
    each that retains.
    """
    with (
        redis_server() as path,
        breadbox_server(f"unix://{path}", "--capacity-chunks", str(_CAPACITY)) as server,
        breadbox.connect(server.address) as client,
    ):
        successive = {}
        for name, retaining in ("nobody", None), ("plain", False), ("retaining", True):
            client.create_buffer(name, BufferConfig(capacity_chunks=_CAPACITY))
            client.start_session(SESSION_ID, buffer=name)
            for number in range(0 if retaining is None else _SUBSCRIPTIONS):
                client.create_subscription(str(number), retaining=bool(retaining), buffer=name)
            successive[name] = numbered(vector_fragment(), "bench")
            for _ in range(_CAPACITY // _BATCH):
                client.append_many(list(islice(successive[name], _BATCH)), buffer=name)

        def appends(name: str) -> Callable[[int], None]:
            def append(_: int) -> None:
                client.append_many(list(islice(successive[name], _BATCH)), buffer=name)

            return append

        work = {name: appends(name) for name in successive}
        spent = _spent_s(server, work, rounds=rounds, count=2)
    for name in ("plain", "retaining"):
        yield Figure(
            name=f"append to a full buffer with {_SUBSCRIPTIONS} {name} subscriptions left behind",
            workload="vector",
            value=1e6 * spent[name] / _BATCH,
            unit="us of the server per fragment",
            limit=1e6 * spent["nobody"] / _BATCH,
            limit_is="the same without subscriptions",
            reach=1.1,
            is_lower_better=True,
        )


def _spent_s(
    server: Server, work: Mapping[str, Callable[[int], None]], *, rounds: int, count: int
) -> dict[str, float]:
    """Processor time of the server for each call, the median of rounds that take turns."""
    spent: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, call in work.items():
            before_s = server.cpu_s
            for repetition in range(count):
                call(number * count + repetition)
            if number:
                spent[name].append((server.cpu_s - before_s) / count)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}
