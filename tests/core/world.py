"""One buffer and a clock that stands still, with a short word for every input."""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.events import Event, FetchGranted
from breadbox_server.core.model.ids import CallerId, ChunkId, LeaseId, PayloadId, RequestId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    AppendFragments,
    CancelRequest,
    DropPayloads,
    Fetch,
    Fragment,
    GrantedFragment,
    ModelState,
    Offer,
    Offered,
    Payload,
    PrioritiesUpdated,
    Published,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    Settle,
    UndeliveredGrant,
    UpdateBuffer,
    UpdatePriorities,
    WaitForRoom,
)
from support.inputs import end_session, publish_model, start_session
from support.metadata import make_fragment
from support.snapshots import held_chunks

EventT = TypeVar("EventT", bound=Event)


class World:
    """Limits are given as keywords of `BufferConfig`; session "s0" is current from the start."""

    def __init__(self, *, starts: bool = True, seed: int = 0, **limits: Any) -> None:
        self.config = BufferConfig(**limits)
        self.buffers = BufferSet(random.Random(seed), self.config, is_recording=True)
        self.now = 100.0
        self.request_count = 0
        if starts:
            self.start("s0")
            self.buffers.take_events()

    def start(self, session_id: str, version: int | None = None) -> ModelState:
        return self.buffers.apply(start_session(session_id, version), now=self.now)

    def end(self, session_id: str = "s0") -> None:
        self.buffers.apply(end_session(session_id), now=self.now)

    def publish(
        self, version: int, *, session_id: str = "s0", weights: Payload | None = None
    ) -> Published:
        publish = publish_model(version, weights, session_id=session_id)
        return self.buffers.apply(publish, now=self.now)

    def offer(self, fragment: Fragment) -> AdmissionOutcome:
        return self.answer(fragment).outcome

    def answer(self, fragment: Fragment) -> Appended:
        (answer,) = self.offer_many([fragment])
        return answer

    def offer_many(self, fragments: list[Fragment]) -> list[Appended]:
        return self.buffers.apply(AppendFragments(DEFAULT_BUFFER, fragments), now=self.now)

    def reserve(
        self, *fragments: Fragment, caller_id: CallerId | None = None, reserve_s: float = 30.0
    ) -> Offered:
        """Offer fragments whose payloads are still to be confirmed."""
        offer = Offer(DEFAULT_BUFFER, list(fragments), caller_id, self.now + reserve_s)
        return self.buffers.apply(offer, now=self.now)

    def settle(
        self, offered: Offered, fragments: list[Fragment], there: Sequence[bool] = ()
    ) -> list[Appended | None]:
        """Settle what was offered; `there`: whose payloads are, all if it is empty."""
        assert offered.reservation_id is not None
        are_there = [*there] or [True] * len(fragments)
        settle = Settle(DEFAULT_BUFFER, offered.reservation_id, are_there)
        return self.buffers.apply(settle, now=self.now)

    def wait(
        self,
        fragment: Fragment,
        waits_for: AdmissionOutcome = AdmissionOutcome.BUFFER_FULL,
        *,
        wait_s: float = 10.0,
        caller_id: CallerId | None = None,
    ) -> CallerId:
        """Let an append wait for room."""
        wait = WaitForRoom(DEFAULT_BUFFER, fragment, waits_for, self.now + wait_s, caller_id)
        return self.buffers.apply(wait, now=self.now)

    def called_up(self) -> list[CallerId]:
        """Call up everybody whose turn it is, without an offer."""
        return list(self.buffers.call_up(now=self.now))

    def append(self, worker_id: str = "w0", index: int = 0, **fields: Any) -> AdmissionOutcome:
        return self.offer(make_fragment(worker_id, index, **fields))

    def fill(self, chunk_count: int, *, worker_id: str = "w0", **fields: Any) -> None:
        """Append as many chunks of one worker, which has appended nothing yet."""
        for index in range(chunk_count * self.config.fragments_per_chunk):
            assert self.append(worker_id, index, **fields) is AdmissionOutcome.ADMITTED

    def fetch(
        self,
        fragment_count: int = 1,
        *,
        request_id: str | None = None,
        max_wait_s: float = 10.0,
        rank: int = 0,
        world_size: int = 1,
        lease_s: float | None = None,
    ) -> CallerId:
        self.request_count += 1
        fetch = Fetch(
            buffer=DEFAULT_BUFFER,
            request_id=RequestId(
                f"request-{self.request_count}" if request_id is None else request_id
            ),
            fragment_count=fragment_count,
            deadline_at=self.now + max_wait_s,
            rank=rank,
            world_size=world_size,
            lease_s=lease_s,
        )
        return self.buffers.apply(fetch, now=self.now)

    def granted(self, fragment_count: int = 1, **fields: Any) -> FetchGranted:
        """Fetch what is granted at once."""
        self.buffers.take_events()
        self.fetch(fragment_count, **fields)
        [event] = self.events(FetchGranted)
        return event

    def prepared(self, request_id: str) -> tuple[GrantedFragment, ...]:
        return self.buffers[DEFAULT_BUFFER].prepared(RequestId(request_id))

    def cancel(self, caller_id: CallerId) -> None:
        self.buffers.apply(CancelRequest(DEFAULT_BUFFER, caller_id), now=self.now)

    def release(self, lease_id: LeaseId, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
        self.buffers.apply(ReleaseLease(DEFAULT_BUFFER, lease_id, mode), now=self.now)

    def give_back(self, lease_id: LeaseId) -> None:
        self.release(lease_id, ReleaseMode.RETURNED)

    def renew(self, lease_id: LeaseId, lease_s: float | None = None) -> float:
        return self.buffers.apply(RenewLease(DEFAULT_BUFFER, lease_id, lease_s), now=self.now)

    def report_undelivered(self, lease_id: LeaseId) -> None:
        self.buffers.apply(UndeliveredGrant(DEFAULT_BUFFER, lease_id), now=self.now)

    def drop(self, *payload_ids: str) -> int:
        return self.buffers.apply(
            DropPayloads(DEFAULT_BUFFER, tuple(map(PayloadId, payload_ids))), now=self.now
        )

    def update_priorities(
        self, priorities: dict[int, float], delete: tuple[int, ...] = ()
    ) -> PrioritiesUpdated:
        updates = [(ChunkId(number), priority) for number, priority in priorities.items()]
        update = UpdatePriorities(DEFAULT_BUFFER, tuple(updates), tuple(map(ChunkId, delete)))
        return self.buffers.apply(update, now=self.now)

    def update(self, **limits: Any) -> None:
        self.config = BufferConfig(**limits)
        self.buffers.apply(UpdateBuffer(DEFAULT_BUFFER, self.config), now=self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.buffers.handle_timer(now=self.now)

    def events(self, kind: type[EventT]) -> list[EventT]:
        """Take all events, and give those of a kind."""
        return [event for event in self.buffers.take_events() if isinstance(event, kind)]

    def seen(self) -> BufferDescription:
        return self.buffers.describe(DEFAULT_BUFFER, now=self.now)

    def count(self, name: str) -> int:
        return self.seen().counters[name]

    def held(self) -> list[tuple[str, int, int]]:
        """Give (worker, first index, uses) of every chunk held, by age."""
        return [
            (chunk.fragments[0].worker_id, chunk.fragments[0].fragment_index, chunk.use_count)
            for chunk in held_chunks(self.buffers)
        ]


def indices(grant: FetchGranted) -> list[int]:
    """Give the fragment indices of a grant, in order."""
    return [granted.fragment.fragment_index for granted in grant.fragments]
