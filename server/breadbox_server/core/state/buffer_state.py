"""All that one buffer knows, and facts that follow from it; `buffer` lists the invariants."""

import random
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final, TypedDict

from breadbox_server.core.limiters import Flow, make_limiter
from breadbox_server.core.model.config import (
    AssemblyPolicy,
    BufferConfig,
    FullPolicy,
    StaleBy,
    StalePolicy,
)
from breadbox_server.core.model.counters import (
    FRAGMENTS_DISCARDED,
    GROUPS_ENDED,
    TICKETS_ENDED,
    FlowMeter,
    new_counters,
)
from breadbox_server.core.model.description import QuarantinedFragment
from breadbox_server.core.model.entries import Entry
from breadbox_server.core.model.events import (
    DiscardReason,
    Event,
    EvictionReason,
    FragmentsDiscarded,
    GroupEnded,
    PayloadsDisposable,
    StepsEnd,
    StepsEnded,
    TicketEnd,
    TicketsEnded,
)
from breadbox_server.core.model.ids import (
    BufferName,
    CallerId,
    ModelVersion,
    PayloadId,
    ReservationId,
)
from breadbox_server.core.model.inputs import VERSION_OF, Fragment, GroupEndReason
from breadbox_server.core.pacing import Reserved, awaited, must_wait
from breadbox_server.core.samplers import make_draw_order, make_remover
from breadbox_server.core.state.assembly import Assembly
from breadbox_server.core.state.grants import LeaseBook, Waiter, WaiterQueue
from breadbox_server.core.state.groups import Groups
from breadbox_server.core.state.holdings import ChunkHoldings
from breadbox_server.core.state.payloads import PayloadLedger
from breadbox_server.core.state.room import Room
from breadbox_server.core.state.room_queue import RoomQueue
from breadbox_server.core.state.session import CurrentModel
from breadbox_server.core.state.tickets import Tickets, TicketWaiter

QUARANTINED_MAX: Final = 16
"""Fragments in quarantine that are named; how many chunks there were is counted."""


class _Pace(TypedDict):
    """What `pacing` judges by, besides what is under way."""

    newest: ModelVersion
    version_min: int
    per_version: int
    spare: int


class Shared:
    """What the buffers of one set have in common."""

    def __init__(self, *, is_recording: bool) -> None:
        self.states: dict[BufferName, BufferState] = {}
        self.events: list[Event] = []
        self.entries: list[tuple[float, Entry]] = []
        """What a journal must hold, with its time."""
        self.is_recording = is_recording
        self.caller_count = 0
        """Callers that ever got an id, which is unique among all buffers."""
        self.reservation_ids = map(ReservationId, count(1))
        self.lease_salt = 0
        """Makes ids of leases, and names of groups with tickets, others than those of any other
        process that had the same books.
        """

    def record(self, entry: Entry, now: float) -> None:
        """Write down a decision that a journal must hold."""
        if self.is_recording:
            self.entries.append((now, entry))

    def next_caller_id(self) -> CallerId:
        """Return an id that no caller has had."""
        self.caller_count += 1
        return CallerId(self.caller_count)

    def refers_to(self, payload_id: PayloadId) -> bool:
        """Return whether any buffer refers to a payload, or has room reserved for it."""
        for each in self.states.values():
            if payload_id in each.payloads.owners or payload_id in each.room.payload_ids:
                return True
        return False


class BufferState:
    """The parts of one buffer."""

    def __init__(
        self, name: BufferName, config: BufferConfig, *, draw_seed: int, shared: Shared
    ) -> None:
        self.name = name
        self.config = config
        self.draw_seed = draw_seed
        self.draw_count = 0
        self.shared = shared
        self.events = shared.events
        self.counters = new_counters()
        self.payloads = PayloadLedger()
        self.model = CurrentModel(self.payloads)
        self.version_of = VERSION_OF[config.stale_by]
        self.meter = FlowMeter()
        self.room = Room()
        self.assembly = self.make_assembly()
        self.holdings = ChunkHoldings(
            name,
            make_draw_order(config),
            make_remover(config.remover, config.priority_exponent),
            removal_seed=draw_seed,
            payloads=self.payloads,
            meter=self.meter,
            counters=self.counters,
            events=self.events,
            note_unused=self.note_unused,
            by_newest=config.stale_by is StaleBy.NEWEST,
        )
        self.limiter = make_limiter(config.limiter)
        self.waiters = WaiterQueue[Waiter]()
        self.ticket_waiters = WaiterQueue[TicketWaiter]()
        self.queue = RoomQueue()
        self.leases = LeaseBook()
        self.quarantined: deque[QuarantinedFragment] = deque(maxlen=QUARANTINED_MAX)
        self._rng = random.Random()

    def make_assembly(self) -> Assembly:
        """Make an empty assembly of the kind that the limits say."""
        groups = self.config.assembly is AssemblyPolicy.GROUPS
        self.room.in_any_order = groups
        size, version_of = self.config.fragments_per_chunk, self.version_of
        tickets = Tickets(self._note_tickets_ended)
        assembly = Assembly(size, version_of, tickets)
        if groups:
            assembly = Groups(
                *(size, version_of, tickets, self._note_group_end, lambda: self.config.drop_equal),
                lambda fragments: self.discard(fragments, DiscardReason.WORKER_SILENT),
                self.config.parts_of_complete,
            )
        self.payloads.on_free = assembly.note_free
        return assembly

    def _note_tickets_ended(self, end: TicketEnd, count: int) -> None:
        self.counters[TICKETS_ENDED[end]] += count
        self.events.append(TicketsEnded(self.name, end, count))

    def _note_group_end(self, reason: GroupEndReason) -> None:
        self.counters[GROUPS_ENDED[reason]] += 1
        self.events.append(GroupEnded(self.name, reason))

    def note_unused(self, fragments: Sequence[Fragment], reason: EvictionReason) -> None:
        """Take note of the fragments of chunks that left without a use."""
        self.assembly.note_unused(fragments, reason)

    @property
    def version_min(self) -> int:
        """Oldest version that is fresh; not positive while every version is."""
        version = self.model.version
        if version is None or self.config.stale is StalePolicy.KEEP or self.config.keeps_rows:
            return 0
        return version - self.config.staleness_max

    @property
    def is_empty(self) -> bool:
        """Whether no fragment is open, held, retained or under a lease."""
        return (
            len(self.holdings.table.held) == 0
            and not self.assembly.open
            and not self.assembly.tickets.by_group
            and self.leases.live_count == 0
            and self.holdings.subscriptions.retained_count == 0
        )

    @property
    def flow(self) -> Flow:
        """What the limiter judges by."""
        meter = self.meter
        return Flow(len(self.holdings.table.held), meter.inserted_count, meter.delivered_count)

    @property
    def flow_ahead(self) -> Flow:
        """The same, once all fragments that are reserved are admitted."""
        flow, more = self.flow, self.room.place_count
        return Flow(flow.held_count + more, flow.inserted_count + more, flow.delivered_count)

    @property
    def taken_places(self) -> int:
        """Places taken where producers wait, and those reserved."""
        return self.holdings.place_count + self.room.place_count

    @property
    def taken_bytes(self) -> int:
        """Bytes referred to, and those reserved where producers wait: elsewhere chunks give way."""
        blocks = self.config.full_policy is FullPolicy.BLOCK
        return self.payloads.referred_bytes + (self.room.size_bytes if blocks else 0)

    def may_grant(self, chunk_count: int, world_size: int) -> bool:
        """Whether a request could be granted now if it were the first in the queue."""
        return (
            self.holds(chunk_count)
            and self.has_leases_for(world_size)
            and self.limiter.may_draw(self.flow, chunk_count)
            and not self._must_wait(chunk_count)
        )

    def _must_wait(self, chunk_count: int) -> bool:
        """Return whether a fetch that could be granted waits for what is under way; O(versions)."""
        terms = self._pace(chunk_count)
        return terms is not None and must_wait(self.assembly.reserved_counts(), **terms)

    def awaited(self, chunk_count: int) -> Reserved | None:
        """Return the group, or ticket, for which a fetch that could be granted waits, or None.

        O(what is under way) if it waits.
        """
        terms = self._pace(chunk_count)
        if terms is None or not must_wait(self.assembly.reserved_counts(), **terms):
            return None
        return awaited(self.assembly.reserved(), **terms)

    def _pace(self, chunk_count: int) -> _Pace | None:
        """Return by what a fetch that could be granted waits for what is under way, if it may.

        No fetch waits so while an append waits for room, or while only a fetch makes a place: what
        it waits for may need that.
        """
        config, version = self.config, self.model.version
        if config.stale is not StalePolicy.WAIT or version is None or self.queue.waits_for():
            return None
        blocks = config.full_policy is FullPolicy.BLOCK
        if blocks and self.holdings.kept_count >= config.capacity_chunks:
            return None
        per_version = config.groups_per_version
        return _Pace(
            newest=self.holdings.table.newest_drawn(chunk_count),
            version_min=self.version_min,
            per_version=per_version,
            spare=max(0, per_version - self.meter.version_delivered_count - chunk_count),
        )

    def holds(self, chunk_count: int) -> bool:
        """Whether so many chunks can be drawn; O(chunks asked for) with replacement, else O(1)."""
        table, config = self.holdings.table, self.config
        if chunk_count <= len(table.held) or not config.with_replacement:
            return chunk_count <= len(table.held)
        uses_left = sum([config.uses_max - chunk.use_count for chunk in table.held.values()])
        return chunk_count <= uses_left

    def has_leases_for(self, world_size: int) -> bool:
        """Whether as many more leases may live."""
        return self.leases.live_count + world_size <= self.config.leases_max

    def bytes_beyond(self, chunk_count: int) -> int:
        """Return the bytes that so many chunks need, if bytes will never let them be held; else 0.

        Judged by the smallest chunk held, once no other like it fits: the first few say little.
        O(chunks held) then, else O(1).
        """
        if self.config.with_replacement:
            chunk_count = -(-chunk_count // self.config.uses_max)
        held_count, bytes_max = len(self.holdings.table.held), self.config.capacity_bytes
        referred_bytes = self.payloads.referred_bytes
        # Held chunks have at most these bytes on average, so the smallest has no more.
        average_bytes = referred_bytes / held_count if held_count else 0.0
        if (
            held_count >= chunk_count
            or average_bytes * chunk_count <= bytes_max
            or referred_bytes + average_bytes <= bytes_max
        ):
            return 0
        smallest_bytes = self.holdings.table.smallest_bytes()
        needed_bytes = smallest_bytes * chunk_count
        is_full = referred_bytes + smallest_bytes > bytes_max
        return needed_bytes if is_full and needed_bytes > bytes_max else 0

    def waiting_reason(self, chunk_count: int, world_size: int) -> str:
        """Say in a sentence with numbers why `may_grant` is False; empty when it is True."""
        held_count = len(self.holdings.table.held)
        if self.model.version is None:
            return "no session is current"
        if not self.holds(chunk_count):
            held = f"{held_count} {'chunk is' if held_count == 1 else 'chunks are'} held"
            needed = f"{chunk_count} {'is' if chunk_count == 1 else 'are'} needed"
            reason = f"{held} and {needed}"
            capacity_chunks, place_count = self.config.capacity_chunks, self.holdings.place_count
            leased_count = place_count - self.holdings.kept_count
            blocks = self.config.full_policy is FullPolicy.BLOCK
            if blocks and leased_count and place_count >= capacity_chunks:
                are = "is" if leased_count == 1 else "are"
                reason += (
                    f", and {leased_count} of capacity_chunks ({capacity_chunks}) {are} under "
                    "leases"
                )
            referred_bytes, bytes_max = self.payloads.referred_bytes, self.config.capacity_bytes
            if held_count and referred_bytes + referred_bytes / held_count > bytes_max:
                reason += f", and {referred_bytes} bytes of capacity_bytes ({bytes_max}) are in use"
            return reason
        if not self.has_leases_for(world_size):
            return (
                f"live leases: {self.leases.live_count} of leases_max "
                f"({self.config.leases_max}); needed: {world_size} more"
            )
        if not self.limiter.may_draw(self.flow, chunk_count):
            return self.limiter.reason(self.flow, chunk_count)
        if (group := self.awaited(chunk_count)) is not None:
            what = "group" if self.assembly.in_any_order else "the chunk of ticket"
            return (
                f"{what} {group.name!r}, begun at version {group.version}, is not complete, and "
                f"would be staler than staleness_max ({self.config.staleness_max}) after newer "
                "chunks; it is waited for until it ends, or its ticket expires"
            )
        return ""

    def next_draw_rng(self) -> random.Random:
        """Return the next draw's generator, from seed and `draw_count`: none is journalled."""
        self._rng.seed((self.draw_seed << 64) + self.draw_count)
        return self._rng

    def discard(self, fragments: list[Fragment], reason: DiscardReason) -> None:
        """Let go of fragments that are no longer open, and report it."""
        if fragments:
            self.payloads.dispose(fragments)
            self.counters[FRAGMENTS_DISCARDED[reason]] += len(fragments)
            self.events.append(FragmentsDiscarded(self.name, reason, len(fragments)))
            self.events.append(StepsEnded(self.name, StepsEnd.EVICTED, tuple(fragments)))

    def tell_disposable(self) -> None:
        """Report what was let go of since the last call, at the end of each input (B13)."""
        if self.payloads.disposable:
            self.events.append(PayloadsDisposable(self.name, tuple(self.payloads.disposable)))
            self.payloads.disposable.clear()
