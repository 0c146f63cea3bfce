"""Which payloads a buffer refers to, and which it no longer does (B13).

Invariants:

P1  Every payload referred to has exactly one owner: an open chunk (by its worker), a chunk, or the
    model. Leases refer to chunks, so a leased payload has an owner too.
P2  A payload is reported disposable once, when its owner lets go; its id is free again then.
P3  `referred_bytes` counts the fragments' payloads, `weights_bytes` the model's.
P4  Of every worker, the payloads of its fragments that are referred to are counted.
"""

from collections.abc import Iterable

from breadbox_server.core.model.ids import PayloadId, WorkerId
from breadbox_server.core.model.inputs import Fragment, Payload
from breadbox_server.core.state.chunks import Chunk

MODEL_OWNER = None
"""Owner of the weights; a chunk owns its fragments' payloads, a worker those it has open."""

Owner = Chunk | WorkerId | None


class PayloadLedger:
    """The payloads that a buffer refers to."""

    def __init__(self) -> None:
        self._owners: dict[PayloadId, Owner] = {}
        self._disposable: list[Payload] = []
        self._counts: dict[WorkerId, int] = {}
        self.referred_bytes = 0
        self.weights_bytes = 0

    def __contains__(self, payload_id: PayloadId) -> bool:
        """Whether the buffer refers to a payload."""
        return payload_id in self._owners

    def owner(self, payload_id: PayloadId) -> Owner:
        """Return the owner of a payload, which must be referred to."""
        return self._owners[payload_id]

    def holds_of(self, worker_id: WorkerId) -> bool:
        """Whether a payload that a worker sent is referred to."""
        return worker_id in self._counts

    def take(self, fragment: Fragment) -> None:
        """Refer to a fragment's payload, for its worker's open chunk."""
        self._count(fragment)
        self._owners[fragment.payload.payload_id] = fragment.worker_id
        self.referred_bytes += fragment.payload.size_bytes

    def hand_over(self, chunk: Chunk) -> None:
        """Make a chunk, just closed, the owner of its payloads."""
        for fragment in chunk.fragments:
            self._owners[fragment.payload.payload_id] = chunk

    def take_chunk(self, chunk: Chunk) -> None:
        """Refer to the payloads of a chunk that was never open, for the chunk."""
        for fragment in chunk.fragments:
            self._owners[fragment.payload.payload_id] = chunk
            self._count(fragment)
        self.referred_bytes += chunk.size_bytes

    def dispose(self, fragments: Iterable[Fragment]) -> None:
        """Let go of fragments' payloads, all referred to."""
        counts = self._counts
        for fragment in fragments:
            payload, worker_id = fragment.payload, fragment.worker_id
            del self._owners[payload.payload_id]
            self.referred_bytes -= payload.size_bytes
            self._disposable.append(payload)
            left = counts[worker_id] - 1
            if left:
                counts[worker_id] = left
            else:
                del counts[worker_id]

    def _count(self, fragment: Fragment) -> None:
        self._counts[fragment.worker_id] = self._counts.get(fragment.worker_id, 0) + 1

    def take_weights(self, weights: Payload) -> None:
        """Refer to a model's weights."""
        self._owners[weights.payload_id] = MODEL_OWNER
        self.weights_bytes += weights.size_bytes

    def dispose_weights(self, weights: Payload) -> None:
        """Let go of a model's weights."""
        del self._owners[weights.payload_id]
        self.weights_bytes -= weights.size_bytes
        self._disposable.append(weights)

    @property
    def has_disposable(self) -> bool:
        """Whether something was let go of since the last `take_disposable`."""
        return bool(self._disposable)

    def take_disposable(self) -> tuple[Payload, ...]:
        """Hand over what was let go of since the last call, in order (P2)."""
        disposable = tuple(self._disposable)
        self._disposable.clear()
        return disposable

    def owners(self) -> Iterable[tuple[PayloadId, Owner]]:
        """List the payloads referred to with their owners; O(1) to begin with."""
        return self._owners.items()

    def ids(self) -> Iterable[PayloadId]:
        """List the payloads referred to; O(payloads)."""
        return self._owners.keys()
