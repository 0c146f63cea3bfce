"""Groups in a chaos run: which members producers send, and what of groups must hold."""

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import breadbox
from breadbox.model.types import GroupEnd
from chaos.tally import Tally

GROUP_SIZE, GROUP_MIN = 4, 3
GROUPS_PER_S = 25
BEHIND_MAX = 50
"""Groups that a producer which was away takes up again; of older ones its members are missing."""
PREFIX = "group-"
TOLD = {"incomplete", "stale", "lost", "evicted", "given_back"}
CHUNKED = {"complete", "partial"}

Member = tuple[str, int, int]
"""Group, index, and the model version that generated it."""


class Generator:
    """The members that one of several producers sends.

    Which groups have begun follows from the clock of the machine; a member's producer follows from
    its name. So producers need not know of one another. One in ten comes from two of them.
    """

    def __init__(self, number: int, count: int, rng: random.Random) -> None:
        self._number = number
        self._count = count
        self._rng = rng
        self._next = self._begun()
        self._pending: list[tuple[float, Member]] = []

    def next_members(self, version: int) -> list[Member]:
        """What is finished by now, in any order, 16 at most."""
        begun, now = self._begun(), time.monotonic()
        for group in range(max(self._next, begun - BEHIND_MAX), begun):
            self._pending += [
                (now + self._generation_s(), (f"{PREFIX}{group}", index, version))
                for index in range(GROUP_SIZE)
                if self._is_own(group, index)
            ]
        self._next = begun
        finished = [member for at, member in self._pending if at <= now]
        sent = self._rng.sample(finished, min(len(finished), self._rng.randint(1, 16)))
        self._pending = [each for each in self._pending if each[1] not in sent]
        # A server that was set back knows no version of its later life.
        return [(name, index, min(made_by, version)) for name, index, made_by in sent]

    @staticmethod
    def _begun() -> int:
        return int(time.monotonic() * GROUPS_PER_S)

    def _generation_s(self) -> float:
        """Mostly short; some so long that their group has ended, or is stale."""
        return self._rng.uniform(0.0, self._rng.choices((0.5, 2.0, 6.0), (90, 8, 2))[0])

    def _is_own(self, group: int, index: int) -> bool:
        fate = random.Random(f"{group}/{index}")
        owner, luck = fate.randrange(self._count), fate.random()
        if luck < 0.03:
            return False  # It is never finished.
        return owner == self._number or (luck > 0.9 and (owner + 1) % self._count == self._number)


class GroupAudit:
    """Balances what was told of groups; `problems` go to a tally by column.

    Args:
        lines: Of all ledgers.
        client: To the server, where nothing is open any more.
        tally: Knows what is excused.
    """

    def __init__(
        self, lines: Sequence[dict[str, Any]], client: breadbox.Client, tally: Tally
    ) -> None:
        self._lines = lines
        self._client = client
        self._tally = tally
        self._ends = {end.group: end for end in all_ends(client)}
        self._admitted: dict[str, set[int]] = defaultdict(set)
        self._granted: dict[str, dict[int, set[tuple[int, ...]]]] = defaultdict(
            lambda: defaultdict(set)
        )
        """By group and chunk: the members that were granted."""
        self._hidden: set[str] = set()
        """Groups of which the books of something may have been set back."""
        self._leases: dict[str, list[str]] = {}
        self._used: set[str] = set()
        for line in lines:
            self._take(line)

    def run(self) -> None:
        self._check_answers()
        self._check_grants()
        self._check_fates()
        self._check_watchers()
        self._check_counters()

    def _take(self, line: dict[str, Any]) -> None:
        groups: Iterable[str] = ()
        match line["kind"]:
            case "appending":
                groups = {worker for worker, _ in line["fragments"]}
            case "appended":
                groups = [line["worker"]]
                if "admitted" in (line["outcome"], line["first"]):
                    self._admitted[line["worker"]].add(line["index"])
            case "granted":
                members: dict[tuple[str, int], list[int]] = defaultdict(list)
                for chunk, _, _, worker, index, *_ in line["fragments"]:
                    members[worker, chunk].append(index)
                for (worker, chunk), indices in members.items():
                    self._granted[worker][chunk].add(tuple(indices))
                groups = self._leases[line["lease"]] = [worker for worker, _ in members]
            case "released":
                groups = self._leases.get(line["lease"], [])
                if line["mode"] == "consumed":
                    self._used.update(groups)
        if self._tally.is_rolled_back(line):
            self._hidden.update(groups)

    def _blame(self, column: str, group: str, problem: str) -> None:
        if group in self._hidden:
            self._tally.younger += 1
        else:
            getattr(self._tally, column).append(f"{group}: {problem}")

    def _check_answers(self) -> None:
        """Check that each answer to a producer, of an ended group or a stale member, is right."""
        for line in self._lines:
            if line["kind"] != "appended":
                continue
            group, outcome, first = line["worker"], line["outcome"], line["first"]
            end = self._ends.get(group)
            if outcome == "group_ended" and end is None:
                self._blame("wrong", group, "is said to have ended, and has no end")
            if outcome == "duplicate" and first not in ("admitted", "stale"):
                self._blame("wrong", group, f"{line['index']} is a duplicate of {first}")
            if "stale" in (outcome, first) and (end is None or end.reason.value != "stale"):
                self._blame("wrong", group, f"has a stale member, and ended as {end}")

    def _check_grants(self) -> None:
        for group, chunks in self._granted.items():
            found = set().union(*chunks.values())
            if len(chunks) > 1:
                self._blame("double", group, f"was granted as chunks {[*chunks]}")
            if len(found) > 1:
                self._blame("wrong", group, f"was granted as {found}")
            for members in found:
                if list(members) != sorted(set(members)) or len(members) < GROUP_MIN:
                    self._blame("wrong", group, f"was granted as {members}")
                if not self._admitted[group] <= set(members):
                    missing = self._admitted[group] - set(members)
                    self._blame("lost", group, f"was granted without {missing}")

    def _check_fates(self) -> None:
        """Each member that is in was delivered with its group, or the group's end was told."""
        held = {
            each.metadata.worker_id
            for read in self._client.tail(max_wait_s=0.5)
            for each in read.references
        }
        for group, members in self._admitted.items():
            end = self._ends.get(group)
            if end is None:
                self._blame("lost", group, f"{members} were admitted, and it has no end")
                continue
            reason = end.reason.value
            if not len(members) <= end.member_count <= GROUP_SIZE:
                self._blame("lost", group, f"{members} were admitted, and it ended as {end}")
            if len(members) == GROUP_SIZE and reason in ("incomplete", "partial"):
                self._blame("wrong", group, f"all came, and it ended as {end}")
            if reason in TOLD and group in self._used:
                self._blame("wrong", group, f"was used, and ended as {end}")
            if reason in CHUNKED and not (group in self._granted or group in held):
                self._blame("lost", group, f"ended as {end}, and was neither granted nor held")

    def _check_watchers(self) -> None:
        """Ends come in order, all of them, and only an unused chunk changes one."""
        seen: dict[int, list[Any]] = {}
        by_watcher: dict[str, set[int]] = defaultdict(set)
        for line in self._lines:
            if line["kind"] != "ends":
                continue
            numbers = [number for number, *_ in line["ends"]]
            if numbers != sorted(set(numbers)) or min(numbers, default=1) <= 0:
                self._tally.wrong.append(f"{line['ledger']} was told ends {numbers}")
            by_watcher[line["ledger"]].update(numbers)
            for number, *end in line["ends"]:
                group, reason, _ = end
                if seen.setdefault(number, end) != end:
                    self._blame_books("wrong", f"end {number} is {end} and {seen[number]}")
                last = self._ends.get(group)
                is_same = last is not None and [number, *end] == told(last)
                changes = last is not None and last.number > number
                if not is_same and not (changes and reason in CHUNKED and last_is_told(last)):
                    self._blame_books("wrong", f"{group}: was told {end}, and ended as {last}")
        for watcher, told_to in by_watcher.items():
            latest = max(told_to, default=0)
            due = {end.number for end in self._ends.values() if end.number <= latest}
            if due - told_to:
                self._blame_books("lost", f"{watcher} was not told ends {due - told_to}")

    def _blame_books(self, column: str, problem: str) -> None:
        """A problem, unless the books were set back: then numbers were given once more."""
        if any(each.rolls_back for each in self._tally.olders):
            self._tally.younger += 1
        else:
            getattr(self._tally, column).append(problem)

    def _check_counters(self) -> None:
        """Every member that was admitted is counted with an end of its group, once."""
        counters = self._client.get_buffer().state.counters
        admitted = counters["fragments_admitted"]
        ended = sum(end.member_count for end in self._ends.values())
        if admitted != ended:
            self._tally.lost.append(f"{admitted} members were admitted, {ended} are of ends")


def told(end: GroupEnd) -> list[Any]:
    """An end as a ledger has it."""
    return [end.number, end.group, end.reason.value, end.member_count]


def last_is_told(end: GroupEnd | None) -> bool:
    """Whether a chunk left without a use."""
    return end is not None and end.reason.value in TOLD - {"incomplete", "given_back"}


def all_ends(client: breadbox.Client) -> list[GroupEnd]:
    """Every end that the server remembers."""
    found: list[GroupEnd] = []
    while page := client.group_ends(found[-1].number if found else 0):
        found += page
    return found
