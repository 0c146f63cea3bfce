"""Learners' fetches that wait: each gets its grant once that is durable, or gives it back."""

import asyncio
import logging

from breadbox_server.admission.precedence import Precedence
from breadbox_server.core.model.errors import BufferNotFoundError
from breadbox_server.core.model.events import FetchGranted, FetchRefused, WaitElapsed
from breadbox_server.core.model.ids import BufferName, CallerId, RequestId
from breadbox_server.core.model.inputs import CancelFetch, Fetch, UndeliveredGrant
from breadbox_server.journal.durable_core import DurableCore

log = logging.getLogger(__name__)


class Fetches:
    """Have the core grant fragments, and wake the fetches that wait for them."""

    def __init__(self, core: DurableCore, precedence: Precedence) -> None:
        self._core = core
        self._precedence = precedence
        self._callers: dict[CallerId, asyncio.Future[FetchGranted | WaitElapsed]] = {}

    async def fetch(
        self,
        *,
        buffer: BufferName,
        request_id: RequestId,
        fragment_count: int,
        wait_s: float,
        rank: int,
        world_size: int,
        lease_s: float | None,
    ) -> FetchGranted | WaitElapsed:
        """Wait `wait_s` at most for fragments. A cancel gives a grant of its own tick back."""
        self._core.turns.check_room()
        now = self._core.clock.now()
        command = Fetch(
            buffer=buffer,
            request_id=request_id,
            fragment_count=fragment_count,
            deadline_at=now + wait_s,
            rank=rank,
            world_size=world_size,
            lease_s=lease_s,
        )
        async with self._core.durable_refusals():
            try:
                caller_id = self._core.buffers.apply(command, now=now)
            except BaseException:
                self._core.pump()
                raise
        future: asyncio.Future[FetchGranted | WaitElapsed]
        future = self._callers[caller_id] = asyncio.get_running_loop().create_future()
        self._precedence.end()
        self._core.pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                cancel = CancelFetch(buffer, caller_id)
                self._apply_if_buffer_lives(cancel)
            elif future.exception() is None:
                # The outcome landed in the tick that cancelled us: nobody else will hold it.
                self._give_back(future.result())
            self._core.pump()
            raise
        finally:
            self._precedence.begin()
            del self._callers[caller_id]

    def take_back(self, granted: FetchGranted) -> None:
        """Undo a grant whose reply is not sent, because its caller went away."""
        self._give_back(granted)
        self._core.pump()

    def wake(self, event: FetchGranted | FetchRefused | WaitElapsed) -> None:
        """Wake the fetch that waits for an outcome, which is durable."""
        future = self._callers.get(event.caller_id)
        if future is None or future.done():
            self._give_back(event)
        elif isinstance(event, FetchRefused):
            future.set_exception(event.error)
        else:
            future.set_result(event)

    def _give_back(self, outcome: FetchGranted | FetchRefused | WaitElapsed) -> None:
        if isinstance(outcome, FetchGranted):
            self._apply_if_buffer_lives(UndeliveredGrant(outcome.buffer, outcome.lease_id))

    def _apply_if_buffer_lives(self, command: CancelFetch | UndeliveredGrant) -> None:
        try:
            self._core.decide(command)
        except BufferNotFoundError:
            log.debug("buffer %s was deleted before a caller's end was reported", command.buffer)

    @property
    def waiting_count(self) -> int:
        """Number of fetches in progress: those that wait, and those not yet resumed."""
        return len(self._callers)
