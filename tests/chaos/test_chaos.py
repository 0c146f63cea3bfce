"""A short chaos run: everybody is killed at random, and every ledger balances.

`make chaos` runs the long one; both print the seed that makes the same choices again.
"""

import random
from pathlib import Path

import pytest

from chaos.run import Options, run_chaos

pytestmark = [pytest.mark.chaos, pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize("empties_redis", [False, True], ids=["restarted", "emptied"])
def test_nothing_acknowledged_is_lost_whatever_is_killed(tmp_path: Path, empties_redis: bool):
    seed = random.SystemRandom().randrange(2**32)
    kills_min = 6 if empties_redis else 20
    options = Options(10.0 if empties_redis else 30.0, seed, kills_min, empties_redis, tmp_path)
    tally = run_chaos(options)
    summary = f"seed {seed}: {tally.summary()}"
    assert [] == tally.problems, summary
    assert tally.kills["server"] >= kills_min, summary
    assert tally.appended > 0, summary
    assert tally.granted > 0, summary
