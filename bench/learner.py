"""Rows about the learner: how long it waits for data, and how often a byte is copied on its way."""

import socket
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

import breadbox
from bench.measure import Figure
from bench.processes import breadbox_server, redis_server
from bench.workloads import SESSION_ID, numbered, vpt_fragment
from breadbox.loader import FragmentLoader
from breadbox.model.types import FragmentReference
from breadbox.reading.batches import Batch
from breadbox.reading.loading import LoaderOptions
from breadbox.stores import bulk

BATCH_SIZE = 2
"""Fragments of a batch: 40 MiB."""
HELD_FRAGMENTS = 8
STEP_TO_LOAD = 1.5
"""A training step takes this many times as long as a batch of a loader that never waits for a step:
production is sufficient."""


def learner_rows(*, batches: int) -> Iterator[Figure]:
    """Measure a loop that sleeps as long as a training step, over vpt fragments from Redis."""
    with (
        redis_server() as path,
        breadbox_server(f"unix://{path}", "--uses-max", "1000000") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        fragments = numbered(vpt_fragment(), "bench")
        client.append_many([next(fragments) for _ in range(HELD_FRAGMENTS)])
        with client.fetch(fragment_count=HELD_FRAGMENTS, max_wait_s=10) as lease:
            references = list(lease.references)
            yield copies_row(client, references)
            yield _waiting_row(client, references, batches=batches)


def _waiting_row(
    client: breadbox.Client, references: Sequence[FragmentReference], *, batches: int
) -> Figure:
    """Share of the time that the loop waits, with prefetch and, for comparison, without."""
    needed = batches * BATCH_SIZE
    stream = [references[number % len(references)] for number in range(needed)]
    # What is produced by the same loader, holding as many batches: with fewer of them, memory that
    # was just freed is used again, and loads are faster than they can be later.
    produced = _loads(client, stream[: 12 * BATCH_SIZE], prefetch=2)
    step_s = STEP_TO_LOAD * statistics.fmean(_waits(produced, step_s=0.0)[3:])
    with_prefetch = _waiting_share(_loads(client, stream, prefetch=2), step_s)
    without = _waiting_share(_loads(client, stream, prefetch=0), step_s)
    return Figure(
        name=f"learner waits for data, prefetch 2, steps of {step_s:.2f} s",
        workload="vpt",
        value=with_prefetch,
        unit="% of the time",
        reach=10.0,
        is_lower_better=True,
        peers={"prefetch 0": without},
    )


def _loads(
    client: breadbox.Client, stream: Sequence[FragmentReference], *, prefetch: int
) -> Iterator[Batch]:
    loader = FragmentLoader(client.load_batch, LoaderOptions(prefetch_batches=prefetch, threads=1))
    return loader.batches(stream, BATCH_SIZE)


def _waits(loads: Iterator[Batch], step_s: float) -> list[float]:
    """Seconds waited before each step."""
    waits: list[float] = []
    while True:
        asked_at = time.perf_counter()
        if next(loads, None) is None:
            return waits
        waits.append(time.perf_counter() - asked_at)
        time.sleep(step_s)


def _waiting_share(loads: Iterator[Batch], step_s: float) -> float:
    """Percent of the loop's time spent waiting, without the first batch, which nothing hides."""
    waits = _waits(loads, step_s)[1:]
    return 100.0 * sum(waits) / (sum(waits) + step_s * len(waits))


class _Counter:
    """Where received bytes went: (address, count) of every receive."""

    def __init__(self) -> None:
        self.received: list[tuple[int, int]] = []

    def note(self, buffer: Any, count: int) -> None:
        if count:
            address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
            self.received.append((address, count))


@contextmanager
def _counted_receives() -> Iterator[_Counter]:
    """Count the bytes of payloads that this process receives from sockets, by where they are put.

    Compiled loads receive by a call of their own, into memory that they are given at once.
    """
    counter = _Counter()
    whole, scattered = socket.socket.recv_into, socket.socket.recvmsg_into
    compiled = bulk.receive

    def recv_into(self: socket.socket, buffer: Any, *arguments: Any) -> int:
        count = whole(self, buffer, *arguments)
        counter.note(buffer, count)
        return count

    def recvmsg_into(self: socket.socket, buffers: Any, *arguments: Any) -> Any:
        result = scattered(self, buffers, *arguments)
        left = result[0]
        for buffer in buffers:
            counter.note(buffer, min(left, len(buffer)))
            left -= min(left, len(buffer))
        return result

    def receive(
        descriptor: int,
        frames: Sequence[memoryview],
        values: Sequence[Sequence[memoryview]],
        blocks: bulk.Blocks,
        received_bytes: int,
        questions: Sequence[bulk.Question],
        digests: "array[int]",
    ) -> int:
        if not received_bytes:
            for part in chain.from_iterable(values):
                counter.note(part, len(part))
        return compiled(descriptor, frames, values, blocks, received_bytes, questions, digests)

    bulk.receive = receive
    socket.socket.recv_into = recv_into  # type: ignore[assignment,method-assign]
    socket.socket.recvmsg_into = recvmsg_into  # type: ignore[assignment,method-assign]
    try:
        yield counter
    finally:
        del socket.socket.recv_into, socket.socket.recvmsg_into
        bulk.receive = compiled


def copies_row(client: breadbox.Client, references: Sequence[FragmentReference]) -> Figure:
    """Copies of each payload byte between the socket and the stacked batch.

    A byte that the kernel puts into its place in the batch was copied once; one that was received
    anywhere else has to be copied again.
    """
    with _counted_receives() as counter:
        batch = client.load_batch(references[:BATCH_SIZE])
    assert batch.stacked is not None
    places = [
        (array.__array_interface__["data"][0], array.nbytes)
        for array in batch.stacked.arrays
        if array is not None
    ]
    total = sum(count for _, count in counter.received)
    if total < sum(size for _, size in places):
        raise RuntimeError("the batch was received by a call that is not counted here")
    in_place = sum(
        count
        for address, count in counter.received
        if any(start <= address < start + size for start, size in places)
    )
    return Figure(
        name="copies of a byte from the socket to the batch",
        workload="vpt",
        value=(in_place + 2 * (total - in_place)) / total,
        unit="copies per byte",
        reach=1.1,
        is_lower_better=True,
    )
