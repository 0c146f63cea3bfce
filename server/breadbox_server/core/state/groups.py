"""Groups: members in any order, from any worker, become one chunk (B32).

To the rest of the core a group is a worker: `worker_id` names it, `fragment_index` is the member,
and what was judged of it is remembered member by member.

O1  Members of an open group are different, and below `fragments_per_chunk`.
O2  A group is open, or has ended with one reason and the number of that end; an open one has at
    least one member.
O3  Ends stand in order of their numbers.
O4  A group with a ticket is open, or has no member yet and is not remembered.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import ClassVar, Final

from breadbox_server.core.model.description import GroupEnd, OpenGroup
from breadbox_server.core.model.events import EvictionReason, TicketEnd
from breadbox_server.core.model.ids import PayloadId, WorkerId
from breadbox_server.core.model.inputs import Fragment, GroupEndReason, VersionOf
from breadbox_server.core.pacing import Reserved
from breadbox_server.core.state.assembly import (
    ADMITTED_CODE,
    CLOSES,
    GOES_ON,
    AppendPreview,
    Assembly,
    OpenChunk,
    Worker,
)
from breadbox_server.core.state.tickets import Ticket, Tickets

SHOWN_MAX: Final = 8
"""Open groups that are described, the longest silent first, and of each the members that lack."""
_UNUSED: Final = {
    EvictionReason.STALE: GroupEndReason.STALE,
    EvictionReason.PAYLOAD_LOST: GroupEndReason.LOST,
    EvictionReason.QUARANTINED: GroupEndReason.LOST,
}
_MEMBER: Final = attrgetter("fragment_index")
_END_NUMBER: Final = attrgetter("end_number")


class Groups(Assembly):
    """The groups of the current session; `on_end` is called with each end."""

    in_any_order: ClassVar = True
    # Most groups have ended: the bound on them is met all the time.
    idle_search_max: ClassVar[int | None] = None

    def __init__(
        self,
        fragments_per_chunk: int,
        version_of: VersionOf,
        tickets: Tickets,
        on_end: Callable[[GroupEndReason], None],
        drop_equal: Callable[[], str],
    ) -> None:
        """Read *drop_equal*, the limit of the buffer, at each delivery: it may change meanwhile."""
        super().__init__(fragments_per_chunk, version_of, tickets)
        self._on_end = on_end
        self._drop_equal = drop_equal
        self._ends: dict[int, Worker] = {}
        self.none_idle = (-1, -1)
        """`freed_count` and number of groups at the latest search for a group to forget, if it
        found none. Until one of the two changes, another search finds none either."""

    @property
    def reserved_count(self) -> int:
        """Number of groups that are open, those with a ticket and no member included."""
        return len(self.open) + len(self.tickets.unbegun)

    def reserved(self) -> Iterator[Reserved]:
        """List the open groups; one with a ticket may yet get a member of the ticket's version."""
        for name, chunk in self.open.items():
            ticket = self.tickets.by_group.get(name)
            version = chunk.version if ticket is None else min(chunk.version, ticket.model_version)
            yield Reserved(version, name)
        for name, ticket in self.tickets.unbegun.items():
            yield Reserved(ticket.model_version, name)

    def preview(
        self, worker: Worker | None, fragment: Fragment, reserved_count: int = 0
    ) -> AppendPreview:
        """Return what `place` would do with a member, once others that are reserved are there."""
        if worker is not None and worker.end is not None:
            return AppendPreview(None, 0, closes_chunk=False, end=worker.end)
        open_chunk = None if worker is None else worker.open_chunk
        count = reserved_count + (0 if open_chunk is None else len(open_chunk.fragments))
        ticket = self.tickets.by_group.get(fragment.worker_id)
        if ticket is None or not ticket.given_back:
            return CLOSES if count + 1 == self.fragments_per_chunk else GOES_ON
        if fragment.fragment_index in ticket.given_back:
            return AppendPreview(None, 0, closes_chunk=False, end=GroupEndReason.GIVEN_BACK)
        return CLOSES if count + 1 >= self.awaited_count(ticket) else GOES_ON

    def awaited_count(self, ticket: Ticket) -> int:
        """Return how many members a group with a ticket is to have."""
        return self.fragments_per_chunk - len(ticket.given_back)

    def place(self, worker: Worker, fragment: Fragment, *, now: float) -> list[Fragment] | None:
        """Put a member into its group; return all members if they are complete, or None.

        If they are to be dropped as equal, the group's end says so.
        """
        members = super().place(worker, fragment, now=now)
        if members is None:
            ticket, chunk = self.tickets.by_group.get(worker.worker_id), worker.open_chunk
            if ticket is None or not ticket.given_back or chunk is None:
                return None
            is_all = len(chunk.fragments) >= self.awaited_count(ticket)
            return self.close_partial(worker) if is_all else None
        self._end_delivered(worker, members, GroupEndReason.COMPLETE)
        return sorted(members, key=_MEMBER)

    def close_partial(self, group: Worker) -> list[Fragment]:
        """End a group with the members that it has, and return them, as `place` does."""
        members = self.discard(group)
        self._end_delivered(group, members, GroupEndReason.PARTIAL)
        return sorted(members, key=_MEMBER)

    def drop(self, group: Worker, reason: GroupEndReason) -> list[Fragment]:
        """End a group, open or not yet begun, as a whole, and return its members."""
        members = [] if group.open_chunk is None else self.discard(group)
        self._end(group, reason)
        return members

    def postpone(self, group: Worker, now: float) -> None:
        """Let a silent group stay open for as long again, behind those that are open."""
        open_chunk = self.open[group.worker_id]
        # Under a shorter silence than before, others may have had a member since it was due.
        open_chunk.touched_at = max(now, self.open[next(reversed(self.open))].touched_at)
        self.open.move_to_end(group.worker_id)

    def end_stale(self, worker: Worker) -> list[Fragment]:
        """End the group of a stale member: it would be stale as a whole, whichever came first."""
        return self.drop(worker, GroupEndReason.STALE)

    def discard_stale(self, version_min: int) -> list[Fragment]:
        """End the groups with a member older than a version; return all their members."""
        gone: list[Fragment] = []
        while (entry := self._by_version.first()) is not None and entry[0] < version_min:
            gone += self.drop(self.workers[entry[1]], GroupEndReason.STALE)
        return gone

    def discard_lost(self, worker_id: WorkerId, payload_id: PayloadId) -> list[Fragment]:
        """End the group of a member with a lost payload; return all its members."""
        del payload_id
        return self.drop(self.workers[worker_id], GroupEndReason.LOST)

    def note_unused(self, fragments: Sequence[Fragment], reason: EvictionReason) -> None:
        """Change the ends of groups with chunks that left unused; not if their session ends."""
        if reason is EvictionReason.SESSION_ENDED:
            return
        for name in dict.fromkeys([each.worker_id for each in fragments]):
            self._end(self.workers[name], _UNUSED.get(reason, GroupEndReason.EVICTED))

    def discard_all(self) -> list[Fragment]:
        """Give up every open group, the longest silent first, and forget every group."""
        self._ends.clear()
        self.none_idle = (-1, -1)
        return super().discard_all()

    def put(self, worker: Worker, open_chunk: OpenChunk) -> None:
        """Open a group, behind those that are open."""
        super().put(worker, open_chunk)
        self.tickets.unbegun.pop(worker.worker_id, None)

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a group that has ended, and its end."""
        del self._ends[self.workers.pop(worker_id).end_number]

    def restore_ends(self, ended_count: int) -> None:
        """Take the ends of the groups of a snapshot, and the number of the latest."""
        self.ended_count = ended_count
        ended = [group for group in self.workers.values() if group.end is not None]
        self._ends = {each.end_number: each for each in sorted(ended, key=_END_NUMBER)}

    def ends_after(self, number: int, count_max: int) -> list[GroupEnd]:
        """Return the first ends after the one of a number; O(all ends after it).

        A number that no group has had is of an earlier buffer of the name: all ends are after it.
        """
        number = number if number <= self.ended_count else 0
        later: list[int] = []
        for each in reversed(self._ends):
            if each <= number:
                break
            later.append(each)
        return [
            GroupEnd(each, group.worker_id, reason, group.outcomes.codes.count(ADMITTED_CODE))
            for each in later[: -count_max - 1 : -1]
            if (reason := (group := self._ends[each]).end) is not None
        ]

    def longest_silent(self, now: float) -> Iterator[OpenGroup]:
        """Describe the open groups that had no member for the longest time."""
        for chunk in list(self.open.values())[:SHOWN_MAX]:
            yield self._described(chunk, now)

    def _described(self, chunk: OpenChunk, now: float) -> OpenGroup:
        there = {each.fragment_index for each in chunk.fragments}
        lacking = [each for each in range(self.fragments_per_chunk) if each not in there]
        return OpenGroup(
            chunk.worker_id, len(there), tuple(lacking[:SHOWN_MAX]), now - chunk.touched_at
        )

    def _end(self, group: Worker, reason: GroupEndReason) -> None:
        if group.end is not None:
            del self._ends[group.end_number]
        self.ended_count += 1
        group.end, group.end_number = reason, self.ended_count
        self._ends[group.end_number] = group
        self.tickets.end(group.worker_id, TicketEnd.GROUP_ENDED)
        self._on_end(reason)

    def _end_delivered(
        self, group: Worker, members: Sequence[Fragment], reason: GroupEndReason
    ) -> None:
        name = self._drop_equal()
        if name and _agree(members, name):
            reason = GroupEndReason.EQUAL
        self._end(group, reason)

    def check_invariants(self) -> None:
        """Assert O1 to O4 and A2, A3; O(groups remembered)."""
        super().check_invariants()
        for group in self.workers.values():
            assert (group.end is None) == (group.open_chunk is not None), "O2"
        ended = {each.end_number: each for each in self.workers.values() if each.end is not None}
        assert self._ends == ended, "O2: ends"
        assert [*self._ends] == sorted(ended), "O3"
        assert self.ended_count >= max(ended, default=0), "O3: the latest"
        for name in self.tickets.by_group:
            assert (name in self.tickets.unbegun) == (name not in self.open), "O4: begun"
            assert name in self.open or name not in self.workers, "O4: a ticket of an ended group"

    def _check_order(self, fragments: Sequence[Fragment]) -> None:
        members = {each.fragment_index for each in fragments}
        assert len(members) == len(fragments), "O1: a member twice"
        assert max(members) < self.fragments_per_chunk, "O1: members"


def _agree(members: Sequence[Fragment], name: str) -> bool:
    """Return whether all members have a number of a name, and it is the same."""
    first, *others = [json.loads(each.numbers or "{}").get(name) for each in members]
    return first is not None and all(each == first for each in others)
