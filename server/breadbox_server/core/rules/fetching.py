"""The queue of fetches: requests wait, are granted, or time out (B8, B9).

A request is granted as a whole or not at all, and only at the head of the queue. Every path that
may make a grant possible (a chunk closed or given back, a lease ended, a waiter gone, a limit
changed) ends in `serve`.
"""

import math
from collections.abc import Callable

from breadbox_server.core.model import inputs
from breadbox_server.core.model.config import check_duration
from breadbox_server.core.model.entries import Entry, GrantMade
from breadbox_server.core.model.errors import (
    DomainError,
    FetchExceedsCapacityError,
    InvalidArgumentError,
    LeaseNotFoundError,
    RequestMismatchError,
    WaitersFullError,
)
from breadbox_server.core.model.events import FetchRefused, WaitElapsed
from breadbox_server.core.model.ids import CallerId, ChunkId, LeaseId
from breadbox_server.core.model.validation import WORLD_SIZE_MAX, check_int, check_name
from breadbox_server.core.rules.leasing import Leasing
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.leases import Grant
from breadbox_server.core.state.waiters import RETRIES_MAX, Caller, Waiter

LEASE_ID_BITS = 96
"""Wide enough that a lease of a server that lost its books is never taken for another one."""


class Fetching:
    """Grants the chunks of a buffer, in order of arrival.

    Args:
        state: Of the buffer.
        leasing: Begins the leases of what is granted.
        next_caller_id: Gives ids unique among all callers of the process.
        record: Called with every grant before any caller learns of it.
    """

    def __init__(
        self,
        state: BufferState,
        leasing: Leasing,
        *,
        next_caller_id: Callable[[], CallerId],
        record: Callable[[Entry, float], None],
    ) -> None:
        self._state = state
        self._leasing = leasing
        self._next_caller_id = next_caller_id
        self._record = record

    def fetch(self, input: inputs.Fetch, *, now: float) -> CallerId:
        """Grant a request, let it wait, or repeat what it was granted.

        Raises:
            DomainError: As `BufferSet.apply` says of Fetch.
        """
        self._check(input)
        grant = self._state.leases.find_grant(input.request_id)
        if grant is not None:
            return self._repeat(grant, input)
        waiters = self._state.waiters
        waiter = waiters.find(input.request_id)
        if waiter is None:
            waiter = Waiter(input.request_id, input.fragment_count, input.world_size)
        else:
            _check_same(waiter, input)
        is_granted = len(waiters) == 0 and self._may_grant(waiter)
        if not is_granted:
            self._check_bytes(waiter)
        if not is_granted and input.deadline_at > now:
            self._check_room(waiter)
        caller = Caller(
            self._next_caller_id(),
            rank=input.rank,
            lease_s=input.lease_s,
            asked_at=now,
            deadline_at=input.deadline_at,
        )
        if is_granted:
            waiter.callers[caller.caller_id] = caller
            self._draw(waiter, now=now)
        elif input.deadline_at > now:
            waiters.add(waiter, caller)
        else:
            self._report_elapsed(caller, self.reason_for(waiter), now=now)
        return caller.caller_id

    def cancel(self, caller_id: CallerId, *, now: float) -> None:
        """Let a caller go that waits; its request goes with its last caller (B8)."""
        if caller_id in self._state.waiters:
            self._state.waiters.remove_caller(caller_id)
            self._state.counters.add("fetches_cancelled")
            self.serve(now=now)

    def serve(self, *, now: float) -> None:
        """Grant from the head of the queue for as long as the head can be granted.

        A head that bytes will never let be granted is turned away, so that it waits no more, and
        nobody behind it does.
        """
        waiters = self._state.waiters
        while (head := waiters.head()) is not None:
            if self._may_grant(head):
                waiters.remove(head)
                self._draw(head, now=now)
                continue
            try:
                self._check_bytes(head)
            except FetchExceedsCapacityError as error:
                self.refuse(head, error)
            else:
                return

    def refuse(self, waiter: Waiter, error: DomainError) -> None:
        """Refuse a waiting request, and report the error to each of its callers."""
        self._state.waiters.remove(waiter)
        for caller_id in waiter.callers:
            self._state.counters.add("fetches_refused")
            self._state.events.append(FetchRefused(self._state.name, caller_id, error))

    def refuse_all(self, error: DomainError) -> None:
        """Turn every waiter away."""
        for waiter in self._state.waiters.waiters():
            self.refuse(waiter, error)

    def refuse_impossible(self) -> None:
        """Refuse the waiters that the limits, just changed, never allow to be met."""
        for waiter in self._state.waiters.waiters():
            try:
                self._check_size(waiter.fragment_count, waiter.world_size)
            except DomainError as error:
                self.refuse(waiter, error)

    def elapse(self, *, now: float) -> None:
        """Time out the callers whose deadline has passed, and serve those queued behind them.

        A request that can be granted at the very instant of its deadline is granted.
        """
        waiters = self._state.waiters
        while (first := waiters.first_deadline()) is not None and first[0] <= now:
            waiter = waiters.waiter_of(first[1])
            reason = self.reason_for(waiter)
            self._report_elapsed(waiters.remove_caller(first[1]), reason, now=now)
            self.serve(now=now)

    def reason_for(self, waiter: Waiter) -> str:
        """Say in one sentence with numbers what a request waits for, in the queue or before it."""
        state = self._state
        head = state.waiters.head()
        if head is None or head is waiter:
            return state.waiting_reason(self._chunk_count(waiter), waiter.world_size)
        reason = state.waiting_reason(self._chunk_count(head), head.world_size)
        count = len(state.waiters)
        waiting = "1 fetch waits" if count == 1 else f"{count} fetches wait"
        return f"{waiting} in order of arrival; for the first, {reason}"

    def next_reason(self) -> str:
        """Say what the next fetch would wait for; empty when the smallest one would not."""
        head = self._state.waiters.head()
        return self._state.waiting_reason(1, 1) if head is None else self.reason_for(head)

    def next_deadline(self) -> float | None:
        """Return the instant at which the next wait is over, or None if no caller waits."""
        deadline = self._state.waiters.first_deadline()
        return None if deadline is None else deadline[0]

    def _check(self, input: inputs.Fetch) -> None:
        check_name("request_id", input.request_id)
        check_int("world_size", input.world_size, 1, WORLD_SIZE_MAX)
        check_int("rank", input.rank, 0, input.world_size - 1)
        if input.lease_s is not None:
            check_duration("lease_s", input.lease_s)
        if not math.isfinite(input.deadline_at):
            raise InvalidArgumentError("deadline_at", "must be a finite instant")
        self._check_size(input.fragment_count, input.world_size)

    def _check_size(self, fragment_count: int, world_size: int) -> None:
        """Refuse what could never be granted, however long it waited (B8)."""
        config = self._state.config
        unit = config.fragments_per_chunk * world_size
        if type(fragment_count) is not int or fragment_count <= 0 or fragment_count % unit:
            raise InvalidArgumentError(
                "fragment_count",
                f"must be a positive multiple of fragments_per_chunk * world_size = "
                f"{config.fragments_per_chunk} * {world_size} = {unit}, got {fragment_count!r}",
            )
        if fragment_count > config.capacity_fragments:
            raise FetchExceedsCapacityError(fragment_count, config.capacity_fragments)
        if world_size > config.leases_max:
            raise InvalidArgumentError(
                "world_size", f"is {world_size}, but leases_max is {config.leases_max}"
            )

    def _check_bytes(self, waiter: Waiter) -> None:
        """Refuse what bytes will never let be granted, chunks being as large as they are (B8)."""
        needed_bytes = self._state.bytes_beyond(self._chunk_count(waiter))
        if needed_bytes:
            capacity_bytes = self._state.config.capacity_bytes
            raise FetchExceedsCapacityError(needed_bytes, capacity_bytes, "bytes")

    def _check_room(self, waiter: Waiter) -> None:
        """Refuse a caller that would have to wait where no more may."""
        if waiter.is_crowded:
            raise WaitersFullError(waiter.world_size + RETRIES_MAX)
        limit = self._state.config.waiters_max
        if not waiter.callers and len(self._state.waiters) >= limit:
            raise WaitersFullError(limit)

    def _repeat(self, grant: Grant, input: inputs.Fetch) -> CallerId:
        """Tell a request that was granted before of the same grant."""
        _check_same(grant, input)
        lease = grant.leases[input.rank]
        if lease.end is not None:
            raise LeaseNotFoundError(lease.lease_id)
        caller_id = self._next_caller_id()
        self._leasing.report_granted(lease, caller_id, wait_s=0.0)
        return caller_id

    def _may_grant(self, waiter: Waiter) -> bool:
        return self._state.may_grant(self._chunk_count(waiter), waiter.world_size)

    def _chunk_count(self, waiter: Waiter) -> int:
        return waiter.fragment_count // self._state.config.fragments_per_chunk

    def _draw(self, waiter: Waiter, *, now: float) -> None:
        """Grant a request that is not in the queue, and report the grant to its callers."""
        state = self._state
        rng = state.next_draw_rng()
        table, config = state.holdings.table, state.config

        def uses_left(chunk_id: ChunkId) -> int:
            return config.uses_max - table[chunk_id].use_count

        chunk_ids = table.sampler.draw(
            self._chunk_count(waiter), rng, uses_left if config.with_replacement else None
        )
        lease_ids = [
            LeaseId(f"{rng.getrandbits(LEASE_ID_BITS) ^ state.lease_salt:0{LEASE_ID_BITS // 4}x}")
            for _ in range(waiter.world_size)
        ]
        leases_s = [state.config.lease_s] * waiter.world_size
        for caller in waiter.callers.values():
            if caller.lease_s is not None:
                leases_s[caller.rank] = caller.lease_s
        made = GrantMade(
            state.name,
            waiter.request_id,
            waiter.fragment_count,
            waiter.world_size,
            tuple(chunk_ids),
            tuple(lease_ids),
            tuple(leases_s),
        )
        grant = self._leasing.carry_out(made, now=now)
        self._record(made, now)
        for caller in waiter.callers.values():
            lease = grant.leases[caller.rank]
            self._leasing.report_granted(lease, caller.caller_id, wait_s=now - caller.asked_at)

    def _report_elapsed(self, caller: Caller, reason: str, *, now: float) -> None:
        self._state.counters.add("fetches_elapsed")
        self._state.events.append(
            WaitElapsed(self._state.name, caller.caller_id, reason, now - caller.asked_at)
        )


def _check_same(first: Waiter | Grant, input: inputs.Fetch) -> None:
    """Refuse a known request that comes with another size (B12)."""
    for field in ("fragment_count", "world_size"):
        if getattr(first, field) != getattr(input, field):
            raise RequestMismatchError(
                input.request_id, field, getattr(first, field), getattr(input, field)
            )
