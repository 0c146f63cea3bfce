"""Turns of calls that only look."""

import asyncio
from functools import partial

import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.admission import looks as admission
from breadbox_server.admission.looks import Looks
from support.eventually import eventually
from support.served import served

PAUSE_S = 0.05


@pytest.fixture(autouse=True)
def _long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that no burst leaves out, and that are long beside a slow machine's passes."""
    monkeypatch.setattr(admission, "BURST_S", 0.0)
    monkeypatch.setattr(admission, "LOOK_PAUSE_S", PAUSE_S)


async def served_in_order(looks: Looks, holders: str) -> str:
    """The order in which looks of these holders, which come together, get their turns."""
    order = ""

    async def look(holder: str) -> None:
        nonlocal order
        await looks.turn(holder)
        order += holder

    async with asyncio.TaskGroup() as tasks:
        for holder in holders:
            tasks.create_task(look(holder))
    return order


async def test_each_tokens_oldest_look_has_its_turn_in_rotation() -> None:
    looks = Looks()
    looks.worked()
    assert "aabcabaaaa" == await served_in_order(looks, "aaaaaaabbc")
    assert 0 == len(looks)


async def test_looks_wait_only_while_others_work() -> None:
    loop = asyncio.get_running_loop()
    looks = Looks()
    began = loop.time()
    await served_in_order(looks, "a" * 100)
    assert loop.time() - began < 100 * PAUSE_S
    looks.worked()
    began = loop.time()
    await served_in_order(looks, "a" * 5)
    assert loop.time() - began >= 3.9 * PAUSE_S


async def test_a_pause_grows_with_the_cost_of_a_look() -> None:
    loop = asyncio.get_running_loop()
    looks = Looks()
    looks.worked()
    began = loop.time()
    await looks.turn("a")
    looks.took(60.0)
    await looks.turn("a")
    assert admission.COST_FACTOR * admission.COST_S_MAX <= loop.time() - began < 30.0


async def test_a_look_that_was_given_up_takes_no_turn() -> None:
    looks = Looks()
    looks.worked()
    await looks.turn("a")
    async with asyncio.TaskGroup() as tasks:
        given_up = tasks.create_task(looks.turn("a"))
        await eventually(lambda: len(looks) == 1)
        given_up.cancel()
        assert "b" == await served_in_order(looks, "b")
    assert 0 == len(looks)


async def test_looks_that_were_all_given_up_are_forgotten_and_cost_no_pause() -> None:
    loop = asyncio.get_running_loop()
    looks = Looks()
    looks.worked()
    await looks.turn("a")
    given_up = loop.create_task(looks.turn("a"))
    await eventually(lambda: len(looks) == 1)
    given_up.cancel()
    await eventually(lambda: len(looks) == 0)
    began = loop.time()
    await looks.turn("b")
    assert loop.time() - began < PAUSE_S


async def test_looks_wait_for_their_turn_and_calls_that_work_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "LOOK_PAUSE_S", 3600.0)
    async with served() as it, asyncio.TaskGroup() as tasks:
        await it.start()
        await it.stub.GetBuffer(pb.GetBufferRequest())
        waiting = [
            tasks.create_task(_answered(it.stub.GetBuffer(pb.GetBufferRequest()))),
            tasks.create_task(_answered(it.stub.ListBuffers(pb.ListBuffersRequest()))),
            tasks.create_task(
                _answered(it.stub.ReadFragments(pb.ReadFragmentsRequest(is_look=True)))
            ),
        ]
        registry = it.server.metrics.registry
        waits = partial(registry.get_sample_value, "breadbox_looks_waiting")
        await eventually(lambda: waits() == len(waiting))
        await it.stub.ReadFragments(pb.ReadFragmentsRequest())
        await it.stub.WatchModel(pb.WatchModelRequest())
        assert not any(each.done() for each in waiting)
        for each in waiting:
            each.cancel()


async def _answered(call: object) -> None:
    await call  # type: ignore[misc]
