"""What was found wrong with recorded data, and what was done about it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from breadbox_offline.errors import ValidationError


class FindingKind(StrEnum):
    """What can be wrong with an episode."""

    MALFORMED = "malformed"
    """It cannot be read at all."""
    EMPTY = "empty"
    """It has no steps."""
    UNFINISHED = "unfinished"
    """Nothing ended it."""
    GAP = "gap"
    """Timesteps are missing."""
    REPEATED_STEP = "repeated_step"
    """A timestep occurs more than once."""
    SEAM = "seam"
    """A step leads to another observation than the next one starts from."""
    NOT_FINITE = "not_finite"
    """A reward is NaN or infinite."""
    DUPLICATE = "duplicate"
    """The same episode with the same content came twice in one call."""
    ALREADY_HELD = "already_held"
    """The buffer holds it already, with the same content."""
    CONFLICT = "conflict"
    """The same id with other content."""


class FindingPolicy(StrEnum):
    """What to do about a finding. It is counted and reported in any case."""

    RAISE = "raise"
    """Refuse the whole call."""
    SKIP = "skip"
    """Leave the episode (for REPEATED_STEP: the later row) out."""
    TRUNCATE = "truncate"
    """Treat it as cut off: UNFINISHED as it stands, GAP and SEAM where they are."""
    KEEP = "keep"
    """Use it as it is."""


_DEFAULT_POLICIES: Mapping[FindingKind, FindingPolicy] = MappingProxyType(
    {
        FindingKind.MALFORMED: FindingPolicy.SKIP,
        FindingKind.EMPTY: FindingPolicy.SKIP,
        FindingKind.UNFINISHED: FindingPolicy.TRUNCATE,
        FindingKind.GAP: FindingPolicy.TRUNCATE,
        FindingKind.REPEATED_STEP: FindingPolicy.SKIP,
        FindingKind.SEAM: FindingPolicy.TRUNCATE,
        FindingKind.NOT_FINITE: FindingPolicy.SKIP,
        FindingKind.DUPLICATE: FindingPolicy.SKIP,
        FindingKind.ALREADY_HELD: FindingPolicy.SKIP,
        FindingKind.CONFLICT: FindingPolicy.SKIP,
    }
)
_ALLOWED: Mapping[FindingKind, frozenset[FindingPolicy]] = MappingProxyType(
    {
        kind: frozenset({FindingPolicy.RAISE, FindingPolicy.SKIP}) | extra
        for kind, extra in {
            FindingKind.MALFORMED: frozenset[FindingPolicy](),
            FindingKind.EMPTY: frozenset[FindingPolicy](),
            FindingKind.UNFINISHED: frozenset({FindingPolicy.TRUNCATE, FindingPolicy.KEEP}),
            FindingKind.GAP: frozenset({FindingPolicy.TRUNCATE}),
            FindingKind.REPEATED_STEP: frozenset[FindingPolicy](),
            FindingKind.SEAM: frozenset({FindingPolicy.TRUNCATE, FindingPolicy.KEEP}),
            FindingKind.NOT_FINITE: frozenset({FindingPolicy.KEEP}),
            FindingKind.DUPLICATE: frozenset[FindingPolicy](),
            FindingKind.ALREADY_HELD: frozenset[FindingPolicy](),
            FindingKind.CONFLICT: frozenset[FindingPolicy](),
        }.items()
    }
)


@dataclass(frozen=True, slots=True)
class ValidationPolicy:
    """A policy for every kind of finding.

    Raises:
        ValueError: on construction, if a policy makes no sense for its kind.
    """

    overrides: Mapping[FindingKind, FindingPolicy] = field(default_factory=dict)
    """What differs from the default: skip what cannot be used, truncate what was not ended."""

    def __post_init__(self) -> None:
        for kind, policy in self.overrides.items():
            if policy not in _ALLOWED[kind]:
                allowed = ", ".join(sorted(_ALLOWED[kind]))
                raise ValueError(f"{kind} cannot be treated with {policy}; choose from {allowed}")

    @classmethod
    def strict(cls) -> "ValidationPolicy":
        """Raise on everything."""
        return cls(dict.fromkeys(FindingKind, FindingPolicy.RAISE))

    def of(self, kind: FindingKind) -> FindingPolicy:
        """The policy for a kind."""
        return self.overrides.get(kind, _DEFAULT_POLICIES[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: what, where and why."""

    kind: FindingKind
    why: str
    policy: FindingPolicy
    """What was done about it."""
    episode_id: str | None = None
    agent_id: str | None = None
    t: int | None = None
    """Timestep within the episode."""
    row: int | None = None
    """Row of the call's input."""
    column: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        place = [
            *([self.file] if self.file is not None else []),
            *([f"row {self.row}"] if self.row is not None else []),
            *([f"column {self.column!r}"] if self.column is not None else []),
            *([f"episode {self.episode_id}"] if self.episode_id is not None else []),
            *([f"agent {self.agent_id}"] if self.agent_id is not None else []),
            *([f"step {self.t}"] if self.t is not None else []),
        ]
        return f"{self.kind} ({', '.join(place)}): {self.why} [{self.policy}]"


@dataclass(slots=True)
class ValidationReport:
    """Everything found so far. Counts are exact; of the findings the first ones are kept."""

    policy: ValidationPolicy = field(default_factory=ValidationPolicy)
    findings_max: int = 1000
    file: str | None = None
    """The file being read; stamped on findings."""
    row_offset: int = 0
    """Row of that file that readers call row 0; added to the rows of findings."""
    accepted_count: int = 0
    """Episodes that passed."""
    counts: Counter[FindingKind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def note(
        self,
        kind: FindingKind,
        why: str,
        *,
        episode_id: str | None = None,
        agent_id: str | None = None,
        t: int | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> FindingPolicy:
        """Record a finding; the caller must then do what is returned.

        Raises:
            ValidationError: the policy for this kind is to raise.
        """
        row = None if row is None else row + self.row_offset
        finding = Finding(
            kind=kind,
            why=why,
            policy=self.policy.of(kind),
            episode_id=episode_id,
            agent_id=agent_id,
            t=t,
            row=row,
            column=column,
            file=self.file,
        )
        self.counts[kind] += 1
        if len(self.findings) < self.findings_max:
            self.findings.append(finding)
        if finding.policy is FindingPolicy.RAISE:
            raise ValidationError(str(finding), file=self.file, row=row, column=column)
        return finding.policy

    def summary(self) -> str:
        """One line: how many episodes passed, and how often each thing was found."""
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{self.accepted_count} episodes accepted; {found or 'nothing wrong'}"
