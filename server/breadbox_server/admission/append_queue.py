"""Appends on their way into the core: one FIFO, payloads confirmed before admission.

The core never knows a payload that is not in the store. A fragment that the core would refuse
anyway is not confirmed, so that its payload goes on to expire by itself. A payload that was
confirmed, and whose fragment was then not admitted after all, is this module's to get rid of.
A payload that rides along with its fragment is written here instead, in place of the confirmation,
or with the journal's entry about it, before which nothing of it takes effect.

Who finds no room, and may wait, stands in the line of its buffer. Room goes to who has stood there
for longest, and nobody who came later takes what somebody in line waits for.

Each append is in one state, and may have a place in the line of its buffer besides:

| state    | of the queue | place in line    | pending | next                                      |
|----------|--------------|------------------|---------|-------------------------------------------|
| QUEUED   | yes          | its own, or none | yes     | DECIDING; ANSWERED: refused with no trip  |
| DECIDING | yes          | its own, or none | yes     | ANSWERED: all decided; WAITING: no room;  |
|          |              |                  |         | QUEUED: the slice took a part of it       |
| WAITING  | no           | its own          | no      | QUEUED: there may be room; ANSWERED: its  |
|          |              |                  |         | wait is over, or it has come again        |
| ANSWERED | no           | none, or kept    | yes     | the answer leaves once it is durable      |
| OVER     | no           | none, or kept    | no      | none: its caller let go of it, which any  |
|          |              |                  |         | state may lead to                         |
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Final, Protocol

from breadbox.model.errors import StoreError, StoreFullError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox_server.admission.deletions import DeletionQueue, UnownedPayloads
from breadbox_server.admission.inline_payloads import RecentPayloads
from breadbox_server.admission.quotas import UNCHARGED, Charge
from breadbox_server.admission.wait_queue import PLACE_KEPT_S, Line, Place
from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.conversion import payload_reference
from breadbox_server.base.errors import AppendsFullError, PayloadSizeError
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.ids import BufferName, PayloadId, SessionId, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Answer,
    Appended,
    AppendFragment,
    Fragment,
    Input,
    Payload,
)
from breadbox_server.limits import (
    APPENDS_WAITING_MAX,
    INLINE_PENDING_BYTES_MAX,
    INLINE_SIZE_BYTES_MAX,
)
from breadbox_server.metrics.metrics import Metrics

SLICE_FRAGMENTS: Final = 256
"""Fragments judged, confirmed and admitted without letting anybody else have the loop."""

SLICE_PIECES: Final = 8_192
"""Pieces of payloads, which are keys in the store, after which a slice takes no more fragments."""

SLICE_BYTES: Final = 512 * 2**10
"""Bytes of payloads that ride along, after which it takes no more either."""

WAIT_S_MAX: Final = 3.0
"""How long the queue may be, in time: well under the deadlines of callers (10 s unless they say
otherwise), who would each send again what nobody waits for any more."""
SLICE_S_ASSUMED: Final = 0.05
"""How long a slice takes on a busy machine: before the first one, many may come at once."""
_LATEST_WEIGHT: Final = 0.2
"""Of the latest slice in the mean of how long slices take."""

PROGRESS_S: Final = 0.25
"""How long a caller waits on of whose fragments some were admitted: it should hear of that."""
HOLD_S: Final = 0.25
"""Seconds between two looks at journal and deletions, while these lack room."""

BYTES_FULL: Final = Appended(AdmissionOutcome.BYTES_FULL)
_REFUSED: Final = Appended(AdmissionOutcome.WRONG_SESSION)
"""Stands for whatever is no matter of room."""


class Admitter(Protocol):
    """The part of `DurableCore` that the queue needs."""

    def judge(self, buffer: BufferName, fragment: Fragment) -> Appended | None:
        """What would be refused, without changing anything; None is an admission."""

    def decide(self, command: Input[Answer], /) -> Answer:
        """Append a fragment whose payload is confirmed."""

    def may_overtake(
        self, buffer: BufferName, fragment: Fragment, waits_for: AdmissionOutcome
    ) -> bool:
        """Whether a fragment takes nothing that an earlier one, refused so, waits for."""

    def pump(self) -> None:
        """Carry out what the core decided meanwhile."""

    def when_settled(self, effect: Callable[[], None], /) -> None:
        """Call once everything decided so far is durable; at once where it is already."""


class Carrier(Protocol):
    """What writes payloads in one step with the entries about them, where that can be had."""

    has_payload_room: bool
    """Whether the store had room for the latest of them."""

    def can_carry(self, payload_count: int, size_bytes: int) -> bool:
        """Whether it takes so many with what is decided next."""

    def carry(self, payload_id: PayloadId, body: bytes) -> None:
        """Take one, whose fragment has just been admitted."""


class State(Enum):
    """Where an append stands; the table in the docstring of this module says what follows."""

    QUEUED = auto()
    DECIDING = auto()
    WAITING = auto()
    ANSWERED = auto()
    OVER = auto()


_PENDING: Final = (State.QUEUED, State.DECIDING, State.ANSWERED)
"""States in which the fragments of an append count as pending."""


@dataclass(slots=True, eq=False)
class Job:
    """Fragments that came together, on their way."""

    buffer: BufferName
    fragments: list[Fragment]
    done: "asyncio.Future[list[Appended | None]]"
    """What became of each."""
    charge: Charge
    bodies: Sequence[bytes] = ()
    """Payloads that ride along: none, or one for each fragment, empty where it does not."""
    inline_bytes: int = 0
    """Of these."""
    kept: dict[PayloadId, Payload] = field(default_factory=dict)
    """What was stored of them and is not admitted yet: it goes when the job is over."""
    results: list[Appended | None] = field(default_factory=list)
    """Of the fragments before the first undecided one; None is a payload that is not there."""
    error: Exception | None = None
    broken_off: set[tuple[SessionId, WorkerId]] = field(default_factory=set)
    """Workers one of whose payloads is not there. Their later fragments wait for it: admitted
    before it, they would make it come too late."""
    wait_until: float = 0.0
    """Until when it may wait for room."""
    place: Place | None = None
    """Where it stands in the line of its buffer; None: in none."""
    waits_for: AdmissionOutcome = AdmissionOutcome.BUFFER_FULL
    """What it was refused with."""
    timer: TimerHandle | None = None
    """Ends its wait."""
    state: State = State.QUEUED

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is done about it before there is room."""
        return self.state is State.WAITING

    @property
    def next_fragment(self) -> Fragment:
        """The first undecided one."""
        return self.fragments[len(self.results)]

    @property
    def is_decided(self) -> bool:
        """Whether nothing more can become of it."""
        return self.error is not None or len(self.results) == len(self.fragments)

    def fill(self, result: Appended) -> None:
        """Give every undecided fragment the same result."""
        self.results.extend([result] * (len(self.fragments) - len(self.results)))

    def reply(self) -> None:
        """Tell the caller, if it is still there."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.results)


@dataclass(slots=True, eq=False)
class _Item:
    """One fragment of a slice."""

    job: Job
    fragment: Fragment
    judged: Appended | None
    wants_confirmation: bool
    body: bytes = b""
    """The payload, where it rides along."""
    is_there: bool = False
    is_carried: bool = False
    """It is written with the entry about its fragment, once that is admitted."""
    has_other_size: bool = False
    """The payload in the store has another number of bytes than the fragment says."""
    found_no_room: bool = False
    """The store did not take the payload."""


class AppendQueue:
    """Admits fragments in order of arrival. All queued fragments share one trip to the store."""

    def __init__(
        self,
        custodian: PayloadCustodian,
        deletions: DeletionQueue,
        unowned: UnownedPayloads,
        *,
        clock: Clock,
        metrics: Metrics,
        fragments_max: int,
        waiting_max: int = APPENDS_WAITING_MAX,
        has_room: Callable[[], bool] = lambda: True,
        inline_size_bytes_max: int = INLINE_SIZE_BYTES_MAX,
        inline_pending_bytes_max: int = INLINE_PENDING_BYTES_MAX,
        recent: RecentPayloads | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self._waiting_max = waiting_max
        self._inline_size_bytes_max = inline_size_bytes_max
        self._inline_pending_bytes_max = inline_pending_bytes_max
        self._recent = recent or RecentPayloads(0)
        self._carrier = carrier
        self._has_room = has_room
        """Whether the journal can take more in than what makes room again."""
        self._custodian = custodian
        self._deletions = deletions
        self._clock = clock
        self._metrics = metrics
        self._fragments_max = fragments_max
        self._unowned = unowned
        self._jobs: OrderedDict[Job, None] = OrderedDict()
        """Those being decided, in order of arrival; before them those whose turn has come."""
        self._lines: dict[BufferName, Line[Job]] = {}
        """Of buffers where somebody waits, or a place is kept."""
        self._looks_again = False
        """Whether there may be room for somebody who waits."""
        self._doubtful: deque[Job] = deque()
        """Who waits, and may not have to any more whether there is room or not."""
        self._hold_timer: TimerHandle | None = None
        self._admitter: Admitter | None = None
        """While it runs."""
        self._is_deciding = False
        self.waiting_count = 0
        """Appends that wait for room."""
        self._waiting_fragments = 0
        """Of these: they hold as much memory as those that are pending, and have the same bound."""
        self._waiting_inline_bytes = 0
        """What rides along with them: of the bound that all appends share they may take half, so
        that a full buffer leaves room for others'."""
        self.pending_count = 0
        """Fragments whose appends have not been answered, and do not wait for room."""
        self.inline_bytes = 0
        """Of payloads that ride along with appends that have not been answered."""
        self._slice_s = SLICE_S_ASSUMED
        """How long a full slice takes, of late."""
        self._wake = asyncio.Event()
        metrics.pending_appends.set_function(lambda: self.pending_count)
        metrics.waiting_appends.set_function(lambda: self.waiting_count)

    def submit(
        self,
        buffer: BufferName,
        fragments: list[Fragment],
        charge: Charge = UNCHARGED,
        bodies: Sequence[bytes] = (),
        *,
        wait_s: float = 0.0,
    ) -> Job:
        """Queue fragments. `withdraw` is the caller's to call, whatever becomes of them.

        Args:
            buffer: Where they go.
            fragments: What they are.
            charge: Against whose quotas they count.
            bodies: Payloads that ride along: none, or one for each, empty where it does not. The
                ids in their fragments must be fresh.
            wait_s: How long to wait for room, at most; once some were admitted `PROGRESS_S`.

        Returns:
            Whose `done` gives what became of each; None: its payload is not there, or too large to
            ride along. It fails with PayloadSizeError where a payload in the store has another size
            than its fragment says, and with StoreUnavailableError where payloads could not be
            confirmed: fragments before that may have been admitted, and are answered DUPLICATE when
            sent again.

        Raises:
            AppendsFullError: Too many fragments wait already, or too many bytes that ride along,
                or so many that these would wait for longer than `WAIT_S_MAX`; nothing was queued.
        """
        expected_s = self._slice_s * self.pending_count / SLICE_FRAGMENTS
        inline_bytes = sum(map(len, bodies))
        is_full = (
            self.pending_count + len(fragments) > self._fragments_max
            or self.inline_bytes + inline_bytes > self._inline_pending_bytes_max
        )
        if is_full or expected_s > WAIT_S_MAX:
            raise AppendsFullError(self.pending_count, expected_s)
        done: asyncio.Future[list[Appended | None]] = asyncio.get_running_loop().create_future()
        job = Job(buffer, fragments, done, charge, bodies, inline_bytes)
        job.wait_until = self._clock.now() + wait_s
        self._jobs[job] = None
        self.inline_bytes += inline_bytes
        self.pending_count += len(fragments)
        self._wake.set()
        return job

    def withdraw(self, job: Job) -> None:
        """Forget a job, which is answered, or whose caller has gone away; once.

        Who goes away before its turn takes its fragments with it; one that goes away later leaves
        them decided, and its retry is answered DUPLICATE. The place in line of one that waited for
        room is kept for `PLACE_KEPT_S`.
        """
        # Of a caller that went away: while the store hangs nothing else would take it out.
        self._jobs.pop(job, None)
        job.done.cancel()
        if job.state is not State.DECIDING:
            self._let_go(job)
        self._leave_line(job, keeps_place=not job.is_decided)
        self._enter(job, State.OVER)
        self.inline_bytes -= job.inline_bytes

    def _enter(self, job: Job, state: State) -> None:
        """Move a job on, and count its fragments as pending, or not any more."""
        change = (state in _PENDING) - (job.state in _PENDING)
        self.pending_count += change * len(job.fragments)
        job.state = state

    def look_again(self) -> None:
        """See whether there is room for somebody who waits, once there is time for it."""
        if self._lines and not self._is_deciding:
            self._looks_again = True
            self._wake.set()

    def doubt(self, buffer: BufferName) -> None:
        """Look at everybody who waits for room in a buffer: its session or version has changed."""
        line = self._lines.get(buffer)
        if line is not None:
            others = [job for job in self._doubtful if job.buffer != buffer]
            self._doubtful = deque([*others, *line.waiting()])
            self._looks_again = True
            self._wake.set()

    async def run(self, admitter: Admitter) -> None:
        """Decide what is queued, for ever."""
        self._admitter = admitter
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._jobs or self._looks_again:
                await self._run_slice(admitter)

    async def _run_slice(self, admitter: Admitter) -> None:
        """Decide the next fragments, of one job or of several."""
        started_at = self._clock.now()
        if self._looks_again:
            self._call_up(admitter)
        items = self._take_slice(admitter)
        for item in items:
            if item.job.state is State.QUEUED:  # Else it has come again meanwhile.
                item.job.state = State.DECIDING
        try:
            await self._keep(items)
            await self._confirm(items)
        except StoreError as error:
            for item in items:
                if item.wants_confirmation:
                    # The store may have confirmed it all the same, and only its answer was lost.
                    item.is_there = True
                    item.job.error = error
        self._is_deciding = True
        try:
            if self._admit(items, admitter):
                # What was admitted may have been granted at once, and so have made room again.
                self._looks_again = bool(self._lines)
            admitter.pump()
        finally:
            self._is_deciding = False
        for item in items:
            job = item.job
            if job.state is State.DECIDING:
                job.state = State.QUEUED
            if job.state is State.OVER or job.is_decided:
                self._let_go(job)
        while self._jobs and (oldest := next(iter(self._jobs))).is_decided:
            del self._jobs[oldest]
            self._end_turn(oldest)
            self._enter(oldest, State.ANSWERED)
            # The reply waits until the slice is durable; the next slice does not.
            admitter.when_settled(oldest.reply)
        # A slice of refusals made no trip to the store: let the others have the loop all the same.
        await asyncio.sleep(0)
        if items:
            self._learn_pace(len(items), self._clock.now() - started_at)

    # --- the lines ---------------------------------------------------------------------------

    def _call_up(self, admitter: Admitter) -> None:
        """Have those decided next for whom there may be room, who waited longest first."""
        self._looks_again = False
        if self._deletions.is_full or not self._has_room():
            self._look_later()
            return
        now = self._clock.now()
        called: list[Job] = []
        for _ in range(min(len(self._doubtful), SLICE_FRAGMENTS)):
            job = self._doubtful.popleft()
            if job.is_waiting:
                outlook = self._outlook(job, admitter)
                # There may be room now: for that it waits its turn.
                if outlook is not None and not outlook.outcome.asks_to_wait:
                    self._call(job, called)
        for buffer, line in list(self._lines.items()):
            line.give_up_places(now)
            if line.is_empty:
                del self._lines[buffer]
            room = line.burst
            blocked_by: AdmissionOutcome | None = None
            for job in list(islice(line.waiting(), SLICE_FRAGMENTS)):
                if blocked_by is not None and not admitter.may_overtake(
                    buffer, job.next_fragment, blocked_by
                ):
                    break
                outlook = self._outlook(job, admitter)
                if outlook is not None and outlook.outcome.asks_to_wait:
                    blocked_by = job.waits_for = outlook.outcome
                    continue
                self._call(job, called)
                room -= outlook is None
                if not room:
                    break
        if self._doubtful:
            self._looks_again = True
        for job in reversed(called):
            self._jobs[job] = None
            self._jobs.move_to_end(job, last=False)

    def _outlook(self, job: Job, admitter: Admitter) -> Appended | None:
        """How the next fragment of somebody who waits would be answered; None: it has room."""
        try:
            return admitter.judge(job.buffer, job.next_fragment)
        except DomainError:
            return _REFUSED

    def _call(self, job: Job, called: list[Job]) -> None:
        self._enter(job, State.QUEUED)
        called.append(job)

    def _look_later(self) -> None:
        """Look again after a while: nobody tells when journal and deletions have room."""
        if self._hold_timer is None:

            def look() -> None:
                self._hold_timer = None
                self.look_again()

            self._hold_timer = self._clock.call_at(self._clock.now() + HOLD_S, look)

    def _wait(self, job: Job, outcome: AdmissionOutcome) -> bool:
        """Let a job wait for room; False: it must be answered now."""
        now = self._clock.now()
        if job.done.done() or now >= job.wait_until:
            return False
        line = self._lines.get(job.buffer)
        is_full = (
            self.waiting_count >= self._waiting_max
            or self._waiting_fragments + len(job.fragments) > self._fragments_max
            or self._waiting_inline_bytes + job.inline_bytes > self._inline_pending_bytes_max // 2
        )
        if job.place is None and is_full:
            return False
        if line is None:
            line = self._lines[job.buffer] = Line()
        line.give_up_places(now)
        fragment = job.next_fragment
        place = (fragment.session_id, fragment.worker_id, fragment.fragment_index)
        if job.place != place:
            # It has got something: others are first now, and its caller should hear of it soon.
            self._leave_line(job)
            self._lines[job.buffer] = line
            if job.results:
                job.wait_until = min(job.wait_until, now + PROGRESS_S)
            self._count_waiting(job, 1)
            job.timer = self._clock.call_at(job.wait_until, lambda: self._give_up(job))
        else:
            line.burst = 1
        former = line.join(job, place)
        if former is not None:
            self._supersede(former)
        job.waits_for = outcome
        self._jobs.pop(job, None)
        self._enter(job, State.WAITING)
        return True

    def _end_turn(self, job: Job) -> None:
        """Take a job that is decided out of the line, if it stands there."""
        line = self._lines.get(job.buffer)
        if job.place is not None and line is not None:
            must_come_again = job.error is None and _asks_to_wait(job.results[-1])
            if not must_come_again:
                line.burst = min(line.burst + 1, SLICE_FRAGMENTS)
            self._leave_line(job, keeps_place=must_come_again)
            self._looks_again = True

    def _supersede(self, former: Job) -> None:
        """Answer the earlier attempt of somebody who has come again; most likely nobody listens."""
        self._end_wait(former)
        former.fill(Appended(former.waits_for))
        self._answer(former)

    def _give_up(self, job: Job) -> None:
        """End a wait that has lasted long enough; not while its turn has come."""
        if job.is_waiting:
            job.fill(Appended(job.waits_for))
            self._leave_line(job, keeps_place=True)
            self._answer(job)

    def _answer(self, job: Job) -> None:
        """Tell what became of a job that is in no slice."""
        self._jobs.pop(job, None)
        self._enter(job, State.ANSWERED)
        assert self._admitter is not None
        self._admitter.when_settled(job.reply)

    def _leave_line(self, job: Job, *, keeps_place: bool = False) -> None:
        """Take a job out of the line, if it stands there."""
        line = self._lines.get(job.buffer)
        if job.place is None or line is None:
            return
        line.leave(job, self._clock.now() + PLACE_KEPT_S if keeps_place else None)
        if line.is_empty:
            del self._lines[job.buffer]
        self._end_wait(job)

    def _count_waiting(self, job: Job, change: int) -> None:
        self.waiting_count += change
        self._waiting_fragments += change * len(job.fragments)
        self._waiting_inline_bytes += change * job.inline_bytes

    def _end_wait(self, job: Job) -> None:
        self._count_waiting(job, -1)
        if job.timer is not None:
            job.timer.cancel()

    def _comes_too_early(self, job: Job, fragment: Fragment, admitter: Admitter) -> bool:
        """Whether a fragment that there is room for would take it from who came before.

        The job then waits, or is told to.
        """
        line = self._lines.get(job.buffer)
        if line is None or job.place is not None:
            return False
        waits_for = line.waits_for()
        if waits_for is None or admitter.may_overtake(job.buffer, fragment, waits_for):
            return False
        # Behind others of its job in this slice it is looked at again once those are decided.
        if fragment is job.next_fragment and not self._wait(job, waits_for):
            job.fill(Appended(waits_for))
        return True

    def _learn_pace(self, fragment_count: int, took_s: float) -> None:
        """Learn from a slice how long full ones take.

        From a part of one only that they are faster than thought: in proportion it takes longer
        than a full one. Else a queue that was slow once would be held too short for full slices,
        and never learn better.
        """
        latest_s = took_s * SLICE_FRAGMENTS / fragment_count
        if fragment_count == SLICE_FRAGMENTS or latest_s < self._slice_s:
            self._slice_s += _LATEST_WEIGHT * (latest_s - self._slice_s)

    # --- a slice -----------------------------------------------------------------------------

    def _take_slice(self, admitter: Admitter) -> list[_Item]:
        items: list[_Item] = []
        identities: set[tuple[str, str, str, int]] = set()
        has_room = self._has_room()
        piece_count = inline_bytes = 0
        # Who has to wait behind others leaves the jobs meanwhile.
        for job in list(self._jobs) if self._lines else self._jobs:
            if job.is_decided:
                continue
            if job.done.cancelled():
                job.fill(BYTES_FULL)  # Nobody reads it; the job only has to be over.
            if self._deletions.is_full or not has_room:
                job.fill(BYTES_FULL)
            for position in range(len(job.results), len(job.fragments)):
                fragment = job.fragments[position]
                is_full = len(items) >= SLICE_FRAGMENTS or piece_count >= SLICE_PIECES
                if is_full or inline_bytes >= SLICE_BYTES:
                    return items
                body = job.bodies[position] if job.bodies else b""
                item = self._judge(job, fragment, body, identities, admitter)
                if item is None:
                    break
                if (
                    self._lines
                    and item.judged is None
                    and self._comes_too_early(job, fragment, admitter)
                ):
                    break
                items.append(item)
                inline_bytes += len(body)
                if fragment.payload.piece_size_bytes:
                    piece_count += fragment.payload.piece_count
                if item.judged is not None and item.judged.outcome.asks_again:
                    break
        return items

    def _judge(
        self,
        job: Job,
        fragment: Fragment,
        body: bytes,
        identities: set[tuple[str, str, str, int]],
        admitter: Admitter,
    ) -> _Item | None:
        """Look ahead at one fragment; None when the job is refused."""
        try:
            judged = admitter.judge(job.buffer, fragment)
        except DomainError as error:
            job.error = error
            return None
        identity = (job.buffer, fragment.session_id, fragment.worker_id, fragment.fragment_index)
        # The second of two equal fragments in a slice is a duplicate once the first is admitted;
        # if it brought a payload of its own, that one must go on to expire.
        wants = judged is None and identity not in identities
        identities.add(identity)
        # What is too large to ride along is answered as a payload that is not in the store.
        wants = wants and len(body) <= self._inline_size_bytes_max
        return _Item(job, fragment, judged, wants, body)

    async def _keep(self, items: list[_Item]) -> None:
        """Store what rides along. Its ids are fresh, so that there is nothing to write over.

        Where payloads can be written with the entries of a turn, nothing needs to be done here: the
        core decides at once, and the turn is one trip for both.
        """
        riding = []
        for item in items:
            if item.body and item.wants_confirmation:
                item.is_there = item.fragment.payload.payload_id in item.job.kept
                if not item.is_there:
                    riding.append(item)
        if not riding:
            return
        carrier = self._carrier
        if carrier and carrier.can_carry(len(riding), sum(len(item.body) for item in riding)):
            for item in riding:
                item.is_there = item.is_carried = True
            return
        payloads = [(payload_reference(item.fragment.payload), item.body) for item in riding]
        payload_ids = [item.fragment.payload.payload_id for item in riding]
        found_no_room = False
        with self._deletions.confirming(payload_ids), self._metrics.store_trip("keep"):
            try:
                await self._custodian.keep(payloads)
            except StoreFullError:
                found_no_room = True
            else:
                if carrier:
                    carrier.has_payload_room = True
        for item in riding:
            # Without room for all of them, some may be there all the same.
            item.is_there, item.found_no_room = True, found_no_room
            item.job.kept[item.fragment.payload.payload_id] = item.fragment.payload

    async def _confirm(self, items: list[_Item]) -> None:
        is_leaving = self._deletions.is_leaving
        # What is on its way out is as good as not there: its sender writes it once more.
        wanted = [
            item
            for item in items
            if item.wants_confirmation
            and not item.body
            and not is_leaving(item.fragment.payload.payload_id)
        ]
        if not wanted:
            return
        payload_ids = [item.fragment.payload.payload_id for item in wanted]
        for payload_id in payload_ids:
            # Sent again in time; `_admit` keeps it for a while once more if it is refused again.
            self._unowned.discard(payload_id)
        references = [payload_reference(item.fragment.payload) for item in wanted]
        with self._deletions.confirming(payload_ids), self._metrics.store_trip("confirm"):
            answers = await self._custodian.confirm(references)
        for item, payload_id, answer in zip(wanted, payload_ids, answers, strict=True):
            item.is_there = answer == Confirmation.THERE and not is_leaving(payload_id)
            item.has_other_size = answer == Confirmation.OTHER_SIZE

    def _admit(self, items: list[_Item], admitter: Admitter) -> bool:
        """Have a slice decided; whether anything was admitted."""
        has_admitted = False
        for item in items:
            job = item.job
            if job.is_decided or job.is_waiting:
                self._disown(item)
                continue
            worker = (item.fragment.session_id, item.fragment.worker_id)
            if worker in job.broken_off:
                self._disown(item)
                job.results.append(None)
                continue
            if item.found_no_room:
                self._disown(item)
                job.fill(BYTES_FULL)
                continue
            try:
                result = self._decide(item, admitter)
            except DomainError as error:
                job.error = error
                self._disown(item)
                continue
            if result is None and item.has_other_size:
                job.error = PayloadSizeError(
                    f"fragments[{len(job.results)}].payload", item.fragment.payload
                )
                continue
            if result is None:
                if not item.body:
                    self._metrics.count_missing(job.buffer, 1)
                job.broken_off.add(worker)
                job.results.append(None)
                continue
            if result.outcome is AdmissionOutcome.ADMITTED:
                payload_id = item.fragment.payload.payload_id
                self._unowned.discard(payload_id)
                if item.is_carried and self._carrier:
                    self._carrier.carry(payload_id, item.body)
                if item.is_carried or job.kept.pop(payload_id, None) is not None:
                    self._recent.add(payload_id, item.body)
                job.charge.admitted(item.fragment.payload)
                has_admitted = True
            else:
                self._disown(item)
            if result.outcome.asks_to_wait and self._wait(job, result.outcome):
                continue
            if result.outcome.asks_again:
                job.fill(result)
            else:
                job.results.append(result)
        return has_admitted

    def _decide(self, item: _Item, admitter: Admitter) -> Appended | None:
        """Let the core decide; None is a fragment that it must not see, its payload being missing.

        A fragment that was not confirmed must not be admitted, whatever changed since it was
        judged: the core gets to see it only if it is still refused.
        """
        buffer, fragment = item.job.buffer, item.fragment
        if not item.is_there and admitter.judge(buffer, fragment) is None:
            return item.judged
        return admitter.decide(AppendFragment(buffer, fragment))

    def _disown(self, item: _Item) -> None:
        """Remember a payload that was confirmed for nothing: its sender may send it again."""
        is_written = item.is_there and not item.is_carried
        if is_written and item.fragment.payload.payload_id not in item.job.kept:
            self._unowned.add(item.fragment.payload, self._clock.now())

    def _let_go(self, job: Job) -> None:
        """Delete what rode along and was not admitted: if it comes again, it has another id."""
        if job.kept:
            self._deletions.put(job.kept.values())
            job.kept = {}


def _asks_to_wait(result: Appended | None) -> bool:
    return result is not None and result.outcome.asks_to_wait
