"""Environments 5 times slower than 64 others, played in virtual time by the real core."""

import pytest
from bench.slow_workers import Case, shares

from breadbox_server.core.model.config import StalePolicy

SPAN = 800.0


@pytest.mark.parametrize("stale", StalePolicy)
def test_slow_environments_are_trained_at_their_share_where_they_are_waited_for_or_kept(
    stale: StalePolicy,
) -> None:
    fast, slow, updates = shares(Case(stale=stale), seed=0, duration=SPAN)
    if stale is StalePolicy.EVICT:
        assert (1.0, 0.0) == (fast, slow)
    else:
        assert slow >= 0.85 * fast
    assert updates >= 15
