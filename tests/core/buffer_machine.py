"""The stateful test's machine: random inputs to a real buffer, with the naive model beside it."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.lacking import MemberKey, Wanted
from breadbox_server.core.model.config import (
    AssemblyPolicy,
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunks,
    SampleToInsertRatio,
    StaleBy,
    StalePolicy,
)
from breadbox_server.core.model.counters import EPHEMERAL
from breadbox_server.core.model.entries import Entry
from breadbox_server.core.model.errors import (
    DomainError,
    FetchExceedsCapacityError,
)
from breadbox_server.core.model.events import (
    Event,
    FetchGranted,
    PayloadsDisposable,
    RequestRefused,
    RoomWaitEnded,
    StepsEnd,
    StepsEnded,
    TicketsTaken,
    TicketWaitElapsed,
    WaitElapsed,
)
from breadbox_server.core.model.ids import CallerId, RequestId, ReservationId, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    AppendFragments,
    CancelRequest,
    DropPayloads,
    EndSession,
    Fetch,
    Fragment,
    GiveBackTicket,
    Input,
    LeaveQueue,
    Offer,
    Payload,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    RenewTicket,
    Settle,
    TakeTickets,
    UndeliveredGrant,
    UndeliveredTicket,
    UpdateBuffer,
    UpdatePriorities,
    WaitForRoom,
)
from breadbox_server.core.samplers import OLDEST_FIRST, SAMPLERS
from breadbox_server.core.state.chunks import ChunkState
from breadbox_server.journal.encoding.codec import (
    Snapshot,
    decode_snapshot,
    decode_turn,
    encode_snapshot,
    encode_turn,
)
from breadbox_server.journal.storage.interface import BEGINNING
from core.naive_groups import NaiveGroups
from core.naive_model import NaiveGrant, NaiveReservation, identity
from core.naive_tickets import NaiveTickets
from support.inputs import end_session, publish_model, start_session
from support.metadata import make_fragment
from support.snapshots import held_chunks, snapshot_of

WORKERS = ("a", "b", "c")
REMOVERS = tuple(name for name in SAMPLERS if name not in ("uniform", "prioritised"))
"""Those that leave nothing to chance."""
PRIORITIES = (1.0, 1.0, 0.0, 0.25, 9.0, 1e30, -0.5, math.nan, math.inf)
PICKS = st.integers(0, 999)
"""Stands for a choice among things that exist only when the rule runs."""
Choose = Callable[[Sequence[Any]], Any]


def make_config(
    choose: Choose,
    fragments_per_chunk: int | None = None,
    assemblies: Sequence[AssemblyPolicy] = (AssemblyPolicy.CONSECUTIVE, AssemblyPolicy.GROUPS),
) -> BufferConfig:
    """Make small limits, so that every one of them is met soon."""
    capacity_chunks = choose([3, 4, 6, 2, 1])
    minimum_count = choose([1, 1, 1, capacity_chunks])
    ratio = SampleToInsertRatio(
        ratio=choose([0.5, 1.0, 2.0]),
        error_chunks=choose([2.0, 4.0]),
        minimum_chunk_count=minimum_count,
        lead_chunks=choose([0.0, 1.0]),
    )
    size = fragments_per_chunk or choose([1, 2, 3])
    assembly, few = choose(assemblies), choose([0, 0, 1, 2])
    stale = choose([StalePolicy.EVICT] * 4 + [StalePolicy.KEEP] + [StalePolicy.WAIT] * 2)
    waits = stale is StalePolicy.WAIT
    groups_per_version = choose([1, min(2, capacity_chunks)] if waits else [0, 1, 2])
    staleness_max = choose([2, 1, 0])
    may_lead = groups_per_version == 1 and (not waits or min(staleness_max, capacity_chunks - 1))
    return BufferConfig(
        fragments_per_chunk=size,
        assembly=assembly,
        drop_equal="reward" if few == 2 and assembly is AssemblyPolicy.GROUPS else "",
        group_min=min(size, few),
        capacity_chunks=capacity_chunks,
        capacity_bytes=choose([1000, 24, 12, 1000]),
        staleness_max=staleness_max,
        stale=stale,
        stale_by=choose([StaleBy.OLDEST, StaleBy.OLDEST, StaleBy.NEWEST]),
        groups_per_version=groups_per_version,
        lead_versions=choose([0, 1]) if may_lead else 0,
        uses_max=1 if waits else choose([1, 2, 3]),
        full_policy=choose([FullPolicy.EVICT, FullPolicy.EVICT, FullPolicy.BLOCK]),
        lease_expiry_policy=choose(list(LeaseExpiryPolicy)),
        lease_s=choose([5.0, 2.0, 1.0]),
        waiters_max=choose([3, 2, 1]),
        leases_max=choose([4, 4, 2, 1]),
        workers_max=choose([3, 3, 3, 2]),
        outcomes_per_worker_max=choose([4, 2, 1]),
        requests_remembered_max=choose([4, 2, 1]),
        open_chunk_s=choose([5.0, 5.0, 1.0]),
        sampler=choose(["uniform", *SAMPLERS]),
        priority_exponent=choose([1.0, 0.0, 0.5]),
        remover=choose([OLDEST_FIRST, *REMOVERS]),
        with_replacement=choose([False, False, True]),
        limiter=choose([MinimumChunks(minimum_count)] * 3 + [ratio]),
    )


@st.composite
def configs(draw: st.DrawFn) -> BufferConfig:
    return make_config(lambda options: draw(st.sampled_from(options)))


class BufferMachine(RuleBasedStateMachine):
    """Feeds one buffer, and compares everything that can be seen with the naive model."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.group_counts: dict[str, int] = {}
        """Groups that each worker has sent before the one that it sends."""
        self.request_count = 0
        self.told_leases: list[str] = []
        self.disposed: list[Payload] = []
        self.steps_ended: dict[str, StepsEnd] = {}
        """What became of fragments, by payload; without those that are in the buffer unused."""
        self.callers_of_grant: set[int] = set()
        self.callers_in_line: list[CallerId] = []
        self.callers_of_tickets: list[CallerId] = []
        self.claimed: list[MemberKey] = []
        self.last_tickets: list[str] = []
        self.reservations: list[tuple[ReservationId, NaiveReservation]] = []
        """Those whose payloads the store has not answered for, whether they live or not."""
        self.base: bytes = encode_snapshot(Snapshot(BEGINNING, 0.0, ()))
        """The latest snapshot, as a journal keeps it; without buffers: the beginning."""
        self.all_entries: list[tuple[float, Entry]] = []
        self.entries_since_base: list[tuple[float, Entry]] = []

    def make_buffers(self, config: BufferConfig) -> BufferSet:
        """Make what is under test."""
        return BufferSet(random.Random(7), config, is_recording=True)

    def altered(self, buffers: BufferSet) -> BufferSet:
        """What is under test, new or recovered; a broken variant overrides this."""
        return buffers

    @initialize(config=configs(), run_lengths=st.lists(st.integers(0, 7), min_size=3, max_size=3))
    def begin(self, config: BufferConfig, run_lengths: list[int]) -> None:
        self.buffers = self.make_buffers(config)
        groups = config.assembly is AssemblyPolicy.GROUPS
        self.model: NaiveTickets = NaiveGroups(config) if groups else NaiveTickets(config)
        self.start_session("s0", None)
        for worker, length in zip(WORKERS, run_lengths, strict=True):
            self.append_run(worker, length, 1)

    # Inputs

    @rule(
        action=st.sampled_from(["repeat", "repeat", "repeat", "end and new", "new", "ended", "end"])
    )
    def change_session(self, action: str) -> None:
        match action:
            case "repeat":
                if self.model.session:
                    self.start_session(self.model.session, 9)
            case "ended":
                if self.model.ended_sessions:
                    self.start_session(self.model.ended_sessions[-1], None)
            case "end":
                self.end_session()
            case "end and new":
                self.end_session()
                self.start_session(self.new_session(), 1)
            case "new":
                self.start_session(self.new_session(), None)

    def new_session(self) -> str:
        return f"s{len(self.model.ended_sessions) + bool(self.model.session)}"

    def start_session(self, session: str, version: int | None) -> None:
        error = self.model.start(session, version)
        self.apply(start_session(session, version, buffer=B), error)

    def end_session(self) -> None:
        session = self.model.session or "s0"
        self.model.end(session)
        self.apply(end_session(session, buffer=B))

    @rule(worker=st.sampled_from(WORKERS), length=st.integers(1, 6), size=st.integers(1, 2))
    def append_run(self, worker: str, length: int, size: int) -> None:
        """What a healthy worker does."""
        for _ in range(length):
            self.append(worker, 0, 0, 0, size, False, None)

    @rule(
        session=st.sampled_from([None, None, None, None, "s0"]),
        delta=st.sampled_from([0, 1, 1, 1, 2, -1]),
        has_weights=st.booleans(),
    )
    def publish(self, session: str | None, delta: int, has_weights: bool) -> None:
        session = session or self.model.session or "s0"
        version = max(0, self.model.version + delta)
        weights = make_fragment().payload if has_weights else None
        held_before = len(self.model.held)
        was_before = (self.model.version, self.model.current_weights)
        error = self.model.publish(session, version, weights)
        answer = self.apply(publish_model(version, weights, session_id=session, buffer=B), error)
        if error is None:
            is_change = (self.model.version, self.model.current_weights) != was_before
            assert answer.model_version == version
            assert answer.weights_taken == (is_change and has_weights)
            if not is_change:
                assert answer.evicted_chunk_count == 0
            assert answer.evicted_chunk_count <= held_before

    @rule(
        worker=st.sampled_from(WORKERS),
        step=st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, 9, -1, -2, -3, -9]),
        behind=st.sampled_from([0, 0, 0, 0, 1, 2, 3, -1]),
        spread=st.integers(0, 1),
        size=st.integers(1, 4),
        discontinuity=st.sampled_from([False, False, False, True]),
        session=st.sampled_from([None, None, None, None, None, None, "s0", "s1"]),
        priority=st.sampled_from([1.0, 1.0, 0.0, 0.25, 9.0]),
    )
    def append(
        self,
        worker: str,
        step: int,
        behind: int,
        spread: int,
        size: int,
        discontinuity: bool,
        session: str | None,
        priority: float = 1.0,
    ) -> None:
        version = max(0, self.model.version - behind)
        name, index = self.identity(worker, step, {})
        fragment = make_fragment(
            name,
            index,
            session_id=session or self.model.session or "s0",
            priority=priority,
            version=version,
            version_max=min(version + spread, max(version, self.model.version)),
            size_bytes=size,
            discontinuity=discontinuity,
            numbers=f'{{"reward":{size // 4}}}',
        )
        self.offer(fragment)

    def identity(self, worker: str, step: int, next_indices: dict[str, int]) -> tuple[str, int]:
        """A fragment that comes *step* after a worker's next; *next_indices* are of one call.

        In a buffer of groups a worker sends groups one after the other, members in any order.
        """
        if not isinstance(self.model, NaiveGroups):
            known = self.model.workers.get(worker)
            next_index = next_indices.get(worker, known.next_index if known else 0)
            index = max(0, next_index + step)
            next_indices[worker] = index + 1
            return worker, index
        name = f"{worker}{self.group_counts.get(worker, 0)}"
        group = self.model.workers.get(name)
        if group is not None and group.end and step <= 0:
            self.group_counts[worker] = self.group_counts.get(worker, 0) + 1
            name, group = f"{worker}{self.group_counts[worker]}", None
        size = self.model.config.fragments_per_chunk
        open_count = next_indices.get(name, len(group.open) if group else 0)
        next_indices[name] = open_count + 1
        # Every other group from the last member to the first; step 9 is no member at all.
        place = (open_count + step) % size
        if step == 9:
            return name, size
        return name, place if self.group_counts.get(worker, 0) % 2 else size - 1 - place

    @rule(
        workers=st.lists(st.sampled_from(WORKERS), min_size=2, max_size=6),
        steps=st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, -1]), min_size=6, max_size=6),
        behind=st.sampled_from([0, 0, 0, 1, 9]),
        size=st.integers(1, 3),
    )
    def append_together(self, workers: list[str], steps: list[int], behind: int, size: int) -> None:
        """Fragments of one call, of which each is judged after what those before it did."""
        next_indices: dict[str, int] = {}
        fragments, expected = [], []
        version = max(0, self.model.version - behind)
        for worker, step in zip(workers, steps, strict=False):
            name, index = self.identity(worker, step, next_indices)
            session_id = self.model.session or "s0"
            fragments.append(
                make_fragment(name, index, session_id=session_id, version=version, size_bytes=size)
            )
        if self.model.waiters:
            return  # What each lets them have is followed one by one, by `append`.
        for fragment in fragments:
            outcome = self.model.expect_append(fragment)
            if not isinstance(outcome, AdmissionOutcome):
                break
            self.model.append(fragment, outcome, self.now)
            expected.append(outcome)
            if outcome.asks_again:
                break
        if not expected:
            return
        answers = self.apply(AppendFragments(B, fragments))
        assert expected == [each.outcome for each in answers]

    @rule(
        workers=st.lists(st.sampled_from(WORKERS), min_size=1, max_size=6),
        steps=st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, -1]), min_size=6, max_size=6),
        age=st.sampled_from([0, 0, 0, 1, 9]),
        size=st.integers(1, 3),
        pick=PICKS,
        reserve_s=st.sampled_from([1.0, 4.0, 30.0]),
        twice=st.sampled_from([False, False, False, True]),
    )
    def offer_together(
        self,
        workers: list[str],
        steps: list[int],
        age: int,
        size: int,
        pick: int,
        reserve_s: float,
        twice: bool,
    ) -> None:
        """Fragments of one call whose payloads are still to be confirmed.

        What finds no room waits for it, or not.
        """
        next_indices = {name: tail.next_index for name, tail in self.model.tails.items()}
        if isinstance(self.model, NaiveGroups):
            next_indices = {
                name: len(self.model.reserved_members(name)) + (len(group.open) if group else 0)
                for name in self.model.tails
                for group in [self.model.workers.get(name)]
            }
        fragments: list[Fragment] = []
        for place, (worker, step) in enumerate(zip(workers, steps, strict=False)):
            name, index = self.identity(worker, step, next_indices)
            version = max(0, self.model.version - (age if place % 2 else 0))
            session_id = self.model.session or "s0"
            payload = fragments[-1].payload if twice and place == 2 else None
            fragments.append(
                make_fragment(
                    name,
                    index,
                    session_id=session_id,
                    version=version,
                    size_bytes=size,
                    payload=payload,
                    discontinuity=step == 1 and place % 2 == 0,
                )
            )
        lacks = self.offer_these(fragments, None, reserve_s)
        if lacks is not None and pick % 4:
            self.wait_for_room(*lacks, None, [0.5, 2.0, 20.0][pick % 3])

    def offer_these(
        self, fragments: list[Fragment], caller_id: CallerId | None, reserve_s: float
    ) -> tuple[Fragment, AdmissionOutcome] | None:
        """Offer fragments, and give the first that has to wait, with what it waits for."""
        expires_at = self.now + reserve_s
        reservation_count = len(self.model.reservations)
        expected = self.model.offer(fragments, caller_id, expires_at, self.now)
        command = Offer(B, fragments, caller_id, expires_at)
        if not isinstance(expected, list):
            self.apply(command, expected)
            return None
        offered = self.apply(command)
        got = [None if each is None else each.outcome for each in offered.answers]
        assert expected == got
        assert (offered.reservation_id is not None) == (None in expected)
        if len(self.model.reservations) > reservation_count:
            self.reservations.append((offered.reservation_id, self.model.reservations[-1]))
        last = expected[-1] if expected else None
        if last is None or not last.asks_to_wait:
            return None
        return fragments[len(expected) - 1], last

    def wait_for_room(
        self,
        fragment: Fragment,
        waits_for: AdmissionOutcome,
        caller_id: CallerId | None,
        wait_s: float,
    ) -> None:
        deadline_at = self.now + wait_s
        command = WaitForRoom(B, fragment, waits_for, deadline_at, caller_id)
        told = self.buffers.apply(command, now=self.now)
        assert caller_id is None or told == caller_id or not self.model.find_caller(caller_id)
        former = self.model.wait_for_room(fragment, waits_for, deadline_at, told)
        events = [each for each in self.buffers.take_events() if isinstance(each, RoomWaitEnded)]
        assert [each.caller_id for each in events] == ([] if former is None else [former])
        self.callers_in_line.append(told)

    @precondition(lambda self: self.model.line)
    @rule(pick=PICKS, reserve_s=st.sampled_from([1.0, 30.0]))
    def call_up(self, pick: int, reserve_s: float) -> None:
        """The caller with the turn offers at once; a refused one may wait on, or go."""
        naive = self.model.call_up()
        for number, caller_id in enumerate(self.buffers.call_up(now=self.now)):
            position = next(naive)
            assert position.caller_id == caller_id
            size_bytes = position.fragment.payload.size_bytes
            payload = make_fragment(size_bytes=size_bytes).payload
            fragment = dataclasses.replace(position.fragment, payload=payload)
            lacks = self.offer_these([fragment], caller_id, reserve_s)
            if lacks is not None:
                self.wait_for_room(*lacks, caller_id, 2.0)
            elif (pick + number) % 3 == 0:
                self.leave_line(caller_id, keeps_place=pick % 2 == 0)
        assert next(naive, None) is None, "one that has room was not called up"

    @precondition(lambda self: self.callers_in_line)
    @rule(pick=PICKS, keeps_place=st.booleans())
    def leave(self, pick: int, keeps_place: bool) -> None:
        """A caller's turn is over, or it has gone; perhaps it is not in the line any more."""
        self.leave_line(self.pick(self.callers_in_line[-4:], pick), keeps_place=keeps_place)

    def leave_line(self, caller_id: CallerId, *, keeps_place: bool) -> None:
        self.model.leave_line(caller_id, keeps_place, self.now)
        self.apply(LeaveQueue(B, caller_id, keeps_place))

    @precondition(lambda self: self.model.line)
    @rule(pick=PICKS, wait_s=st.sampled_from([0.5, 2.0, 20.0]), goes_on=st.booleans())
    def come_again(self, pick: int, wait_s: float, goes_on: bool) -> None:
        """An append that waits, or is to come again, waits once more, or with its next fragment."""
        position = self.pick(self.model.line, pick)
        fragment = position.fragment
        if goes_on:
            index = fragment.fragment_index + 1
            fragment = dataclasses.replace(fragment, fragment_index=index)
        caller_id = position.caller_id if pick % 2 else None
        self.wait_for_room(fragment, position.waits_for, caller_id, wait_s)

    @precondition(lambda self: self.reservations)
    @rule(pick=PICKS, missing=st.sets(st.integers(0, 5), max_size=2))
    def settle(self, pick: int, missing: set[int]) -> None:
        """The store has answered, in time or after the reservation ended; perhaps once more."""
        reservation_id, reservation = self.pick(self.reservations[-3:], pick)
        count = len(reservation.fragments)
        # What was deleted meanwhile is not there any more.
        gone = {payload.payload_id for payload in self.disposed}
        there = [
            place not in missing and fragment.payload.payload_id not in gone
            for place, fragment in enumerate(reservation.fragments)
        ]
        if self.model.waiters and count > 1:
            there = [False] * count  # What each lets them have is followed one by one.
        if pick % 5 == 0:
            there = there[:-1]
        expected = self.model.settle(reservation, there, self.now)
        answers = self.apply(Settle(B, reservation_id, there))
        got = [None if each is None else each.outcome for each in answers]
        assert expected == got, f"{reservation}, there: {there}"
        if pick % 4:
            self.reservations.remove((reservation_id, reservation))

    @precondition(lambda self: self.model.payload_ids())
    @rule(pick=PICKS)
    def append_payload_in_use(self, pick: int) -> None:
        payload_id = self.pick(self.model.payload_ids(), pick)
        session = self.model.session or "s0"
        self.offer(make_fragment("a", 10**6, session_id=session, payload=Payload(payload_id, 1)))

    def offer(self, fragment: Fragment) -> None:
        expected = self.model.expect_append(fragment)
        if not isinstance(expected, AdmissionOutcome):
            self.apply(AppendFragments(B, [fragment]), expected)
            return
        before = self.visible()
        worker = self.model.workers.get(fragment.worker_id)
        first = worker.judged.get(fragment.fragment_index) if worker else None
        is_forgotten = worker and fragment.fragment_index < worker.forgotten_below
        self.model.append(fragment, expected, self.now)
        (answer,) = self.apply(AppendFragments(B, [fragment]))
        assert answer.outcome is expected
        if expected is AdmissionOutcome.DUPLICATE:
            assert answer.first_outcome is (None if is_forgotten else first)
        if expected not in (AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE):
            assert self.visible() == before, "a refused fragment changed something"

    @rule(
        chunk_count=st.sampled_from([1, 1, 1, 1, 2, 2, 3, 4]),
        world_size=st.sampled_from([1, 1, 1, 2]),
        max_wait_s=st.sampled_from([0.0, 1.0, 4.0]),
        lease_s=st.sampled_from([None, None, 3.0]),
    )
    def fetch(
        self, chunk_count: int, world_size: int, max_wait_s: float, lease_s: float | None
    ) -> None:
        self.request_count += 1
        self.ask(
            Fetch(
                buffer=B,
                request_id=RequestId(f"r{self.request_count}"),
                fragment_count=chunk_count * self.model.config.fragments_per_chunk * world_size,
                deadline_at=self.now + max_wait_s,
                rank=0,
                world_size=world_size,
                lease_s=lease_s,
            )
        )

    @rule(chunk_count=st.sampled_from([1, 1, 2]), mode=st.sampled_from(ReleaseMode))
    def learn(self, chunk_count: int, mode: ReleaseMode) -> None:
        """What a healthy learner does."""
        reported_count = len(self.told_leases)
        self.fetch(chunk_count, 1, 0.0, None)
        if len(self.told_leases) > reported_count:
            self.release(-1, mode)

    @precondition(lambda self: self.request_count)
    @rule(
        pick=PICKS,
        rank=st.integers(0, 1),
        max_wait_s=st.sampled_from([0.0, 2.0]),
        mismatch=st.sampled_from([0, 0, 0, 0, 1]),
    )
    def fetch_again(self, pick: int, rank: int, max_wait_s: float, mismatch: int) -> None:
        """A retry, or another rank of the same request."""
        known = [*self.model.waiters, *self.model.grants, *self.model.ended]
        if not known:
            return
        request = self.pick(known, pick)
        unit = self.model.config.fragments_per_chunk * request.world_size
        self.ask(
            Fetch(
                buffer=B,
                request_id=request.request_id,
                fragment_count=request.fragment_count + mismatch * unit,
                deadline_at=self.now + max_wait_s,
                rank=min(rank, request.world_size - 1),
                world_size=request.world_size,
            )
        )

    def ask(self, fetch: Fetch) -> None:
        expected = self.model.expect_fetch(fetch, self.now)
        if not isinstance(expected, str):
            self.apply(fetch, expected)
            return
        try:
            caller_id = self.buffers.apply(fetch, now=self.now)
        except DomainError as error:
            raise AssertionError(f"expected {expected}, got {error!r}") from error
        events = self.buffers.take_events()
        if expected == "elapsed":
            [event] = events
            assert isinstance(event, WaitElapsed)
            assert event.caller_id == caller_id
            assert event.reason
        elif expected == "repeated":
            [event] = events
            grant = self.model.find_grant(fetch.request_id)
            assert grant is not None
            self.check_told(event, caller_id, grant)
        else:
            self.model.wait(fetch, caller_id)
            assert bool(events) == (expected == "granted")
            self.follow(events)

    @precondition(lambda self: self.model.waiters)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        callers = [c.caller_id for w in self.model.waiters for c in w.callers]
        caller_id = self.pick(callers, pick)
        self.model.remove_caller(caller_id)
        self.apply(CancelRequest(B, caller_id))

    # Tickets

    @rule(
        count=st.integers(1, 2),
        max_wait_s=st.sampled_from([0.0, 0.0, 2.0]),
        lease_s=st.sampled_from([1.0, 4.0, 4.0]),
    )
    def take_tickets(self, count: int, max_wait_s: float, lease_s: float) -> None:
        self.request_count += 1
        self.ask_tickets(f"t{self.request_count}", count, max_wait_s, lease_s)

    @precondition(lambda self: self.model.tickets)
    @rule(pick=PICKS)
    def take_tickets_again(self, pick: int) -> None:
        """A retry of a request that was given tickets, or that waits."""
        known = [each.request_id for each in self.model.tickets]
        known += [each.request_id for each in self.model.ticket_waiters]
        self.ask_tickets(self.pick(known, pick), 1, 1.0, 4.0)

    def ask_tickets(self, request_id: str, count: int, max_wait_s: float, lease_s: float) -> None:
        take = TakeTickets(
            B,
            request_id=RequestId(request_id),
            ticket_count=count,
            deadline_at=self.now + max_wait_s,
            lease_s=lease_s,
        )
        groups = self.model
        expected = groups.expect_tickets(take)
        if not isinstance(expected, str):
            self.apply(take, expected)
            return
        caller_id = self.buffers.apply(take, now=self.now)
        events = self.buffers.take_events()
        if expected == "repeated":
            [event] = events
            assert isinstance(event, TicketsTaken)
            alike = [each for each in groups.tickets if each.request_id == request_id]
            for ticket in alike:
                ticket.reported_count += 1
            named = [each.group for each in alike]
            assert (caller_id, named) == (event.caller_id, list(event.groups))
            return
        groups.wait_for_ticket(take, caller_id)
        self.follow(events)

    def ticket_group(self, pick: int) -> str:
        """The group of a ticket, that there is or was."""
        held = [each.group for each in self.model.tickets]
        return self.pick([*held, *held, *held, "ticket-1", "ticket-99", "a0"], pick)

    @rule(pick=PICKS, lease_s=st.sampled_from([None, None, 2.0]))
    def renew_ticket(self, pick: int, lease_s: float | None) -> None:
        name = self.ticket_group(pick)
        error = self.model.renew_ticket(name, lease_s, self.now)
        self.apply(RenewTicket(B, WorkerId(name), lease_s), error)

    @rule(pick=PICKS, member=st.sampled_from([None, 0, 1, 2]))
    def give_back_ticket(self, pick: int, member: int | None) -> None:
        name = self.ticket_group(pick)
        error = self.model.give_back_ticket(name, member, self.now)
        self.apply(GiveBackTicket(B, WorkerId(name), member), error)

    @precondition(lambda self: isinstance(self.model, NaiveGroups))
    @rule(pick=PICKS)
    def report_undelivered_ticket(self, pick: int) -> None:
        assert isinstance(self.model, NaiveGroups)
        name = self.ticket_group(pick)
        self.model.undo_ticket(name, self.now)
        self.apply(UndeliveredTicket(B, WorkerId(name)))

    @precondition(lambda self: isinstance(self.model, NaiveGroups))
    @rule(pick=PICKS, member=st.integers(0, 2), behind=st.sampled_from([0, 0, 0, 1, 3]))
    def append_to_ticket(self, pick: int, member: int, behind: int) -> None:
        version = max(0, self.model.version - behind)
        member = min(member, self.model.config.fragments_per_chunk - 1)
        name, session = self.ticket_group(pick), self.model.session or "s0"
        self.offer(make_fragment(name, member, session_id=session, version=version))

    @precondition(lambda self: isinstance(self.model, NaiveGroups))
    @rule(count=st.integers(0, 4), ended=st.integers(0, 9))
    def claim(self, count: int, ended: int) -> None:
        """Claim members after the oldest claims have ended, and before others end."""
        assert isinstance(self.model, NaiveGroups)
        held = self.buffers[B]
        # A buffer that changes its kind while it is empty forgets its claims.
        self.claimed = self.claimed if held.claimed_count else []
        over, self.claimed = self.claimed[:ended], self.claimed[ended:]
        held.end_claim(over)
        expected = self.model.unclaimed(self.claimed)
        taken = held.claim(Wanted("reward"), count, lambda _: True, lambda _: False)
        keys = [(each[0].fragment.worker_id, each[0].fragment.fragment_index) for each in taken]
        assert [name for name, _ in expected[:count]] == [name for name, _ in keys]
        assert {*keys} <= {*expected}
        self.claimed += keys
        assert held.claimed_count == len(self.claimed) == len({*self.claimed})

    @precondition(lambda self: self.model.ticket_waiters)
    @rule(pick=PICKS)
    def cancel_tickets(self, pick: int) -> None:
        callers = [c.caller_id for w in self.model.ticket_waiters for c in w.callers]
        caller_id = self.pick(callers, pick)
        self.model.remove_ticket_caller(caller_id)
        self.apply(CancelRequest(B, caller_id))

    def follow_tickets(self, event: TicketsTaken | TicketWaitElapsed) -> None:
        if isinstance(event, TicketWaitElapsed):
            assert self.model.free_tickets <= 0, "elapsed beside a free ticket"
            caller = self.model.remove_ticket_caller(event.caller_id)
            assert caller is not None
            assert caller.deadline_at <= self.now
            assert event.reason
            return
        if event.caller_id not in self.callers_of_tickets:
            head = self.model.ticket_waiters[0]
            self.callers_of_tickets = [each.caller_id for each in head.callers]
            assert self.model.free_tickets > 0, "gave what was not free"
            series = event.groups[0].rpartition("-")[0]
            self.last_tickets = self.model.give_tickets(self.now, series)
        assert event.caller_id == self.callers_of_tickets.pop(0), "overtaken"
        assert self.last_tickets == list(event.groups)

    @rule()
    def cancel_a_caller_that_does_not_wait(self) -> None:
        self.apply(CancelRequest(B, CallerId(10**9)))

    @precondition(lambda self: self.told_leases)
    @rule(pick=PICKS, mode=st.sampled_from(ReleaseMode))
    def release(self, pick: int, mode: ReleaseMode) -> None:
        lease_id = self.pick(self.told_leases[-4:], pick)
        error = self.model.release(lease_id, mode)
        self.apply(ReleaseLease(B, lease_id, mode), error)

    @precondition(lambda self: self.told_leases)
    @rule(pick=PICKS, lease_s=st.sampled_from([None, 0.5, 6.0]))
    def renew(self, pick: int, lease_s: float | None) -> None:
        lease_id = self.pick(self.told_leases[-4:], pick)
        error = self.model.renew(lease_id, lease_s, self.now)
        self.apply(RenewLease(B, lease_id, lease_s), error)

    @precondition(lambda self: self.told_leases)
    @rule(pick=PICKS)
    def report_undelivered(self, pick: int) -> None:
        lease_id = self.pick(self.told_leases[-2:], pick)
        self.model.undo(lease_id)
        self.apply(UndeliveredGrant(B, lease_id))

    @precondition(lambda self: self.model.payload_ids())
    @rule(picks=st.lists(PICKS, max_size=3))
    def drop_payloads(self, picks: list[int]) -> None:
        known = [*self.model.payload_ids(), "f" * 32]
        lost = [self.pick(known, pick) for pick in picks]
        dropped = self.model.drop(lost)
        assert self.apply(DropPayloads(B, tuple(lost))) == dropped

    @rule(
        updates=st.lists(st.tuples(PICKS, st.sampled_from(PRIORITIES)), max_size=4),
        deleted=st.lists(PICKS, max_size=2),
    )
    def update_priorities(self, updates: list[tuple[int, float]], deleted: list[int]) -> None:
        """Of chunks of now and of any time before."""
        known = [*range(self.model.chunk_count + 1), *(c.number for c in self.model.held)]
        priorities = [(self.pick(known, pick), priority) for pick, priority in updates]
        gone = [self.pick(known, pick) for pick in deleted if pick % 8 == 0]
        expected = self.model.update_priorities(priorities, gone)
        command = UpdatePriorities(B, tuple(priorities), tuple(gone))
        if isinstance(expected, tuple):
            assert self.apply(command) == expected
        else:
            self.apply(command, expected)

    @rule(config=configs(), keeps_length=st.booleans())
    def update(self, config: BufferConfig, keeps_length: bool) -> None:
        assembly = self.model.config.assembly
        name = config.drop_equal if assembly is AssemblyPolicy.GROUPS else ""
        by = self.model.config.stale_by
        config = dataclasses.replace(config, assembly=assembly, drop_equal=name, stale_by=by)
        if keeps_length:
            fragments_per_chunk = self.model.config.fragments_per_chunk
            config = dataclasses.replace(
                config,
                fragments_per_chunk=fragments_per_chunk,
                group_min=min(config.group_min, fragments_per_chunk),
            )
        refused = self.model.update(config)
        if not isinstance(refused, list):
            self.apply(UpdateBuffer(B, config), refused)
            return
        self.model.discard_silent(self.now)
        self.buffers.apply(UpdateBuffer(B, config), now=self.now)
        events = self.buffers.take_events()
        refusals = [event for event in events if isinstance(event, RequestRefused)]
        assert [event.caller_id for event in refusals[: len(refused)]] == refused
        told = refusals[: len(refused)]
        self.follow([event for event in events if event not in told])

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 10.0]), is_late=st.booleans())
    def advance_time(self, seconds: float, is_late: bool) -> None:
        """Let time pass, either stopping at every timer or waking up late for all of them."""
        self.advance(seconds, is_late=is_late)

    def advance(self, seconds: float, *, is_late: bool) -> None:
        end_at = self.now + seconds
        while not is_late and (timer := self.buffers.next_timer()) is not None and timer < end_at:
            self.pass_to(timer)
        self.pass_to(end_at)

    def pass_to(self, instant: float) -> None:
        assert instant > self.now, "a timer in the past"
        self.now = instant
        self.model.expire(instant)
        ended = self.model.end_waits(instant)
        self.buffers.handle_timer(now=instant)
        events = self.buffers.take_events()
        told = [each for each in events if isinstance(each, RoomWaitEnded)]
        assert ended == [(each.caller_id, each.outcome) for each in told]
        self.follow([each for each in events if each not in told])
        timer = self.buffers.next_timer()
        assert timer is None or timer > instant, "I6"
        late = [c for w in self.model.waiters for c in w.callers if c.deadline_at <= instant]
        assert late == [], "a waiter waits beyond its deadline"

    @rule()
    def take_snapshot(self) -> None:
        self.keep_entries()
        self.base = encode_snapshot(Snapshot(BEGINNING, self.now, self.buffers.snapshot()))
        self.entries_since_base = []

    @rule(goes_back_to_the_beginning=st.booleans())
    def crash_and_recover(self, goes_back_to_the_beginning: bool) -> None:
        """Replay what was written down, compare, and go on with the replayed buffer."""
        self.keep_entries()
        if goes_back_to_the_beginning:
            recovered = BufferSet.restore((), random.Random(7), is_recording=True)
            entries = self.all_entries
        else:
            base = decode_snapshot(self.base).buffers
            recovered = BufferSet.restore(base, random.Random(7), is_recording=True)
            entries = self.entries_since_base
        recovered.replay(decode_turn(encode_turn(entries)))
        recovered.handle_timer(now=self.now)
        assert recovered.take_entries() == [], "a replay was recorded"
        recovered.take_events()
        recovered.check_invariants()
        assert recovered.snapshot() == self.buffers.snapshot(), "replayed to another state"
        self.buffers = recovered
        self.claimed = []
        self.model.lose_callers()
        self.reservations, self.callers_in_line = [], []

    def keep_entries(self) -> None:
        entries = self.buffers.take_entries()
        self.all_entries.extend(entries)
        self.entries_since_base.extend(entries)

    @staticmethod
    def pick(options: Sequence[Any], pick: int) -> Any:
        return options[pick % len(options)]

    # What must hold

    def apply(self, input: Input[Any], error: type[DomainError] | None = None) -> Any:
        """Apply an input that must raise, or must not, and follow its events in the model."""
        if error is None:
            answer = self.buffers.apply(input, now=self.now)
            self.follow(self.buffers.take_events())
            return answer
        before = self.visible()
        raised = None
        try:
            self.buffers.apply(input, now=self.now)
        except DomainError as caught:
            raised = caught
        assert type(raised) is error
        assert self.buffers.take_events() == []
        assert self.visible() == before, "a refused input changed something"
        return None

    def visible(self) -> object:
        """Everything that can be seen, but for the counters of what changed nothing."""
        description = self.buffers.describe(B, now=self.now)
        counters = {k: v for k, v in description.counters.items() if k not in EPHEMERAL}
        fields = [getattr(description, name) for name in description.__slots__]
        return [field for field in fields if field != description.counters], counters

    def follow(self, events: Sequence[Event]) -> None:
        """Do in the model what the events say happened, objecting to what must not."""
        refused: list[CallerId] = []
        for event in events:
            match event:
                case FetchGranted(caller_id=caller_id):
                    self.follow_grant(event, caller_id)
                case WaitElapsed(caller_id=caller_id):
                    assert not self.model.may_grant_head(), "elapsed beside a grantable chunk"
                    caller = self.model.remove_caller(caller_id)
                    assert caller is not None
                    assert caller.deadline_at <= self.now
                case RequestRefused(caller_id=caller_id, error=error):
                    if not refused:
                        refused = self.model.refuse_head_beyond_bytes()
                    assert isinstance(error, FetchExceedsCapacityError)
                    assert caller_id == refused.pop(0)
                case RoomWaitEnded():
                    raise AssertionError("a wait for room has ended for no reason")
                case PayloadsDisposable(payloads=payloads):
                    self.disposed.extend(payloads)
                case StepsEnded(end=end, fragments=fragments):
                    for fragment in fragments:
                        self.follow_steps(fragment.payload.payload_id, end)
                case TicketsTaken() | TicketWaitElapsed():
                    self.follow_tickets(event)
                case _:
                    pass
        if self.model.ticket_waiters:
            assert self.model.free_tickets <= 0, "a request waits beside a free ticket"
        self.check_steps()
        assert not refused, "some of those who asked for the same were not told"
        assert not self.model.may_grant_head(), "somebody waits beside grantable chunks"

    def follow_steps(self, payload_id: str, end: StepsEnd) -> None:
        before = self.steps_ended.pop(payload_id, None)
        assert before is (StepsEnd.TRAINED if end is StepsEnd.RETURNED else None), "ended twice"
        if end is not StepsEnd.RETURNED:
            self.steps_ended[payload_id] = end

    def check_steps(self) -> None:
        """Check that each admitted fragment has one end, or is in the buffer without a use."""
        state = snapshot_of(self.buffers, B)
        held = [chunk for chunk in state.chunks if chunk.state is ChunkState.HELD]
        unused = [each for chunk in held if not chunk.use_count for each in chunk.fragments]
        unused += [each for chunk in state.open_chunks for each in chunk.fragments]
        assert not {each.payload.payload_id for each in unused} & self.steps_ended.keys()
        admitted = self.buffers.describe(B, now=self.now).counters["fragments_admitted"]
        assert admitted == len(self.steps_ended) + len(unused), "a fragment without an end"

    def follow_grant(self, event: FetchGranted, caller_id: int) -> None:
        ids = [(w.request_id, c.caller_id) for w in self.model.waiters for c in w.callers]
        request_id = next((request for request, caller in ids if caller == caller_id), None)
        if request_id is not None:
            assert request_id == self.model.waiters[0].request_id, "the head was overtaken"
            self.callers_of_grant = {c.caller_id for c in self.model.waiters[0].callers}
            prepared = self.buffers[B].prepared(request_id)
            taken = snapshot_of(self.buffers, B)
            grants = [*taken.live_grants, *taken.ended_grants]
            [real] = [grant for grant in grants if grant.request_id == request_id]
            numbers = [granted.chunk_id for granted in real.chunks]
            lease_ids = [lease.lease_id for lease in real.leases]
            held = {chunk.number: chunk for chunk in self.model.held}
            for granted in prepared:
                chunk = held[granted.chunk_id]
                assert granted.priority == chunk.priority
                assert granted.probability == pytest.approx(self.model.probability(chunk))
                assert granted.population == len(held)
            self.last_grant = self.model.grant(numbers, lease_ids, self.now)
        assert caller_id in self.callers_of_grant
        self.check_told(event, caller_id, self.last_grant)

    def check_told(self, event: Event, caller_id: int, grant: NaiveGrant) -> None:
        """Check one caller's share against the model's grant."""
        assert isinstance(event, FetchGranted)
        assert event.caller_id == caller_id
        [lease] = [lease for lease in grant.leases if lease.lease_id == event.lease_id]
        assert event.expires_at == lease.expires_at
        assert event.first_delivery == (lease.told == 0)
        lease.told += 1
        expected = [fragment for chunk in lease.chunks for fragment in chunk.fragments]
        assert [granted.fragment for granted in event.fragments] == expected
        before = [each for other in grant.leases[: lease.rank] for each in other.chunks]
        start = sum(len(chunk.fragments) for chunk in before)
        shares = self.buffers[B].prepared(grant.request_id)
        assert event.fragments == shares[start : start + len(expected)]
        self.told_leases.append(event.lease_id)

    @invariant()
    def nothing_is_lost_or_left(self) -> None:
        """Every payload is referred to, or was told disposable exactly once."""
        if not hasattr(self, "model"):
            return
        told = [payload.payload_id for payload in self.disposed]
        assert len(set(told)) == len(told), "disposed twice"
        assert sorted(told) == sorted(payload.payload_id for payload in self.model.disposed)

    @invariant()
    def looks_like_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        self.buffers.check_invariants()
        model, seen = self.model, self.buffers.describe(B, now=self.now)
        opened = [worker.open for worker in model.workers.values() if worker.open]
        by_staleness: dict[int, int] = {}
        for chunk in model.held:
            staleness = model.version - chunk.version
            by_staleness[staleness] = by_staleness.get(staleness, 0) + 1
        expected = {
            "chunk_count": len(model.held),
            "open_chunk_count": len(opened),
            "open_fragment_count": sum(map(len, opened)),
            "fragment_count": sum(len(chunk.fragments) for chunk in model.held),
            "payload_bytes": model.referred_bytes,
            "weights_bytes": sum(weights.size_bytes for _, weights in model.weights),
            "lease_count": len(model.live_leases),
            "waiter_count": len(model.waiters),
            "worker_count": len(model.workers),
            "chunk_count_by_staleness": by_staleness,
        }
        assert {name: getattr(seen, name) for name in expected} == expected
        assert seen.model.session_id == model.session
        assert seen.model.model_version == (model.version if model.session else None)
        assert seen.model.weights == model.current_weights
        assert list(seen.chunk_count_by_staleness) == sorted(by_staleness)
        held = held_chunks(self.buffers, B)
        expected_held = [(c.number, c.uses, c.priority) for c in model.held]
        assert [(c.chunk_id, c.use_count, c.priority) for c in held] == expected_held
        queue = self.buffers._shared.states[B].queue  # noqa: SLF001 - shown nowhere
        line = [
            (place, None if each.is_kept else each.caller_id, each.is_called)
            for place, each in queue._positions.items()  # noqa: SLF001 - shown nowhere
        ]
        assert line == [(identity(p.fragment), p.caller_id, p.is_called) for p in model.line]
        self.tickets_look_like_the_model(model)
        if isinstance(model, NaiveGroups):
            self.looks_like_the_model_of_groups(model)
        uses = seen.counters["uses"] - seen.counters["chunks_returned"]
        assert uses >= 0

    def looks_like_the_model_of_groups(self, model: NaiveGroups) -> None:
        ends = self.buffers[B].group_ends(0, 1000)
        assert model.ends() == {each.group: (each.reason.value, each.member_count) for each in ends}
        assert model.end_count == self.buffers.group_end_count(B)
        counters = self.buffers.describe(B, now=self.now).counters
        names = [name for name in counters if name.startswith("groups_")]
        assert model.end_count == sum(counters[name] for name in names)

    def tickets_look_like_the_model(self, model: NaiveTickets) -> None:
        counters = self.buffers.describe(B, now=self.now).counters
        taken = snapshot_of(self.buffers, B)
        held = [
            (each.group, each.request_id, each.model_version, each.expires_at, each.given_back)
            for each in taken.tickets
        ]
        assert held == [
            (
                each.group,
                each.request_id,
                each.version,
                each.expires_at,
                tuple(sorted(each.given_back)),
            )
            for each in model.tickets
        ]
        ended = {name: counters[f"tickets_ended_{name}"] for name in model.tickets_ended}
        assert ended == dict(model.tickets_ended)
        assert counters["tickets_given"] == len(held) + sum(ended.values()), "one end each"

    def teardown(self) -> None:
        """At the end of everything, nothing is left."""
        if not hasattr(self, "model"):
            return
        for waiter in list(self.model.waiters):
            for caller in list(waiter.callers):
                if self.model.remove_caller(caller.caller_id):
                    self.apply(CancelRequest(B, caller.caller_id))
        for waiter in list(self.model.ticket_waiters):
            for caller in list(waiter.callers):
                self.apply(CancelRequest(B, caller.caller_id))
            waiter.callers.clear()
        self.model.ticket_waiters.clear()
        self.model.end(self.model.session)
        if self.buffers[B].model.session_id:
            self.apply(EndSession(B, self.buffers[B].model.session_id))
        self.advance(100.0, is_late=False)
        assert self.model.reservations == []
        assert [each for each in self.model.line if not each.is_called] == []
        for caller_id in self.callers_in_line:
            self.leave_line(caller_id, keeps_place=False)
        seen = self.buffers.describe(B, now=self.now)
        left = (seen.chunk_count, seen.payload_bytes, seen.weights_bytes, seen.worker_count)
        assert left == (0, 0, 0, 0)
        assert (seen.lease_count, seen.waiter_count) == (0, 0)
        assert self.buffers.next_timer() is None
        admitted = seen.counters["fragments_admitted"]
        discarded = sum(
            count for name, count in seen.counters.items() if name.startswith("fragments_discarded")
        )
        closed = seen.counters["chunks_closed"]
        evicted = sum(
            count for name, count in seen.counters.items() if name.startswith("chunks_evicted")
        )
        assert closed == evicted, "a chunk left without a reason, or with two"
        assert admitted == discarded + self.model.closed_fragment_count
        self.nothing_is_lost_or_left()
