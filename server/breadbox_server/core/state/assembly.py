"""Open chunks: how a worker's fragments become chunks (B3, B4).

Invariants:

A1  The fragments of an open chunk are of one worker and the current session, have consecutive
    indices, and only the first may bear a discontinuity.
A2  An open chunk has at least one fragment and fewer than `fragments_per_chunk`; a worker has at
    most one.
A3  Open chunks stand in order of their last fragment's arrival, so that silence is found in front.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from breadbox_server.core.model.events import DiscardReason
from breadbox_server.core.model.ids import ModelVersion, PayloadId, WorkerId
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.model.outcomes import OutcomeWindow

IDLE_SEARCH_MAX: Final = 64
"""Workers looked at for one that can be forgotten."""


class OpenChunk:
    """A worker's chunk still being filled."""

    __slots__ = ("fragments", "touched_at", "version", "worker_id")

    def __init__(self, worker_id: WorkerId, fragments: list[Fragment], touched_at: float) -> None:
        self.worker_id = worker_id
        self.fragments = fragments
        self.version = min(fragment.model_version_min for fragment in fragments)
        self.touched_at = touched_at
        """When its latest fragment was admitted."""

    @property
    def size_bytes(self) -> int:
        """Payload bytes of its fragments."""
        return sum(fragment.payload.size_bytes for fragment in self.fragments)

    def gap_before(self, fragment: Fragment) -> DiscardReason | None:
        """Return why the chunk cannot go on with this fragment, or None if it can.

        An index may be missing because it was skipped, or because it was refused as stale.
        """
        if fragment.discontinuity:
            return DiscardReason.DISCONTINUITY
        if fragment.fragment_index != self.fragments[-1].fragment_index + 1:
            return DiscardReason.GAP
        return None


class Worker:
    """What is remembered of one worker within a session."""

    __slots__ = ("open_chunk", "outcomes", "worker_id")

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.outcomes = OutcomeWindow()
        self.open_chunk: OpenChunk | None = None


class Foreseen(NamedTuple):
    """What taking a fragment in would do, or did."""

    gap: DiscardReason | None
    """Why the worker's open chunk goes first, or None if it goes on or there is none."""
    discarded_bytes: int
    """Payload bytes of the open chunk that goes."""
    closes_chunk: bool


_CLOSES = Foreseen(None, 0, closes_chunk=True)
_GOES_ON = Foreseen(None, 0, closes_chunk=False)


class Assembly:
    """The workers of the current session and their open chunks."""

    def __init__(self, fragments_per_chunk: int) -> None:
        self._fragments_per_chunk = fragments_per_chunk
        self._workers: dict[WorkerId, Worker] = {}
        self._open: OrderedDict[WorkerId, OpenChunk] = OrderedDict()
        self._by_version: LazyHeap[tuple[ModelVersion, WorkerId]] = LazyHeap(self._is_in_order)
        self.open_fragment_count = 0

    @property
    def worker_count(self) -> int:
        """Workers remembered."""
        return len(self._workers)

    @property
    def open_chunk_count(self) -> int:
        """Workers with an open chunk."""
        return len(self._open)

    def use_length(self, fragments_per_chunk: int) -> None:
        """Make chunks of another length from now on; nothing may be open."""
        assert not self._open
        self._fragments_per_chunk = fragments_per_chunk

    def find(self, worker_id: WorkerId) -> Worker | None:
        """Give a worker that is remembered, else None."""
        return self._workers.get(worker_id)

    def find_or_add(self, worker_id: WorkerId) -> Worker:
        """Give a worker, remembering it from now on as the one heard of last."""
        worker = self._workers.pop(worker_id, None) or Worker(worker_id)
        self._workers[worker_id] = worker
        return worker

    def first_idle(self, holds_of: Callable[[WorkerId], bool]) -> Worker | None:
        """Return the longest silent worker of which nothing is held, or None if there is none.

        Looks at the `IDLE_SEARCH_MAX` that have been silent for longest.
        """
        for worker_id, worker in islice(self._workers.items(), IDLE_SEARCH_MAX):
            if not holds_of(worker_id):
                return worker
        return None

    def forget(self, worker: Worker) -> None:
        """Forget a worker without an open chunk."""
        assert worker.open_chunk is None
        del self._workers[worker.worker_id]

    def foresee(self, worker: Worker | None, fragment: Fragment) -> Foreseen:
        """Say what `place` would do with a fragment; None is a worker not yet remembered."""
        open_chunk = None if worker is None else worker.open_chunk
        if open_chunk is None:
            return _CLOSES if self._fragments_per_chunk == 1 else _GOES_ON
        gap = open_chunk.gap_before(fragment)
        if gap is not None:
            return Foreseen(gap, open_chunk.size_bytes, self._fragments_per_chunk == 1)
        closes = len(open_chunk.fragments) + 1 == self._fragments_per_chunk
        return _CLOSES if closes else _GOES_ON

    def place(self, worker: Worker, fragment: Fragment, *, now: float) -> list[Fragment] | None:
        """Put a fragment behind the open chunk, or begin one; there must be no gap between.

        Returns:
            The fragments of the chunk that it closes, in order of their indices, which are no
            longer the assembly's; None when it closes none.
        """
        open_chunk = worker.open_chunk
        if open_chunk is None:
            fragments = [fragment]
            if self._fragments_per_chunk == 1:
                return fragments
            self._put(worker, OpenChunk(worker.worker_id, fragments, now))
            return None
        if len(open_chunk.fragments) + 1 == self._fragments_per_chunk:
            return [*self.discard(worker), fragment]
        open_chunk.fragments.append(fragment)
        open_chunk.touched_at = now
        self.open_fragment_count += 1
        self._open.move_to_end(worker.worker_id)
        if fragment.model_version_min < open_chunk.version:
            open_chunk.version = fragment.model_version_min
            self._by_version.push((open_chunk.version, worker.worker_id))
        return None

    def discard(self, worker: Worker) -> list[Fragment]:
        """Give up a worker's open chunk, which there must be, and hand over its fragments."""
        open_chunk = self._open.pop(worker.worker_id)
        worker.open_chunk = None
        self.open_fragment_count -= len(open_chunk.fragments)
        self._by_version.compact(len(self._open))
        return open_chunk.fragments

    def discard_through(self, worker: Worker, place: int) -> list[Fragment]:
        """Give up the open chunk up to and with one fragment; what follows stays open.

        Args:
            worker: One with an open chunk.
            place: Of the last fragment to go, in the open chunk.
        """
        open_chunk = worker.open_chunk
        assert open_chunk is not None
        gone, kept = open_chunk.fragments[: place + 1], open_chunk.fragments[place + 1 :]
        if not kept:
            return self.discard(worker)
        open_chunk.fragments = kept
        open_chunk.version = min(fragment.model_version_min for fragment in kept)
        self._by_version.push((open_chunk.version, worker.worker_id))
        self.open_fragment_count -= len(gone)
        return gone

    def discard_stale(self, version_min: int) -> list[Fragment]:
        """Give up every fragment older than a version, and what came before it in its chunk (B5).

        The fresh rest of an open chunk stays open. Costs what goes, not what is open.
        """
        gone: list[Fragment] = []
        while (entry := self._by_version.first()) is not None and entry[0] < version_min:
            worker = self._workers[entry[1]]
            assert worker.open_chunk is not None
            versions = [fragment.model_version_min for fragment in worker.open_chunk.fragments]
            last_stale = max(i for i, version in enumerate(versions) if version < version_min)
            gone.extend(self.discard_through(worker, last_stale))
        return gone

    def discard_lost(self, worker_id: WorkerId, payload_id: PayloadId) -> list[Fragment]:
        """Give up the open fragment that has a payload, and what came before it in its chunk."""
        worker = self._workers[worker_id]
        assert worker.open_chunk is not None
        payload_ids = [fragment.payload.payload_id for fragment in worker.open_chunk.fragments]
        return self.discard_through(worker, payload_ids.index(payload_id))

    def first_silent(self) -> OpenChunk | None:
        """Return the open chunk of the worker silent for longest, or None if none is open."""
        return next(iter(self._open.values())) if self._open else None

    def discard_all(self) -> list[Fragment]:
        """Give up every open chunk, the longest silent first."""
        gone = [fragment for chunk in self._open.values() for fragment in chunk.fragments]
        for worker_id in self._open:
            self._workers[worker_id].open_chunk = None
        self._open.clear()
        self._by_version.replace(())
        self.open_fragment_count = 0
        return gone

    def forget_workers(self) -> None:
        """Forget every worker; nothing may be open."""
        assert not self._open
        self._workers.clear()

    def workers(self) -> Iterable[Worker]:
        """List the workers remembered, the one heard of last at the end."""
        return self._workers.values()

    def open_chunks(self) -> Iterable[OpenChunk]:
        """List the open chunks, the longest silent first."""
        return self._open.values()

    def restore_worker(self, worker_id: WorkerId, outcomes: OutcomeWindow) -> None:
        """Remember a worker as a snapshot has it."""
        worker = self.find_or_add(worker_id)
        worker.outcomes = outcomes

    def restore_open_chunk(self, open_chunk: OpenChunk) -> None:
        """Open a chunk as a snapshot has it, behind those restored before."""
        self._put(self._workers[open_chunk.worker_id], open_chunk)

    def check_invariants(self) -> None:
        """Assert A1 to A3; O(fragments open)."""
        touched_at = float("-inf")
        for worker_id, chunk in self._open.items():
            assert self._workers[worker_id].open_chunk is chunk, "A2: worker and chunk"
            assert 1 <= len(chunk.fragments) < self._fragments_per_chunk, "A2: length"
            first_index = chunk.fragments[0].fragment_index
            for place, fragment in enumerate(chunk.fragments):
                assert fragment.worker_id == worker_id, "A1: worker"
                assert fragment.fragment_index == first_index + place, "A1: indices"
                assert place == 0 or not fragment.discontinuity, "A1: discontinuity"
            assert chunk.touched_at >= touched_at, "A3: order"
            touched_at = chunk.touched_at
        open_count = sum(len(chunk.fragments) for chunk in self._open.values())
        assert self.open_fragment_count == open_count, "A2: count"
        by_version = self._by_version.first_many(len(self._open) + 1)
        expected = sorted((chunk.version, worker_id) for worker_id, chunk in self._open.items())
        assert by_version == expected, "A2: version order"

    def _put(self, worker: Worker, open_chunk: OpenChunk) -> None:
        worker.open_chunk = open_chunk
        self._open[worker.worker_id] = open_chunk
        self._by_version.push((open_chunk.version, worker.worker_id))
        self.open_fragment_count += len(open_chunk.fragments)

    def _is_in_order(self, entry: tuple[ModelVersion, WorkerId]) -> bool:
        open_chunk = self._open.get(entry[1])
        return open_chunk is not None and open_chunk.version == entry[0]
