"""Breadbox, with its defaults, over a Redis of its own."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

import breadbox
from bench.peers.side import HELD_BYTES, main
from bench.processes import breadbox_server, redis_server
from bench.workloads import SESSION_ID, WORKLOADS, numbered


class Breadbox:
    """A server; each workload has a buffer."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start Redis and a server."""
        with (
            redis_server() as path,
            breadbox_server(f"unix://{path}", "--capacity-bytes", str(HELD_BYTES)) as server,
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


class _Caller:
    def __init__(self, address: str, workload: str) -> None:
        self._client = breadbox.connect(address, buffer=workload)
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

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


if __name__ == "__main__":
    main(Breadbox())
