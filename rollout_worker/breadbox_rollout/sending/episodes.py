"""Episodes as numbers: the return of each, and its report to the service."""

import logging
import threading
from collections import deque
from dataclasses import dataclass

from breadbox.model.errors import BackpressureError, ClosedError, ReplayBufferError
from breadbox.model.types import EpisodeEnd, EpisodeReport
from breadbox_rollout.sending.ports import Service

logger = logging.getLogger(__name__)

_REPORTS_PER_CALL_MAX = 1024


class EpisodeTracker:
    """Sums of the episode that one worker is in. Pure."""

    def __init__(self, worker_id: str, task: str, discount: float) -> None:
        self._worker_id = worker_id
        self._default_task = task
        self._discount = discount
        self.task = task
        """Task of the current episode."""
        self._reset()

    @property
    def is_empty(self) -> bool:
        """Whether no step of the current episode has been answered."""
        return self._step_count == 0

    def _reset(self) -> None:
        self._return_sum = 0.0
        self._discounted_return_sum = 0.0
        self._step_count = 0
        self._weight = 1.0

    def reward(self, reward: float) -> None:
        """Count one answered step."""
        self._return_sum += reward
        self._discounted_return_sum += self._weight * reward
        self._weight *= self._discount
        self._step_count += 1

    def end(self, end: EpisodeEnd, next_task: str | None = None) -> EpisodeReport | None:
        """Finish the episode and begin the next."""
        report = None
        if self._step_count > 0:
            report = EpisodeReport(
                worker_id=self._worker_id,
                task=self.task,
                return_sum=self._return_sum,
                discounted_return_sum=self._discounted_return_sum,
                step_count=self._step_count,
                end=end,
            )
        self._reset()
        self.task = next_task or self._default_task
        return report


@dataclass(frozen=True, slots=True)
class ReporterCounts:
    """Episodes by what became of their reports."""

    reported: int
    lost: int


class EpisodeReporter:
    """Sends reports from a thread of its own; never holds up an environment.

    A server that asks to wait gets the same reports again, and those that came meanwhile with them.
    Reports are statistics: those that cannot be sent, or that more than `reports_max` others wait
    in front of, are lost and counted.
    """

    def __init__(self, service: Service, *, reports_max: int = 16384) -> None:
        self._service = service
        self._reports_max = reports_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[EpisodeReport] = deque()
        self._reported = 0
        self._lost = 0
        self._lost_in_a_row = 0
        """Since a call was last answered. Of the thread alone."""
        self._closing = False
        self._gave_up = False
        self._error: Exception | None = None
        """What ended the thread, which is a bug."""
        self._thread = threading.Thread(target=self._run, name="episode-reporter", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, report: EpisodeReport) -> None:
        """Queue a report. Does not block."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if len(self._waiting) >= self._reports_max:
                self._lost += 1
                return
            self._waiting.append(report)
            self._changed.notify_all()

    def counts(self) -> ReporterCounts:
        """Return what became of the reports so far."""
        with self._lock:
            return ReporterCounts(self._reported, self._lost)

    def close(self, grace_s: float) -> None:
        """Send what waits, for at most *grace_s* seconds; what waits then is lost."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(grace_s)
        with self._lock:
            self._gave_up = True
            self._lost += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        try:
            while self._send_some():
                pass
        except Exception as error:
            # Said here too: a worker that ends by itself may never put another report.
            logger.exception("episodes are not reported any more")
            with self._lock:
                self._error = error
                self._lost += len(self._waiting)
                self._waiting.clear()

    def _send_some(self) -> bool:
        """Wait for reports and send the first of them; False: all is sent."""
        with self._lock:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
            if not self._waiting:
                return False
            count = min(len(self._waiting), _REPORTS_PER_CALL_MAX)
            batch = [self._waiting.popleft() for _ in range(count)]
        sent = False
        try:
            sent = self._report(batch)
        except BackpressureError as error:
            with self._lock:
                if self._gave_up:
                    return False
                self._waiting.extendleft(reversed(batch))
                batch = []
                was_closing = self._closing
                self._changed.wait_for(lambda: self._closing != was_closing, error.retry_delay_s)
        finally:
            with self._lock:
                self._reported += len(batch) * sent
                self._lost += len(batch) * (not sent)
        return True

    def _report(self, batch: list[EpisodeReport]) -> bool:
        try:
            self._service.report_episodes(batch)
        except ClosedError:
            return False
        except BackpressureError:
            raise
        except ReplayBufferError as error:
            # Once: episodes may end many times a second, for as long as the server is away.
            if not self._lost_in_a_row:
                logger.warning("episode reports are lost for now: %s", error)
            self._lost_in_a_row += len(batch)
            return False
        if self._lost_in_a_row:
            logger.info("%d episode reports were lost", self._lost_in_a_row)
            self._lost_in_a_row = 0
        return True
