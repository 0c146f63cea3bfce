"""Those who wait for news: who makes room when as many wait as may."""

import asyncio

import pytest

from breadbox_server.base.errors import WatchersFullError
from breadbox_server.core.model.ids import BufferName
from breadbox_server.reading.watchers import Watchers
from support.manual_timers import ManualTimers

HERE, THERE = BufferName("here"), BufferName("there")


class Waiters:
    """Those who wait for an hour, each until it is woken or turned away."""

    def __init__(self, limit: int) -> None:
        self.watchers = Watchers(ManualTimers(), limit)
        self.ends: list[tuple[str, str]] = []

    async def wait(self, buffer: BufferName, name: str) -> None:
        """Wait as the holder whom the name begins with."""
        try:
            await self.watchers.wait(buffer, 3600.0, name[0])
            self.ends.append((name, "woken"))
        except WatchersFullError:
            self.ends.append((name, "turned away"))

    async def wait_all(self, group: asyncio.TaskGroup, buffer: BufferName, *names: str) -> None:
        for name in names:
            group.create_task(self.wait(buffer, name))
            await asyncio.sleep(0)


async def test_who_has_more_that_wait_makes_room_for_who_has_fewer() -> None:
    it = Waiters(limit=4)
    async with asyncio.TaskGroup() as group:
        await it.wait_all(group, HERE, "a1", "a2", "a3", "a4")
        await it.wait_all(group, THERE, "b1", "b2")
        await asyncio.sleep(0)
        assert [("a1", "turned away"), ("a2", "turned away")] == it.ends
        assert 4 == len(it.watchers)
        it.watchers.wake(HERE)
        it.watchers.wake(THERE)
    assert {(name, "woken") for name in ("a3", "a4", "b1", "b2")} == set(it.ends[2:])
    assert 0 == len(it.watchers)
    assert not it.watchers._of  # noqa: SLF001 - nothing else shows it


@pytest.mark.parametrize("late", ["a2", "b2"])
async def test_who_has_as_many_that_wait_as_anybody_takes_nobodys_place(late: str) -> None:
    it = Waiters(limit=2)
    async with asyncio.TaskGroup() as group:
        await it.wait_all(group, HERE, "a1", "b1", late)
        assert [(late, "turned away")] == it.ends
        it.watchers.wake(HERE)
