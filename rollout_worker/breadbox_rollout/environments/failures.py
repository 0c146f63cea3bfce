"""Failures of environments, and other notes of a round beside its arrays."""

import traceback
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from breadbox.model.errors import InvalidRequestError, ReplayBufferError

_DETAIL_CHARACTERS_MAX = 300
_TRACE_CHARACTERS_MAX = 4000


class FailureKind(Enum):
    """How an environment failed. A small closed set, because it labels counters."""

    BUILD_RAISED = "build_raised"
    RESET_RAISED = "reset_raised"
    STEP_RAISED = "step_raised"
    OBSERVATION_MISMATCH = "observation_mismatch"
    NOT_FINITE = "not_finite"
    BUILD_HUNG = "build_hung"
    RESET_HUNG = "reset_hung"
    STEP_HUNG = "step_hung"
    DIED = "died"
    MEMORY_LIMIT = "memory_limit"
    FRUITLESS = "fruitless"
    """Too many failures in a row without an answered step."""
    CLOSE_RAISED = "close_raised"
    """Harmless: the environment was being closed anyway."""
    RECORDING_FAILED = "recording_failed"
    """The recording is lost, not the episode."""
    NO_FRAMES = "no_frames"
    """As above: the environment draws nothing."""


@dataclass(slots=True)
class RoundNotes:
    """Failures, tasks and recordings of one round, beside its arrays; almost always empty."""

    failures: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, ...}, see `EnvironmentFailedError.as_dict`; a traceback only once per kind."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, "task": name} for an episode if its environment named its task."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, ...} for each finished recording."""

    def __bool__(self) -> bool:
        return bool(self.failures or self.tasks or self.episodes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    def add_failure(self, env: int, failure: "EnvironmentFailedError") -> None:
        """Add the failure of an environment."""
        details = failure.as_dict()
        if any(noted["kind"] == details["kind"] for noted in self.failures):
            details["trace"] = ""  # Messages are bounded, and one traceback per kind is enough.
        self.failures.append({"env": env, **details})


class NoFramesError(InvalidRequestError):
    """An environment draws nothing that could be recorded."""


class EnvironmentFailedError(Exception):
    """An environment failed. Never raised outside its process."""

    def __init__(self, kind: FailureKind, detail: str, cause: BaseException | None = None) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.__cause__ = cause
        self.kind = kind
        self.detail = detail[:_DETAIL_CHARACTERS_MAX]
        self.notes: RoundNotes | None = None
        """The round's other notes, if the process ends with this error."""

    def as_dict(self) -> dict[str, str]:
        """Return kind, detail with file and line, and the environment's traceback, if it raised."""
        cause = self.__cause__
        detail, trace = self.detail, ""
        if cause is not None and not isinstance(cause, ReplayBufferError):
            frames = traceback.extract_tb(cause.__traceback__)
            if frames:
                detail += f" at {frames[-1].filename}:{frames[-1].lineno}"
            trace = "".join(traceback.format_exception(cause))[-_TRACE_CHARACTERS_MAX:]
        return {"kind": self.kind.value, "detail": detail, "trace": trace}
