"""What a row's clients were told, and what a buffer must hold by that.

A plain book-keeper: it knows fragments by the numbers of their steps, which nobody else has, puts
what was acknowledged on a shelf in the order in which it was, and knows nothing of the service.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from breadbox.model.fragment import Fragment
from breadbox.model.types import BufferConfig, FullPolicy
from chaos.ledger import read_ledgers

Items = tuple[int, ...]
"""Numbers of a fragment's steps, which stand in their rewards."""
OF_TEAM = 4_000_000
OF_LIFE = 100_000
"""Numbers are of one team and one life of a producer; float32 holds them exactly."""


def first_number(team: int, life: int) -> int:
    """Where the numbers of a producer begin."""
    return team * OF_TEAM + life * OF_LIFE


def items_of(fragment: Fragment) -> Items:
    """The numbers of a fragment's steps."""
    return tuple(int(number) for number in fragment.reward)


@dataclass
class Books:
    """What was told of one team's buffer up to now, and what follows."""

    config: BufferConfig
    is_by_step: bool = False
    """Whether each step counts for itself, as where a producer cuts fragments where it likes."""
    per_chunk: int = 1
    """Fragments that come, go and are used together."""
    acknowledged: list[Items] = field(default_factory=list)
    """Fragments that producers were told are in."""
    unanswered: set[Items] = field(default_factory=set)
    """Those whose producer does not know."""
    consumed: Counter[Items] = field(default_factory=Counter)
    """How often a learner was told that its use counts."""
    maybe_consumed: Counter[Items] = field(default_factory=Counter)
    """By learners that do not know whether it does."""
    read: set[Items] = field(default_factory=set)
    """By the retaining subscription."""
    skipped: int = 0
    """Chunks that it was told to have missed."""
    mirrored: list[Items] | None = None
    """What the producer's mirror held when it looked last; None: it has none."""
    shelf: dict[Items, int] = field(default_factory=dict)
    """What must be held, by version, oldest first, as far as all is answered."""
    evicted: int = 0
    """Fragments that had to leave the shelf for others."""
    _versions: dict[Items, int] = field(default_factory=dict)
    _leases: dict[str, list[Items]] = field(default_factory=dict)
    _version: int = 0

    def take_down(self, line: dict[str, Any]) -> None:
        """Take a line of a ledger, in order of time."""
        fragments: list[Items] = [tuple(each) for each in line.get("fragments", ())]
        if self.is_by_step:
            fragments = by_step(fragments)
        match line["kind"]:
            case "appending":
                self.unanswered.update(fragments)
                self._versions.update(dict.fromkeys(fragments, line["version"]))
            case "appended":
                self.unanswered.difference_update(fragments)
                self.acknowledged += fragments
                self._put(fragments)
            case "published":
                self._version = line["version"]
                self._put([])
            case "granted":
                self._leases[line["lease"]] = fragments
            case "releasing":
                self.maybe_consumed.update(self._leases[line["lease"]])
            case "expired":
                self.maybe_consumed.subtract(self._leases[line["lease"]])
            case "released":
                used = self._leases[line["lease"]]
                self.maybe_consumed.subtract(used)
                self.consumed.update(used)
                self._use_up(used)
            case "read":
                self.read.update(fragments)
                self.skipped += line["skipped"]
            case "mirrored":
                self.mirrored = fragments

    def _put(self, fragments: Sequence[Items]) -> None:
        # Some were used before their producer was answered.
        self.shelf.update({each: self._versions[each] for each in fragments})
        self._use_up(fragments)
        assert self.config.staleness_max is not None
        assert self.config.capacity_chunks is not None
        oldest = self._version - self.config.staleness_max
        self.shelf = {each: version for each, version in self.shelf.items() if version >= oldest}
        while self.evicts and len(self.shelf) > self.per_chunk * self.config.capacity_chunks:
            del self.shelf[next(iter(self.shelf))]
            self.evicted += 1

    def _use_up(self, fragments: Iterable[Items]) -> None:
        assert self.config.uses_max is not None
        for each in fragments:
            if self.consumed[each] >= self.config.uses_max:
                self.shelf.pop(each, None)

    @property
    def evicts(self) -> bool:
        """Whether what is oldest leaves for what comes."""
        return self.config.full_policy is FullPolicy.EVICT

    def problems(self, held: Sequence[Items], team: int) -> list[str]:
        """What of a buffer's content is not as it must be, while nothing is under lease.

        Args:
            held: Everything that can be sampled.
            team: Number of the team whose buffer this is.
        """
        maybe_used = {each for each, count in self.maybe_consumed.items() if count > 0}
        lost = [each for each in self.shelf if each not in held and each not in maybe_used]
        known = self.shelf.keys() | self.unanswered
        found = {
            "lost": lost,
            "not to be there": [each for each in held if each not in known],
            "twice": [each for each, count in Counter(held).items() if count > 1],
            "another team's": foreign([*held, *self.consumed, *self.read], team),
            "used too often": [
                each for each, uses in self.consumed.items() if uses > (self.config.uses_max or 0)
            ],
        }
        if self.mirrored is not None:
            found["not mirrored"] = [each for each in self.shelf if each not in self.mirrored]
            found["mirrored twice"] = [
                each for each, count in Counter(self.mirrored).items() if count > 1
            ]
        return [_told(what, fragments) for what, fragments in found.items() if fragments]

    def problems_of_reader(self) -> list[str]:
        """What the retaining subscription neither was given nor was told to have missed."""
        missed = [each for each in self.acknowledged if each not in self.read]
        if len(missed) <= (self.per_chunk * self.skipped if self.evicts else 0):
            return []
        return [_told(f"not read, {self.skipped} told as missed", missed)]


def by_step(fragments: Iterable[Items]) -> list[Items]:
    """Each step as a fragment of its own."""
    return [(number,) for items in fragments for number in items]


def books_of(
    folder: Path,
    buffer: str,
    config: BufferConfig,
    *,
    is_by_step: bool = False,
    per_chunk: int = 1,
) -> Books:
    """Add up the ledgers of a buffer's clients; see `Books`."""
    books = Books(config, is_by_step, per_chunk)
    for line in sorted(lines_of(folder, buffer), key=lambda line: float(line["at"])):
        books.take_down(line)
    return books


def lines_of(folder: Path, buffer: str) -> list[dict[str, Any]]:
    """What the clients of a buffer wrote."""
    return [line for line in read_ledgers(folder) if line["ledger"].startswith(f"{buffer}.")]


def foreign(fragments: Iterable[Items], team: int) -> list[Items]:
    """Fragments that another team wrote."""
    return [each for each in fragments if any(number // OF_TEAM != team for number in each)]


def _told(what: str, fragments: Sequence[Items]) -> str:
    some = ", ".join(f"{each[0]}-{each[-1]}" for each in fragments[:6])
    return f"{len(fragments)} fragments are {what}: {some}{', ...' if len(fragments) > 6 else ''}"
