"""Where the steps of workers went: their latest reports, and what became of admitted fragments.

In memory, bounded, in no journal: a worker reports counts since its start again and again.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from breadbox.model.types import WorkerSteps
from breadbox.shared.step_ends import ENDS, ends_of, left_out
from breadbox.v1 import buffer_pb2
from breadbox.wire.conversion import WORKER
from breadbox_server.base.conversion import to_duration
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.events import Event, StepsEnd, StepsEnded
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.validation import check_int, check_name
from breadbox_server.limits import LEFT_OUT_NAMES_MAX, REPORTED_WORKERS_MAX, TASK_SIZE_BYTES_MAX
from breadbox_server.metrics.episodes import OTHER

STEPS_MAX: Final = 2**53
_COUNTS: Final = (
    *("acted_count", "filling_count", "sending_count", "dropped_count", "refused_count"),
    *("undelivered_count", "admitted_count", "fragment_step_count"),
)


@dataclass(slots=True)
class _Row:
    report: buffer_pb2.WorkerSteps
    reported_at: float | None = None
    trained: int = 0
    evicted: int = 0
    trained_version: int | None = None

    def message(self, now: float) -> buffer_pb2.WorkerSteps:
        """Return report and ends as one message."""
        message = buffer_pb2.WorkerSteps()
        message.CopyFrom(self.report)
        message.trained_count, message.evicted_count = self.trained, self.evicted
        if self.trained_version is not None:
            message.trained_version = self.trained_version
        if self.reported_at is not None:
            message.report_age_duration.CopyFrom(to_duration(max(0.0, now - self.reported_at)))
        return message


class StepEnds:
    """The rows of each buffer's workers."""

    def __init__(self, collects_groups: Callable[[BufferName], bool] = lambda name: False) -> None:
        self._collects_groups = collects_groups
        self._of: dict[BufferName, OrderedDict[str, _Row]] = {}

    def note(self, events: Iterable[Event]) -> None:
        """Count what became of fragments."""
        for event in events:
            # Of a group's members it is not known which worker sent them.
            if type(event) is not StepsEnded or self._collects_groups(event.buffer):
                continue
            for fragment in event.fragments:
                row = self._row(event.buffer, fragment.worker_id)
                if event.end is StepsEnd.EVICTED:
                    row.evicted += fragment.step_count
                elif event.end is StepsEnd.RETURNED:
                    row.trained -= fragment.step_count
                else:
                    row.trained += fragment.step_count
                    row.trained_version = event.model_version

    def report(
        self, buffer: BufferName, reports: Iterable[buffer_pb2.WorkerSteps], now: float
    ) -> None:
        """Keep the reports of workers that were checked; those heard of last are kept longest."""
        for each in reports:
            row = self._row(buffer, each.worker_id)
            if each.acted_count < row.report.acted_count:
                # The worker was started again under its name.
                row.trained, row.evicted, row.trained_version = 0, 0, None
            row.report.CopyFrom(each)  # A part of a request would keep all of it.
            row.reported_at = now
            self._of[buffer].move_to_end(each.worker_id)

    def messages(self, buffer: BufferName, now: float) -> list[buffer_pb2.WorkerSteps]:
        """Return where the steps of each worker of a buffer went, by name."""
        return [row.message(now) for _, row in sorted(self._of.get(buffer, {}).items())]

    def totals(self, buffer: BufferName, now: float) -> tuple[dict[str, int], dict[str, int]]:
        """Return the steps by end, and the workers that are left out by process.

        The process of worker "cart-3" is "cart". Beyond `LEFT_OUT_NAMES_MAX` they are `OTHER`.
        """
        workers: list[WorkerSteps] = [WORKER.read(each) for each in self.messages(buffer, now)]
        reported = [each for each in workers if each.report_age_s is not None]
        counts = ends_of(reported)
        ends = {end: counts.get(end, 0) for end in ENDS}
        by_process = Counter(
            each.worker_id.rpartition("-")[0] or each.worker_id for each in left_out(workers)
        )
        kept = dict(by_process.most_common(LEFT_OUT_NAMES_MAX))
        if rest := by_process.total() - sum(kept.values()):
            kept[OTHER] = kept.get(OTHER, 0) + rest
        return (ends if reported else {}), kept

    def forget(self, buffer: BufferName) -> None:
        """Let go of a deleted buffer."""
        self._of.pop(buffer, None)

    def _row(self, buffer: BufferName, worker_id: str) -> _Row:
        rows = self._of.setdefault(buffer, OrderedDict())
        row = rows.get(worker_id)
        if row is None:
            row = rows[worker_id] = _Row(buffer_pb2.WorkerSteps(worker_id=worker_id))
            if len(rows) > REPORTED_WORKERS_MAX:
                rows.popitem(last=False)
        return row


def check_reports(reports: Iterable[buffer_pb2.WorkerSteps]) -> None:
    """Refuse a report with a name or a count that cannot be."""
    for position, each in enumerate(reports):
        at = f"workers[{position}]"
        check_name(f"{at}.worker_id", each.worker_id)
        check_name(f"{at}.task", each.task or "default")
        if len(each.task.encode()) > TASK_SIZE_BYTES_MAX:
            raise InvalidArgumentError(f"{at}.task", f"must be at most {TASK_SIZE_BYTES_MAX} bytes")
        for name in _COUNTS:
            check_int(f"{at}.{name}", getattr(each, name), 0, STEPS_MAX)
        if not 0 <= each.steps_per_version <= STEPS_MAX:
            raise InvalidArgumentError(f"{at}.steps_per_version", "must be a number of steps")
