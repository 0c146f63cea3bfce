"""Room that is reserved for fragments while their payloads are confirmed.

R1  A reservation takes places and bytes from when it is made until it ends, once: it is settled, it
    expires, or its session ends.
R2  Of a worker with reserved fragments it is known what its open chunk will be with all of them.
R3  A payload is reserved for one fragment.

Reservations are in no journal and no snapshot: they die with their server.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.ids import ModelVersion, PayloadId, ReservationId, WorkerId
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.state.assembly import CLOSES, GOES_ON, AppendPreview, Assembly, Worker
from breadbox_server.core.state.groups import Groups


@dataclass(slots=True)
class Tail:
    """A worker's open chunk as it will be with all fragments that are reserved."""

    next_index: int = 0
    open_count: int = 0
    reserved_count: int = 0
    members: set[tuple[int, str]] | None = None
    """The members, and parts of them, that are reserved, if it is of a group."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Places and bytes for fragments, which stand in order."""

    reservation_id: ReservationId
    expires_at: float
    judged_by: tuple[BufferConfig, ModelVersion | None]
    """Limits and version that the fragments were judged by."""
    fragments: list[Fragment] = field(default_factory=list)
    place_count: int = 0
    size_bytes: int = 0
    first_indices: dict[WorkerId, int] = field(default_factory=dict)
    """The first index of each worker."""
    is_usual: bool = True
    """True if nothing but what was settled before can have changed how they are judged."""


class Room:
    """The reservations of a buffer."""

    def __init__(self) -> None:
        self.reservations: dict[ReservationId, Reservation] = {}
        self.place_count = 0
        """Chunks that reserved fragments will close."""
        self.size_bytes = 0
        self.tails: dict[WorkerId, Tail] = {}
        self.payload_ids: set[PayloadId] = set()
        self.in_any_order = False
        """Whether workers are groups, with members in any order."""
        self._by_expiry: LazyHeap[tuple[float, ReservationId]] = LazyHeap(
            lambda entry: entry[1] in self.reservations
        )

    def preview(
        self, assembly: Assembly, worker: Worker | None, fragment: Fragment
    ) -> AppendPreview:
        """Return what a fragment would do behind those of its worker that are reserved."""
        if fragment.worker_id not in self.tails:
            return assembly.preview(worker, fragment)
        if isinstance(assembly, Groups):
            reserved = self.tails[fragment.worker_id].members
            return assembly.preview(worker, fragment, reserved or frozenset())
        opened = self.open_count(worker, fragment)
        return CLOSES if opened + 1 == assembly.fragments_per_chunk else GOES_ON

    def open_count(self, worker: Worker | None, fragment: Fragment) -> int:
        """Return how many fragments the chunk has by then that a fragment continues."""
        tail = self.tails.get(fragment.worker_id)
        if tail is not None:
            is_next = fragment.fragment_index == tail.next_index
            return tail.open_count if is_next and not fragment.discontinuity else 0
        chunk = None if worker is None else worker.open_chunk
        goes_on = chunk is not None and chunk.gap_before(fragment) is None
        return len(chunk.fragments) if chunk is not None and goes_on else 0

    def is_awaited(self, fragment: Fragment) -> bool:
        """Return whether a fragment can be judged only once another one is settled."""
        tail = self.tails.get(fragment.worker_id)
        if tail is not None and tail.members is not None:
            return fragment.key in tail.members
        return tail is not None and fragment.fragment_index < tail.next_index

    def add(
        self, reservation: Reservation, run: Sequence[Fragment], open_count: int | None = None
    ) -> None:
        """Reserve room for fragments, behind those that their workers have reserved.

        Each closes a chunk; or a single one leaves `open_count` of its worker open.
        """
        if not reservation.fragments:
            self.reservations[reservation.reservation_id] = reservation
            if reservation.expires_at < inf:
                self._by_expiry.push((reservation.expires_at, reservation.reservation_id))
        for fragment in run:
            worker_id, index = fragment.worker_id, fragment.fragment_index
            tail = self.tails.get(worker_id)
            if tail is None:
                members = set[tuple[int, str]]() if self.in_any_order else None
                tail = self.tails[worker_id] = Tail(members=members)
            if tail.members is not None and fragment.payload.size_bytes:
                tail.members.add(fragment.key)
            tail.next_index = index + 1
            tail.open_count = open_count or 0
            tail.reserved_count += 1
            reservation.first_indices.setdefault(worker_id, index)
        size_bytes = sum([each.payload.size_bytes for each in run])
        place_count = 0 if open_count else len(run)
        reservation.fragments += run
        reservation.place_count += place_count
        reservation.size_bytes += size_bytes
        self.place_count += place_count
        self.size_bytes += size_bytes
        self.payload_ids.update([each.payload.payload_id for each in run])

    def end(self, reservation_id: ReservationId) -> Reservation | None:
        """End a reservation, and return it, or None if it has ended before."""
        reservation = self.reservations.pop(reservation_id, None)
        if reservation is None:
            return None
        self.place_count -= reservation.place_count
        self.size_bytes -= reservation.size_bytes
        self.payload_ids.difference_update([f.payload.payload_id for f in reservation.fragments])
        for fragment in reservation.fragments:
            tail = self.tails[fragment.worker_id]
            tail.reserved_count -= 1
            if tail.members is not None and fragment.payload.size_bytes:
                tail.members.discard(fragment.key)
            if not tail.reserved_count:
                del self.tails[fragment.worker_id]
        self._by_expiry.compact(len(self.reservations))
        return reservation

    def end_all(self) -> None:
        """End every reservation."""
        for reservation_id in list(self.reservations):
            self.end(reservation_id)

    def first_expiry(self) -> tuple[float, ReservationId] | None:
        """Return when the first reservation expires, and its id; None if there is none."""
        return self._by_expiry.first()

    def check_invariants(self) -> None:
        """Assert R1 to R3; O(fragments reserved)."""
        reservations = list(self.reservations.values())
        fragments = [fragment for each in reservations for fragment in each.fragments]
        assert all(each.fragments for each in reservations), "R1: a reservation for nothing"
        assert self.place_count == sum(each.place_count for each in reservations), "R1: places"
        assert self.size_bytes == sum(f.payload.size_bytes for f in fragments), "R1: bytes"
        expiries = sorted(
            (each.expires_at, each.reservation_id) for each in reservations if each.expires_at < inf
        )
        assert self._by_expiry.first_many(len(expiries) + 1) == expiries, "R1: expiries"
        counts = Counter(fragment.worker_id for fragment in fragments)
        tails = {worker_id: tail.reserved_count for worker_id, tail in self.tails.items()}
        assert tails == counts, "R2: workers"
        for worker_id, tail in self.tails.items():
            mine = {f.key for f in fragments if f.worker_id == worker_id and f.payload.size_bytes}
            assert tail.members in (None, mine), "R2: members"
        payload_ids = sorted(fragment.payload.payload_id for fragment in fragments)
        assert sorted(self.payload_ids) == payload_ids, "R3"
