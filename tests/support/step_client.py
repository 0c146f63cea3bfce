"""A client of a step writer, without a server."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from breadbox.model import errors
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    AdmissionOutcome,
    AppendResult,
    BufferConfig,
    BufferDescription,
    BufferState,
    ModelState,
    PayloadReference,
    SchemaPolicy,
    WorkerSteps,
)

ADMITTED = AppendResult(AdmissionOutcome.ADMITTED)
WRONG_SESSION = AppendResult(AdmissionOutcome.WRONG_SESSION)


class FakeClient:
    """One buffer: what it admitted, and a session that can be changed."""

    def __init__(self, schema: SchemaPolicy = SchemaPolicy.RAGGED) -> None:
        self.fragments: list[Fragment] = []
        self.session_id, self.version = "s", 3
        self.weights: PayloadReference | None = PayloadReference("0" * 32, 1)
        self.failure: errors.ReplayBufferError | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._config = BufferConfig(schema=schema)
        self.begins_when_awaited = ""
        self.workers: dict[str, WorkerSteps] = {}
        """The latest report of each worker's steps."""

    def append_many(self, fragments: Iterable[Fragment], **_: Any) -> list[AppendResult]:
        assert self.may_answer.wait(10)
        if self.failure is not None:
            raise self.failure
        answers = []
        for fragment in fragments:
            is_current = fragment.session_id == self.session_id
            answers.append(ADMITTED if is_current else WRONG_SESSION)
            if is_current:
                self.fragments.append(fragment)
        return answers

    def report_episodes(
        self, episodes: Any, *, workers: Sequence[WorkerSteps] = (), buffer: str | None = None
    ) -> None:
        assert not episodes
        self.workers |= {each.worker_id: each for each in workers}

    def watch_model(self, known: ModelState | None = None, **options: Any) -> ModelState | None:
        assert known is None
        if options.get("max_wait_s"):
            self.session_id = self.session_id or self.begins_when_awaited
        state = ModelState(self.session_id, self.version, self.weights)
        return state if self.session_id else None

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        return BufferDescription("b", self._config, self.session_id, self.version, BufferState())
