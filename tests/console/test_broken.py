"""The page stays true while servers, standbys and Redis come and go, and while much is going on."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.model.types import BufferConfig
from support.console import browser, console, film, opened, played
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

FRAGMENTS, WORKERS = 100_000, 500


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


def test_a_page_goes_on_when_the_server_was_killed_and_started(
    chromium: Any, tmp_path: Path
) -> None:
    arguments = ("--store", f"file://{tmp_path}/store")
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
        console(server.address, tmp_path / "console.log") as url,
    ):
        client.start_session("run")
        client.append(played(0, worker_id="kept", obs=film()))
        client.append(played(0, obs=film()))
        for page in opened(chromium, url):
            page.get_by_role("link", name="w0").wait_for()
            server.kill()
            page.get_by_text("Cannot ask").wait_for()
            page.get_by_text("what follows is as it was at").wait_for()
            # What was seen stays, and says so where its frames cannot be loaded.
            page.goto(f"{url}#/episodes/default")
            page.get_by_role("link", name="w0 #0").click()
            page.get_by_text("cannot be loaded").first.wait_for()
            server.start(60)
            page.get_by_text("Live from").wait_for()
            page.reload()
            page.get_by_text("step 1 of 32").wait_for()
            client.append(played(1, obs=film(), episode_id=1))
            page.goto(f"{url}#/episodes/default")
            page.get_by_role("link", name="w0 #1").wait_for()


def test_a_console_that_was_started_before_its_server_says_so_and_asks_for_no_token(
    chromium: Any, tmp_path: Path
) -> None:
    arguments = ("--store", f"file://{tmp_path}/store")
    with ServerProcess(*arguments, log=tmp_path / "server.log") as server:
        server.kill()
        with console(server.address, tmp_path / "console.log") as url:
            for page in opened(chromium, url):
                page.get_by_text("Cannot begin yet").wait_for()
                assert 0 == page.get_by_label("Token").count()
                server.start(60)
                page.get_by_text("Live from").wait_for()


def end(*servers: ServerProcess) -> None:
    """Kill those that run."""
    for each in servers:
        each.end()


def test_a_standby_that_takes_over_is_shown(chromium: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(is_durable=True))
        first, second = (
            ServerProcess("--store", redis.url, "--standby", log=tmp_path / f"{name}.log")
            for name in ("first", "second")
        )
        stack.callback(end, first, second)
        first.start()
        second.start_standby()
        both = f"{first.address},{second.address}"
        client = stack.enter_context(breadbox.connect(both))
        url = stack.enter_context(console(both, tmp_path / "console.log"))
        client.start_session("run")
        client.append(played(0))
        for page in opened(chromium, url):
            page.get_by_text(f"{first.address} leads").wait_for()
            page.get_by_text(f"{second.address} stands by").wait_for()
            page.get_by_role("link", name="w0").wait_for()
            first.kill()
            page.get_by_text(f"{second.address} leads").wait_for()
            page.get_by_text(f"{first.address} does not answer").wait_for()
            client.append(played(0, worker_id="w1"))
            page.get_by_role("link", name="w1").wait_for()
            page.get_by_text("Live from").wait_for()


def test_a_redis_that_is_gone_is_said_and_what_follows_is_seen(
    chromium: Any, tmp_path: Path
) -> None:
    redis = RedisServer(is_durable=True)
    with (
        redis,
        ServerProcess("--store", redis.url, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
        console(server.address, tmp_path / "console.log") as url,
    ):
        client.start_session("run")
        client.append(played(0, obs=film()))
        for page in opened(chromium, url):
            page.get_by_role("link", name="w0").wait_for()
            redis.kill()
            page.locator(".card.bad").wait_for()
            redis.start()
            page.locator(".card:not(.bad)").wait_for(timeout=60_000)
            client.append(played(0, worker_id="w1", obs=film()))
            page.get_by_role("link", name="w1").wait_for(timeout=60_000)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_thousand_fragments_of_five_hundred_workers_can_be_looked_at(
    chromium: Any, tmp_path: Path
) -> None:
    arguments = ("--store", f"file://{tmp_path}/store", "--inline-size-max", "4KiB")
    limits = BufferConfig(fragments_per_chunk=50, capacity_chunks=FRAGMENTS, workers_max=WORKERS)
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
        console(
            server.address, tmp_path / "console.log", "--read-fragments-per-s", "1000000"
        ) as url,
    ):
        client.create_buffer("busy", limits)
        client.start_session("run", buffer="busy")
        for page in opened(chromium, url):
            for start in range(0, FRAGMENTS // WORKERS, 50):
                for worker in range(WORKERS):
                    group = [
                        played(
                            start + at,
                            worker_id=f"w{worker:03}",
                            steps=4,
                            ends=(3,),
                            reward=float(worker + at),
                            episode_id=start + at,
                        )
                        for at in range(50)
                    ]
                    client.append_many(group, buffer="busy")
            page.get_by_role("region", name="Buffer busy").wait_for()
            page.get_by_text("of 500", exact=False).first.wait_for(timeout=120_000)
            page.goto(f"{url}#/episodes/busy")
            page.get_by_label("Worker").select_option("w499", timeout=60_000)
            page.get_by_role("link", name="w499 #").first.wait_for()
            assert {"w499"} == {
                each.split(" ")[0]
                for each in page.get_by_role("link", name="w499 #").all_inner_texts()
            }
            heap = page.evaluate("performance.memory.usedJSHeapSize")
            assert heap < 100 * 2**20
            page.get_by_role("link", name="w499 #").first.click()
            page.get_by_text("step 1 of 4").wait_for()
        assert np.isclose(FRAGMENTS, client.get_buffer("busy").state.fragment_count)
