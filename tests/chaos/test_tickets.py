"""The judge of tickets finds what is wrong with them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from breadbox.model.errors import WaitElapsedError
from breadbox.model.types import GroupEnd, GroupEndReason
from chaos.tally import Tally
from chaos.tickets import TICKET_S, TICKETS_MAX, TicketAudit

COMPLETE, GIVEN_BACK, LOST = (
    GroupEndReason.COMPLETE,
    GroupEndReason.GIVEN_BACK,
    GroupEndReason.LOST,
)


class FakeServer:
    """What a server says once all is quiet, with *free* tickets."""

    def __init__(
        self, *ends: GroupEnd, given: int = 0, ended: int = 0, held: int = 0, free: int = 0
    ) -> None:
        self._ends = list(ends)
        counters = {"tickets_given": given, "tickets_ended_group_ended": ended}
        self._state = SimpleNamespace(counters=counters, ticket_count=held, chunk_count=4)
        self._free = free
        self.service = SimpleNamespace(publish_model=lambda session, version: None)

    def group_ends(self, after: int) -> list[GroupEnd]:
        return [each for each in self._ends if each.number > after]

    def get_buffer(self) -> Any:
        return SimpleNamespace(state=self._state, model_version=3)

    def tickets(self, count: int, *, max_wait_s: float) -> list[Any]:
        if not self._free:
            raise WaitElapsedError(max_wait_s, "held", "a ticket")
        return [self._ticket(number) for number in range(min(count, self._free))]

    def _ticket(self, number: int) -> Any:
        def give_back() -> None:
            self._ends.append(GroupEnd(100 + number, f"new-{number}", GIVEN_BACK, 0))

        return SimpleNamespace(group=f"new-{number}", give_back=give_back)


def line(kind: str, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "ledger": "one", "since": 10.0, "at": 11.0, **facts}


def found(tally: Tally) -> list[str]:
    return [name for name in ("lost", "double", "leaked", "wrong") if getattr(tally, name)]


def problems(lines: list[dict[str, Any]], server: FakeServer) -> list[str]:
    tally = Tally()
    TicketAudit(lines, cast("Any", server), tally).run()
    return found(tally)


TAKEN = line("taken", groups=["g"])
WHOLE = GroupEnd(1, "g", COMPLETE, 4)


def test_what_ended_once_is_right() -> None:
    assert [] == problems([TAKEN], FakeServer(WHOLE, given=1, ended=1))
    given_back = GroupEnd(1, "g", GIVEN_BACK, 0)
    giving = line("giving", group="g", member=None)
    assert [] == problems([TAKEN, giving], FakeServer(given_back))
    late = {"at": 10.0 + TICKET_S, "ends": [[1, "g", "lost", 0]]}
    expired = GroupEnd(1, "g", LOST, 0)
    assert [] == problems([TAKEN, line("ends") | late], FakeServer(expired))
    watched = line("watched", tickets=TICKETS_MAX, open=TICKETS_MAX)
    assert [] == problems([watched], FakeServer())


@pytest.mark.parametrize(
    ("lines", "server", "column"),
    [
        ([TAKEN], FakeServer(), "lost"),
        ([TAKEN, TAKEN], FakeServer(WHOLE), "double"),
        ([TAKEN], FakeServer(GroupEnd(1, "g", GIVEN_BACK, 0)), "wrong"),
        ([TAKEN, line("ends", ends=[[1, "g", "lost", 0]])], FakeServer(WHOLE), "wrong"),
        ([line("watched", tickets=TICKETS_MAX + 1, open=0)], FakeServer(), "wrong"),
        ([line("watched", tickets=0, open=TICKETS_MAX + 1)], FakeServer(), "wrong"),
        ([], FakeServer(given=2, ended=1), "leaked"),
        ([], FakeServer(given=1, ended=1, held=1), "leaked"),
    ],
)
def test_what_is_wrong_is_found(
    lines: list[dict[str, Any]], server: FakeServer, column: str
) -> None:
    assert [column] == problems(lines, server)


@pytest.mark.parametrize(
    ("free", "column"), [(TICKETS_MAX - 4, []), (0, ["leaked"]), (TICKETS_MAX, ["leaked"])]
)
def test_a_place_that_is_held_by_nothing_is_found(free: int, column: list[str]) -> None:
    tally = Tally()
    TicketAudit([], cast("Any", FakeServer(free=free)), tally).check_that_all_are_free("s")
    assert column == found(tally)
