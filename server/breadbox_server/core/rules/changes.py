"""What learners and operators change: sessions, versions, priorities, limits, and what is lost."""

from collections.abc import Iterable

from breadbox_server.core.limiters import make_limiter
from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.config import StaleBy, StalePolicy
from breadbox_server.core.model.description import QuarantinedFragment
from breadbox_server.core.model.events import DiscardReason, EvictionReason, ModelChanged
from breadbox_server.core.model.ids import ModelVersion, PayloadId, WorkerId
from breadbox_server.core.model.inputs import (
    VERSION_OF,
    ModelState,
    PrioritiesUpdated,
    Published,
)
from breadbox_server.core.model.validation import (
    check_int,
    check_name,
    check_payload,
    check_priority,
    check_version,
)
from breadbox_server.core.rules import granting, intake
from breadbox_server.core.samplers import make_draw_order, make_remover
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.chunks import Chunk
from breadbox_server.core.state.groups import Groups
from breadbox_server.core.state.payloads import MODEL_OWNER

REPORTS_MAX = 1_000_000
"""Most times that a chunk may be reported unreadable before it is quarantined."""


def start_session(state: BufferState, input: inputs.StartSession, *, now: float) -> ModelState:
    """Make a session current, ending the previous one with everything of it (B5)."""
    check_name("session_id", input.session_id)
    version = ModelVersion(0) if input.model_version is None else input.model_version
    check_version("model_version", version)
    model = state.model
    if input.session_id != model.session_id:
        if input.session_id in model.ended_sessions:
            raise errors.SessionNotCurrentError(input.session_id, model.session_id)
        drop_session(state)
        model.session_id, model.version = input.session_id, version
        state.counters["sessions_started"] += 1
        state.shared.record(input, now)
        _report_model(state)
    return model.state


def end_session(state: BufferState, input: inputs.EndSession, *, now: float) -> None:
    """End a session if it is current; leases live on, waiters wait for the next one."""
    check_name("session_id", input.session_id)
    if input.session_id == state.model.session_id:
        drop_session(state)
        state.shared.record(input, now)
        _report_model(state)


def drop_session(state: BufferState) -> None:
    """End the current session, if there is one, and let go of everything of it."""
    if state.model.version is not None:
        state.room.end_all()
        state.holdings.end_session()
        state.discard(state.assembly.discard_all(), DiscardReason.SESSION_ENDED)
        state.model.end()
        state.meter.inserted_count = state.meter.delivered_count = 0
        state.meter.version_delivered_count = 0


def publish(state: BufferState, input: inputs.PublishModel, *, now: float) -> Published:
    """Move the version forward; evict chunks and discard open fragments it makes stale (B5).

    The current version again changes nothing, unless it brings that version's first weights.
    """
    check_name("session_id", input.session_id)
    check_version("model_version", input.model_version)
    model, weights = state.model, input.weights
    if weights is not None:
        check_payload("weights", weights)
    if model.version is None or input.session_id != model.session_id:
        raise errors.SessionNotCurrentError(input.session_id, model.session_id)
    if input.model_version < model.version:
        raise errors.VersionRegressedError(model.version, input.model_version)
    if input.model_version == model.version:
        current = model.state.weights
        if weights is None or current is not None:
            is_kept = weights is not None and weights == current
            return Published(input.model_version, 0, is_kept)
    if weights is not None and state.shared.refers_to(weights.payload_id):
        raise errors.InvalidArgumentError("weights.payload_id", "is in use already")
    if input.model_version != model.version:
        state.meter.version_delivered_count = 0
    model.publish(input.model_version, weights)
    state.counters["versions_published"] += 1
    evicted_count = _drop_stale(state)
    state.shared.record(input, now)
    _report_model(state)
    granting.serve(state, now=now)  # A fetch may wait for a group that is too stale now.
    return Published(input.model_version, evicted_count, weights is not None)


def _drop_stale(state: BufferState) -> int:
    evicted_count = state.holdings.evict_stale(state.version_min)
    state.discard(state.assembly.discard_stale(state.version_min), DiscardReason.STALE)
    return evicted_count


def _report_model(state: BufferState) -> None:
    state.events.append(ModelChanged(state.name, state.model.state))
    state.queue.note_outdated(state.model.session_id, state.version_min, state.version_of)
    state.tell_disposable()


def drop_payloads(state: BufferState, input: inputs.DropPayloads, *, now: float) -> int:
    """Give up whatever refers to payloads that the store lost, and count its fragments."""
    owners = state.payloads.owners
    if any(payload_id in owners for payload_id in input.payload_ids):
        state.shared.record(input, now)
    dropped_count = _drop_open(state, input.payload_ids)
    dropped_count += sum([_drop_payload(state, payload_id) for payload_id in input.payload_ids])
    granting.settle(state, now=now)
    return dropped_count


def _drop_open(state: BufferState, payload_ids: Iterable[PayloadId]) -> int:
    """Give up what open chunks have of lost payloads, with one look at each of the chunks."""
    lost_of: dict[WorkerId, set[PayloadId]] = {}
    for payload_id in payload_ids:
        owner = state.payloads.owners.get(payload_id, MODEL_OWNER)
        if owner is not MODEL_OWNER and not isinstance(owner, Chunk):
            lost_of.setdefault(owner, set()).add(payload_id)
    dropped_count = 0
    for worker_id, lost in lost_of.items():
        gone = state.assembly.discard_lost(worker_id, lost)
        state.discard(gone, DiscardReason.PAYLOAD_LOST)
        dropped_count += len(gone)
    return dropped_count


def _drop_payload(state: BufferState, payload_id: PayloadId) -> int:
    """Give up the weights, or the closed chunk, of a lost payload."""
    if payload_id not in state.payloads.owners:
        return 0
    owner = state.payloads.owners[payload_id]
    if owner is MODEL_OWNER:
        state.model.drop(payload_id)
        return 0
    assert isinstance(owner, Chunk), "open ones are given up already"
    is_lost = state.holdings.lose(owner, EvictionReason.PAYLOAD_LOST)
    return len(owner.fragments) if is_lost else 0


def report_unreadable(state: BufferState, input: inputs.ReportUnreadable, *, now: float) -> None:
    """Count payloads that a reader could not read; quarantine at `reports_max` reports (B29)."""
    check_int("reports_max", input.reports_max, 1, REPORTS_MAX)
    lease = state.leases.leases.get(input.lease_id)
    if lease is None or lease.end is not None:
        return
    reported = frozenset(input.payload_ids)
    # Each once, however often it was drawn.
    chunks = {granted.chunk.chunk_id: granted.chunk for granted in lease.share}
    unreadable = [
        (chunk, fragments)
        for chunk in chunks.values()
        if (fragments := [f for f in chunk.fragments if f.payload.payload_id in reported])
    ]
    if unreadable:
        state.shared.record(input, now)
    for chunk, fragments in unreadable:
        chunk.unreadable_count += 1
        is_bad = chunk.unreadable_count >= input.reports_max
        if is_bad and state.holdings.lose(chunk, EvictionReason.QUARANTINED):
            state.quarantined.extend(
                [
                    QuarantinedFragment(
                        each.worker_id,
                        each.fragment_index,
                        each.session_id,
                        each.payload.payload_id,
                    )
                    for each in fragments
                ]
            )
    state.tell_disposable()


def update_priorities(
    state: BufferState, input: inputs.UpdatePriorities, *, now: float
) -> PrioritiesUpdated:
    """Evict chunks, then set the priorities of others (B18)."""
    for place, (_, priority) in enumerate(input.priorities):
        check_priority(f"updates[{place}].priority", priority)
    table = state.holdings.table
    deleted = [chunk_id for chunk_id in dict.fromkeys(input.deleted) if chunk_id in table.held]
    state.holdings.evict([table.held[each] for each in deleted], EvictionReason.DELETED)
    priorities = [each for each in input.priorities if each[0] in table.held]
    for chunk_id, priority in priorities:
        table.set_priority(table.held[chunk_id], priority)
    if deleted or priorities:
        known = inputs.UpdatePriorities(input.buffer, tuple(priorities), tuple(deleted))
        state.shared.record(known, now)
    granting.settle(state, now=now)
    unknown_count = len(input.priorities) - len(priorities) + len(input.deleted) - len(deleted)
    return PrioritiesUpdated(len(priorities), len(deleted), unknown_count)


def update_limits(state: BufferState, input: inputs.UpdateBuffer, *, now: float) -> None:
    """Replace the limits, and evict what no longer fits; O(chunks held)."""
    old, new = state.config, input.config
    for name in ("fragments_per_chunk", "required_parts"):
        if getattr(new, name) == getattr(old, name) or state.is_empty:
            continue
        raise errors.InvalidArgumentError(
            name,
            f"is {getattr(old, name)} and cannot be changed while the buffer holds "
            "fragments or a lease refers to them; empty it (end the session), delete it, or "
            "use another buffer",
        )
    is_unused = state.is_empty and state.model.version is None
    changed = [
        each for each in ("assembly", "stale_by") if getattr(new, each) is not getattr(old, each)
    ]
    if changed and not is_unused:
        raise errors.InvalidArgumentError(
            changed[0],
            f"is {getattr(old, changed[0]).value} and cannot be changed while a session is current "
            "or the buffer holds fragments or a lease refers to them; end the session, or use "
            "another buffer",
        )
    sampler = make_draw_order(new)
    remover = make_remover(new.remover, new.priority_exponent)
    state.config = new
    if not changed:
        state.assembly.fragments_per_chunk = new.fragments_per_chunk
        if isinstance(state.assembly, Groups):
            state.assembly.required = new.parts_of_complete
    else:
        state.version_of = VERSION_OF[new.stale_by]
        state.holdings.by_newest = new.stale_by is StaleBy.NEWEST
        ended_count = state.assembly.ended_count
        state.assembly = state.make_assembly()
        state.assembly.restore_ends(ended_count)
    state.limiter = make_limiter(new.limiter)
    order, former_order = [
        (each.sampler, each.priority_exponent, each.stale is StalePolicy.WAIT)
        for each in (new, old)
    ]
    if order != former_order:
        state.holdings.table.use_sampler(sampler)
    if (new.remover, new.priority_exponent) != (old.remover, old.priority_exponent):
        state.holdings.table.use_remover(remover)
    _drop_stale(state)
    state.holdings.evict_used_up(new.uses_max)
    state.holdings.evict_to_count(new.capacity_chunks)
    state.holdings.evict_to_bytes(new.capacity_bytes)
    state.leases.trim(new.requests_remembered_max)
    intake.end_silent(state, now=now)
    state.shared.record(input, now)
    granting.refuse_impossible(state)
    granting.settle(state, now=now)
