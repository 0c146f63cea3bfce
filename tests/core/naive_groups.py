"""The rules of groups, in the naive model's plain lists: what is a worker there is a group here."""

import json
from collections.abc import Sequence
from dataclasses import replace

from breadbox_server.core.model.config import FullPolicy
from breadbox_server.core.model.errors import (
    DomainError,
    InvalidArgumentError,
    TicketNotFoundError,
    WorkersFullError,
)
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment
from core.naive_model import (
    NaiveChunk,
    NaiveTail,
    NaiveWorker,
)
from core.naive_tickets import NaiveTicket, NaiveTickets


class NaiveGroups(NaiveTickets):
    is_in_order = False
    why_evicted = "evicted"
    end_count = 0
    touch_count = 0

    # Tickets

    @property
    def under_way(self) -> list[tuple[int, str]]:
        """Version and name of each open group, and of each ticket of one without a member."""
        versions = {each.group: [each.version] for each in self.tickets}
        for name, group in self.workers.items():
            if group.open:
                versions.setdefault(name, []).extend(map(self.version_of, group.open))
        return [(min(each), name) for name, each in versions.items()]

    def give_back_ticket(
        self, name: str, member: int | None, now: float
    ) -> type[DomainError] | None:
        size = self.config.fragments_per_chunk
        if member is not None and member >= size:
            return InvalidArgumentError
        ticket, group = self.find_ticket(name), self.workers.get(name)
        if ticket is None:
            return None if group is not None and group.end else TicketNotFoundError
        there = len(group.open) if group else 0
        if member is not None:
            if group is not None and member in group.judged:
                return None
            ticket.given_back.add(member)
            can_have = size - len(ticket.given_back)
            if can_have >= max(1, self.config.group_min or size) and there < can_have:
                return None
        self.end_ticket(name, "given_back")
        self.end_waiting(self.remembered(name), now, "given_back")
        return None

    def undo_ticket(self, name: str, now: float) -> None:
        ticket = self.find_ticket(name)
        if ticket is not None:
            ticket.reported_count -= 1
            if ticket.reported_count <= 0:
                self.give_back_ticket(name, None, now)

    def remembered(self, name: str) -> NaiveWorker:
        """A group, heard of last; a new one takes the place of an idle one."""
        if name not in self.workers and len(self.workers) >= self.config.workers_max:
            self.workers.pop(self.idle_worker() or "", None)
        group = self.workers.pop(name, None) or NaiveWorker()
        self.workers[name] = group
        return group

    def expire_ticket(self, ticket: NaiveTicket) -> None:
        super().expire_ticket(ticket)
        group = self.workers.get(ticket.group)
        if group is None or not group.open:
            self.drop_group(self.remembered(ticket.group), "lost")

    # Ends of groups

    def ends(self) -> dict[str, tuple[str, int]]:
        """How each group ended, and with how many members that were admitted."""
        return {
            name: (group.end, list(group.judged.values()).count(AdmissionOutcome.ADMITTED))
            for name, group in self.workers.items()
            if group.end
        }

    def end_group(self, group: NaiveWorker, reason: str) -> None:
        self.end_count += 1
        group.end = reason
        [name] = [name for name, each in self.workers.items() if each is group]
        self.end_ticket(name, "group_ended")

    def drop_group(self, group: NaiveWorker, reason: str) -> None:
        self.dispose(group.open)
        group.open = []
        self.end_group(group, reason)

    def touch(self, group: NaiveWorker, now: float) -> None:
        self.touch_count += 1
        group.touched_at, group.touched_as = now, self.touch_count

    # Claims

    def unclaimed(self, claimed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Members of open groups that are not claimed, the longest silent group first."""
        opened = [(group.touched_as, name, group) for name, group in self.workers.items()]
        return [
            (name, each.fragment_index)
            for _, name, group in sorted(opened, key=lambda entry: entry[0])
            for each in group.open
            if (name, each.fragment_index) not in claimed
        ]

    # Members

    def expect_append(
        self, fragment: Fragment, tail: NaiveTail | None = None
    ) -> AdmissionOutcome | type[DomainError]:
        if not self.session or fragment.session_id != self.session:
            return AdmissionOutcome.WRONG_SESSION
        group = self.workers.get(fragment.worker_id)
        if group is not None and fragment.fragment_index in group.judged:
            return AdmissionOutcome.DUPLICATE
        if group is not None and group.end:
            return AdmissionOutcome.GROUP_ENDED
        ticket = self.find_ticket(fragment.worker_id)
        if ticket is not None and fragment.fragment_index in ticket.given_back:
            return AdmissionOutcome.GROUP_ENDED
        size = fragment.payload.size_bytes
        if fragment.model_version_max > self.version or size > self.config.capacity_bytes:
            return InvalidArgumentError
        reserved = [each for held in self.reservations for each in held.fragments]
        taken = self.payload_ids() + [each.payload.payload_id for each in reserved]
        if fragment.payload.payload_id in taken:
            return InvalidArgumentError
        if fragment.fragment_index >= self.config.fragments_per_chunk:
            return InvalidArgumentError
        is_full = group is None and len(self.workers) >= self.config.workers_max
        if is_full and self.idle_worker() is None:
            return WorkersFullError
        if self.version_of(fragment) < self.oldest_fresh:
            return AdmissionOutcome.STALE
        return self.expect_fit(fragment, group, tail)

    @staticmethod
    def goes_on(opened: list[Fragment], fragment: Fragment) -> bool:
        return True

    def reserved_members(self, name: str) -> list[int]:
        reserved = [each for held in self.reservations for each in held.fragments]
        return [each.fragment_index for each in reserved if each.worker_id == name]

    def count_after(
        self, fragment: Fragment, worker: NaiveWorker | None, tail: NaiveTail | None
    ) -> int:
        if worker is not None and worker.end:
            return 0
        reserved = [] if tail is None else self.reserved_members(fragment.worker_id)
        there = {each.fragment_index for each in (worker.open if worker else [])}
        count = len(there | {*reserved, fragment.fragment_index})
        ticket, size = self.find_ticket(fragment.worker_id), self.config.fragments_per_chunk
        if ticket is not None and fragment.fragment_index in ticket.given_back:
            return 0
        if ticket is not None and ticket.given_back and count >= size - len(ticket.given_back):
            return size
        return count

    def is_awaited(self, fragment: Fragment) -> bool:
        return fragment.fragment_index in self.reserved_members(fragment.worker_id)

    def append(self, fragment: Fragment, outcome: AdmissionOutcome, now: float) -> None:
        super().append(fragment, outcome, now)
        if outcome is AdmissionOutcome.STALE:
            self.drop_group(self.workers[fragment.worker_id], "stale")
        for group in self.workers.values():
            group.forgotten_below = 0

    def admit(self, worker: NaiveWorker, fragment: Fragment, now: float) -> None:
        self.shrink_bytes(self.config.capacity_bytes - fragment.payload.size_bytes)
        worker.open.append(replace(fragment, discontinuity=True))
        self.touch(worker, now)
        if len(worker.open) == self.config.fragments_per_chunk:
            self.close(worker, "complete")
            return
        ticket = self.find_ticket(fragment.worker_id)
        if ticket is not None and ticket.given_back:
            can_have = self.config.fragments_per_chunk - len(ticket.given_back)
            if len(worker.open) >= can_have:
                self.close(worker, "partial")

    def agree(self, members: list[Fragment]) -> bool:
        values = [json.loads(each.numbers or "{}").get(self.config.drop_equal) for each in members]
        return None not in values and all(value == values[0] for value in values)

    def close(self, group: NaiveWorker, reason: str) -> None:
        if self.config.drop_equal and self.agree(group.open):
            self.drop_group(group, "equal")
            return
        members = sorted(group.open, key=lambda each: each.fragment_index)
        group.open = []
        self.end_group(group, reason)
        chunk = NaiveChunk(self.chunk_count, members, min(map(self.version_of, members)))
        self.note_set(chunk)
        self.chunks.append(chunk)
        self.chunk_count += 1
        self.inserted += 1
        self.closed_fragment_count += len(members)
        self.shrink(self.config.capacity_chunks)
        self.may_lack_places = self.config.full_policy is FullPolicy.EVICT

    # Ends

    def evict(self, chunk: NaiveChunk) -> None:
        super().evict(chunk)
        if not chunk.uses and self.why_evicted:
            self.end_group(self.workers[chunk.fragments[0].worker_id], self.why_evicted)

    def note_unused(self, chunk: NaiveChunk) -> None:
        reason = "stale" if chunk.version < self.oldest_fresh else "evicted"
        self.end_group(self.workers[chunk.fragments[0].worker_id], reason)

    def end(self, session: str) -> None:
        self.why_evicted = ""
        super().end(session)
        self.why_evicted = "evicted"

    def drop_stale(self) -> None:
        self.why_evicted = "stale"
        for chunk in self.held:
            if chunk.version < self.oldest_fresh:
                self.evict(chunk)
        self.why_evicted = "evicted"
        for group in self.workers.values():
            if any(self.version_of(each) < self.oldest_fresh for each in group.open):
                self.drop_group(group, "stale")

    def drop(self, payload_ids: Sequence[PayloadId]) -> int:
        dropped = 0
        self.why_evicted = "lost"
        for payload_id in payload_ids:
            for group in self.workers.values():
                if payload_id in [each.payload.payload_id for each in group.open]:
                    dropped += len(group.open)
                    self.drop_group(group, "lost")
            dropped += super().drop([payload_id])
        self.why_evicted = "evicted"
        return dropped

    def expire_leases(self, now: float) -> None:
        """End leases and silences in the order in which they are due, a lease first."""
        while (due := self.first_due(now)) is not None:
            super().expire_leases(due[0])
            self.end_due(*due)
        super().expire_leases(now)

    def first_due(self, now: float) -> tuple[float, NaiveWorker | NaiveTicket] | None:
        """The next silence or expiry of a ticket, the latter first."""
        silent = self.first_silent(now)
        tickets = sorted(self.tickets, key=lambda each: (each.expires_at, each.group))
        if not tickets or tickets[0].expires_at > min(now, silent[0] if silent else now):
            return silent
        return tickets[0].expires_at, tickets[0]

    def end_due(self, at: float, it: NaiveWorker | NaiveTicket) -> None:
        if isinstance(it, NaiveTicket):
            self.expire_ticket(it)
        else:
            self.end_silent(it, at)

    def first_silent(self, now: float) -> tuple[float, NaiveWorker] | None:
        opened = [group for group in self.workers.values() if group.open]
        first = min(opened, key=lambda each: each.touched_as, default=None)
        if first is None or first.touched_at + self.config.open_chunk_s > now:
            return None
        return first.touched_at + self.config.open_chunk_s, first

    def end_silent(self, group: NaiveWorker, now: float) -> None:
        self.end_waiting(group, now, "incomplete")

    def end_waiting(self, group: NaiveWorker, now: float, reason: str) -> None:
        needed = self.config.group_min or self.config.fragments_per_chunk
        is_blocked = self.config.full_policy is FullPolicy.BLOCK
        if len(group.open) < needed:
            self.drop_group(group, reason)
        elif is_blocked and self.place_count >= self.config.capacity_chunks:
            latest = max(each.touched_at for each in self.workers.values() if each.open)
            self.touch(group, max(now, latest))
        else:
            self.close(group, "partial")

    def discard_silent(self, now: float) -> None:
        while (due := self.first_due(now)) is not None:
            self.end_due(*due)
