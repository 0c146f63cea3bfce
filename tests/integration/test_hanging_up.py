"""Redis is behind a proxy whose backend is away: it accepts connections and hangs up."""

import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import breadbox
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.proxy import Proxy
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

OUTAGES = 3
AWAY_S = 3.0


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer(with_tcp=True, is_durable=True) as running:
        yield running


@pytest.fixture
def proxy(redis: RedisServer) -> Iterator[Proxy]:
    match = re.search(r"//(?:.*@)?(.+):(\d+)", redis.tcp_url)
    assert match is not None
    with Proxy((match[1], int(match[2]))) as running:
        yield running


def leads(server: ServerProcess) -> float:
    """What the server's metrics say of its lead."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as reply:
        (found,) = re.findall(r"^breadbox_leads (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(found)


def outage(proxy: Proxy, server: ServerProcess) -> None:
    proxy.hang_up()
    eventually_sync(lambda: leads(server) == 0.0, "the server knowing of the outage")
    time.sleep(AWAY_S)  # The outage lasts: what fails at some attempts only has its chance.
    proxy.speak()


def test_a_server_outlives_outages_in_which_redis_accepts_and_hangs_up(
    redis: RedisServer, proxy: Proxy, tmp_path: Path
) -> None:
    store = f"redis://{proxy.address}/0"
    server = ServerProcess(
        *("--store", store, "--fragments-per-chunk", "1", "--client-store", redis.tcp_url),
        *("--metrics-listen", "127.0.0.1:0"),
        log=tmp_path / "log",
    )
    with server, breadbox.connect(server.address, reconnect_s=60) as client:
        client.start_session("s")
        for index in range(OUTAGES):
            client.append(vector_fragment(index))
            outage(proxy, server)
            eventually_sync(lambda: leads(server) == 1.0, "the server leading again")
        client.append(vector_fragment(OUTAGES))
        assert OUTAGES + 1 == client.get_buffer().state.chunk_count
        assert 0 == server.stop()
    log = server.log.read_text()
    assert "Traceback" not in log, log


def test_both_of_a_pair_outlive_such_outages_and_one_takes_over(
    redis: RedisServer, proxy: Proxy, tmp_path: Path
) -> None:
    store = f"redis://{proxy.address}/0"
    first, second = (
        ServerProcess(
            *("--store", store, "--fragments-per-chunk", "1", "--client-store", redis.tcp_url),
            *("--standby", "--metrics-listen", "127.0.0.1:0"),
            log=tmp_path / f"log-{name}",
        )
        for name in ("first", "second")
    )
    with first, ExitStack() as stack:
        second.start_standby()
        stack.push(second.__exit__)
        both = f"{first.address},{second.address}"
        client = stack.enter_context(breadbox.connect(both, reconnect_s=90))
        client.start_session("s")
        for index in range(OUTAGES):
            client.append(vector_fragment(index))
            outage(proxy, first)
            eventually_sync(lambda: leads(first) == 1.0, "the first leading again")
        first.signal(signal.SIGKILL)
        second.wait_serving(within_s=60)
        client.append(vector_fragment(OUTAGES))
        assert OUTAGES + 1 == client.get_buffer().state.chunk_count
        assert 0 == second.stop()
    for each in (first, second):
        assert "Traceback" not in each.log.read_text()
