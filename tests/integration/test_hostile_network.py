"""A port scan's worth of nonsense: the server goes on serving those who mean it.

The server is a real process; whoever connects here means no good, but for one client.
"""

import contextlib
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import breadbox
from support.eventually import eventually_sync
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CONNECTIONS = 10_000
DESCRIPTORS_SPARE = 500
HANDSHAKE_S = 10.0
"""After which the server hangs up on a connection that never became HTTP/2."""
ANSWER_S_MAX = 0.1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all: it is to outlive each of them."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(
        *("--store", f"file://{folder / 'store'}", "--metrics-listen", "127.0.0.1:0"),
        log=folder / "server.log",
    ) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address, reconnect_s=0) as connected:
        connected.get_buffer()
        yield connected


def connect(server: ServerProcess) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def descriptors_of(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def answer_times_s(client: breadbox.Client, count: int = 200) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        client.get_buffer()
        times.append(time.perf_counter() - started)
    return sorted(times)


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One HTTP/2 frame; `length` lies about its payload's."""
    shown = len(payload) if length is None else length
    return shown.to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


SETTINGS = frame(4, 0, 0, b"")
NONSENSE = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: breadbox\r\n\r\n",
    "a TLS greeting": bytes.fromhex("16030100f6010000f20303") + bytes(240),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "zeros": bytes(65_536),
    "random bytes": random.Random(7).randbytes(65_536),
    "half a preface": PREFACE[:10],
    "a preface and then zeros": PREFACE + bytes(65_536),
    "a frame of 16 MiB that never comes": PREFACE + SETTINGS + frame(0, 0, 1, b"x", 2**24 - 1),
    "headers of an impossible table": PREFACE + SETTINGS + frame(1, 4, 1, b"\xff" * 4096),
    "headers that never end": PREFACE + SETTINGS + frame(1, 0, 1, bytes(16_000)) * 8,
    "a flood of pings": PREFACE + SETTINGS + frame(6, 0, 0, bytes(8)) * 10_000,
    "a flood of settings": PREFACE + frame(4, 0, 0, bytes(6)) * 10_000,
    "a flood of resets": PREFACE + SETTINGS + frame(3, 0, 1, bytes(4)) * 10_000,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_what_is_not_our_protocol_harms_nobody_else(
    server: ServerProcess, client: breadbox.Client, nonsense: bytes
) -> None:
    with connect(server) as stranger:
        # The server may hang up while it is being talked to.
        with contextlib.suppress(OSError):
            stranger.sendall(nonsense)
        times_s = answer_times_s(client)

    assert times_s[int(len(times_s) * 0.99)] < ANSWER_S_MAX


@pytest.mark.long
def test_ten_thousand_silent_connections_harm_nobody_and_are_hung_up_on(
    server: ServerProcess, client: breadbox.Client
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + DESCRIPTORS_SPARE:
        pytest.skip(f"this machine allows {hard} open files, too few for {CONNECTIONS} connections")
    before = descriptors_of(server)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(server))
        times_s = answer_times_s(client)
        with breadbox.connect(server.address) as newcomer:
            newcomer.get_buffer()
        eventually_sync(
            lambda: descriptors_of(server) < before + 100,
            "the end of silent connections",
            within_s=3 * HANDSHAKE_S,
        )

    assert times_s[int(len(times_s) * 0.99)] < ANSWER_S_MAX
