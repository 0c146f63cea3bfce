"""Payloads that are there and cannot be read: they end nobody, and are not served for ever."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

import breadbox
from breadbox.model.errors import PayloadCorruptError
from breadbox.model.types import BufferState
from breadbox.payload import encode_fragment
from breadbox.payload.format import parse_head
from breadbox.payload.fragments import Schema, schema_of
from breadbox.stores import open_store
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from breadbox_learner.training.source import LeaseSource
from hostile.harness import attacked_server
from support.forged_payloads import MIB, bomb_of, layout_of_parts
from support.fragments import vector_fragment
from support.load import CALL_S, SESSION, fragments_of
from support.server_process import ServerProcess

GARBAGE = {
    "eight bytes": b"\xff" * 8,
    "zeros": bytes(4096),
    "a prelude of another format": b"BREADBOX" + b"\xff" * 4088,
    "a layout of a million nodes": layout_of_parts(1_000_000),
    "a gigabyte of zeros": bomb_of(1, 1024 * MIB),
    "a head that is none": b"BREADBOX\x01\x00\x00\x00" + b"\x20\x00\x00\x00" + b"\x01" * 80,
}


def _schema_of_honest_fragments() -> Schema:
    payload = b"".join(encode_fragment(vector_fragment(0)))
    schema = schema_of(parse_head(memoryview(payload), len(payload)).layout)
    assert schema is not None
    return schema


SCHEMA = _schema_of_honest_fragments()


class Buffer:
    """A server that can be killed and started again, with a producer of good and bad payloads."""

    def __init__(self, server: ServerProcess, url: str, stack: ExitStack) -> None:
        self.server = server
        self.client = stack.enter_context(breadbox.connect(server.address))
        self.client.start_session(SESSION)
        self._store = open_store(url)
        stack.callback(self._store.close)
        self._channel = grpc.insecure_channel(server.address)
        stack.callback(self._channel.close)
        self._stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(self._channel)
        self._garbage_count = 0

    def append_good(self, index: int) -> None:
        self.client.append(vector_fragment(index, worker_id="honest", session_id=SESSION))

    def append_garbage(self, garbage: bytes) -> str:
        references = self._store.write_many([[memoryview(garbage)]])
        fragments = fragments_of(references, worker="mallory", first=self._garbage_count)
        for fragment in fragments:
            fragment.schema_hash = SCHEMA.hash  # A lie: else it would be refused.
        self._garbage_count += 1
        assert SCHEMA.message is not None
        request = pb.AppendFragmentsRequest(fragments=fragments, schemas=[SCHEMA.message])
        self._stub.AppendFragments(request, timeout=CALL_S)
        return references[0].payload_id

    @property
    def state(self) -> BufferState:
        return self.client.get_buffer().state

    @property
    def quarantined_count(self) -> int:
        return self.state.counters["chunks_evicted_quarantined"]


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    url = f"file://{tmp_path}/store"
    server = attacked_server("--store", url, "--uses-max", "4", log=tmp_path / "log")
    with ExitStack() as stack:
        server.start()
        stack.callback(server.stop)
        yield Buffer(server, url, stack)


def test_a_chunk_that_readers_cannot_read_is_quarantined_and_stays_so_over_a_restart(
    buffer: Buffer,
) -> None:
    wanted = [
        ("mallory", index, buffer.append_garbage(garbage))
        for index, garbage in enumerate(GARBAGE.values())
    ]
    for _ in GARBAGE:
        with pytest.raises(breadbox.ReplayBufferError), buffer.client.fetch(len(GARBAGE)) as lease:
            list(lease.fragments())
        if not buffer.quarantined_count:
            # What was counted so far has to outlive the process.
            buffer.server.kill()
            buffer.server.start()
        if not buffer.state.chunk_count:
            break
    buffer.server.kill()
    buffer.server.start()
    state = buffer.state
    assert 0 == state.chunk_count
    assert wanted == sorted(
        (named.worker_id, named.fragment_index, named.payload_id) for named in state.quarantined
    )
    assert len(GARBAGE) == buffer.quarantined_count
    buffer.append_good(0)
    with buffer.client.fetch(1) as lease:
        assert ["honest"] == [fragment.worker_id for fragment in lease.fragments()]


def test_a_learner_leaves_out_what_it_cannot_read_and_goes_on(buffer: Buffer) -> None:
    for index in range(3):
        buffer.append_good(index)
        buffer.append_garbage(GARBAGE["eight bytes"])
    source = LeaseSource(buffer.client, fragment_count=6)
    try:
        seen: list[list[int]] = []
        for _ in range(2):
            fetched = source.next(lambda: False)
            assert fetched is not None
            seen.append(sorted(fetched.batch.fragment_indices))
            assert 3 == fetched.misfit_count
            fetched.release(True)
    finally:
        source.close()
    assert [[0, 1, 2]] * 2 == seen
    assert (3, 3) == (buffer.state.chunk_count, buffer.quarantined_count)


def test_a_lease_that_fails_for_another_reason_names_nobody(buffer: Buffer) -> None:
    buffer.append_good(0)
    for _ in range(4):
        with pytest.raises(PayloadCorruptError), buffer.client.fetch(1):
            raise PayloadCorruptError("it only seemed so")
    assert (1, 0) == (buffer.state.chunk_count, buffer.quarantined_count)
