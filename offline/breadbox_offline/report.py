"""Report what is wrong with recorded data, and what was done about it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from breadbox_offline.errors import ValidationError


class FindingKind(StrEnum):
    """What can be wrong with an episode."""

    MALFORMED = "malformed"
    EMPTY = "empty"
    UNFINISHED = "unfinished"
    GAP = "gap"
    REPEATED_STEP = "repeated_step"
    SEAM = "seam"
    """A step led to another observation than the one that the next step starts from."""
    NOT_FINITE = "not_finite"
    """A reward is NaN or infinite."""
    DUPLICATE = "duplicate"
    """The same episode with the same content came twice in one call."""
    ALREADY_HELD = "already_held"
    """The buffer holds it already, with the same content."""
    CONFLICT = "conflict"
    """The same id with other content."""


class FindingPolicy(StrEnum):
    """What to do about a finding, beside counting and reporting it."""

    RAISE = "raise"
    SKIP = "skip"
    """Leave out the episode (for REPEATED_STEP: the later row)."""
    TRUNCATE = "truncate"
    """Truncate it: UNFINISHED at its end, GAP and SEAM where they are."""
    KEEP = "keep"


_SPECIAL: Mapping[FindingKind, tuple[FindingPolicy, ...]] = {
    FindingKind.UNFINISHED: (FindingPolicy.TRUNCATE, FindingPolicy.KEEP),
    FindingKind.GAP: (FindingPolicy.TRUNCATE,),
    FindingKind.SEAM: (FindingPolicy.TRUNCATE, FindingPolicy.KEEP),
    FindingKind.NOT_FINITE: (FindingPolicy.KEEP,),
}
"""Policies that a kind allows besides RAISE and SKIP."""


@dataclass(frozen=True, slots=True)
class ValidationPolicy:
    """A policy for every kind of finding; raises `ValueError` for one that the kind forbids."""

    overrides: Mapping[FindingKind, FindingPolicy] = field(default_factory=dict)
    """Exceptions from the default: truncate if the kind allows it, else skip."""

    def __post_init__(self) -> None:
        for kind, policy in self.overrides.items():
            allowed = {FindingPolicy.RAISE, FindingPolicy.SKIP, *_SPECIAL.get(kind, ())}
            if policy not in allowed:
                raise ValueError(
                    f"{kind} cannot be treated with {policy}; choose from "
                    f"{', '.join(sorted(allowed))}"
                )

    @classmethod
    def strict(cls) -> "ValidationPolicy":
        """Raise on everything."""
        return cls(dict.fromkeys(FindingKind, FindingPolicy.RAISE))

    def of(self, kind: FindingKind) -> FindingPolicy:
        """Return the policy for a kind."""
        truncates = FindingPolicy.TRUNCATE in _SPECIAL.get(kind, ())
        default = FindingPolicy.TRUNCATE if truncates else FindingPolicy.SKIP
        return self.overrides.get(kind, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: its kind, place and reason."""

    kind: FindingKind
    why: str
    policy: FindingPolicy
    episode_id: str | None = None
    agent_id: str | None = None
    t: int | None = None
    """Timestep within the episode."""
    row: int | None = None
    """Row of the call's input, or of the file."""
    column: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        column = None if self.column is None else repr(self.column)
        named = (
            *(("row", self.row), ("column", column), ("episode", self.episode_id)),
            *(("agent", self.agent_id), ("step", self.t)),
        )
        place = [f"{name} {value}" for name, value in named if value is not None]
        places = ", ".join(place if self.file is None else [self.file, *place])
        return f"{self.kind} ({places}): {self.why} [{self.policy}]"


@dataclass(slots=True)
class ValidationReport:
    """Everything found so far. Counts are exact; only the first findings are kept."""

    policy: ValidationPolicy = field(default_factory=ValidationPolicy)
    findings_max: int = 1000
    file: str | None = None
    """The file being read, for findings."""
    row_offset: int = 0
    """The file's row that is row 0 of the reader; added to rows of findings."""
    accepted_count: int = 0
    counts: Counter[FindingKind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def note(
        self, kind: FindingKind, why: str, *, row: int | None = None, **place: Any
    ) -> FindingPolicy:
        """Record a finding and return its policy; raises `ValidationError` if that is RAISE."""
        row = None if row is None else row + self.row_offset
        policy = self.policy.of(kind)
        finding = Finding(kind=kind, why=why, policy=policy, row=row, file=self.file, **place)
        self.counts[kind] += 1
        if len(self.findings) < self.findings_max:
            self.findings.append(finding)
        if finding.policy is FindingPolicy.RAISE:
            raise ValidationError(str(finding), file=self.file, row=row, column=finding.column)
        return finding.policy

    def summary(self) -> str:
        """Return one line: how many episodes passed, and how often each problem was found."""
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{self.accepted_count} episodes accepted; {found or 'nothing wrong'}"
