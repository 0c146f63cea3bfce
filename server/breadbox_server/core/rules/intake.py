"""Fragments coming in: judged, admitted, given up (B1 to B4, B7)."""

from collections.abc import Callable, Sequence
from typing import Final

from breadbox_server.core.model.config import FullPolicy, SchemaPolicy
from breadbox_server.core.model.description import AppendCredit
from breadbox_server.core.model.entries import FragmentTaken
from breadbox_server.core.model.errors import (
    InvalidArgumentError,
    SchemaMismatchError,
    WorkersFullError,
)
from breadbox_server.core.model.events import DiscardReason, FragmentJudged
from breadbox_server.core.model.ids import PayloadId, SessionId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended, Fragment
from breadbox_server.core.model.validation import check_fragment
from breadbox_server.core.rules import admission
from breadbox_server.core.state.assembly import Foreseen, Worker
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.counters import FRAGMENTS_JUDGED

REMEMBERED = (AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE)
"""Outcomes that change the buffer, and are what a re-append is answered with (B2)."""
_ADMITTED = Appended(AdmissionOutcome.ADMITTED)
_SCHEMA_UNKNOWN = Appended(AdmissionOutcome.SCHEMA_UNKNOWN)

INDEX_JUMP_MAX: Final = 2**20
"""Indices that a worker may leave out at once: more than any outage makes it drop. The newest index
cannot be checked against anything. One far ahead would make everything that the worker sends from
then on a DUPLICATE."""


class Intake:
    """Takes fragments into a buffer.

    Args:
        state: Of the buffer.
        is_payload_taken: Whether another buffer refers to a payload.
    """

    def __init__(self, state: BufferState, is_payload_taken: Callable[[PayloadId], bool]) -> None:
        self._state = state
        self._is_payload_taken = is_payload_taken

    def judge(self, fragment: Fragment) -> Appended:
        """Decide what becomes of a well-formed fragment, changing nothing.

        Raises:
            InvalidArgumentError: The version was never published; the payload is in use, or larger
                than the buffer.
            SchemaMismatchError: The session's fragments have other arrays, or another number of
                steps.
            WorkersFullError: It is of a new worker, and no more are remembered.
        """
        assembly = self._state.assembly
        worker = assembly.find(fragment.worker_id)
        return self._judge(fragment, worker, assembly.foresee(worker, fragment))

    def _judge(self, fragment: Fragment, worker: Worker | None, foreseen: Foreseen) -> Appended:
        outcome = admission.judge(self._circumstances(fragment, worker, foreseen))
        if outcome is AdmissionOutcome.DUPLICATE and worker is not None:
            return Appended(outcome, worker.outcomes.outcome(fragment.fragment_index))
        if outcome is not AdmissionOutcome.WRONG_SESSION:
            self._check_novelty(fragment, worker)
            if outcome is not AdmissionOutcome.STALE and not self._is_known(fragment):
                return _SCHEMA_UNKNOWN
        return _ADMITTED if outcome is AdmissionOutcome.ADMITTED else Appended(outcome)

    def may_overtake(self, fragment: Fragment, waits_for: AdmissionOutcome) -> bool:
        """Whether a fragment takes nothing that an earlier one waits for (B31).

        A fragment that closes no chunk takes no chunk's room. Bytes are left to the fragment that
        waits for them while something is held whose end makes room. Otherwise every fragment that
        fits must go on, or none would.

        Args:
            fragment: A well-formed one, that there is room for.
            waits_for: BUFFER_FULL or BYTES_FULL, with which the earlier one was refused.
        """
        state = self._state
        if waits_for is AdmissionOutcome.BUFFER_FULL:
            worker = state.assembly.find(fragment.worker_id)
            return not state.assembly.foresee(worker, fragment).closes_chunk
        return state.holdings.kept_count == 0 and state.leases.live_count == 0

    def append(self, fragment: Fragment, *, now: float) -> Appended:
        """Judge a fragment and act on it.

        Raises:
            InvalidArgumentError: A field is malformed or out of range.
            DomainError: As `judge`.
        """
        check_fragment(fragment)
        state = self._state
        worker = state.assembly.find(fragment.worker_id)
        foreseen = state.assembly.foresee(worker, fragment)
        answer = self._judge(fragment, worker, foreseen)
        outcome = answer.outcome
        if outcome in REMEMBERED:
            self._carry_out(fragment, outcome, foreseen, now=now)
        else:
            state.counters.add(FRAGMENTS_JUDGED[outcome])
        state.events.append(FragmentJudged(state.name, outcome, fragment.payload.size_bytes))
        return answer

    def carry_out(self, fragment: Fragment, outcome: AdmissionOutcome, *, now: float) -> None:
        """Do what an outcome of ADMITTED or STALE, once decided, does to the buffer."""
        assembly = self._state.assembly
        foreseen = assembly.foresee(assembly.find(fragment.worker_id), fragment)
        self._carry_out(fragment, outcome, foreseen, now=now)

    def _carry_out(
        self, fragment: Fragment, outcome: AdmissionOutcome, foreseen: Foreseen, *, now: float
    ) -> None:
        state = self._state
        worker = self._remember(fragment.worker_id)
        if outcome is AdmissionOutcome.ADMITTED:
            self._admit(worker, fragment, foreseen, now=now)
            state.model.step_count = fragment.step_count
            state.model.schemas.note(fragment.schema_hash)
        worker.outcomes.remember(
            fragment.fragment_index, outcome, state.config.outcomes_per_worker_max
        )
        state.counters.add(FRAGMENTS_JUDGED[outcome])

    def carry_out_run(self, run: Sequence[FragmentTaken]) -> bool:
        """Do what `carry_out` of each would do, at half the cost, where nothing else comes of it.

        That is where every fragment was admitted and makes a chunk of its own, for which there is
        room: nothing is evicted or discarded, and nobody forgotten.

        Returns:
            Whether it is so; else nothing was done.
        """
        state = self._state
        config, holdings = state.config, state.holdings
        size_bytes = sum([each.fragment.payload.size_bytes for each in run])
        if (
            config.fragments_per_chunk > 1
            or holdings.kept_count + len(run) > config.capacity_chunks
            or state.payloads.referred_bytes + size_bytes > config.capacity_bytes
            or state.assembly.worker_count + len(run) > config.workers_max
            or any(each.outcome is not AdmissionOutcome.ADMITTED for each in run)
        ):
            return False
        session_id, window = state.model.session_id, config.outcomes_per_worker_max
        fragments = []
        for each in run:
            fragment, outcome = each.fragment, each.outcome
            worker = self._remember(fragment.worker_id)
            worker.outcomes.remember(fragment.fragment_index, outcome, window)
            fragments.append(_with_shared_ids(fragment, worker, session_id))
        holdings.close_each(fragments)
        state.model.step_count = run[-1].fragment.step_count
        for schema_hash in {each.fragment.schema_hash for each in run}:
            state.model.schemas.note(schema_hash)
        state.meter.insert(len(run))
        state.counters.add(FRAGMENTS_JUDGED[AdmissionOutcome.ADMITTED], len(run))
        return True

    def discard_silent(self, *, now: float) -> None:
        """Discard the open chunks whose workers have been silent for `open_chunk_s`."""
        assembly = self._state.assembly
        while (due_at := self.next_silence()) is not None and due_at <= now:
            chunk = assembly.first_silent()
            assert chunk is not None
            worker = assembly.find(chunk.worker_id)
            assert worker is not None
            self._state.discard(assembly.discard(worker), DiscardReason.WORKER_SILENT)

    def next_silence(self) -> float | None:
        """Return when the next worker counts as silent, or None if no chunk is open."""
        chunk = self._state.assembly.first_silent()
        return None if chunk is None else chunk.touched_at + self._state.config.open_chunk_s

    def credit(self) -> AppendCredit:
        """Return how much all producers together may send now without having to wait."""
        state = self._state
        config, holdings = state.config, state.holdings
        free_bytes = config.capacity_bytes - state.payloads.referred_bytes
        if config.full_policy is FullPolicy.EVICT:
            free_bytes += holdings.unleased_bytes
            free_chunks = config.capacity_chunks
        else:
            free_chunks = max(0, config.capacity_chunks - holdings.place_count)
        if not self._limiter_permits():
            free_chunks = 0
        open_count = state.assembly.open_fragment_count
        fragment_count = max(free_chunks, free_chunks * config.fragments_per_chunk - open_count)
        return AppendCredit(fragment_count, max(0, free_bytes))

    def _check_novelty(self, fragment: Fragment, worker: Worker | None) -> None:
        """Refuse what no correct worker sends and no waiting can cure."""
        state = self._state
        version = state.model.version
        if version is not None and fragment.model_version_max > version:
            raise InvalidArgumentError(
                "model_version_max",
                f"is {fragment.model_version_max}, but the newest version published is {version}",
            )
        wanted = state.model.step_count
        is_one = state.config.schema is SchemaPolicy.ONE
        if is_one and wanted is not None and fragment.step_count != wanted:
            raise SchemaMismatchError(
                fragment.session_id,
                "step_count",
                str(wanted),
                str(fragment.step_count),
                remedy="one --fragment-steps (`breadbox import`: --step-count), which a new "
                "session may change; a buffer with `--schema ragged` takes fragments of any length",
            )
        payload = fragment.payload
        if payload.size_bytes > state.config.capacity_bytes:
            raise InvalidArgumentError(
                "payload.size_bytes",
                f"is {payload.size_bytes}, but the buffer holds at most "
                f"{state.config.capacity_bytes} bytes; raise capacity_bytes",
            )
        if payload.payload_id in state.payloads or self._is_payload_taken(payload.payload_id):
            raise InvalidArgumentError("payload.payload_id", "is in use for another fragment")
        next_index = 0 if worker is None else worker.outcomes.next_index
        if fragment.fragment_index - next_index > INDEX_JUMP_MAX:
            raise InvalidArgumentError(
                "fragment_index",
                f"is {fragment.fragment_index}, but the next of worker {fragment.worker_id!r} in "
                f"session {fragment.session_id!r} is {next_index}, and at most {INDEX_JUMP_MAX} "
                "may be left out",
            )
        if worker is None and self._is_full() and self._first_idle() is None:
            raise WorkersFullError(state.config.workers_max)

    def _is_known(self, fragment: Fragment) -> bool:
        """Whether a fragment's schema is known, or need not be (B30).

        Raises:
            SchemaMismatchError: It is known, and is not the one that the buffer takes.
        """
        schemas = self._state.model.schemas
        schema_hash, first_hash = fragment.schema_hash, schemas.first_hash
        if schema_hash == first_hash:
            return True
        takes_any = self._state.config.schema is SchemaPolicy.ANY
        schema = schemas.find(schema_hash)
        if schema is None:
            return takes_any and schemas.is_full
        if not takes_any and first_hash is not None:
            schemas.require_first(schema, fragment.session_id)
        return True

    def _remember(self, worker_id: WorkerId) -> Worker:
        """Give a worker; a new one may take the place of one that has nothing here any more."""
        assembly = self._state.assembly
        if self._is_full() and assembly.find(worker_id) is None:
            idle = self._first_idle()
            if idle is not None:
                assembly.forget(idle)
        return assembly.find_or_add(worker_id)

    def _is_full(self) -> bool:
        return self._state.assembly.worker_count >= self._state.config.workers_max

    def _first_idle(self) -> Worker | None:
        return self._state.assembly.first_idle(self._state.payloads.holds_of)

    def _circumstances(
        self, fragment: Fragment, worker: Worker | None, foreseen: Foreseen
    ) -> admission.Circumstances:
        state = self._state
        config, holdings = state.config, state.holdings
        # By place, not by keyword: this is made twice for every fragment.
        return admission.Circumstances(
            fragment.session_id == state.model.session_id,
            worker is not None and worker.outcomes.was_judged(fragment.fragment_index),
            fragment.model_version_min,
            state.model.version_min(config.staleness_max),
            fragment.payload.size_bytes,
            foreseen.closes_chunk,
            holdings.place_count,
            config.capacity_chunks,
            not foreseen.closes_chunk or self._limiter_permits(),
            config.full_policy,
            state.payloads.referred_bytes - foreseen.discarded_bytes,
            holdings.unleased_bytes,
            config.capacity_bytes,
        )

    def _limiter_permits(self) -> bool:
        state = self._state
        limiter = state.limiter
        return not limiter.limits_inserts or limiter.may_insert(state.flow) or state.is_starved()

    def _admit(self, worker: Worker, fragment: Fragment, foreseen: Foreseen, *, now: float) -> None:
        """Make room for an admitted fragment, then take it."""
        state = self._state
        if foreseen.gap is not None:
            state.discard(state.assembly.discard(worker), foreseen.gap)
        config, holdings = state.config, state.holdings
        size_bytes_max = config.capacity_bytes - fragment.payload.size_bytes
        if state.payloads.referred_bytes > size_bytes_max:
            holdings.evict_to_bytes(size_bytes_max)
        fragment = _with_shared_ids(fragment, worker, state.model.session_id)
        state.payloads.take(fragment)
        closed = state.assembly.place(worker, fragment, now=now)
        if closed is not None:
            holdings.close(closed)
            state.meter.insert()
            # The new chunk is one of those that may have to leave (B19).
            holdings.evict_to_count(config.capacity_chunks)


def _with_shared_ids(fragment: Fragment, worker: Worker, session_id: SessionId) -> Fragment:
    """Let equal ids be one object, so that a held fragment costs no copy of them."""
    version_min, version_max = fragment.model_version_min, fragment.model_version_max
    if (
        fragment.worker_id is worker.worker_id
        and fragment.session_id is session_id
        and (version_min is version_max or version_min != version_max)
    ):
        return fragment
    return Fragment(
        worker_id=worker.worker_id,
        fragment_index=fragment.fragment_index,
        session_id=session_id,
        model_version_min=version_min,
        model_version_max=version_min if version_min == version_max else version_max,
        payload=fragment.payload,
        step_count=fragment.step_count,
        discontinuity=fragment.discontinuity,
        schema_hash=fragment.schema_hash,
        priority=fragment.priority,
    )
