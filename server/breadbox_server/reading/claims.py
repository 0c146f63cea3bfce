"""Claims of verifiers on members that lack a part, each under a read lease (B34).

In memory, as read leases are: attaching a part twice is a duplicate, so a claim that is lost costs
work, and nothing else.

V1  A member is claimed while a live lease has it.
V2  Claims that wait are served in order of arrival: each gets its members, under a lease, before it
    is woken, so none is woken for nothing. One that is not taken gives them back.
V3  After each change, and each end of a claim, no claim waits for which there is a member.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from breadbox_server.access.authorization import ANONYMOUS, Caller
from breadbox_server.base.errors import WatchersFullError
from breadbox_server.core.lacking import MemberKey, Wanted
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.ids import BufferName, LeaseId
from breadbox_server.core.model.inputs import GrantedFragment, ModelState
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.limits import CLAIM_PARTS_MAX
from breadbox_server.reading.inline_bodies import InlineBodies
from breadbox_server.reading.read_leases import ReadLease, ReadLeases
from breadbox_server.reading.watchers import Watchers


class Claimed(NamedTuple):
    """Members that a verifier has claimed."""

    fragments: list[GrantedFragment]
    bodies: list[bytes]
    """Payload of each fragment, b"" where it is not inline."""
    lease: ReadLease
    model: ModelState


@dataclass(slots=True, eq=False)
class _Claim:
    """A call that claims, and what it got."""

    wanted: Wanted
    count: int
    lease_s: float | None
    caller: Caller
    lease: ReadLease | None = None
    fragments: list[GrantedFragment] = field(default_factory=list)


class Claims:
    """The live claims, and the calls that wait for members."""

    def __init__(
        self, core: DurableCore, bodies: InlineBodies, leases: ReadLeases, waiting: Watchers
    ) -> None:
        self._core = core
        self._bodies = bodies
        self._leases = leases
        leases.on_end = self._on_lease_end
        self.waiting = waiting
        """Calls that wait, by the time and number that they may."""
        self._queues: dict[BufferName, dict[_Claim, asyncio.Future[None]]] = {}
        """The same calls, in order of arrival, each with what wakes it."""
        self._due: set[BufferName] = set()
        """Buffers with queues that will be served in this pass of the loop."""
        self._keys_of: dict[LeaseId, list[MemberKey]] = {}

    async def claim(
        self,
        buffer: BufferName,
        part: str,
        count: int,
        *,
        wait_s: float,
        lease_s: float | None,
        inline_bytes_max: int = 0,
        caller: Caller = ANONYMOUS,
    ) -> Claimed | str:
        """Claim members that lack a part, or return what the claim waited for."""
        until = self._core.clock.now() + wait_s
        claim = _Claim(Wanted(part, caller.workers), count, lease_s, caller)
        try:
            while True:
                self._core.check_serving()
                await self._core.look(partial(self._look, buffer, claim))
                if claim.lease is not None or (left_s := until - self._core.clock.now()) <= 0:
                    break
                await self._wait(buffer, claim, left_s)
            await self._core.turns.settled()
            if claim.lease is None:
                claimed = await self._core.look(lambda: self._core.buffers[buffer].claimed_count)
                return (
                    f"no member has its sequence and lacks a part {part!r} ({claimed} are claimed)"
                )
            payloads = [each.fragment.payload for each in claim.fragments]
            bodies, absent = self._bodies.at_hand(payloads, inline_bytes_max)
            model = await self._core.durable_model(buffer)
            await self._bodies.add(bodies, payloads, absent)
        except BaseException:
            # The caller has left.
            if claim.lease is not None:
                self._leases.release(claim.lease.lease_id)
            raise
        return Claimed(claim.fragments, bodies, claim.lease, model)

    def look_again(self) -> None:
        """Serve the claims that wait in buffers with more members to claim."""
        for buffer in self._queues:
            if self._core.buffers.has_more_to_claim(buffer):
                self._serve_soon(buffer)

    async def _wait(self, buffer: BufferName, claim: _Claim, wait_s: float) -> None:
        holder = claim.caller.holder(buffer)
        self._check_parts(buffer, claim.wanted, holder)
        woken = asyncio.get_running_loop().create_future()
        self._queues.setdefault(buffer, {})[claim] = woken
        try:
            await self.waiting.wait(buffer, wait_s, holder, woken)
        finally:
            del self._queues[buffer][claim]
            if not self._queues[buffer]:
                del self._queues[buffer]

    def _is_awaited(self, buffer: BufferName, wanted: Wanted) -> bool:
        return any(each.wanted == wanted for each in self._queues.get(buffer, ()))

    def _check_parts(self, buffer: BufferName, wanted: Wanted, holder: str) -> None:
        """Refuse to wait for one part more than the claims of a token may: each has an index."""
        if not self._is_awaited(buffer, wanted):
            claims = self._queues.get(buffer, ())
            awaited = {each.wanted for each in claims if each.caller.holder(buffer) == holder}
            if len(awaited) >= CLAIM_PARTS_MAX:
                raise WatchersFullError(CLAIM_PARTS_MAX, "parts are waited for by this token")

    def _look(self, buffer: BufferName, claim: _Claim) -> None:
        # It may have been served while it waited; and no claim overtakes those that wait.
        if claim.lease is None:
            if buffer in self._due or self._core.buffers.has_more_to_claim(buffer):
                self._serve(buffer)
            self._take(buffer, claim)

    def _serve_soon(self, buffer: BufferName) -> None:
        if buffer not in self._due:
            self._due.add(buffer)
            asyncio.get_running_loop().call_soon(self._serve, buffer)

    def _serve(self, buffer: BufferName) -> None:
        self._due.discard(buffer)
        without = set[Wanted]()
        for claim, woken in list(self._queues.get(buffer, {}).items()):
            if woken.done() or claim.wanted in without:
                continue
            try:
                is_served = self._take(buffer, claim)
            except DomainError:
                # It looks itself, and is refused.
                is_served = True
            if is_served:
                woken.set_result(None)
            else:
                without.add(claim.wanted)

    def _take(self, buffer: BufferName, claim: _Claim) -> bool:
        """Give a claim the members that there are for it; return whether there are any."""
        held = self._core.buffers[buffer]
        members = held.claim(
            *(claim.wanted, claim.count, claim.caller.may_append_as),
            partial(self._is_awaited, buffer),
        )
        if not members:
            return False
        claim.fragments = [each for member in members for each in member]
        payloads = [each.fragment.payload for each in claim.fragments]
        lease_s = claim.lease_s or held.config.lease_s
        holder = claim.caller.holder(buffer)
        claim.lease = lease = self._leases.take(buffer, payloads, lease_s, holder)
        first = [member[0].fragment for member in members]
        self._keys_of[lease.lease_id] = [(each.worker_id, each.fragment_index) for each in first]
        return True

    def _on_lease_end(self, lease: ReadLease) -> None:
        if keys := self._keys_of.pop(lease.lease_id, None):
            self._core.buffers.end_claim(lease.buffer, keys)
            if lease.buffer in self._queues:
                self._serve_soon(lease.buffer)
