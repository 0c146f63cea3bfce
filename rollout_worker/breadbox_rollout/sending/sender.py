"""Send a worker's fragments, in order and counted, and the returns of its episodes."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from breadbox.model.errors import (
    BackpressureError,
    ClosedError,
    InvalidRequestError,
    ReplayBufferError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.types import EpisodeEnd, EpisodeReport, WorkerSteps
from breadbox.writing.appender import Appender, AppenderOptions
from breadbox_rollout.sending.models import Model, Service

logger = logging.getLogger(__name__)

FLUSH_AFTER_S = 0.0
"""Fragments are sent immediately; those that come meanwhile are sent together."""
_CLOSED_S = 5.0
"""Seconds for the thread to end after its service was closed."""
_REPORTS_PER_CALL_MAX = 512
_WORKERS_PER_CALL_MAX = 256
LAST_REPORT_S = 2.0


class Sender:
    """Append fragments from a thread, until it is closed."""

    def __init__(
        self,
        service: Service,
        latest_model: Callable[[], Model],
        *,
        fragments_max: int,
        bytes_max: int,
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Call *gave_up* once the rest counts as undelivered, before the service is closed."""
        self._service = service
        self._gave_up = gave_up
        self._latest_model = latest_model
        self._not_put_count = 0
        self._lock = threading.Lock()
        self._steps: dict[str, Counter[str]] = {}
        """Steps of each worker's fragments, by what became of them; "sending" is not known yet."""
        self._appender = Appender(
            service,
            AppenderOptions(
                batch_count=64,  # Few, so that it is checked late if they are still wanted.
                batch_bytes=16 * 2**20,
                flush_after_s=FLUSH_AFTER_S,
                queue_count_max=fragments_max,
                queue_bytes_max=bytes_max,
                on_failure="persist",
            ),
            unwanted=self._reason_to_drop,
            ended=self._ended,
        )

    def declare_origin(self, origin: Mapping[str, str]) -> None:
        """Say what the fragments come from, before the first is put."""
        self._service.declare_origin(origin)

    def expect(self, fragments: Sequence[Fragment]) -> None:
        """Count the steps of fragments that are about to be put."""
        with self._lock:
            for fragment in fragments:
                steps = self._steps.setdefault(fragment.worker_id, Counter())
                steps["sending"] += fragment.step_count

    def steps_of(self, worker_id: str) -> dict[str, int]:
        """Return the steps of a worker's fragments by `WorkerSteps` count."""
        with self._lock:
            return {f"{end}_count": n for end, n in self._steps.get(worker_id, {}).items()}

    def _ended(self, fragment: Fragment, end: str) -> None:
        with self._lock:
            steps = self._steps.get(fragment.worker_id, Counter())
            if steps["sending"]:  # Otherwise it counts as undelivered.
                steps["sending"] -= fragment.step_count
                steps[end] += fragment.step_count

    def _give_up(self) -> None:
        with self._lock:
            for steps in self._steps.values():
                steps["undelivered"] += steps.pop("sending", 0)

    def put(self, fragment: Fragment, wait_s: float) -> bool:
        """Queue a fragment; return False if there was no room for it within *wait_s*."""
        try:
            self._appender.append(fragment, max_wait_s=wait_s)
        except TimeoutError:
            return False
        return True

    def count_undelivered(self) -> None:
        """Count a fragment that had no room when the worker ended."""
        self._not_put_count += 1

    def counts(self) -> dict[str, int]:
        """Return the number of fragments by outcome, with those dropped, refused or undelivered."""
        counts = self._appender.counts
        found = Counter({outcome.value: n for outcome, n in counts.by_outcome.items()})
        found.update(counts.dropped)
        found["undelivered"] = counts.failed + self._not_put_count
        return dict(found)

    @property
    def waiting_count(self) -> int:
        """Number of fragments that wait."""
        return self._appender.counts.pending

    def close(self, grace_s: float) -> None:
        """Send waiting fragments, at most for *grace_s* seconds; count the rest as undelivered."""
        try:
            try:
                self._appender.close(max_wait_s=grace_s)
            except TimeoutError:
                self._give_up()
                self._gave_up()
                self._service.close()
                self._appender.close(max_wait_s=_CLOSED_S)
        except Exception as error:  # noqa: BLE001 - a bug was raised by `put`
            count = self._appender.counts.failed
            logger.warning("%d fragments could not be delivered: %s", count, error)
        finally:
            self._give_up()

    def _reason_to_drop(self, fragment: Fragment) -> str | None:
        model = self._latest_model()
        if fragment.session_id != model.session_id:
            return "session_before_upload"
        limit = model.staleness_max
        if limit is not None and model.model_version - fragment.model_version_min > limit:
            return "stale_before_upload"
        return None


class EpisodeTracker:
    """Sum up the rewards of a worker's current episode. Pure."""

    def __init__(self, worker_id: str, task: str, discount: float) -> None:
        self._worker_id = worker_id
        self._default_task = task
        self._discount = discount
        self.task = task
        self._reset()

    @property
    def is_empty(self) -> bool:
        """True if no step of the current episode was answered."""
        return self._step_count == 0

    def _reset(self) -> None:
        self._return_sum = 0.0
        self._discounted_return_sum = 0.0
        self._step_count = 0
        self._weight = 1.0

    def reward(self, reward: float) -> None:
        """Add the reward of an answered step."""
        self._return_sum += reward
        self._discounted_return_sum += self._weight * reward
        self._weight *= self._discount
        self._step_count += 1

    def end(self, end: EpisodeEnd, next_task: str | None = None) -> EpisodeReport | None:
        """Begin the next episode; return the report of this one, or None if it has no step."""
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


class EpisodeReporter:
    """Send reports from a thread, again after backpressure; count failures and overflow.

    Of workers' steps the latest report of each worker is sent; the next one replaces it.
    """

    def __init__(
        self,
        service: Service,
        *,
        reports_max: int = 16384,
        last_steps: Callable[[], Iterable[WorkerSteps]] = lambda: (),
    ) -> None:
        """Report *last_steps* when it is closed."""
        self._service = service
        self._last_steps = last_steps
        self._reports_max = reports_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[EpisodeReport] = deque()
        self._workers: dict[str, WorkerSteps] = {}
        self._takes_steps = True
        """False if the server is too old for reports of steps; only the thread uses it."""
        self.reported_count = self.lost_count = 0
        self._lost_in_a_row = 0
        """Reports lost since a call was last answered; only the thread uses it."""
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
        self.put_steps(self._last_steps())
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
            self._changed.wait_for(lambda: bool(self._waiting or self._workers) or self._closing)
            if not (self._waiting or self._workers):
                return False
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
            self._service.report_episodes(batch, **({"workers": workers} if workers else {}))
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
            if not self._lost_in_a_row:
                logger.warning("episode reports are lost for now: %s", error)
            self._lost_in_a_row += len(batch)
            return False
        if self._lost_in_a_row:
            logger.info("%d episode reports were lost", self._lost_in_a_row)
            self._lost_in_a_row = 0
        return True
