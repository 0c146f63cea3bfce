"""A memory that fills itself from a buffer."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from breadbox.client import connect
from breadbox.mirror.following import Follower, ReadClient, Source
from breadbox.mirror.holdings import FilledHoldings
from breadbox.mirror.memory import StepMemory, check_whole
from breadbox.mirror.memory_map import PrivateMemory


class ReplayMirror(StepMemory):
    """The latest steps of a buffer, kept up to date by a thread; sampled as one's own memory is.

    What it holds follows from the buffer alone: a learner that is killed and started again has the
    same steps, but for those that left the buffer meanwhile. A new session empties it, and so does
    a buffer that comes back older than what was read: then it fills itself anew. While server
    or store are away it goes on with what it has. An error that does not pass by itself, such as
    credentials that are refused, ends the thread, and the next call that draws or waits raises it.

    Where steps are waited for, it says what keeps them: no session, no server, nothing that
    arrives, or steps refused as stale; in the error when the time is over, and in a line of the log
    every 30 s. A buffer whose limits are made for on-policy learners is told of once, when it is
    opened.

    Use it as a context manager, or call `close`.

    Args:
        client: Of a server, or its address, HOST:PORT, to which a client is made; one that is given
            stays open, and is used from the thread.
        buffer: None: the client's.
        subscription: Name of a subscription of the buffer, of this mirror alone, by which it reads.
            It acknowledges what has been taken in. What a retaining one keeps is taken in as well:
            chunks that left while no mirror ran. None: it reads what the buffer holds.
        capacity_steps: As `seed` and `frame_stack`, of `StepMemory`.
        seed: Of all draws.
        frame_stack: Which observations are stacks of frames.
        columns: Paths of the arrays to keep, such as "obs.image"; None: all.
        connection: Further arguments of `breadbox.connect`, such as `token`, for an address.

    Raises:
        InvalidRequestError: An argument is out of its range.
    """

    def __init__(
        self,
        client: ReadClient | str,
        *,
        buffer: str | None = None,
        subscription: str | None = None,
        capacity_steps: int = 1_000_000,
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
        columns: Sequence[str] | None = None,
        **connection: Any,
    ) -> None:
        check_whole("capacity_steps", capacity_steps, 1)
        held = FilledHoldings(capacity_steps, frame_stack or {}, PrivateMemory())
        is_address = isinstance(client, str)
        follower = Follower(
            held,
            connect(client, buffer=buffer or "default", **connection) if is_address else client,  # type: ignore[arg-type]
            buffer=buffer,
            subscription=subscription,
            columns=columns,
            owns_client=is_address,
        )
        self._source: Source = follower
        self._is_closed = False
        self._begin(held, seed)
        follower.start()

    @property
    def session_id(self) -> str:
        """Of the steps; empty before the first read, and where no session is current."""
        return self._source.session_id

    @property
    def skipped_chunk_count(self) -> int:
        """Chunks that left the buffer before they were loaded, or cannot be read.

        With a subscription, of those that it had not passed.
        """
        return self._source.skipped_chunk_count

    @property
    def lag_s(self) -> float:
        """Seconds for which it has been behind the buffer; 0 while it keeps up."""
        return self._source.lag_s

    def catch_up(self, timeout_s: float | None = None) -> None:
        """Wait until all is here that the buffer held at this moment.

        So who has appended, and was answered, finds here what it appended.

        Raises:
            WaitElapsedError: It took longer than `timeout_s`.
            ReplayBufferError: What ended the mirroring; or that the server cannot be asked.
        """
        source, aim = self._source, self._source.aim()
        self._wait_for(
            lambda: aim.is_met(source.cursor, source.begun_count), "all steps", timeout_s
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """End the thread; takes up to a second. Idempotent. What it holds can still be sampled."""
        self._is_closed = True
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._source.waiting()

    def _raise_failure(self) -> None:
        if self._source.failure is not None:
            raise self._source.failure

    def _why_nothing_comes(self) -> str:
        return self._source.why_nothing_comes()
