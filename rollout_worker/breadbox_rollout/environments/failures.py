"""What environments do wrong, and what a round brought besides arrays."""

import traceback
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from breadbox.model.errors import InvalidRequestError, ReplayBufferError

_DETAIL_CHARACTERS_MAX = 300
_TRACE_CHARACTERS_MAX = 4000


class FailureKind(Enum):
    """What an environment did wrong. A small closed set: it labels counters."""

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
    """Too many failures in a row without one answered step."""
    CLOSE_RAISED = "close_raised"
    """Costs nothing: the environment was going anyway."""
    RECORDING_FAILED = "recording_failed"
    """Costs the recording, not the episode."""
    NO_FRAMES = "no_frames"
    """Likewise: there is nothing to see of it."""


@dataclass(slots=True)
class RoundNotes:
    """Failures, tasks and recordings of one round, beside its arrays; almost always empty."""

    failures: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, ...}, see `EnvironmentFailedError.as_dict`; a traceback once for each kind."""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, "task": name} where the episode that began says what it is about."""
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
            details["trace"] = ""  # Messages are bounded, and one of a kind is enough.
        self.failures.append({"env": env, **details})


class NoFramesError(InvalidRequestError):
    """An environment shows nothing of itself that could be recorded."""


class EnvironmentFailedError(Exception):
    """An environment failed; never leaves the process it happened in."""

    def __init__(self, kind: FailureKind, detail: str, cause: BaseException | None = None) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.__cause__ = cause
        self.kind = kind
        self.detail = detail[:_DETAIL_CHARACTERS_MAX]
        self.notes: RoundNotes | None = None
        """What else the round brought, where the process ends with this."""

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
