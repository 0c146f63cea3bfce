"""Appends on their way into the core: one FIFO, payloads confirmed before admission.

The core never knows a payload that is not in the store. A fragment that the core would refuse
anyway is not confirmed, so that its payload goes on to expire by itself. A payload that was
confirmed, and whose fragment was then not admitted after all, is this module's to get rid of.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from breadbox.errors import StoreError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox_server.clock import Clock
from breadbox_server.convert import payload_reference
from breadbox_server.core.errors import DomainError
from breadbox_server.core.ids import BufferName, SessionId, WorkerId
from breadbox_server.core.inputs import AdmissionOutcome, Appended, Fragment
from breadbox_server.deletions import DeletionQueue, UnownedPayloads
from breadbox_server.errors import AppendsFullError, PayloadSizeError
from breadbox_server.metrics import Metrics
from breadbox_server.quotas import UNCHARGED, Charge

SLICE_FRAGMENTS: Final = 256
"""Fragments judged, confirmed and admitted without letting anybody else have the loop."""

SLICE_PIECES: Final = 8_192
"""Pieces of payloads, which are keys in the store, after which a slice takes no more fragments."""

WAIT_S_MAX: Final = 3.0
"""How long the queue may be, in time: well under the deadlines of callers (10 s unless they say
otherwise), who would each send again what nobody waits for any more."""
SLICE_S_ASSUMED: Final = 0.05
"""How long a slice takes on a busy machine: before the first one, many may come at once."""
_LATEST_WEIGHT: Final = 0.2
"""Of the latest slice in the mean of how long slices take."""

BYTES_FULL: Final = Appended(AdmissionOutcome.BYTES_FULL)


class Admitter(Protocol):
    """The part of the driver that appends need."""

    def judge(self, buffer: BufferName, fragment: Fragment) -> Appended | None:
        """What would be refused, without changing anything; None is an admission."""

    def admit(self, buffer: BufferName, fragment: Fragment) -> Appended:
        """Append a fragment whose payload is confirmed."""

    def pump(self) -> None:
        """Carry out what the core decided meanwhile."""

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call once everything decided so far is durable; at once where it is already."""


@dataclass(slots=True, eq=False)
class _Job:
    """One AppendFragments on its way."""

    buffer: BufferName
    fragments: list[Fragment]
    done: "asyncio.Future[list[Appended | None]]"
    charge: Charge
    results: list[Appended | None] = field(default_factory=list)
    """Of the fragments before the first undecided one; None is a payload that is not there."""
    error: Exception | None = None
    broken_off: set[tuple[SessionId, WorkerId]] = field(default_factory=set)
    """Workers one of whose payloads is not there. Their later fragments wait for it: admitted
    before it, they would make it come too late."""

    @property
    def is_decided(self) -> bool:
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

    job: _Job
    fragment: Fragment
    judged: Appended | None
    wants_confirmation: bool
    is_there: bool = False
    has_other_size: bool = False
    """The payload in the store has another number of bytes than the fragment says."""


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
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._has_room = has_room
        """Whether the journal can take more in than what makes room again."""
        self._custodian = custodian
        self._deletions = deletions
        self._clock = clock
        self._metrics = metrics
        self._fragments_max = fragments_max
        self._unowned = unowned
        self._jobs: OrderedDict[_Job, None] = OrderedDict()
        """In order of arrival."""
        self.pending_count = 0
        """Fragments whose appends have not been answered."""
        self._slice_s = SLICE_S_ASSUMED
        """How long a full slice takes, of late."""
        self._wake = asyncio.Event()

    async def append(
        self, buffer: BufferName, fragments: list[Fragment], charge: Charge = UNCHARGED
    ) -> list[Appended | None]:
        """Queue fragments and wait for what becomes of them.

        A caller that goes away before its turn takes its fragments with it; one that goes away
        later leaves them decided, and its retry is answered DUPLICATE.

        Raises:
            AppendsFullError: Too many fragments wait already, or so many that these would wait
                for longer than `WAIT_S_MAX`; nothing was queued.
            PayloadSizeError: A payload in the store has another size than its fragment says; those
                before it may have been admitted.
            StoreUnavailableError: The payloads could not be confirmed; fragments of earlier slices
                may have been admitted, and are answered DUPLICATE when sent again.
        """
        expected_s = self._slice_s * self.pending_count / SLICE_FRAGMENTS
        is_full = self.pending_count + len(fragments) > self._fragments_max
        if is_full or expected_s > WAIT_S_MAX:
            raise AppendsFullError(self.pending_count, expected_s)
        job = _Job(buffer, fragments, asyncio.get_running_loop().create_future(), charge)
        self._jobs[job] = None
        self.pending_count += len(fragments)
        self._metrics.pending_appends.set(self.pending_count)
        self._wake.set()
        try:
            return await job.done
        finally:
            # Of a caller that went away: while the store hangs nothing else would take it out.
            self._jobs.pop(job, None)
            self.pending_count -= len(fragments)
            self._metrics.pending_appends.set(self.pending_count)

    async def run(self, admitter: Admitter) -> None:
        """Decide what is queued, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._jobs:
                await self._run_slice(admitter)

    async def _run_slice(self, admitter: Admitter) -> None:
        """Decide the next fragments, of one job or of several."""
        started_at = self._clock.now()
        items = self._take_slice(admitter)
        try:
            await self._confirm(items)
        except StoreError as error:
            for item in items:
                if item.wants_confirmation:
                    # The store may have confirmed it all the same, and only its answer was lost.
                    item.is_there = True
                    item.job.error = error
        self._admit(items, admitter)
        admitter.pump()
        while self._jobs and (oldest := next(iter(self._jobs))).is_decided:
            del self._jobs[oldest]
            # The reply waits until the slice is durable; the next slice does not.
            admitter.when_settled(oldest.reply)
        # A slice of refusals made no trip to the store: let the others have the loop all the same.
        await asyncio.sleep(0)
        if items:
            self._learn_pace(len(items), self._clock.now() - started_at)

    def _learn_pace(self, fragment_count: int, took_s: float) -> None:
        """Learn from a slice how long full ones take.

        From a part of one only that they are faster than thought: in proportion it takes longer
        than a full one. Else a queue that was slow once would be held too short for full slices,
        and never learn better.
        """
        latest_s = took_s * SLICE_FRAGMENTS / fragment_count
        if fragment_count == SLICE_FRAGMENTS or latest_s < self._slice_s:
            self._slice_s += _LATEST_WEIGHT * (latest_s - self._slice_s)

    def _take_slice(self, admitter: Admitter) -> list[_Item]:
        items: list[_Item] = []
        identities: set[tuple[str, str, str, int]] = set()
        has_room = self._has_room()
        piece_count = 0
        for job in self._jobs:
            if job.is_decided:
                continue
            if job.done.cancelled():
                job.fill(BYTES_FULL)  # Nobody reads it; the job only has to be over.
            if self._deletions.is_full or not has_room:
                job.fill(BYTES_FULL)
            for fragment in job.fragments[len(job.results) :]:
                if len(items) >= SLICE_FRAGMENTS or piece_count >= SLICE_PIECES:
                    return items
                item = self._judge(job, fragment, identities, admitter)
                if item is None:
                    break
                items.append(item)
                if fragment.payload.piece_size_bytes:
                    piece_count += fragment.payload.piece_count
                if item.judged is not None and item.judged.outcome.asks_again:
                    break
        return items

    def _judge(
        self,
        job: _Job,
        fragment: Fragment,
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
        return _Item(job, fragment, judged, wants)

    async def _confirm(self, items: list[_Item]) -> None:
        is_leaving = self._deletions.is_leaving
        # What is on its way out is as good as not there: its sender writes it once more.
        wanted = [
            item
            for item in items
            if item.wants_confirmation and not is_leaving(item.fragment.payload.payload_id)
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

    def _admit(self, items: list[_Item], admitter: Admitter) -> None:
        for item in items:
            job = item.job
            if job.is_decided:
                self._disown(item)
                continue
            worker = (item.fragment.session_id, item.fragment.worker_id)
            if worker in job.broken_off:
                self._disown(item)
                job.results.append(None)
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
                self._metrics.count_missing(job.buffer, 1)
                job.broken_off.add(worker)
                job.results.append(None)
                continue
            if result.outcome is AdmissionOutcome.ADMITTED:
                self._unowned.discard(item.fragment.payload.payload_id)
                job.charge.admitted(item.fragment.payload)
            else:
                self._disown(item)
            if result.outcome.asks_again:
                job.fill(result)
            else:
                job.results.append(result)

    def _decide(self, item: _Item, admitter: Admitter) -> Appended | None:
        """Let the core decide; None is a fragment that it must not see, its payload being missing.

        A fragment that was not confirmed must not be admitted, whatever changed since it was
        judged: the core gets to see it only if it is still refused.
        """
        buffer, fragment = item.job.buffer, item.fragment
        if not item.is_there and admitter.judge(buffer, fragment) is None:
            return item.judged
        return admitter.admit(buffer, fragment)

    def _disown(self, item: _Item) -> None:
        """Remember a payload that was confirmed for nothing: its sender may send it again."""
        if item.is_there:
            self._unowned.add(item.fragment.payload, item.job.buffer, self._clock.now())
