"""What was fresh when granted, and what it is once the learner has published again."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.model import errors
from breadbox.model.types import BufferConfig
from breadbox.reading.loading import LoaderOptions
from breadbox.testing import ServerProcess, start_server
from support.callers import KINDS, Caller, make_caller
from support.fragments import vector_fragment

pytestmark = pytest.mark.integration

NUMBERS = itertools.count()
COUNT = 6


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as server:
        yield server


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Any:
    """A client with a buffer of its own that holds six fragments, in session "s" at version 0."""
    name = f"b{next(NUMBERS)}"
    async with make_caller(request.param, server.address, buffer=name) as made:
        await made.call("create_buffer", name, BufferConfig(staleness_max=2, uses_max=1))
        await made.call("start_session", "s")
        await made.call("append_many", [vector_fragment(index) for index in range(COUNT)])
        yield made


async def staleness_of(lease: Any, *version: int) -> list[int]:
    found = lease.staleness(*version)
    numbers: list[int] = (found if isinstance(found, np.ndarray) else await found).tolist()
    return numbers


async def trained(
    caller: Caller, lease: Any, *, publishing: bool = True, **options: Any
) -> list[tuple[int, int, list[int]]]:
    """Publish after each batch of one: fragment, staleness when granted, and when trained on."""
    found: list[tuple[int, int, list[int]]] = []
    versions = itertools.count()

    async def train(batch: breadbox.types.Batch) -> None:
        version, reference = next(versions), batch.references[0]
        index, age = reference.metadata.fragment_index, reference.staleness_when_granted
        now = version if publishing else 0
        assert [reference.staleness] == batch.staleness().tolist() == [now]
        found.append((index, age, batch.staleness(version).tolist()))
        if publishing:
            await caller.call("publish_model", "s", version + 1)

    batches = lease.batches(1, **options)
    if isinstance(caller.client, breadbox.Client):
        with lease:
            for batch in batches:
                await train(batch)
        return found
    async with lease:
        async for batch in batches:
            await train(batch)
    return found


async def test_the_staleness_of_a_batch_is_that_of_the_version_that_trains_on_it(
    caller: Caller,
) -> None:
    lease = await caller.call("fetch", COUNT, 5.0)
    found = await trained(caller, lease)
    assert [0] * COUNT == [age for _, age, _ in found]
    assert [[version] for version in range(COUNT)] == [at_use for *_, at_use in found]


async def test_a_reference_says_its_staleness_now_and_keeps_that_of_its_grant(
    caller: Caller,
) -> None:
    """However its client came to know of a version, and of its own session alone."""
    lease = await caller.call("fetch", COUNT, 5.0)
    reference = lease.references[0]
    seen = [reference.staleness]
    await caller.call("publish_model", "s", 1)
    seen.append(reference.staleness)
    async with make_caller("blocking", caller.client.address, buffer=caller.client.buffer) as other:
        for version, hear in enumerate(
            [
                lambda: caller.call("watch_model"),
                lambda: caller.call("get_buffer"),
                lambda: caller.call("append", vector_fragment(0, worker_id="later")),
                lambda: caller.call("read_fragments"),
                lambda: caller.call("start_session", "s"),
            ],
            start=2,
        ):
            await other.call("publish_model", "s", version)
            assert version - 1 == reference.staleness  # It has not heard of it yet.
            await hear()
            seen.append(reference.staleness)
        await other.call("start_session", "t", take_over=True)
        await other.call("publish_model", "t", 50)
        await caller.call("get_buffer")
    assert list(range(7)) == seen
    assert (6, 0) == (reference.staleness, reference.staleness_when_granted)
    assert 6 == copy.deepcopy(reference).staleness  # As another process gets it.
    released = lease.release()
    assert released is None or await released is None


async def test_a_reference_read_by_a_cursor_says_its_staleness_now(caller: Caller) -> None:
    await caller.call("publish_model", "s", 1)
    (reference, *_) = (await caller.call("read_fragments")).fragments
    await caller.call("publish_model", "s", 2)
    assert (2, 1) == (reference.staleness, reference.staleness_when_granted)


async def test_a_lease_says_its_staleness_now_even_when_it_has_ended(caller: Caller) -> None:
    lease = await caller.call("fetch", COUNT, 5.0)
    assert [0] * COUNT == await staleness_of(lease)
    await caller.call("publish_model", "s", 5)
    assert [5] * COUNT == await staleness_of(lease)
    assert [3] * COUNT == await staleness_of(lease, 3)
    released = lease.release()
    assert released is None or await released is None
    assert [5] * COUNT == await staleness_of(lease)
    await caller.call("start_session", "t")
    with pytest.raises(
        errors.SessionEndedError, match="'s' is not current: another run has started 't'"
    ):
        await staleness_of(lease)


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
async def test_no_batch_is_handed_out_staler_than_the_limit_at_its_use(
    caller: Caller, limit: int
) -> None:
    lease = await caller.call("fetch", COUNT, 5.0)
    found = await trained(caller, lease, max_staleness_at_use=limit, prefetch_batches=4)
    assert [[version] for version in range(limit + 1)] == [at_use for *_, at_use in found]
    left = {each.metadata.fragment_index for each in lease.left_out}
    assert set(range(COUNT)) - {index for index, *_ in found} == left
    # Something of it was used, and a lease ends as a whole.
    assert {"consumed": 1, "returned": 0} == await ends(caller)


async def ends(caller: Caller) -> dict[str, int]:
    """Leases that ended, by how: the server counts only what has happened."""
    counters = (await caller.call("get_buffer")).state.counters
    return {how: counters.get(f"leases_ended_{how}", 0) for how in ("consumed", "returned")}


async def test_a_lease_that_became_too_stale_before_any_use_is_returned_unused(
    caller: Caller,
) -> None:
    lease = await caller.call("fetch", COUNT, 5.0)
    await caller.call("publish_model", "s", 2)
    assert [] == await trained(caller, lease, max_staleness_at_use=1)
    assert {"consumed": 0, "returned": 1} == await ends(caller)
    # It is within the buffer's own limit, so it is granted again; but not for ever.
    again = await caller.call("fetch", COUNT, 5.0)
    assert [] == await trained(caller, again, max_staleness_at_use=1)
    assert {"consumed": 1, "returned": 1} == await ends(caller)
    with pytest.raises(errors.WaitElapsedError):
        await caller.call("fetch", 1, 0.0)


async def test_a_lease_that_was_read_without_a_limit_is_consumed(caller: Caller) -> None:
    lease = await caller.call("fetch", COUNT, 5.0)
    assert COUNT == len(await trained(caller, lease, publishing=False))
    assert {"consumed": 1, "returned": 0} == await ends(caller)


async def test_only_the_stale_rows_of_a_batch_are_left_out(caller: Caller) -> None:
    await caller.call("publish_model", "s", 1)
    fresher = [vector_fragment(index, worker_id="w1", model_version=1) for index in range(COUNT)]
    await caller.call("append_many", fresher)
    lease = await caller.call("fetch", 2 * COUNT, 5.0)
    batches = lease.batches(2 * COUNT, max_staleness_at_use=0)
    if isinstance(caller.client, breadbox.Client):
        (batch,) = list(batches)
    else:
        (batch,) = [each async for each in batches]
    assert {("w1", index) for index in range(COUNT)} == {
        (each.metadata.worker_id, each.metadata.fragment_index) for each in batch.references
    }
    for row, reference in enumerate(batch.references):
        assert (batch.obs[row] == reference.metadata.fragment_index).all()
    assert {"w0"} == {each.metadata.worker_id for each in lease.left_out}
    assert COUNT == len(lease.left_out)


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"max_staleness_at_use.*at least 0"):
        LoaderOptions(max_staleness_at_use=-1)
