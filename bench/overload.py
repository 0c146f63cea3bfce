"""Rows about overload: what a learner keeps of its rate when producers send twice what is taken.

The server has one core; learner, producers and Redis have another, on which the learner goes first.
In turns producers send half of what the server takes without a learner, twice that, or only burn
processor time: what they take of the learner's core is in all three.

`python -m bench.overload ADDRESS GROUP` is a process of producers. It reads an order per line, and
answers with the fragments admitted per second. It encodes by itself and one message per call, so
that few processes are more than a server takes.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import grpc

import breadbox
from bench.measure import Figure
from bench.processes import Server, breadbox_server, redis_server
from bench.workloads import SESSION_ID, numbered, vector_fragment
from breadbox.operations.calls import announce_fragments
from breadbox.payload.fragments import write_and_describe
from breadbox.reading.batches import Batch, load_batch
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb

GROUPS = (1, 32)
"""Fragments per append call."""
_METHOD = "/breadbox.v1.ReplayBufferService/AppendFragments"
_PROCESSES = 2
_CALLERS = 32
"""Producers of each process, with one call in progress each."""
_BATCH = 32
_CHUNKS = 4096
_INLINE_BYTES_MAX = 4096
_NICENESS = 15
_WARM_UP_S = 0.5
_BUSY_S = 0.5
"""Seconds until a producer that was told to wait comes again."""
_BURN, _ENDLESS = -1.0, 0.0
"""Calls per second that stand for none, and for one after the other."""


def overload_rows(*, rounds: int, seconds: float) -> Iterator[Figure]:
    """Measure a learner beside producers, on two cores of this machine; no rows if it has one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        for group in GROUPS:
            yield _row(group, {cores[0]}, {cores[1]}, rounds=rounds, seconds=seconds)


def _row(
    group: int, server_core: Set[int], clients_core: Set[int], *, rounds: int, seconds: float
) -> Figure:
    options = ("--capacity-chunks", str(_CHUNKS), "--uses-max", "1000000")
    learned: dict[str, list[float]] = {}
    taken: dict[str, list[float]] = {}
    with ExitStack() as stack:
        stack.enter_context(_confined_to(clients_core))
        path = stack.enter_context(redis_server())
        with _confined_to(server_core):
            server = stack.enter_context(breadbox_server(f"unix://{path}", *options))
        client = stack.enter_context(breadbox.connect(server.address))
        client.start_session(SESSION_ID)
        # The learner never waits for data.
        client.append_many(list(islice(numbered(vector_fragment(), "bench"), _CHUNKS // 4)))
        producers = stack.enter_context(_producers(server, group))
        capacity = _Run(producers, _ENDLESS, seconds).end()
        paces = {"half": capacity / 2 / group, "double": 2 * capacity / group, "burn": _BURN}
        for _ in range(rounds):
            for name, per_second in paces.items():
                run = _Run(producers, per_second, seconds)
                learned.setdefault(name, []).append(_batches_per_second(client, seconds))
                taken.setdefault(name, []).append(run.end())
    rate = {name: statistics.median(each) for name, each in learned.items()}
    each = "one at a time" if group == 1 else f"{group} at a time"
    return Figure(
        name=f"a learner while {_PROCESSES * _CALLERS} producers, {each}, send double",
        workload="vector",
        value=rate["double"],
        unit="batches/s",
        limit=rate["half"],
        limit_is="while they send half",
        reach=0.9,
        also={
            "while they burn time instead": rate["burn"],
            "appends/s without a learner": capacity,
            "of half": statistics.median(taken["half"]),
            "of double": statistics.median(taken["double"]),
        },
    )


@contextmanager
def _confined_to(cores: Set[int]) -> Iterator[None]:
    """Keep this process, and those that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _batches_per_second(client: breadbox.Client, seconds: float) -> float:
    """Fetch, load and release for a while; return the rate by the median time."""
    until = time.perf_counter() + seconds
    into: Batch | None = None
    took_s: list[float] = []
    while (began_at := time.perf_counter()) < until:
        grant = client.service.fetch_fragments(_BATCH, max_wait_s=10.0)
        into = load_batch(client.store, grant.fragments, into=into)
        client.service.release_lease(grant.lease_id, breadbox.ReleaseMode.CONSUMED)
        took_s.append(time.perf_counter() - began_at)
    return 1 / statistics.median(took_s)


@contextmanager
def _producers(server: Server, group: int) -> Iterator[Sequence["subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "bench.overload", server.address, str(group)]
    processes = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(_PROCESSES)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.communicate()


class _Run:
    """An order that all producers carry out, from a moment ago."""

    def __init__(
        self, producers: Sequence["subprocess.Popen[str]"], per_second: float, seconds: float
    ) -> None:
        self._producers = producers
        share = per_second / len(producers) if per_second > 0 else per_second
        for each in producers:
            assert each.stdin is not None
            each.stdin.write(json.dumps([share, _WARM_UP_S + seconds]) + "\n")
            each.stdin.flush()
        time.sleep(_WARM_UP_S)

    def end(self) -> float:
        """Return the fragments per second that were admitted, once all have stopped."""
        lines = [each.stdout.readline() for each in self._producers if each.stdout is not None]
        return float(sum(json.loads(line) for line in lines))


async def _produce(
    call: Any, worker_id: str, group: int, phase: float, period_s: float, until: float
) -> int:
    """Send calls until then, due at even times or one after the other; the fragments admitted."""
    fragments = list(islice(numbered(vector_fragment(), worker_id), group))
    written = write_and_describe(
        None, fragments, codecs="raw", inline_size_bytes_max=_INLINE_BYTES_MAX
    )
    request: Any = announce_fragments("", fragments, written).request
    count = 0
    due = time.perf_counter() + phase * period_s
    while (now := time.perf_counter()) < until:
        if due > now:
            await asyncio.sleep(due - now)
        due += period_s
        reply = await _patiently(call, request.SerializeToString())
        assert all(
            each.outcome == fragment_pb2.ADMISSION_OUTCOME_ADMITTED for each in reply.results
        )
        if time.perf_counter() < until:
            count += group
        for each in request.fragments:
            each.fragment_index += group
    return count


async def _patiently(call: Any, data: bytes) -> pb.AppendFragmentsResponse:
    while True:
        try:
            return pb.AppendFragmentsResponse.FromString(await call(data))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(_BUSY_S)


async def _carry_out(address: str, group: int, run: int, per_second: float, until: float) -> int:
    period_s = _CALLERS / per_second if per_second else 0.0
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as callers:
        call: Any = channel.unary_unary(_METHOD)
        counts = [
            callers.create_task(
                _produce(
                    call,
                    f"{os.getpid()}-{run}-{number}",
                    group,
                    number / _CALLERS,
                    period_s,
                    until,
                )
            )
            for number in range(_CALLERS)
        ]
    return sum(each.result() for each in counts)


def _main() -> None:
    os.nice(_NICENESS)
    address, group = sys.argv[1], int(sys.argv[2])
    for run, line in enumerate(sys.stdin):
        per_second, seconds = json.loads(line)
        until = time.perf_counter() + seconds
        count = 0
        if per_second == _BURN:
            while time.perf_counter() < until:
                pass
        else:
            count = asyncio.run(_carry_out(address, group, run, per_second, until))
        print(json.dumps(count / seconds), flush=True)


if __name__ == "__main__":
    _main()
