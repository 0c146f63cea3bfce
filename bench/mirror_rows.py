"""Rows about the mirror: samples beside Stable-Baselines3's own buffer, memory, ingest and lag.

Stable-Baselines3 is no dependency: without `pip install stable-baselines3` its column is empty.
"""

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

import breadbox
from bench.measure import Contender, Figure, percentile, rates
from bench.processes import breadbox_server, memory_directory
from bench.workloads import SESSION_ID, numbered, vector_fragment
from breadbox.mirror import ReplayMirror, StepMemory
from breadbox.mirror.sharing.shared_memory import (
    Publisher,
    SharedMemory,
    SharedStepStorage,
    make_file,
)
from breadbox.mirror.storage.step_storage import FilledStepStorage
from breadbox.model.fragment import Fragment

BATCH_SIZE = 256
FRAME_STEPS = 128
FRAMES = (4, 84, 84)
FED_STEPS_PER_S = 50_000
SERVED_STEPS_PER_S = 10_000
OFF_POLICY = ("--uses-max", "1000000", "--staleness-max", "1000000", "--capacity-chunks", "2000")
SAMPLES_PER_TURN = 100
MISSING = "stable-baselines3 is not installed"


def frame_fragment() -> Fragment:
    """Make 128 steps of stacks of four 84x84 frames, the newest last."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (FRAME_STEPS + 4, *FRAMES[1:]), dtype=np.uint8)
    stacks = np.stack([frames[step : step + 4] for step in range(FRAME_STEPS + 1)])
    fragment = next(_lengthened(vector_fragment(), FRAME_STEPS))
    return replace(fragment, obs=stacks[:-1], next_obs=stacks[-1])


def _lengthened(fragment: Fragment, step_count: int) -> Iterator[Fragment]:
    def longer(array: Any) -> Any:
        return np.resize(array, (step_count, *array.shape[1:]))

    names = ("obs", "action", "reward", "terminated", "truncated", "first", "episode_id")
    yield replace(fragment, **{name: longer(getattr(fragment, name)) for name in names})


def mirror_rows(*, rounds: int, frame_steps: int, lag_count: int) -> Iterator[Figure]:
    """Measure samples, memory, ingest, and what ingest costs samples."""
    yield from _sample_rows(
        "vector", vector_fragment(), 100_000, rounds=20 * rounds, reach=2.0, frame_stack={}
    )
    yield from _sample_rows(
        "frames", frame_fragment(), frame_steps, rounds=rounds, reach=1.2, frame_stack={"obs": 0}
    )
    yield from _memory_ingest_rows(rounds=rounds)
    yield _slowing_row(rounds=rounds)
    yield _process_slowing_row(rounds=rounds)
    with (
        memory_directory() as directory,
        breadbox_server(f"file://{directory}", *OFF_POLICY) as server,
    ):
        yield _lag_row(server.address, lag_count)
        yield _following_row(server.address)
        yield _served_slowing_row(server.address, rounds=rounds)


def _sample_rows(
    workload: str,
    fragment: Fragment,
    capacity: int,
    *,
    rounds: int,
    reach: float,
    frame_stack: Mapping[str, int],
) -> Iterator[Figure]:
    """A sample of 256 steps as tensors, and the memory of so many steps, by turns with SB3."""
    memory = StepMemory(capacity, seed=0, frame_stack=frame_stack)
    for each in islice(numbered(fragment, "bench"), capacity // fragment.step_count + 1):
        memory.extend(each)
    contenders = {"ours": Contender(lambda: _drop(memory.sample(BATCH_SIZE, device="cpu")), 1.0)}
    theirs = _peer_buffer(fragment, memory.step_count)
    if theirs is not None:
        contenders["theirs"] = Contender(lambda: _drop(theirs.sample(BATCH_SIZE)), 1.0)
    got = rates(contenders, rounds=rounds, warm_up_rounds=3)
    alone = {"3-step": {"n_step": 3}, "by priority": {"prioritised": True}}
    others = rates(
        {
            name: Contender(
                lambda how=how: _drop(memory.sample(BATCH_SIZE, device="cpu", **how)),  # type: ignore[misc]
                1.0,
            )
            for name, how in alone.items()
        },
        rounds=max(3, rounds // 4),
    )
    yield Figure(
        name=f"mirror: sample({BATCH_SIZE}) as tensors",
        workload=workload,
        value=1e6 / got["ours"],
        unit="µs",
        limit=1e6 / got["theirs"] if "theirs" in got else None,
        limit_is="Stable-Baselines3's ReplayBuffer" if "theirs" in got else MISSING,
        reach=reach if "theirs" in got else None,
        is_lower_better=True,
        also={f"{name} µs": 1e6 / rate for name, rate in others.items()},
    )
    if workload == "frames":
        kept = 2 * memory.step_count * fragment.obs[0].nbytes
        yield Figure(
            name=f"mirror: memory of {memory.step_count:,} steps",
            workload=workload,
            value=memory.size_bytes / 1e6,
            unit="MB",
            limit=kept / 1e6,
            limit_is="obs and next_obs of each step",
            reach=1 / 3,
            is_lower_better=True,
        )


def _peer_buffer(fragment: Fragment, capacity: int) -> Any:
    """SB3's own buffer with as many steps; None: it is not installed."""
    try:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer
    except ImportError:
        return None
    shape, dtype = fragment.obs.shape[1:], fragment.obs.dtype
    buffer = ReplayBuffer(
        capacity, spaces.Box(0, 255, shape, dtype.type), spaces.Discrete(6), device="cpu"
    )
    buffer.observations[:] = 1
    buffer.next_observations[:] = 2
    buffer.full = True
    return buffer


def _memory_ingest_rows(*, rounds: int) -> Iterator[Figure]:
    """What `extend` takes in, without anything else."""
    for workload, fragment, count, stack in (
        ("vector", vector_fragment(), 128, {}),
        ("frames", frame_fragment(), 8, {"obs": 0}),
    ):
        memory = StepMemory(20 * fragment.step_count, seed=0, frame_stack=stack)
        successive = numbered(fragment, "bench")

        def extend(
            memory: StepMemory = memory,
            successive: Iterator[Fragment] = successive,
            count: int = count,
        ) -> None:
            for each in islice(successive, count):
                memory.extend(each)

        steps = count * fragment.step_count
        amount = steps * fragment.obs[0].nbytes / 1e9 if stack else float(steps)
        got = rates({"ours": Contender(extend, amount)}, rounds=rounds)
        begun_s = time.process_time()
        extend()
        unit = "GB/s" if stack else "steps/s"
        yield Figure(
            name="mirror: extend",
            workload=workload,
            value=got["ours"],
            unit=unit,
            reach=1.0 if stack else 50_000,
            also={f"{unit} of processor time": amount / (time.process_time() - begun_s)},
        )


def _lag_row(address: str, count: int) -> Figure:
    """From the answer to an append to the step in the mirror."""
    lags: list[float] = []
    with breadbox.connect(address) as client:
        client.start_session(SESSION_ID)
        successive = numbered(vector_fragment(), "bench")
        step_count = vector_fragment().step_count
        with ReplayMirror(address, capacity_steps=(count + 1) * step_count) as mirror:
            for number in range(1, count + 1):
                client.append(next(successive))
                begun_at = time.perf_counter()
                mirror.wait_until(number * step_count, timeout_s=30)
                lags.append(time.perf_counter() - begun_at)
    return Figure(
        name="mirror: lag behind an append, p99",
        workload="vector",
        value=1e3 * percentile(lags, 99),
        unit="ms",
        reach=50.0,
        is_lower_better=True,
        also={"p50 ms": 1e3 * statistics.median(lags)},
    )


def _following_row(address: str) -> Figure:
    """Steps per second from another process through a server into a mirror."""
    session_id = f"{SESSION_ID}-following"
    with breadbox.connect(address) as client:
        client.start_session(session_id)
        with (
            ReplayMirror(address, capacity_steps=100_000, seed=0) as mirror,
            _producer(address, session_id),
        ):
            mirror.wait_until(50_000, timeout_s=120)
            before, begun_at = mirror.inserted_step_count, time.perf_counter()
            time.sleep(3.0)
            rate = (mirror.inserted_step_count - before) / (time.perf_counter() - begun_at)
    return Figure(
        name="mirror: steps taken in from a server, one producer",
        workload="vector",
        value=rate,
        unit="steps/s",
    )


def _slowing_row(*, rounds: int) -> Figure:
    """Samples while a thread takes steps in, and while it does not, by turns."""
    fragment = vector_fragment()
    memory = StepMemory(100_000, seed=0)
    successive = numbered(fragment, "bench")
    for each in islice(successive, 100_000 // fragment.step_count + 1):
        memory.extend(each)
    may_feed, is_over = threading.Event(), threading.Event()
    fed, spent_s, before = 0, 0.0, 0.0

    def feed() -> None:
        next_at = time.perf_counter()
        while not is_over.is_set():
            may_feed.wait()
            memory.extend(next(successive))
            # What it is behind after a pause is not made up for.
            next_at = max(
                next_at + fragment.step_count / FED_STEPS_PER_S, time.perf_counter() - 0.02
            )
            time.sleep(max(0.0, next_at - time.perf_counter()))

    def sample() -> None:
        for _ in range(SAMPLES_PER_TURN):
            memory.sample(BATCH_SIZE, device="cpu")

    def resume() -> None:
        nonlocal fed, before
        may_feed.set()
        fed -= memory.inserted_step_count
        before = time.perf_counter()

    def pause() -> None:
        nonlocal fed, spent_s
        may_feed.clear()
        fed += memory.inserted_step_count
        spent_s += time.perf_counter() - before

    thread = threading.Thread(target=feed)
    thread.start()
    got = rates(
        {
            "busy": Contender(sample, SAMPLES_PER_TURN, before=resume, after=pause),
            "quiet": Contender(sample, SAMPLES_PER_TURN),
        },
        rounds=rounds,
    )
    is_over.set()
    may_feed.set()
    thread.join()
    return Figure(
        name=f"mirror: samples while {fed / spent_s:,.0f} steps/s are taken in",
        workload="vector",
        value=got["busy"],
        unit="samples/s",
        limit=got["quiet"],
        limit_is="while none are",
        reach=0.8,
    )


class _Reader(StepMemory):
    """Draws from what another process of this benchmark fills."""

    def __init__(self, capacity: int, descriptor: int) -> None:
        self._begin(SharedStepStorage(capacity, {}, descriptor, lambda: None), 0)


def _process_slowing_row(*, rounds: int) -> Figure:
    """As `_slowing_row`, with a process in the thread's place."""
    descriptor = make_file()
    memory = _Reader(100_000, descriptor)
    command = [sys.executable, "-m", "bench.mirror_rows", "feed", str(descriptor)]
    fed, spent_s, before = 0, 0.0, 0.0
    costs: dict[str, list[float]] = {"busy": [], "quiet": []}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[descriptor], text=True
    ) as process:
        assert process.stdin is not None
        told = process.stdin

        def tell(what: str) -> None:
            print(what, file=told, flush=True)

        def sample(kind: str) -> None:
            begun_s = time.process_time()
            for _ in range(SAMPLES_PER_TURN):
                memory.sample(BATCH_SIZE, device="cpu")
            costs[kind].append((time.process_time() - begun_s) / SAMPLES_PER_TURN)

        def resume() -> None:
            nonlocal fed, before
            tell("resume")
            fed -= memory.inserted_step_count
            before = time.perf_counter()

        def pause() -> None:
            nonlocal fed, spent_s
            tell("pause")
            fed += memory.inserted_step_count
            spent_s += time.perf_counter() - before

        memory.wait_until(100_000, timeout_s=120)
        got = rates(
            {
                "busy": Contender(
                    lambda: sample("busy"), SAMPLES_PER_TURN, before=resume, after=pause
                ),
                "quiet": Contender(lambda: sample("quiet"), SAMPLES_PER_TURN),
            },
            rounds=rounds,
        )
        process.kill()
    return Figure(
        name=f"mirror: samples while a process takes {fed / spent_s:,.0f} steps/s in",
        workload="vector",
        value=got["busy"],
        unit="samples/s",
        limit=got["quiet"],
        limit_is="while none are",
        reach=0.8,
        also={
            f"processor µs per sample, {kind}": 1e6 * statistics.median(found)
            for kind, found in costs.items()
        },
    )


def _feed(descriptor: int) -> None:
    """Fill a memory, and then add steps at a fixed rate whenever the benchmark says so."""
    memory = SharedMemory(descriptor)
    held = FilledStepStorage(100_000, {}, memory)
    no_follower: Any = SimpleNamespace(
        session_id="",
        cursor=None,
        begun_count=0,
        skipped_chunk_count=0,
        failure=None,
        behind_since=0.0,
    )
    held.on_change = Publisher(memory, held, no_follower).publish
    fragment = vector_fragment()
    successive = numbered(fragment, "bench")
    for each in islice(successive, 100_000 // fragment.step_count + 1):
        held.extend(each, None)
    may_feed = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            (may_feed.set if line == "resume\n" else may_feed.clear)()

    threading.Thread(target=listen, daemon=True).start()
    next_at = time.perf_counter()
    while True:
        may_feed.wait()
        held.extend(next(successive), None)
        next_at = max(next_at + fragment.step_count / FED_STEPS_PER_S, time.perf_counter() - 0.02)
        time.sleep(max(0.0, next_at - time.perf_counter()))


def _served_slowing_row(address: str, *, rounds: int) -> Figure:
    """Samples of a mirror in a process, while a producer at a fixed rate feeds it, by turns.

    Producer, server and the mirror's process need a core of their own each, or the learner waits
    for those; what a sample costs the learner itself is in its processor time.
    """
    session_id = f"{SESSION_ID}-served"
    costs: dict[str, list[float]] = {"quiet": [], "busy": []}
    counts: dict[str, list[float]] = {"quiet": [], "busy": []}
    fed: list[float] = []
    with breadbox.connect(address) as client:
        client.start_session(session_id)
    with ReplayMirror(address, capacity_steps=100_000, seed=0, process=True) as mirror:
        with _producer(address, session_id):
            mirror.wait_until(60_000, timeout_s=120)
        for _ in range(rounds):
            mirror.catch_up(60)
            for kind in ("quiet", "busy"):
                with _producer(address, session_id, SERVED_STEPS_PER_S) as producer:
                    before = mirror.inserted_step_count
                    if kind == "busy":
                        while mirror.inserted_step_count < before + 5_000:
                            time.sleep(0.01)
                    else:
                        producer.send_signal(signal.SIGSTOP)
                        time.sleep(0.2)
                    before, done = mirror.inserted_step_count, 0
                    begun_at, cost = time.perf_counter(), time.process_time()
                    while time.perf_counter() < begun_at + 1.0:
                        mirror.sample(BATCH_SIZE, device="cpu")
                        done += 1
                    spent_s = time.perf_counter() - begun_at
                    costs[kind].append((time.process_time() - cost) / done)
                    counts[kind].append(done / spent_s)
                    if kind == "busy":
                        fed.append((mirror.inserted_step_count - before) / spent_s)
    quiet, busy = (statistics.median(counts[kind]) for kind in ("quiet", "busy"))
    return Figure(
        name=f"mirror: samples while a process reads {statistics.median(fed):,.0f} steps/s",
        workload="vector",
        value=busy,
        unit="samples/s",
        limit=quiet,
        limit_is="while none come",
        reach=0.8,
        also={
            f"processor µs per sample, {kind}": 1e6 * statistics.median(found)
            for kind, found in costs.items()
        },
    )


@contextlib.contextmanager
def _producer(
    address: str, session_id: str, steps_per_s: float = math.inf
) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that appends vector fragments, as fast as it can unless a rate is given."""
    command = [sys.executable, "-m", "bench.mirror_rows", address, session_id, str(steps_per_s)]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _produce(address: str, session_id: str, steps_per_s: float) -> None:
    fragment = replace(vector_fragment(), session_id=session_id, worker_id=f"w{os.getpid()}")
    successive = numbered(fragment, fragment.worker_id)
    count = 256 if math.isinf(steps_per_s) else 32
    next_at = time.perf_counter()
    with breadbox.connect(address) as client:
        while True:
            client.append_many(list(islice(successive, count)))
            next_at = max(
                next_at + count * fragment.step_count / steps_per_s, time.perf_counter() - 0.02
            )
            time.sleep(max(0.0, next_at - time.perf_counter()))


def _drop(_: object) -> None:
    """Let go of what was made."""


if __name__ == "__main__":
    if sys.argv[1] == "feed":
        _feed(int(sys.argv[2]))
    else:
        _produce(sys.argv[1], sys.argv[2], float(sys.argv[3]))
