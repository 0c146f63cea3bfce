"""Callers that ask for a great deal and take none of it: the server's memory is not theirs."""

import contextlib
import time
from pathlib import Path

import grpc
import pytest

from breadbox.stores import open_store
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.access.authorization import Role
from breadbox_server.limits import UNTAKEN_BYTES_OF
from breadbox_server.rpc.traffic import UNTAKEN_PATIENCE_S
from hostile.harness import ATTACK_S, MIB, Ground, ground
from support.http2 import (
    DATA,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    Conversation,
    frame,
    message_prefix,
    setting,
)
from support.load import CALL_S, fragments_of
from support.token_files import bearer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

READ = "/breadbox.v1.ReplayBufferService/ReadFragments"
SPOIL = "spoil"
LONG_NAME = "w" * 120
KIB = 1024
CHUNKS = 4096
WANTED = pb.ReadFragmentsRequest(buffer=SPOIL, chunk_count_max=CHUNKS).SerializeToString()
ANSWER_BYTES_MIN = MIB
"""Of an answer to this."""
SLACK_BYTES = 32 * MIB
CONNECTIONS = 4
CALLS = 250
"""On each of them."""
both_kinds = pytest.mark.parametrize(
    "has_tokens",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["anonymous", "learner"],
)


def fill(it: Ground) -> None:
    """Make a buffer of which the list alone is more than a megabyte."""
    metadata = bearer(it.tokens.get(Role.ADMIN))
    with (
        contextlib.closing(open_store(it.store_url)) as store,
        grpc.insecure_channel(it.address) as channel,
    ):
        stub = ReplayBufferServiceStub(channel)
        created = pb.CreateBufferRequest(name=SPOIL)
        stub.CreateBuffer(created, timeout=CALL_S, metadata=metadata)
        started = pb.StartSessionRequest(buffer=SPOIL, session_id=LONG_NAME)
        stub.StartSession(started, timeout=CALL_S, metadata=metadata)
        for first in range(0, CHUNKS, 512):
            fragments = fragments_of(
                store.write_many([[memoryview(b"x")]] * 512),
                worker=LONG_NAME,
                first=first,
                session=LONG_NAME,
            )
            appended = pb.AppendFragmentsRequest(buffer=SPOIL, fragments=fragments)
            stub.AppendFragments(appended, timeout=CALL_S, metadata=metadata)


def ask(stranger: Conversation, path: str, message: bytes, token: str | None) -> int:
    """Make a call, whole, and wait for nothing; gives its stream."""
    fields = [(key.encode(), value.encode()) for key, value in bearer(token)]
    stream = stranger.begin(path, *fields)
    stranger.send(frame(DATA, END_STREAM, stream, message_prefix(len(message)) + message))
    return stream


def greedy(stack: contextlib.ExitStack, it: Ground, count: int) -> list[Conversation]:
    """Connections on which no byte of an answer may come."""
    window = setting(INITIAL_WINDOW_SIZE, 0)
    return [stack.enter_context(Conversation(it.address, window)) for _ in range(count)]


@both_kinds
def test_answers_that_are_never_taken_take_no_memory_of_the_servers(
    tmp_path: Path, has_tokens: bool
) -> None:
    with ground(tmp_path, has_tokens=has_tokens) as it:
        fill(it)
        # Of its own: what a token's answers may take is for all who have that token.
        token = it.add_tokens("learner greedy")[0] if has_tokens else None

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                strangers = greedy(stack, it, CONNECTIONS)
                for _ in range(CALLS):
                    for stranger in strangers:
                        ask(stranger, READ, WANTED, token)
                time.sleep(ATTACK_S)

        outcome = it.attack(attack)
    # gRPC has each answer twice.
    allowed_bytes = 2 * (UNTAKEN_BYTES_OF["connection"] * CONNECTIONS + SLACK_BYTES)
    assert outcome.peak_bytes - outcome.start_bytes < allowed_bytes, str(outcome)


@pytest.mark.long
def test_a_slow_reader_is_answered_beside_teams_that_take_nothing(tmp_path: Path) -> None:
    """Together they may hold all there is to hold; whoever holds less has its share."""
    with ground(tmp_path, has_tokens=True) as it:
        fill(it)
        *teams, slow_team = it.add_tokens(*(f"learner team-{each}" for each in range(6)))

        def attack() -> None:
            with contextlib.ExitStack() as stack:
                for token in teams:
                    for stranger in greedy(stack, it, 2):
                        for _ in range(UNTAKEN_BYTES_OF["connection"] // ANSWER_BYTES_MIN):
                            ask(stranger, READ, WANTED, token)
                        time.sleep(0.5)
                time.sleep(UNTAKEN_PATIENCE_S + 1.0)
                (slow,) = greedy(stack, it, 1)
                stream = ask(slow, READ, WANTED, slow_team)
                until = time.monotonic() + 20.0
                while stream not in slow.ended_streams and time.monotonic() < until:
                    slow.take(stream, 128 * KIB)
                    time.sleep(0.1)
                assert slow.data_bytes[stream] > ANSWER_BYTES_MIN

        it.attack(attack)
