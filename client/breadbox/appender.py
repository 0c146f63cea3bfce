"""Appends in the background: small fragments share a round trip, and nobody waits for each.

Invariants:
    P1  Fragments are sent in the order in which they were given, each exactly once but for resends
        that the server recognises.
    P2  At most `queue_count_max` fragments and `queue_bytes_max` bytes are held, what is being sent
        included; a fragment larger than the bound is held alone. At the bound `append` blocks.
    P3  Nothing is dropped unseen: every fragment given is counted as admitted, duplicate, stale,
        wrong session, or failed, or is still pending. After an error, and after a close that did
        not flush, what was not sent is counted as failed.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from breadbox.errors import BackpressureError, ClosedError, InvalidRequestError, ReplayBufferError
from breadbox.fragment import Fragment
from breadbox.types import AdmissionOutcome, AppendResult

_log = logging.getLogger(__name__)

BATCHES_AT_ONCE = 4
"""Full batches that are handed to the client together."""


class AppendClient(Protocol):
    """What an appender needs of a client."""

    def append_many(
        self,
        fragments: Sequence[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> list[AppendResult]:
        """Write and announce; blocks while there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppenderOptions:
    """Bounds of an appender; checked on construction.

    Raises:
        InvalidRequestError: A bound is out of its range.
    """

    batch_count: int = 512
    """Fragments that are sent without delay when so many wait; 1 to 4096."""
    flush_after_s: float = 0.05
    """Seconds after which a fragment is sent although fewer wait. 0: at once."""
    queue_count_max: int = 4096
    """Fragments held, those being sent included; at the bound `append` blocks."""
    queue_bytes_max: int = 256 * 2**20
    """Bytes of arrays held; at the bound `append` blocks."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch_count <= 4096:
            raise InvalidRequestError("batch_count", f"must be 1 to 4096, got {self.batch_count}")
        for name in ("queue_count_max", "queue_bytes_max"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.flush_after_s) and self.flush_after_s >= 0):
            raise InvalidRequestError(
                "flush_after_s", f"must be a finite span of at least 0 s, got {self.flush_after_s}"
            )


@dataclass(frozen=True, slots=True)
class AppenderCounts:
    """What became of the fragments given so far; `by_outcome`, `failed` and `pending` add up."""

    given: int
    by_outcome: Mapping[AdmissionOutcome, int]
    admitted: int
    """Known to have been admitted, by this sending or, for a DUPLICATE, by an earlier one."""
    failed: int
    """Given, and not known to be in the buffer: their sending failed, or never happened."""
    pending: int
    """Given, and not yet answered."""
    pending_bytes: int


class Appender:
    """Sends fragments from one background thread. Thread-safe.

    Use it as a context manager: a clean exit sends everything and raises what went wrong; an exit
    by exception sends what it can, and lets the exception go on its way.

    An error in the background (the server stayed away for `reconnect_s`, the buffer stayed full
    for `append_wait_s`, an array that cannot be stored) stops the appender: it is raised by the
    next `append` or `flush` and by `close`, and fragments that wait are counted as failed. They are
    handed back by `unsent`, so that nothing is lost that the caller still wants.
    """

    def __init__(
        self,
        client: AppendClient,
        options: AppenderOptions | None = None,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
            client: Sends; stays the caller's to close, after the appender.
            options: Bounds; None: the defaults.
            buffer: Where fragments go; None: the client's.
            codecs: How arrays are encoded; None: as the client was told.
            clock: Monotonic seconds.
        """
        self._client = client
        self._options = options or AppenderOptions()
        self._buffer = buffer
        self._codecs = codecs
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[tuple[Fragment, int, float]] = deque()
        """Fragment, its bytes, and when it was given."""
        self._sending_count = 0
        self._held_bytes = 0
        self._given = 0
        self._answered = 0
        """Fragments sent and judged, or failed: of all given, in order, the first so many."""
        self._failed = 0
        self._outcomes: Counter[AdmissionOutcome] = Counter()
        self._admitted = 0
        self._error: ReplayBufferError | None = None
        self._unsent: list[Fragment] = []
        self._flush_until = 0
        """Send without waiting for company until so many are answered."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="breadbox-appender", daemon=True)
        self._thread.start()

    # The caller's side -------------------------------------------------------------------------

    def append(self, fragment: Fragment, *, max_wait_s: float | None = None) -> None:
        """Give a fragment to be sent; its arrays must not be written to until it is answered.

        Blocks while the queue is full, for at most `max_wait_s` (None: for as long as it takes).

        Raises:
            ReplayBufferError: What went wrong in the background; the fragment was not taken.
            ClosedError: The appender was closed.
            TimeoutError: The queue stayed full; the fragment was not taken.
        """
        size_bytes = fragment.size_bytes
        with self._changed:
            took = self._changed.wait_for(lambda: self._may_take(size_bytes), max_wait_s)
            self._raise_if_over()
            if not took:
                raise TimeoutError(f"the appender's queue stayed full for {max_wait_s} s")
            self._queue.append((fragment, size_bytes, self._clock()))
            self._held_bytes += size_bytes
            self._given += 1
            if len(self._queue) in (1, self._options.batch_count):
                self._changed.notify_all()

    def flush(self, *, max_wait_s: float | None = None) -> None:
        """Send everything given so far, and wait until it is answered.

        Raises:
            ReplayBufferError: What went wrong in the background.
            ClosedError: The appender was closed.
            TimeoutError: It took longer than `max_wait_s`; sending goes on.
        """
        with self._changed:
            target = self._given
            self._flush_until = max(self._flush_until, target)
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: self._error is not None or self._answered >= target, max_wait_s
            )
            if self._answered >= target and self._error is None:
                return
            self._raise_if_over()
            if not done:
                raise TimeoutError(f"not all was answered within {max_wait_s} s")

    @property
    def counts(self) -> AppenderCounts:
        """What became of the fragments so far."""
        with self._changed:
            return AppenderCounts(
                given=self._given,
                by_outcome=MappingProxyType(dict(self._outcomes)),
                admitted=self._admitted,
                failed=self._failed,
                pending=self._given - self._answered,
                pending_bytes=self._held_bytes,
            )

    def unsent(self) -> list[Fragment]:
        """Fragments that an error left unanswered, in order; sending them again is safe."""
        with self._changed:
            return list(self._unsent)

    def close(self) -> None:
        """Send what waits, then stop. Idempotent.

        Blocks until all is answered, or an error ends it: at most about `append_wait_s`.

        Raises:
            ReplayBufferError: What went wrong in the background, raised by the first close only.
        """
        with self._changed:
            was_closing, self._closing = self._closing, True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None and not was_closing:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except ReplayBufferError as problem:
            if problem is not error:
                _log.warning("%d fragments were not sent: %s", len(self._unsent), problem)

    def _may_take(self, size_bytes: int) -> bool:
        if self._closing or self._error is not None:
            return True
        held_count = len(self._queue) + self._sending_count
        if held_count == 0:
            return True
        return (
            held_count < self._options.queue_count_max
            and self._held_bytes + size_bytes <= self._options.queue_bytes_max
        )

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ClosedError("the appender was closed")

    # The thread's side -------------------------------------------------------------------------

    def _run(self) -> None:
        while self._send_next():
            pass

    def _send_next(self) -> bool:
        """Send what is due next; False when there is nothing more to do.

        A call of its own for each, so that nothing of it is held while the next one is awaited.
        """
        batch = self._next_batch()
        if not batch:
            return False
        fragments = [fragment for fragment, _, _ in batch]
        try:
            results = self._client.append_many(fragments, buffer=self._buffer, codecs=self._codecs)
        except ReplayBufferError as error:
            self._fail(error, fragments)
            return False
        except BaseException as error:
            # Not of this library: a bug, which must not leave callers waiting for ever.
            self._fail(ReplayBufferError(f"appending failed: {error!r}"), fragments)
            raise
        # Let go before the producers hear that there is room.
        fragments.clear()
        size_bytes = sum(size_bytes for _, size_bytes, _ in batch)
        batch.clear()
        self._settle(results, size_bytes)
        return True

    def _next_batch(self) -> list[tuple[Fragment, int, float]]:
        """Wait until a batch is due; empty when the appender is closing and nothing waits."""
        with self._changed:
            while (wait_s := self._due_in_s()) > 0:
                self._changed.wait(None if wait_s == math.inf else wait_s)
            # Several batches at once, if they are there: the client writes one while the server
            # judges another. Not all, so that producers go on while these are on their way.
            count = min(len(self._queue), BATCHES_AT_ONCE * self._options.batch_count)
            batch = [self._queue.popleft() for _ in range(count)]
            self._sending_count = count
            return batch

    def _due_in_s(self) -> float:
        """Seconds until there is something to do; 0 or less: now."""
        if self._closing or len(self._queue) >= self._options.batch_count:
            return 0.0
        if not self._queue:
            return math.inf
        if self._answered < self._flush_until:
            return 0.0
        return self._queue[0][2] + self._options.flush_after_s - self._clock()

    def _settle(self, results: Sequence[AppendResult], size_bytes: int) -> None:
        with self._changed:
            self._count(results)
            self._answered += self._sending_count
            self._sending_count = 0
            self._held_bytes -= size_bytes
            self._changed.notify_all()

    def _count(self, results: Sequence[AppendResult]) -> None:
        """Count outcomes; the lock is held."""
        self._outcomes.update(result.outcome for result in results)
        self._admitted += sum(
            AdmissionOutcome.ADMITTED in (result.outcome, result.first_outcome)
            for result in results
        )

    def _fail(self, error: ReplayBufferError, fragments: Sequence[Fragment]) -> None:
        results = error.results if isinstance(error, BackpressureError) else ()
        judged = [result for result in results if not result.outcome.asks_to_wait]
        with self._changed:
            self._error = error
            self._count(judged)
            # What is judged comes first: nothing behind the first that found no room is admitted.
            left = fragments[len(judged) :]
            self._unsent = [*left, *(fragment for fragment, _, _ in self._queue)]
            self._failed = len(self._unsent)
            self._answered = self._given
            self._sending_count = 0
            self._held_bytes = 0
            self._queue.clear()
            self._changed.notify_all()
