"""Settings that meet in one row of the crossings, and a covering array of them.

Every pair of values of two settings is in at least one row, but for those that cannot be, and
`why_not` says of each of these why.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from allpairspy import AllPairs

VALUES: Mapping[str, Sequence[Any]] = {
    "producer": ("blocking", "asyncio", "appender", "step-writer", "minestudio", "cleanrl"),
    "store": ("redis", "two-redis", "cluster", "file"),
    "preset": ("on-policy", "queue", "off-policy", "stack"),
    "path": ("inline", "gateway", "direct"),
    "schema": ("one", "ragged", "any"),
    "release": ("redis", "valkey"),
    "sync": ("everysec", "always"),
    "acl": (False, True),
    "tokens": (False, True),
    "tls": (False, True),
    "standby": (False, True),
    "tenants": (1, 2),
    "retains": (False, True),
    "assembly": ("consecutive", "groups", "tickets"),
}
IN_ANY_ORDER = ("blocking", "asyncio", "appender")
"""Producers that may send members of groups."""


@dataclass(frozen=True)
class Setting:
    """One row: a value of each setting."""

    producer: str
    """What appends: a client, what the library builds on one, or an adapter of another project."""
    store: str
    """Where payloads and journal are; of `two-redis` each has one of its own."""
    preset: str
    """The server's limits."""
    path: str
    """How payloads travel: small ones with the calls, through the server, or to the store."""
    schema: str
    """The server's rule of how alike fragments are; producers vary them as far as it allows."""
    release: str
    """What answers as Redis: the `redis-server` of this machine, or a Valkey."""
    sync: str
    """When the append-only file, or the journal in a directory, is synced."""
    acl: bool
    """Whether Redis has the users of `breadbox secrets`."""
    tokens: bool
    tls: bool
    standby: bool
    tenants: int
    """Teams on the same server, each with its buffer and, with tokens, tokens for it alone."""
    retains: bool
    """Whether a retaining subscription follows each buffer."""
    assembly: str = "consecutive"
    """What a chunk is: a fragment, or a group of two, of which the second comes first; with
    tickets the server names it."""

    @property
    def per_chunk(self) -> int:
        """Fragments that are a chunk."""
        return 1 if self.assembly == "consecutive" else 2

    def __str__(self) -> str:
        told = []
        for name, value in self.named().items():
            if isinstance(value, bool):
                told.append(name if value else f"no {name}")
            else:
                told.append(f"{value} {name}" if name == "tenants" else str(value))
        return ", ".join(told)

    def named(self) -> dict[str, Any]:
        """Its values by the names of the settings."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def why_not(chosen: Mapping[str, Any]) -> str:
    """Why settings cannot meet; empty: they can.

    Args:
        chosen: Values by name, of some or all settings.
    """
    has = set(chosen.items())
    in_groups = chosen.get("assembly", "consecutive") != "consecutive"
    if in_groups and chosen.get("producer", "blocking") not in IN_ANY_ORDER:
        return "what cuts steps into fragments makes consecutive ones"
    of_directory = ("store", "file") in has
    if of_directory and ("standby", True) in has:
        return "the server refuses it: a standby follows a journal in Redis"
    if of_directory and ("acl", True) in has:
        return "a directory has no users"
    if of_directory and chosen.get("release") == "valkey":
        return "a directory has no Redis"
    return ""


def covering(seed: int = 0) -> list[Setting]:
    """Rows that hold every pair that can be; of one seed always the same, in the same order.

    Args:
        seed: Of the order in which values are tried, and so of the rows; 0: the order above.
    """
    rng = random.Random(seed)
    values = {
        name: list(each) if not seed else rng.sample(each, len(each))
        for name, each in VALUES.items()
        if name != "assembly"
    }
    names = list(values)
    made = AllPairs(
        list(values.values()),
        filter_func=lambda row: not why_not(dict(zip(names, row, strict=False))),
    )
    rows = [Setting(**dict(zip(names, row, strict=True))) for row in made]
    missing = {pair for pair in possible_pairs() if pair[1][0] in values}
    missing -= {pair for row in rows for pair in pairs_of(row)}
    while missing:
        rows.append(_row_with(min(missing, key=repr), values))
        missing -= set(pairs_of(rows[-1]))
    rows = _varied(rows, rng, values)
    for assembly in VALUES["assembly"][1:]:
        rows = _with_groups(rows, assembly, values)
    return rows


def _with_groups(
    rows: Sequence[Setting], assembly: str, values: Mapping[str, Sequence[Any]]
) -> list[Setting]:
    """Rows of which some of the last ones have groups, so many that these meet everything."""
    made = list(rows)
    counts = Counter(pair for row in made for pair in pairs_of(row))
    missing = {pair for pair in possible_pairs() if pair[1] == ("assembly", assembly)}
    for number, old in reversed(list(enumerate(rows))):
        new = replace(old, assembly=assembly)
        lost = set(pairs_of(old)) - set(pairs_of(new))
        is_needed = any(counts[pair] == 1 for pair in lost)
        if is_needed or why_not(new.named()) or not missing & set(pairs_of(new)):
            continue
        counts.subtract(pairs_of(old))
        missing -= set(pairs_of(new))
        made[number] = new
    while missing:
        chosen = _row_with(min(missing, key=repr), values)
        made.append(chosen)
        missing -= set(pairs_of(chosen))
    return made


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Setting) -> Iterator[Pair]:
    """The pairs that a row holds."""
    return itertools.combinations(row.named().items(), 2)


def possible_pairs() -> set[Pair]:
    """All pairs but those that cannot be."""
    return {pair for pair in all_pairs() if not why_not(dict(pair))}


def all_pairs() -> Iterator[Pair]:
    """All pairs of values of two settings."""
    for one, other in itertools.combinations(VALUES, 2):
        for value, another in itertools.product(VALUES[one], VALUES[other]):
            yield (one, value), (other, another)


def _varied(rows: Sequence[Setting], rng: random.Random, names: Iterable[str]) -> list[Setting]:
    """Rows with other values wherever no pair needs them: the generator takes the first ones."""
    varied = list(rows)
    counts = Counter(pair for row in varied for pair in pairs_of(row))
    for number, name in itertools.product(reversed(range(len(rows))), names):
        old = varied[number]
        new = replace(old, **{name: rng.choice(VALUES[name])})
        lost = set(pairs_of(old)) - set(pairs_of(new))
        if why_not(new.named()) or any(counts[pair] == 1 for pair in lost):
            continue
        counts.subtract(pairs_of(old))
        counts.update(pairs_of(new))
        varied[number] = new
    return varied


def _row_with(pair: Pair, values: Mapping[str, Sequence[Any]]) -> Setting:
    """A row with this pair, which the generator left out."""
    chosen = dict(pair)
    for name, each in values.items():
        if name not in chosen:
            chosen[name] = next(value for value in each if not why_not({**chosen, name: value}))
    return Setting(**chosen)
