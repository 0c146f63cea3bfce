"""Tickets: groups reserved ahead, so that producers begin as many as the learner takes."""

import random
from dataclasses import replace
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig, FullPolicy, StalePolicy
from breadbox_server.core.model.entries import ReplayError, TicketsGiven
from breadbox_server.core.model.errors import (
    BufferNotFoundError,
    DrainingError,
    InvalidArgumentError,
    TicketNotFoundError,
    WaitersFullError,
)
from breadbox_server.core.model.events import (
    FetchGranted,
    PayloadsDisposable,
    RequestRefused,
    TicketEnd,
    TicketsEnded,
    TicketsTaken,
    TicketWaitElapsed,
)
from breadbox_server.core.model.ids import CallerId, RequestId, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    CancelRequest,
    CreateBuffer,
    DeleteBuffer,
    GiveBackTicket,
    RenewTicket,
    TakeTickets,
    UndeliveredTicket,
)
from core.world import World

ADMITTED, ENDED = AdmissionOutcome.ADMITTED, AdmissionOutcome.GROUP_ENDED
SIZE = 2


class Producers(World):
    """A buffer of groups of two, of which a learner takes two for each version."""

    def __init__(self, **limits: Any) -> None:
        defaults: dict[str, Any] = {
            "fragments_per_chunk": SIZE,
            "assembly": AssemblyPolicy.GROUPS,
            "sampler": "oldest_first",
            "groups_per_version": 2,
            "lead_versions": 0,
            "staleness_max": 8,
        }
        super().__init__(**defaults | limits)

    def ask(
        self,
        count: int = 1,
        *,
        request_id: str = "t0",
        wait_s: float = 0.0,
        lease_s: float = 50.0,
        holder: str = "",
    ) -> CallerId:
        take = TakeTickets(
            B,
            request_id=RequestId(request_id),
            ticket_count=count,
            deadline_at=self.now + wait_s,
            lease_s=lease_s,
            holder=holder,
        )
        return self.buffers.apply(take, now=self.now)

    def take(self, count: int = 1, **fields: Any) -> list[str]:
        """The groups of tickets that are there at once."""
        self.buffers.take_events()
        self.ask(count, **fields)
        return self.taken()

    def taken(self) -> list[str]:
        return [group for event in self.events(TicketsTaken) for group in event.groups]

    def back(self, group: str, member: int | None = None) -> None:
        self.buffers.apply(GiveBackTicket(B, WorkerId(group), member), now=self.now)

    def renew_ticket(self, group: str, lease_s: float | None = None) -> float:
        return self.buffers.apply(RenewTicket(B, WorkerId(group), lease_s), now=self.now)

    def complete(self, *groups: str, version: int = 0) -> None:
        for group in groups:
            for member in range(SIZE):
                assert ADMITTED is self.append(group, member, version=version)

    def ends(self) -> list[tuple[str, str]]:
        return [(each.group, each.reason.value) for each in self.buffers[B].group_ends(0, 100)]

    def ended(self) -> dict[str, int]:
        counters = self.seen().counters
        return {
            end.value: count
            for end in TicketEnd
            if (count := counters[f"tickets_ended_{end.value}"])
        }

    def restart(self) -> None:
        """Be killed, and replayed from the beginning; what was decided is what is found."""
        restored = BufferSet.restore((), random.Random(1), is_recording=True)
        entries = self.entries = [*getattr(self, "entries", []), *self.buffers.take_entries()]
        restored.replay(entries)
        restored.handle_timer(now=self.now)
        restored.check_invariants()
        assert self.buffers.snapshot() == restored.snapshot()
        again = BufferSet.restore(restored.snapshot(), random.Random(1), is_recording=True)
        assert restored.snapshot() == again.snapshot()
        again.check_invariants()
        self.buffers = again


def test_as_many_tickets_are_given_as_the_learner_takes_and_no_group_is_named_twice() -> None:
    world = Producers(lead_versions=1)
    first, second = world.take(3), world.take(3, request_id="t1")
    assert (3, 1) == (len(first), len(second))
    assert 4 == len({*first, *second})
    assert [] == world.take(request_id="t2")
    assert 4 == world.seen().ticket_count


def test_a_group_keeps_its_place_open_held_and_delivered_until_the_next_version() -> None:
    world = Producers()
    groups = world.take(2)
    world.append(groups[0])
    assert [] == world.take(request_id="t1"), "open"
    world.complete(groups[1])
    world.append(groups[0], 1)
    assert [] == world.take(request_id="t2"), "held"
    grant = world.granted(2 * SIZE)
    assert [] == world.take(request_id="t3"), "delivered at this version"
    world.release(grant.lease_id)
    assert [] == world.take(request_id="t4")
    world.publish(1)
    assert 2 == len(world.take(2, request_id="t5"))


def test_a_version_without_a_batch_adds_no_ticket() -> None:
    world = Producers()
    world.take(2)
    for version in range(1, 6):
        world.publish(version)
    assert [] == world.take(request_id="t1")


def test_the_same_version_published_again_adds_no_ticket() -> None:
    world = Producers()
    world.complete(*world.take(2))
    world.granted(2 * SIZE)
    world.publish(0)
    assert [] == world.take(request_id="t1")


def test_groups_without_a_ticket_count_as_open_too() -> None:
    world = Producers()
    world.append("a")
    assert 1 == len(world.take(2))


def test_a_batch_given_back_is_held_and_not_delivered() -> None:
    world = Producers()
    world.complete(*world.take(2))
    world.give_back(world.granted(2 * SIZE).lease_id)
    assert [] == world.take(request_id="t1")
    world.granted(2 * SIZE)
    world.publish(1)
    assert 2 == len(world.take(2, request_id="t2"))


def test_a_batch_of_an_earlier_version_given_back_is_held_again_and_takes_a_place() -> None:
    world = Producers()
    world.complete(*world.take(2))
    grant = world.granted(2 * SIZE)
    world.publish(1)
    world.give_back(grant.lease_id)
    assert [] == world.take(request_id="t1")
    assert 0 == world.buffers.snapshot()[0].version_delivered_count


def test_requests_wait_in_order_of_arrival_and_get_what_becomes_free() -> None:
    world = Producers()
    groups = world.take(2)
    first = world.ask(2, request_id="t1", wait_s=10.0)
    second = world.ask(1, request_id="t2", wait_s=10.0)
    assert 2 == world.seen().ticket_waiter_count
    world.back(groups[0])
    [taken] = world.events(TicketsTaken)
    assert (first, 1) == (taken.caller_id, len(taken.groups)), "up to its count"
    world.back(groups[1])
    [taken] = world.events(TicketsTaken)
    assert second == taken.caller_id


def test_a_wait_that_elapses_says_in_numbers_what_it_waited_for() -> None:
    world = Producers()
    group = world.take(2)[0]
    world.complete(group)
    caller = world.ask(request_id="t1", wait_s=5.0)
    world.advance(5.0)
    [elapsed] = world.events(TicketWaitElapsed)
    assert caller == elapsed.caller_id
    assert (
        "all 2 tickets of version 0 are held (open: 1, complete: 1, "
        "delivered at this version: 0); the learner publishes next"
    ) == elapsed.reason
    assert elapsed.reason == world.seen().ticket_waiting_reason
    assert 5.0 == elapsed.wait_s
    assert world.buffers.next_timer() is not None, "of the ticket"


def test_a_caller_that_goes_leaves_the_queue() -> None:
    world = Producers()
    group, _ = world.take(2)
    gone = world.ask(request_id="t1", wait_s=5.0)
    world.ask(request_id="t2", wait_s=5.0)
    world.buffers.apply(CancelRequest(B, gone), now=world.now)
    world.back(group)
    assert 1 == len(world.taken())
    assert 0 == world.seen().ticket_waiter_count


def test_a_repeated_request_gets_the_same_tickets() -> None:
    world = Producers()
    groups = world.take(2)
    assert groups == world.take(2)
    assert 2 == world.seen().ticket_count
    world.back(groups[0])
    assert groups[1:] == world.take(2), "those that live"


def test_a_retry_that_waits_gets_the_same_tickets_as_the_first_call() -> None:
    world = Producers()
    group, _ = world.take(2)
    callers = [world.ask(request_id="t1", wait_s=5.0) for _ in range(2)]
    world.back(group)
    told = world.events(TicketsTaken)
    assert callers == [each.caller_id for each in told]
    assert told[0].groups == told[1].groups


def test_tickets_are_given_back_once_none_of_their_callers_was_reached() -> None:
    world = Producers()
    [group] = world.take(1)
    world.ask(1)
    lost = UndeliveredTicket(B, WorkerId(group))
    world.buffers.apply(lost, now=world.now)
    assert [] == world.ends(), "the retry has it"
    world.buffers.apply(lost, now=world.now)
    assert [(group, "given_back")] == world.ends()
    world.buffers.apply(lost, now=world.now)
    assert {"given_back": 1} == world.ended()
    world.restart()


def test_a_ticket_of_before_a_restart_counts_as_received() -> None:
    world = Producers()
    [group] = world.take(1)
    world.restart()
    world.ask(1)
    world.buffers.apply(UndeliveredTicket(B, WorkerId(group)), now=world.now)
    assert ([], 1) == (world.ends(), world.seen().ticket_count)


def test_a_ticket_without_a_member_that_expires_ends_its_group_as_lost() -> None:
    world = Producers()
    groups = world.take(2, lease_s=5.0)
    world.renew_ticket(groups[1])
    world.advance(3.0)
    world.renew_ticket(groups[1])
    world.advance(2.0)
    assert [(groups[0], "lost")] == world.ends()
    assert {"expired": 1} == world.ended()
    assert ENDED is world.append(groups[0])
    assert 1 == len(world.take(2, request_id="t1"))
    with pytest.raises(TicketNotFoundError, match="it is unknown or has ended"):
        world.renew_ticket(groups[0])


def test_a_group_with_a_member_goes_on_when_its_ticket_expires() -> None:
    world = Producers()
    group, _ = world.take(2, lease_s=5.0)
    world.append(group)
    world.advance(5.0)
    assert {"expired": 2} == world.ended()
    assert ADMITTED is world.append(group, 1)
    assert (group, "complete") in world.ends()


def test_a_ticket_ends_with_its_group_and_only_once() -> None:
    world = Producers(lead_versions=3)
    complete, stale, back, _ = world.take(4, lease_s=30.0)
    world.complete(complete)
    world.publish(9)
    world.append(stale)
    world.back(back)
    world.back(back)
    world.advance(30.0)
    assert {"group_ended": 2, "given_back": 1, "expired": 1} == world.ended()
    world.end()
    assert {"group_ended": 2, "given_back": 1, "expired": 1} == world.ended()


def test_a_session_ends_its_tickets_and_the_next_one_begins_anew() -> None:
    world = Producers()
    world.take(2)
    world.buffers.take_events()
    world.ask(request_id="t1", wait_s=100.0)
    world.end()
    assert [TicketsEnded(B, TicketEnd.SESSION_ENDED, 2)] == world.events(TicketsEnded)
    world.start("s1")
    [taken] = world.events(TicketsTaken)
    assert "s1" == taken.session_id


def test_what_is_given_back_without_a_member_ends_as_given_back() -> None:
    world = Producers()
    group = world.take(1)[0]
    world.back(group)
    assert [(group, "given_back")] == world.ends()
    assert ENDED is world.append(group)


def test_a_group_given_back_with_members_is_delivered_or_dropped_as_if_it_were_silent() -> None:
    world = Producers(fragments_per_chunk=3, group_min=2)
    few, many = world.take(2)
    world.append(few)
    world.append(many, 0)
    world.append(many, 2)
    world.back(few)
    world.back(many)
    assert [(few, "given_back"), (many, "partial")] == world.ends()
    assert 1 == world.count("fragments_discarded_given_back")
    assert {"given_back": 2} == world.ended()


def test_a_learner_that_waits_gets_what_a_group_given_back_had() -> None:
    world = Producers(fragments_per_chunk=3, group_min=1)
    group = world.take(1)[0]
    world.append(group, 2)
    world.fetch(3)
    world.buffers.take_events()
    world.back(group)
    [granted] = world.events(FetchGranted)
    assert [2] == [each.fragment.fragment_index for each in granted.fragments]


def test_the_payloads_of_a_group_given_back_are_told_disposable() -> None:
    world = Producers()
    group = world.take(1)[0]
    world.append(group, 1)
    world.buffers.take_events()
    world.back(group)
    assert 1 == len(world.events(PayloadsDisposable))


def test_a_request_that_waits_when_no_tickets_are_given_any_more_is_told_so() -> None:
    world = Producers()
    world.take(2)
    world.ask(request_id="t1", wait_s=5.0)
    world.update(fragments_per_chunk=SIZE, assembly=AssemblyPolicy.GROUPS)
    world.advance(5.0)
    [elapsed] = world.events(TicketWaitElapsed)
    assert "the buffer gives no tickets: groups_per_version is 0" == elapsed.reason


def test_a_group_without_a_member_that_was_given_back_is_delivered_with_the_others() -> None:
    world = Producers(fragments_per_chunk=3, group_min=2)
    group, other = world.take(2)
    world.append(group, 1)
    world.back(group, 2)
    world.back(group, 2)
    assert ENDED is world.append(group, 2)
    assert ADMITTED is world.append(group, 0)
    world.append(other, 0)
    world.append(other, 1)
    world.back(other, 0)
    world.back(other, 2)
    assert [(group, "partial"), (other, "partial")] == world.ends()


def test_a_member_given_back_ends_a_group_that_needs_it() -> None:
    world = Producers()
    group = world.take(1)[0]
    world.append(group)
    world.back(group, 1)
    assert [(group, "given_back")] == world.ends()
    assert {"given_back": 1} == world.ended()


def test_a_partial_group_given_back_without_room_waits_for_it() -> None:
    world = Producers(
        fragments_per_chunk=3,
        group_min=1,
        capacity_chunks=1,
        full_policy=FullPolicy.BLOCK,
        open_chunk_s=10.0,
    )
    first, second = world.take(2)
    for group in (first, second):
        world.append(group)
        world.back(group)
    assert [(first, "partial")] == world.ends()
    assert {"given_back": 2} == world.ended()
    grant = world.granted(3)
    world.release(grant.lease_id)
    world.advance(10.0)
    assert [(first, "partial"), (second, "partial")] == world.ends()


def test_tickets_survive_a_restart_with_their_leases_members_and_order() -> None:
    world = Producers(fragments_per_chunk=3, group_min=2, lead_versions=3)
    begun, given_up, unbegun, gone = world.take(4, lease_s=20.0, holder="h")
    world.append(begun)
    world.back(given_up, 1)
    world.back(gone)
    world.advance(5.0)
    world.renew_ticket(unbegun)
    world.restart()
    assert 3 == world.seen().ticket_count
    assert 3 == world.buffers[B].tickets_of("h", RequestId("t9"))
    assert [begun, given_up, unbegun] == world.take(4, lease_s=20.0, holder="h")
    world.advance(15.0)
    assert [(gone, "given_back"), (given_up, "lost")] == world.ends()
    world.advance(5.0)
    assert (unbegun, "lost") == world.ends()[-1]
    world.restart()
    assert {"given_back": 1, "expired": 3} == world.ended()


def test_silences_and_expiries_that_are_overdue_together_are_told_in_their_order() -> None:
    world = Producers(open_chunk_s=4.0, lead_versions=3)
    first = world.take(1, lease_s=3.0)[0]
    world.append("a")
    last = world.take(1, request_id="t1", lease_s=5.0)[0]
    world.advance(100.0)
    assert [(first, "lost"), ("a", "incomplete"), (last, "lost")] == world.ends()
    world.restart()


def test_a_buffer_that_paces_nothing_gives_no_tickets_and_says_what_to_set() -> None:
    for assembly in AssemblyPolicy:
        world = Producers(groups_per_version=0, assembly=assembly)
        with pytest.raises(InvalidArgumentError, match="groups_per_version"):
            world.ask()
        with pytest.raises(TicketNotFoundError):
            world.back("a")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"count": 0}, "ticket_count"),
        ({"count": 1025}, "ticket_count"),
        ({"request_id": ""}, "request_id"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"wait_s": float("inf")}, "deadline_at"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(fields: dict[str, Any], name: str) -> None:
    world = Producers()
    with pytest.raises(InvalidArgumentError, match=name):
        world.ask(**fields)


def test_the_queue_is_bounded_and_so_are_the_callers_of_a_request() -> None:
    world = Producers(waiters_max=1)
    world.take(2)
    world.ask(request_id="t1", wait_s=5.0)
    with pytest.raises(WaitersFullError):
        world.ask(request_id="t2", wait_s=5.0)
    for _ in range(64):
        world.ask(request_id="t1", wait_s=5.0)
    with pytest.raises(WaitersFullError):
        world.ask(request_id="t1", wait_s=5.0)


def test_a_request_is_turned_away_when_its_buffer_goes_or_the_server_drains() -> None:
    world = Producers()
    world.take(2)
    world.ask(request_id="t1", wait_s=5.0)
    world.buffers.drain(now=world.now)
    with pytest.raises(DrainingError):
        world.ask(request_id="t2")
    [refused] = world.events(RequestRefused)
    assert isinstance(refused.error, DrainingError)
    assert 0 == world.count("fetches_refused"), "it is no fetch"
    other = Producers()
    other.take(2)
    other.ask(request_id="t1", wait_s=5.0)
    other.buffers.apply(DeleteBuffer(B), now=other.now)
    [refused] = other.events(RequestRefused)
    assert isinstance(refused.error, BufferNotFoundError)


def test_tickets_are_at_most_the_groups_that_are_remembered() -> None:
    with pytest.raises(InvalidArgumentError, match="is 12, more than the groups remembered"):
        BufferConfig(groups_per_version=4, lead_versions=2, workers_max=11)


def test_a_producer_that_names_its_groups_like_the_server_is_evaded() -> None:
    world = Producers(lead_versions=1)
    [first] = world.take(1)
    series = first.removesuffix("-1")
    world.append(f"{series}-2")
    assert [f"{series}-3"] == world.take(1, request_id="t1")
    assert [f"{series}-4"] == world.take(1, request_id="t2")


def test_no_other_buffer_or_server_gives_a_ticket_of_the_same_name() -> None:
    """Its holder may still generate, and append to a session of the same name."""
    world = Producers()
    given = world.take(2)
    created = CreateBuffer(B, world.buffers[B].config)
    world.buffers.apply(DeleteBuffer(B), now=world.now)
    world.buffers.apply(created, now=world.now)
    world.start("session")
    given += world.take(2)
    # A server that lost the end of its journal, and one that lost all of it.
    [taken] = world.buffers.snapshot()
    lost = replace(taken, tickets=(), counters=dict(taken.counters) | {"tickets_given": 0})
    for snapshot in ((lost,), ()):
        world.buffers = BufferSet.restore(snapshot, random.Random(len(given)))
        if not snapshot:
            world.buffers.apply(created, now=world.now)
            world.start("session")
        given += world.take(2)
    assert 8 == len({*given}), given


def test_another_size_or_assembly_is_refused_while_a_ticket_is_held() -> None:
    world = Producers()
    group = world.take(1)[0]
    with pytest.raises(InvalidArgumentError, match="fragments_per_chunk"):
        world.update(fragments_per_chunk=3, assembly=AssemblyPolicy.GROUPS, groups_per_version=2)
    world.back(group)
    world.update(fragments_per_chunk=3, assembly=AssemblyPolicy.GROUPS, groups_per_version=2)


def test_what_is_too_stale_is_kept_delivered_and_counted_where_the_buffer_says_so() -> None:
    world = Producers(stale=StalePolicy.KEEP, staleness_max=1)
    groups = world.take(2)
    world.complete(groups[0])
    world.publish(5)
    world.complete(groups[1])
    grant = world.granted(2 * SIZE)
    assert [5, 5, 5, 5] == [each.staleness for each in grant.fragments]
    assert 2 == world.count("chunks_delivered_late")
    world.publish(6)
    world.complete(*world.take(1, request_id="t1"), version=5)
    world.granted(SIZE)
    assert 2 == world.count("chunks_delivered_late"), "those within staleness_max are not late"


def test_tickets_of_a_journal_that_cannot_be_are_refused() -> None:
    entry = TicketsGiven(B, RequestId("t"), (WorkerId("ticket-1"),), 1.0, "")
    ended = World(starts=False)
    with pytest.raises(ReplayError, match="without a session"):
        ended.buffers.replay([(ended.now, entry)])
