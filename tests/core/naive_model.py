"""The rules of the buffer once more, in plain lists and without a thought for speed.

The stateful test runs it beside the real one. It does not choose what a draw takes: it is told, and
objects if the choice was not allowed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from breadbox_server.core.model.config import (
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunks,
    StaleBy,
    StalePolicy,
)
from breadbox_server.core.model.errors import (
    DomainError,
    FetchExceedsCapacityError,
    InvalidArgumentError,
    LeaseNotFoundError,
    RequestMismatchError,
    SessionNotCurrentError,
    VersionRegressedError,
    WaitersFullError,
    WorkersFullError,
)
from breadbox_server.core.model.ids import CallerId, PayloadId, RequestId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Fetch,
    Fragment,
    Payload,
    ReleaseMode,
)

HELD, USED_UP, GONE = "held", "used_up", "gone"


@dataclass
class NaiveChunk:
    number: int
    fragments: list[Fragment]
    version: int
    """From which its staleness counts."""
    uses: int = 0
    place: str = HELD
    leases: int = 0
    priority: float = 0.0
    set_at: int = 0
    """When its priority was given or set, or it came back: a count."""
    set_at_for_remover: int = 0
    """The same, as the remover was told."""

    def __post_init__(self) -> None:
        self.priority = max(fragment.priority for fragment in self.fragments)

    @property
    def size(self) -> int:
        return sum(fragment.payload.size_bytes for fragment in self.fragments)


@dataclass
class NaiveWorker:
    next_index: int = 0
    judged: dict[int, AdmissionOutcome] = field(default_factory=dict)
    """Every outcome ever; which of them are remembered follows from `next_index`."""
    forgotten_below: int = 0
    open: list[Fragment] = field(default_factory=list)
    touched_at: float = 0.0
    touched_as: int = 0
    """Which of the model's touches that was."""
    end: str = ""
    """Why a group ended."""


@dataclass
class NaiveReservation:
    """Fragments whose payloads are being confirmed, and which of them will close a chunk."""

    fragments: list[Fragment]
    places: int
    expires_at: float

    @property
    def size(self) -> int:
        return sum(fragment.payload.size_bytes for fragment in self.fragments)


@dataclass
class NaivePosition:
    """A place in the line of appends that wait for room: a caller's, or kept for it."""

    fragment: Fragment
    caller_id: CallerId | None
    waits_for: AdmissionOutcome
    until: float
    """The caller's deadline, or until when the position is kept."""
    is_called: bool = False
    is_noted: bool = False
    """Whether a change of session or version has made its fragment one that is refused."""

    @property
    def waits(self) -> bool:
        return self.caller_id is not None and not self.is_called

    def is_of(self, fragment: Fragment) -> bool:
        return identity(self.fragment) == identity(fragment)


def identity(fragment: Fragment) -> tuple[str, str, int]:
    return fragment.session_id, fragment.worker_id, fragment.fragment_index


@dataclass
class NaiveTail:
    """What a worker will have open once its reserved fragments are admitted."""

    next_index: int
    open_count: int


@dataclass
class NaiveLease:
    lease_id: str
    rank: int
    lease_s: float
    expires_at: float
    chunks: list[NaiveChunk]
    end: str = ""
    told: int = 0


@dataclass
class NaiveGrant:
    request_id: RequestId
    fragment_count: int
    world_size: int
    session_id: str
    leases: list[NaiveLease]

    @property
    def lives(self) -> bool:
        return any(not lease.end for lease in self.leases)


@dataclass
class NaiveCaller:
    caller_id: CallerId
    rank: int
    deadline_at: float
    lease_s: float | None


@dataclass
class NaiveWaiter:
    request_id: RequestId
    fragment_count: int
    world_size: int
    callers: list[NaiveCaller] = field(default_factory=list)


class NaiveBuffer:
    is_in_order = True
    """What comes after a fragment that is missing waits for it."""

    def __init__(self, config: BufferConfig) -> None:
        self.config = config
        self.session = ""
        self.version = 0
        self.ended_sessions: list[str] = []
        self.workers: dict[str, NaiveWorker] = {}
        self.chunks: list[NaiveChunk] = []
        self.chunk_count = 0
        self.waiters: list[NaiveWaiter] = []
        self.grants: list[NaiveGrant] = []
        self.ended: list[NaiveGrant] = []
        self.weights: list[tuple[int, Payload]] = []
        self.disposed: list[Payload] = []
        self.inserted = self.delivered = 0
        self.closed_fragment_count = 0
        self.set_count = 0
        self.reservations: list[NaiveReservation] = []
        self.tails: dict[str, NaiveTail] = {}
        self.line: list[NaivePosition] = []
        self.may_lack_places = False
        """Limits of now or before let more chunks in than have a place when all come back."""

    # What follows from the state

    @property
    def held(self) -> list[NaiveChunk]:
        return [chunk for chunk in self.chunks if chunk.place == HELD]

    @property
    def place_count(self) -> int:
        """Places that nobody else gets where producers wait: a lease may bring its chunk back."""
        away = [chunk for chunk in self.chunks if chunk.place == USED_UP]
        current = [chunk for chunk in away if chunk.fragments[0].session_id == self.session]
        return len(self.held) + len(current)

    @property
    def reserved_places(self) -> int:
        return sum(each.places for each in self.reservations)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that must be free: where chunks are evicted, others give way to reserved ones."""
        if self.config.full_policy is FullPolicy.BLOCK:
            return sum(each.size for each in self.reservations)
        return 0

    @property
    def referred_bytes(self) -> int:
        opened = [f.payload.size_bytes for w in self.workers.values() for f in w.open]
        return sum(opened) + sum(chunk.size for chunk in self.chunks)

    @property
    def oldest_fresh(self) -> int:
        if self.config.stale is StalePolicy.KEEP:
            return 0
        return self.version - self.config.staleness_max

    def version_of(self, fragment: Fragment) -> int:
        by_newest = self.config.stale_by is StaleBy.NEWEST
        return fragment.model_version_max if by_newest else fragment.model_version_min

    @property
    def draw_order(self) -> str:
        return "oldest version" if self.config.stale is StalePolicy.WAIT else self.config.sampler

    @property
    def live_leases(self) -> list[NaiveLease]:
        return [lease for grant in self.grants for lease in grant.leases if not lease.end]

    def payload_ids(self) -> list[str]:
        fragments = [f for w in self.workers.values() for f in w.open]
        fragments += [f for chunk in self.chunks for f in chunk.fragments]
        ids = [fragment.payload.payload_id for fragment in fragments]
        return sorted(ids + [weights.payload_id for _, weights in self.weights])

    def may_draw(self, count: int) -> bool:
        limiter = self.config.limiter
        if isinstance(limiter, MinimumChunks):
            return len(self.held) >= limiter.chunk_count
        ahead = self.inserted * limiter.ratio - self.delivered
        return (
            len(self.held) >= limiter.minimum_chunk_count
            and ahead - count >= limiter.lead_chunks - limiter.error_chunks
        )

    def may_insert(self) -> bool:
        limiter = self.config.limiter
        if isinstance(limiter, MinimumChunks):
            return True
        if self.waiters and self.has_leases(self.waiters[0].world_size):
            return True
        ahead = (self.inserted + self.reserved_places) * limiter.ratio - self.delivered
        return (
            len(self.held) + self.reserved_places < limiter.minimum_chunk_count
            or ahead + limiter.ratio <= limiter.lead_chunks + limiter.error_chunks
        )

    def has_leases(self, count: int) -> bool:
        return len(self.live_leases) + count <= self.config.leases_max

    def may_grant(self, waiter: NaiveWaiter) -> bool:
        count = waiter.fragment_count // self.config.fragments_per_chunk
        return (
            self.holds(count)
            and self.has_leases(waiter.world_size)
            and self.may_draw(count)
            and self.waited_for(count) is None
        )

    def waited_for(self, count: int) -> str | None:
        return None

    def may_grant_head(self) -> bool:
        return bool(self.waiters) and self.may_grant(self.waiters[0])

    # Sessions and versions

    def start(self, session: str, version: int | None) -> type[DomainError] | None:
        if session == self.session:
            return None
        if session in self.ended_sessions:
            return SessionNotCurrentError
        self.end(self.session)
        self.session, self.version = session, version or 0
        self.note_outdated()
        return None

    def end(self, session: str) -> None:
        if not self.session or session != self.session:
            return
        self.ended_sessions.append(session)
        for chunk in self.held:
            self.evict(chunk)
        for worker in self.workers.values():
            self.dispose(worker.open)
        self.workers.clear()
        self.reservations.clear()
        self.tails.clear()
        self.disposed += [weights for _, weights in self.weights]
        self.weights.clear()
        self.session, self.version = "", 0
        self.note_outdated()
        self.inserted = self.delivered = 0

    def publish(
        self, session: str, version: int, weights: Payload | None
    ) -> type[DomainError] | None:
        if not self.session or session != self.session:
            return SessionNotCurrentError
        if version < self.version:
            return VersionRegressedError
        if version == self.version and (weights is None or self.current_weights is not None):
            return None
        self.version = version
        if weights is not None:
            self.weights.append((version, weights))
            self.disposed += [old for _, old in self.weights[:-2]]
            self.weights = self.weights[-2:]
        self.drop_stale()
        self.note_outdated()
        return None

    @property
    def current_weights(self) -> Payload | None:
        return next((kept for version, kept in self.weights if version == self.version), None)

    def drop_stale(self) -> None:
        for chunk in self.held:
            if chunk.version < self.oldest_fresh:
                self.evict(chunk)
        for worker in self.workers.values():
            while any(self.version_of(f) < self.oldest_fresh for f in worker.open):
                self.dispose([worker.open.pop(0)])

    def idle_worker(self) -> str | None:
        """Longest silent of those that have nothing here any more."""
        busy = {f.worker_id for w in self.workers.values() for f in w.open}
        busy |= {f.worker_id for chunk in self.chunks for f in chunk.fragments}
        return next((each for each in self.workers if each not in busy), None)

    # Fragments

    def expect_append(
        self, fragment: Fragment, tail: NaiveTail | None = None
    ) -> AdmissionOutcome | type[DomainError]:
        if not self.session or fragment.session_id != self.session:
            return AdmissionOutcome.WRONG_SESSION
        worker = self.workers.get(fragment.worker_id)
        index = fragment.fragment_index
        if worker is not None and index < worker.next_index:
            is_forgotten = index < worker.forgotten_below
            if is_forgotten or index in worker.judged:
                return AdmissionOutcome.DUPLICATE
        size = fragment.payload.size_bytes
        if fragment.model_version_max > self.version or size > self.config.capacity_bytes:
            return InvalidArgumentError
        reserved = [each for held in self.reservations for each in held.fragments]
        taken = self.payload_ids() + [each.payload.payload_id for each in reserved]
        if fragment.payload.payload_id in taken:
            return InvalidArgumentError
        is_full = worker is None and len(self.workers) >= self.config.workers_max
        if is_full and self.idle_worker() is None:
            return WorkersFullError
        if self.version_of(fragment) < self.oldest_fresh:
            return AdmissionOutcome.STALE
        return self.expect_fit(fragment, worker, tail)

    def expect_fit(
        self, fragment: Fragment, worker: NaiveWorker | None, tail: NaiveTail | None
    ) -> AdmissionOutcome:
        evicts = self.config.full_policy is FullPolicy.EVICT
        opened = worker.open if worker else []
        if self.count_after(fragment, worker, tail) == self.config.fragments_per_chunk:
            if not self.may_insert():
                return AdmissionOutcome.BUFFER_FULL
            taken = self.place_count + self.reserved_places
            if taken >= self.config.capacity_chunks and not evicts:
                return AdmissionOutcome.BUFFER_FULL
        goes_on = tail is not None or self.goes_on(opened, fragment)
        freed = 0 if goes_on else sum(f.payload.size_bytes for f in opened)
        if evicts:
            freed += sum(chunk.size for chunk in self.held if not chunk.leases)
        needed = self.referred_bytes + self.reserved_bytes - freed + fragment.payload.size_bytes
        if needed > self.config.capacity_bytes:
            return AdmissionOutcome.BYTES_FULL
        return AdmissionOutcome.ADMITTED

    def count_after(
        self, fragment: Fragment, worker: NaiveWorker | None, tail: NaiveTail | None
    ) -> int:
        """How many fragments its chunk has with a fragment, behind what is open, or reserved."""
        if tail is None:
            opened = worker.open if worker else []
            return len(opened) + 1 if self.goes_on(opened, fragment) else 1
        follows = fragment.fragment_index == tail.next_index and not fragment.discontinuity
        return tail.open_count + 1 if follows else 1

    def is_awaited(self, fragment: Fragment) -> bool:
        """Whether another fragment, which is reserved, decides about this one."""
        tail = self.tails.get(fragment.worker_id)
        return tail is not None and fragment.fragment_index < tail.next_index

    def may_overtake(
        self, fragment: Fragment, worker: NaiveWorker | None, behind: AdmissionOutcome
    ) -> bool:
        """Whether a fragment takes nothing of what the first lacks that waits for room."""
        if behind is AdmissionOutcome.BUFFER_FULL:
            count = self.count_after(fragment, worker, self.tails.get(fragment.worker_id))
            return count < self.config.fragments_per_chunk
        return not self.held and not self.live_leases

    def offer(
        self,
        fragments: Sequence[Fragment],
        caller_id: CallerId | None,
        expires_at: float,
        now: float,
    ) -> list[AdmissionOutcome | None] | type[DomainError]:
        """Judge fragments, and reserve room for those that would be admitted (None)."""
        answers: list[AdmissionOutcome | None] = []
        reservation = NaiveReservation([], 0, expires_at)
        waits_for = [each.waits_for for each in self.line if each.waits]
        is_in_line = caller_id is not None and self.find_caller(caller_id) is not None
        behind = None if is_in_line or not waits_for else waits_for[0]
        for fragment in fragments:
            if self.is_awaited(fragment):
                break
            worker, tail = self.workers.get(fragment.worker_id), self.tails.get(fragment.worker_id)
            outcome = self.expect_append(fragment, tail)
            if not isinstance(outcome, AdmissionOutcome):
                if not answers:
                    return outcome
                break
            if outcome is AdmissionOutcome.ADMITTED:
                if behind is None or self.may_overtake(fragment, worker, behind):
                    if not reservation.fragments:
                        self.reservations.append(reservation)
                    self.reserve(reservation, fragment, worker, tail)
                    answers.append(None)
                    continue
                outcome = behind
            if reservation.fragments and outcome.asks_again:
                break
            if outcome is AdmissionOutcome.STALE and tail is not None:
                break
            self.append(fragment, outcome, now)
            answers.append(outcome)
            if outcome.asks_again:
                break
        return answers

    def find_caller(self, caller_id: CallerId) -> NaivePosition | None:
        return next((each for each in self.line if each.caller_id == caller_id), None)

    def wait_for_room(
        self,
        fragment: Fragment,
        waits_for: AdmissionOutcome,
        deadline_at: float,
        caller_id: CallerId,
    ) -> CallerId | None:
        """Let a caller join the line, and give the one that loses its position to it."""
        own = self.find_caller(caller_id)
        if own is not None and not own.is_of(fragment):
            self.line.remove(own)
        new = NaivePosition(fragment, caller_id, waits_for, deadline_at)
        for place, each in enumerate(self.line):
            if each.is_of(fragment):
                self.line[place] = new
                return None if each.caller_id == caller_id else each.caller_id
        self.line.append(new)
        return None

    def leave_line(self, caller_id: CallerId, keeps_place: bool, now: float) -> None:
        position = self.find_caller(caller_id)
        if position is None:
            return
        if keeps_place:
            position.caller_id, position.until, position.is_called = None, now + 5.0, False
        else:
            self.line.remove(position)

    def is_outdated(self, position: NaivePosition) -> bool:
        is_of_now = bool(self.session) and position.fragment.session_id == self.session
        return not is_of_now or self.version_of(position.fragment) < self.oldest_fresh

    def note_outdated(self) -> None:
        for position in self.line:
            position.is_noted = position.waits and self.is_outdated(position)

    def call_up(self) -> Iterator[NaivePosition]:
        """Call up callers in turn; each one's offer is taken before the next is looked at."""
        for position in list(self.line):
            if position.waits and position.is_noted:
                position.is_called = True
                yield position
        lacks: AdmissionOutcome | None = None
        for position in list(self.line):
            if not position.waits:
                continue
            fragment = position.fragment
            worker, tail = self.workers.get(fragment.worker_id), self.tails.get(fragment.worker_id)
            if lacks is not None and not self.may_overtake(fragment, worker, lacks):
                return
            outcome = self.expect_append(fragment, tail)
            if isinstance(outcome, AdmissionOutcome) and outcome.asks_to_wait:
                lacks = position.waits_for = outcome
            else:
                position.is_called = True
                yield position

    def end_waits(self, now: float) -> list[tuple[CallerId, AdmissionOutcome]]:
        """End the waits that are over, and give whose they were, in order of their deadlines."""
        due = [each for each in self.line if each.waits and each.until <= now]
        ended = []
        for each in sorted(due, key=lambda each: (each.until, each.caller_id)):
            assert each.caller_id is not None
            ended.append((each.caller_id, each.waits_for))
            self.leave_line(each.caller_id, True, now)
        self.line = [each for each in self.line if each.caller_id or each.until > now]
        return ended

    def reserve(
        self,
        reservation: NaiveReservation,
        fragment: Fragment,
        worker: NaiveWorker | None,
        tail: NaiveTail | None,
    ) -> None:
        count = self.count_after(fragment, worker, tail)
        closes = count == self.config.fragments_per_chunk
        self.tails[fragment.worker_id] = NaiveTail(
            fragment.fragment_index + 1, 0 if closes else count
        )
        reservation.places += closes
        reservation.fragments.append(fragment)

    def end_reservation(self, reservation: NaiveReservation) -> None:
        if reservation in self.reservations:
            self.reservations.remove(reservation)
        workers = {each.worker_id for held in self.reservations for each in held.fragments}
        self.tails = {name: tail for name, tail in self.tails.items() if name in workers}

    def settle(
        self, reservation: NaiveReservation, there: Sequence[bool], now: float
    ) -> list[AdmissionOutcome | None]:
        """Admit what is there, as if it came only now, with the reserved room for it."""
        if reservation not in self.reservations:
            return []
        self.end_reservation(reservation)
        answers: list[AdmissionOutcome | None] = []
        missing = set()
        for fragment, is_there in zip(reservation.fragments, there, strict=False):
            if fragment.worker_id in missing:
                answers.append(None)
                continue
            outcome = self.expect_append(fragment)
            if not isinstance(outcome, AdmissionOutcome):
                break
            if not is_there and outcome is AdmissionOutcome.ADMITTED:
                if self.is_in_order:
                    missing.add(fragment.worker_id)
                answers.append(None)
                continue
            self.append(fragment, outcome, now)
            answers.append(outcome)
            if outcome.asks_again:
                break
        return answers

    @staticmethod
    def goes_on(opened: list[Fragment], fragment: Fragment) -> bool:
        if not opened or fragment.discontinuity:
            return False
        return opened[-1].fragment_index + 1 == fragment.fragment_index

    def append(self, fragment: Fragment, outcome: AdmissionOutcome, now: float) -> None:
        if outcome not in (AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE):
            return
        worker = self.workers.pop(fragment.worker_id, None)
        if worker is None:
            if len(self.workers) >= self.config.workers_max:
                self.workers.pop(self.idle_worker() or "")
            worker = NaiveWorker()
        # The one heard of last stands at the end.
        self.workers[fragment.worker_id] = worker
        if outcome is AdmissionOutcome.ADMITTED:
            self.admit(worker, fragment, now)
        worker.judged[fragment.fragment_index] = outcome
        worker.next_index = max(worker.next_index, fragment.fragment_index + 1)
        window = self.config.outcomes_per_worker_max
        worker.forgotten_below = max(worker.forgotten_below, worker.next_index - window)

    def admit(self, worker: NaiveWorker, fragment: Fragment, now: float) -> None:
        if not self.goes_on(worker.open, fragment):
            self.dispose(worker.open)
            worker.open = []
        closes = len(worker.open) + 1 == self.config.fragments_per_chunk
        self.shrink_bytes(self.config.capacity_bytes - fragment.payload.size_bytes)
        worker.open.append(fragment)
        worker.touched_at = now
        if closes:
            version = min(map(self.version_of, worker.open))
            chunk = NaiveChunk(self.chunk_count, worker.open, version)
            self.note_set(chunk)
            self.chunks.append(chunk)
            self.chunk_count += 1
            self.inserted += 1
            self.closed_fragment_count += len(worker.open)
            worker.open = []
            self.shrink(self.config.capacity_chunks)
            self.may_lack_places = self.config.full_policy is FullPolicy.EVICT

    def note_set(self, chunk: NaiveChunk) -> None:
        self.set_count += 1
        chunk.set_at = chunk.set_at_for_remover = self.set_count

    def update_priorities(
        self, priorities: list[tuple[int, float]], deleted: list[int]
    ) -> tuple[int, int, int] | type[DomainError]:
        if any(not 0.0 <= priority <= 1e30 for _, priority in priorities):
            return InvalidArgumentError
        held = {chunk.number: chunk for chunk in self.held}
        gone = {number for number in deleted if number in held}
        for number in gone:
            self.evict(held.pop(number))
        known = [(held[number], priority) for number, priority in priorities if number in held]
        for chunk, priority in known:
            chunk.priority = priority
            self.note_set(chunk)
        unknown_count = len(priorities) - len(known) + len(deleted) - len(gone)
        return len(known), len(gone), unknown_count

    def first_to_leave(self, chunks: list[NaiveChunk]) -> NaiveChunk:
        swapped = [(chunk, chunk.set_at) for chunk in chunks]
        for chunk, _ in swapped:
            chunk.set_at = chunk.set_at_for_remover
        order = self.in_order(self.config.remover, chunks)
        for chunk, set_at in swapped:
            chunk.set_at = set_at
        assert order is not None, "the model does not guess"
        return order[0]

    def in_order(self, name: str, chunks: list[NaiveChunk]) -> list[NaiveChunk] | None:
        """Chunks in the order that a sampler of a name says; None: it leaves that to chance."""
        match name:
            case "oldest_first":
                return sorted(chunks, key=lambda chunk: chunk.number)
            case "oldest version":
                return sorted(chunks, key=lambda chunk: (chunk.version, chunk.number))
            case "newest_first":
                return sorted(chunks, key=lambda chunk: -chunk.number)
            case "freshest_first":
                return sorted(chunks, key=lambda chunk: (-chunk.version, -chunk.number))
            case "highest_priority":
                return sorted(chunks, key=lambda chunk: (-chunk.priority, chunk.set_at))
            case "lowest_priority":
                return sorted(chunks, key=lambda chunk: (chunk.priority, chunk.set_at))
        return None

    def probability(self, chunk: NaiveChunk) -> float:
        """How likely a held chunk is to be drawn next."""
        if self.in_order(self.draw_order, []) is not None:
            return 1.0
        even = 1 / len(self.held)
        if self.config.sampler == "uniform" or chunk.priority == 0.0:
            return even
        weights = [c.priority**self.config.priority_exponent for c in self.held if c.priority]
        return chunk.priority**self.config.priority_exponent / math.fsum(weights)

    def check_draw(self, drawn: list[NaiveChunk]) -> None:
        """Object to a draw that the sampler would not make."""
        order = self.in_order(self.draw_order, self.held)
        if order is not None:
            often = [chunk for chunk in order for _ in range(self.draws_left(chunk))]
            assert drawn == often[: len(drawn)], "not what comes first"
        if self.draw_order == "prioritised":
            left_over = [
                chunk
                for chunk in self.held
                if drawn.count(chunk) < self.draws_left(chunk) and chunk.priority
            ]
            zeros = [chunk.priority == 0.0 for chunk in drawn]
            assert not (any(zeros) and left_over), "0 before another priority"
            assert zeros == sorted(zeros), "0 before another priority"

    def draws_left(self, chunk: NaiveChunk) -> int:
        """How often one draw may take a chunk."""
        return self.config.uses_max - chunk.uses if self.config.with_replacement else 1

    def holds(self, count: int) -> bool:
        return sum(map(self.draws_left, self.held)) >= count

    def shrink(self, count: int) -> None:
        while len(self.held) > count:
            self.evict(self.first_to_leave(self.held))

    def shrink_bytes(self, size: int) -> None:
        while self.referred_bytes > size:
            unleased = [chunk for chunk in self.held if not chunk.leases]
            if not unleased:
                return
            self.evict(self.first_to_leave(unleased))

    def evict(self, chunk: NaiveChunk) -> None:
        chunk.place = GONE
        # What was never used counts as if it had never come.
        self.inserted -= not chunk.uses
        self.forget_if_unreferred(chunk)

    def forget_if_unreferred(self, chunk: NaiveChunk) -> None:
        if chunk.place == GONE and not chunk.leases:
            self.chunks.remove(chunk)
            self.dispose(chunk.fragments)

    def dispose(self, fragments: list[Fragment]) -> None:
        self.disposed += [fragment.payload for fragment in fragments]

    def drop(self, payload_ids: Sequence[PayloadId]) -> int:
        dropped = 0
        for payload_id in payload_ids:
            self.disposed += [w for _, w in self.weights if w.payload_id == payload_id]
            self.weights = [kept for kept in self.weights if kept[1].payload_id != payload_id]
            for worker in self.workers.values():
                ids = [fragment.payload.payload_id for fragment in worker.open]
                if payload_id in ids:
                    count = ids.index(payload_id) + 1
                    self.dispose(worker.open[:count])
                    worker.open = worker.open[count:]
                    dropped += count
            for chunk in list(self.chunks):
                ids = [fragment.payload.payload_id for fragment in chunk.fragments]
                if payload_id in ids and chunk.place != GONE:
                    dropped += len(ids)
                    self.evict(chunk)
        return dropped

    # Fetches

    def expect_fetch(self, fetch: Fetch, now: float) -> type[DomainError] | str:
        """Give an error, or "repeated", "granted", "elapsed" or "waits"."""
        error = self.size_error(fetch.fragment_count, fetch.world_size)
        if error:
            return error
        grant = self.find_grant(fetch.request_id)
        if grant is not None:
            if (grant.fragment_count, grant.world_size) != (fetch.fragment_count, fetch.world_size):
                return RequestMismatchError
            return LeaseNotFoundError if grant.leases[fetch.rank].end else "repeated"
        waiter = self.find_waiter(fetch.request_id)
        if waiter and (waiter.fragment_count, waiter.world_size) != (
            fetch.fragment_count,
            fetch.world_size,
        ):
            return RequestMismatchError
        new = NaiveWaiter(fetch.request_id, fetch.fragment_count, fetch.world_size)
        if not self.waiters and self.may_grant(new):
            return "granted"
        if self.is_beyond_bytes(new):
            return FetchExceedsCapacityError
        if fetch.deadline_at <= now:
            return "elapsed"
        if waiter is None and len(self.waiters) >= self.config.waiters_max:
            return WaitersFullError
        return "waits"

    def size_error(self, fragment_count: int, world_size: int) -> type[DomainError] | None:
        if fragment_count % (self.config.fragments_per_chunk * world_size):
            return InvalidArgumentError
        if fragment_count > self.config.fragments_per_chunk * self.config.capacity_chunks:
            return FetchExceedsCapacityError
        return InvalidArgumentError if world_size > self.config.leases_max else None

    def is_beyond_bytes(self, waiter: NaiveWaiter) -> bool:
        """Whether bytes are full of fewer chunks than are asked for, whatever the leases."""
        count = waiter.fragment_count // self.config.fragments_per_chunk
        if self.config.with_replacement:
            count = math.ceil(count / self.config.uses_max)
        bytes_max = self.config.capacity_bytes
        if not 0 < len(self.held) < count:
            return False
        smallest = min(chunk.size for chunk in self.held)
        return count * smallest > bytes_max and self.referred_bytes + smallest > bytes_max

    def find_grant(self, request_id: RequestId) -> NaiveGrant | None:
        known = [*self.grants, *self.ended]
        return next((grant for grant in known if grant.request_id == request_id), None)

    def find_waiter(self, request_id: RequestId) -> NaiveWaiter | None:
        return next((w for w in self.waiters if w.request_id == request_id), None)

    def wait(self, fetch: Fetch, caller_id: CallerId) -> None:
        waiter = self.find_waiter(fetch.request_id)
        if waiter is None:
            waiter = NaiveWaiter(fetch.request_id, fetch.fragment_count, fetch.world_size)
            self.waiters.append(waiter)
        caller = NaiveCaller(caller_id, fetch.rank, fetch.deadline_at, fetch.lease_s)
        waiter.callers.append(caller)

    def head_is_beyond_bytes(self) -> bool:
        return bool(self.waiters) and self.is_beyond_bytes(self.waiters[0])

    def refuse_head_beyond_bytes(self) -> list[CallerId]:
        """Turn the head away if bytes will never let it be granted, and give its callers."""
        assert self.head_is_beyond_bytes(), "refused for no reason"
        return [caller.caller_id for caller in self.waiters.pop(0).callers]

    def remove_caller(self, caller_id: CallerId) -> NaiveCaller | None:
        for waiter in self.waiters:
            for caller in waiter.callers:
                if caller.caller_id == caller_id:
                    waiter.callers.remove(caller)
                    if not waiter.callers:
                        self.waiters.remove(waiter)
                    return caller
        return None

    def grant(self, numbers: Sequence[int], lease_ids: Sequence[str], now: float) -> NaiveGrant:
        """Grant the head exactly these chunks; each assertion is a rule."""
        assert self.may_grant_head(), "granted what could not be granted"
        waiter = self.waiters.pop(0)
        count = waiter.fragment_count // self.config.fragments_per_chunk
        assert len(numbers) == count, "drew too few"
        if not self.config.with_replacement:
            assert len(set(numbers)) == count, "drew with replacement"
        held = {chunk.number: chunk for chunk in self.held}
        chunks = [held[number] for number in numbers]
        self.check_draw(chunks)
        for chunk in chunks:
            assert chunk.version >= self.oldest_fresh, "granted a stale chunk"
            assert all(f.session_id == self.session for f in chunk.fragments), "another session's"
            chunk.uses += 1
            assert chunk.uses <= self.config.uses_max, "used too often"
            chunk.leases += 1
            if chunk.uses == self.config.uses_max:
                chunk.place = USED_UP
        self.delivered += count
        share = count // waiter.world_size
        leases = []
        for rank, lease_id in enumerate(lease_ids):
            asked = [caller.lease_s for caller in waiter.callers if caller.rank == rank]
            wanted = [lease_s for lease_s in asked if lease_s is not None]
            lease_s = wanted[-1] if wanted else self.config.lease_s
            own = chunks[rank * share : (rank + 1) * share]
            leases.append(NaiveLease(lease_id, rank, lease_s, now + lease_s, own))
        grant = NaiveGrant(
            waiter.request_id, waiter.fragment_count, waiter.world_size, self.session, leases
        )
        self.grants.append(grant)
        return grant

    # Leases

    def find_lease(self, lease_id: str) -> tuple[NaiveGrant, NaiveLease] | None:
        for grant in [*self.grants, *self.ended]:
            for lease in grant.leases:
                if lease.lease_id == lease_id:
                    return grant, lease
        return None

    def release(self, lease_id: str, mode: ReleaseMode) -> type[DomainError] | None:
        found = self.find_lease(lease_id)
        if found is None or found[1].end == "expired":
            return LeaseNotFoundError
        if not found[1].end:
            self.end_lease(*found, mode.value, gives_back=mode is ReleaseMode.RETURNED)
        return None

    def renew(self, lease_id: str, lease_s: float | None, now: float) -> type[DomainError] | None:
        found = self.find_lease(lease_id)
        if found is None or found[1].end:
            return LeaseNotFoundError
        found[1].expires_at = now + (lease_s or found[1].lease_s)
        return None

    def undo(self, lease_id: str) -> None:
        found = self.find_lease(lease_id)
        if found is None or found[1].end:
            return
        grant, lease = found
        lease.told -= 1
        if grant.world_size == 1 and lease.told <= 0:
            remembered = list(self.ended)
            self.end_lease(grant, lease, "returned", gives_back=True)
            self.ended = remembered

    def end_lease(self, grant: NaiveGrant, lease: NaiveLease, end: str, gives_back: bool) -> None:
        lease.end = end
        for chunk in lease.chunks:
            chunk.leases -= 1
            is_of_now = bool(self.session) and grant.session_id == self.session
            if gives_back:
                chunk.uses -= 1
                self.delivered -= is_of_now
            # Gone without a use: that of a chunk that had left already, or leaves now.
            was_gone = chunk.place == GONE
            if chunk.place == USED_UP and chunk.uses < self.config.uses_max:
                fits = len(self.held) < self.config.capacity_chunks
                is_fresh = chunk.version >= self.oldest_fresh
                is_current = bool(self.session) and grant.session_id == self.session
                lacks_place = is_fresh and is_current and not fits
                assert not lacks_place or self.may_lack_places, "dropped for room where all wait"
                chunk.place = HELD if fits and is_fresh and is_current else GONE
                self.note_set(chunk)
            elif chunk.place == USED_UP and not chunk.leases:
                chunk.place = GONE
            if (
                chunk.place == GONE
                and not chunk.uses
                and is_of_now
                and (gives_back or not was_gone)
            ):
                self.inserted -= 1
                self.note_unused(chunk)
            self.forget_if_unreferred(chunk)
        if not grant.lives:
            self.grants.remove(grant)
            self.ended.append(grant)
            self.trim_ended()

    def note_unused(self, chunk: NaiveChunk) -> None:
        """Take note of a chunk that is gone without a use, since it was given back."""

    def trim_ended(self) -> None:
        while len(self.ended) > 1:
            if sum(len(g.leases) for g in self.ended) <= self.config.requests_remembered_max:
                return
            self.ended.pop(0)

    def lose_callers(self) -> None:
        """What a restart of the process does: callers are gone, grants were told once."""
        self.waiters.clear()
        self.reservations.clear()
        self.tails.clear()
        self.line.clear()
        for lease in self.live_leases:
            lease.told = 1

    # Limits and time

    @property
    def is_empty(self) -> bool:
        opened = any(worker.open for worker in self.workers.values())
        return not (self.held or opened or self.live_leases)

    def update(self, config: BufferConfig) -> list[CallerId] | type[DomainError]:
        """Change the limits, and give the callers that are turned away, or why it is refused."""
        if config.fragments_per_chunk != self.config.fragments_per_chunk and not self.is_empty:
            return InvalidArgumentError
        was, waits = self.config, StalePolicy.WAIT
        order = config.sampler, config.priority_exponent, config.stale is waits
        if order != (was.sampler, was.priority_exponent, was.stale is waits):
            for chunk in self.held:
                self.set_count += 1
                chunk.set_at = self.set_count
        if (was.remover, was.priority_exponent) != (config.remover, config.priority_exponent):
            for chunk in self.held:
                self.set_count += 1
                chunk.set_at_for_remover = self.set_count
        self.config = config
        self.may_lack_places = True
        self.drop_stale()
        for chunk in self.held:
            if chunk.uses >= config.uses_max:
                chunk.place = USED_UP if chunk.leases else GONE
                self.forget_if_unreferred(chunk)
        self.shrink(config.capacity_chunks)
        self.shrink_bytes(config.capacity_bytes)
        self.trim_ended()
        impossible = [w for w in self.waiters if self.size_error(w.fragment_count, w.world_size)]
        self.waiters = [waiter for waiter in self.waiters if waiter not in impossible]
        return [caller.caller_id for waiter in impossible for caller in waiter.callers]

    def expire(self, now: float) -> None:
        for reservation in [each for each in self.reservations if each.expires_at <= now]:
            self.end_reservation(reservation)
        self.expire_leases(now)
        self.discard_silent(now)

    def expire_leases(self, now: float) -> None:
        gives_back = self.config.lease_expiry_policy is LeaseExpiryPolicy.GIVE_BACK
        due = [(g, lease) for g in self.grants for lease in g.leases if not lease.end]
        due = [(g, lease) for g, lease in due if lease.expires_at <= now]
        for grant, lease in sorted(due, key=lambda pair: (pair[1].expires_at, pair[1].lease_id)):
            self.end_lease(grant, lease, "expired", gives_back)

    def discard_silent(self, now: float) -> None:
        for worker in self.workers.values():
            if worker.open and worker.touched_at + self.config.open_chunk_s <= now:
                self.dispose(worker.open)
                worker.open = []
