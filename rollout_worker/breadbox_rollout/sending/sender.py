"""Fragments on their way to the service: bounded, in order, and never lost in silence.

A `breadbox.Appender` that persists. What this adds:

S1  Only what the service would refuse anyway, or what no service ever takes, is dropped.
S2  Whatever happens to a fragment is counted under exactly one reason.
"""

import logging
from collections import Counter
from collections.abc import Callable

from breadbox.model.fragment import Fragment
from breadbox.writing.appender import BATCHES_AT_ONCE, Appender, AppenderOptions
from breadbox_rollout.sending.models import Model
from breadbox_rollout.sending.ports import Service

logger = logging.getLogger(__name__)

FLUSH_AFTER_S = 0.0
"""Fragments wait for no company: those that come while others are sent are sent together."""
_AT_ONCE_FRAGMENTS_MAX = 256
_AT_ONCE_BYTES_MAX = 64 * 2**20
"""Bounds of what is sent together, between two looks at whether it is still wanted."""


_CLOSED_S = 5.0
"""For the thread to hear that its service was closed under it."""


class Sender:
    """Appends fragments from a thread of its own, until it is closed."""

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
        self._not_put_count = 0
        self._appender = Appender(
            service,
            AppenderOptions(
                batch_count=_AT_ONCE_FRAGMENTS_MAX // BATCHES_AT_ONCE,
                batch_bytes=_AT_ONCE_BYTES_MAX // BATCHES_AT_ONCE,
                flush_after_s=FLUSH_AFTER_S,
                queue_count_max=fragments_max,
                queue_bytes_max=bytes_max,
                on_failure="persist",
            ),
            unwanted=self._reason_to_drop,
        )

    def put(self, fragment: Fragment, wait_s: float) -> bool:
        """Queue a fragment, waiting while the queue is full."""
        try:
            self._appender.append(fragment, max_wait_s=wait_s)
        except TimeoutError:
            return False
        return True

    def count_undelivered(self) -> None:
        """Count a fragment that there was no room for when the worker ended."""
        self._not_put_count += 1

    def counts(self) -> dict[str, int]:
        """Return fragments by what became of them.

        Outcomes of the service by their name; "stale_before_upload" and "session_before_upload"
        for those that need not be sent; "refused" for those that no service takes; "undelivered"
        for those that waited when the worker ended.
        """
        counts = self._appender.counts
        found = Counter({outcome.value: n for outcome, n in counts.by_outcome.items()})
        found.update(counts.dropped)
        found["undelivered"] = counts.failed + self._not_put_count
        return dict(found)

    @property
    def waiting_count(self) -> int:
        """Fragments that wait."""
        return self._appender.counts.pending

    def close(self, grace_s: float) -> None:
        """Send what waits, for at most *grace_s* seconds; count the rest as undelivered."""
        try:
            try:
                self._appender.close(max_wait_s=grace_s)
            except TimeoutError:
                self._service.close()
                self._appender.close(max_wait_s=_CLOSED_S)
        except Exception as error:  # noqa: BLE001 - a bug was raised by `put`
            count = self._appender.counts.failed
            logger.warning("%d fragments could not be delivered: %s", count, error)

    def _reason_to_drop(self, fragment: Fragment) -> str | None:
        model = self._latest_model()
        if fragment.session_id != model.session_id:
            return "session_before_upload"
        limit = model.staleness_max
        if limit is not None and model.model_version - fragment.model_version_min > limit:
            return "stale_before_upload"
        return None
