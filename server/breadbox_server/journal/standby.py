"""A warm standby: follows a journal that another server writes, and goes on in its place.

Its core replays each turn soon after it was written. When the leader's heartbeat has expired it
claims the journal. If the leader is merely slow, the claim's epoch keeps it from writing,
confirming and deleting.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from time import monotonic
from typing import Final, TypeVar

from breadbox.model.errors import StoreError, StoreUnavailableError
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import StoreTakenError
from breadbox_server.base.errors import StandbyError
from breadbox_server.base.unforeseen import unforeseen_as
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.recovery import Recovered, Replay, recover, without_collections
from breadbox_server.journal.storage.claims import ALIVE_S, Claim, Holder
from breadbox_server.journal.storage.interface import (
    JournalDamagedError,
    JournalError,
    JournalHeldError,
    JournalStatus,
    JournalUnavailableError,
    JournalView,
    Written,
)
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 0.05
"""Between two looks at a journal of which everything is replayed."""
RETRY_S: Final = 0.2
"""Between two looks at one that cannot be reached or read."""
RETURN_S: Final = 3 * ALIVE_S
"""Seconds for the leader to send a heartbeat once the journal's Redis answers again: they
expire in an outage, and a Redis that lost something needs the server that knows the rest."""

WARM_LAG_S_MAX: Final = 5.0
"""Further behind than this a standby would have to read for a while before it leads."""

_KNOWN: Final = (JournalError, StoreError, MemoryError)

T = TypeVar("T")
Restore = Callable[[Iterable[BufferSnapshot]], BufferSet]


class JournalFollower:
    """A core that follows a journal. Blocking: each call belongs into a thread, one at a time."""

    def __init__(
        self, view: JournalView, restore: Restore, *, now: Callable[[], float] = monotonic
    ) -> None:
        self._view = view
        self._restore = restore
        self._now = now
        self._replay: Replay | None = None
        self._last: Written | None = None
        """The turn that the core has come to, as it was read, or None right after a snapshot."""
        self._status: JournalStatus | None = None
        self._answers_since = -inf
        """When the journal answered again after it was away; minus infinity if it never was."""
        self._is_away = False
        self._current_at = now()
        """When the core was last known to be as the journal is."""
        self.is_read = False
        """Whether the core has come to the journal's end since it began."""

    def step(self) -> bool:
        """Take in some of what is new, from the snapshot if need be; True if there is more."""
        try:
            status = self._view.look(self._replay.sequence if self._replay else 1)
        except JournalError:
            self._is_away = True
            raise
        self._see(status)
        if self._replay is None:
            if not status.snapshot:
                self._current_at, self.is_read = self._now(), True
                return False
            self._load()
            return True
        if not status.turns or not self._goes_on(status.turns[0]):
            is_known, sequence = self._last is not None, self._replay.sequence
            self._begin_again()
            if not is_known:
                raise JournalDamagedError(f"{self._view.shown} lacks turn {sequence}")
            log.info("the journal has gone past turn %d: reading it again", sequence)
            return True
        try:
            for turn in status.turns[1:]:
                if turn.sequence != self._replay.sequence + 1:
                    raise JournalDamagedError(
                        f"{self._view.shown} lacks turns before {turn.sequence}"
                    )
                self._replay.add(turn.sequence, turn.record)
                self._last = turn
        except JournalError:
            # Perhaps the journal was begun again, right behind what was read.
            self._begin_again()
            raise
        self._replay.forget(status.snapshot)
        if self.lag_turns:
            return True
        self._current_at, self.is_read = self._now(), True
        return False

    def _begin_again(self) -> None:
        self._replay = self._last = None
        self.is_read = False

    def _load(self) -> None:
        # The one before goes first: there is room for one.
        with without_collections():
            self._replay = Replay(self._view, self._restore)
        self._last = None
        gc.freeze()

    def _goes_on(self, turn: Written) -> bool:
        """Whether what stands where the core has come to is what the core contains."""
        assert self._replay is not None
        if self._last is None and turn.sequence == self._replay.sequence:
            self._last = turn
        return turn == self._last

    def _see(self, status: JournalStatus) -> None:
        before, self._status = self._status, status
        if self._is_away or (before is not None and before.incarnation != status.incarnation):
            self._answers_since = self._now()
        self._is_away = False

    @property
    def lag_turns(self) -> int:
        """Turns in the journal that the core does not contain yet, as of the last look."""
        newest = self._status.newest if self._status else 0
        return max(0, newest - (self._replay.sequence if self._replay else 0))

    @property
    def lag_s(self) -> float:
        """Seconds for which the core may not have been as the journal is."""
        lag_s = self._now() - self._current_at
        return 0.0 if self.is_read and lag_s < RETRY_S and not self.lag_turns else lag_s

    def is_warm(self) -> bool:
        """Return True if it could lead immediately: it has read all but the last seconds."""
        return self.is_read and self.lag_s <= WARM_LAG_S_MAX

    @property
    def leader(self) -> Holder | None:
        """The server that writes the journal, or None if none is known to."""
        return self._status.holder if self._status else None

    @property
    def epoch(self) -> int:
        """Epoch of the latest claim; 0 if there was none."""
        return self._status.epoch if self._status else 0

    @property
    def left_s(self) -> float:
        """Seconds until the leader's last heartbeat expires, as of the last look."""
        return self._status.left_s if self._status else 0.0

    def may_claim(self) -> bool:
        """Return True if the leader's heartbeat expired (see `RETURN_S`) or its process is dead."""
        if self.leader is not None:
            return self.leader.is_dead()
        return self._status is not None and self._now() - self._answers_since >= RETURN_S

    def claim(self, holder: Holder) -> Claim | None:
        """Claim the journal if it may be claimed, displacing a leader known to be dead."""
        try:
            return self._view.claim(holder, self.leader.token if self.leader else "")
        except JournalHeldError as error:
            log.debug("%s", error)
            return None

    def recover(self) -> Recovered | None:
        """Return the core as the claimed journal has it, or None if nothing was ever written."""
        try:
            while self.step():
                pass
            # It stays, and has no cycles: no collection needs to walk it.
            gc.freeze()
            return self._replay.recovered() if self._replay else None
        except JournalDamagedError as error:
            log.warning("%s; reading the journal from its snapshot on", error)
        return recover(self._view, self._restore)


async def outlasting(step: Callable[[], Awaitable[T]], what: str) -> T:
    """Take a step of a server that has the lead already; wait while journal or store are away."""
    outage = OutageLog(log, what)
    while True:
        try:
            answer = await step()
        except StoreTakenError:
            raise
        except (JournalUnavailableError, StoreUnavailableError) as error:
            outage.failed(error)
            await asyncio.sleep(RETRY_S)
        else:
            outage.succeeded()
            return answer


class Standby:
    """Follows a journal until it leads."""

    def __init__(self, follower: JournalFollower, metrics: Metrics) -> None:
        self._follower = follower
        self._metrics = metrics
        self._outage = OutageLog(log, "following the journal")

    def refusal(self) -> StandbyError:
        """Return the error that every caller gets."""
        follower = self._follower
        leader = follower.leader
        return StandbyError(
            leader.shown if leader else "", follower.epoch, follower.lag_turns, follower.lag_s
        )

    def reason(self) -> str:
        """Return why this server does not serve, for people."""
        follower = self._follower
        leads = f"{follower.leader.shown} leads" if follower.leader else "no server leads"
        behind = (
            f"{follower.lag_turns} turns and {follower.lag_s:.1f} s behind"
            if follower.is_read
            else "has not read the journal yet"
        )
        return f"stands by: {leads}, epoch {follower.epoch}; {behind}"

    def is_warm(self) -> bool:
        """Return True if it could lead immediately."""
        return self._follower.is_warm()

    async def lead(self, check: Callable[[], Awaitable[None]]) -> tuple[Claim, Recovered | None]:
        """Return the claim, and the core or None for a new journal, once this server leads.

        It waits for as long as another server lives or the journal is away.
        """
        holder = Holder.of_this_process()
        while True:
            wait_s = await self._follow()
            if wait_s:
                try:
                    with unforeseen_as(JournalUnavailableError, _KNOWN, "taking the lead"):
                        if found := await self._take_lead(holder, check):
                            return found
                except (JournalUnavailableError, StoreUnavailableError) as error:
                    self._outage.failed(error)
                    wait_s = RETRY_S
            await asyncio.sleep(wait_s)

    async def _take_lead(
        self, holder: Holder, check: Callable[[], Awaitable[None]]
    ) -> tuple[Claim, Recovered | None] | None:
        leader = self._follower.leader
        # An outage may have come between this server's claim and what it had to read then.
        is_ours = leader is not None and leader.token == holder.token
        if not (is_ours or await asyncio.to_thread(self._follower.may_claim)):
            return None
        await check()
        claim = await asyncio.to_thread(self._follower.claim, holder)
        if claim is None:
            return None
        recovered = await asyncio.to_thread(self._follower.recover)
        self._metrics.standby_lag_turns.set(0)
        self._metrics.standby_lag_seconds.set(0)
        return claim, recovered

    async def _follow(self) -> float:
        wait_s = 0.0
        try:
            with unforeseen_as(JournalUnavailableError, _KNOWN, "following the journal"):
                if not await asyncio.to_thread(self._follower.step):
                    # No later than the leader's heartbeat expires.
                    wait_s = min(LOOK_PERIOD_S, self._follower.left_s or LOOK_PERIOD_S)
            self._outage.succeeded()
        except (JournalUnavailableError, JournalDamagedError) as error:
            # A leader that lives begins a damaged journal again from its memory.
            self._outage.failed(error)
            wait_s = RETRY_S
        self._metrics.standby_lag_turns.set(self._follower.lag_turns)
        self._metrics.standby_lag_seconds.set(self._follower.lag_s)
        return wait_s
