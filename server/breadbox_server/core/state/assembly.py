"""Workers: what of theirs was judged (B2), and how their fragments become chunks (B3, B4).

A1  The fragments of an open chunk are of one worker and the current session, have consecutive
    indices, and only the first may bear a discontinuity.
A2  It has 1 to `fragments_per_chunk` - 1 fragments; a worker has at most one.
A3  Open chunks stand in order of their last fragment's arrival: the silent are found in front.
A4  Once it was asked for, it is known how much is under way of each version.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Final, NamedTuple

from breadbox_server.core.model.events import DiscardReason, EvictionReason, TicketEnd
from breadbox_server.core.model.ids import ModelVersion, PayloadId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment, GroupEndReason, VersionOf
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.pacing import Reserved
from breadbox_server.core.state.payloads import PayloadLedger
from breadbox_server.core.state.tickets import Tickets

IDLE_SEARCH_MAX: Final = 64
"""Workers looked at for one that can be forgotten."""
ADMITTED_CODE: Final = 1
_CODES = {AdmissionOutcome.ADMITTED: ADMITTED_CODE, AdmissionOutcome.STALE: 2}
_OUTCOMES = {code: outcome for outcome, code in _CODES.items()}
_NEVER_JUDGED = 0


class OutcomeWindow:
    """First outcomes of one worker's latest indices, a byte each.

    A skipped index in the window may still come; one below it counts as judged, outcome unknown.
    """

    __slots__ = ("_codes", "next_index")

    def __init__(self, next_index: int = 0, codes: bytes = b"") -> None:
        self.next_index = next_index
        """One more than the largest index judged; 0 before the first."""
        self._codes = bytearray(codes)

    def was_judged(self, index: int) -> bool:
        """Whether an index was judged before, as far as the window still shows."""
        if index >= self.next_index:
            return False
        place = index - self.next_index + len(self._codes)
        return place < 0 or self._codes[place] != _NEVER_JUDGED

    def outcome(self, index: int) -> AdmissionOutcome | None:
        """Return the first outcome of an index, or None if it was never judged or is forgotten."""
        place = index - self.next_index + len(self._codes)
        if index >= self.next_index or place < 0:
            return None
        return _OUTCOMES.get(self._codes[place])

    def remember(self, index: int, outcome: AdmissionOutcome, size_max: int) -> None:
        """Note ADMITTED or STALE of an index not judged before; keep the latest `size_max`."""
        skipped_count = index - self.next_index
        if skipped_count == 0:
            self._codes.append(_CODES[outcome])
            self.next_index = index + 1
        elif skipped_count > 0:
            self._codes.extend(bytes(min(skipped_count, size_max)))
            self._codes.append(_CODES[outcome])
            self.next_index = index + 1
        else:
            self._codes[skipped_count] = _CODES[outcome]
        if len(self._codes) > size_max:
            del self._codes[: len(self._codes) - size_max]

    @property
    def codes(self) -> bytes:
        """The window as bytes, oldest index first, for a snapshot."""
        return bytes(self._codes)


class OpenChunk:
    """A worker's chunk still being filled."""

    __slots__ = ("kept", "touched_at", "version", "worker_id")

    def __init__(
        self,
        worker_id: WorkerId,
        fragments: list[Fragment],
        touched_at: float,
        version_of: VersionOf,
    ) -> None:
        self.worker_id = worker_id
        self.kept = fragments
        """Its fragments; a group has them by member and part instead."""
        self.version = min(map(version_of, fragments))
        self.touched_at = touched_at

    @property
    def fragments(self) -> list[Fragment]:
        """What it holds, in order."""
        return self.kept

    @property
    def first(self) -> Fragment:
        """The first of its fragments, in constant time."""
        return self.kept[0]

    @property
    def size_bytes(self) -> int:
        """Payload bytes of its fragments."""
        return sum(fragment.payload.size_bytes for fragment in self.fragments)

    def whole(self) -> list[Fragment]:
        """Return its fragments, as a snapshot or a chunk has them."""
        return self.fragments

    def gap_before(self, fragment: Fragment) -> DiscardReason | None:
        """Return why the chunk cannot go on with this fragment, or None if it can.

        An index may be missing because it was skipped, or refused as stale.
        """
        if fragment.discontinuity:
            return DiscardReason.DISCONTINUITY
        if fragment.fragment_index != self.fragments[-1].fragment_index + 1:
            return DiscardReason.GAP
        return None


@dataclass(slots=True, eq=False)
class Worker:
    """What is remembered of one worker, or group, within a session."""

    worker_id: WorkerId
    outcomes: OutcomeWindow = field(default_factory=OutcomeWindow)
    open_chunk: OpenChunk | None = None
    end: GroupEndReason | None = None
    """Why it ended, if it is a group and has ended."""
    end_number: int = 0
    heard_number: int = 0
    """Ascending in the order of silence, if it is a group: the last heard of has the highest."""


class AppendPreview(NamedTuple):
    """What appending a fragment would do, or did, to its worker's open chunk."""

    gap: DiscardReason | None
    """Why the worker's open chunk goes first, or None if it goes on or there is none."""
    discarded_bytes: int
    closes_chunk: bool
    end: GroupEndReason | None = None
    """Why the fragment's group has ended, or None."""


CLOSES = AppendPreview(None, 0, closes_chunk=True)
GOES_ON = AppendPreview(None, 0, closes_chunk=False)


class Assembly:
    """The workers of the current session and their open chunks."""

    in_any_order: ClassVar = False
    """Whether the fragments of a chunk may come in any order."""

    def __init__(self, fragments_per_chunk: int, version_of: VersionOf, tickets: Tickets) -> None:
        self.fragments_per_chunk = fragments_per_chunk
        """Changes only while nothing is open."""
        self.version_of = version_of
        self.tickets = tickets
        self.workers: dict[WorkerId, Worker] = {}
        """The workers remembered, the one heard of last at the end."""
        self.open: OrderedDict[WorkerId, OpenChunk] = OrderedDict()
        """The open chunks, the longest silent first."""
        self._by_version: LazyHeap[tuple[ModelVersion, WorkerId]] = LazyHeap(self._is_in_order)
        self.open_fragment_count = 0
        self.ended_count = 0
        """Ends of groups ever noted; the number of the latest."""
        self._reserved: dict[WorkerId, ModelVersion] | None = None
        """Version of each that `reserved` lists, or None if they were never counted."""
        self._reserved_counts = Counter[ModelVersion]()
        tickets.on_change = self._note_reserved

    @property
    def reserved_count(self) -> int:
        """Number of chunks that `reserved` lists."""
        return len(self.tickets.by_group)

    def reserved(self) -> Iterator[Reserved]:
        """List what is under way: of workers, what has a ticket; O(that)."""
        for each in self.tickets.by_group.values():
            yield Reserved(each.model_version, each.group)

    def reserved_counts(self) -> Mapping[ModelVersion, int]:
        """Count what is under way by version; the first look lists it."""
        if self._reserved is None:
            self._reserved = {each.name: each.version for each in self.reserved()}
            self._reserved_counts = Counter(self._reserved.values())
        return self._reserved_counts

    def _reserved_version(self, name: WorkerId) -> ModelVersion | None:
        """Return the version with which `reserved` lists a name, or None if it does not."""
        ticket = self.tickets.by_group.get(name)
        return None if ticket is None else ticket.model_version

    def _note_reserved(self, name: WorkerId) -> None:
        """Count what is under way under a name anew."""
        if self._reserved is None:
            return
        counts, former = self._reserved_counts, self._reserved.pop(name, None)
        if former is not None:
            counts[former] -= 1
            if not counts[former]:
                del counts[former]
        version = self._reserved_version(name)
        if version is not None:
            self._reserved[name] = version
            counts[version] += 1

    def find_or_add(self, worker_id: WorkerId) -> Worker:
        """Return a worker, remembering it from now on as the one heard of last."""
        worker = self.workers.pop(worker_id, None) or Worker(worker_id)
        self.workers[worker_id] = worker
        return worker

    def first_idle(self, payloads: PayloadLedger) -> WorkerId | None:
        """Return the longest silent worker (of `IDLE_SEARCH_MAX`) with nothing held, or None."""
        silent, holders = islice(self.workers, IDLE_SEARCH_MAX), payloads.counts
        return next((worker_id for worker_id in silent if worker_id not in holders), None)

    def note_free(self, worker_id: WorkerId) -> None:
        """Take note of a worker, remembered or not, that has nothing held any more."""

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a worker with nothing held."""
        del self.workers[worker_id]

    def preview(self, worker: Worker | None, fragment: Fragment) -> AppendPreview:
        """Return what `place` would do with a fragment; None is a worker not yet remembered."""
        open_chunk = None if worker is None else worker.open_chunk
        if open_chunk is None:
            return CLOSES if self.fragments_per_chunk == 1 else GOES_ON
        gap = open_chunk.gap_before(fragment)
        if gap is not None:
            return AppendPreview(gap, open_chunk.size_bytes, self.fragments_per_chunk == 1)
        closes = len(open_chunk.fragments) + 1 == self.fragments_per_chunk
        return CLOSES if closes else GOES_ON

    def place(self, worker: Worker, fragment: Fragment, *, now: float) -> list[Fragment] | None:
        """Put a fragment behind the open chunk, or begin one; return the one it closes, or None."""
        open_chunk = worker.open_chunk
        if open_chunk is None:
            fragments = [fragment]
            if self.fragments_per_chunk == 1:
                return fragments
            self.put(worker, OpenChunk(worker.worker_id, fragments, now, self.version_of))
            return None
        if len(open_chunk.fragments) + 1 == self.fragments_per_chunk:
            return [*self.discard(worker), fragment]
        open_chunk.fragments.append(fragment)
        open_chunk.touched_at = now
        self.open_fragment_count += 1
        self.open.move_to_end(worker.worker_id)
        version = self.version_of(fragment)
        if version < open_chunk.version:
            open_chunk.version = version
            self._by_version.push((open_chunk.version, worker.worker_id))
        return None

    def discard(self, worker: Worker) -> list[Fragment]:
        """Give up a worker's open chunk, which there must be, and return its fragments."""
        open_chunk = self.open.pop(worker.worker_id)
        worker.open_chunk = None
        self.open_fragment_count -= len(open_chunk.fragments)
        self._by_version.compact(len(self.open))
        return open_chunk.fragments

    def _discard_through(self, worker: Worker, place: int) -> list[Fragment]:
        open_chunk = worker.open_chunk
        assert open_chunk is not None
        gone, kept = open_chunk.fragments[: place + 1], open_chunk.fragments[place + 1 :]
        if not kept:
            return self.discard(worker)
        open_chunk.kept = kept
        open_chunk.version = min(map(self.version_of, kept))
        self._by_version.push((open_chunk.version, worker.worker_id))
        self.open_fragment_count -= len(gone)
        return gone

    def discard_stale(self, version_min: int) -> list[Fragment]:
        """Give up fragments older than a version, and what came before them in their chunk (B5)."""
        gone: list[Fragment] = []
        while (entry := self._by_version.first()) is not None and entry[0] < version_min:
            worker = self.workers[entry[1]]
            assert worker.open_chunk is not None
            versions = [self.version_of(fragment) for fragment in worker.open_chunk.fragments]
            last_stale = max(i for i, version in enumerate(versions) if version < version_min)
            gone.extend(self._discard_through(worker, last_stale))
        return gone

    def discard_lost(self, worker_id: WorkerId, payload_ids: Set[PayloadId]) -> list[Fragment]:
        """Give up the open fragments that have payloads, and what came before in their chunk."""
        worker = self.workers[worker_id]
        assert worker.open_chunk is not None
        fragments = worker.open_chunk.fragments
        lost = [i for i, each in enumerate(fragments) if each.payload.payload_id in payload_ids]
        return self._discard_through(worker, lost[-1])

    def end_stale(self, worker: Worker) -> list[Fragment]:
        """Give up what a fragment of this worker, refused as stale, makes useless."""
        del worker
        return []

    def restore_ends(self, ended_count: int) -> None:
        """Take the number of the latest end of a group of a snapshot."""
        self.ended_count = ended_count

    def note_unused(self, fragments: Sequence[Fragment], reason: EvictionReason) -> None:
        """Take note of the fragments of chunks that left without a use."""

    def discard_all(self) -> list[Fragment]:
        """Give up every open chunk, the longest silent first, and forget workers and tickets."""
        self.tickets.end_all(TicketEnd.SESSION_ENDED)
        self._reserved = None
        gone = [fragment for chunk in self.open.values() for fragment in chunk.fragments]
        self.workers.clear()
        self.open.clear()
        self._by_version.replace(())
        self.open_fragment_count = 0
        return gone

    def open_again(self, worker: Worker, fragments: list[Fragment], touched_at: float) -> None:
        """Open a chunk of a snapshot."""
        self.put(worker, OpenChunk(worker.worker_id, fragments, touched_at, self.version_of))

    def put(self, worker: Worker, open_chunk: OpenChunk) -> None:
        """Open a chunk of a worker, behind those that are open."""
        worker.open_chunk = open_chunk
        self.open[worker.worker_id] = open_chunk
        self._by_version.push((open_chunk.version, worker.worker_id))
        self.open_fragment_count += len(open_chunk.fragments)

    def check_invariants(self) -> None:
        """Assert A1 to A3; O(fragments open)."""
        self.tickets.check_invariants()
        counted = Counter([each.version for each in self.reserved()])
        assert self.reserved_counts() == counted, "A4: what is under way"
        touched_at = float("-inf")
        for worker_id, chunk in self.open.items():
            assert self.workers[worker_id].open_chunk is chunk, "A2: worker and chunk"
            assert chunk.fragments, "A2: nothing open"
            assert all(each.worker_id == worker_id for each in chunk.fragments), "A1: worker"
            self._check_chunk(chunk)
            assert chunk.touched_at >= touched_at, "A3: order"
            touched_at = chunk.touched_at
        open_count = sum(len(chunk.fragments) for chunk in self.open.values())
        assert self.open_fragment_count == open_count, "A2: count"
        by_version = self._by_version.first_many(len(self.open) + 1)
        expected = sorted((chunk.version, worker_id) for worker_id, chunk in self.open.items())
        assert by_version == expected, "A2: version order"

    def _check_chunk(self, chunk: OpenChunk) -> None:
        assert len(chunk.fragments) < self.fragments_per_chunk, "A2: length"
        first_index = chunk.fragments[0].fragment_index
        for place, fragment in enumerate(chunk.fragments):
            assert fragment.fragment_index == first_index + place, "A1: indices"
            assert place == 0 or not fragment.discontinuity, "A1: discontinuity"

    def _is_in_order(self, entry: tuple[ModelVersion, WorkerId]) -> bool:
        open_chunk = self.open.get(entry[1])
        return open_chunk is not None and open_chunk.version == entry[0]
