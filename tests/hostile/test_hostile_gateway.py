"""Who has a producer's token and a gateway, and means ill: the honest pair behind the same gateway,
with tokens of its own, is unharmed."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import breadbox
from breadbox.model.types import PayloadReference
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.access.authorization import Role
from breadbox_server.limits import GATEWAY_CALLS_OF, UNANNOUNCED_BYTES_MAX
from chaos.actors import SESSION
from hostile.harness import ATTACK_S, Ground, ground
from support.eventually import eventually_sync
from support.load import CALL_S, fragments_of
from support.served import reason_of
from support.token_files import bearer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MIB = 2**20
PUBLISH_S_MAX = 10.0
"""Some parts of a payload, behind a second of patience for who is slow."""


class Stranger:
    """One connection with a producer's token of its own team."""

    def __init__(self, it: Ground, token: str) -> None:
        self.channel = grpc.insecure_channel(
            it.address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = ReplayBufferServiceStub(self.channel)
        self.metadata = bearer(token)

    def write(self, messages: Iterator[pb.WritePayloadsRequest]) -> Any:
        return self.stub.WritePayloads(messages, metadata=self.metadata)

    def read(self, payload: fragment_pb2.PayloadReference) -> bytes:
        """All of a payload."""
        whole = pb.PayloadRange(payload=payload, length_bytes=payload.size_bytes)
        request = pb.ReadPayloadsRequest(ranges=[whole])
        answers = self.stub.ReadPayloads(request, metadata=self.metadata, timeout=CALL_S)
        return b"".join(answer.data for answer in answers)

    def refusal(self, payload: fragment_pb2.PayloadReference) -> str:
        """The reason for which a payload is not read."""
        with pytest.raises(grpc.RpcError) as refused:
            self.read(payload)
        return reason_of(refused.value)

    def written(self, size_bytes: int) -> str:
        """The reason for which a whole write is refused; empty: it is not."""
        sizes = [size_bytes]
        messages = []
        for at in range(0, size_bytes, MIB):
            data = bytes(min(MIB, size_bytes - at))
            messages.append(pb.WritePayloadsRequest(size_bytes=sizes, data=data))
            sizes = []
        try:
            return "" if list(self.write(iter(messages))) else "nothing"
        except grpc.RpcError as error:
            return reason_of(error)


@contextlib.contextmanager
def strangers(it: Ground, count: int, *, teams: int = 1) -> Iterator[list[Stranger]]:
    """Connections of one token, or of each of several, which the server has got to know."""
    tokens = it.add_tokens(*(f"producer stranger-{team}" for team in range(teams)))
    them = [Stranger(it, token) for token in tokens for _ in range(count)]
    yield them
    for each in them:
        each.channel.close()


def calls_in_progress(it: Ground) -> int:
    (line,) = re.findall(r"^breadbox_gateway_calls (\S+)$", it.read_metrics(), re.MULTILINE)
    return int(float(line))


@pytest.mark.long
def test_writes_that_are_never_finished(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", has_tokens=True) as it:
        is_over = threading.Event()

        def half() -> Iterator[pb.WritePayloadsRequest]:
            yield pb.WritePayloadsRequest(size_bytes=[4 * MIB], data=bytes(400_000))
            is_over.wait(2 * ATTACK_S)

        def attack() -> None:
            with strangers(it, 8) as them:
                calls = [each.write(half()) for each in them for _ in range(40)]
                time.sleep(ATTACK_S)
                assert calls_in_progress(it) == GATEWAY_CALLS_OF["token"]
                is_over.set()
                for call in calls:
                    call.cancel()

        it.attack(attack)


def test_who_says_much_and_sends_a_byte_leaves_others_their_share(tmp_path: Path) -> None:
    """Four tokens hold every place and have said all the bytes that there may be altogether."""
    calls_of_each = GATEWAY_CALLS_OF["token"]
    size_bytes = UNANNOUNCED_BYTES_MAX // calls_of_each
    with ground(tmp_path, "--gateway", has_tokens=True) as it:
        is_over = threading.Event()

        def one_byte() -> Iterator[pb.WritePayloadsRequest]:
            yield pb.WritePayloadsRequest(size_bytes=[size_bytes], data=b"x")
            is_over.wait(60.0)

        def attack() -> None:
            with strangers(it, 4, teams=4) as them:
                calls = [each.write(one_byte()) for each in them for _ in range(calls_of_each // 4)]
                eventually_sync(lambda: calls_in_progress(it) == 4 * calls_of_each, "every place")
                with breadbox.connect(it.address, token=it.tokens[Role.LEARNER]) as learner:
                    began_at = time.monotonic()
                    learner.publish(SESSION, 1, {"weights": np.zeros(4 * MIB, np.uint8)})
                    took_s = time.monotonic() - began_at
                is_over.set()
                for call in calls:
                    call.cancel()
            assert took_s < PUBLISH_S_MAX

        it.attack(attack)


def test_a_payload_of_another_team_is_missing_for_whoever_knows_its_id(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", has_tokens=True) as it:
        lines = ("producer a buffers=a", "learner a-reads buffers=a", "learner b-reads buffers=b")
        writer, reader, stranger = (Stranger(it, token) for token in it.add_tokens(*lines))
        admin = Stranger(it, it.tokens[Role.ADMIN])
        for name in ("a", "b"):
            created = pb.CreateBufferRequest(name=name)
            admin.stub.CreateBuffer(created, metadata=admin.metadata, timeout=CALL_S)
            started = pb.StartSessionRequest(buffer=name, session_id=SESSION)
            admin.stub.StartSession(started, metadata=admin.metadata, timeout=CALL_S)
        message = pb.WritePayloadsRequest(size_bytes=[9], data=b"a's alone")
        *_, answer = writer.write(iter([message]))
        (payload,) = answer.payloads
        assert b"a's alone" == writer.read(payload)
        assert ["PAYLOAD_MISSING"] * 2 == [reader.refusal(payload), stranger.refusal(payload)]

        fragment = fragments_of([PayloadReference(payload.payload_id, 9)], session=SESSION)
        appended = pb.AppendFragmentsRequest(buffer="a", fragments=fragment)
        writer.stub.AppendFragments(appended, metadata=writer.metadata, timeout=CALL_S)
        assert b"a's alone" == reader.read(payload)
        assert ["PAYLOAD_MISSING"] * 2 == [writer.refusal(payload), stranger.refusal(payload)]


@pytest.mark.long
def test_payloads_that_are_never_announced(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", "--gateway-unannounced", "64MiB", has_tokens=True) as it:
        refused: list[str] = []

        def attack() -> None:
            with strangers(it, 1) as (stranger,):
                until = time.monotonic() + ATTACK_S
                while time.monotonic() < until:
                    refused.append(stranger.written(4 * MIB))

        it.attack(attack)
        assert 16 == refused.count("")
        assert {"", "GATEWAY_FULL"} == set(refused)


@pytest.mark.long
def test_readers_that_take_nothing(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", has_tokens=True) as it:

        def attack() -> None:
            with strangers(it, 8) as them:
                message = pb.WritePayloadsRequest(size_bytes=[MIB], data=bytes(MIB))
                (answer,) = them[0].write(iter([message]))
                wanted = pb.PayloadRange(payload=answer.payloads[0], length_bytes=MIB)
                request = pb.ReadPayloadsRequest(ranges=[wanted] * 512)
                calls = [
                    each.stub.ReadPayloads(request, metadata=each.metadata)
                    for each in them
                    for _ in range(40)
                ]
                time.sleep(ATTACK_S)
                for call in calls:
                    call.cancel()

        it.attack(attack)
