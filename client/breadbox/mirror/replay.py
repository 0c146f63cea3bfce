"""A memory that fills itself from a buffer."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from breadbox.client import Client, connect
from breadbox.errors import InvalidRequestError
from breadbox.mirror.following import Follower, ReadClient, Source
from breadbox.mirror.holdings import FilledHoldings, Holdings
from breadbox.mirror.memory import StepMemory, check_whole
from breadbox.mirror.memory_map import PrivateMemory
from breadbox.mirror.process import AttachedSource, OwnedSource, ProcessSource
from breadbox.options import ClientOptions


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
        process: Whether another process, started and ended with this mirror, takes in what comes,
            in memory that both share, in place of a thread: taking in then costs draws next to
            nothing, and more processes of this host can draw from it, see `share`. Draws are the
            same. For Linux; `client` is an address, or the client is one of a server, of which the
            process makes its own.
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
        process: bool = False,
        **connection: Any,
    ) -> None:
        check_whole("capacity_steps", capacity_steps, 1)
        if process:
            server, options = _address_and_options(client, buffer, connection)
            owned = OwnedSource(
                server,
                options,
                buffer=buffer,
                subscription=subscription,
                columns=columns,
                capacity_steps=capacity_steps,
                frame_stack=frame_stack or {},
            )
            self._enter(owned.held, seed, owned)
            return
        held = FilledHoldings(capacity_steps, frame_stack or {}, PrivateMemory())
        own = (
            connect(client, buffer=buffer or "default", **connection)
            if isinstance(client, str)
            else None
        )
        follower = Follower(
            held,
            self.extend,
            own or client,  # type: ignore[arg-type]
            buffer=buffer,
            subscription=subscription,
            columns=columns,
            own_client=own,
        )
        self._enter(held, seed, follower)
        follower.start()

    def _enter(self, held: Holdings, seed: int | None, source: Source) -> None:
        self._source = source
        self._is_closed = False
        self._begin(held, seed)

    @classmethod
    def attach(cls, address: str, *, seed: int | None = None) -> Self:
        """Draw from a mirror that another process of this host, and of this user, has made.

        Steps are there once. Draws and priorities are of each process alone: updates are seen by
        who makes them. It closes by itself; the mirror ends with who made it, and the next call
        that draws or waits then raises ClosedError. `clear` empties it for all.

        Args:
            address: That `share` gave.
            seed: Of the draws; another one for each process, or they draw the same.

        Raises:
            InvalidRequestError: It is no such address.
            ClosedError: No mirror is there, within 30 s.
            PermissionDeniedError: It is another user's.
        """
        mirror = cls.__new__(cls)
        attached = AttachedSource(address)
        mirror._enter(attached.held, seed, attached)  # noqa: SLF001 - its own
        return mirror

    def share(self) -> str:
        """Give an address at which other processes of this host can `attach`.

        Raises:
            InvalidRequestError: It is not in a process of its own.
        """
        if not isinstance(self._source, ProcessSource):
            raise InvalidRequestError(
                "process", "must be True where a mirror is made that others attach to"
            )
        return self._source.address

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


def _address_and_options(
    client: ReadClient | str, buffer: str | None, connection: dict[str, Any]
) -> tuple[str, ClientOptions]:
    """What a process needs to make a client like this one.

    Raises:
        InvalidRequestError: An argument is out of its range, or it is no client of a server.
    """
    if isinstance(client, str):
        with connect(client, buffer=buffer or "default", **connection) as made:
            return _address_and_options(made, buffer, {})
    if not isinstance(client, Client):
        raise InvalidRequestError(
            "process", "needs the address of a server, or a breadbox.Client of one"
        )
    return client.address, client._context.options  # noqa: SLF001 - the same library's
