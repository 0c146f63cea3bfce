"""Room that is reserved for fragments while their payloads are confirmed.

R1  A reservation takes places and bytes from when it is made until it ends, once: it is settled, it
    expires, or its session ends.
R2  Of a worker with reserved fragments it is known what its open chunk will be with all of them.
R3  A payload is reserved for one fragment.

Reservations are in no journal and no snapshot: they die with their server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from breadbox_server.core.model.ids import PayloadId, ReservationId, WorkerId
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.state.assembly import CLOSES, GOES_ON, AppendPreview, Assembly, Worker
from breadbox_server.core.state.groups import Groups


@dataclass(slots=True)
class Tail:
    """A worker's open chunk as it will be with all fragments that are reserved."""

    next_index: int = 0
    open_count: int = 0
    open_bytes: int = 0
    """Bytes of the reserved fragments that will be open."""
    reserved_count: int = 0
    members: set[int] | None = None
    """The members that are reserved, if it is of a group."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Places and bytes for fragments, which stand in order."""

    reservation_id: ReservationId
    expires_at: float
    fragments: list[Fragment] = field(default_factory=list)
    place_count: int = 0
    size_bytes: int = 0


class Room:
    """The reservations of a buffer."""

    def __init__(self) -> None:
        self.reservations: dict[ReservationId, Reservation] = {}
        self.place_count = 0
        """Chunks that reserved fragments will close."""
        self.size_bytes = 0
        self.open_bytes = 0
        """Bytes of reserved fragments that will be open, and not to be evicted."""
        self.tails: dict[WorkerId, Tail] = {}
        self.payload_ids: set[PayloadId] = set()
        self.in_any_order = False
        """Whether workers are groups, whose members come in any order."""
        self._by_expiry: LazyHeap[tuple[float, ReservationId]] = LazyHeap(
            lambda entry: entry[1] in self.reservations
        )

    def preview(
        self, assembly: Assembly, worker: Worker | None, fragment: Fragment
    ) -> AppendPreview:
        """Return what a fragment would do behind those of its worker that are reserved."""
        tail = self.tails.get(fragment.worker_id)
        if tail is None:
            return assembly.preview(worker, fragment)
        if isinstance(assembly, Groups):
            return assembly.preview(worker, fragment, tail.reserved_count)
        opened = tail.open_count if _goes_on(tail, fragment) else 0
        return CLOSES if opened + 1 == assembly.fragments_per_chunk else GOES_ON

    def is_awaited(self, fragment: Fragment) -> bool:
        """Return whether a fragment can be judged only once another one is settled."""
        tail = self.tails.get(fragment.worker_id)
        if tail is not None and tail.members is not None:
            return fragment.fragment_index in tail.members
        return tail is not None and fragment.fragment_index < tail.next_index

    def add(
        self,
        reservation: Reservation,
        fragment: Fragment,
        preview: AppendPreview,
        worker: Worker | None,
    ) -> None:
        """Reserve room for a fragment, behind those that its worker has reserved."""
        size_bytes = fragment.payload.size_bytes
        tail = self.tails.get(fragment.worker_id)
        if tail is None:
            open_chunk = None if worker is None else worker.open_chunk
            goes_on = open_chunk is not None and preview.gap is None
            opened = len(open_chunk.fragments) if open_chunk is not None and goes_on else 0
            members = set[int]() if self.in_any_order else None
            tail = self.tails[fragment.worker_id] = Tail(open_count=opened, members=members)
        elif tail.members is None and not _goes_on(tail, fragment):
            self.open_bytes -= tail.open_bytes
            tail.open_count = tail.open_bytes = 0
        if preview.closes_chunk:
            self.open_bytes -= tail.open_bytes
            tail.open_count = tail.open_bytes = 0
        else:
            self.open_bytes += size_bytes
            tail.open_count += 1
            tail.open_bytes += size_bytes
        tail.next_index = fragment.fragment_index + 1
        tail.reserved_count += 1
        if tail.members is not None:
            tail.members.add(fragment.fragment_index)
        self._take(reservation, (fragment,), int(preview.closes_chunk))

    def add_run(self, reservation: Reservation, run: Sequence[Fragment]) -> None:
        """Reserve room for fragments that each make a chunk of its own, at less cost."""
        tails = self.tails
        for fragment in run:
            tail = tails.get(fragment.worker_id)
            if tail is None:
                tail = tails[fragment.worker_id] = Tail()
            tail.next_index = fragment.fragment_index + 1
            tail.reserved_count += 1
        self._take(reservation, run, len(run))

    def _take(self, reservation: Reservation, run: Sequence[Fragment], place_count: int) -> None:
        if not reservation.fragments:
            self.reservations[reservation.reservation_id] = reservation
            self._by_expiry.push((reservation.expires_at, reservation.reservation_id))
        size_bytes = sum([each.payload.size_bytes for each in run])
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
            if tail.members is not None:
                tail.members.discard(fragment.fragment_index)
            if not tail.reserved_count:
                self.open_bytes -= tail.open_bytes
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
        expiries = sorted((each.expires_at, each.reservation_id) for each in reservations)
        assert self._by_expiry.first_many(len(expiries) + 1) == expiries, "R1: expiries"
        counts: dict[WorkerId, int] = {}
        for fragment in fragments:
            counts[fragment.worker_id] = counts.get(fragment.worker_id, 0) + 1
        tails = {worker_id: tail.reserved_count for worker_id, tail in self.tails.items()}
        assert tails == counts, "R2: workers"
        assert self.open_bytes == sum(t.open_bytes for t in self.tails.values()), "R2: bytes"
        payload_ids = sorted(fragment.payload.payload_id for fragment in fragments)
        assert sorted(self.payload_ids) == payload_ids, "R3"


def _goes_on(tail: Tail, fragment: Fragment) -> bool:
    """Return whether a fragment continues the chunk that its worker will have open."""
    return (
        tail.open_count > 0
        and not fragment.discontinuity
        and fragment.fragment_index == tail.next_index
    )
