"""Appends in the background: small fragments share a round trip, and nobody waits for each.

Invariants:
    P1  Fragments are sent in the order in which they were given, each exactly once but for resends
        that the server recognises.
    P2  At most `queue_count_max` fragments and `queue_bytes_max` bytes are held, what is being sent
        included; a fragment larger than the bound is held alone. At the bound `append` blocks.
    P3  Nothing is dropped unseen: every fragment given is counted as admitted, duplicate, stale,
        wrong session, dropped for a reason, or failed, or is still pending. After an error, and
        after a close that did not flush, what was not sent is counted as failed.
"""

import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Literal, NamedTuple, Protocol, Self, get_args

from breadbox.errors import (
    BackpressureError,
    ClosedError,
    InvalidRequestError,
    LimitExceededError,
    ReplayBufferError,
    SchemaMismatchError,
    UnsupportedArrayError,
)
from breadbox.fragment import Fragment
from breadbox.outages import OutageLog
from breadbox.throttle import Throttle
from breadbox.types import AdmissionOutcome, AppendResult

_log = logging.getLogger(__name__)

BATCHES_AT_ONCE = 4
"""Full batches that are handed to the client together."""
RETRY_S = 1.0
"""Between two attempts of an appender that persists."""
REFUSED = "refused"
"""Why a fragment was dropped that no server or store takes."""
_REFUSALS = (InvalidRequestError, UnsupportedArrayError, LimitExceededError)

OnFailure = Literal["stop", "wait", "persist"]
"""What an appender does when a sending fails.

stop: it ends, and raises the error where fragments are given. wait: the same, but where there is no
room it tries again, for as long as it is open. persist: it tries again, for as long
as it is open, whatever may pass; a fragment that no server or store takes is dropped, and counted.
A schema that is not the session's ends it all the same: no fragment that follows has another.
"""


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
    batch_bytes: int = 64 * 2**20
    """Bytes of arrays that are sent without delay when so many wait."""
    flush_after_s: float = 0.05
    """Seconds after which a fragment is sent although fewer wait. 0: at once."""
    queue_count_max: int = 4096
    """Fragments held, those being sent included; at the bound `append` blocks."""
    queue_bytes_max: int = 256 * 2**20
    """Bytes of arrays held; at the bound `append` blocks."""
    on_failure: OnFailure = "stop"

    def __post_init__(self) -> None:
        if not 1 <= self.batch_count <= 4096:
            raise InvalidRequestError("batch_count", f"must be 1 to 4096, got {self.batch_count}")
        for name in ("batch_bytes", "queue_count_max", "queue_bytes_max"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(name, f"must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.flush_after_s) and self.flush_after_s >= 0):
            raise InvalidRequestError(
                "flush_after_s", f"must be a finite span of at least 0 s, got {self.flush_after_s}"
            )
        if self.on_failure not in get_args(OnFailure):
            raise InvalidRequestError(
                "on_failure", f"must be one of {get_args(OnFailure)}, got {self.on_failure!r}"
            )


@dataclass(frozen=True, slots=True)
class AppenderCounts:
    """What became of the fragments given so far.

    `by_outcome`, `dropped`, `failed` and `pending` add up to `given`.
    """

    given: int
    by_outcome: Mapping[AdmissionOutcome, int]
    dropped: Mapping[str, int]
    """Not sent, by reason: what `unwanted` gave, or "refused"."""
    admitted: int
    """Known to have been admitted, by this sending or, for a DUPLICATE, by an earlier one."""
    failed: int
    """Given, and not known to be in the buffer: their sending failed, or never happened."""
    pending: int
    """Given, and not yet answered."""
    pending_bytes: int


class _Held(NamedTuple):
    """A fragment that something is still to become of."""

    fragment: Fragment
    size_bytes: int
    given_at: float


_UNSETTLED = (
    AdmissionOutcome.BUFFER_FULL,
    AdmissionOutcome.BYTES_FULL,
    AdmissionOutcome.PAYLOAD_MISSING,
    AdmissionOutcome.SCHEMA_UNKNOWN,
)


def _is_settled(result: AppendResult) -> bool:
    """Whether its fragment is not to be sent again."""
    return result.outcome not in _UNSETTLED


class Appender:
    """Sends fragments from one background thread. Thread-safe.

    Use it as a context manager: a clean exit sends everything and raises what went wrong; an exit
    by exception sends what it can, and lets the exception go on its way.

    An error in the background (the server stayed away for `reconnect_s`, the buffer stayed full
    for `append_wait_s`, an array that cannot be stored) stops the appender: it is raised by the
    next `append` or `flush` and by `close`, and fragments that wait are counted as failed. They are
    handed back by `unsent`, so that nothing is lost that the caller still wants. With `on_failure`
    "persist" it goes on instead.
    """

    def __init__(
        self,
        client: AppendClient,
        options: AppenderOptions | None = None,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        unwanted: Callable[[Fragment], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
            client: Sends; stays the caller's to close, after the appender.
            options: Bounds; None: the defaults.
            buffer: Where fragments go; None: the client's.
            codecs: How arrays are encoded; None: as the client was told.
            unwanted: Asked of each fragment right before it is sent, in the background: a reason
                to drop it, under which it is then counted, such as that it is stale by now; None:
                none.
            clock: Monotonic seconds.
        """
        self._client = client
        self._options = options or AppenderOptions()
        self._buffer = buffer
        self._codecs = codecs
        self._unwanted = unwanted
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Held] = deque()
        """In the order given; those at the head may be on their way. They stay until something has
        become of them, so that they count against the bounds and none is forgotten."""
        self._held_bytes = 0
        self._given = 0
        self._singly_count = 0
        """Fragments at the head that are sent one by one: one of them was refused."""
        self._outcomes: Counter[AdmissionOutcome] = Counter()
        self._dropped: Counter[str] = Counter()
        self._admitted = 0
        self._outage = OutageLog(_log, "sending fragments", now=clock)
        self._throttle = Throttle(clock)
        self._error: BaseException | None = None
        self._is_error_told = False
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
            if not self._may_take(size_bytes):
                self._flush_until = self._given  # To make room.
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._may_take(size_bytes), max_wait_s):
                    raise TimeoutError(f"the appender's queue stayed full for {max_wait_s} s")
            self._raise_if_over()
            self._queue.append(_Held(fragment, size_bytes, self._clock()))
            self._held_bytes += size_bytes
            self._given += 1
            if len(self._queue) == 1 or self._is_batch_due():
                self._changed.notify_all()

    def flush(self, *, max_wait_s: float | None = None, pending_max: int = 0) -> None:
        """Send everything given so far, and wait until it is answered.

        Args:
            max_wait_s: Seconds to wait; None: for as long as it takes.
            pending_max: Fragments that may still be without an answer on return, at least 0: so
                many a producer may run ahead.

        Raises:
            ReplayBufferError: What went wrong in the background.
            ClosedError: The appender was closed.
            TimeoutError: It took longer than `max_wait_s`; sending goes on.
        """
        with self._changed:
            target = self._given - pending_max
            self._flush_until = max(self._flush_until, self._given)
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
    def _answered(self) -> int:
        """Fragments that something became of: of all given, in order, the first so many."""
        return self._given - len(self._queue)

    @property
    def counts(self) -> AppenderCounts:
        """What became of the fragments so far."""
        with self._changed:
            return AppenderCounts(
                given=self._given,
                by_outcome=MappingProxyType(dict(self._outcomes)),
                dropped=MappingProxyType(dict(self._dropped)),
                admitted=self._admitted,
                failed=len(self._unsent),
                pending=len(self._queue),
                pending_bytes=self._held_bytes,
            )

    def unsent(self) -> list[Fragment]:
        """Fragments that an error left unanswered, in order; sending them again is safe."""
        with self._changed:
            return list(self._unsent)

    def close(self, *, max_wait_s: float | None = None) -> None:
        """Send what waits, then stop. Idempotent.

        Blocks until all is answered, or an error ends it: at most about `append_wait_s`; one that
        persists waits for as long as the buffer is full. It tries nothing again that failed.

        Raises:
            ReplayBufferError: What went wrong in the background, raised by the first close only.
            TimeoutError: It took longer than `max_wait_s`; sending goes on, until the client is
                closed.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max_wait_s)
        if self._thread.is_alive():
            raise TimeoutError(f"not all was answered within {max_wait_s} s")
        with self._changed:
            was_told, self._is_error_told = self._is_error_told, True
        if self._error is not None and not was_told:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_behind(self.close, error, lambda: f"{len(self._unsent)} fragments were not sent")

    def _may_take(self, size_bytes: int) -> bool:
        if self._closing or self._error is not None:
            return True
        if not self._queue:
            return True
        return (
            len(self._queue) < self._options.queue_count_max
            and self._held_bytes + size_bytes <= self._options.queue_bytes_max
        )

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ClosedError("the appender was closed")

    # The thread's side -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._send_next():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again where fragments are given
            # Not of this library: a bug, which must not leave callers waiting for ever.
            self._stop(error)

    def _send_next(self) -> bool:
        """Send what is due next; False when there is nothing more to do.

        A call of its own for each, so that nothing of it is held while the next one is awaited.
        """
        fragments = self._next_batch()
        if not fragments:
            return False
        reasons = [self._unwanted(fragment) for fragment in fragments]
        if any(reasons):
            # Alone, so that what is sent is the head of the queue again.
            self._drop(reasons)
            return True
        try:
            results = self._client.append_many(fragments, buffer=self._buffer, codecs=self._codecs)
        except BackpressureError as error:
            # Only what comes before the first that is still to be sent: the order is kept.
            judged = list(itertools.takewhile(_is_settled, error.results))
            self._settle(fragments, judged)
            return self._goes_on_after(error, 0.0 if judged else error.retry_delay_s)
        except _REFUSALS as error:
            if self._options.on_failure == "persist":
                self._refuse(fragments, error)
                return True
            return self._goes_on_after(error)
        except SchemaMismatchError as error:
            self._stop(error)
            return False
        except ReplayBufferError as error:
            return self._goes_on_after(error)
        self._outage.succeeded()
        self._settle(fragments, results)
        return True

    def _next_batch(self) -> list[Fragment]:
        """Wait until a batch is due; empty when the appender is closing and nothing waits."""
        with self._changed:
            while (wait_s := self._due_in_s()) > 0:
                self._changed.wait(None if wait_s == math.inf else wait_s)
            # Several batches at once, if they are there: the client writes one while the server
            # judges another. Not all, so that producers go on while these are on their way.
            count_max = 1 if self._singly_count else BATCHES_AT_ONCE * self._options.batch_count
            bytes_left = BATCHES_AT_ONCE * self._options.batch_bytes
            batch: list[Fragment] = []
            for held in itertools.islice(self._queue, count_max):
                bytes_left -= held.size_bytes
                if batch and bytes_left < 0:
                    break
                batch.append(held.fragment)
            return batch

    def _due_in_s(self) -> float:
        """Seconds until there is something to do; 0 or less: now."""
        if self._closing or self._is_batch_due():
            return 0.0
        if not self._queue:
            return math.inf
        if self._answered < self._flush_until:
            return 0.0
        return self._queue[0].given_at + self._options.flush_after_s - self._clock()

    def _is_batch_due(self) -> bool:
        options = self._options
        return len(self._queue) >= options.batch_count or self._held_bytes >= options.batch_bytes

    def _settle(self, fragments: list[Fragment], results: Sequence[AppendResult]) -> None:
        """Let go of the first fragments, which were judged, and count what became of them."""
        outcomes = [result.outcome for result in results]
        if AdmissionOutcome.DUPLICATE in outcomes and not self._outcomes.get(
            AdmissionOutcome.DUPLICATE
        ):
            # Once: a reply that got lost is harmless, two workers of one name lose everything.
            worker_id = fragments[outcomes.index(AdmissionOutcome.DUPLICATE)].worker_id
            _log.warning("the service has fragments of worker %s already", worker_id)
        # Let go before the producers hear that there is room.
        fragments.clear()
        with self._changed:
            for _ in results:
                self._let_go()
            self._changed.notify_all()
            self._outcomes.update(outcomes)
            self._admitted += sum(
                AdmissionOutcome.ADMITTED in (result.outcome, result.first_outcome)
                for result in results
            )

    def _drop(self, reasons: Sequence[str | None]) -> None:
        """Let go of those of the first fragments for which there is a reason."""
        with self._changed:
            kept = []
            for reason in reasons:
                if reason is None:
                    kept.append(self._queue.popleft())
                else:
                    self._dropped[reason] += 1
                    self._let_go()
            self._queue.extendleft(reversed(kept))
            self._changed.notify_all()

    def _let_go(self) -> None:
        """Of the first fragment; the lock is held."""
        self._held_bytes -= self._queue.popleft().size_bytes
        self._singly_count = max(0, self._singly_count - 1)

    def _refuse(self, fragments: Sequence[Fragment], error: ReplayBufferError) -> None:
        """Drop a fragment that nobody takes; of several, send each alone to find out which."""
        if len(fragments) > 1:
            self._singly_count = len(fragments)
            return
        words = self._throttle.words(REFUSED)
        if words is not None:
            _log.error(
                "fragment %d of worker %s cannot be sent and is dropped: %s%s",
                fragments[0].fragment_index,
                fragments[0].worker_id,
                error,
                words,
            )
        self._drop([REFUSED])

    def _goes_on_after(self, error: ReplayBufferError, full_s: float | None = None) -> bool:
        """Wait a little, to try again; False where the error ends the appender.

        Args:
            error: What was raised.
            full_s: That there is no room, and seconds to wait for some; None: it is an outage.
        """
        with self._changed:
            is_over = isinstance(error, ClosedError) or (self._closing and full_s is None)
            waits = self._options.on_failure == "persist" or (
                self._options.on_failure == "wait" and full_s is not None
            )
            if is_over or not waits:
                self._stop(error)
                return False
            if full_s is None:
                self._outage.failed(error)
                self._changed.wait_for(lambda: self._closing, RETRY_S)
            else:
                self._changed.wait_for(lambda: False, min(full_s, RETRY_S))
            return True

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._unsent = [held.fragment for held in self._queue]
            self._held_bytes = 0
            self._queue.clear()
            self._changed.notify_all()


def close_behind(
    close: Callable[[], None], error: BaseException | None, loss: Callable[[], str]
) -> None:
    """Close what a `with` block opened; an error that the block ended with matters more.

    Args:
        close: May raise; beside an error of the block what it raises is logged alone.
        error: What the block ended with; None: it came to its end.
        loss: What closing in vain means, for the log.
    """
    try:
        close()
    except Exception as problem:
        if error is None:
            raise
        if problem is not error:
            _log.warning("%s: %s", loss(), problem)
