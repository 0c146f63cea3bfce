"""Tickets of environments: whether they may act, with which weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from breadbox.writing import pacing
from breadbox.writing.pacing import Pacer
from support.eventually import eventually_sync


@dataclass
class FakeTicket:
    """A ticket of a version."""

    model_version: int | None
    expired: bool = False
    session_id: str = "s"

    def give_back(self) -> None:
        pass

    def __enter__(self) -> "FakeTicket":
        return self


class Desk:
    """Gives tickets of the version that is current."""

    def __init__(self) -> None:
        self.version: int | None = 1

    def tickets(self, count: int, max_wait_s: float, **_: Any) -> list[FakeTicket]:
        return [FakeTicket(self.version) for _ in range(count)]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def pacer(desk: Desk) -> Iterator[Pacer]:
    made = Pacer(desk)
    yield made
    made.close()


@pytest.mark.parametrize(("acting_with", "may"), [(1, False), (2, True), (3, True), (None, True)])
def test_a_worker_begins_with_weights_of_its_tickets_version_or_later(
    desk: Desk, pacer: Pacer, acting_with: int | None, may: bool
) -> None:
    desk.version = 2
    assert pacer.wait(["a", "b"], "s", 20.0)
    assert may is pacer.wait(["a", "b"], "s", model_version=acting_with)


def test_a_ticket_of_before_the_first_version_asks_for_no_weights(desk: Desk, pacer: Pacer) -> None:
    desk.version = None
    assert pacer.wait(["a"], "s", 20.0, model_version=0)


def test_weights_that_do_not_come_are_waited_for_no_longer_than_that(
    desk: Desk, pacer: Pacer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "WEIGHTS_S", 0.05)
    desk.version = 2
    assert pacer.wait(["a"], "s", 20.0)
    eventually_sync(lambda: pacer.wait(["a"], "s", model_version=1))
