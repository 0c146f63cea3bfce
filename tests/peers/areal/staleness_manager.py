"""AReaL's `StalenessManager`, whose rollouts are groups with tickets of a real core.

A rollout takes a ticket if one is free, and else begins its group without one, which counts as
well. An accepted rollout completes its group, and a rejected one gives it up.

One rule differs (decision 034): AReaL allows a batch more for each version, whether or not a batch
was trained on; tickets count deliveries. So here each version fetches the batch that it is
supposed to have trained on, and what it did not find is added to the capacity.
"""

import random
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.events import FetchGranted, TicketsTaken
from breadbox_server.core.model.ids import RequestId, WorkerId
from breadbox_server.core.model.inputs import (
    AppendFragments,
    DropPayloads,
    Fetch,
    GiveBackTicket,
    ReleaseLease,
    ReleaseMode,
    TakeTickets,
)
from breadbox_server.core.rules.tickets import free_count
from support.inputs import publish_model, start_session
from support.metadata import make_fragment

SIZE = 2
"""Members of a group: the first begins it, the second completes it."""
FOR_EVER = 10**9


@dataclass
class RolloutStat:
    """AReaL's counts of rollouts."""

    accepted: int = 0
    enqueued: int = 0
    rejected: int = 0
    running: int = 0


class StalenessManager:
    """What AReaL asks how many rollouts may begin."""

    def __init__(
        self,
        version_provider: Any,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
    ) -> None:
        self.version_provider = version_provider
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.consumer_batch_size = consumer_batch_size
        self.max_staleness = max_staleness
        self.lock = Lock()
        self.rollout_stat = RolloutStat()
        self._batch = max(1, consumer_batch_size)
        self._config = BufferConfig(
            assembly=AssemblyPolicy.GROUPS,
            fragments_per_chunk=SIZE,
            groups_per_version=self._batch,
            lead_versions=max_staleness,
            staleness_max=FOR_EVER,
            capacity_chunks=FOR_EVER,
            workers_max=FOR_EVER,
            open_chunk_s=86_400.0,
        )
        self._begin(0)

    def _begin(self, version: int) -> None:
        self._buffers = BufferSet(random.Random(0), self._config)
        self._buffers.apply(start_session("s", version, buffer=DEFAULT_BUFFER), now=0.0)
        self._version = version
        self._running: list[str] = []
        self._ticketed: set[str] = set()
        self._begun_count = self._request_count = self._untrained_count = 0

    def get_pending_limit(self) -> int:
        """Return how many rollouts may wait to begin."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def get_capacity(self) -> int:
        """Return how many rollouts may begin, by both limits."""
        with self.lock:
            self._go_to(self.version_provider.get_version())
            state = self._buffers[DEFAULT_BUFFER]._state  # noqa: SLF001 - the rule asks for it
            free = free_count(state) + self._untrained_count
            return min(max(1, self.max_concurrent_rollouts) - self.rollout_stat.running, free)

    def on_version_recovered(self, version: int) -> None:
        """Begin anew at a version, as if each version before had trained on its batch."""
        with self.lock:
            running = len(self._running)
            self._begin(version)
            for _ in range(running):
                self._submit()
            self.rollout_stat.accepted = version * self._batch

    def on_rollout_enqueued(self) -> None:
        """Count a rollout that waits to begin."""
        with self.lock:
            self.rollout_stat.enqueued += 1

    def on_rollout_submitted(self) -> None:
        """Begin the group of a rollout."""
        with self.lock:
            self.rollout_stat.enqueued -= 1
            self.rollout_stat.running += 1
            self._submit()

    def on_rollout_accepted(self) -> None:
        """Complete the group of a rollout."""
        with self.lock:
            self.rollout_stat.running -= 1
            self.rollout_stat.accepted += 1
            if self._running:
                group = self._running.pop()
                is_begun = group not in self._ticketed
            else:  # It was never said to have begun.
                group, is_begun = self._new_name(), False
            self._append(group, *range(int(is_begun), SIZE))
            self._ticketed.discard(group)

    def on_rollout_rejected(self) -> None:
        """Give up the group of a rollout."""
        with self.lock:
            self.rollout_stat.running -= 1
            self.rollout_stat.rejected += 1
            group = self._running.pop() if self._running else ""
            if group in self._ticketed:
                self._ticketed.discard(group)
                self._apply(GiveBackTicket(DEFAULT_BUFFER, WorkerId(group)))
            elif group:
                held = self._buffers[DEFAULT_BUFFER].fragments()
                lost = [each.payload.payload_id for each in held if each.worker_id == group]
                self._apply(DropPayloads(DEFAULT_BUFFER, tuple(lost)))

    def get_stats(self) -> RolloutStat:
        """Return the counts as they are now."""
        with self.lock:
            return replace(self.rollout_stat)

    def _submit(self) -> None:
        self._request_count += 1
        self._buffers.take_events()
        take = TakeTickets(
            DEFAULT_BUFFER,
            request_id=RequestId(f"r{self._request_count}"),
            ticket_count=1,
            deadline_at=0.0,
            lease_s=86_400.0,
        )
        self._apply(take)
        taken = [each for each in self._buffers.take_events() if isinstance(each, TicketsTaken)]
        if taken:
            [group] = taken[0].groups
            self._ticketed.add(group)
        else:
            group = WorkerId(self._new_name())
            self._append(group, 0)
        self._running.append(group)

    def _new_name(self) -> str:
        self._begun_count += 1
        return f"g{self._begun_count}"

    def _append(self, group: str, *members: int) -> None:
        sent = [
            make_fragment(group, member, session_id="s", version=self._version)
            for member in members
        ]
        self._apply(AppendFragments(DEFAULT_BUFFER, sent))

    def _go_to(self, version: int) -> None:
        """Fetch what each version was supposed to have trained on, and publish the latest."""
        if version <= self._version:
            return
        wanted = (version - self._version) * self._batch
        held_count = self._buffers.describe(DEFAULT_BUFFER, now=0.0).chunk_count
        taken = min(wanted, held_count)
        if taken:
            self._request_count += 1
            fetch = Fetch(
                DEFAULT_BUFFER,
                request_id=RequestId(f"r{self._request_count}"),
                fragment_count=taken * SIZE,
                deadline_at=0.0,
            )
            self._apply(fetch)
            for each in self._buffers.take_events():
                if isinstance(each, FetchGranted):
                    self._apply(ReleaseLease(DEFAULT_BUFFER, each.lease_id, ReleaseMode.CONSUMED))
        self._untrained_count += wanted - taken
        self._version = version
        self._apply(publish_model(version, session_id="s", buffer=DEFAULT_BUFFER))

    def _apply(self, command: Any) -> Any:
        return self._buffers.apply(command, now=0.0)
