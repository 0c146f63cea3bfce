"""Messages of append streams take turns, and leave time for calls."""

import asyncio

from breadbox_server.limits import STREAM_TURN_FRAGMENTS
from breadbox_server.rpc.stream_turns import StreamTurns
from support.eventually import eventually


class Turns:
    """Streams that note when they had their turns."""

    def __init__(self) -> None:
        self.turns = StreamTurns()
        self.had: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, sender: str, fragment_count: int) -> asyncio.Task[None]:
        async def send() -> None:
            async with self.turns.turn(sender, fragment_count):
                self.had.append(sender)

        task = asyncio.get_running_loop().create_task(send())
        self.tasks.append(task)
        return task

    async def end(self) -> list[str]:
        """Who had turns, in order, once all had."""
        await eventually(lambda: all(task.done() for task in self.tasks))
        return self.had


async def test_few_messages_wait_for_nothing() -> None:
    it = Turns()
    for _ in range(4):
        it.send("a", STREAM_TURN_FRAGMENTS // 4)
    await asyncio.sleep(0)

    assert ["a"] * 4 == it.had


async def test_messages_beyond_a_turns_worth_wait_for_the_next() -> None:
    it = Turns()
    for _ in range(6):
        it.send("a", STREAM_TURN_FRAGMENTS // 2)
    await asyncio.sleep(0)
    assert ["a"] * 2 == it.had

    assert ["a"] * 6 == await it.end()


async def test_a_message_larger_than_a_turn_has_one_of_its_own() -> None:
    it = Turns()
    it.send("a", 1)
    it.send("a", 10 * STREAM_TURN_FRAGMENTS)
    it.send("a", 1)

    assert ["a"] * 3 == await it.end()


async def test_senders_are_served_one_after_the_other() -> None:
    it = Turns()
    for _ in range(5):
        it.send("greedy", STREAM_TURN_FRAGMENTS)
    it.send("honest", 1)
    it.send("honest", 1)

    # One is served already, and one stood in line when the honest ones came.
    assert ["greedy", "greedy", "honest", "greedy", "honest"] == (await it.end())[:5]


async def test_a_stream_that_ends_while_it_waits_takes_no_turn() -> None:
    it = Turns()
    it.send("a", STREAM_TURN_FRAGMENTS)
    given_up = it.send("b", STREAM_TURN_FRAGMENTS)
    it.send("c", STREAM_TURN_FRAGMENTS)
    await asyncio.sleep(0)
    given_up.cancel()

    assert ["a", "c"] == await it.end()


async def test_what_was_carried_out_is_followed_by_a_pause_as_long() -> None:
    it = Turns()
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    async with it.turns.turn("a", STREAM_TURN_FRAGMENTS):
        while loop.time() < began_at + 0.05:
            pass
    it.send("b", 1)

    assert ["b"] == await it.end()
    assert loop.time() >= began_at + 0.1
