"""What a standby says of itself, and when it may take a journal over."""

from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.standby import RETURN_S, WARM_LAG_S_MAX, JournalFollower, Standby
from breadbox_server.journal.storage.claims import Holder
from breadbox_server.journal.storage.interface import JournalStatus, JournalUnavailableError
from breadbox_server.metrics.metrics import Metrics
from support.clock import ManualClock


class EmptyJournal:
    """One that a leader has just claimed and written nothing to."""

    is_away = False
    incarnation = "first"
    leader: Holder | None = Holder("token", "host", 7)

    def look(self, first: int) -> JournalStatus:
        if self.is_away:
            raise JournalUnavailableError("away")
        left_s = 0.9 if self.leader else 0.0
        return JournalStatus(
            5, self.leader, left_s, self.incarnation, newest=0, snapshot=0, turns=()
        )


def never(taken: Iterable[BufferSnapshot]) -> BufferSet:
    raise AssertionError("there is no snapshot")


def followed(journal: Any, clock: ManualClock) -> tuple[Standby, JournalFollower]:
    follower = JournalFollower(journal, never, now=clock)
    return Standby(follower, Metrics(CollectorRegistry())), follower


def test_one_that_has_read_nothing_yet_says_so_and_is_not_ready_to_lead() -> None:
    """Else who waits for it to be warm ends the leader while it reads."""
    clock = ManualClock()
    standby, follower = followed(EmptyJournal(), clock)
    assert not standby.is_warm()
    assert standby.reason().endswith("; has not read the journal yet")
    clock.advance(0.1)
    assert 0.1 == standby.refusal().lag_s

    assert not follower.step()
    assert standby.is_warm()
    assert standby.reason().endswith("; 0 turns and 0.0 s behind")


def test_one_that_has_not_reached_the_journal_for_a_while_is_not_ready_any_more() -> None:
    clock = ManualClock()
    journal = EmptyJournal()
    standby, follower = followed(journal, clock)
    follower.step()
    clock.advance(WARM_LAG_S_MAX)
    assert standby.is_warm()
    clock.advance(0.1)
    assert not standby.is_warm()
    follower.step()
    assert standby.is_warm()


@pytest.mark.parametrize("what", ["away", "another"])
def test_a_journal_that_was_away_or_is_another_is_not_claimed_before_its_leader_can_show_itself(
    what: str,
) -> None:
    """Signs of life run out while nobody can renew them."""
    clock = ManualClock()
    journal = EmptyJournal()
    _, follower = followed(journal, clock)
    follower.step()
    assert not follower.may_claim()
    journal.leader = None
    follower.step()
    assert follower.may_claim()

    if what == "away":
        journal.is_away = True
        with pytest.raises(JournalUnavailableError):
            follower.step()
        journal.is_away = False
    else:
        journal.incarnation = "second"
    clock.advance(1.0)
    follower.step()
    assert not follower.may_claim()
    clock.advance(RETURN_S - 0.1)
    follower.step()
    assert not follower.may_claim()
    clock.advance(0.1)
    follower.step()
    assert follower.may_claim()
