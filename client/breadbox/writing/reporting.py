"""Report finished episodes, and where the steps of workers went, in the background."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from breadbox.model.errors import (
    BackpressureError,
    ClosedError,
    InvalidRequestError,
    ReplayBufferError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.types import EpisodeReport, WorkerSteps
from breadbox.writing.fragmenter import Fragmenter

logger = logging.getLogger(__name__)

_REPORTS_PER_CALL_MAX = 512
_WORKERS_PER_CALL_MAX = 256
LAST_REPORT_S = 2.0
"""Seconds that the last report of steps has at least."""


class ReportClient(Protocol):
    """The part of a client that a reporter calls."""

    def report_episodes(
        self,
        episodes: Sequence[EpisodeReport],
        *,
        workers: Sequence[WorkerSteps] = (),
        buffer: str | None = None,
    ) -> None:
        """Report as `breadbox.Client.report_episodes`."""


class SentSteps:
    """Count the steps of each worker's fragments by what became of them. Thread-safe.

    A step is "sending" from `expect` to `end`, or until `give_up`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[str, Counter[str]] = {}

    def expect(self, fragments: Iterable[Fragment]) -> None:
        """Count the steps of fragments that are about to be given to an appender."""
        with self._lock:
            for fragment in fragments:
                steps = self._steps.setdefault(fragment.worker_id, Counter())
                steps["sending"] += fragment.step_count

    def end(self, fragment: Fragment, end: str) -> None:
        """Count the steps of a fragment under an end, such as "admitted"."""
        with self._lock:
            steps = self._steps.get(fragment.worker_id, Counter())
            if steps["sending"]:  # Otherwise `give_up` has counted it as undelivered.
                steps["sending"] -= fragment.step_count
                steps[end] += fragment.step_count

    def give_up(self) -> None:
        """Count what is being sent as undelivered."""
        with self._lock:
            for steps in self._steps.values():
                steps["undelivered"] += steps.pop("sending", 0)

    def of(self, worker_id: str) -> dict[str, int]:
        """Return the steps of a worker's fragments by `WorkerSteps` count."""
        with self._lock:
            return {f"{end}_count": n for end, n in self._steps.get(worker_id, {}).items()}


def worker_steps(fragmenter: Fragmenter, sent: SentSteps, *, task: str = "default") -> WorkerSteps:
    """Return where a worker's steps went."""
    return WorkerSteps(
        worker_id=fragmenter.worker_id,
        task=task,
        acted_count=fragmenter.acted_step_count,
        filling_count=fragmenter.answered_count,
        dropped_count=fragmenter.dropped_step_count,
        fragment_step_count=fragmenter.step_count,
        steps_per_version=fragmenter.steps_per_version,
        **sent.of(fragmenter.worker_id),
    )


class EpisodeReporter:
    """Send reports from a thread, again after backpressure; count failures and overflow.

    Steps are counted from a worker's start, so a newer report of it replaces one not yet sent.
    """

    def __init__(
        self,
        client: ReportClient,
        *,
        reports_max: int = 16384,
        steps: Callable[[], Iterable[WorkerSteps]] = lambda: (),
        every_s: float | None = None,
        buffer: str | None = None,
    ) -> None:
        """Take reports; `start` starts the thread.

        Args:
            client: Client that sends.
            reports_max: Most reports of episodes that may wait; further ones are lost.
            steps: Return the steps of all workers, for reports at the end and every *every_s*.
            every_s: Seconds without another report after which steps are reported, or None for
                never before the end.
            buffer: The buffer, or None for the client's.
        """
        self._client = client
        self._steps = steps
        self._every_s = every_s
        self._options: dict[str, Any] = {} if buffer is None else {"buffer": buffer}
        self._reports_max = reports_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[EpisodeReport] = deque()
        self._workers: dict[str, WorkerSteps] = {}
        self._takes_steps = True
        """False if the server is too old for reports of steps; only the thread uses it."""
        self.reported_count = self.lost_count = 0
        self._lost_in_a_row: int | None = None
        """Episodes lost since a call was last answered, or None; only the thread uses it."""
        self._closing = False
        self._gave_up = False
        self._error: Exception | None = None
        """Error that ended the thread, which is a bug."""
        self._thread = threading.Thread(target=self._run, name="episode-reporter", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, report: EpisodeReport) -> None:
        """Queue a report. Does not block."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if len(self._waiting) >= self._reports_max:
                self.lost_count += 1
                return
            self._waiting.append(report)
            self._changed.notify_all()

    def put_steps(self, workers: Iterable[WorkerSteps]) -> None:
        """Queue where the steps of workers went. Does not block."""
        with self._lock:
            self._workers |= {each.worker_id: each for each in workers}
            self._changed.notify_all()

    def close(self, grace_s: float) -> None:
        """Send waiting reports, at most for *grace_s* seconds; the rest is lost.

        The last report of steps has at least `LAST_REPORT_S`.
        """
        self.put_steps(self._steps())
        with self._lock:
            grace_s = max(grace_s, LAST_REPORT_S) if self._workers else grace_s
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(grace_s)
        with self._lock:
            self._gave_up = True
            self.lost_count += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        try:
            while self._send_some():
                pass
        except Exception as error:
            # Logged here too, because a worker that ends may never put another report.
            logger.exception("episodes are not reported any more")
            with self._lock:
                self._error = error
                self.lost_count += len(self._waiting)
                self._waiting.clear()

    def _send_some(self) -> bool:
        """Wait for reports and send the first ones; return False when all are sent."""
        with self._lock:
            is_due = self._changed.wait_for(
                lambda: bool(self._waiting or self._workers) or self._closing, self._every_s
            )
            if is_due and not (self._waiting or self._workers):
                return False
        if not is_due:
            self.put_steps(self._steps())
        with self._lock:
            count = min(len(self._waiting), _REPORTS_PER_CALL_MAX)
            batch = [self._waiting.popleft() for _ in range(count)]
            names = list(self._workers)[:_WORKERS_PER_CALL_MAX]
            workers = [self._workers.pop(name) for name in names]
        sent = False
        try:
            sent = self._report(batch, workers if self._takes_steps else [])
        except BackpressureError as error:
            with self._lock:
                if self._gave_up:
                    return False
                self._waiting.extendleft(reversed(batch))
                self._workers = {each.worker_id: each for each in workers} | self._workers
                batch = []
                was_closing = self._closing
                self._changed.wait_for(lambda: self._closing != was_closing, error.retry_delay_s)
        finally:
            with self._lock:
                self.reported_count += len(batch) * sent
                self.lost_count += len(batch) * (not sent)
        return True

    def _report(self, batch: list[EpisodeReport], workers: list[WorkerSteps]) -> bool:
        if not (batch or workers):
            return True
        try:
            options = self._options | ({"workers": workers} if workers else {})
            self._client.report_episodes(batch, **options)
        except ClosedError:
            return False
        except BackpressureError:
            raise
        except InvalidRequestError as error:
            if batch:
                raise
            # A server before 0.2 wants an episode in each report, and ignores the rest.
            self._takes_steps = False
            logger.info("the server does not count the steps of workers: %s", error)
            return True
        except ReplayBufferError as error:
            # Once: episodes may end many times a second while the server is unreachable.
            if self._lost_in_a_row is None:
                logger.warning("reports of episodes and steps are lost for now: %s", error)
            self._lost_in_a_row = (self._lost_in_a_row or 0) + len(batch)
            return False
        if self._lost_in_a_row:
            logger.info("%d episode reports were lost", self._lost_in_a_row)
        self._lost_in_a_row = None
        return True
