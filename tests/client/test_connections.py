"""Connections of a client: what gRPC is told of them, and which is used after silence."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from breadbox.model.options import channel_options
from breadbox.wire.connections import Connections
from breadbox_server import limits
from breadbox_server.rpc.listening import server_options

ADDRESSES = (
    "server:1",
    "10.0.0.1:1",
    "[::1]:1",
    "unix:/run/b",
    "dns:///server:1",
    "ipv4:1.2.3.4:1",
)


@dataclasses.dataclass(eq=False)
class Opened:
    """A connection that knows why it was opened."""

    address: str
    is_another: bool


def two() -> Connections[Opened]:
    return Connections(("a", "b"), Opened)


def test_a_call_after_silence_gets_another_connection_to_the_same_address() -> None:
    connections = two()
    silent = connections.take(1)
    connections.replace(1, silent)
    another = connections.take(1)
    assert (another.address, another.is_another) == ("b", True)
    assert connections.take(0).is_another is False


def test_of_many_silent_calls_on_a_connection_one_opens_another() -> None:
    connections = two()
    silent = [connections.take(0) for _ in range(5)]
    for each in silent:
        connections.replace(0, each)
    taken = connections.take(0)
    assert len({*connections.end()}) == 3
    assert taken is not silent[0]


def test_a_replaced_connection_is_closed_with_its_last_call_and_no_sooner() -> None:
    connections = two()
    silent, waiting = connections.take(0), connections.take(0)
    connections.replace(0, silent)
    assert [connections.give_back(each) for each in (silent, waiting)] == [False, True]


def test_a_connection_that_answers_stays_open_without_calls() -> None:
    connections = two()
    assert connections.give_back(connections.take(0)) is False
    assert connections.take(0).is_another is False


def test_the_end_closes_all_also_those_that_calls_still_use() -> None:
    connections = two()
    silent = connections.take(0)
    connections.replace(0, silent)
    ended = connections.end()
    connections.replace(1, connections.take(1))
    assert {(each.address, each.is_another) for each in ended} == {
        *(("a", False), ("a", True), ("b", False))
    }
    assert connections.give_back(silent) is False
    assert connections.take(1).is_another is False


def _silence_ms(options: dict[str, Any]) -> int:
    """How long gRPC believes in a silent connection: a ping has the longer of two timeouts."""
    timeouts = (options["grpc.keepalive_timeout_ms"], options["grpc.http2.ping_timeout_ms"])
    return int(options["grpc.keepalive_time_ms"]) + max(timeouts)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_silent_connection_is_left_within_40_s_or_15_s_where_there_may_be_another_server(
    address: str,
) -> None:
    alone = dict(channel_options(address))
    one_of_many = dict(channel_options(address, is_one_of_many=True))
    is_several = address.startswith(("dns:", "ipv4:"))
    assert (_silence_ms(alone), _silence_ms(one_of_many)) == (
        *((15_000 if is_several else 40_000), 15_000),
    )


def test_the_server_leaves_a_silent_connection_within_40_s() -> None:
    assert _silence_ms(dict(server_options(100))) == 40_000
    assert limits.KEEPALIVE_S + limits.KEEPALIVE_ANSWER_S == 40.0


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_name_is_resolved_again_within_a_second_of_a_failure(address: str) -> None:
    options = dict(channel_options(address))
    assert options["grpc.dns_min_time_between_resolutions_ms"] == 1000


@pytest.mark.parametrize(("variable", "uses_proxy"), [("http_proxy", 0), ("grpc_proxy", 1)])
def test_only_a_proxy_that_is_named_for_grpc_is_used(
    variable: str, uses_proxy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert dict(channel_options("server:1"))["grpc.enable_http_proxy"] == uses_proxy


@pytest.mark.parametrize(("chosen", "expected"), [(None, "200"), ("700", "700")])
def test_grpc_looks_often_at_connections_that_no_call_uses(
    chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_appends` and the crossings meet it: with 5 s a server that is back is found late."""
    name = "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"
    monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    program = f"import breadbox, os, sys; print(os.environ['{name}'], 'grpc' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert f"{expected} False" == said.strip()
