"""What a producer with a token of its own may try: a real server, an honest buffer, and lies.

An attack is refused, with its own reason where it has one, and the honest data stays as it was.
"""

import contextlib
import itertools
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

import breadbox
from breadbox.model.types import BufferState, PayloadReference
from breadbox.stores import open_store
from breadbox.stores.base import PayloadStore
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.access.authorization import SERVICE, Role
from breadbox_server.limits import EPISODES_MAX, MESSAGE_BYTES_MAX
from chaos import actors
from hostile.harness import ATTACK_S, attacked_server, ground
from support.load import CALL_S, SESSION, fragments_of
from support.raw_calls import called
from support.redis_server import RedisServer
from support.served import info_of, reason_of
from support.server_process import ServerProcess, status_bytes
from support.token_files import bearer

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
MIB = 1 << 20
HONEST_COUNT = 4


class Target:
    """A server with an honest producer's fragments in it, and what an attacker has: a stub and the
    store."""

    def __init__(
        self,
        server: ServerProcess,
        store: PayloadStore,
        capacity_bytes: int,
        token: str | None = None,
        session: str = SESSION,
    ) -> None:
        self.server = server
        self.address = address = server.address
        self.store = store
        self.capacity_bytes = capacity_bytes
        self.channel = grpc.insecure_channel(address)
        self.stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(self.channel)
        self._metadata = bearer(token)
        self.session = session

    def write(self, size_bytes: int) -> PayloadReference:
        (reference,) = self.store.write_many([[memoryview(secrets.token_bytes(size_bytes))]])
        return reference

    def append(
        self, *references: PayloadReference, worker: str = "mallory", first: int = 0
    ) -> list[int]:
        """What becomes of fragments whose payloads are said to be these."""
        fragments = fragments_of(references, worker=worker, first=first, session=self.session)
        return self.announce(fragments)

    def announce(self, fragments: Sequence[fragment_pb2.FragmentMetadata]) -> list[int]:
        request = pb.AppendFragmentsRequest(fragments=fragments)
        reply = called(self.stub.AppendFragments, request, timeout=CALL_S, metadata=self._metadata)
        return [result.outcome for result in reply.results]

    def refusal(self, *references: PayloadReference) -> str:
        """The reason with which an append is refused."""
        with pytest.raises(grpc.RpcError) as refused:
            self.append(*references)
        return reason_of(refused.value)

    def report(self, task: str, count: int) -> None:
        """Report episodes of a task, all in one call."""
        episode = pb.EpisodeReport(
            worker_id="mallory", task=task, return_sum=1.0, end=pb.EPISODE_END_TERMINATED
        )
        self.stub.ReportEpisodes(
            pb.ReportEpisodesRequest(episodes=[episode] * count),
            timeout=CALL_S,
            metadata=self._metadata,
        )

    def send(self, method: str, message: bytes) -> None:
        """Make a call with any bytes for its message."""
        call: Any = self.channel.unary_unary(SERVICE + method)
        call(message, timeout=CALL_S, metadata=self._metadata)

    def peak_bytes(self) -> int:
        """The most memory that the server has had."""
        return status_bytes(self.server.pid, "VmHWM")

    def stats(self) -> BufferState:
        with breadbox.connect(self.address) as client:
            return client.get_buffer().state


@pytest.fixture(params=["file", "redis"], scope="module")
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    tmp_path = tmp_path_factory.mktemp("hostile")
    if request.param == "file":
        yield from _serve(f"file://{tmp_path}/store", tmp_path, capacity_bytes=64 * MIB)
    else:
        with RedisServer() as redis_server:
            yield from _serve(redis_server.url, tmp_path, capacity_bytes=8192 * MIB)


def _serve(url: str, tmp_path: Path, *, capacity_bytes: int) -> Iterator[Target]:
    limits = ("--capacity-bytes", str(capacity_bytes))
    server = attacked_server("--store", url, *limits, log=tmp_path / "log")
    with ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        store = open_store(url)
        stack.callback(store.close)
        target = Target(server, store, capacity_bytes)
        stack.callback(target.channel.close)
        target.stub.StartSession(pb.StartSessionRequest(session_id=SESSION), timeout=CALL_S)
        honest = [target.write(1000) for _ in range(HONEST_COUNT)]
        assert [ADMITTED] * HONEST_COUNT == target.append(*honest, worker="honest")
        yield target
        assert HONEST_COUNT <= target.stats().chunk_count


def test_a_byte_that_claims_to_be_a_whole_buffer_evicts_nobody(target: Target) -> None:
    before = target.stats().chunk_count
    for claimed_bytes in (2, target.capacity_bytes):
        lie = PayloadReference(target.write(1).payload_id, claimed_bytes)
        assert "PAYLOAD_SIZE_MISMATCH" == target.refusal(lie)
    assert before == target.stats().chunk_count


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


@pytest.mark.parametrize("piece_size_bytes", [1, 1 << 16])
def test_payloads_that_claim_a_great_many_pieces_are_refused_before_one_is_named(
    target: Target, piece_size_bytes: int
) -> None:
    before = target.peak_bytes()
    for count in (1, 64):
        lies = [
            PayloadReference(secrets.token_hex(16), piece_size_bytes << 16, piece_size_bytes)
            for _ in range(count)
        ]
        assert "ARGUMENT_INVALID" == target.refusal(*lies)
    assert target.peak_bytes() - before < 16 * MIB


@pytest.mark.parametrize(
    "item", [b"\x12\x00", b"\x12\x02\x3a\x00", b"\x08\x01"], ids=["empty", "nested", "unknown"]
)
def test_messages_of_a_great_many_parts_cost_little_more_than_their_bytes(
    target: Target, item: bytes
) -> None:
    message = item * ((MESSAGE_BYTES_MAX - 100) // len(item))
    before = target.peak_bytes()
    for _ in range(8):
        with pytest.raises(grpc.RpcError) as refused:
            target.send("AppendFragments", message)
        assert "ARGUMENT_INVALID" == reason_of(refused.value)
    assert target.peak_bytes() - before < 64 * MIB
    assert [ADMITTED] == target.append(target.write(10), worker=f"after {item.hex()}")


def test_many_callers_that_claim_as_many_pieces_as_may_be_take_turns(target: Target) -> None:
    before = target.peak_bytes()

    def attack(number: int) -> list[int]:
        size_bytes = min(target.capacity_bytes, 8192 << 16)
        lie = PayloadReference(secrets.token_hex(16), size_bytes, 1 << 16)
        return target.append(lie, worker=f"mallory{number}")

    with ThreadPoolExecutor(32) as attackers:
        answers = list(attackers.map(attack, range(64)))
    assert [[fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING]] * 64 == answers
    assert target.peak_bytes() - before < 64 * MIB


def test_an_index_far_ahead_in_the_name_of_another_worker_costs_it_nothing(target: Target) -> None:
    for worker in ("honest", "honest and new"):
        lie = fragments_of([target.write(10)], worker=worker, first=2**48)
        with pytest.raises(grpc.RpcError) as refused:
            target.announce(lie)
        assert "ARGUMENT_INVALID" == reason_of(refused.value)
        assert "fragment_index" == dict(info_of(refused.value).metadata)["field"]
    assert [ADMITTED] == target.append(target.write(10), worker="honest", first=HONEST_COUNT)
    assert [ADMITTED] == target.append(target.write(10), worker="honest and new")


def test_workers_that_are_invented_lock_no_worker_out(tmp_path: Path) -> None:
    """Without tokens, and so without quotas."""
    limits = ("--workers-max", "100", "--capacity-chunks", "50")
    url = f"file://{tmp_path}/store"
    server = attacked_server("--store", url, *limits, log=tmp_path / "log")
    with ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        store = open_store(url)
        stack.callback(store.close)
        target = Target(server, store, 0)
        stack.callback(target.channel.close)
        target.stub.StartSession(pb.StartSessionRequest(session_id=SESSION), timeout=CALL_S)
        assert [ADMITTED] == target.append(target.write(10), worker="honest")
        for number in range(300):
            assert [ADMITTED] == target.append(target.write(10), worker=f"mallory{number}")
            if number % 40 == 0:
                index = 1 + number // 40
                assert [ADMITTED] == target.append(target.write(10), worker="honest", first=index)
        assert [ADMITTED] == target.append(target.write(10), worker="honest and new")
        server.kill()
        server.start()
        assert [ADMITTED] == target.append(target.write(10), worker="honest", first=9)
        assert 100 == target.stats().worker_count


def claim_sizes_and_pieces(target: Target, number: int) -> None:
    written = target.write(1)
    for lie in (
        PayloadReference(written.payload_id, 64 * MIB),
        PayloadReference(written.payload_id, 1 << 32, 1 << 16),
        PayloadReference(secrets.token_hex(16), 8192 << 16, 1 << 16),
    ):
        with contextlib.suppress(grpc.RpcError):
            target.append(lie, worker=f"mallory {number}")


def claim_many_pieces(target: Target, number: int) -> None:
    lies = [PayloadReference(secrets.token_hex(16), 1 << 32, 1 << 16) for _ in range(64)]
    target.append(*lies, worker=f"mallory {number}")


def jump_in_the_name_of_another(target: Target, number: int) -> None:
    target.append(target.write(1), worker="producer", first=2**48 + number)


def send_parts_that_are_empty(target: Target, number: int) -> None:
    target.send("AppendFragments", b"\x12\x00" * (MESSAGE_BYTES_MAX // 2 - 100))


def report_tasks_that_are_none(target: Target, number: int) -> None:
    target.report(f"invented {number}", EPISODES_MAX)


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "attack",
    [
        claim_sizes_and_pieces,
        claim_many_pieces,
        jump_in_the_name_of_another,
        send_parts_that_are_empty,
        report_tasks_that_are_none,
    ],
)
def test_an_honest_pair_beside_a_producer_that_lies_is_unharmed(
    tmp_path: Path, attack: Callable[[Target, int], None]
) -> None:
    """Four callers under a producer's token, one call after the other each."""
    store_url = f"file://{tmp_path / 'store'}"
    # What comes without a schema is refused before anybody looks at the rest, unless all may come.
    with (
        ground(tmp_path, "--schema", "any", has_tokens=True) as it,
        contextlib.closing(open_store(store_url)) as store,
    ):

        def attack_for_a_while(_: int) -> int:
            token = it.tokens[Role.PRODUCER]
            target = Target(it.server, store, 0, token, session=actors.SESSION)
            with contextlib.closing(target.channel):
                until = time.monotonic() + ATTACK_S
                for number in itertools.count():
                    with contextlib.suppress(grpc.RpcError):
                        attack(target, number)
                    if time.monotonic() > until:
                        return number
            raise AssertionError

        with ThreadPoolExecutor(4) as attackers:
            it.attack(
                lambda: sys.stdout.write(f"{[*attackers.map(attack_for_a_while, range(4))]} ")
            )
