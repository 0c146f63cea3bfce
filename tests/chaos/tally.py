"""What a run came to, and what of it is excused; README.md says what must hold."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Older:
    """Redis came back from a copy: what happened in between is not in it. Monotonic seconds."""

    copied_at: float
    returned_at: float
    """When everybody had what Redis has now."""
    rolls_back: bool
    """Whether the server was down: then its books are of the copy, too."""

    def may_hide(self, line: dict[str, Any]) -> bool:
        """Whether what a line tells of may have happened in between."""
        return bool(line["at"] >= self.copied_at and line["since"] <= self.returned_at)


@dataclass
class Tally:
    """What the run came to; every list names what is wrong."""

    faults: Counter[str] = field(default_factory=Counter)
    appended: int = 0
    granted: int = 0
    tickets: int = 0
    """Tickets that their holders know of."""
    read: int = 0
    """Chunks that readers by a cursor were given."""
    mirrored: int = 0
    """Fragments that mirrors took in."""
    late: int = 0
    """Priorities that came for steps that a mirror did not hold any more."""
    younger: int = 0
    """What was lost with a Redis that came back from a copy, and excused for that alone."""
    olders: list[Older] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [
            *self.lost,
            *self.stale,
            *self.double,
            *self.leaked,
            *self.wrong,
            *self.hung,
        ]

    def summary(self) -> str:
        faults = " ".join(f"{name}={count}" for name, count in sorted(self.faults.items()))
        return (
            f"faults {sum(self.faults.values())} ({faults}), appended {self.appended}, "
            f"granted {self.granted}, tickets {self.tickets}, read {self.read}, "
            f"mirrored {self.mirrored}, late {self.late}, younger {self.younger}, "
            f"lost {len(self.lost)}, stale {len(self.stale)}, double {len(self.double)}, "
            f"leaked {len(self.leaked)}, wrong {len(self.wrong)}, hung {len(self.hung)}"
        )

    def is_rolled_back(self, line: dict[str, Any]) -> bool:
        """Whether what a line tells of may have been undone with the server's books."""
        return any(each.rolls_back and each.may_hide(line) for each in self.olders)

    def may_be_missing(self, appended: dict[str, Any] | None, read: dict[str, Any]) -> bool:
        """Whether a payload may be gone that was appended so, when it is read so.

        Args:
            appended: The line of its writer; None: it was killed before it wrote any.
            read: The line of its reader.
        """
        return any(
            each.copied_at <= read["at"] and (appended is None or each.may_hide(appended))
            for each in self.olders
        )
