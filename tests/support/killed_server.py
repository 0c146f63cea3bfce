"""A server that is killed and started again, for tests of what it finds then."""

import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from breadbox.model.types import PayloadReference
from breadbox.stores import open_store
from breadbox.v1 import buffer_pb2, fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.raw_calls import called
from support.server_process import ServerProcess

CALL_S = 20.0
ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED


class World:
    """A server that can be killed, its store, and a stub that finds it again."""

    def __init__(self, stack: ExitStack, store_url: str, log: Path, *arguments: str) -> None:
        self.server = ServerProcess("--store", store_url, *arguments, log=log)
        stack.enter_context(self.server)
        options = [("grpc.max_reconnect_backoff_ms", 200)]
        channel = stack.enter_context(grpc.insecure_channel(self.server.address, options))
        self.stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        self.store = open_store(store_url)
        stack.callback(self.store.close)
        self.log = log

    def crash(self) -> None:
        """Kill the server and start it again."""
        self.server.kill()
        self.server.start()

    def lose(self, fragments: Sequence[fragment_pb2.FragmentMetadata]) -> None:
        """Take payloads out of the store behind the server's back."""
        self.store.delete_many([reference_of(fragment) for fragment in fragments])
        store_url = self.server.arguments[1]
        if store_url.startswith("file://"):
            root = Path(store_url.removeprefix("file://"))
            for fragment in fragments:
                for path in root.rglob(fragment.payload.payload_id):
                    path.unlink()

    def call(self, method: str, request: Message) -> Any:
        return called(getattr(self.stub, method), request, timeout=CALL_S, wait_for_ready=True)

    def scrape(self) -> str:
        """What Prometheus would read."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=CALL_S) as reply:
            return reply.read().decode()

    def start_session(self) -> None:
        self.call("StartSession", pb.StartSessionRequest(session_id="run"))

    def write(self, count: int = 1) -> list[PayloadReference]:
        return self.store.write_many([[memoryview(b"x" * 500)]] * count)

    def fragments(
        self, count: int, *, worker: str = "w", first: int = 0, version: int = 0
    ) -> list[fragment_pb2.FragmentMetadata]:
        return [
            fragment_pb2.FragmentMetadata(
                worker_id=worker,
                fragment_index=first + position,
                session_id="run",
                model_version_min=version,
                model_version_max=version,
                step_count=4,
                payload=wire_payload(reference),
            )
            for position, reference in enumerate(self.write(count))
        ]

    def append(self, fragments: Sequence[fragment_pb2.FragmentMetadata]) -> list[tuple[int, int]]:
        reply = self.call("AppendFragments", pb.AppendFragmentsRequest(fragments=fragments))
        return [(result.outcome, result.first_outcome) for result in reply.results]

    def fetch(self, request_id: str, count: int, **fields: Any) -> pb.FetchGrant:
        request = pb.FetchFragmentsRequest(request_id=request_id, fragment_count=count, **fields)
        return self.call("FetchFragments", request).grant

    def buffer(self, name: str = "default") -> buffer_pb2.Buffer:
        """A buffer without the time since it was last used, which goes on."""
        buffer: buffer_pb2.Buffer = self.call("GetBuffer", pb.GetBufferRequest(name=name)).buffer
        buffer.state.ClearField("idle_duration")
        return buffer

    def durable_buffer(self) -> buffer_pb2.Buffer:
        """A buffer without the counters of what changed nothing."""
        buffer = self.buffer()
        for name in [*buffer.state.counters]:
            if name.startswith(("fetches_", "fragments_")) and "discarded" not in name:
                del buffer.state.counters[name]
        return buffer


def wire_payload(reference: PayloadReference) -> fragment_pb2.PayloadReference:
    return fragment_pb2.PayloadReference(
        payload_id=reference.payload_id,
        size_bytes=reference.size_bytes,
        piece_size_bytes=reference.piece_size_bytes,
    )


def reference_of(fragment: fragment_pb2.FragmentMetadata) -> PayloadReference:
    payload = fragment.payload
    return PayloadReference(payload.payload_id, payload.size_bytes, payload.piece_size_bytes)
