"""The server's clock: goes on from where an earlier process was, whatever the wall clock says."""

import asyncio
import time

from breadbox_server.base.clock import LoopClock
from support.eventually import eventually

HOUR_S = 3600.0


async def test_it_starts_at_the_wall_clock() -> None:
    before = time.time()
    now = LoopClock(asyncio.get_running_loop()).now()
    assert before - 1.0 <= now <= time.time() + 1.0


async def test_it_goes_on_where_an_earlier_process_was() -> None:
    """Wherever the wall clock was set meanwhile: else leases would end, or live for too long."""
    for reached in (time.time() - HOUR_S, time.time() + HOUR_S):
        now = LoopClock(asyncio.get_running_loop(), starts_at=reached).now()
        assert reached <= now <= reached + HOUR_S / 2


async def test_wake_ups_are_on_the_same_clock() -> None:
    clock = LoopClock(asyncio.get_running_loop(), starts_at=time.time() + HOUR_S)
    called: list[float] = []
    clock.call_at(clock.now() + HOUR_S, lambda: called.append(-1.0))
    due_at = clock.now()
    clock.call_at(due_at, lambda: called.append(clock.now()))
    await eventually(lambda: bool(called))
    assert called[0] >= due_at - 1e-3
    assert 1 == len(called)
