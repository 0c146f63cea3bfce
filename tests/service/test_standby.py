"""What a standby says of itself, and when it may take a journal over."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.errors import StoreUnavailableError
from breadbox.stores.base import StoreTakenError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal import standby as module
from breadbox_server.journal.standby import (
    RETURN_S,
    WARM_LAG_S_MAX,
    JournalFollower,
    Standby,
    outlasting,
)
from breadbox_server.journal.storage.claims import Claim, Holder
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


class FailingJournal(EmptyJournal):
    """Nobody leads it, and looks at it fail as often and as the test says."""

    def __init__(self, *failures: Exception | None) -> None:
        self.leader = None
        self._failures = list(failures)
        self.claims: list[str] = []

    def look(self, first: int) -> JournalStatus:
        if self._failures and (failure := self._failures.pop(0)) is not None:
            raise failure
        return super().look(first)

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        self.claims.append(displaced)
        # From now on a thread sends heartbeats in its name.
        self.leader = holder
        return Claim("journal", 6, holder)


@pytest.mark.parametrize(
    ("failures", "claim_count"),
    [
        ((KeyError("run_id"), RuntimeError("the handler is closed")), 1),
        # Between its claim and what it has to read then: the journal's holder is itself.
        ((None, JournalUnavailableError("away")), 2),
        ((None, RuntimeError("the handler is closed")), 2),
    ],
)
async def test_a_standby_leads_after_whatever_failed_while_it_followed_or_had_claimed(
    failures: tuple[Exception | None, ...], claim_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    monkeypatch.setattr(module, "RETURN_S", 0.0)
    journal = FailingJournal(*failures)
    standby, _ = followed(journal, ManualClock())

    async def check() -> None:
        """Find the store to be the journal's."""

    async with asyncio.timeout(10):
        claim, recovered = await standby.lead(check)
    assert (6, None) == (claim.epoch, recovered)
    assert claim_count == len(journal.claims)


async def test_a_step_of_one_that_leads_already_outlasts_outages_and_ends_for_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    errors: list[Exception] = [StoreUnavailableError("away"), JournalUnavailableError("away")]

    async def step() -> int:
        if errors:
            raise errors.pop(0)
        return 7

    assert 7 == await outlasting(step, "beginning to lead")
    errors.append(StoreTakenError())
    with pytest.raises(StoreTakenError):
        await outlasting(step, "beginning to lead")
