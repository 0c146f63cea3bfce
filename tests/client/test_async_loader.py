"""The loader of the asyncio client: what the one in threads promises, promised by tasks."""

import asyncio
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, get_args

import pytest

from breadbox.aio.loader import FragmentLoader as AsyncFragmentLoader
from breadbox.loader import FragmentLoader
from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadMissingError,
    StoreUnavailableError,
)
from breadbox.model.types import FragmentReference
from breadbox.reading.loading import LoaderOptions, LoadOrder
from breadbox.transport.aio.prefetch import prefetched
from support.references import numbers, references

Load = Callable[[Sequence[FragmentReference]], Awaitable[Any]]


async def load_numbers(job: Sequence[FragmentReference]) -> list[int]:
    await asyncio.sleep(0)
    return numbers(job)


def loader(load: Load = load_numbers, **options: Any) -> AsyncFragmentLoader[Any]:
    return AsyncFragmentLoader(load, LoaderOptions(**options))


async def listed(batches: AsyncGenerator[Any, None]) -> list[Any]:
    return [batch async for batch in batches]


def nothing_is_left_behind() -> bool:
    return {asyncio.current_task()} == asyncio.all_tasks()


class Gate:
    """A load function that notes what has begun and ends each load when told."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.open = asyncio.Event()
        self.changed = asyncio.Condition()

    async def __call__(self, job: Sequence[FragmentReference]) -> list[int]:
        async with self.changed:
            self.begun += numbers(job)
            self.changed.notify_all()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += numbers(job)
            raise
        return numbers(job)

    async def await_begun(self, wanted: list[int]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: wanted == sorted(self.begun))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("order", get_args(LoadOrder))
async def test_every_reference_is_delivered_once_and_as_threads_deliver_it(
    order: LoadOrder, prefetch: int
) -> None:
    options = LoaderOptions(order=order, prefetch_batches=prefetch, seed=3, threads=3)
    made: AsyncFragmentLoader[Any] = AsyncFragmentLoader(load_numbers, options)
    batches = await listed(made.batches(references(23), 5))
    assert [3, 5, 5, 5, 5] == sorted(len(batch) for batch in batches)
    assert list(range(23)) == sorted(itertools.chain.from_iterable(batches))
    threaded = list(FragmentLoader(numbers, options).batches(references(23), 5))
    assert sorted(threaded) == sorted(batches)
    if order != "completed":
        assert threaded == batches
    assert nothing_is_left_behind()


async def test_a_short_last_batch_may_be_dropped() -> None:
    made = loader(drop_last=True)
    assert [[0, 1], [2, 3]] == await listed(made.batches(references(5), 2))
    assert [] == await listed(made.batches(references(1), 2))
    assert [] == await listed(made.batches([], 2))


async def test_completed_order_does_not_wait_for_a_slow_batch() -> None:
    release = asyncio.Event()

    async def load(job: Sequence[FragmentReference]) -> list[int]:
        if 0 in numbers(job):
            await release.wait()
        return numbers(job)

    async with aclosing(loader(load, order="completed").batches(references(4), 1)) as batches:
        assert [[1], [2], [3]] == [await anext(batches) for _ in range(3)]
        release.set()
        assert [[0]] == await listed(batches)


async def test_it_loads_as_far_ahead_as_told_and_no_further() -> None:
    gate = Gate()
    gate.open.set()
    async with aclosing(
        loader(gate, prefetch_batches=2, threads=4).batches(references(10), 1)
    ) as batches:
        assert [] == gate.begun
        assert [0] == await anext(batches)
        await gate.await_begun([0, 1, 2])  # the one handed out and two ahead
        assert [1] == await anext(batches)
        await gate.await_begun([0, 1, 2, 3])


async def test_no_more_loads_are_under_way_than_told() -> None:
    gate = Gate()
    under_way = 0
    most = 0

    async def load(job: Sequence[FragmentReference]) -> list[int]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        loaded = await gate(job)
        await asyncio.sleep(0)
        under_way -= 1
        return loaded

    asyncio.get_running_loop().call_soon(gate.open.set)
    batches = await listed(loader(load, prefetch_batches=8, threads=3).batches(references(20), 1))
    assert (20, 3) == (len(batches), most)


async def test_without_prefetch_a_batch_is_loaded_when_asked_for() -> None:
    gate = Gate()
    gate.open.set()
    async with aclosing(loader(gate, prefetch_batches=0).batches(references(3), 1)) as batches:
        assert [0] == await anext(batches)
        assert [0] == gate.begun


async def test_a_batch_in_use_is_kept_alive_by_its_user_alone() -> None:
    class Loaded:
        pass

    async def load(_: Sequence[FragmentReference]) -> Loaded:
        return Loaded()

    async with aclosing(loader(load, prefetch_batches=1).batches(references(3), 1)) as batches:
        held = weakref.ref(await anext(batches))
        gc.collect()
        assert held() is None


async def test_a_failed_load_is_tried_again() -> None:
    attempts: Counter[int] = Counter()

    async def load(job: Sequence[FragmentReference]) -> list[int]:
        attempts.update(numbers(job))
        if attempts[2] < 3 and 2 in numbers(job):
            raise PayloadCorruptError("a block has another checksum")
        return numbers(job)

    batches = await listed(loader(load, retries=2).batches(references(4), 1))
    assert [[0], [1], [2], [3]] == batches
    assert {0: 1, 1: 1, 2: 3, 3: 1} == attempts


async def test_a_store_that_is_away_is_neither_tried_again_nor_skipped() -> None:
    attempts: Counter[int] = Counter()

    async def load(job: Sequence[FragmentReference]) -> list[int]:
        attempts.update(numbers(job))
        raise StoreUnavailableError("the store is away")

    batches = loader(load, retries=2, prefetch_batches=0, on_failure="skip")
    with pytest.raises(StoreUnavailableError):
        await anext(batches.batches(references(4), 2))
    assert {0: 1, 1: 1} == attempts


def missing(*lost: int) -> Load:
    async def load(job: Sequence[FragmentReference]) -> list[int]:
        for number in numbers(job):
            if number in lost:
                raise PayloadMissingError(f"{number:032x}")
        return numbers(job)

    return load


async def test_a_load_that_keeps_failing_is_raised_in_its_place_with_the_attempts() -> None:
    batches = loader(missing(4, 6), retries=1, prefetch_batches=4).batches(references(8), 2)
    assert [[0, 1], [2, 3]] == [await anext(batches), await anext(batches)]
    with pytest.raises(PayloadMissingError) as caught:
        await anext(batches)
    assert ["after 2 attempts to load 2 fragments"] == caught.value.__notes__
    assert [] == await listed(batches)
    assert nothing_is_left_behind()


async def test_what_cannot_be_loaded_may_be_skipped_and_is_listed() -> None:
    made = loader(missing(0, 1, 4), retries=0, on_failure="skip")
    assert [[2, 3], [5], [6]] == await listed(made.batches(references(7), 2))
    assert [0, 1, 4] == sorted(numbers(made.skipped))


async def test_leaving_the_loop_early_cancels_what_is_being_loaded() -> None:
    gate = Gate()
    made = loader(gate, threads=2, prefetch_batches=3)
    async with aclosing(made.batches(references(100), 1)) as batches:
        first = asyncio.get_running_loop().create_task(anext(batches))
        await gate.await_begun([0, 1])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert [0, 1] == sorted(gate.cancelled)
    assert nothing_is_left_behind()


async def test_options_are_refused_where_they_are_given() -> None:
    with pytest.raises(InvalidRequestError, match="batch_size"):
        loader().batches(references(1), 0)
    with pytest.raises(InvalidRequestError, match="threads"):
        loader(threads=0)


async def test_jobs_are_taken_no_earlier_than_needed() -> None:
    taken = []

    def jobs() -> Any:
        for number in range(100):
            taken.append(number)
            yield number

    async def run(job: int) -> int:
        return job

    async with aclosing(prefetched(jobs(), run, at_once=2, depth=2, in_order=True)) as results:
        assert 0 == await anext(results)
        assert [0, 1, 2] == taken
