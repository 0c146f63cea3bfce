"""Fragments on their way to the service: bounded, in order, and never lost in silence.

What it keeps:

S1  Fragments of one worker are sent in the order in which they were put.
S2  Whatever happens to a fragment is counted under exactly one reason.
S3  At most `fragments_max` fragments and `bytes_max` bytes wait (a single one may be larger);
    beyond that `put` blocks, and with it the environments. Nothing is dropped to make room.
S4  Only what the service would refuse anyway, or what no service ever takes, is dropped.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from breadbox.errors import (
    BackpressureError,
    ClosedError,
    InvalidRequestError,
    LimitExceededError,
    ReplayBufferError,
    UnsupportedArrayError,
)
from breadbox.fragment import Fragment
from breadbox.types import AdmissionOutcome, AppendResult
from breadbox_rollout.models import Model
from breadbox_rollout.ports import Service
from breadbox_rollout.throttle import Throttle

logger = logging.getLogger(__name__)

RETRY_S = 1.0
_BATCH_FRAGMENTS_MAX = 256
_BATCH_BYTES_MAX = 64 * 2**20


class Sender:
    """Appends fragments from a thread of its own.

    Args:
        service: Where to append. `close` of it makes the thread give up what it is waiting for.
        latest_model: What is current as far as this worker knows.
        fragments_max: Fragments that may wait.
        bytes_max: Bytes of them.
    """

    def __init__(
        self,
        service: Service,
        latest_model: Callable[[], Model],
        *,
        fragments_max: int,
        bytes_max: int,
    ) -> None:
        self._service = service
        self._latest_model = latest_model
        self._fragments_max = fragments_max
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Fragment] = deque()
        self._waiting_bytes = 0
        self._closing = False
        self._singly_count = 0
        self._throttle = Throttle(time.monotonic)
        self._counts: Counter[str] = Counter()
        self._error: Exception | None = None
        """What ended the thread, which is a bug."""
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, fragment: Fragment, wait_s: float) -> bool:
        """Queue a fragment, waiting while the queue is full.

        Returns:
            False when there was still no room after *wait_s*: nothing was queued, try again.

        Raises:
            Exception: What ended the sender's thread, which is a bug; nothing was queued.
        """
        with self._lock:
            took = self._changed.wait_for(
                lambda: self._error is not None or self._has_room(fragment), wait_s
            )
            if self._error is not None:
                raise self._error
            if not took:
                return False
            self._waiting.append(fragment)
            self._waiting_bytes += fragment.size_bytes
            self._changed.notify_all()
            return True

    def count_undelivered(self) -> None:
        """Count a fragment that there was no room for when the worker ended."""
        with self._lock:
            self._counts["undelivered"] += 1

    def counts(self) -> dict[str, int]:
        """Return fragments by what became of them.

        Outcomes of the service by their name; "stale_before_upload" and "session_before_upload"
        for those that need not be sent; "refused" for those that no service takes; "undelivered"
        for those that waited when the worker ended.
        """
        with self._lock:
            return dict(self._counts)

    @property
    def waiting_count(self) -> int:
        """Fragments that wait."""
        with self._lock:
            return len(self._waiting)

    def close(self, grace_s: float) -> None:
        """Send what waits, for at most *grace_s* seconds; count the rest as undelivered."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(grace_s)
            if self._thread.is_alive():
                self._service.close()
                self._thread.join(grace_s)
        with self._lock:
            if self._waiting:
                logger.warning("%d fragments could not be delivered", len(self._waiting))
            self._counts["undelivered"] += len(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0

    def _has_room(self, fragment: Fragment) -> bool:
        if not self._waiting:
            return True
        return (
            len(self._waiting) < self._fragments_max
            and self._waiting_bytes + fragment.size_bytes <= self._bytes_max
        )

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._send(batch)
        except ClosedError:
            return
        except Exception as error:  # noqa: BLE001 - raised again by `put`, where the worker is
            with self._lock:
                self._error = error
                self._changed.notify_all()

    def _next_batch(self) -> list[Fragment] | None:
        """Wait for fragments and return the first of them, still in the queue; None: all is sent.

        They stay in the queue until something has become of them, so that they keep counting
        against its limits and that none is forgotten if the thread ends.
        """
        with self._lock:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
            if not self._waiting:
                return None
            batch: list[Fragment] = []
            size_bytes = 0
            count_max = 1 if self._singly_count else _BATCH_FRAGMENTS_MAX
            for fragment in self._waiting:
                size_bytes += fragment.size_bytes
                if batch and (len(batch) >= count_max or size_bytes > _BATCH_BYTES_MAX):
                    break
                batch.append(fragment)
            return batch

    def _send(self, batch: list[Fragment]) -> None:
        model = self._latest_model()
        wanted = [fragment for fragment in batch if self._reason_to_drop(fragment, model) is None]
        if len(wanted) < len(batch):
            # Dropped first, alone: then what is sent is the head of the queue again.
            self._drop_known(batch, model)
            return
        try:
            results = self._service.append_many(batch)
        except BackpressureError as error:
            # Admitted ones are settled; for the rest there may be news by now (stale, ended).
            self._settle(batch, error.results)
        except (InvalidRequestError, UnsupportedArrayError, LimitExceededError) as error:
            self._refuse(batch, error)
        except ClosedError:
            raise
        except ReplayBufferError as error:
            words = self._throttle.words("unsent")
            if words is not None:
                logger.warning(
                    "cannot send %d fragments, trying again: %s%s", len(batch), error, words
                )
            self._pause()
        else:
            self._settle(batch, results)

    def _reason_to_drop(self, fragment: Fragment, model: Model) -> str | None:
        if fragment.session_id != model.session_id:
            return "session_before_upload"
        limit = model.staleness_max
        if limit is not None and model.model_version - fragment.model_version_min > limit:
            return "stale_before_upload"
        return None

    def _drop_known(self, batch: list[Fragment], model: Model) -> None:
        reasons = {id(fragment): self._reason_to_drop(fragment, model) for fragment in batch}
        with self._lock:
            kept = [fragment for fragment in self._waiting if not reasons.get(id(fragment))]
            for fragment in self._waiting:
                reason = reasons.get(id(fragment))
                if reason:
                    self._counts[reason] += 1
                    self._waiting_bytes -= fragment.size_bytes
            self._waiting = deque(kept)
            self._changed.notify_all()

    def _refuse(self, batch: list[Fragment], error: ReplayBufferError) -> None:
        """Drop a fragment that cannot be sent; of several, send each alone to find out which."""
        if len(batch) > 1:
            self._singly_count = len(batch)
            return
        words = self._throttle.words("refused")
        if words is not None:
            logger.error(
                "fragment %d of worker %s cannot be sent and is dropped: %s%s",
                batch[0].fragment_index,
                batch[0].worker_id,
                error,
                words,
            )
        self._take(1, ["refused"])

    def _settle(self, batch: list[Fragment], results: Sequence[AppendResult]) -> None:
        """Take the leading fragments that something became of out of the queue."""
        outcomes: list[str] = []
        for result in results[: len(batch)]:
            if result.outcome.asks_to_wait:
                break
            outcomes.append(result.outcome.value)
        if AdmissionOutcome.DUPLICATE.value in outcomes and not self._counts["duplicate"]:
            # Once: a reply that got lost is harmless, two workers of one name lose everything.
            logger.warning("the service has fragments of worker %s already", batch[0].worker_id)
        self._take(len(outcomes), outcomes)

    def _take(self, count: int, reasons: list[str]) -> None:
        with self._lock:
            for reason in reasons[:count]:
                self._waiting_bytes -= self._waiting.popleft().size_bytes
                self._counts[reason] += 1
            self._singly_count = max(0, self._singly_count - count)
            self._changed.notify_all()

    def _pause(self) -> None:
        """Wait a little before trying again; a worker that ends does not try again."""
        with self._lock:
            if self._changed.wait_for(lambda: self._closing, RETRY_S):
                raise ClosedError("the worker is ending")
