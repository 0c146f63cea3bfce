"""Appends one after another: a task that is cancelled, and servers that end under them."""

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import breadbox
from breadbox.model.types import AdmissionOutcome
from support.callers import KINDS, make_caller
from support.eventually import eventually
from support.fragments import vector_fragment
from support.server_process import ServerProcess
from support.tiers import long_but

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_a_task_that_is_cancelled_takes_its_append_out_of_the_line(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path / 'store'}", "--capacity-chunks", "4"),
        *("--full-policy", "block", "--metrics-listen", "127.0.0.1:0"),
        log=tmp_path / "server.log",
    )

    def waiting_count() -> float:
        with urllib.request.urlopen(server.metrics_url, timeout=20) as answer:
            found = re.search(r"^breadbox_waiting_appends (\S+)", answer.read().decode(), re.M)
        assert found
        return float(found[1])

    with server:
        async with breadbox.aio.connect(server.address, append_wait_s=60.0) as client:
            await client.start_session("s")
            for index in range(4):
                await client.append(vector_fragment(index, worker_id="w"))
            fragment = vector_fragment(0, worker_id="late")
            late = asyncio.get_running_loop().create_task(client.append(fragment))
            await eventually(lambda: waiting_count() == 1)
            late.cancel()
            await eventually(lambda: waiting_count() == 0)
            with pytest.raises(asyncio.CancelledError):
                await late


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose journal and store survive it."""
    with ServerProcess(
        *("--store", f"file://{tmp_path / 'store'}", "--capacity-chunks", "100000"),
        *("--journal", f"file://{tmp_path / 'journal'}", "--drain-grace-s", "5"),
        log=tmp_path / "server.log",
    ) as server:
        yield server


@pytest.mark.parametrize("how", long_but(1, ["killed", "ended"]))
@pytest.mark.parametrize("kind", long_but(1, KINDS))
async def test_nothing_is_lost_or_doubled_when_the_server_goes(
    journaled: ServerProcess, kind: str, how: str
) -> None:
    ended = False
    outcomes: dict[tuple[int, int], AdmissionOutcome] = {}
    async with make_caller(kind, journaled.address, reconnect_s=30.0) as caller:
        await caller.call("start_session", "s")

        async def produce(number: int) -> None:
            index = 0
            while not ended:
                fragment = vector_fragment(index, worker_id=f"w{number}")
                result = await caller.call("append", fragment)
                outcomes[number, index] = result.outcome
                index += 1

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(produce(number))
            for _ in range(2):
                count = len(outcomes)
                await eventually(lambda: len(outcomes) > count + 60)  # noqa: B023 - awaited here
                stop = journaled.kill if how == "killed" else journaled.stop
                took_s = await asyncio.to_thread(timed, stop)
                assert took_s < 15.0
                await asyncio.to_thread(journaled.start)
            count = len(outcomes)
            await eventually(lambda: len(outcomes) > count + 60)
            ended = True
        buffer = await caller.call("get_buffer")
    allowed = {AdmissionOutcome.ADMITTED, AdmissionOutcome.DUPLICATE}
    assert set() == set(outcomes.values()) - allowed
    assert len(outcomes) == buffer.state.chunk_count


def timed(call: Callable[[], Any]) -> float:
    """How long something takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began
