"""One server and thousands of clients: docs/studies/scaling.md has these worlds, only larger."""

from pathlib import Path

import pytest

from simulation.crowd import CONNECTION_BYTES, SERVER_BYTES, Crowd, Played, draw, play, table


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


def test_what_is_appended_is_fetched_once_where_the_server_can_serve_all() -> None:
    played = play(Crowd(60, 8, 8, 0.5, seconds=5.0))

    assert played.fetch_rate == pytest.approx(played.rate, rel=0.2)
    assert 0 < played.held_peak <= sum(played.sent)


def test_table_and_picture_tell_of_a_crowd_with_and_without_a_server_that_was_away(
    tmp_path: Path,
) -> None:
    crowds = (Crowd(10_000, 64, 8, 0.5, 10.0), Crowd(10_000, 64, 8, 0.5, 10.0, away_s=1.5))
    results = [
        Played(
            crowd,
            sent=[8, 24] * 5_000,
            append_s=[(second, 0.002 * second) for second in range(1, 11)],
            fetch_s=[0.004, 0.006],
            delivered=160_000,
            held_peak=4096,
            waiting_peak=12,
            recovered_s=0.25,
        )
        for crowd in crowds
    ]

    lines = table(results).splitlines()
    draw(results, tmp_path / "crowd.png")

    memory = (SERVER_BYTES + 10_064 * CONNECTION_BYTES + 4096 * 1024) / 2**20
    told = f"| 0.5 | 16,000, 16,000 | 12, 20 ms | 6, 6 ms | 0.50 | 12 | 0 | {memory:,.0f} MiB "
    assert [f"| 10,000, 8 {told}|  |", f"| 10,000, 8, away for 1.5 s {told}| 0.2 s |"] == lines[2:]
    assert len({line.count("|") for line in lines}) == 1
    assert (tmp_path / "crowd.png").stat().st_size > 1000


def test_the_same_seed_plays_the_same() -> None:
    crowd = Crowd(50, 2, 4, 0.8, seconds=2.0)

    assert play(crowd, seed=1).append_s == play(crowd, seed=1).append_s
