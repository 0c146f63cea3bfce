"""Follow a buffer in a thread, and fill a memory with its steps."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Final, NamedTuple

from breadbox.client import Client
from breadbox.diagnosis import diagnose_arrivals
from breadbox.mirror.storage.index import NONE
from breadbox.mirror.storage.step_storage import FilledStepStorage
from breadbox.model.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ReplayBufferError,
    StoreUnavailableError,
    SubscriptionNotFoundError,
    UnavailableError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.presets import OFF_POLICY_ADVICE
from breadbox.model.types import BufferDescription
from breadbox.operations.cursor_reads import LoadedRead
from breadbox.shared.outages import OutageLog
from breadbox.transport.prefetch import prefetched

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Seconds that a read waits for a chunk, and that `close` may wait for a read."""
RETRY_S: Final = 1.0
"""Seconds between two attempts while server or store are unreachable, after `reconnect_s`."""
CATCH_UP_CHUNKS: Final = 4096
"""Chunks that one read skips in looking for the newest one."""
CATCH_UP_READS: Final = 64
"""Most reads in one search for the newest chunk."""
LOOK_AGE_S: Final = 60.0
"""Age, in seconds, from which a state of the buffer does not explain a wait any more."""
LOOKS_MAX: Final = 32
"""Most states that are kept. One is read a second, so they cover the last half minute."""
STALENESS_ENOUGH: Final = 100
"""Value of `staleness_max` below which a buffer counts as meant for on-policy learners."""
_AT_ONCE = ("OUTAGE", "HOLD", "NO_SESSION")
"""Causes that one state of the buffer shows."""
_REMEDIES = {
    "STALE": OFF_POLICY_ADVICE,
    "PRODUCERS_WAIT": "A mirror uses no chunks: let the buffer evict (full_policy), or let a "
    "learner fetch.",
}
"""Remedies for a mirror that differ from those for a learner that fetches."""
_WATCHED = ("NOTHING_ARRIVES", "WRONG_SESSION", *_REMEDIES)
"""Causes that only two states show."""
_OUTAGES = (DeadlineExceededError, StoreUnavailableError, UnavailableError)


class Selection(NamedTuple):
    """What to read of a buffer."""

    buffer: str | None
    subscription: str | None
    """Subscription to read by, or None to read what the buffer holds."""
    columns: Sequence[str] | None
    """Paths of the arrays to keep, or None for all."""


class Progress(NamedTuple):
    """How far a thread or process has followed its buffer."""

    session_id: str
    """Session of the steps, or empty before the first read and without a current session."""
    cursor: int | None
    """The last chunk that was read or skipped, or None before the first read."""
    begun_count: int
    """How often it restarted because the buffer was set back."""
    skipped_chunk_count: int
    behind_since: float
    """Monotonic time since which it has been behind; in the future while it keeps up."""


class Target(NamedTuple):
    """The point up to which a buffer has to be read to have all that it held at a moment."""

    chunk_id: int | None
    """The newest chunk; None or NONE if there was none."""
    begun_count: int
    """How often the reader has to have restarted by then."""

    def is_met(self, now: Progress) -> bool:
        """Return True if a reader has come that far."""
        if now.begun_count < self.begun_count:
            return False  # Its steps are of the buffer before it was set back.
        return self.chunk_id in (None, NONE) or (
            now.cursor is not None and now.cursor >= self.chunk_id
        )


class MirrorReader:
    """Add the chunks of a buffer to a memory in a thread. Closes *own_client* unless None."""

    def __init__(
        self,
        held: FilledStepStorage,
        extend: Callable[[Fragment, int], int],
        client: Client,
        selection: Selection,
        *,
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
        self._buffer, self._subscription, self._columns = selection
        self._passed = NONE
        self._acknowledged = NONE
        self._closing = threading.Event()
        self._asked_at = time.monotonic()
        self._arrived: deque[float] = deque()
        self._is_first = True
        self._is_successor = False
        self._looks: deque[tuple[float, BufferDescription]] = deque(maxlen=LOOKS_MAX)
        """States of the buffer and their times: one, or more while a caller waits."""
        self._waiting_count = 0
        self._outages = OutageLog(_log, "following the buffer")
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def go_on_from(self, begun_count: int, skipped_chunk_count: int) -> None:
        """Continue the counts of a reader that this replaces; no first outage ends it."""
        self.begun_count, self.skipped_chunk_count = begun_count, skipped_chunk_count
        self._is_successor = True

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def behind_since(self) -> float:
        """Monotonic time when the oldest read that is not added arrived, or a read became late."""
        with suppress(IndexError):
            return self._arrived[0]
        # Once a read is late, the lag is unknown, and counts from the time it was due.
        return self._asked_at + (0.0 if self._is_first else POLL_S)

    def progress(self) -> Progress:
        """Return how far it has come."""
        return Progress(
            self.session_id,
            self.cursor,
            self.begun_count,
            self.skipped_chunk_count,
            self.behind_since,
        )

    def target(self) -> Target:
        """Return the point that stands for all that the buffer holds now."""
        with self._changed:
            begun_count, newest = self.begun_count, self._after
        for _ in range(CATCH_UP_READS):  # Bounded: producers may be as fast as these reads.
            read = self._client.service.read_fragments(
                newest,
                chunk_count_max=CATCH_UP_CHUNKS,
                subscription=self._subscription,
                buffer=self._buffer,
            )
            if read.lease_id is not None:
                with suppress(ReplayBufferError):  # It expires by itself.
                    self._client.service.release_lease(read.lease_id, buffer=self._buffer)
            if newest is not None and read.cursor < newest:
                # Not `self.begun_count`: the thread may have restarted meanwhile.
                begun_count, newest = begun_count + 1, self._beginning
            elif not read.fragments:
                break
            else:
                newest = read.cursor
        return Target(newest, begun_count)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context to enter while a caller waits for steps."""
        with self._changed:
            self._waiting_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting_count -= 1

    def close(self) -> None:
        """End the thread. Idempotent; takes up to a second."""
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
                    self._held.notify()
                if not isinstance(error, ReplayBufferError):
                    raise
                return

    def _look(self) -> None:
        self._looks.append((time.monotonic(), self._client.get_buffer(self._buffer)))

    def _warn_of_limits(self) -> None:
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
        """Return what keeps steps from coming, or empty if nothing known does."""
        if outage := self._client.outage or self._outages.words:
            return outage
        if self._is_first:
            return "the server has not answered yet"
        now = time.monotonic()
        looks = [look for look in list(self._looks) if now - look[0] <= LOOK_AGE_S]
        if not looks:
            return ""
        (begun_at, before), (ended_at, after) = looks[0], looks[-1]
        watched_s = ended_at - begun_at
        # A mirror reads what arrives; causes that delay a fetch do not concern it.
        found = diagnose_arrivals(before, after, watched_s or 1.0)
        if found.cause not in (*_AT_ONCE, *(_WATCHED if watched_s > 0 else ())):
            return ""
        advice = _REMEDIES.get(found.cause) or " ".join(found.advice[:1])
        return f"{found.headline} {advice}"

    def _follow(self) -> None:
        """Add the buffer's steps until a read brings nothing in time; load one read ahead."""
        self._arrived.clear()  # Reads that an outage kept from being added are read again.
        self._acknowledge()
        if self._subscription is not None and self.cursor is None:
            self._passed = self._where_it_stands(self._subscription)
        tail = self._client.tail(
            self._after,
            # The first read returns immediately, even if the buffer is empty.
            max_wait_s=0.0 if self._is_first else POLL_S,
            known_session_id=self.session_id or None,
            subscription=self._subscription,
            is_acknowledging=False,
            columns=self._columns,
            is_mapped=True,
            buffer=self._buffer,
        )

        def next_read(_: object) -> LoadedRead | None:
            with self._changed:
                self._asked_at = time.monotonic()
                self._held.notify()
            read = next(tail, None)
            if read is not None:
                with self._changed:
                    self._arrived.append(time.monotonic())
                    self._held.notify()
            return read

        with closing(
            prefetched(itertools.repeat(None), next_read, at_once=1, depth=1, in_order=True)
        ) as reads:
            for read in reads:
                self._is_first = False
                if read is None or self._closing.is_set():
                    return
                self._outages.succeeded()
                if self._is_set_back(read):
                    self._begin_anew()
                    return
                self._take_in(read)
                self._acknowledge()
                if self.cursor is None:
                    return

    @property
    def _after(self) -> int | None:
        return self._beginning if self.cursor is None else self.cursor

    @property
    def _beginning(self) -> int | None:
        # Not the subscription's position: chunks that it passed may still be there.
        return None if self._subscription is None else NONE

    def _where_it_stands(self, name: str) -> int:
        for each in self._client.get_buffer(self._buffer).subscriptions:
            if each.name == name:
                return each.acknowledged_chunk_id
        raise SubscriptionNotFoundError(name)

    def _acknowledge(self) -> None:
        name, cursor = self._subscription, self.cursor
        if name is None or cursor is None or cursor == self._acknowledged:
            return
        try:
            self._client.acknowledge_chunks(name, cursor, buffer=self._buffer)
        except InvalidRequestError as error:
            if error.field != "chunk_id":
                raise
            # The buffer does not know the chunk: it was restored from an older state.
            _log.warning("subscription %s was set back: %s", name, error)
            self._begin_anew()
            return
        self._acknowledged = cursor

    def _is_set_back(self, read: LoadedRead) -> bool:
        """Return True if the buffer has fewer chunks than were read: its journal was restored."""
        cursor = self.cursor
        return cursor is not None and (
            read.cursor < cursor or any(each.chunk_id <= cursor for each in read.references[:1])
        )

    def _begin_anew(self) -> None:
        """Remove the steps of a buffer that was set back; it is read again next."""
        self._held.clear()
        with self._changed:
            self.session_id, self.cursor = "", None
            self._passed, self._acknowledged = NONE, NONE
            self.begun_count += 1
            self._held.notify()

    def _skipped_count(self, read: LoadedRead) -> int:
        """Count the chunks that a read skipped, except those that the subscription had passed."""
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
            # A read may still have the last fragments of a session that has ended.
            if fragment.session_id == self.session_id and fragment.step_count:
                self._extend(fragment, reference.chunk_id)
        with self._changed:
            self.cursor = read.cursor
            self._arrived.popleft()
            self._held.notify()
