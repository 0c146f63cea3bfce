"""The judge of groups finds what is wrong, and a run with groups has nothing of it."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from breadbox.model.types import GroupEnd, GroupEndReason
from chaos.faults import WEIGHTS
from chaos.groups import GroupAudit
from chaos.run import Options, run_chaos
from chaos.tally import Tally

COMPLETE, PARTIAL = GroupEndReason.COMPLETE, GroupEndReason.PARTIAL
STALE, EVICTED = GroupEndReason.STALE, GroupEndReason.EVICTED
KILLS = frozenset({"kill-server", "kill-actor", "kill-mirror", "kill-redis", "stop-server"})
PAIR = KILLS | {"end-server", "kill-standby", "cut-store"}
MOST = frozenset(WEIGHTS) - {"empty-redis", "older-redis"}
WORLDS = {
    "redis": Options(10.0, 0, Path(), faults=MOST),
    "a small disk": Options(10.0, 0, Path(), store="file", faults=frozenset(WEIGHTS)),
    "a standby": Options(10.0, 0, Path(), faults=PAIR, has_standby=True),
    "tickets": Options(10.0, 0, Path(), faults=MOST, has_tickets=True),
    "tickets and a standby": Options(
        *(10.0, 0, Path()), faults=PAIR, has_standby=True, has_tickets=True
    ),
}


class FakeServer:
    """What a server says once all is quiet: ends, what it holds, and what it has counted."""

    def __init__(self, *ends: GroupEnd, held: tuple[str, ...] = ()) -> None:
        self._ends = ends
        self._held = held

    def group_ends(self, after: int) -> list[GroupEnd]:
        return [each for each in self._ends if each.number > after]

    def tail(self, *, max_wait_s: float) -> list[Any]:
        del max_wait_s
        return [
            SimpleNamespace(references=[SimpleNamespace(metadata=SimpleNamespace(worker_id=group))])
            for group in self._held
        ]

    def get_buffer(self) -> Any:
        counters = {"fragments_admitted": sum(each.member_count for each in self._ends)}
        return SimpleNamespace(state=SimpleNamespace(counters=counters))


def line(kind: str, ledger: str = "one", **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "ledger": ledger, "since": 0.0, "at": 1.0, **facts}


def admitted(*members: int) -> list[dict[str, Any]]:
    return [
        line("appended", worker="g", index=index, outcome="admitted", first="unspecified")
        for index in members
    ]


def granted(*members: int, chunk: int = 0, lease: str = "l") -> dict[str, Any]:
    fragments = [[chunk, 0, 1, "g", index, 0, "s", "p"] for index in members]
    return line("granted", lease=lease, fragments=fragments)


USED = line("released", lease="l", mode="consumed")


def told(*ends: tuple[int, str, str, int], ledger: str = "watcher.1") -> dict[str, Any]:
    return line("ends", ledger=ledger, ends=[list(each) for each in ends])


def problems(lines: list[dict[str, Any]], server: FakeServer) -> dict[str, int]:
    tally = Tally()
    GroupAudit(lines, cast("Any", server), tally).run()
    return {
        name: len(found)
        for name in ("lost", "stale", "double", "wrong")
        if (found := getattr(tally, name))
    }


def end_of(reason: GroupEndReason, count: int = 4, number: int = 1) -> FakeServer:
    return FakeServer(GroupEnd(number, "g", reason, count))


def test_what_was_delivered_or_told_or_is_held_is_right() -> None:
    whole = [*admitted(2, 0, 3, 1), granted(0, 1, 2, 3), USED]
    assert {} == problems(whole, end_of(COMPLETE))
    assert {} == problems([*admitted(2, 0, 3), granted(0, 2, 3)], end_of(PARTIAL, 3))
    assert {} == problems(admitted(0, 1), end_of(GroupEndReason.INCOMPLETE, 2))
    held = FakeServer(GroupEnd(1, "g", COMPLETE, 4), held=("g",))
    assert {} == problems(admitted(2, 0, 3, 1), held)
    changed = [told((1, "g", "complete", 4), (2, "g", "evicted", 4)), *admitted(0, 1, 2, 3)]
    assert {} == problems(changed, end_of(EVICTED, number=2))


@pytest.mark.parametrize(
    ("lines", "server", "column"),
    [
        (admitted(0, 1, 2, 3), FakeServer(), "lost"),
        (admitted(0, 1, 2, 3), end_of(COMPLETE), "lost"),
        ([*admitted(0, 1, 2, 3), granted(0, 1, 2)], end_of(COMPLETE), "lost"),
        (admitted(0, 1), end_of(STALE, 1), "lost"),
        ([*admitted(0, 1, 2, 3), granted(3, 2, 1, 0)], end_of(COMPLETE), "wrong"),
        ([*admitted(0, 1), granted(0, 1)], end_of(PARTIAL, 2), "wrong"),
        ([*admitted(0, 1, 2, 3), granted(0, 1, 2, 3)], end_of(PARTIAL), "wrong"),
        ([*admitted(0, 1, 2, 3), granted(0, 1, 2, 3), USED], end_of(EVICTED), "wrong"),
        (
            [*admitted(0, 1, 2), granted(0, 1, 2), granted(0, 1, 2, chunk=1, lease="m")],
            end_of(PARTIAL, 3),
            "double",
        ),
        (
            [line("appended", worker="g", index=0, outcome="group_ended", first="unspecified")],
            FakeServer(),
            "wrong",
        ),
        (
            [line("appended", worker="g", index=0, outcome="stale", first="unspecified")],
            end_of(COMPLETE),
            "wrong",
        ),
        ([told((1, "g", "stale", 0))], end_of(EVICTED, number=2), "wrong"),
        ([told((2, "h", "stale", 0))], FakeServer(GroupEnd(1, "g", STALE, 0)), "lost"),
    ],
)
def test_what_is_wrong_is_found(
    lines: list[dict[str, Any]], server: FakeServer, column: str
) -> None:
    assert column in problems(lines, server)


@pytest.mark.chaos
@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", WORLDS)
def test_every_member_is_delivered_or_its_end_told_whatever_happens(
    tmp_path: Path, name: str
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    options = replace(WORLDS[name], seed=seed, folder=tmp_path, kills_min=1, has_groups=True)
    tally = run_chaos(options)
    summary = f"seed {seed}: {tally.summary()}"
    assert [] == tally.problems, summary
    assert tally.appended > 0, summary
    assert tally.granted > 0, summary
    assert tally.mirrored > 0, summary
    assert options.has_tickets == (tally.tickets > 0), summary
