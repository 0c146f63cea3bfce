"""Payloads that came along with an answer, and a store that is opened for the others only."""

from collections.abc import Callable, Mapping, Sequence

from breadbox.model.errors import PayloadCorruptError
from breadbox.model.types import PayloadReference
from breadbox.stores.common.base import PRELUDE_BYTES, PayloadReceiver, PayloadStore, Segment
from breadbox.stores.common.deadline import Deadline
from breadbox.stores.common.reading import head_bytes_of

OpenStore = Callable[[Deadline | None], PayloadStore]
"""Opens the store by a deadline, or gives the one that is open."""


class StoreOnUse:
    """A `PayloadStore` that is opened when a payload is to be moved, and not before.

    Args:
        open_store: Called for each use.
        deadline: By which calls must have ended; see `PayloadStore.within`.
    """

    def __init__(self, open_store: OpenStore, deadline: Deadline | None = None) -> None:
        self._open_store = open_store
        self._deadline = deadline

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """See PayloadStore."""
        return self._opened().write_many(payloads) if payloads else []

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        """See PayloadStore."""
        self._opened().read_many(references, receiver)

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """See PayloadStore."""
        return self._opened().map_many(references)

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        """See PayloadStore."""
        self._opened().delete_many(references)

    def within(self, deadline: Deadline) -> "StoreOnUse":
        """See PayloadStore."""
        return StoreOnUse(self._open_store, deadline)

    def close(self) -> None:
        """See PayloadStore. Whoever opens the store closes it."""

    def _opened(self) -> PayloadStore:
        store = self._open_store(self._deadline)
        return store if self._deadline is None else store.within(self._deadline)


class InlineStore:
    """A `PayloadStore` of payloads that are here already, before one of the others; for reading.

    Args:
        bodies: Bytes by payload id, as they came from the network: nothing is known of them.
        store: Has the others.
    """

    def __init__(self, bodies: Mapping[str, bytes], store: PayloadStore) -> None:
        self.bodies = bodies
        self._store = store

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """See PayloadStore."""
        return self._store.write_many(payloads)

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        """See PayloadStore."""
        others: list[tuple[int, PayloadReference]] = []
        for position, reference in enumerate(references):
            body = self.bodies.get(reference.payload_id)
            if body is None:
                others.append((position, reference))
            else:
                _give(position, reference, memoryview(body), receiver)
        if others:
            renumbered = _Renumbered(receiver, [position for position, _ in others])
            self._store.read_many([reference for _, reference in others], renumbered)

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """See PayloadStore. Those that are here are copied, into memory that nobody else has."""
        if any(each.payload_id not in self.bodies for each in references):
            return self._store.map_many(references)
        mapped = []
        for reference in references:
            body = self.bodies[reference.payload_id]
            _check_size(reference, body)
            mapped.append(memoryview(bytearray(body)))
        return mapped

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        """See PayloadStore."""
        self._store.delete_many(references)

    def within(self, deadline: Deadline) -> "InlineStore":
        """See PayloadStore."""
        return InlineStore(self.bodies, self._store.within(deadline))

    def close(self) -> None:
        """See PayloadStore. The other store is not this one's to close."""


def bodies_at_hand(
    store: PayloadStore, references: Sequence[PayloadReference]
) -> list[bytes] | None:
    """Payloads in memory, as they came; None unless all of them are, each of the size it has."""
    if not isinstance(store, InlineStore):
        return None
    bodies = store.bodies
    found = [bodies.get(each.payload_id, b"") for each in references]
    sizes = [each.size_bytes for each in references]
    return found if all(found) and sizes == list(map(len, found)) else None


class _Renumbered:
    """A receiver, for some of its payloads."""

    def __init__(self, receiver: PayloadReceiver, positions: Sequence[int]) -> None:
        self._receiver = receiver
        self._positions = positions

    @property
    def wants_whole(self) -> bool:
        return self._receiver.wants_whole

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        return self._receiver.head_bytes(self._positions[position], prelude)

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        return self._receiver.segments(self._positions[position], head)

    def arrived(self, position: int) -> None:
        self._receiver.arrived(self._positions[position])


def _give(
    position: int, reference: PayloadReference, body: memoryview, receiver: PayloadReceiver
) -> None:
    """Hand a payload that is here to its receiver."""
    _check_size(reference, body)
    head_bytes = head_bytes_of(position, reference, body[:PRELUDE_BYTES], receiver)
    for offset, destination, _ in receiver.segments(position, body[:head_bytes]):
        part = body[offset : offset + len(destination)]
        if len(part) != len(destination):
            raise PayloadCorruptError(f"payload {reference.payload_id} ends at byte {len(body)}")
        destination[:] = part
    receiver.arrived(position)


def _check_size(reference: PayloadReference, body: bytes | memoryview) -> None:
    if len(body) != reference.size_bytes:
        raise PayloadCorruptError(
            f"payload {reference.payload_id} came along with {len(body)} bytes where its "
            f"reference says {reference.size_bytes}"
        )
