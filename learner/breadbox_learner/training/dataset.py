"""A buffer as a torch dataset: batches for a `DataLoader`, with or without worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Unpack
from uuid import uuid4

from torch.utils.data import IterableDataset, get_worker_info

import breadbox
from breadbox.model.errors import InvalidRequestError
from breadbox.reading.batches import Batch
from breadbox.reading.loading import LoaderKeywords


class FragmentDataset(IterableDataset[Batch]):
    """Batches of fragments, as torch tensors, fetched on demand.

    Pass it to `DataLoader(dataset, batch_size=None)`: it makes the batches itself. Each worker
    process of a `DataLoader` has a client and fetches chunks of its own, so no two get the same use
    of a chunk. With worker processes, pass `multiprocessing_context="spawn"`, because gRPC does not
    survive a fork. Workers may be persistent.

    A chunk counts as used once its process has yielded all batches of the fetch. An iteration that
    is left early returns the use of its last fetch.

    Args:
        address: Address of the server.
        fragment_count: Fragments of one fetch.
        batch_size: Fragments of a batch; see `breadbox.types.Lease.batches`.
        fetch_count: Fetches of one iteration, shared by the worker processes, or None for endless.
        max_wait_s: Seconds to wait for one fetch.
        buffer: Name of the buffer.
        token: Bearer token, if the server requires one.
        columns: Names of the arrays to load, or None for all.
        **options: How to load; see `breadbox.types.LoaderOptions`. A `DataLoader` with worker
            processes keeps batches that they have handed out: `max_staleness_at_use` does not
            cover that wait.

    Raises (while iterating):
        WaitElapsedError: No fragments came for `max_wait_s`.
        ReplayBufferError: The server is unreachable, or refuses.
    """

    def __init__(
        self,
        address: str,
        *,
        fragment_count: int,
        batch_size: int,
        fetch_count: int | None = None,
        max_wait_s: float = 60.0,
        buffer: str = "default",
        token: str | None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> None:
        if fetch_count is not None and fetch_count < 0:
            raise InvalidRequestError("fetch_count", f"must be at least 0, got {fetch_count}")
        self._address = address
        self._fragment_count = fragment_count
        self._batch_size = batch_size
        self._fetch_count = fetch_count
        self._max_wait_s = max_wait_s
        self._buffer = buffer
        self._token = token
        self._columns = columns
        self._options = options

    def __iter__(self) -> Iterator[Batch]:
        left = self._own_fetch_count()
        with breadbox.connect(self._address, buffer=self._buffer, token=self._token) as client:
            while left is None or left > 0:
                yield from self._fetched(client)
                left = None if left is None else left - 1

    def _own_fetch_count(self) -> int | None:
        worker = get_worker_info()
        if self._fetch_count is None or worker is None:
            return self._fetch_count
        whole, rest = divmod(self._fetch_count, worker.num_workers)
        return whole + (worker.id < rest)

    def _fetched(self, client: breadbox.Client) -> Iterator[Batch]:
        with client.fetch(self._fragment_count, self._max_wait_s, request_id=uuid4().hex) as lease:
            for batch in lease.batches(self._batch_size, columns=self._columns, **self._options):
                # Without the stacked memory, which would be copied to the main process again.
                yield replace(batch.to_torch(), stacked=None)
