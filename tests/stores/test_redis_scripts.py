"""Scripts on a connection of their own, when all is well and when it is not."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis

from breadbox.stores.redis.factory import open_redis_async
from breadbox.stores.redis.scripts import ScriptLine
from support.redis_server import RedisServer

COUNT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
ECHO = "return {KEYS[1], ARGV[1], ARGV[2]}"


@asynccontextmanager
async def line_to(server: RedisServer, answer_s: float = 5.0) -> AsyncIterator[ScriptLine]:
    client = open_redis_async(server.url, answer_s=answer_s)
    try:
        yield ScriptLine(client, answer_s)
    finally:
        await client.aclose()


async def test_arguments_of_every_kind_arrive_as_they_are() -> None:
    with RedisServer() as server:
        async with line_to(server) as line:
            large = os.urandom(300_000)
            for _ in range(2):
                assert [b"key\xc3\xa4", b"-7", large] == await line.eval(
                    ECHO, 1, "key\u00e4", -7, large
                )


async def test_scripts_that_come_at_once_each_get_their_own_answer() -> None:
    with RedisServer() as server:
        async with line_to(server) as line:
            assert 1 == await line.eval(COUNT, 1, "n", 1)
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(line.eval(ECHO, 1, f"k{number}", number, "x"))
                    for number in range(8)
                ]
    assert [[b"k%d" % number, b"%d" % number, b"x"] for number in range(8)] == [
        each.result() for each in calls
    ]


async def test_redis_that_forgets_scripts_or_connections_carries_them_out_once() -> None:
    with RedisServer() as server, server.client() as other:
        async with line_to(server) as line:
            other.script_load(COUNT)
            assert 1 == await line.eval(COUNT, 1, "n", 1)
            other.client_kill_filter(_type="normal", skipme=True)
            assert 2 == await line.eval(COUNT, 1, "n", 1)
            other.script_flush()
            assert 3 == await line.eval(COUNT, 1, "n", 1)
            assert 4 == await line.eval(COUNT, 1, "n", 1)


async def test_redis_that_was_started_again_is_found_again() -> None:
    with RedisServer() as server:
        async with line_to(server) as line:
            assert 1 == await line.eval(COUNT, 1, "n", 1)
            server.kill()
            with pytest.raises(redis.ConnectionError):
                await line.eval(COUNT, 1, "n", 1)
            server.start()
            assert 1 == await line.eval(COUNT, 1, "n", 1)


async def test_a_refusal_is_raised_and_the_next_script_gets_its_own_answer() -> None:
    with RedisServer() as server:
        async with line_to(server) as line:
            with pytest.raises(redis.ResponseError, match="no such thing"):
                await line.eval("return redis.error_reply('no such thing')", 0)
            assert 5 == await line.eval(COUNT, 1, "n", 5)


async def test_silence_ends_in_time_and_its_answer_is_nobody_elses() -> None:
    with RedisServer() as server:
        async with line_to(server, answer_s=0.2) as line:
            assert 1 == await line.eval(COUNT, 1, "n", 1)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(redis.exceptions.TimeoutError):
                    await line.eval(COUNT, 1, "n", 10)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert [b"k", b"a", b"b"] == await line.eval(ECHO, 1, "k", "a", "b")


async def test_who_is_cancelled_leaves_no_answer_behind_for_the_next() -> None:
    with RedisServer() as server:
        async with line_to(server) as line:
            assert 1 == await line.eval(COUNT, 1, "n", 1)
            os.kill(server.pid, signal.SIGSTOP)
            waiting = asyncio.get_running_loop().create_task(line.eval(COUNT, 1, "n", 10))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            os.kill(server.pid, signal.SIGCONT)
            assert waiting.cancelled()
            assert [b"k", b"a", b"b"] == await line.eval(ECHO, 1, "k", "a", "b")
