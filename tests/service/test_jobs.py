"""Jobs end with their block, whatever they do with a cancellation; steps of an end have a limit."""

import asyncio
import logging

import pytest

from breadbox.shared import tasks
from breadbox_server.base.jobs import Jobs, with_time_limit
from support.eventually import eventually


async def _swallow(times: int, ended: list[str]) -> None:
    """Wait for ever, but go on after the first cancellations as if nothing had been."""
    for _ in range(times + 1):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
    raise asyncio.CancelledError


async def test_a_job_that_swallows_a_cancellation_is_cancelled_again() -> None:
    ended: list[str] = []
    async with Jobs() as running:
        running.start(_swallow(2, ended))
        await asyncio.sleep(0)
    assert ["cancelled"] * 3 == ended


async def test_a_failure_is_told_at_once_ends_the_others_and_is_raised() -> None:
    told: list[BaseException] = []
    ended: list[str] = []

    async def fail() -> None:
        raise ValueError("broken")

    async def block() -> None:
        async with Jobs(told.append) as running:
            running.start(_swallow(1, ended))
            await asyncio.sleep(0)
            running.start(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert ["broken"] == [str(error) for error in caught.value.exceptions]
    assert ["broken"] == [str(error) for error in told]
    assert ["cancelled"] * 2 == ended
    task = asyncio.current_task()
    assert task is not None
    assert 0 == task.cancelling()


async def test_a_cancel_of_the_block_ends_its_jobs_and_goes_on() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with Jobs() as running:
            running.start(_swallow(1, ended))
            await running.wait()

    task = asyncio.get_running_loop().create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ["cancelled"] * 2 == ended


async def test_a_failure_while_the_block_ends_does_not_cut_it_short() -> None:
    may_fail = asyncio.Event()
    steps: list[str] = []

    async def fail() -> None:
        await may_fail.wait()
        steps.append("failed")
        raise ValueError("late")

    async def block() -> None:
        async with Jobs() as running:
            running.start(fail())
            running.release_block()
            may_fail.set()
            await eventually(lambda: steps == ["failed"])
            steps.append("ended")

    with pytest.raises(ExceptionGroup):
        await block()
    assert ["failed", "ended"] == steps


async def test_a_job_that_never_ends_is_named_and_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.0)
    may_end = asyncio.Event()

    async def stubborn() -> None:
        while not may_end.is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    task = asyncio.get_running_loop().create_task(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    await tasks.end_tasks({task}, within_s=0.05)
    assert not task.done()
    assert "stubborn did not end" in caplog.text
    may_end.set()
    task.cancel()
    await task


async def test_a_step_that_never_ends_is_left_behind_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await with_time_limit(asyncio.Event().wait, 0.01, "closing the store")
    assert ["closing the store took longer than 0 s; going on without"] == [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]


async def test_what_a_step_fails_with_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await with_time_limit(fail, 10.0, "closing the store")
