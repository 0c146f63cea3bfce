import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from breadbox_server.maintenance.probe import local_address, main
from support.served import served


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "127.0.0.1:50051"),
        ({"BREADBOX_LISTEN": "0.0.0.0:7000"}, "127.0.0.1:7000"),
        ({"BREADBOX_LISTEN": "[::]:7000"}, "[::1]:7000"),
        ({"BREADBOX_LISTEN": "10.1.2.3:7000"}, "10.1.2.3:7000"),
        ({"BREADBOX_LISTEN": "0.0.0.0:7000", "BREADBOX_LOCAL_SOCKET": "/run/b"}, "unix:/run/b"),
    ],
)
def test_the_probe_asks_the_server_beside_it(environment: dict[str, str], address: str) -> None:
    assert address == local_address(environment)


async def test_a_server_that_serves_is_healthy() -> None:
    async with served() as world:
        assert 0 == await asyncio.to_thread(main, [world.server.address])


def test_a_server_that_is_not_there_is_not_healthy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breadbox_server.maintenance.probe.PROBE_S", 0.2)

    assert 1 == main(["127.0.0.1:1"])
    assert "127.0.0.1:1 does not answer: DEADLINE_EXCEEDED\n" == capsys.readouterr().err


def test_a_server_that_answers_nothing_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: Any = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(()))
    handlers = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": nothing})
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, handlers=[handlers])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            assert 1 == main([address])
        finally:
            server.stop(grace=0).wait()
    assert f"{address} is UNKNOWN\n" == capsys.readouterr().err


def test_help_names_what_the_probe_takes_and_asks_no_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 0 == main(["--help"])
    shown = capsys.readouterr().out
    assert [True] * 3 == [each in shown for each in ("--alive", "--ready", "HOST:PORT")]


def test_an_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["--live"])
    assert "no option is named --live; --help shows all\n" == capsys.readouterr().err
