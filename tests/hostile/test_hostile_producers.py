"""What a producer with a token of its own may try: a real server, an honest buffer, and lies.

An attack is refused, with its own reason where it has one, and the honest data stays as it was.
"""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

import breadbox
from breadbox.stores import open_store
from breadbox.stores.base import PayloadStore
from breadbox.types import BufferState, PayloadReference
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.load import CALL_S, SESSION, fragments_of
from support.redis_server import RedisServer
from support.served import reason_of
from support.server_process import ServerProcess

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
MIB = 1 << 20
HONEST_COUNT = 4


class Target:
    """A server with an honest producer's fragments in it, and what an attacker has: a stub and the
    store."""

    def __init__(self, address: str, store: PayloadStore) -> None:
        self.address = address
        self.store = store
        self.channel = grpc.insecure_channel(address)
        self.stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(self.channel)

    def write(self, size_bytes: int) -> PayloadReference:
        (reference,) = self.store.write_many([[memoryview(secrets.token_bytes(size_bytes))]])
        return reference

    def append(
        self, *references: PayloadReference, worker: str = "mallory", first: int = 0
    ) -> list[int]:
        """What becomes of fragments whose payloads are said to be these."""
        fragments = fragments_of(references, worker=worker, first=first)
        reply = self.stub.AppendFragments(
            pb.AppendFragmentsRequest(fragments=fragments), timeout=CALL_S
        )
        return [result.outcome for result in reply.results]

    def refusal(self, *references: PayloadReference) -> str:
        """The reason with which an append is refused."""
        with pytest.raises(grpc.RpcError) as refused:
            self.append(*references)
        return reason_of(refused.value)

    def stats(self) -> BufferState:
        with breadbox.connect(self.address) as client:
            return client.get_buffer().state


@pytest.fixture(params=["file", "redis"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    if request.param == "file":
        yield from _serve(f"file://{tmp_path}/store", tmp_path)
    else:
        with RedisServer() as redis_server:
            yield from _serve(redis_server.url, tmp_path)


def _serve(url: str, tmp_path: Path) -> Iterator[Target]:
    server = ServerProcess("--store", url, "--capacity-bytes", "64MiB", log=tmp_path / "log")
    with ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        store = open_store(url)
        stack.callback(store.close)
        target = Target(server.address, store)
        stack.callback(target.channel.close)
        target.stub.StartSession(pb.StartSessionRequest(session_id=SESSION), timeout=CALL_S)
        honest = [target.write(1000) for _ in range(HONEST_COUNT)]
        assert [ADMITTED] * HONEST_COUNT == target.append(*honest, worker="honest")
        yield target
        assert HONEST_COUNT <= target.stats().chunk_count


def test_a_byte_that_claims_to_be_a_whole_buffer_evicts_nobody(target: Target) -> None:
    for claimed_bytes in (2, 64 * MIB):
        lie = PayloadReference(target.write(1).payload_id, claimed_bytes)
        assert "PAYLOAD_SIZE_MISMATCH" == target.refusal(lie)
    assert HONEST_COUNT == target.stats().chunk_count


def test_a_large_payload_that_claims_to_be_a_byte_takes_no_room_in_the_books(
    target: Target,
) -> None:
    before = target.stats()
    written = target.write(50 * MIB)
    for lie in (
        PayloadReference(written.payload_id, 1),
        PayloadReference(written.payload_id, written.size_bytes - 1, written.piece_size_bytes),
        PayloadReference(written.payload_id, 1, written.piece_size_bytes),
    ):
        assert "PAYLOAD_SIZE_MISMATCH" == target.refusal(lie)
    after = target.stats()
    assert (before.chunk_count, before.payload_bytes) == (after.chunk_count, after.payload_bytes)
