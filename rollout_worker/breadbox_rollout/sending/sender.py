"""Send a worker's fragments, in order and counted, and sum up its episodes."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from breadbox.model.fragment import Fragment
from breadbox.model.types import EpisodeEnd, EpisodeReport
from breadbox.writing.appender import Appender, AppenderOptions, FragmentEnd
from breadbox.writing.pacing import Pacer
from breadbox.writing.reporting import SentSteps
from breadbox_rollout.sending.models import Model, Service

logger = logging.getLogger(__name__)

FLUSH_AFTER_S = 0.0
"""Fragments are sent immediately; those that come meanwhile are sent together."""
_CLOSED_S = 5.0
"""Seconds for the thread to end after its service was closed."""


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
        pacer: Pacer | None = None,
    ) -> None:
        """Call *gave_up* once the rest counts as undelivered, before the service is closed.

        *pacer* has the tickets of the fragments; it is closed with the sender.
        """
        self.pacer = pacer
        self._service = service
        self._gave_up = gave_up
        self._latest_model = latest_model
        self._not_put_count = 0
        self.steps = SentSteps()
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
            ended=self._note_end,
        )

    def _note_end(self, fragment: Fragment, end: FragmentEnd) -> None:
        self.steps.end(fragment, end)
        if self.pacer is not None:
            self.pacer.ended(fragment)

    def declare_origin(self, origin: Mapping[str, str]) -> None:
        """Say what the fragments come from, before the first is put."""
        self._service.declare_origin(origin)

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
                self.steps.give_up()
                self._gave_up()
                self._service.close()
                self._appender.close(max_wait_s=_CLOSED_S)
        except Exception as error:  # noqa: BLE001 - a bug was raised by `put`
            count = self._appender.counts.failed
            logger.warning("%d fragments could not be delivered: %s", count, error)
        finally:
            self.steps.give_up()
            if self.pacer is not None:
                self.pacer.close()

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
