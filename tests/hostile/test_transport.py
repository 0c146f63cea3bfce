"""Strangers on the wire, with and without a token: the honest pair beside them is unharmed."""

import contextlib
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import breadbox
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.fragment_pb2 import FragmentMetadata
from breadbox_server.limits import FRUITLESS_MAX, MESSAGE_BYTES_MAX, STREAMS_MAX
from breadbox_server.rpc.traffic import STRANGER_WEIGHT
from hostile.harness import ATTACK_S, Ground, attacked_server, ground
from support.certificates import Authority
from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    RST_STREAM,
    Conversation,
    call_headers,
    connect,
    frame,
    message_prefix,
    setting,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
SERVICE = "/breadbox.v1.ReplayBufferService/"
SPOIL = "spoil"
WATCH = "/grpc.health.v1.Health/Watch"
COMES_BACK_FACTOR = 60.0
"""What SECURITY.md says of floods whose sender comes back as soon as it is hung up on: gRPC hands
the loop one call at a time, and `STREAMS_MAX` given-up ones are before everybody each time."""
CALLS_MIN = 100
"""Of the pair beside a flood that is over at once; beside one that lasts it makes fifteen."""
LOG_BYTES_MAX = 2000
"""Whatever strangers do."""
both_kinds = pytest.mark.parametrize("has_tokens", [False, True], ids=["anonymous", "no token"])


def lasting(step: Callable[[], object], within_s: float = ATTACK_S) -> None:
    """Do something again and again for a while."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        step()


def counted(it: Ground, sample: str) -> float:
    """What the server has counted of a metric, named by its end and its labels."""
    found = re.search(rf"{re.escape(sample)} (\S+)", it.read_metrics())
    return float(found[1]) if found else 0.0


def hung_up_count(it: Ground, reason: str) -> float:
    """Connections that the server has closed."""
    return counted(it, f'closed_total{{reason="{reason}"}}')


def conversations(
    stack: contextlib.ExitStack, it: Ground, count: int, *settings: bytes
) -> list[Conversation]:
    return [stack.enter_context(Conversation(it.address, *settings)) for _ in range(count)]


@pytest.mark.long
@both_kinds
def test_calls_whose_messages_never_come(tmp_path: Path, has_tokens: bool) -> None:
    with ground(tmp_path, has_tokens=has_tokens) as it:

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                strangers = conversations(stack, it, 9)

                for _ in range(STREAMS_MAX):
                    for stranger in strangers:
                        stranger.begin(SERVICE + "ListBuffers")
                time.sleep(ATTACK_S)

        it.attack(attack)


@pytest.mark.long
@both_kinds
@pytest.mark.parametrize("connection_count", [1, 16])
def test_messages_that_are_never_finished(
    tmp_path: Path, has_tokens: bool, connection_count: int
) -> None:
    size = MESSAGE_BYTES_MAX - 16

    with ground(tmp_path, has_tokens=has_tokens) as it:

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                strangers = conversations(stack, it, connection_count)
                left: dict[tuple[Conversation, int], int] = {}

                for stranger in strangers:
                    for _ in range(400 // connection_count):
                        stream = stranger.begin(SERVICE + "AppendFragments")
                        stranger.send_data(stream, message_prefix(size))
                        left[stranger, stream] = size - 1

                def feed() -> None:
                    sent = 0
                    for (stranger, stream), rest in left.items():
                        part = stranger.send_data(stream, bytes(min(rest, 2**18)))
                        left[stranger, stream] -= part
                        sent += part
                    if not sent:
                        time.sleep(0.01)

                lasting(feed)

        it.attack(attack)


@pytest.mark.long
def test_calls_that_are_given_up_as_soon_as_they_begin(tmp_path: Path) -> None:
    block = call_headers(SERVICE + "ListBuffers")

    with ground(tmp_path) as it:

        def flood() -> None:
            with Conversation(it.address) as stranger:
                first, until = 1, time.monotonic() + ATTACK_S
                while time.monotonic() < until and not stranger.is_closed:
                    frames = [
                        frame(HEADERS, END_HEADERS, stream, block)
                        + frame(RST_STREAM, 0, stream, bytes(4))
                        for stream in range(first, first + 200, 2)
                    ]
                    stranger.send(b"".join(frames))
                    first += 200

        it.attack(lambda: lasting(flood), factor=COMES_BACK_FACTOR)


@pytest.mark.long
def test_appends_that_are_cancelled_in_the_packets_that_bring_them(tmp_path: Path) -> None:
    """Each costs its sender, who is hung up on before it costs others."""
    fragments = [
        FragmentMetadata(worker_id="w", fragment_index=each, session_id=SPOIL, step_count=4)
        for each in range(8)
    ]
    whole = pb.AppendFragmentsRequest(
        buffer=SPOIL, fragments=fragments, payloads=[b"x"] * len(fragments)
    ).SerializeToString()

    with ground(tmp_path) as it, contextlib.ExitStack() as stack:
        with breadbox.connect(it.address) as client:
            client.create_buffer(SPOIL)
            client.start_session(SPOIL, buffer=SPOIL)
        strangers = conversations(stack, it, 4)

        def flood(until: float, stranger: Conversation) -> None:
            while not stranger.is_closed and time.monotonic() < until:
                with stranger.in_one_piece():
                    for _ in range(32):
                        stream = stranger.begin(SERVICE + "AppendFragments")
                        stranger.send_data(stream, message_prefix(len(whole)) + whole)
                        stranger.reset(stream)

        def attack() -> None:
            until = time.monotonic() + ATTACK_S
            with ThreadPoolExecutor() as pool:
                list(pool.map(partial(flood, until), strangers))
            time.sleep(max(0.0, until - time.monotonic()))
            assert hung_up_count(it, "flood") == len(strangers)
            # What had come before it was hung up on is still looked at.
            looked_at = counted(it, 'rpcs_total{code="CANCELLED",method="AppendFragments"}')
            assert looked_at <= 2 * len(strangers) * (FRUITLESS_MAX / STRANGER_WEIGHT + STREAMS_MAX)

        outcome = it.attack(attack)
    assert outcome.call_count > CALLS_MIN, str(outcome)


def test_refused_calls_by_the_thousand(tmp_path: Path) -> None:
    with ground(tmp_path, has_tokens=True) as it:

        def flood() -> None:
            with Conversation(it.address) as stranger:
                until = time.monotonic() + ATTACK_S
                while time.monotonic() < until and not stranger.is_closed:
                    if stranger.begun_count - len(stranger.ended_streams) > 1000:
                        time.sleep(0.001)
                        continue
                    stream = stranger.begin(SERVICE + "ListBuffers")
                    stranger.send(frame(DATA, END_STREAM, stream, message_prefix(0)))

        def attack() -> None:
            lasting(flood)
            assert hung_up_count(it, "flood") > 0

        it.attack(attack, factor=COMES_BACK_FACTOR)


def test_handshakes_that_fail_fill_no_log(tmp_path: Path) -> None:
    signed = Authority(tmp_path).sign("server")
    log = tmp_path / "log"
    encrypted = ("--tls-cert", str(signed.cert_file), "--tls-key", str(signed.key_file))
    with attacked_server("--store", f"file://{tmp_path / 'store'}", *encrypted, log=log) as server:
        quiet_bytes = log.stat().st_size
        for _ in range(200):
            with connect(server.address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
                stranger.recv(100)  # It is told that this is no TLS, after the failure.
        assert log.stat().st_size - quiet_bytes < LOG_BYTES_MAX


def watch_health(stranger: Conversation, count: int) -> None:
    for _ in range(count):
        stream = stranger.begin(WATCH)
        stranger.send(frame(DATA, END_STREAM, stream, message_prefix(0)))


@pytest.mark.long
def test_thousands_who_watch_the_health_and_hang_up_at_once(tmp_path: Path) -> None:
    with ground(tmp_path) as it:

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                for stranger in conversations(stack, it, 7):
                    watch_health(stranger, 4000)
            time.sleep(2.0)

        it.attack(attack)


@pytest.mark.long
def test_those_who_watch_the_health_and_take_nothing_hold_up_no_end(tmp_path: Path) -> None:
    with ground(tmp_path) as it, contextlib.ExitStack() as stack:

        def attack() -> None:
            for stranger in conversations(stack, it, 2, setting(INITIAL_WINDOW_SIZE, 0)):
                watch_health(stranger, 1000)

        # They are still there when the server is told to end.
        it.attack(attack)


@pytest.mark.long
def test_half_requests_for_the_metrics_take_neither_files_nor_threads(tmp_path: Path) -> None:
    with ground(tmp_path, files_max=1024) as it, contextlib.ExitStack() as stack:
        host, port = urlsplit(it.server.metrics_url).netloc.rsplit(":")

        def ask_half() -> None:
            with contextlib.suppress(OSError):
                stranger = socket.create_connection((host, int(port)), timeout=1)
                stack.enter_context(stranger).sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")

        def attack() -> None:
            for _ in range(400):
                ask_half()
            # Whoever asks properly is still answered.
            assert "breadbox_calls" in it.read_metrics()

        outcome = it.attack(attack)
    assert outcome.files_peak < 128


@pytest.mark.long
def test_idle_connections_that_hold_every_place(tmp_path: Path) -> None:
    with ground(tmp_path, files_max=1024) as it, contextlib.ExitStack() as stack:

        def fill() -> None:
            with contextlib.suppress(OSError):
                stack.enter_context(Conversation(it.address))

        def attack() -> None:
            for _ in range(1000):
                fill()
            time.sleep(3.0)

        it.attack(attack)
