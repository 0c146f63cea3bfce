"""What environments do wrong, and what a round brought besides arrays."""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

_DETAIL_CHARACTERS_MAX = 300


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


@dataclass(slots=True)
class Notes:
    """What a round brought besides arrays; empty almost always."""

    failures: list[dict[str, Any]] = field(default_factory=list)
    """{"env": i, "kind": ..., "detail": ...}."""
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
        """Note what an environment did wrong."""
        self.failures.append({"env": env, "kind": failure.kind.value, "detail": failure.detail})


class EnvironmentFailedError(Exception):
    """An environment failed; never leaves the process it happened in."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail[:_DETAIL_CHARACTERS_MAX]
        self.notes: Notes | None = None
        """What else the round brought, where the process ends with this."""
