"""Rows about loads in a thread beside another that works, as a prefetching learner has them."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

import breadbox
from bench.measure import Figure
from bench.processes import breadbox_server, memory_directory, redis_server
from bench.workloads import SESSION_ID, WORKLOADS, numbered
from breadbox.model.types import FragmentReference
from breadbox.reading.batches import Batch, load_batch
from breadbox.stores import open_store
from breadbox.stores.base import PayloadStore

_BATCH = 32
_TURN_S = 0.4
_SWITCH_S = 0.0005
"""Instead of Python's 5 ms, after which a thread that waits asks for the interpreter."""


def beside_rows(*, rounds: int) -> Iterator[Figure]:
    """Measure loads of `atari` batches alone and beside a thread that works, in several ways."""
    with redis_server() as path:
        yield from _rows_of(f"unix://{path}", "Redis", rounds=rounds)
    with memory_directory() as directory:
        yield from _rows_of(f"file://{directory}", "shared memory", rounds=rounds)


def _rows_of(url: str, store_name: str, *, rounds: int) -> Iterator[Figure]:
    with (
        breadbox_server(url, "--capacity-bytes", str(2**29)) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        client.append_many(list(islice(numbered(WORKLOADS["atari"](), "bench"), _BATCH)))
        with client.fetch(fragment_count=_BATCH, max_wait_s=10) as lease:
            store = open_store(url)
            for name, work in (("a Python loop", _loop), ("small numpy products", _products)):
                yield _row(store, list(lease.references), store_name, name, work, rounds=rounds)
            store.close()


def _row(
    store: PayloadStore,
    references: Sequence[FragmentReference],
    store_name: str,
    name: str,
    work: Callable[[], None],
    *,
    rounds: int,
) -> Figure:
    moved = sum(each.metadata.payload.size_bytes for each in references) / 1e9
    into: list[Batch] = []

    def load() -> None:
        load_batch(store, references)

    def load_into() -> None:
        into[:] = [load_batch(store, references, into=into[0] if into else None)]

    ways = {
        "": (load, sys.getswitchinterval()),
        f"at {_SWITCH_S * 1e3:g} ms": (load, _SWITCH_S),
        "into the last batch": (load_into, sys.getswitchinterval()),
    }
    load()
    alone, quiet = [], []
    beside: dict[str, list[float]] = {way: [] for way in ways}
    kept: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(max(3, rounds)):
        alone.append(_turns(load, None)[0])
        quiet.append(_turns(lambda: time.sleep(_TURN_S / 8), work)[1])
        for way, (act, switch_s) in ways.items():
            with _switching_after(switch_s):
                loads, works = _turns(act, work)
            beside[way].append(loads * moved)
            kept[way].append(works / quiet[-1])
    medians = {way: float(np.median(rates)) for way, rates in beside.items()}
    return Figure(
        name=f"load beside {name}, from {store_name}",
        workload="atari",
        value=medians.pop(""),
        unit="GB/s",
        limit=float(np.median(alone)) * moved,
        limit_is="the same alone",
        peers=medians,
        also={
            f"{name} keeps{f' {way}' if way else ''}": float(np.median(shares))
            for way, shares in kept.items()
        },
    )


@contextmanager
def _switching_after(seconds: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def _turns(act: Callable[[], None], work: Callable[[], None] | None) -> tuple[float, float]:
    """Act for a while, beside a thread that works; return acts and works a second."""
    is_over = threading.Event()
    worked = 0

    def keep_working() -> None:
        nonlocal worked
        while work is not None and not is_over.is_set():
            work()
            worked += 1

    thread = threading.Thread(target=keep_working)
    thread.start()
    acted, start = 0, time.perf_counter()
    while time.perf_counter() - start < _TURN_S:
        act()
        acted += 1
    elapsed = time.perf_counter() - start
    done = worked
    is_over.set()
    thread.join()
    return acted / elapsed, done / elapsed


def _loop() -> None:
    total = 0
    for number in range(1000):
        total += number * number % 7


def _products() -> None:
    matrix = np.ones((32, 32), np.float32)
    for _ in range(20):
        matrix = matrix @ matrix * np.float32(0.03)
