"""Producers that append through raw stubs until their server refuses, and know what was said."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack

import grpc

from breadbox.model.types import PayloadReference
from breadbox.stores import open_store
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.eventually import eventually_sync

CALL_S = 20.0
LOAD_CALL_S = 5.0
"""A producer whose server was replaced waits no longer than this."""
SESSION = "run"


def wire_payload(reference: PayloadReference) -> fragment_pb2.PayloadReference:
    """A reference as a request carries it."""
    return fragment_pb2.PayloadReference(
        payload_id=reference.payload_id,
        size_bytes=reference.size_bytes,
        piece_size_bytes=reference.piece_size_bytes,
    )


def fragments_of(
    references: Sequence[PayloadReference],
    *,
    worker: str = "w",
    first: int = 0,
    version: int = 0,
    session: str = SESSION,
) -> list[fragment_pb2.FragmentMetadata]:
    """Consecutive fragments of one worker, of payloads that are written."""
    return [
        fragment_pb2.FragmentMetadata(
            worker_id=worker,
            fragment_index=first + position,
            session_id=session,
            model_version_min=version,
            model_version_max=version,
            step_count=4,
            payload=wire_payload(reference),
        )
        for position, reference in enumerate(references)
    ]


class Load:
    """Appends fragments one call after the other, from several workers, until an append fails.

    A context manager; `acknowledged` holds every fragment that the server called admitted.
    """

    def __init__(self, address: str, store_url: str, *, workers: int = 4, group: int = 5) -> None:
        self._address = address
        self._store_url = store_url
        self._group = group
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.acknowledged: set[tuple[str, int]] = set()
        """(worker, fragment index)."""
        self.attempted: set[tuple[str, int]] = set()
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(f"load{number}",), name=f"load{number}")
            for number in range(workers)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all producers after the calls that they are in."""
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_S * 3)
            assert not thread.is_alive(), "an append never ended"

    def wait_for(self, count: int) -> None:
        """Return once so many fragments are acknowledged."""
        eventually_sync(lambda: len(self.acknowledged) >= count, "acknowledged fragments")

    def wait_end(self) -> None:
        """Return once every producer was refused."""
        for thread in self._threads:
            thread.join(CALL_S * 3)
            assert not thread.is_alive(), "an append never ended"

    def _run(self, worker: str) -> None:
        with ExitStack() as stack:
            store = open_store(self._store_url)
            stack.callback(store.close)
            channel = stack.enter_context(grpc.insecure_channel(self._address))
            stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
            first = 0
            while not self._stop.is_set():
                references = store.write_many([[memoryview(b"x" * 200)]] * self._group)
                batch = fragments_of(references, worker=worker, first=first)
                identities = {(worker, first + position) for position in range(self._group)}
                with self._lock:
                    self.attempted |= identities
                try:
                    reply = stub.AppendFragments(
                        pb.AppendFragmentsRequest(fragments=batch), timeout=LOAD_CALL_S
                    )
                except grpc.RpcError as error:
                    with self._lock:
                        self.failures.append(str(error.code()))
                    return
                with self._lock:
                    self.acknowledged |= {
                        (worker, first + position)
                        for position, result in enumerate(reply.results)
                        if result.outcome == fragment_pb2.ADMISSION_OUTCOME_ADMITTED
                    }
                first += self._group
