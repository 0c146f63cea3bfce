"""The server under everything that can go wrong, in simulated time; and that the net holds.

A failure prints the command that replays its seed.
"""

import dataclasses

import pytest

from simulation.server import Variant
from simulation.simulate import Outcome, replay_command, simulate
from simulation.variants import AcknowledgesEarly, KeepsUndelivered, SkipsAnEntry

SEEDS_PER_BATCH = 20
BATCH_COUNT = 5
PLANTED_SEEDS_MAX = 40
"""Within so many seeds every planted bug must show; each shows in a fifth of them or more."""


@pytest.mark.parametrize("batch", range(BATCH_COUNT))
def test_nothing_acknowledged_is_lost_doubled_or_left_behind(batch: int) -> None:
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        outcome = simulate(seed)
        assert outcome.failure == "", f"{outcome.where}\nreplay: {replay_command(seed)}"


def test_simulations_do_something() -> None:
    outcomes = [simulate(seed) for seed in range(10)]
    assert sum(outcome.kills for outcome in outcomes) >= 10
    assert sum(outcome.admitted for outcome in outcomes) >= 100
    assert sum(outcome.granted for outcome in outcomes) >= 20


@pytest.mark.parametrize("variant", [SkipsAnEntry, AcknowledgesEarly, KeepsUndelivered])
def test_planted_bug_is_found_and_its_seed_replays_it(variant: type[Variant]) -> None:
    failed = first_failure(variant)
    assert failed is not None, f"{variant.name} was not found in {PLANTED_SEEDS_MAX} seeds"
    again = simulate(failed.seed, variant())
    assert without_traceback(failed) == without_traceback(again)


def first_failure(variant: type[Variant]) -> Outcome | None:
    for seed in range(PLANTED_SEEDS_MAX):
        outcome = simulate(seed, variant())
        if outcome.failure:
            return outcome
    return None


def without_traceback(outcome: Outcome) -> Outcome:
    return dataclasses.replace(outcome, where="")


def test_equal_seeds_come_to_equal_outcomes() -> None:
    assert [simulate(seed) for seed in range(3)] == [simulate(seed) for seed in range(3)]
