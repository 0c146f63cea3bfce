"""Who does what in which order, and what came of it: in each row everybody takes turns."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import psutil

from bench.peers.contenders import NoContestError, Role
from bench.peers.rows import CROWD_PROCESSES, CROWD_THREADS, Row
from bench.peers.side import HELD_MAX, Order

_HELD_BYTES_MAX = 256 * 2**20
_BATCHED_MAX = HELD_MAX - 256
"""What is appended before batches are taken: less than anybody holds."""
_CROWD_S_MIN = 1.0
"""Less is not enough for each of many producers to append a few times."""
_ANSWER_S_MAX = 180.0
"""On a machine that others use much: the first of a crowd loads what its peer needs."""

Arrays = Sequence[tuple[str, list[int]]]


class Contestant(Protocol):
    """Somebody who can be asked; see `contenders.Running`."""

    def ask(self, order: Order, limit_s: float) -> Any:
        """Have it do something, or raise NoContestError."""

    def cpu_s(self) -> Mapping[tuple[Role, int], float]:
        """Seconds of processor time so far, by role and process."""


@dataclass
class Measured:
    """A contender in a row."""

    rates: list[float] = field(default_factory=list)
    """By round, in the row's unit."""
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    """Processor seconds of all its processes, by role: for each fragment, or for each GB."""
    why_not: str = ""
    """Why there is nothing, or no more."""

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def cpu(self) -> dict[str, float]:
        """The means, by role."""
        roles = dict.fromkeys(role for each in self.cpu_s for role in each)
        return {role: statistics.mean(each.get(role, 0.0) for each in self.cpu_s) for role in roles}


@dataclass(frozen=True)
class Result:
    """A row, and everybody in it."""

    row: Row
    measured: Mapping[str, Measured]

    def ratios(self, ours: str, theirs: str) -> list[float]:
        """Our rate to another's, round by round, the smallest first."""
        pairs = zip(self.measured[ours].rates, self.measured[theirs].rates, strict=False)
        return sorted(own / other for own, other in pairs)

    def as_json(self) -> dict[str, Any]:
        """The row as peers.json has it."""
        measured = {name: asdict(each) for name, each in self.measured.items()}
        return {"row": asdict(self.row), "measured": measured}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Result":
        """Read what `as_json` made."""
        measured = {name: Measured(**each) for name, each in data["measured"].items()}
        return cls(Row(**data["row"]), measured)


def play(
    rows: Sequence[Row],
    contestants: Mapping[str, Contestant],
    arrays: Mapping[str, Arrays],
    *,
    rounds: int,
    seconds: float,
    limit_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Let everybody do each row once, with a round to warm up, and again in each round.

    Args:
        rows: What to do.
        contestants: Who does it, by name; in each round another one begins.
        arrays: Types and shapes of a fragment's arrays, by workload.
        rounds: That count.
        seconds: That each turn is to take.
        limit_s: Begin no further round after these, though at least one counts.
        tell: Is given what happens.
    """
    results = [Result(row, {name: Measured() for name in contestants}) for row in rows]
    steps: dict[tuple[str, str], int] = {}
    began = time.monotonic()
    for number in range(-1, rounds):
        if number > 0 and time.monotonic() - began > limit_s:
            tell(f"ended after {number} rounds: {limit_s:.0f} s are over")
            break
        names = list(contestants)
        turned = max(number, 0) % len(names)
        for result in results:
            for name in names[turned:] + names[:turned]:
                measured, key = result.measured[name], (result.row.name, name)
                if measured.why_not:
                    continue
                shapes = arrays[result.row.workload]
                try:
                    turn = _turn(contestants[name], result.row, shapes, steps.get(key, 1), seconds)
                except NoContestError as error:
                    measured.why_not = str(error)
                    tell(f"{name}, {result.row.name}: {error}")
                    continue
                if number < 0:
                    steps[key] = _steps(result.row, shapes, turn.seconds, seconds)
                else:
                    amount = turn.amount * _size(result.row, shapes)
                    measured.rates.append(amount / turn.seconds)
                    measured.cpu_s.append(
                        {role: used_s / amount for role, used_s in turn.cpu_s.items()}
                    )
        tell("warmed up" if number < 0 else f"round {number + 1} of {rounds}")
    return results


@dataclass(frozen=True)
class _Turn:
    amount: float
    seconds: float
    cpu_s: Mapping[Role, float]


def _turn(contestant: Contestant, row: Row, arrays: Arrays, steps: int, seconds: float) -> _Turn:
    is_crowd = row.kind in ("crowd", "streams")
    order = Order(
        kind=row.kind,
        workload=row.workload,
        arrays=list(arrays),
        group=row.group,
        steps=0 if is_crowd else steps,
        seconds=max(seconds, _CROWD_S_MIN) if is_crowd else 0.0,
        processes=CROWD_PROCESSES if is_crowd else 0,
        threads=CROWD_THREADS if is_crowd else 0,
    )
    contestant.ask(order, _ANSWER_S_MAX)
    before = contestant.cpu_s()
    answer = contestant.ask(Order(**{**asdict(order), "is_ready": True}), _ANSWER_S_MAX)
    after = contestant.cpu_s()
    used: dict[Role, float] = defaultdict(float)
    for (role, pid), total_s in after.items():
        used[role] += total_s - before.get((role, pid), 0.0)
    if not answer["amount"]:
        raise NoContestError(f"did nothing within {seconds} s")
    return _Turn(answer["amount"], answer["seconds"], used)


def _steps(row: Row, arrays: Arrays, one_s: float, seconds: float) -> int:
    """How many steps a turn has that is to last for `seconds`, when one step took `one_s`."""
    wanted = seconds / one_s
    if row.workload != "vector":
        wanted = min(wanted, _HELD_BYTES_MAX / (row.group * _bytes(arrays)))
    elif row.kind == "batch":
        wanted = min(wanted, _BATCHED_MAX / row.group)
    return max(1, int(wanted))


def _size(row: Row, arrays: Arrays) -> float:
    """A fragment, in the row's unit times seconds."""
    return 1.0 if row.unit == "fragments/s" else _bytes(arrays) / 1e9


def _bytes(arrays: Arrays) -> int:
    total = 0
    for dtype, shape in arrays:
        size = int(dtype[2:])
        for each in shape:
            size *= each
        total += size
    return total


@dataclass
class Others:
    """How much of the machine's processors went to programs that are no part of this."""

    _busy_s: float = 0.0
    _all_s: float = 0.0

    def __enter__(self) -> "Others":
        self._busy_s, self._all_s = _busy_and_all_s()
        return self

    def __exit__(self, *_: object) -> None:
        busy_s, all_s = _busy_and_all_s()
        self._busy_s, self._all_s = busy_s - self._busy_s, all_s - self._all_s

    def share(self, own_s: float) -> float:
        """Their share, when `own_s` of the processor time was ours."""
        return max(0.0, self._busy_s - own_s) / self._all_s


def _busy_and_all_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    all_s = sum(times) - times.guest - times.guest_nice  # Both are in `user` and `nice` already.
    return all_s - times.idle - times.iowait, all_s
