"""A service as the rollout worker sees it, in memory, with answers that a test can choose."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from breadbox.model.errors import ClosedError, ReplayBufferError
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    AdmissionOutcome,
    AppendResult,
    BufferConfig,
    BufferDescription,
    EpisodeReport,
    ModelState,
    PayloadReference,
    SchemaPolicy,
    WorkerSteps,
)

WAIT_S_MAX = 30.0


class FakeService:
    """Admits every fragment of the current session unless told otherwise. Thread-safe."""

    def __init__(self, staleness_max: int | None = None) -> None:
        self.staleness_max = staleness_max
        self.schema: SchemaPolicy | None = None
        self.fragments: list[Fragment] = []
        self.reports: list[EpisodeReport] = []
        self.workers: dict[str, WorkerSteps] = {}
        """The latest report of each worker's steps."""
        self.append_calls: list[int] = []
        self.origin: Mapping[str, str] = {}
        """What was declared last."""
        self.answer: Callable[[Sequence[Fragment]], list[AppendResult]] | None = None
        self.errors: deque[ReplayBufferError] = deque()
        """Raised by the next appends, one each."""
        self.watch_count = 0
        self.known: ModelState | None = None
        """What the last watch knew."""
        self.closed = False
        self._state = ModelState("", None, None)
        self._weights: dict[str, Mapping[str, Any]] = {}
        self.changed = threading.Condition()

    def publish(
        self, session_id: str, model_version: int, weights: Mapping[str, Any] | None = None
    ) -> None:
        """Make session, version and weights current; without weights the version has none."""
        with self.changed:
            reference = None
            if weights is not None:
                reference = PayloadReference(f"{len(self._weights):032x}", 1)
                self._weights[reference.payload_id] = weights
            self._state = ModelState(session_id, model_version, reference)
            self.changed.notify_all()

    def end_session(self) -> None:
        with self.changed:
            self._state = ModelState("", None, None)
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], wait_s: float = WAIT_S_MAX) -> None:
        """Wait until *condition* holds after some call; fails the test if it never does."""
        with self.changed:
            assert self.changed.wait_for(condition, wait_s), "the worker never got there"

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0
    ) -> ModelState | None:
        with self.changed:
            self.watch_count += 1
            self.known = known
            self.changed.notify_all()
            changed = self.changed.wait_for(
                lambda: self.closed or self._state != (known or ModelState("", None, None)),
                max_wait_s,
            )
            self._check_open()
            return self._state if changed else None

    def load_model(
        self, newer_than: ModelState | None = None
    ) -> tuple[ModelState, dict[str, Any]] | None:
        with self.changed:
            self._check_open()
            if self._state == newer_than or self._state.weights is None:
                return None
            return self._state, dict(self._weights[self._state.weights.payload_id])

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        fragments = list(fragments)
        with self.changed:
            self._check_open()
            self.append_calls.append(len(fragments))
            self.changed.notify_all()
            if self.errors:
                raise self.errors.popleft()
            if self.answer is not None:
                results = self.answer(fragments)
            else:
                results = [AppendResult(AdmissionOutcome.ADMITTED)] * len(fragments)
            self.fragments += [
                fragment
                for fragment, result in zip(fragments, results, strict=True)
                if result.outcome is AdmissionOutcome.ADMITTED
            ]
            return results

    def report_episodes(
        self,
        episodes: Sequence[EpisodeReport],
        *,
        workers: Sequence[WorkerSteps] = (),
        buffer: str | None = None,
    ) -> None:
        with self.changed:
            self._check_open()
            self.reports += episodes
            self.workers |= {each.worker_id: each for each in workers}
            self.changed.notify_all()

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        self._check_open()
        config = BufferConfig(staleness_max=self.staleness_max, schema=self.schema)
        return BufferDescription(name or "default", config, "", None, None)  # type: ignore[arg-type]

    def declare_origin(self, origin: Mapping[str, str]) -> None:
        self.origin = origin

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the client is closed")
