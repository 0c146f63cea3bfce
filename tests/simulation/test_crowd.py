"""What one server does for thousands: docs/scaling.md says it with these worlds, only larger."""

import pytest

from simulation.crowd import Crowd, play


def test_a_crowd_that_one_server_can_serve_is_served_alike_and_soon() -> None:
    played = play(Crowd(60, 8, 8, 0.5, seconds=5.0))

    assert 0 == played.refused
    assert played.least_to_mean > 0.8
    assert played.append_percentile(99) < 0.1
    assert played.rate == pytest.approx(played.crowd.per_second, rel=0.1)


def test_a_crowd_that_wants_too_much_gets_what_one_server_can_do() -> None:
    played = play(Crowd(60, 8, 8, 1.5, seconds=5.0))

    assert played.busy > 0.95
    assert played.rate > 0.9 * played.crowd.per_second / played.crowd.load
    assert played.least_to_mean > 0.6


def test_a_crowd_finds_a_server_that_was_away() -> None:
    played = play(Crowd(60, 8, 8, 0.5, seconds=7.0, away_s=1.5))

    assert 0.0 < played.recovered_s < 3.0
    assert played.append_percentile(50) < 0.1


def test_the_same_seed_plays_the_same() -> None:
    crowd = Crowd(50, 2, 4, 0.8, seconds=2.0)

    assert play(crowd, seed=1).append_s == play(crowd, seed=1).append_s
