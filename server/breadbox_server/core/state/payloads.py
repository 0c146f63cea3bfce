"""Which payloads a buffer refers to, and which it no longer does (B13).

P1  Every payload referred to has exactly one owner: an open chunk (by its worker), a chunk, or the
    model. Leases refer to chunks, so a leased payload has an owner too.
P2  A payload is reported disposable once, when its owner lets go; its id is free again then.
P3  `referred_bytes` counts the fragments' payloads, `weights_bytes` the model's.
P4  Of every worker, the payloads of its fragments that are referred to are counted.
"""

from collections.abc import Callable, Iterable

from breadbox_server.core.model.ids import PayloadId, WorkerId
from breadbox_server.core.model.inputs import Fragment, Payload
from breadbox_server.core.state.chunks import Chunk

MODEL_OWNER = None
"""Owner of the weights; a chunk owns its fragments' payloads, a worker those it has open."""

Owner = Chunk | WorkerId | None


class PayloadLedger:
    """The payloads that a buffer refers to."""

    def __init__(self) -> None:
        self.owners: dict[PayloadId, Owner] = {}
        self.counts: dict[WorkerId, int] = {}
        """Payloads referred to, by the worker that sent them."""
        self.on_free: Callable[[WorkerId], None] = lambda worker_id: None
        """Called with each worker that has none any more."""
        self.disposable: list[Payload] = []
        """What was let go of and has not been reported yet, in order (P2)."""
        self.referred_bytes = 0
        self.weights_bytes = 0

    def take(self, fragment: Fragment) -> None:
        """Refer to a fragment's payload, for its worker's open chunk."""
        worker_id = fragment.worker_id
        self.owners[fragment.payload.payload_id] = worker_id
        self.counts[worker_id] = self.counts.get(worker_id, 0) + 1
        self.referred_bytes += fragment.payload.size_bytes

    def take_chunk(self, chunk: Chunk) -> None:
        """Refer to the payloads of a chunk that was never open, for the chunk."""
        for fragment in chunk.fragments:
            worker_id = fragment.worker_id
            self.owners[fragment.payload.payload_id] = chunk
            self.counts[worker_id] = self.counts.get(worker_id, 0) + 1
        self.referred_bytes += chunk.size_bytes

    def dispose(self, fragments: Iterable[Fragment]) -> None:
        """Let go of fragments' payloads, all referred to."""
        counts = self.counts
        for fragment in fragments:
            payload, worker_id = fragment.payload, fragment.worker_id
            del self.owners[payload.payload_id]
            self.referred_bytes -= payload.size_bytes
            if payload.size_bytes:  # Else it is numbers alone.
                self.disposable.append(payload)
            left = counts[worker_id] - 1
            if left:
                counts[worker_id] = left
            else:
                del counts[worker_id]
                self.on_free(worker_id)

    def take_weights(self, weights: Payload) -> None:
        """Refer to a model's weights."""
        self.owners[weights.payload_id] = MODEL_OWNER
        self.weights_bytes += weights.size_bytes

    def dispose_weights(self, weights: Payload) -> None:
        """Let go of a model's weights."""
        del self.owners[weights.payload_id]
        self.weights_bytes -= weights.size_bytes
        self.disposable.append(weights)
