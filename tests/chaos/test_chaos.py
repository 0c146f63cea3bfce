"""Short chaos runs: everything happens to everybody at random, and every ledger balances.

`make chaos` runs the long one; both print the seed that makes the same choices again.
"""

import random
from pathlib import Path

import pytest

from chaos.faults import WEIGHTS
from chaos.run import Options, run_chaos
from support.tiers import long_but

pytestmark = [pytest.mark.chaos, pytest.mark.integration, pytest.mark.timeout(400)]

SEVERAL = frozenset({"second-server", "take-over", "replace-stopped", "older-redis"})
EMPTIED = frozenset({"empty-redis", "kill-server", "kill-actor"})
KILLED = frozenset({"kill-server", "kill-redis", "kill-mirror"})
OF_PAIR = frozenset({"kill-server", "stop-server", "end-server", "kill-standby"})
RUNS = {
    "killed, stopped and cut off": ("redis", frozenset(WEIGHTS) - SEVERAL - {"empty-redis"}, 12.0),
    "replaced and set back": ("redis", SEVERAL | {"kill-server"}, 6.0),
    "emptied": ("redis", EMPTIED, 8.0),
    "on a full disk": ("file", frozenset(WEIGHTS), 10.0),
}


@pytest.mark.parametrize("name", long_but(1, RUNS))
def test_nothing_acknowledged_is_lost_whatever_happens(tmp_path: Path, name: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    store, faults, seconds = RUNS[name]
    options = Options(seconds, seed, tmp_path, store=store, faults=faults, kills_min=1)
    tally = run_chaos(options)
    summary = f"seed {seed}: {tally.summary()}"
    assert [] == tally.problems, summary
    assert tally.faults["kill-server"] >= 1, summary
    assert tally.appended > 0, summary
    assert tally.granted > 0, summary
    assert tally.read > 0, summary
    assert tally.mirrored > 0, summary


@pytest.mark.long
def test_a_mirror_holds_what_was_acknowledged_when_all_are_killed_in_turn(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    options = Options(8.0, seed, tmp_path, faults=KILLED, has_each=True, keeps_all=True)
    tally = run_chaos(options)
    summary = f"seed {seed}: {tally.summary()}"
    assert [] == tally.problems, summary
    assert set(tally.faults) == KILLED, summary
    assert tally.mirrored >= tally.appended > 0, summary
    assert tally.late > 0, summary


@pytest.mark.long
def test_nothing_acknowledged_is_lost_whichever_of_two_servers_ends_or_stands_still(
    tmp_path: Path,
) -> None:
    """A leader that was stopped and replaced wakes, and may neither acknowledge nor grant."""
    seed = random.SystemRandom().randrange(2**32)
    options = Options(8.0, seed, tmp_path, faults=OF_PAIR, has_each=True, has_standby=True)
    tally = run_chaos(options)
    summary = f"seed {seed}: {tally.summary()}"
    assert [] == tally.problems, summary
    assert set(tally.faults) == OF_PAIR, summary
    assert tally.appended > 0, summary
    assert tally.granted > 0, summary
    assert tally.read > 0, summary
