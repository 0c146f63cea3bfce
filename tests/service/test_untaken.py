"""Answers that are not taken: a share for each, and the largest holder gives way."""

import pytest

from breadbox_server.limits import UNTAKEN_BYTES_OF
from breadbox_server.rpc import traffic as untaken
from breadbox_server.rpc.traffic import UNTAKEN_PATIENCE_S, UntakenReplies

OF_ALL, OF_TOKEN, OF_CONNECTION = (
    UNTAKEN_BYTES_OF[each] for each in ("all", "token", "connection")
)
SMALL = 10_000


class House:
    """Its answers, its clock and those that were hung up on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.hung_up: list[str] = []
        self.untaken = UntakenReplies(lambda: self.now, self.hung_up.append)

    def fill(self, *tokens: str) -> None:
        """Have so many tokens hold all that each of them may, two connections each."""
        for token in tokens:
            for side in "ab":
                assert self.untaken.hold(f"{token}-{side}", token, OF_CONNECTION)


def test_one_answer_is_given_however_large_it_is() -> None:
    house = House()

    assert house.untaken.hold("p", "t", OF_ALL + 1)
    assert house.untaken.hold("p", "t", SMALL) is None


def test_a_connection_holds_its_share_until_it_takes_some() -> None:
    house = House()
    first = house.untaken.hold("p", "t", OF_CONNECTION - SMALL)
    assert first
    assert house.untaken.hold("p", "t", SMALL)

    assert house.untaken.hold("p", "t", 1) is None
    assert house.untaken.hold("q", "t", SMALL)
    first.close()
    first.close()
    assert house.untaken.hold("p", "t", OF_CONNECTION - SMALL)
    assert OF_CONNECTION + SMALL == house.untaken.total_bytes


def test_connections_of_one_token_share_what_it_may_hold() -> None:
    house = House()
    house.fill("t")

    assert house.untaken.hold("another", "t", SMALL) is None
    assert house.untaken.hold("another", "u", SMALL)
    assert [] == house.hung_up


def test_those_that_hold_all_there_is_give_way_to_who_holds_less() -> None:
    house = House()
    house.fill(*"abcd")
    house.now += 2 * UNTAKEN_PATIENCE_S

    assert house.untaken.total_bytes == OF_ALL
    assert house.untaken.hold("honest", "e", OF_CONNECTION)
    assert ["a-a"] == house.hung_up
    assert house.untaken.hold("honest", "e", SMALL) is None
    assert house.untaken.total_bytes == OF_ALL


def test_who_asks_for_the_most_is_refused_and_nobody_is_hung_up_on() -> None:
    house = House()
    peers = [f"p{number}" for number in range(OF_ALL // OF_CONNECTION)]
    for peer in peers:
        assert house.untaken.hold(peer, "", OF_CONNECTION)
    house.now += 2 * UNTAKEN_PATIENCE_S

    assert house.untaken.hold("new", "", OF_CONNECTION) is None
    assert [] == house.hung_up


def test_who_has_just_been_answered_is_not_hung_up_on() -> None:
    house = House()
    house.fill(*"abcd")

    assert house.untaken.hold("honest", "e", SMALL) is None
    assert [] == house.hung_up


def test_connections_that_have_no_names_share_no_bound_of_one_and_are_not_hung_up_on() -> None:
    house = House()
    for token in "abcd":
        assert house.untaken.hold("", token, OF_CONNECTION)
        assert house.untaken.hold("", token, OF_CONNECTION)
    house.now += 2 * UNTAKEN_PATIENCE_S

    assert house.untaken.hold("honest", "e", SMALL) is None
    assert [] == house.hung_up


def test_an_answer_that_might_not_be_given_need_not_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(untaken, "INLINE_REPLY_BYTES_MAX", SMALL)
    house = House()
    house.untaken.hold("p", "t", OF_CONNECTION - SMALL)
    assert not house.untaken.is_full("p", "t")
    house.untaken.hold("p", "t", 1)

    assert house.untaken.is_full("p", "t")
    assert not house.untaken.is_full("q", "t")
