"""What loading and appending hold at their peak: what they say, and not a batch more."""

import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from breadbox.loader import FragmentLoader
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, AppendResult, FragmentReference
from breadbox.payload import write_fragments
from breadbox.payload.memory import idle_blocks
from breadbox.reading.batches import Batch, load_batch
from breadbox.reading.loading import LoaderOptions
from breadbox.stores import PayloadStore, open_store
from breadbox.writing.appender import Appender, AppenderOptions
from support.announced import metadata_of
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.traced_memory import traced_memory

MIB = 2**20
FRAGMENT_BYTES = MIB
SLACK_BYTES = MIB // 2
"""For everything that is not payload: objects, references, threads, the small arrays."""
BATCH_SIZE = 4
BATCH_BYTES = BATCH_SIZE * FRAGMENT_BYTES


def large_fragment(index: int) -> Fragment:
    """A fragment of 1 MiB, and a little."""
    fragment = vector_fragment(index)
    fragment.obs = np.full((fragment.step_count, FRAGMENT_BYTES // 4), index, np.uint8)
    fragment.next_obs = np.zeros(1, np.uint8)
    return fragment


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PayloadStore]:
    """A store that holds nothing in this process."""
    opened = open_store(f"file://{tmp_path}")
    yield opened
    opened.close()


def stored(store: PayloadStore, count: int, codec: str) -> list[FragmentReference]:
    references = []
    for index in range(count):
        fragment = large_fragment(index)
        (payload,) = write_fragments(store, [fragment], codecs=codec)
        references.append(FragmentReference(metadata_of(fragment, payload), 0, 0, 1))
    return references


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (2, 2), (4, 2), (4, 4)])
def test_a_loader_holds_its_prefetched_batches_and_two(
    store: PayloadStore, codec: str, prefetch: int, threads: int
) -> None:
    """The one worked on, the one handed out in its place, and those ahead.

    Decoding an array takes as much again per thread; lz4's own module, twice as much.
    """
    references = stored(store, 12 * BATCH_SIZE, codec)
    load_batch(store, references[:1])  # What is imported and remembered once is not counted.
    idle_blocks.clear()
    loaded = threading.Semaphore(0)
    loaded_count = 0

    def load(part: Sequence[FragmentReference]) -> Batch:
        nonlocal loaded_count
        batch = load_batch(store, part)
        with loaded_lock:
            loaded_count += 1
        loaded.release()
        return batch

    loaded_lock = threading.Lock()
    loader = FragmentLoader(load, LoaderOptions(prefetch_batches=prefetch, threads=threads))
    handed_out = 0
    with traced_memory() as traced:
        for batch in loader.batches(references, BATCH_SIZE):
            handed_out += 1
            wanted = min(handed_out + prefetch, 12)
            # The slowest of learners: all that may be loaded ahead is there before it goes on.
            eventually_sync(lambda: loaded_count >= wanted, "loading ahead")  # noqa: B023 - at once
            assert loaded_count <= wanted
            # Without memory of its own: what the last batch had is kept for the next one.
            assert batch.obs[0].min() == batch.obs[0].max() == 4 * (handed_out - 1)
        del batch
    scratch_bytes = {"raw": 0, "zstd": 1, "lz4": 2}[codec] * threads * FRAGMENT_BYTES
    assert traced.peak_bytes <= (prefetch + 2) * BATCH_BYTES + scratch_bytes + SLACK_BYTES
    assert traced.peak_bytes >= (prefetch + 1) * BATCH_BYTES  # Else nothing was measured.


class StoringClient:
    """Writes what it is given, when it may."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self.may_write = threading.Semaphore(0)
        self.written_count = 0

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        for fragment in fragments:
            assert self.may_write.acquire(timeout=30)
            write_fragments(self._store, [fragment])
            self.written_count += 1
            del fragment
            assert answered is not None
            answered([AppendResult(AdmissionOutcome.ADMITTED)])
        return []


@pytest.mark.parametrize("queue_count", [2, 6])
def test_an_appender_holds_its_queue_and_the_fragment_that_waits_to_enter_it(
    store: PayloadStore, queue_count: int
) -> None:
    client = StoringClient(store)
    options = AppenderOptions(
        batch_count=1,
        flush_after_s=0.0,
        queue_bytes_max=queue_count * (FRAGMENT_BYTES + 4096),
    )
    total = 4 * queue_count
    with Appender(client, options) as appender:
        appended = 0

        def produce() -> None:
            nonlocal appended
            for index in range(total):
                appender.append(large_fragment(index))
                appended += 1

        producer = threading.Thread(target=produce)
        with traced_memory() as traced:
            producer.start()
            while True:
                # The producer has filled the queue, and holds one more in its hands.
                eventually_sync(
                    lambda: appended == min(total, queue_count + client.written_count), "filling"
                )
                assert appender.counts.pending_bytes <= options.queue_bytes_max
                if client.written_count == total:
                    break
                client.may_write.release()
                before = client.written_count
                eventually_sync(lambda: client.written_count > before, "writing")  # noqa: B023 - at once
            producer.join()
            appender.flush()
        assert total == client.written_count
    assert traced.peak_bytes <= (queue_count + 1) * FRAGMENT_BYTES + SLACK_BYTES
    assert traced.peak_bytes >= queue_count * FRAGMENT_BYTES


def test_an_appender_with_nothing_to_send_holds_nothing(store: PayloadStore) -> None:
    client = StoringClient(store)
    with Appender(client, AppenderOptions(flush_after_s=0.0)) as appender, traced_memory():
        for index in range(8):
            appender.append(large_fragment(index))
            client.may_write.release()
        appender.flush()
        held_bytes, _ = tracemalloc.get_traced_memory()
    assert held_bytes < SLACK_BYTES
