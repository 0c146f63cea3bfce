"""Append in the background: fragments share round trips, and producers do not wait for each.

Invariants:
    P1  Fragments are sent in the order of their `append`, each exactly once, except for resends,
        which the server recognises.
    P2  The queue holds at most `queue_count_max` fragments and `queue_bytes_max` bytes, those being
        sent included; a fragment larger than the bound is held alone. At the bound `append` blocks.
    P3  No fragment is lost uncounted: each one is admitted, duplicate, stale, of a wrong session,
        dropped for a reason, failed, or still pending. After an error, and after a close that did
        not flush, unsent fragments count as failed.
"""

import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

from breadbox.model.errors import (
    PERMANENT,
    BackpressureError,
    ClosedError,
    InvalidRequestError,
    LimitExceededError,
    ReplayBufferError,
    UnsupportedArrayError,
)
from breadbox.model.fragment import Appendable
from breadbox.model.types import AdmissionOutcome, AppendResult
from breadbox.shared.outages import OutageLog
from breadbox.shared.process_bound import ProcessBound
from breadbox.shared.throttle import Throttle

_log = logging.getLogger(__name__)

BATCHES_AT_ONCE = 4
"""Full batches that are being sent at a time: the client writes some while the server judges."""
RETRY_S = 1.0
"""Seconds between two attempts of an appender with `on_failure` "persist"."""
REFUSED_S_MAX = 60.0
"""Seconds of refusals without another answer, after which such an appender stops."""
REFUSED = "refused"
"""Reason under which fragments count that server or store refused permanently."""
_REFUSALS = (InvalidRequestError, UnsupportedArrayError, LimitExceededError)
_FINAL = (ClosedError, *PERMANENT)

OnFailure = Literal["stop", "wait", "persist"]
"""What an appender does when sending fails.

stop: stop, and raise the error from the next `append` or `flush`. wait: retry while the buffer or
the store is full, for as long as the appender is open; stop on any other error. persist: retry
every temporary error, for as long as the appender is open; drop and count a fragment that server
or store refuses permanently. The errors of `breadbox.errors.PERMANENT` stop it nevertheless, and so
does a minute in which every fragment was refused.
"""


FragmentEnd = Literal["admitted", "refused", "undelivered"]
"""What became of a fragment that was given to an appender: refused by the server or dropped before,
or not known to be in the buffer."""


class AppendClient(Protocol):
    """The part of a client that an appender calls."""

    def append_many(
        self,
        fragments: Iterable[Any],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        """Append as `breadbox.Client.append_many`; `answered` gets any part of the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppenderOptions:
    """The bounds of an appender, checked on construction.

    Raises:
        InvalidRequestError: A bound is out of its range.
    """

    batch_count: int = 512
    """Number of queued fragments that starts a sending; 1 to 4096."""
    batch_bytes: int = 64 * 2**20
    """Bytes of queued arrays that start a sending; at least 1."""
    flush_after_s: float = 0.05
    """Seconds after which a fragment is sent although the batch is not full; 0: immediately."""
    queue_count_max: int = 4096
    """Most fragments held, those being sent included; at the bound `append` blocks."""
    queue_bytes_max: int = 256 * 2**20
    """Most bytes of arrays held; at the bound `append` blocks."""
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
    """The fragments given so far, by result.

    `by_outcome`, `dropped`, `failed` and `pending` add up to `given`.
    """

    given: int
    by_outcome: Mapping[AdmissionOutcome, int]
    dropped: Mapping[str, int]
    """Fragments not sent, by reason: what `unwanted` returned, or "refused"."""
    admitted: int
    """Fragments that the server admitted, now or, for a DUPLICATE, when first sent."""
    failed: int
    """Fragments not known to be in the buffer: sending them failed, or never began."""
    pending: int
    """Fragments that the server has not answered yet."""
    pending_bytes: int


class _Held(NamedTuple):
    fragment: Appendable
    size_bytes: int
    given_at: float


_UNSETTLED = (  # A fragment with one of these is sent again.
    AdmissionOutcome.BUFFER_FULL,
    AdmissionOutcome.BYTES_FULL,
    AdmissionOutcome.PAYLOAD_MISSING,
    AdmissionOutcome.SCHEMA_UNKNOWN,
)


class Appender(ProcessBound):
    """Send fragments from one background thread. Thread-safe, but not for other processes.

    ```python
    with breadbox.Appender(client) as appender:
        appender.append(fragment)  # Returns before the fragment is sent.
        appender.flush()  # Blocks until the server has answered.
        print(appender.counts.admitted)
    ```

    Use it as a context manager. A clean exit sends everything, and raises the error if sending
    failed. An exit by an exception sends what it can, and lets the exception propagate.

    An error in the background stops the appender: the server was unreachable for `reconnect_s`, the
    buffer was full for `append_wait_s`, or an array cannot be stored. The next `append` or `flush`
    raises it, and so does `close`. Fragments not sent by then are counted as failed; `unsent`
    returns them, so that the caller can send them again. With `on_failure` "persist" the appender
    retries instead.
    """

    _kind = "Appender"
    _remedy = "connect, and make one, in each process"

    def __init__(
        self,
        client: AppendClient,
        options: AppenderOptions | None = None,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        unwanted: Callable[[Any], str | None] = lambda _: None,
        ended: Callable[[Any, FragmentEnd], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
            client: The client that sends. The caller closes it, after the appender.
            options: Bounds, or None for the defaults.
            buffer: The buffer's name, or None for the client's buffer.
            codecs: Codecs of the arrays, or None for the client's codecs.
            unwanted: Called with each fragment right before it is sent, in the background thread.
                Returns a reason to drop the fragment (counted by reason), or None to send it.
            ended: Called once with each fragment and its end; it must neither block nor call back.
            clock: Monotonic clock, seconds.
        """
        self._client = client
        self._options = options or AppenderOptions()
        self._buffer = buffer
        self._codecs = codecs
        self._unwanted = unwanted
        self._ended = ended
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Held] = deque()
        """Fragments in the order given; those being sent stay at the head, and count."""
        self._held_bytes = 0
        self._taken_count = 0
        """Number of fragments at the head that are being sent."""
        self._given = 0
        self._singly_count = 0
        """Number of fragments at the head to send one by one after a refusal."""
        self._refused_since: float | None = None
        """Time of the first refusal since the last answer, or None."""
        self._outcomes: Counter[AdmissionOutcome] = Counter()
        self._dropped: Counter[str] = Counter()
        self._admitted = 0
        self._outage = OutageLog(_log, "sending fragments", now=clock)
        self._throttle = Throttle(clock)
        self._error: BaseException | None = None
        self._is_error_raised = False
        self._unsent: list[Appendable] = []
        self._flush_until = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="breadbox-appender", daemon=True)
        self._thread.start()

    def append(self, fragment: Appendable, *, max_wait_s: float | None = None) -> None:
        """Queue a fragment for sending; do not write to its arrays until it is answered.

        ```python
        appender.append(fragment, max_wait_s=5)
        ```

        Blocks while the queue is full, for at most `max_wait_s`, or without a limit if None. The
        fragment is not copied.

        Raises:
            ReplayBufferError: Sending failed in the background. The fragment was not queued.
            ClosedError: The appender was closed, or is another process's.
            TimeoutError: The queue was full for `max_wait_s`. The fragment was not queued.
        """
        self._check_process()
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
        """Send everything given so far, and block until the server has answered.

        ```python
        appender.flush(max_wait_s=30, pending_max=64)
        ```

        Args:
            max_wait_s: Seconds to wait, or None to wait without a limit.
            pending_max: Number of fragments that may be unanswered on return, at least 0. With more
                than 0 a producer runs ahead of the server by that many.

        Raises:
            ReplayBufferError: Sending failed in the background.
            ClosedError: The appender was closed, or is another process's.
            TimeoutError: Answers were missing after `max_wait_s`. Sending continues.
        """
        self._check_process()
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
        return self._given - len(self._queue)

    @property
    def counts(self) -> AppenderCounts:
        """The fragments given so far, by result."""
        self._check_process()
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

    def unsent(self) -> list[Appendable]:
        """Return the fragments that an error left unanswered, in order.

        ```python
        client.append_many(appender.unsent())
        ```

        Does not block, and raises nothing. Sending them again is safe: those that the server
        admitted are answered DUPLICATE.
        """
        self._check_process()
        with self._changed:
            return list(self._unsent)

    def close(self, *, max_wait_s: float | None = None) -> None:
        """Send the queued fragments, then stop. Idempotent.

        ```python
        appender.close(max_wait_s=30)
        ```

        A forked process has nothing to send, and returns. Else it blocks until all are answered or
        an error stops the appender: at most about `append_wait_s`
        of the client, or `max_wait_s` if that is not None. With `on_failure` "wait" or "persist" it
        blocks for as long as the buffer is full. Other errors are not retried after `close`.

        Raises:
            ReplayBufferError: Sending failed in the background. Only the first close raises it.
            TimeoutError: Answers were missing after `max_wait_s`. Sending continues until the
                client is closed.
        """
        if not self._is_here:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max_wait_s)
        if self._thread.is_alive():
            raise TimeoutError(f"not all was answered within {max_wait_s} s")
        with self._changed:
            was_raised, self._is_error_raised = self._is_error_raised, True
        if self._error is not None and not was_raised:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_at_exit(self.close, error, lambda: f"{len(self._unsent)} fragments were not sent")

    def _may_take(self, size_bytes: int) -> bool:
        if self._closing or self._error is not None or not self._queue:
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

    def _run(self) -> None:
        try:
            while self._send_next():
                pass
        except BaseException as error:  # noqa: BLE001 - `append` raises it again
            # A bug, of this library or of `unwanted`: callers must not wait without end.
            self._stop(error)

    def _send_next(self) -> bool:
        """Send for as long as something is due; return False if the thread is to end."""
        with self._changed:
            self._taken_count = 0
            while (wait_s := self._due_in_s()) > 0:
                self._changed.wait(None if wait_s == math.inf else wait_s)
            if not self._queue:
                return False
        fragments = self._take()
        if not fragments:
            return True
        try:
            results = self._client.append_many(
                self._successive(fragments),
                buffer=self._buffer,
                codecs=self._codecs,
                answered=self._settle,
            )
        except BackpressureError as error:
            # Settle only what comes before the first unsettled one: the order is kept.
            judged = list(
                itertools.takewhile(lambda each: each.outcome not in _UNSETTLED, error.results)
            )
            self._settle(judged)
            return self._goes_on_after(error, 0.0 if judged else error.retry_delay_s)
        except ReplayBufferError as error:
            if isinstance(error, _REFUSALS) and self._options.on_failure == "persist":
                return self._refuse(error)
            return self._goes_on_after(error)
        self._settle(results)
        return True

    def _successive(self, fragments: deque[Appendable]) -> Iterator[Appendable]:
        """Yield taken fragments, and then what is due by then; keep no reference to them."""
        while fragments:
            while fragments:
                yield fragments.popleft()
            fragments = self._take()

    def _take(self) -> deque[Appendable]:
        """Take what is due, within the bounds of what is being sent; none if one is unwanted."""
        taken: deque[Appendable] = deque()
        with self._changed:
            if self._due_in_s() > 0:
                return taken
            # Not all, so that what a refusal concerns is sent again soon.
            count_max = 1 if self._singly_count else BATCHES_AT_ONCE * self._options.batch_count
            bytes_left = BATCHES_AT_ONCE * self._options.batch_bytes
            for position, held in enumerate(itertools.islice(self._queue, count_max)):
                bytes_left -= held.size_bytes
                if position and bytes_left < 0:
                    break
                if position >= self._taken_count:
                    taken.append(held.fragment)
            self._taken_count += len(taken)
        reasons = [self._unwanted(fragment) for fragment in taken]
        if any(reasons):
            # Drop once nothing before them is being sent, so that they are the queue's head.
            if self._taken_count == len(taken):
                self._drop(reasons)
            taken.clear()
        return taken

    def _due_in_s(self) -> float:
        if self._closing or self._is_batch_due():
            return 0.0
        if len(self._queue) == self._taken_count:
            return math.inf
        if self._answered + self._taken_count < self._flush_until:
            return 0.0
        return self._queue[self._taken_count].given_at + self._options.flush_after_s - self._clock()

    def _is_batch_due(self) -> bool:
        options = self._options
        waiting_count = len(self._queue) - self._taken_count
        return waiting_count >= options.batch_count or self._held_bytes >= options.batch_bytes

    def _settle(self, results: Sequence[AppendResult]) -> None:
        """Count results of the fragments that were given first, and forget these."""
        outcomes = [result.outcome for result in results]
        if AdmissionOutcome.DUPLICATE in outcomes and not self._outcomes.get(
            AdmissionOutcome.DUPLICATE
        ):
            # Warn once: a lost reply is harmless, but two workers of one name lose everything.
            worker_id = self._queue[outcomes.index(AdmissionOutcome.DUPLICATE)].fragment.worker_id
            _log.warning("the server already has fragments of worker %s", worker_id)
        if results:
            self._refused_since = None
            self._outage.succeeded()
        with self._changed:
            for result in results:
                is_admitted = AdmissionOutcome.ADMITTED in (result.outcome, result.first_outcome)
                self._remove_first("admitted" if is_admitted else "refused")
            self._changed.notify_all()
            self._outcomes.update(outcomes)
            self._admitted += sum(
                AdmissionOutcome.ADMITTED in (result.outcome, result.first_outcome)
                for result in results
            )

    def _drop(self, reasons: Sequence[str | None]) -> None:
        with self._changed:
            kept = []
            for reason in reasons:
                if reason is None:
                    kept.append(self._queue.popleft())
                else:
                    self._dropped[reason] += 1
                    self._remove_first("refused")
            self._queue.extendleft(reversed(kept))
            self._changed.notify_all()

    def _remove_first(self, end: FragmentEnd) -> None:
        held = self._queue.popleft()
        self._ended(held.fragment, end)
        self._held_bytes -= held.size_bytes
        self._taken_count -= 1
        self._singly_count = max(0, self._singly_count - 1)

    def _refuse(self, error: ReplayBufferError) -> bool:
        """Drop a refused fragment, singled out first; return False to end after `REFUSED_S_MAX`."""
        if self._taken_count > 1:
            self._singly_count = self._taken_count
            return True
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since >= REFUSED_S_MAX:
            self._stop(error)
            return False
        words = self._throttle.words(REFUSED)
        if words is not None:
            _log.error(
                "fragment %d of worker %s cannot be sent and is dropped: %s%s",
                self._queue[0].fragment.fragment_index,
                self._queue[0].fragment.worker_id,
                error,
                words,
            )
        self._drop([REFUSED])
        return True

    def _goes_on_after(self, error: ReplayBufferError, full_s: float | None = None) -> bool:
        """Wait before a retry (*full_s* if full); return False if the error stops the appender."""
        with self._changed:
            is_over = isinstance(error, _FINAL) or (self._closing and full_s is None)
            waits = self._options.on_failure == "persist" or (
                self._options.on_failure == "wait" and full_s is not None
            )
            if is_over or not waits:
                self._stop(error)
                return False
            if full_s is None:
                self._outage.failed(error)
            delay_s = RETRY_S if full_s is None else min(full_s, RETRY_S)
            self._changed.wait_for(lambda: self._closing and full_s is None, delay_s)
            return True

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._unsent = [held.fragment for held in self._queue]
            for fragment in self._unsent:
                self._ended(fragment, "undelivered")
            self._held_bytes = 0
            self._queue.clear()
            self._changed.notify_all()


def close_at_exit(
    close: Callable[[], None], error: BaseException | None, loss: Callable[[], str]
) -> None:
    """Close what a `with` block opened; if the block raised, errors of closing are only logged."""
    try:
        close()
    except Exception as problem:
        if error is None:
            raise
        if problem is not error:
            _log.warning("%s: %s", loss(), problem)
