"""No call of the library outlives its deadline, whoever is silent.

Server and Redis are real processes, each behind a proxy that falls silent. `CALLS` has a row for
everything public that may talk to either; what is new there and has no row fails a test.
"""

import asyncio
import dataclasses
import inspect
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest

import breadbox
from breadbox import aio
from breadbox.client import Client
from breadbox.lease import Lease, Ticket
from breadbox.model import errors
from breadbox.model.fragment import Fragment, Part
from breadbox.model.types import (
    BufferConfig,
    EpisodeEnd,
    EpisodeReport,
    LeaseGrant,
    ReleaseMode,
    TicketGrant,
)
from breadbox.service import Service
from breadbox.writing.appender import Appender, AppenderOptions
from support.fragments import large_fragment as stored_fragment
from support.fragments import vector_fragment
from support.proxy import Proxy
from support.redis_cluster import RedisCluster
from support.redis_sentinel import WatchedRedis
from support.redis_server import RedisServer
from support.server_process import ServerProcess
from support.tiers import LONG
from support.tls_proxy import TlsProxy, make_certificate

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DEADLINE_S = 1.5
RECONNECT_S = 1.0
WAIT_S = 0.5
"""Asked for by the calls that wait."""
MARGIN_S = 1.0
TRANSFER_S = 3.0
"""What half of a large payload may take on a busy machine."""


class Options(TypedDict):
    deadline_s: float
    reconnect_s: float
    append_wait_s: float


OPTIONS = Options(deadline_s=DEADLINE_S, reconnect_s=RECONNECT_S, append_wait_s=WAIT_S)
KINDS = ("blocking", "asyncio")
END = EpisodeEnd.TERMINATED


# The calls --------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """What a call needs, made while everybody still answers."""

    kind: str
    client: Any
    index: int
    connect: Callable[[], Any]
    model: Any
    lease: Any
    spare: Any
    appender: Appender | None = None

    def fragment(self) -> Fragment:
        return stored_fragment(10_000, worker_id=f"late-{self.index}")

    def riding(self) -> Fragment:
        return vector_fragment(10_000, worker_id=f"riding-{self.index}")


async def _drained(items: Any) -> None:
    if hasattr(items, "__aiter__"):
        async for _ in items:
            pass
        return
    for _ in items:
        pass


async def _left(context: Any, error: BaseException | None = None) -> None:
    leaving = getattr(context, "__aexit__", None) or context.__exit__
    made = leaving(type(error) if error else None, error, None)
    if inspect.isawaitable(made):
        await made


async def _of_new_client(it: Prepared) -> Any:
    client = it.connect()
    if inspect.isawaitable(client):
        client = await client
    made = client.append(it.fragment())
    return await made if inspect.isawaitable(made) else made


async def _left_iterator(items: Any) -> None:
    """Begin to load, and leave."""
    if hasattr(items, "__aiter__"):
        begun = asyncio.ensure_future(anext(items))  # noqa: TID251 - awaited below
        await asyncio.sleep(0.1)
        begun.cancel()
        await asyncio.wait([begun])
        await items.aclose()
        return
    next(items)
    items.close()


def _ticket(it: Prepared) -> Any:
    kind: Any = Ticket if it.kind == "blocking" else aio.Ticket
    grant = TicketGrant(("g",), 60.0, "s", 0, 2)
    return kind(it.client._interpreter, "default", "g", grant)  # noqa: SLF001 - no server gave it


Row = Callable[[Prepared], Any]

CALLS: dict[str, Row] = {
    "Client.store": lambda it: it.client.store if it.kind == "blocking" else it.client.open_store(),
    "Client.open_store": lambda it: it.kind == "asyncio" and it.client.open_store(),
    "Client.close": lambda it: it.client.close(),
    "Client.__exit__": lambda it: _left(it.client),
    "Client.start_session": lambda it: it.client.start_session("s"),
    "Client.end_session": lambda it: it.client.end_session("other"),
    "Service.publish_model": lambda it: it.client.service.publish_model("s", 0),
    "Client.publish": lambda it: it.client.publish("s", 0, {"w": np.ones(4)}),
    "Client.watch_model": lambda it: it.client.watch_model(it.model, max_wait_s=WAIT_S),
    "Client.group_ends": lambda it: it.client.group_ends(max_wait_s=WAIT_S),
    "Client.tickets": lambda it: it.client.tickets(1, WAIT_S),
    "Client.attach": lambda it: it.client.attach(Part("g", 0, "reward", {"r": np.ones(99_999)})),
    "Client.claim": lambda it: it.client.claim("reward", 1, WAIT_S),
    "Client.members": lambda it: it.client.members("g"),
    "Client.read_members": lambda it: it.client.read_members([("g", 0)]),
    "Client.drop_members": lambda it: it.client.drop_members([("g", 0)]),
    "Service.claim_members": lambda it: it.client.service.claim_members("reward", 1, WAIT_S),
    "Service.take_tickets": lambda it: it.client.service.take_tickets(1, WAIT_S),
    "Service.renew_ticket": lambda it: it.client.service.renew_ticket("g"),
    "Service.give_back_ticket": lambda it: it.client.service.give_back_ticket("g"),
    "Ticket.give_back": lambda it: _ticket(it).give_back(),
    "Ticket.__exit__": lambda it: _left(_ticket(it)),
    "Ticket.__exit__ with an error": lambda it: _left(_ticket(it), ValueError("the body's own")),
    "Client.load_model": lambda it: it.client.load_model(it.model, max_wait_s=WAIT_S),
    "Client.load_model of some": lambda it: it.client.load_model(),
    "Service.load_weights": lambda it: it.client.service.load_weights(it.model.weights),
    "Service.append_fragments": lambda it: it.client.service.append_fragments(
        [reference.metadata for reference in it.spare.fragments]
    ),
    "Client.append": lambda it: it.client.append(it.fragment()),
    "Client.append_many": lambda it: it.client.append_many([it.fragment()] * 300),
    "Client.append of what rides along": lambda it: it.client.append(it.riding()),
    "Client.append_many of what rides along": lambda it: it.client.append_many([it.riding()] * 300),
    "Client.report_episodes": lambda it: it.client.report_episodes(
        [
            EpisodeReport(
                worker_id="w", return_sum=1.0, discounted_return_sum=1.0, step_count=9, end=END
            )
        ]
    ),
    "Service.fetch_fragments": lambda it: it.client.service.fetch_fragments(4_000, WAIT_S),
    "Client.fetch": lambda it: it.client.fetch(4_000, WAIT_S),
    "Service.get_prepared_fragments": lambda it: it.client.service.get_prepared_fragments(
        it.spare.request_id
    ),
    "Service.read_fragments": lambda it: it.client.service.read_fragments(7, max_wait_s=WAIT_S),
    "Client.create_subscription": lambda it: it.client.create_subscription("mine"),
    "Client.acknowledge_chunks": lambda it: it.client.acknowledge_chunks("mine", -1),
    "Client.delete_subscription": lambda it: it.client.delete_subscription("mine"),
    "Client.update_priorities": lambda it: it.client.update_priorities({0: 1.0}),
    "Client.tail": lambda it: _drained(it.client.tail(max_wait_s=WAIT_S)),
    "Client.batches": lambda it: _drained(it.client.batches(4_000, WAIT_S)),
    "Client.load_fragments": lambda it: it.client.load_fragments(it.spare.fragments),
    "Client.describe_arrays": lambda it: it.client.describe_arrays(it.spare.fragments),
    "Client.load_batch": lambda it: it.client.load_batch(it.spare.fragments),
    "Service.renew_lease": lambda it: it.client.service.renew_lease(it.spare.lease_id),
    "Service.release_lease": lambda it: it.client.service.release_lease(it.spare.lease_id),
    "Client.create_buffer": lambda it: it.client.create_buffer(f"b{it.index}"),
    "Client.update_buffer": lambda it: it.client.update_buffer("default", BufferConfig()),
    "Client.delete_buffer": lambda it: it.client.delete_buffer("none"),
    "Client.list_buffers": lambda it: it.client.list_buffers(),
    "Client.get_buffer": lambda it: it.client.get_buffer(),
    "Service.get_store_config": lambda it: it.client.service.get_store_config(),
    "Lease.fragments": lambda it: _drained(it.lease.fragments()),
    "Lease.sequences": lambda it: _drained(it.lease.sequences()),
    "Lease.packed": lambda it: _drained(it.lease.packed()),
    "Lease.padded": lambda it: _drained(it.lease.padded()),
    "Lease.batches": lambda it: _drained(it.lease.batches(2, retries=2)),
    "Lease.batches.close": lambda it: _left_iterator(it.lease.batches(2)),
    "Lease.renew": lambda it: it.lease.renew(),
    "Lease.staleness": lambda it: it.lease.staleness(),
    "Lease.unreadable": lambda it: it.lease.unreadable(),
    "Lease.release": lambda it: it.lease.release(ReleaseMode.RETURNED),
    "Lease.__exit__": lambda it: _left(it.lease),
    "Lease.__exit__ with an error": lambda it: _left(it.lease, ValueError("the body's own")),
    "connect, and the first call": _of_new_client,
    "Appender.append": lambda it: _flooded(it.appender),
    "Appender.flush": lambda it: _given(it.appender).flush(),
    "Appender.close": lambda it: _given(it.appender).close(),
    "Appender.__exit__": lambda it: _left(_given(it.appender)),
}
"""Every public call that may wait for server or store."""

WAITING = {
    *("Client.watch_model", "Client.load_model", "Client.fetch", "Service.fetch_fragments"),
    *("Service.read_fragments", "Client.tail", "Client.batches", "Client.group_ends"),
    *("Client.tickets", "Service.take_tickets", "Client.claim", "Service.claim_members"),
}
"""They wait for what was asked for, besides."""
SILENT = {
    *("Client.address", "Client.buffer", "Client.closed", "Client.outage", "Client.__enter__"),
    "Client.declare_origin",
    *("Lease.lease_id", "Lease.request_id", "Lease.references", "Lease.__len__"),
    *("Lease.__enter__", "Lease.renew_quietly", "Lease.refuse", "Lease.left_out"),
    *("Appender.counts", "Appender.unsent", "Appender.__enter__", "Ticket.__enter__"),
}
"""Public, and never waiting for anybody; `renew_quietly` is a thread's of the library itself."""


def _given(appender: Appender | None) -> Appender:
    assert appender is not None
    appender.append(vector_fragment(10_000, worker_id="appended"))
    return appender


def _flooded(appender: Appender | None) -> None:
    """Append until the queue is full, and then once more."""
    for index in range(10_000, 10_020):
        _given(appender).append(vector_fragment(index, worker_id="flood"))


def _public(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        is_protocol = name in ("__enter__", "__aenter__", "__exit__", "__aexit__", "__len__")
        if (not name.startswith("_") or is_protocol) and (
            callable(member) or isinstance(member, property)
        ):
            yield f"{kind.__name__}.{name.replace('__a', '__')}"


def test_every_public_call_has_a_row() -> None:
    kinds = (Client, aio.Client, Service, aio.Service, Lease, aio.Lease, Ticket, aio.Ticket)
    public = {name for kind in (*kinds, Appender) for name in _public(kind)}
    assert set() == public - set(CALLS) - SILENT


# The world --------------------------------------------------------------------------------------


@dataclass
class World:
    """Server and Redis, each behind a proxy."""

    redis: RedisServer
    server: ServerProcess
    to_server: Proxy
    to_redis: Proxy
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def store_url(self) -> str:
        return f"redis://{self.to_redis.address}/0"

    def silence(self, peer: str, how: str) -> None:
        """Let a peer fall silent for the clients: by its proxy, or by stopping it."""
        if how == "stopped":
            process: Any = self.server if peer == "server" else self.redis
            process.signal(signal.SIGSTOP)
            self.stack.callback(process.signal, signal.SIGCONT)
            return
        proxy = self.to_server if peer == "server" else self.to_redis
        {"stalled": proxy.fall_silent, "dropped": proxy.drop}[how]()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(with_tcp=True))
        server = stack.enter_context(
            ServerProcess(
                *("--store", redis.tcp_url, "--capacity-chunks", "5000", "--schema", "any"),
                log=tmp_path / "server.log",
            )
        )
        host, _, port = server.address.rpartition(":")
        to_server = stack.enter_context(Proxy((host, int(port)), backlog=0))
        to_redis = stack.enter_context(Proxy(("127.0.0.1", redis.port), backlog=0))
        yield World(redis, server, to_server, to_redis, stack)


@contextmanager
def lateness() -> Iterator[Callable[[], float]]:
    """How much later than asked a busy machine wakes those who sleep, at most."""
    worst_s, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal worst_s
        while not ended.is_set():
            began = time.monotonic()
            time.sleep(0.02)
            worst_s = max(worst_s, time.monotonic() - began - 0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: worst_s
    finally:
        ended.set()
        thread.join()


def allowed_s(name: str) -> float:
    """The deadline of a call."""
    waits = name in WAITING
    return DEADLINE_S + RECONNECT_S + (WAIT_S if waits else 0.0)


async def _now(made: Any) -> Any:
    return await made if inspect.isawaitable(made) else made


async def prepare(world: World, kind: str, index: int, name: str) -> Prepared:
    """Make a client that has talked to both, a lease that is open, and another grant."""

    def connect() -> Any:
        module = breadbox if kind == "blocking" else aio
        return module.connect(world.to_server.address, store_url=world.store_url, **OPTIONS)

    client = await _now(connect())
    await _now(client.start_session("s"))
    await _now(client.publish("s", 0, {"w": np.ones(4)}))
    fragments = [stored_fragment(position, worker_id=f"w{index}") for position in range(8)]
    await _now(client.append_many(fragments))
    lease = await _now(client.fetch(4, 5.0))
    await _now(lease.__enter__() if kind == "blocking" else lease.__aenter__())
    spare = await _now(client.service.fetch_fragments(4, 5.0))
    await _now(client.load_fragments(spare.fragments))
    model = await _now(client.watch_model())
    it = Prepared(kind, client, index, connect, model, lease, spare)
    if name.startswith("Appender"):
        it.appender = Appender(client, AppenderOptions(queue_count_max=4, flush_after_s=0.0))
    return it


async def timed(row: Row, it: Prepared) -> tuple[float, BaseException | None]:
    """How long a call took, and what it raised."""
    began = time.monotonic()
    try:
        await _now(row(it))
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return time.monotonic() - began, error
    return time.monotonic() - began, None


async def close(it: Prepared) -> None:
    """End what the row has left; however that ends is not what is tested."""
    await _now(it.client.close())
    if it.appender is not None:
        with suppress(errors.ReplayBufferError):
            it.appender.close()
    if it.kind == "asyncio":
        await _left(it.lease, ValueError("over"))


SILENCES = [*itertools.product(("server", "redis"), ("stalled", "dropped", "stopped"))]


@pytest.mark.parametrize(
    ("peer", "how", "kind"),
    [
        # Each meets one kind of client in `make test`, and the other one in `make test-long`.
        pytest.param(*silence, kind, marks=[LONG] if (number + turn) % 2 else [])
        for turn, kind in enumerate(KINDS)
        for number, silence in enumerate(SILENCES)
    ],
)
async def test_no_call_outlives_its_deadline(world: World, peer: str, how: str, kind: str) -> None:
    names = [name for name in CALLS if kind == "blocking" or not name.startswith("Appender")]
    prepared = [await prepare(world, kind, index, name) for index, name in enumerate(names)]
    world.silence(peer, how)
    with lateness() as late_s, ThreadPoolExecutor(len(names)) as threads:
        if kind == "blocking":
            running = [
                asyncio.wrap_future(
                    threads.submit(lambda name, it: asyncio.run(timed(CALLS[name], it)), name, it)
                )
                for name, it in zip(names, prepared, strict=True)
            ]
        else:
            running = [
                asyncio.ensure_future(timed(CALLS[name], it))  # noqa: TID251 - awaited below
                for name, it in zip(names, prepared, strict=True)
            ]
        outcomes = [await each for each in running]
    async with asyncio.TaskGroup() as group:
        for it in prepared:
            group.create_task(close(it))
    late = {
        name: round(took_s, 2)
        for name, (took_s, _) in zip(names, outcomes, strict=True)
        if took_s > allowed_s(name) + MARGIN_S + late_s()
    }
    assert {} == late
    strange = {
        name: repr(error)
        for name, (_, error) in zip(names, outcomes, strict=True)
        if error is not None and not isinstance(error, errors.ReplayBufferError)
    }
    assert {} == strange
    failed = {name for name, (_, error) in zip(names, outcomes, strict=True) if error is not None}
    needed = {"server": "Service.get_store_config", "redis": "Client.load_batch"}
    assert needed[peer] in failed


# Payloads on their way, and stores of other kinds ----------------------------------------------

LARGE_BYTES = 20 * 2**20


def large_fragment(index: int, worker_id: str) -> Fragment:
    small = vector_fragment(index, worker_id=worker_id)
    return dataclasses.replace(small, obs=np.ones((4, LARGE_BYTES // 4), np.uint8))


def took_s(call: Callable[[], Any], *raised: type[Exception]) -> float:
    """How long a call took, which ended with one of these errors."""
    began = time.monotonic()
    with pytest.raises(raised):
        call()
    return time.monotonic() - began


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("to_redis", [True, False], ids=["append", "load"])
def test_silence_in_the_middle_of_a_payload_ends_the_call_by_its_deadline(
    world: World, tmp_path: Path, to_redis: bool, is_encrypted: bool
) -> None:
    store_url = world.store_url
    if is_encrypted:
        certificate, key = make_certificate(tmp_path)
        target = ("127.0.0.1", world.redis.port)
        proxy = world.stack.enter_context(TlsProxy(target, certificate, key))
        world.to_redis = world.stack.enter_context(Proxy(("127.0.0.1", proxy.port)))
        store_url = f"rediss://{world.to_redis.address}/0?ssl_ca_certs={certificate}"
    with breadbox.connect(world.server.address, store_url=store_url, **OPTIONS) as client:
        client.start_session("s")
        client.append(large_fragment(0, "w"))
        grant = client.service.fetch_fragments(1, 5.0)
        world.to_redis.fall_silent_after(LARGE_BYTES // 2, to_target=to_redis)
        calls: dict[bool, Callable[[], Any]] = {
            True: lambda: client.append(large_fragment(1, "w")),
            False: lambda: client.load_fragments(grant.fragments),
        }
        with lateness() as late_s:
            spent_s = took_s(calls[to_redis], errors.StoreUnavailableError)
        assert world.to_redis.is_silent
        # The first half of the payload was on its way until silence fell.
        assert spent_s < DEADLINE_S + RECONNECT_S + MARGIN_S + late_s() + TRANSFER_S


def test_a_slow_store_is_not_a_silent_one(world: World) -> None:
    """A payload may take many times the deadline, as long as its bytes move."""
    world.to_redis.pass_at_most(LARGE_BYTES / (3 * DEADLINE_S))
    with breadbox.connect(
        world.server.address, store_url=world.store_url, deadline_s=DEADLINE_S, reconnect_s=0.0
    ) as client:
        client.start_session("s")
        began = time.monotonic()
        client.append(large_fragment(0, "w"))
        assert time.monotonic() - began > DEADLINE_S


def all_stopped(pids: Sequence[int], stack: ExitStack) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)


def store_calls(
    client: breadbox.Client, grant: LeaseGrant, connect: Callable[[], breadbox.Client]
) -> dict[str, Callable[[], object]]:
    """The calls that move payloads."""
    return {
        "append": lambda: client.append(stored_fragment(5, worker_id="late")),
        "append of what rides along": lambda: client.append(vector_fragment(5, worker_id="rides")),
        "append_many": lambda: client.append_many([stored_fragment(5, worker_id="many")] * 300),
        "load_batch": lambda: client.load_batch(grant.fragments),
        "publish": lambda: client.publish("s", 1, {"w": np.ones(4)}),
        "a new client": lambda: connect().append(stored_fragment(5, worker_id="new")),
    }


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_silence_of_every_node_ends_calls_by_their_deadlines(kind: str, tmp_path: Path) -> None:
    """One node after the other may be asked; all of it counts."""
    with ExitStack() as stack:
        if kind == "cluster":
            cluster = stack.enter_context(RedisCluster())
            url, pids = cluster.url, [node.pid for node in cluster.nodes]
        else:
            watched = stack.enter_context(WatchedRedis())
            url, pids = watched.url, watched.pids
        server = stack.enter_context(
            ServerProcess(
                *("--store", url, "--journal", f"file://{tmp_path}/journal", "--schema", "any"),
                log=tmp_path / "server.log",
            )
        )
        connect = partial(breadbox.connect, server.address, **OPTIONS)
        client = stack.enter_context(connect())
        client.start_session("s")
        client.append_many([stored_fragment(index) for index in range(4)])
        grant = client.service.fetch_fragments(4, 5.0)
        client.load_batch(grant.fragments)
        all_stopped(pids, stack)
        rows = store_calls(client, grant, connect)
        with lateness() as late_s, ThreadPoolExecutor(len(rows)) as threads:
            running = {
                name: threads.submit(took_s, row, errors.ReplayBufferError)
                for name, row in rows.items()
            }
            spent_s = {name: each.result() for name, each in running.items()}
        limit_s = DEADLINE_S + RECONNECT_S + MARGIN_S + late_s()
        assert {} == {name: each for name, each in spent_s.items() if each > limit_s}
