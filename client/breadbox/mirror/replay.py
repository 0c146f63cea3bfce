"""A memory that fills itself from a buffer."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Any, Final, Protocol, Self

from breadbox.ahead import run_ahead
from breadbox.client import Client, connect
from breadbox.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplayBufferError,
    StoreUnavailableError,
    SubscriptionNotFoundError,
    UnavailableError,
)
from breadbox.mirror.index import NONE
from breadbox.mirror.memory import StepMemory
from breadbox.mirror.waiting import why_nothing_comes
from breadbox.outages import OutageLog
from breadbox.presets import OFF_POLICY_ADVICE
from breadbox.reading import LoadedRead
from breadbox.types import BufferDescription, FragmentRead

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Seconds that a read waits for what comes next; also how long `close` may wait for one."""
RETRY_S: Final = 1.0
"""Between two attempts while server or store are away, once `reconnect_s` is over."""
CATCH_UP_CHUNKS: Final = 4096
"""Chunks that are passed by at a time in looking for the newest one."""
CATCH_UP_READS: Final = 64
"""Times that this is done at most."""

LOOK_AGE_S: Final = 60.0
"""Looks at the buffer that are older say nothing of why steps are waited for."""
LOOKS_MAX: Final = 32
"""That are kept: there is one a second, so what is told is of the last half minute."""
STALENESS_ENOUGH: Final = 100
"""A lower `staleness_max` is taken to be meant for on-policy learners."""

_OUTAGES = (DeadlineExceededError, StoreUnavailableError, UnavailableError)


class ReadClient(Protocol):
    """What a mirror needs of a client."""

    @property
    def outage(self) -> str:
        """What fails now and is tried again; empty: nothing does."""

    def tail(
        self,
        after_chunk_id: int | None = None,
        *,
        max_wait_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        is_acknowledging: bool = True,
        columns: Sequence[str] | None = None,
        is_mapped: bool = False,
        buffer: str | None = None,
    ) -> Iterator[LoadedRead]:
        """Load what a buffer holds after a chunk, and then what comes."""

    def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        subscription: str | None = None,
        buffer: str | None = None,
    ) -> FragmentRead:
        """Read what comes after a chunk."""

    def release_lease(self, lease_id: str, *, buffer: str | None = None) -> None:
        """End a read's lease."""

    def acknowledge_chunks(
        self, subscription: str, chunk_id: int, *, buffer: str | None = None
    ) -> None:
        """Say that a subscription has passed a chunk."""

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        """Describe a buffer with its subscriptions."""


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
        super().__init__(capacity_steps, seed=seed, frame_stack=frame_stack)
        self.skipped_chunk_count = 0
        """Chunks that left the buffer before they were loaded, or cannot be read; with a
        subscription, of those that it had not passed."""
        self.session_id = ""
        """Of the steps; empty before the first read, and where no session is current."""
        self._own: Client | None = None
        if isinstance(client, str):
            self._own = connect(client, buffer=buffer or "default", **connection)
        self._client: ReadClient = self._own or client  # type: ignore[assignment]
        self._buffer = buffer
        self._subscription = subscription
        self._passed = NONE
        """The chunk that the subscription had passed before this mirror."""
        self._acknowledged = NONE
        """The chunk that this mirror acknowledged last."""
        self._kept_columns = columns
        self._closing = threading.Event()
        self._cursor: int | None = None
        """Chunks up to this one are here, or are gone; None: nothing was read yet."""
        self._begun_count = 0
        """Times that it began anew, as the buffer was set back."""
        self._asked_at = time.monotonic()
        """When what comes next was asked for."""
        self._arrived: deque[float] = deque()
        """When reads came that are not taken in."""
        self._is_first = True
        self._looks: deque[tuple[float, BufferDescription]] = deque(maxlen=LOOKS_MAX)
        """What the buffer was like, and when: at first, and while somebody waits for steps."""
        self._outages = OutageLog(_log, "following the buffer")
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    @property
    def lag_s(self) -> float:
        """Seconds for which it has been behind the buffer; 0 while it keeps up."""
        now = time.monotonic()
        with suppress(IndexError):
            return now - self._arrived[0]
        # A read that is not answered in its time says that nobody knows how far behind this is.
        return max(0.0, now - self._asked_at - (0.0 if self._is_first else POLL_S))

    def catch_up(self, timeout_s: float | None = None) -> None:
        """Wait until all is here that the buffer held at this moment.

        So who has appended, and was answered, finds here what it appended.

        Raises:
            WaitElapsedError: It took longer than `timeout_s`.
            ReplayBufferError: What ended the mirroring; or that the server cannot be asked.
        """
        begun_count, newest = self._begun_count, self._after
        is_set_back = False
        for _ in range(CATCH_UP_READS):  # Where producers are as fast as this it would not end.
            read = self._client.read_fragments(
                newest,
                chunk_count_max=CATCH_UP_CHUNKS,
                subscription=self._subscription,
                buffer=self._buffer,
            )
            if read.lease_id is not None:
                with suppress(ReplayBufferError):  # It expires by itself.
                    self._client.release_lease(read.lease_id, buffer=self._buffer)
            if newest is not None and read.cursor < newest:
                is_set_back, newest = True, self._beginning
            elif read.lease_id is None:
                break
            else:
                newest = read.cursor

        def is_here() -> bool:
            if is_set_back and self._begun_count == begun_count:
                return False  # What is here is of the buffer as it was before.
            return newest in (None, NONE) or (self._cursor is not None and self._cursor >= newest)

        self._wait_for(is_here, "all steps", timeout_s)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """End the thread; takes up to a second. Idempotent. What it holds can still be sampled."""
        self._closing.set()
        if self._own is not None:
            self._own.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if not self._looks:
                    self._look()
                    self._warn_of_limits()
                self._follow()
                if self._waiting_count:
                    self._look()
            except Exception as error:
                if self._closing.is_set():
                    return
                if not self._is_first and isinstance(error, _OUTAGES):
                    self._outages.failed(error)
                    self._closing.wait(RETRY_S)
                    continue
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                if not isinstance(error, ReplayBufferError):
                    raise
                return

    def _look(self) -> None:
        """Find out what the buffer is like."""
        self._looks.append((time.monotonic(), self._client.get_buffer(self._buffer)))

    def _warn_of_limits(self) -> None:
        """Say so where the buffer's limits will let the mirror starve."""
        _, described = self._looks[-1]
        staleness_max = described.config.staleness_max
        if staleness_max is not None and staleness_max < STALENESS_ENOUGH:
            _log.warning(
                "buffer %r is for on-policy learners: steps that are more than %d versions old are "
                "refused, and leave it, so that this mirror gets no more of them. %s",
                described.name,
                staleness_max,
                OFF_POLICY_ADVICE,
            )

    def _why_nothing_comes(self) -> str:
        if outage := self._client.outage or self._outages.words:
            return outage
        if self._is_first:
            return "the server has not answered yet"
        now = time.monotonic()
        looks = [look for look in list(self._looks) if now - look[0] <= LOOK_AGE_S]
        return why_nothing_comes(looks) if looks else ""

    def _follow(self) -> None:
        """Take in what comes, until nothing does for a while; one read is loaded ahead."""
        self._arrived.clear()  # What an outage kept from being taken in is read again.
        self._acknowledge()
        if self._subscription is not None and self._cursor is None:
            self._passed = self._where_it_stands(self._subscription)
        tail = self._client.tail(
            self._after,
            # The first says what there is, even if that is nothing.
            max_wait_s=0.0 if self._is_first else POLL_S,
            known_session_id=self.session_id or None,
            subscription=self._subscription,
            is_acknowledging=False,
            columns=self._kept_columns,
            is_mapped=True,
            buffer=self._buffer,
        )

        def next_read(_: object) -> LoadedRead | None:
            self._asked_at = time.monotonic()
            read = next(tail, None)
            if read is not None:
                self._arrived.append(time.monotonic())
            return read

        with closing(
            run_ahead(itertools.repeat(None), next_read, at_once=1, depth=1, in_order=True)
        ) as reads:
            for read in reads:
                self._is_first = False
                self._outages.succeeded()
                if read is None or self._closing.is_set():
                    return
                if self._is_set_back(read):
                    self._begin_anew()
                    return
                self._take_in(read)
                self._arrived.popleft()
                self._acknowledge()
                if self._cursor is None:
                    return

    @property
    def _after(self) -> int | None:
        """The chunk after which it reads on."""
        return self._beginning if self._cursor is None else self._cursor

    @property
    def _beginning(self) -> int | None:
        """The chunk after which it reads at first."""
        # Not where the subscription stands: what it passed may be there still.
        return None if self._subscription is None else NONE

    def _where_it_stands(self, name: str) -> int:
        """The chunk up to which a subscription is acknowledged.

        Raises:
            SubscriptionNotFoundError: There is none of the name.
        """
        for each in self._client.get_buffer(self._buffer).subscriptions:
            if each.name == name:
                return each.acknowledged_chunk_id
        raise SubscriptionNotFoundError(name)

    def _acknowledge(self) -> None:
        """Let the subscription pass what is taken in."""
        name, cursor = self._subscription, self._cursor
        if name is None or cursor is None or cursor == self._acknowledged:
            return
        try:
            self._client.acknowledge_chunks(name, cursor, buffer=self._buffer)
        except InvalidRequestError as error:
            if error.field != "chunk_id":
                raise
            # The buffer does not know the chunk: its books were set back.
            _log.warning("subscription %s was set back: %s", name, error)
            self._begin_anew()
            return
        self._acknowledged = cursor

    def _is_set_back(self, read: LoadedRead) -> bool:
        """Whether the buffer has had fewer chunks than were read of it.

        As with books of a Redis that came back from a copy.
        """
        cursor = self._cursor
        return cursor is not None and (
            read.cursor < cursor or any(each.chunk_id <= cursor for each in read.references[:1])
        )

    def _begin_anew(self) -> None:
        """Forget what a buffer had before it was set back; what it holds is read next."""
        self.clear()
        with self._changed:
            self.session_id, self._cursor = "", None
            self._passed, self._acknowledged = NONE, NONE
            self._begun_count += 1
            self._changed.notify_all()

    def _skipped_count(self, read: LoadedRead) -> int:
        """Chunks that a read did not give, but for those that the subscription had passed."""
        after = NONE if self._cursor is None else self._cursor
        passed_to = min(self._passed, read.cursor)
        if passed_to <= after:
            return read.skipped_chunk_count
        given = {each.chunk_id for each in read.references if each.chunk_id <= passed_to}
        return max(0, read.skipped_chunk_count - (passed_to - after - len(given)))

    def _take_in(self, read: LoadedRead) -> None:
        if read.session_id != self.session_id:
            self.clear()
            self.session_id = read.session_id
        self.skipped_chunk_count += self._skipped_count(read)
        for fragment, reference in zip(read.fragments, read.references, strict=True):
            # Between two reads a session may end, and the tail of the old one is still told.
            if fragment.session_id == self.session_id:
                self.extend(fragment, reference.chunk_id)
        with self._changed:
            self._cursor = read.cursor
            self._changed.notify_all()
