"""How long a worker that was told to end delivers what is finished."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from breadbox_rollout import app


class Slow:
    """Takes all the time that it is given."""

    def __init__(self, now: list[float]) -> None:
        self._now = now
        self.grace_s = -1.0

    def close(self, grace_s: float = 0.0) -> None:
        self.grace_s = grace_s
        self._now[0] += grace_s


def test_all_that_a_worker_delivers_shares_one_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now[0]))
    threads = [Slow(now) for _ in range(4)]
    for sender, reporter in (threads[:2], threads[2:]):
        parts = SimpleNamespace(
            _sender=sender, _reporter=reporter, _client=Slow(now), _watcher=Slow(now)
        )
        app._Chain.close(cast(Any, parts), until=60.0)  # noqa: SLF001 - needs a server to be made
    assert [10.0, 0.0, 0.0, 0.0] == [each.grace_s for each in threads]
