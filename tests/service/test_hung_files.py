"""A disk or a call that hangs is told by what has threads of its own."""

import asyncio
import time
from pathlib import Path

import pytest

from breadbox_server.access import tokens
from breadbox_server.access.tokens import TokenFile
from breadbox_server.base.clock import BEAT_S, LoopBeat
from support.eventually import eventually
from support.token_files import write_tokens


async def test_the_lag_of_a_loop_that_is_held_up_is_told_to_threads() -> None:
    beat = LoopBeat()
    beating = asyncio.get_running_loop().create_task(beat.run())
    await asyncio.sleep(0)
    assert 0.0 == beat.lag_s
    seen: list[float] = []

    def look() -> None:
        time.sleep(4 * BEAT_S)
        seen.append(beat.lag_s)

    looking = asyncio.get_running_loop().run_in_executor(None, look)
    time.sleep(6 * BEAT_S)  # noqa: ASYNC251 - what no job of a loop should do
    assert seen[0] >= 2 * BEAT_S
    await looking
    await eventually(lambda: beat.lag_s == 0.0, "the loop going on")
    beating.cancel()


async def test_tokens_on_a_hung_disk_hold_up_no_loop_and_stay_for_their_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (token,) = write_tokens(tmp_path / "tokens", "admin me")
    failures: list[float] = []
    now = [0.0]
    file = TokenFile(tmp_path / "tokens", lambda: failures.append(now[0]), clock=lambda: now[0])
    hangs = [True]
    refresh = file.refresh

    def hang() -> None:
        while hangs[0]:
            time.sleep(0.005)
        refresh()

    monkeypatch.setattr(tokens, "ANSWER_S", 0.05)
    monkeypatch.setattr(file, "refresh", hang)
    keeping = asyncio.get_running_loop().create_task(file.keep_fresh(lambda: None, 0.01))
    await eventually(lambda: len(failures) >= 2, "looks that do not end")
    assert not file.is_usable
    assert file.caller_of(token) is not None
    now[0] = tokens.GRACE_S
    await eventually(lambda: file.caller_of(token) is None, "the end of the grace")
    hangs[0] = False
    await eventually(lambda: file.is_usable, "the disk's return, with the file unchanged")
    assert file.caller_of(token) is not None
    keeping.cancel()
