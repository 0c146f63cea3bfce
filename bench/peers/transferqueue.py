"""TransferQueue with its default store, in a Ray of its own. In an environment of its own.

Makes one partition per workload; a sample's fields are a fragment's arrays.
"""

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from tensordict import TensorDict

from bench.peers.side import held_max, main

_TASK = "learn"
_WHOLE_GROUP_BYTES_MAX = 64 * 2**20
"""Larger groups go one by one, which is the faster way with those."""


class TransferQueue:
    """A controller and two storage units, as its default configuration has it."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start Ray and it; the address is a file with its configuration."""
        directory = Path(tempfile.mkdtemp(prefix="breadbox-bench-", dir="/tmp"))
        ray.init(
            num_cpus=max(4, os.cpu_count() or 1),  # Three actors take one each.
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _temp_dir=str(directory / "ray"),
        )
        try:
            configuration = transfer_queue.init()
            (directory / "configuration").write_bytes(pickle.dumps(configuration))
            yield str(directory / "configuration")
            transfer_queue.close()
        finally:
            ray.shutdown()
            shutil.rmtree(directory, ignore_errors=True)

    def call(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> "_Caller":
        """Connect, as `transfer_queue.init()` does once it knows the configuration."""
        return _Caller(_client(address), workload, arrays)


_clients: dict[str, transfer_queue.TransferQueueClient] = {}


def _client(address: str) -> transfer_queue.TransferQueueClient:
    """Return this process' client: it is made for many threads, as its users have it."""
    if address not in _clients:
        configuration = pickle.loads(Path(address).read_bytes())
        store = configuration.backend.storage_backend
        client = transfer_queue.TransferQueueClient(
            client_id=f"client-{os.getpid()}", controller_info=configuration.controller.zmq_info
        )
        client.initialize_storage_manager(manager_type=store, config=configuration.backend[store])
        _clients[address] = client
    return _clients[address]


class _Caller:
    def __init__(
        self,
        client: transfer_queue.TransferQueueClient,
        workload: str,
        arrays: Sequence[np.ndarray],
    ) -> None:
        self._client = client
        self._partition = workload
        self._tensors = {
            f"field{number}": torch.from_numpy(np.array(array))
            for number, array in enumerate(arrays)
        }
        self._bytes = sum(array.nbytes for array in arrays)
        self._held, self._held_max = 0, held_max(self._bytes)

    def append(self, count: int) -> None:
        """Put a group, or one by one what is too large for that; take out what is beyond."""
        self._held += count
        if self._held > self._held_max:
            self._client.clear_samples(self._taken(count))
        is_whole = count * self._bytes <= _WHOLE_GROUP_BYTES_MAX
        for _ in range(1 if is_whole else count):
            size = count if is_whole else 1
            fields = {
                name: torch.stack([each] * size) if size > 1 else each.unsqueeze(0)
                for name, each in self._tensors.items()
            }
            self._client.put(TensorDict(fields, batch_size=size), partition_id=self._partition)

    def batch(self, count: int) -> None:
        """Ask for what is there, get it, and clear it."""
        metadata = self._taken(count)
        data = self._client.get_data(metadata)
        self._client.clear_samples(metadata)
        assert len(data) == count

    def _taken(self, count: int) -> Any:
        """The oldest samples, which nobody else is given from here on."""
        self._held -= count
        return self._client.get_meta(
            data_fields=list(self._tensors),
            batch_size=count,
            partition_id=self._partition,
            mode="fetch",
            task_name=_TASK,
        )

    def close(self) -> None:
        """Nothing: the client is the process'."""


if __name__ == "__main__":
    main(TransferQueue())
