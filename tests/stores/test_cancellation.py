"""A cancellation is raised even where a library between swallows it."""

import asyncio

import pytest

from breadbox.stores.redis.errors import kept_cancellation


async def _ask(answer: "asyncio.Future[None]", fails: bool) -> None:
    """As redis-py asks: before Python 3.12 a cancel in the tick of the answer is swallowed."""
    with kept_cancellation():
        await asyncio.wait_for(asyncio.shield(answer), 10.0)  # noqa: TID251 - the culprit
        if fails:
            raise ConnectionError("hung up")


@pytest.mark.parametrize("fails", [False, True], ids=["answered", "failed"])
async def test_a_cancel_in_the_tick_of_the_answer_is_not_lost(fails: bool) -> None:
    answer = asyncio.get_running_loop().create_future()
    task = asyncio.get_running_loop().create_task(_ask(answer, fails))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(None)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_and_a_timeout_inside_stay_what_they_are() -> None:
    with pytest.raises(ConnectionError), kept_cancellation():
        raise ConnectionError("hung up")
    with kept_cancellation(), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await asyncio.sleep(3600)
    task = asyncio.current_task()
    assert task is not None
    assert 0 == task.cancelling()
