"""Strangers with streams of appends: the honest pair, whose producer has one, is unharmed."""

import contextlib
import time
from pathlib import Path
from typing import Final

import pytest

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.limits import MESSAGE_BYTES_MAX, STREAM_APPENDS_MAX
from chaos.actors import SESSION
from hostile.harness import ATTACK_S, Ground, ground
from support.http2 import (
    END_HEADERS,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    RST_STREAM,
    Conversation,
    call_headers,
    frame,
    message_prefix,
    setting,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
CALLS_MIN: Final = 60
"""Of the honest pair, which makes hundreds in the same time on an idle machine."""
STREAM: Final = "/breadbox.v1.ReplayBufferService/AppendStream"


def conversations(
    stack: contextlib.ExitStack, it: Ground, count: int, *settings: bytes
) -> list[Conversation]:
    """Connections of strangers."""
    return [stack.enter_context(Conversation(it.address, *settings)) for _ in range(count)]


def packed(count: int, *, first: int = 0, is_cancelled: bool = False) -> bytes:
    """A message with so many appends, each of one fragment whose payload nobody has.

    And, where that is asked for, with word that nobody waits for any of them.
    """
    appends = [
        pb.StreamedAppend(
            call_id=call_id,
            append=pb.AppendFragmentsRequest(
                fragments=[
                    fragment_pb2.FragmentMetadata(
                        worker_id=f"stranger-{call_id}",
                        session_id=SESSION,
                        step_count=8,
                        payload=fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=8),
                    )
                ]
            ),
        )
        for call_id in range(first, first + count)
    ]
    cancelled = [each.call_id for each in appends] if is_cancelled else []
    data = pb.AppendStreamRequest(appends=appends, cancelled_call_ids=cancelled).SerializeToString()
    return message_prefix(len(data)) + data


@pytest.mark.long
def test_streams_on_which_nothing_is_ever_sent(tmp_path: Path) -> None:
    with ground(tmp_path) as it:

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                strangers = conversations(stack, it, 8)
                for _ in range(1000):
                    for stranger in strangers:
                        stranger.begin(STREAM)
                time.sleep(ATTACK_S / 2)

        it.attack(attack)


@pytest.mark.long
def test_streams_that_are_idle_after_an_append(tmp_path: Path) -> None:
    message = packed(1)
    with ground(tmp_path) as it:

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                strangers = conversations(stack, it, 8)
                for _ in range(150):
                    for stranger in strangers:
                        stranger.send_data(stranger.begin(STREAM), message)
                time.sleep(ATTACK_S / 2)

        it.attack(attack)


@pytest.mark.long
def test_messages_of_streams_that_are_never_finished(tmp_path: Path) -> None:
    size = MESSAGE_BYTES_MAX - 16
    with ground(tmp_path) as it:

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                left: dict[tuple[Conversation, int], int] = {}
                for stranger in conversations(stack, it, 16):
                    for _ in range(25):
                        stream = stranger.begin(STREAM)
                        # First something honest, so that there is a place for the stream.
                        stranger.send_data(stream, packed(1) + message_prefix(size))
                        left[stranger, stream] = size - 1
                until = time.monotonic() + ATTACK_S
                while time.monotonic() < until:
                    sent = 0
                    for (stranger, stream), rest in left.items():
                        part = stranger.send_data(stream, bytes(min(rest, 2**18)))
                        left[stranger, stream] -= part
                        sent += part
                    if not sent:
                        time.sleep(0.01)

        it.attack(attack)


def send_for_a_while(it: Ground, message: bytes, *, connections: int, streams: int) -> None:
    """Send a message again and again on every stream of every connection."""
    with contextlib.ExitStack() as stack:
        unsent = {
            (stranger, stranger.begin(STREAM)): b""
            for stranger in conversations(stack, it, connections)
            for _ in range(streams)
        }
        until = time.monotonic() + ATTACK_S
        while time.monotonic() < until:
            for (stranger, stream), rest in unsent.items():
                data = rest or message
                sent = stranger.send_data(stream, data)
                unsent[stranger, stream] = data[sent:]
            time.sleep(0.001)


def test_more_appends_than_the_credit_as_fast_as_they_can_be_sent(tmp_path: Path) -> None:
    message = packed(STREAM_APPENDS_MAX)
    with ground(tmp_path) as it:
        it.attack(lambda: send_for_a_while(it, message, connections=2, streams=8))


def test_appends_that_are_cancelled_in_the_message_that_brings_them(tmp_path: Path) -> None:
    """They find room at once, whatever the credit: each message costs its sender a turn."""
    message = packed(STREAM_APPENDS_MAX, is_cancelled=True)
    with ground(tmp_path) as it:
        outcome = it.attack(lambda: send_for_a_while(it, message, connections=6, streams=16))
    assert outcome.call_count > CALLS_MIN, str(outcome)


@pytest.mark.long
def test_streams_whose_answers_are_never_taken(tmp_path: Path) -> None:
    message = packed(STREAM_APPENDS_MAX)
    with ground(tmp_path) as it, contextlib.ExitStack() as stack:

        def attack() -> None:
            strangers = conversations(stack, it, 8, setting(INITIAL_WINDOW_SIZE, 0))
            for _ in range(100):
                for stranger in strangers:
                    stream = stranger.begin(STREAM)
                    stranger.send_data(stream, message + message)
            time.sleep(ATTACK_S / 2)

        # They are still there when the server is told to end.
        it.attack(attack)


@pytest.mark.long
def test_streams_that_are_reset_after_an_append(tmp_path: Path) -> None:
    message = packed(4)
    with ground(tmp_path) as it:

        def attack() -> None:
            until = time.monotonic() + ATTACK_S
            while time.monotonic() < until:
                with Conversation(it.address) as stranger:
                    while time.monotonic() < until and not stranger.is_closed:
                        begun = []
                        for _ in range(50):
                            stream = stranger.begin(STREAM)
                            stranger.send_data(stream, message)
                            begun.append(stream)
                        for stream in begun:
                            stranger.reset(stream)
                        time.sleep(0.005)

        it.attack(attack)


@pytest.mark.long
def test_streams_that_are_given_up_as_soon_as_they_begin(tmp_path: Path) -> None:
    block = call_headers(STREAM)
    with ground(tmp_path) as it:

        def attack() -> None:
            until = time.monotonic() + ATTACK_S
            while time.monotonic() < until:
                with Conversation(it.address) as stranger:
                    first = 1
                    while time.monotonic() < until and not stranger.is_closed:
                        stranger.send(
                            b"".join(
                                frame(HEADERS, END_HEADERS, stream, block)
                                + frame(RST_STREAM, 0, stream, bytes(4))
                                for stream in range(first, first + 200, 2)
                            )
                        )
                        first += 200

        it.attack(attack)
