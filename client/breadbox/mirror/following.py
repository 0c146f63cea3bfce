"""A thread that follows a buffer, and fills a memory with its steps."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Final, NamedTuple, Protocol

from breadbox.ahead import run_ahead
from breadbox.client import Client
from breadbox.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplayBufferError,
    StoreUnavailableError,
    SubscriptionNotFoundError,
    UnavailableError,
)
from breadbox.fragment import Fragment
from breadbox.mirror.holdings import FilledHoldings
from breadbox.mirror.index import NONE
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


class Aim(NamedTuple):
    """What has to be taken in for all to be there that a buffer held at a moment."""

    chunk_id: int | None
    """Up to this chunk; None or NONE: there was none."""
    begun_count: int
    """Times that the follower has begun anew by then."""

    def is_met(self, cursor: int | None, begun_count: int) -> bool:
        """Whether it is there, of a follower that has come so far."""
        if begun_count < self.begun_count:
            return False  # What is here is of the buffer as it was before.
        return self.chunk_id in (None, NONE) or (cursor is not None and cursor >= self.chunk_id)


class Source(Protocol):
    """What fills a mirror, as the mirror sees it."""

    @property
    def failure(self) -> BaseException | None:
        """What ended it; None: nothing did."""

    @property
    def session_id(self) -> str:
        """Of the steps; empty before the first read, and where no session is current."""

    @property
    def skipped_chunk_count(self) -> int:
        """Chunks that left before they were loaded."""

    @property
    def cursor(self) -> int | None:
        """Chunks up to this one are here, or are gone; None: nothing was read yet."""

    @property
    def begun_count(self) -> int:
        """Times that it began anew, as the buffer was set back."""

    @property
    def lag_s(self) -> float:
        """Seconds for which it has been behind the buffer; 0 while it keeps up."""

    def aim(self) -> Aim:
        """What the buffer holds now."""

    def why_nothing_comes(self) -> str:
        """What keeps steps from coming, as far as it knows; empty: nothing that is known."""

    def waiting(self) -> AbstractContextManager[None]:
        """While somebody waits for steps."""

    def close(self) -> None:
        """End it. Idempotent."""


class Follower:
    """A thread that takes in what a buffer holds, and then what comes.

    Args:
        held: Where the steps go.
        extend: Takes a fragment of a chunk in.
        client: Of the server; used from the thread.
        buffer: None: the client's.
        subscription: By which it reads; None: what the buffer holds.
        columns: Paths of the arrays to keep; None: all.
        own_client: The client if it is to be closed with this.
    """

    def __init__(
        self,
        held: FilledHoldings,
        extend: Callable[[Fragment, int], int],
        client: ReadClient,
        *,
        buffer: str | None,
        subscription: str | None,
        columns: Sequence[str] | None,
        own_client: Client | None,
    ) -> None:
        self.failure: BaseException | None = None
        self.skipped_chunk_count = 0
        self.session_id = ""
        self.cursor: int | None = None
        self.begun_count = 0
        self._held = held
        self._extend = extend
        self._changed = held.changed
        self._client = client
        self._own_client = own_client
        self._buffer = buffer
        self._subscription = subscription
        self._passed = NONE
        """The chunk that the subscription had passed before this mirror."""
        self._acknowledged = NONE
        """The chunk that this mirror acknowledged last."""
        self._kept_columns = columns
        self._closing = threading.Event()
        self._asked_at = time.monotonic()
        """When what comes next was asked for."""
        self._arrived: deque[float] = deque()
        """When reads came that are not taken in."""
        self._is_first = True
        self._is_successor = False
        self._looks: deque[tuple[float, BufferDescription]] = deque(maxlen=LOOKS_MAX)
        """What the buffer was like, and when: at first, and while somebody waits for steps."""
        self._waiting_count = 0
        """Those who wait for steps."""
        self._outages = OutageLog(_log, "following the buffer")
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def go_on_from(self, begun_count: int, skipped_chunk_count: int) -> None:
        """Count on from another follower of the buffer, in whose place this one comes.

        So the server was reached before, and an outage is nothing to give up for.
        """
        self.begun_count, self.skipped_chunk_count = begun_count, skipped_chunk_count
        self._is_successor = True

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def behind_since(self) -> float:
        """When what is missing arrived, or what comes next was asked for without an answer.

        On the machine's monotonic clock; it keeps up with the buffer while that is to come.
        """
        with suppress(IndexError):
            return self._arrived[0]
        # A read that is not answered in its time says that nobody knows how far behind this is.
        return self._asked_at + (0.0 if self._is_first else POLL_S)

    @property
    def lag_s(self) -> float:
        """See `Source.lag_s`."""
        return max(0.0, time.monotonic() - self.behind_since)

    def aim(self) -> Aim:
        """See `Source.aim`.

        Raises:
            ReplayBufferError: The server cannot be asked.
        """
        with self._changed:
            begun_count, newest = self.begun_count, self._after
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
                # Not from how often it is by now: the thread may have begun anew meanwhile.
                begun_count, newest = begun_count + 1, self._beginning
            elif not read.fragments:
                break
            else:
                newest = read.cursor
        return Aim(newest, begun_count)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """See `Source.waiting`."""
        with self._changed:
            self._waiting_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting_count -= 1

    def close(self) -> None:
        """See `Source.close`; takes up to a second."""
        self._closing.set()
        if self._own_client is not None:
            self._own_client.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
                was_reached = self._is_successor or not self._is_first
                if was_reached and isinstance(error, _OUTAGES):
                    self._outages.failed(error)
                    self._closing.wait(RETRY_S)
                    continue
                with self._changed:
                    self.failure = error
                    self._held.tell()
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

    def why_nothing_comes(self) -> str:
        """See `Source.why_nothing_comes`."""
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
        if self._subscription is not None and self.cursor is None:
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
            with self._changed:
                self._asked_at = time.monotonic()
                self._held.tell()
            read = next(tail, None)
            if read is not None:
                with self._changed:
                    self._arrived.append(time.monotonic())
                    self._held.tell()
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
                self._acknowledge()
                if self.cursor is None:
                    return

    @property
    def _after(self) -> int | None:
        """The chunk after which it reads on."""
        return self._beginning if self.cursor is None else self.cursor

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
        name, cursor = self._subscription, self.cursor
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
        cursor = self.cursor
        return cursor is not None and (
            read.cursor < cursor or any(each.chunk_id <= cursor for each in read.references[:1])
        )

    def _begin_anew(self) -> None:
        """Forget what a buffer had before it was set back; what it holds is read next."""
        self._held.clear()
        with self._changed:
            self.session_id, self.cursor = "", None
            self._passed, self._acknowledged = NONE, NONE
            self.begun_count += 1
            self._held.tell()

    def _skipped_count(self, read: LoadedRead) -> int:
        """Chunks that a read did not give, but for those that the subscription had passed."""
        after = NONE if self.cursor is None else self.cursor
        passed_to = min(self._passed, read.cursor)
        if passed_to <= after:
            return read.skipped_chunk_count
        given = {each.chunk_id for each in read.references if each.chunk_id <= passed_to}
        return max(0, read.skipped_chunk_count - (passed_to - after - len(given)))

    def _take_in(self, read: LoadedRead) -> None:
        if read.session_id != self.session_id:
            self._held.clear()
            self.session_id = read.session_id
        self.skipped_chunk_count += self._skipped_count(read)
        for fragment, reference in zip(read.fragments, read.references, strict=True):
            # Between two reads a session may end, and the tail of the old one is still told.
            if fragment.session_id == self.session_id and fragment.step_count:
                self._extend(fragment, reference.chunk_id)
        with self._changed:
            self.cursor = read.cursor
            self._arrived.popleft()
            self._held.tell()
