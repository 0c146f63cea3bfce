"""Who has a producer's token and a gateway, and means ill: the honest pair behind the same gateway,
with tokens of its own, is unharmed."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.tokens import new_token
from hostile.harness import ATTACK_S, Ground, ground
from support.eventually import eventually_sync
from support.served import reason_of
from support.token_files import bearer, line_of

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(180)]

MIB = 2**20


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
def strangers(it: Ground, folder: Path, count: int) -> Iterator[list[Stranger]]:
    """Connections of one token, which the server has got to know."""
    token = new_token()
    with (folder / "tokens").open("a") as file:
        file.write(line_of("producer stranger", token))
    # Whoever asks again and again before is hung up on.
    asking, *them = (Stranger(it, token) for _ in range(1 + count))

    def is_known() -> bool:
        try:
            asking.stub.GetStoreConfig(pb.GetStoreConfigRequest(), metadata=asking.metadata)
        except grpc.RpcError:
            return False
        return True

    eventually_sync(is_known, "the token being known")
    yield them
    for each in (asking, *them):
        each.channel.close()


def test_writes_that_are_never_finished(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", has_tokens=True) as it:
        is_over = threading.Event()

        def half() -> Iterator[pb.WritePayloadsRequest]:
            yield pb.WritePayloadsRequest(size_bytes=[4 * MIB], data=bytes(400_000))
            is_over.wait(2 * ATTACK_S)

        def attack() -> None:
            with strangers(it, tmp_path, 8) as them:
                calls = [each.write(half()) for each in them for _ in range(40)]
                time.sleep(ATTACK_S)
                is_over.set()
                for call in calls:
                    call.cancel()

        it.attack(attack)


def test_payloads_that_are_never_announced(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", "--gateway-unannounced", "64MiB", has_tokens=True) as it:
        refused: list[str] = []

        def attack() -> None:
            with strangers(it, tmp_path, 1) as (stranger,):
                until = time.monotonic() + ATTACK_S
                while time.monotonic() < until:
                    refused.append(stranger.written(4 * MIB))

        it.attack(attack)
        assert 16 == refused.count("")
        assert {"", "GATEWAY_FULL"} == set(refused)


def test_readers_that_take_nothing(tmp_path: Path) -> None:
    with ground(tmp_path, "--gateway", has_tokens=True) as it:

        def attack() -> None:
            with strangers(it, tmp_path, 8) as them:
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
