"""Where a learner's batches come from."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from breadbox import Client, Lease
from breadbox.batches import load_batch
from breadbox.errors import WaitElapsedError
from breadbox.types import ReleaseMode
from breadbox_learner.batching import TrainingBatch, training_batch


@dataclass(slots=True)
class FetchedBatch:
    """A batch and what is known of how it came."""

    batch: TrainingBatch
    staleness: list[int]
    """Versions, one per fragment, at the moment of the grant."""
    use_count: list[int]
    """Deliveries of each fragment's chunk, this one included."""
    wait_s: float
    """Seconds from the request to the grant."""
    load_s: float
    """Seconds from the grant to the stacked batch."""
    waiting_reason: str
    """What the server waited for last, in its words; empty when it granted at once."""
    release: Callable[[bool], None]
    """Call it once: True when the batch was trained on, False to give its use back."""


class BatchSource(Protocol):
    """Gives one batch after another."""

    def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
        """Wait for a batch; None when `stopped()` turned true first.

        Raises:
            ReplayBufferError: The buffer cannot be reached, or refuses.
        """

    def close(self) -> None:
        """Release whatever is held and was not handed out. Idempotent."""


class LeaseSource:
    """Batches of a buffer, each under a lease that lives until the batch is released.

    Args:
        client: Connected to the buffer.
        fragment_count: Of a batch, for all ranks together.
        wait_slice_s: Longest single wait; `stopped` is asked in between.
    """

    def __init__(self, client: Client, *, fragment_count: int, wait_slice_s: float = 1.0) -> None:
        self._client = client
        self._fragment_count = fragment_count
        self._wait_slice_s = wait_slice_s

    def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
        """See `BatchSource.next`."""
        asked_at = time.monotonic()
        reason = ""
        while not stopped():
            try:
                lease = self._client.fetch(self._fragment_count, self._wait_slice_s)
            except WaitElapsedError as elapsed:
                reason = elapsed.reason
                continue
            return self._load(lease, asked_at, reason)
        return None

    def close(self) -> None:
        """See `BatchSource.close`; nothing is held."""

    def _load(self, lease: Lease, asked_at: float, reason: str) -> FetchedBatch:
        granted_at = time.monotonic()
        lease.__enter__()
        try:
            batch = training_batch(load_batch(self._client.store, lease.references))
        except BaseException as error:
            lease.__exit__(type(error), error, error.__traceback__)
            raise

        def release(trained: bool) -> None:
            lease.release(ReleaseMode.CONSUMED if trained else ReleaseMode.RETURNED)

        return FetchedBatch(
            batch=batch,
            staleness=[reference.staleness for reference in lease.references],
            use_count=[reference.use_count for reference in lease.references],
            wait_s=granted_at - asked_at,
            load_s=time.monotonic() - granted_at,
            waiting_reason=reason,
            release=release,
        )
