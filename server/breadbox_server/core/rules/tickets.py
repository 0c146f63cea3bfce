"""Tickets are given, renewed and given back, and expire (B33).

Each is for a group or, where a chunk is of one worker, for a chunk: then its holder gives it back
once the chunk is admitted, or given up.

They pace producers: at most as many groups are open, held, or granted at the current version as
the learner takes in the current version and `lead_versions` more. Requests wait in order of
arrival.
"""

import math

from breadbox_server.core.model import errors, events, inputs
from breadbox_server.core.model.config import StalePolicy, check_duration
from breadbox_server.core.model.entries import ReplayError, TicketsGiven
from breadbox_server.core.model.events import TicketEnd
from breadbox_server.core.model.ids import CallerId, RequestId, WorkerId
from breadbox_server.core.model.inputs import GroupEndReason
from breadbox_server.core.model.validation import check_int, check_name
from breadbox_server.core.rules import intake
from breadbox_server.core.rules.granting import settle
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.grants import RETRIES_MAX, Caller
from breadbox_server.core.state.groups import Groups
from breadbox_server.core.state.tickets import Ticket, TicketWaiter

TICKETS_PER_REQUEST_MAX = 1024
GROUP_PREFIX = "ticket-"
"""How the names of groups with tickets begin."""
_SERIES_BITS = 32


def take(state: BufferState, input: inputs.TakeTickets, *, now: float) -> CallerId:
    """Give tickets, let a request wait for some, or repeat what it was given."""
    _check(state, input)
    waiters, request_id = state.ticket_waiters, input.request_id
    if request_id in state.assembly.tickets.by_request:
        caller_id = state.shared.next_caller_id()
        for ticket in state.assembly.tickets.by_request[request_id]:
            ticket.reported_count += 1
        _report(state, request_id, caller_id)
        return caller_id
    waiter = waiters.waiters.get(request_id)
    if waiter is None:
        if len(waiters.waiters) >= state.config.waiters_max:
            raise errors.WaitersFullError(state.config.waiters_max)
        waiter = TicketWaiter(request_id, input.ticket_count, input.holder)
    elif len(waiter.callers) > RETRIES_MAX:
        raise errors.WaitersFullError(RETRIES_MAX + 1)
    caller_id = state.shared.next_caller_id()
    waiters.add(waiter, Caller(caller_id, 0, input.lease_s, now, input.deadline_at))
    serve(state, now=now)
    if input.deadline_at <= now and caller_id in waiters:
        _elapse(state, caller_id, now=now)
    return caller_id


def _check(state: BufferState, input: inputs.TakeTickets) -> None:
    check_name("request_id", input.request_id)
    check_int("ticket_count", input.ticket_count, 1, TICKETS_PER_REQUEST_MAX)
    check_duration("lease_s", input.lease_s)
    if not math.isfinite(input.deadline_at):
        raise errors.InvalidArgumentError("deadline_at", "must be a finite instant")
    if not state.config.groups_per_version:
        raise errors.InvalidArgumentError(
            "buffer",
            "gives no tickets: that needs in `groups_per_version` the groups, or chunks, that the "
            "learner takes for each version",
        )


def free_count(state: BufferState) -> int:
    """Return how many tickets may be given now; negative if producers without tickets are ahead."""
    if state.model.version is None:
        return 0
    taken = state.assembly.reserved_count + len(state.holdings.table.held)
    return state.config.tickets_max - taken - state.meter.version_delivered_count


def waiting_reason(state: BufferState) -> str:
    """Say in a sentence with numbers what the next ticket waits for; empty if it would not."""
    config, version = state.config, state.model.version
    if not config.groups_per_version:
        is_waiting = bool(state.ticket_waiters.waiters)
        return "the buffer gives no tickets: groups_per_version is 0" if is_waiting else ""
    if version is None:
        return "no session is current"
    if free_count(state) > 0:
        return ""
    return (
        f"all {config.tickets_max} tickets of version {version} are held "
        f"(open: {state.assembly.reserved_count}, complete: {len(state.holdings.table.held)}, "
        f"delivered at this version: {state.meter.version_delivered_count}); "
        "the learner publishes next"
    )


def serve(state: BufferState, *, now: float) -> None:
    """Give tickets from the head of the queue while there are some."""
    waiters = state.ticket_waiters
    while (head := waiters.head()) is not None and (free := free_count(state)) > 0:
        waiters.remove(head)
        lease_s = max([each.lease_s or 0.0 for each in head.callers.values()])
        names = _new_names(state, min(free, head.ticket_count))
        given = TicketsGiven(state.name, head.request_id, names, lease_s, head.holder)
        replay(state, given, now=now, caller_count=len(head.callers))
        state.shared.record(given, now)
        for caller_id in head.callers:
            _report(state, head.request_id, caller_id)


def _new_names(state: BufferState, count: int) -> tuple[WorkerId, ...]:
    """Name groups as no group of the session was named, as far as it is remembered.

    Nor as another buffer of the name did, or a server without its journal: holders of their
    tickets may still append to a session of the same name, and would mix two groups.
    """
    series = (state.draw_seed ^ state.shared.lease_salt) % (1 << _SERIES_BITS)
    names, tickets = list[WorkerId](), state.assembly.tickets
    number = state.counters["tickets_given"]
    while len(names) < count:
        number += 1
        name = WorkerId(f"{GROUP_PREFIX}{series:0{_SERIES_BITS // 4}x}-{number}")
        if name not in state.assembly.workers and name not in tickets.by_group:
            names.append(name)
    return tuple(names)


def replay(state: BufferState, given: TicketsGiven, *, now: float, caller_count: int = 1) -> None:
    """Carry out a decision to give tickets; ReplayError if it does not fit."""
    version = state.model.version
    if version is None:
        raise ReplayError("tickets were given without a session")
    state.assembly.tickets.add(
        [
            Ticket(
                *(group, given.request_id, given.holder, version, given.lease_s),
                expires_at=now + given.lease_s,
                reported_count=caller_count,
            )
            for group in given.groups
        ]
    )
    state.counters["tickets_given"] += len(given.groups)


def _report(state: BufferState, request_id: RequestId, caller_id: CallerId) -> None:
    assert state.model.version is not None, "tickets are of a session"
    tickets = state.assembly.tickets.by_request[request_id]
    state.events.append(
        events.TicketsTaken(
            state.name,
            caller_id,
            tuple([each.group for each in tickets]),
            min([each.expires_at for each in tickets]),
            state.model.session_id,
            tickets[0].model_version,
            None if state.config.stale is StalePolicy.KEEP else state.config.staleness_max,
        )
    )


def time_out_overdue(state: BufferState, *, now: float) -> None:
    """Give tickets that became free, and time out the callers that waited long enough."""
    waiters = state.ticket_waiters
    serve(state, now=now)
    while (first := waiters.first_deadline()) is not None and first[0] <= now:
        _elapse(state, first[1], now=now)


def _elapse(state: BufferState, caller_id: CallerId, *, now: float) -> None:
    reason = waiting_reason(state)
    caller = state.ticket_waiters.remove_caller(caller_id)
    state.events.append(
        events.TicketWaitElapsed(state.name, caller_id, reason, now - caller.asked_at)
    )


def renew(state: BufferState, input: inputs.RenewTicket, *, now: float) -> float:
    """Let a ticket live on, and return its new expiry."""
    if input.lease_s is not None:
        check_duration("lease_s", input.lease_s)
    ticket = _find(state, input.group)
    if ticket is None:
        raise errors.TicketNotFoundError(input.group)
    expires_at = now + (ticket.lease_s if input.lease_s is None else input.lease_s)
    state.assembly.tickets.renew(ticket, expires_at)
    state.shared.record(input, now)
    return expires_at


def give_back(state: BufferState, input: inputs.GiveBackTicket, *, now: float) -> None:
    """End a ticket with its group, or note that a member will not come."""
    ticket, member = _find(state, input.group), input.member
    groups = state.assembly if isinstance(state.assembly, Groups) else None
    group = None if groups is None else groups.workers.get(input.group)
    if member is not None:
        if groups is None:
            problem = "is of groups, which the buffer does not make"
            raise errors.InvalidArgumentError("member", problem)
        check_int("member", member, 0, state.config.fragments_per_chunk - 1)
    if ticket is None:
        if group is not None and group.end is not None:
            return
        raise errors.TicketNotFoundError(input.group)
    if member is not None:
        if member in ticket.given_back or (group and group.outcomes.was_judged(member)):
            return
        ticket.given_back.add(member)
    if groups is None or member is None or _is_over(state, groups, ticket):
        state.assembly.tickets.end(ticket.group, TicketEnd.GIVEN_BACK)
        if groups is not None:
            group = intake.remember(state, ticket.group)
            intake.end_group(state, groups, group, GroupEndReason.GIVEN_BACK, now=now)
    state.shared.record(input, now)
    settle(state, now=now)


def undo(state: BufferState, input: inputs.UndeliveredTicket, *, now: float) -> None:
    """Note that a caller was not reached; give its ticket back if none was."""
    ticket = _find(state, input.group)
    if ticket is not None:
        ticket.reported_count -= 1
        if ticket.reported_count <= 0:
            give_back(state, inputs.GiveBackTicket(state.name, input.group), now=now)


def _is_over(state: BufferState, groups: Groups, ticket: Ticket) -> bool:
    """Return whether a group can have no more members, or never enough."""
    config, awaited_count = state.config, groups.awaited_count(ticket.group)
    chunk = groups.chunk_of(groups.workers.get(ticket.group))
    there_count = 0 if chunk is None else len(chunk.complete)
    is_hopeless = awaited_count < max(1, config.group_min or config.fragments_per_chunk)
    return is_hopeless or there_count >= awaited_count


def _find(state: BufferState, group: WorkerId) -> Ticket | None:
    check_name("group", group)
    return state.assembly.tickets.by_group.get(group)
