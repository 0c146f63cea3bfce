"""Breadbox with its defaults: payloads and journal in shared memory."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

import breadbox
from bench.peers.side import HELD_BYTES, main
from bench.processes import breadbox_server, memory_directory
from bench.workloads import SESSION_ID, WORKLOADS, numbered


class Breadbox:
    """A server, over what is opened for its store; each workload has a buffer."""

    def __init__(self, scheme: str, place: Callable[[], AbstractContextManager[Path]]) -> None:
        self._scheme, self._place = scheme, place

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start the store and a server."""
        with (
            self._place() as path,
            breadbox_server(
                f"{self._scheme}://{path}", "--capacity-bytes", str(HELD_BYTES)
            ) as server,
        ):
            for workload in WORKLOADS:
                with breadbox.connect(server.address, buffer=workload) as client:
                    client.create_buffer(workload)
                    client.start_session(SESSION_ID)
            yield server.address

    def call(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> "_Caller":
        """Connect; the fragments are those of the workload, fields and all."""
        del arrays
        return _Caller(address, workload)


_lock = threading.Lock()
_clients: dict[tuple[str, str], breadbox.Client] = {}
_appenders: dict[str, breadbox.Appender] = {}
"""This process', by workload: the threads of a process share one, as its users have it."""


class _Caller:
    def __init__(self, address: str, workload: str) -> None:
        with _lock:
            if (address, workload) not in _clients:
                _clients[address, workload] = breadbox.connect(address, buffer=workload)
            self._client = _clients[address, workload]
        self._workload = workload
        worker_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._successive = numbered(WORKLOADS[workload](), worker_id)

    def append(self, count: int) -> None:
        """Append; a refusal is an error."""
        if count == 1:
            results = [self._client.append(next(self._successive))]
        else:
            results = self._client.append_many(list(islice(self._successive, count)))
        assert all(each.outcome is breadbox.AdmissionOutcome.ADMITTED for each in results), results

    def batch(self, count: int) -> None:
        """Fetch under a lease, load, and release as consumed."""
        with self._client.fetch(fragment_count=count, max_wait_s=30.0) as lease:
            (batch,) = lease.batches(batch_size=count)
            assert len(batch.reward) == count

    def put(self) -> None:
        """Hand a fragment to the process' `Appender`."""
        self._appender.append(next(self._successive))

    def flush(self) -> None:
        """Wait until the server has answered all; a refusal is an error."""
        self._appender.flush()
        counts = self._appender.counts
        assert counts.admitted + counts.pending == counts.given, counts

    @cached_property
    def _appender(self) -> breadbox.Appender:
        with _lock:
            if self._workload not in _appenders:
                _appenders[self._workload] = breadbox.Appender(self._client)
            return _appenders[self._workload]

    def close(self) -> None:
        """Disconnect."""
        if self._workload in _appenders:
            _appenders.pop(self._workload).close()
        self._client.close()


if __name__ == "__main__":
    main(Breadbox("file", memory_directory))
