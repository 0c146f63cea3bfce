"""Fragments coming in: judged, admitted, given up (B1 to B4, B7, B30)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.config import MEMBERS_MAX, FullPolicy, SchemaPolicy
from breadbox_server.core.model.counters import FRAGMENTS_DISCARDED, FRAGMENTS_JUDGED
from breadbox_server.core.model.entries import FragmentTaken
from breadbox_server.core.model.events import DiscardReason, FragmentsJudged, TicketEnd
from breadbox_server.core.model.ids import ModelVersion, SessionId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended, Fragment, GroupEndReason
from breadbox_server.core.model.validation import check_int
from breadbox_server.core.rules import parts
from breadbox_server.core.rules.granting import expire, settle
from breadbox_server.core.state.assembly import AppendPreview, Worker
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.groups import Groups
from breadbox_server.core.state.tickets import Ticket

REMEMBERED = (AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE)
"""Outcomes that change the buffer, and are what a re-append is answered with (B2)."""
ADMITTED = Appended(AdmissionOutcome.ADMITTED)
_SCHEMA_UNKNOWN = Appended(AdmissionOutcome.SCHEMA_UNKNOWN)

INDEX_JUMP_MAX: Final = 2**20
"""Indices that a worker may skip at once: more than any outage makes it drop. One far ahead would
make everything that the worker sends from then on a DUPLICATE."""


def append(state: BufferState, input: inputs.AppendFragments, *, now: float) -> list[Appended]:
    """Judge fragments in order and act on each, as far as `AppendFragments` says."""
    fragments = input.fragments
    answers: list[Appended] = []
    while (start := len(answers)) < len(fragments):
        run = fragments[start : start + unopposed_count(state, fragments, start)]
        if run:
            admit_run(state, run, now=now)
            answers += [ADMITTED] * len(run)
            continue
        try:
            answer = append_one(state, fragments[start], now=now)
        except errors.DomainError:
            if answers:
                break
            raise
        assert answer is not None, "its payload is there"
        answers.append(answer)
        if answer.outcome.asks_again:
            break
    return answers


def append_one(
    state: BufferState, fragment: Fragment, *, now: float, is_there: bool = True
) -> Appended | None:
    """Judge a fragment and act on that, or return None if its payload is all that is missing."""
    worker = state.assembly.workers.get(fragment.worker_id)
    preview = state.assembly.preview(worker, fragment)
    answer = judge(state, fragment, worker, preview)
    if answer.outcome is AdmissionOutcome.ADMITTED and not is_there:
        return None
    decide(state, fragment, answer, preview, now=now)
    return answer


def decide(
    state: BufferState, fragment: Fragment, answer: Appended, preview: AppendPreview, *, now: float
) -> None:
    """Act on a judgement."""
    if state.assembly.in_any_order and not fragment.discontinuity:
        # To readers that join a worker's fragments, no member goes on where another ends.
        fragment = replace(fragment, discontinuity=True)
    if answer.outcome in REMEMBERED:
        _carry_out(state, fragment, answer.outcome, preview, now=now)
    else:
        state.counters[FRAGMENTS_JUDGED[answer.outcome]] += 1
    _record(state, answer.outcome, (fragment,), now=now)


def admit_run(state: BufferState, run: Sequence[Fragment], *, now: float) -> None:
    """Admit fragments that are sure to be, each as a chunk of its own."""
    _admit_run(state, run)
    _record(state, AdmissionOutcome.ADMITTED, run, now=now)


def _record(
    state: BufferState, outcome: AdmissionOutcome, fragments: Sequence[Fragment], *, now: float
) -> None:
    """Report what became of fragments, have it journalled if it changed anything, and settle."""
    size_bytes = sum([each.payload.size_bytes for each in fragments])
    state.events.append(FragmentsJudged(state.name, outcome, len(fragments), size_bytes))
    if outcome in REMEMBERED:
        for each in fragments:
            state.shared.record(FragmentTaken(state.name, each, outcome), now)
    settle(state, now=now)


def usual_room(state: BufferState, count: int) -> tuple[int, int]:
    """Return the places (`count` at least if they are not bounded) and bytes that are left.

    They are for fragments that are a chunk each. Without places each has to be judged alone, for
    something else may depend on when it comes.
    """
    config, holdings = state.config, state.holdings
    if (
        state.model.version is None
        or config.fragments_per_chunk > 1
        or state.assembly.in_any_order
        or state.limiter.limits_inserts
        or not holdings.closes_in_order
        or state.waiters.head() is not None
    ):
        return 0, 0
    bytes_left = config.capacity_bytes - state.taken_bytes
    if config.full_policy is FullPolicy.BLOCK:
        return max(0, config.capacity_chunks - state.taken_places), bytes_left
    return count, bytes_left + holdings.unleased_bytes


def unopposed_count(state: BufferState, fragments: Sequence[Fragment], start: int) -> int:
    """Count the fragments from `start` on that are admitted for certain, each as its own chunk.

    They are the usual ones: each the next of a known worker behind what it has reserved, of the
    session's schema, and with room. So what they have in common is judged once; the others are
    judged one by one.
    """
    places_left, bytes_left = usual_room(state, len(fragments))
    if not places_left:
        return 0
    model, version_min, schema_hash = state.model, state.version_min, state.model.schemas.first_hash
    version = model.version or 0
    blocks = state.config.full_policy is FullPolicy.BLOCK
    workers, tails = state.assembly.workers, state.room.tails
    next_indices, payload_ids = dict[WorkerId, int](), set[str]()
    for fragment in fragments[start : start + places_left]:
        worker_id, payload = fragment.worker_id, fragment.payload
        if worker_id not in next_indices:
            if worker_id not in workers:
                break
            next_index = workers[worker_id].outcomes.next_index
            if worker_id in tails:
                next_index = max(next_index, tails[worker_id].next_index)
            next_indices[worker_id] = next_index
        payload_id = payload.payload_id
        if (
            fragment.fragment_index != next_indices[worker_id]
            or fragment.session_id != model.session_id
            or fragment.model_version_min < version_min
            or fragment.model_version_max > version
            or fragment.step_count != model.step_count
            or fragment.schema_hash != schema_hash
            or payload.size_bytes > bytes_left
            or payload_id in payload_ids
            or state.shared.refers_to(payload_id)
        ):
            break
        next_indices[worker_id] += 1
        payload_ids.add(payload_id)
        if blocks:
            bytes_left -= payload.size_bytes
    return len(payload_ids)


def judge(
    state: BufferState, fragment: Fragment, worker: Worker | None, preview: AppendPreview
) -> Appended:
    """Return how a well-formed fragment is answered; change nothing."""
    config, holdings = state.config, state.holdings
    closes_chunk = preview.closes_chunk
    # By place, not by keyword, which takes longer.
    known = None
    if isinstance(state.assembly, Groups) and (config.keeps_rows or not fragment.step_count):
        known = parts.known(state.assembly, worker, fragment)
        was_judged = known is not None
    else:
        was_judged = worker is not None and worker.outcomes.was_judged(fragment.fragment_index)
    outcome = outcome_of(
        fragment.session_id == state.model.session_id,
        was_judged,
        state.version_of(fragment),
        state.version_min,
        fragment.payload.size_bytes,
        closes_chunk,
        state.taken_places,
        config.capacity_chunks,
        not closes_chunk or _limiter_permits(state),
        config.full_policy,
        state.taken_bytes - preview.discarded_bytes,
        holdings.unleased_bytes,
        config.capacity_bytes,
    )
    if known is not None and outcome is AdmissionOutcome.DUPLICATE:
        return parts.again(known, fragment)
    if outcome is AdmissionOutcome.DUPLICATE and worker is not None:
        return Appended(outcome, worker.outcomes.outcome(fragment.fragment_index))
    if outcome is not AdmissionOutcome.WRONG_SESSION:
        if preview.end is not None:
            return Appended(AdmissionOutcome.GROUP_ENDED, group_end=preview.end)
        if fragment.step_count:
            _check_steps(state, fragment)
        else:
            parts.check(state, fragment, worker)
        _check_novelty(state, fragment, worker)
        if not fragment.step_count:
            return ADMITTED if outcome is AdmissionOutcome.ADMITTED else Appended(outcome)
        if outcome is not AdmissionOutcome.STALE and not _is_known(state, fragment):
            return _SCHEMA_UNKNOWN
    return ADMITTED if outcome is AdmissionOutcome.ADMITTED else Appended(outcome)


def outcome_of(
    is_of_current_session: bool,
    was_judged_before: bool,
    version: ModelVersion,
    version_min: int,
    size_bytes: int,
    closes_chunk: bool,
    place_count: int,
    capacity_chunks: int,
    limiter_permits: bool,
    full_policy: FullPolicy,
    referred_bytes: int,
    evictable_bytes: int,
    capacity_bytes: int,
) -> AdmissionOutcome:
    """Decide what becomes of a fragment (B1); the first reason that applies wins.

    Reasons that waiting cannot change come first, and its origin before its contents. Nothing is
    changed here, so a refusal cannot have cost anything (B14), and a look-ahead is the same
    function as the act.

    `version` is that from which its staleness counts; `version_min` the oldest fresh one (B5),
    negative while all are. `referred_bytes` omits what the fragment's gap discards;
    `evictable_bytes` is of held and retained chunks without a lease. BUFFER_FULL: it would close a
    chunk that has no place under a blocking policy, or that the limiter holds back under any.
    BYTES_FULL: evictions cannot make room. ADMITTED may need evictions.
    """
    if not is_of_current_session:
        return AdmissionOutcome.WRONG_SESSION
    if was_judged_before:
        return AdmissionOutcome.DUPLICATE
    if version < version_min:
        return AdmissionOutcome.STALE
    may_evict = full_policy is FullPolicy.EVICT
    if closes_chunk:
        if not limiter_permits:
            return AdmissionOutcome.BUFFER_FULL
        if place_count >= capacity_chunks and not may_evict:
            return AdmissionOutcome.BUFFER_FULL
    must_stay_bytes = referred_bytes - (evictable_bytes if may_evict else 0)
    if must_stay_bytes + size_bytes > capacity_bytes:
        return AdmissionOutcome.BYTES_FULL
    return AdmissionOutcome.ADMITTED


def _limiter_permits(state: BufferState) -> bool:
    """Return whether one more chunk may be closed; while a fetch waits for chunks it may."""
    if not state.limiter.limits_inserts or state.limiter.may_insert(state.flow_ahead):
        return True
    head = state.waiters.head()
    return head is not None and state.has_leases_for(head.world_size)


def _check_steps(state: BufferState, fragment: Fragment) -> None:
    version = state.model.version
    if version is not None and fragment.model_version_max > version:
        raise errors.InvalidArgumentError(
            "model_version_max",
            f"is {fragment.model_version_max}, but the newest version published is {version}",
        )
    wanted = state.model.step_count
    is_one = state.config.schema is SchemaPolicy.ONE
    if is_one and wanted is not None and fragment.step_count != wanted:
        raise errors.SchemaMismatchError(
            fragment.session_id,
            "step_count",
            str(wanted),
            str(fragment.step_count),
            remedy="one --fragment-steps (`breadbox import`: --step-count), which a new "
            "session may change; a buffer with `--schema ragged` takes fragments of any length",
        )


def _check_novelty(state: BufferState, fragment: Fragment, worker: Worker | None) -> None:
    payload = fragment.payload
    if payload.size_bytes > state.config.capacity_bytes:
        raise errors.InvalidArgumentError(
            "payload.size_bytes",
            f"is {payload.size_bytes}, but the buffer holds at most "
            f"{state.config.capacity_bytes} bytes; raise capacity_bytes",
        )
    if state.shared.refers_to(payload.payload_id):
        raise errors.InvalidArgumentError("payload.payload_id", "is in use for another fragment")
    next_index = 0 if worker is None else worker.outcomes.next_index
    if state.assembly.in_any_order:
        size = state.config.fragments_per_chunk or MEMBERS_MAX
        check_int("fragment_index", fragment.fragment_index, 0, size - 1)
    elif fragment.fragment_index - next_index > INDEX_JUMP_MAX:
        raise errors.InvalidArgumentError(
            "fragment_index",
            f"is {fragment.fragment_index}, but the next of worker {fragment.worker_id!r} in "
            f"session {fragment.session_id!r} is {next_index}, and at most {INDEX_JUMP_MAX} "
            "may be left out",
        )
    if (
        worker is None
        and _has_all_workers(state)
        and state.assembly.first_idle(state.payloads) is None
    ):
        raise errors.WorkersFullError(state.config.workers_max)


def _is_known(state: BufferState, fragment: Fragment) -> bool:
    """Return whether a fragment's schema is known, or need not be (B30); refuse another one."""
    schemas = state.model.schemas
    schema_hash, first_hash = fragment.schema_hash, schemas.first_hash
    if schema_hash == first_hash:
        return True
    takes_any = state.config.schema is SchemaPolicy.ANY
    schema = schemas.find(schema_hash)
    if schema is None:
        return takes_any and schemas.is_full
    if not takes_any and first_hash is not None:
        schemas.joined(schema, fragment.session_id)
    return True


def declare_schema(state: BufferState, input: inputs.DeclareSchema, *, now: float) -> None:
    """Learn what the arrays of fragments are (B30); refuse another than the buffer takes."""
    schemas, schema = state.model.schemas, input.schema
    if input.session_id != state.model.session_id:
        return
    is_known = input.schema_hash in schemas
    takes_any = state.config.schema is SchemaPolicy.ANY
    if is_known and (takes_any or input.schema_hash != schemas.first_hash):
        return
    if schemas and not takes_any:
        schema = schemas.joined(schema, input.session_id)
    if schema != schemas.get(input.schema_hash) and (is_known or not schemas.is_full):
        schemas[input.schema_hash] = schema
        state.shared.record(replace(input, schema=schema), now)


def may_overtake(state: BufferState, waits_for: AdmissionOutcome, closes_chunk: bool) -> bool:
    """Return whether a fragment takes nothing that an earlier, refused one waits for (B31).

    A fragment that closes no chunk takes no chunk's room. Bytes are left to the one that waits
    while something is held whose end makes room; otherwise no fragment would go on. The caller has
    checked that there is room.
    """
    if waits_for is AdmissionOutcome.BUFFER_FULL:
        return not closes_chunk
    return state.holdings.kept_count == 0 and state.leases.live_count == 0


def carry_out(
    state: BufferState, fragment: Fragment, outcome: AdmissionOutcome, *, now: float
) -> None:
    """Do what an outcome of ADMITTED or STALE, once decided, does to the buffer."""
    worker = state.assembly.workers.get(fragment.worker_id)
    preview = state.assembly.preview(worker, fragment)
    _carry_out(state, fragment, outcome, preview, now=now)


def _carry_out(
    state: BufferState,
    fragment: Fragment,
    outcome: AdmissionOutcome,
    preview: AppendPreview,
    *,
    now: float,
) -> None:
    worker = remember(state, fragment.worker_id)
    if outcome is AdmissionOutcome.ADMITTED:
        _admit(state, worker, fragment, preview, now=now)
        if fragment.step_count:
            state.model.step_count = fragment.step_count
            state.model.schemas.note(fragment.schema_hash)
    else:
        state.discard(state.assembly.end_stale(worker), DiscardReason.STALE)
    config, assembly = state.config, state.assembly
    # Of a group all that is judged is remembered, so that nothing else is taken for a duplicate.
    window = config.fragments_per_chunk if assembly.in_any_order else config.outcomes_per_worker_max
    if window and fragment.step_count:
        worker.outcomes.remember(fragment.fragment_index, outcome, window)
    state.counters[FRAGMENTS_JUDGED[outcome]] += 1


def _admit(
    state: BufferState, worker: Worker, fragment: Fragment, preview: AppendPreview, *, now: float
) -> None:
    if preview.gap is not None:
        state.discard(state.assembly.discard(worker), preview.gap)
    config, holdings = state.config, state.holdings
    size_bytes_max = config.capacity_bytes - fragment.payload.size_bytes
    if state.payloads.referred_bytes > size_bytes_max:
        holdings.evict_to_bytes(size_bytes_max)
    _share_ids(fragment, worker, state.model.session_id)
    replaced = None
    if isinstance(state.assembly, Groups):
        replaced = parts.replaced_by(state, worker, fragment)
    if replaced is not fragment:
        state.payloads.take(fragment)
    closed = state.assembly.place(worker, fragment, now=now)
    if replaced is fragment:
        state.counters[FRAGMENTS_DISCARDED[DiscardReason.REPLACED]] += 1
    elif replaced is not None:
        state.discard([replaced], DiscardReason.REPLACED)
    if closed is not None:
        _close(state, closed)


def _close(state: BufferState, fragments: list[Fragment]) -> None:
    if state.config.drop_equal:
        group = state.assembly.workers[fragments[0].worker_id]
        if group.end is GroupEndReason.EQUAL:
            state.discard(fragments, DiscardReason.EQUAL)
            return
    state.holdings.close(fragments)
    state.meter.inserted_count += 1
    # The new chunk is one of those that may have to leave (B19).
    state.holdings.evict_to_count(state.config.capacity_chunks)


def carry_out_run(state: BufferState, run: Sequence[FragmentTaken]) -> bool:
    """Do `carry_out` of each at half the cost, or do nothing and return False.

    Each must make a chunk of its own, and no worker be forgotten for another.
    """
    if (
        state.config.fragments_per_chunk > 1
        or state.assembly.in_any_order
        or not state.holdings.closes_in_order
        or len(state.assembly.workers) + len(run) > state.config.workers_max
        or any([each.outcome is not AdmissionOutcome.ADMITTED for each in run])
    ):
        return False
    _admit_run(state, [each.fragment for each in run])
    state.tell_disposable()
    return True


def _admit_run(state: BufferState, fragments: Sequence[Fragment]) -> None:
    """Admit fragments that each make a chunk of its own, at half the cost of one by one."""
    assembly, config, model = state.assembly, state.config, state.model
    window = config.outcomes_per_worker_max
    for fragment in fragments:
        worker = assembly.find_or_add(fragment.worker_id)
        worker.outcomes.remember(fragment.fragment_index, AdmissionOutcome.ADMITTED, window)
        _share_ids(fragment, worker, model.session_id)
    state.meter.inserted_count += len(fragments)
    state.holdings.close_each(fragments, config.capacity_chunks, config.capacity_bytes)
    model.step_count = fragments[-1].step_count
    for schema_hash in {each.schema_hash for each in fragments}:
        model.schemas.note(schema_hash)
    state.counters[FRAGMENTS_JUDGED[AdmissionOutcome.ADMITTED]] += len(fragments)


def remember(state: BufferState, worker_id: WorkerId) -> Worker:
    """Return a worker; a new one may take the place of one that has nothing here any more."""
    assembly = state.assembly
    if _has_all_workers(state) and worker_id not in assembly.workers:
        idle = assembly.first_idle(state.payloads)
        if idle is not None:
            assembly.forget(idle)
    return assembly.find_or_add(worker_id)


def _has_all_workers(state: BufferState) -> bool:
    return len(state.assembly.workers) >= state.config.workers_max


def _share_ids(fragment: Fragment, worker: Worker, session_id: SessionId) -> None:
    """Put one object for equal ids into a fragment, so that a held one costs no copy of them."""
    fragment.worker_id, fragment.session_id = worker.worker_id, session_id
    if fragment.model_version_max == fragment.model_version_min:
        fragment.model_version_max = fragment.model_version_min


def end_silent(state: BufferState, *, now: float) -> None:
    """Discard the open chunks, or end the groups, that got nothing for `open_chunk_s`.

    Only admission counts, so that workers waiting for bytes do not block each other for ever.
    Leases expire in between, each in its time: whether a group finds room may depend on that.
    """
    while (due_at := next_silence(state)) is not None and due_at <= now:
        expire(state, now=due_at)
        assembly = state.assembly
        ticket = assembly.tickets.first_expiry()
        if ticket is not None and ticket.expires_at == due_at:
            expire_ticket(state, ticket)
            continue
        worker = assembly.workers[next(iter(assembly.open))]
        if isinstance(assembly, Groups):
            end_group(state, assembly, worker, GroupEndReason.INCOMPLETE, now=due_at)
        else:
            state.discard(assembly.discard(worker), DiscardReason.WORKER_SILENT)


def end_group(
    state: BufferState, groups: Groups, group: Worker, reason: GroupEndReason, *, now: float
) -> None:
    """End a group that waits no longer: deliver it, or, of too few members, drop it.

    Without room where producers wait it stays open, for `open_chunk_s` from `now`.
    """
    config = state.config
    chunk = groups.chunk_of(group)
    if chunk is None or len(chunk.complete) < max(
        1, config.group_min or config.fragments_per_chunk
    ):
        is_silent = reason is GroupEndReason.INCOMPLETE
        why = DiscardReason.WORKER_SILENT if is_silent else DiscardReason.GIVEN_BACK
        state.discard(groups.drop(group, reason), why)
    elif (
        config.full_policy is FullPolicy.BLOCK
        and state.holdings.place_count >= config.capacity_chunks
    ):
        groups.postpone(group, now)
    else:
        _close(state, groups.deliver(group, chunk))


def next_silence(state: BufferState) -> float | None:
    """Return when the next worker counts as silent, or a ticket expires, or None."""
    assembly = state.assembly
    ticket = assembly.tickets.first_expiry()
    if not assembly.open or state.config.keeps_rows:
        return None if ticket is None else ticket.expires_at
    due_at = next(iter(assembly.open.values())).touched_at + state.config.open_chunk_s
    return due_at if ticket is None else min(due_at, ticket.expires_at)


def expire_ticket(state: BufferState, ticket: Ticket) -> None:
    """End a ticket, and its group if it has no member; with members it goes on without."""
    assembly = state.assembly
    is_unbegun = ticket.group in assembly.tickets.unbegun
    assembly.tickets.end(ticket.group, TicketEnd.EXPIRED)
    if is_unbegun and isinstance(assembly, Groups):
        assembly.drop(remember(state, ticket.group), GroupEndReason.LOST)
