"""A payload store in memory: both faces, over one `FakePayloads`. Passes the contract suite."""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from breadbox.model.errors import (
    ClosedError,
    PayloadCorruptError,
    PayloadMissingError,
    StoreFullError,
    StoreUnavailableError,
)
from breadbox.model.types import PayloadReference
from breadbox.stores.base import (
    PRELUDE_BYTES,
    Confirmation,
    Custody,
    PayloadReceiver,
    StoreUsage,
)
from breadbox.stores.deadline import Deadline
from breadbox.stores.keys import is_sound, new_payload_id
from support.custody import KnownJournals


@dataclass
class FakePayloads:
    """What the store holds. Tests may change it, and take the store away with `is_down`."""

    unannounced: dict[str, bytes] = field(default_factory=dict)
    confirmed: dict[str, bytes] = field(default_factory=dict)
    capacity_bytes: int | None = None
    is_down: bool = False
    journals: KnownJournals = field(default_factory=KnownJournals)

    def require_up(self) -> None:
        """Fail as a store that cannot be reached."""
        if self.is_down:
            raise StoreUnavailableError("the fake store is down")

    def find(self, payload_id: str) -> bytes | None:
        """The bytes of a payload, wherever it stands."""
        return self.confirmed.get(payload_id, self.unannounced.get(payload_id))

    def held_bytes(self) -> int:
        """Bytes of everything held."""
        return sum(map(len, [*self.confirmed.values(), *self.unannounced.values()]))

    def drop(self, payload_id: str) -> None:
        """Delete a payload, if it is there."""
        self.confirmed.pop(payload_id, None)
        self.unannounced.pop(payload_id, None)


class FakeStore:
    """The clients' face."""

    def __init__(self, payloads: FakePayloads | None = None) -> None:
        self.payloads = payloads or FakePayloads()
        self._is_closed = False

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        self._check()
        joined = [b"".join(buffers) for buffers in payloads]
        capacity = self.payloads.capacity_bytes
        if capacity is not None and self.payloads.held_bytes() + sum(map(len, joined)) > capacity:
            raise StoreFullError("the fake store is full")
        references = [PayloadReference(new_payload_id(), len(each)) for each in joined]
        for reference, each in zip(references, joined, strict=True):
            self.payloads.unannounced[reference.payload_id] = each
        return references

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        self._check()
        for position, reference in enumerate(references):
            payload = memoryview(self._find(reference))
            if len(payload) < PRELUDE_BYTES:
                raise PayloadCorruptError(f"payload {reference.payload_id} has no prelude")
            foreseen = receiver.foresee(position)
            if foreseen is not None:
                start = 0
                for destination in foreseen.memory:
                    destination[:] = payload[start : start + len(destination)]
                    start += len(destination)
                assert len(payload) == start
                receiver.arrived(position)
                continue
            head_bytes = receiver.head_bytes(position, payload[:PRELUDE_BYTES])
            if not PRELUDE_BYTES <= head_bytes <= len(payload):
                raise PayloadCorruptError(f"payload {reference.payload_id} ends in its head")
            for segment in receiver.segments(position, payload[:head_bytes]):
                end = segment.offset_bytes + len(segment.destination)
                segment.destination[:] = payload[segment.offset_bytes : end]
            receiver.arrived(position)

    def at_hand(self, references: Sequence[PayloadReference]) -> None:
        """Give none."""

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        self._check()
        return [memoryview(self._find(reference)) for reference in references]

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        self._check()
        for reference in references:
            self.payloads.drop(reference.payload_id)

    def within(self, deadline: Deadline) -> "FakeStore":
        return self

    def close(self) -> None:
        self._is_closed = True

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the payload store is closed")
        self.payloads.require_up()

    def _find(self, reference: PayloadReference) -> bytes:
        if not is_sound(reference):
            raise PayloadCorruptError(f"a payload reference is out of bounds: {reference}")
        payload = self.payloads.find(reference.payload_id)
        if payload is None:
            raise PayloadMissingError(reference.payload_id)
        if len(payload) != reference.size_bytes:
            raise PayloadCorruptError(f"payload {reference.payload_id} is of another size")
        return payload


class FakeCustodian:
    """The server's face, with bytes behind it; `support.fake_custodian` has one without."""

    def __init__(self, payloads: FakePayloads) -> None:
        self.payloads = payloads
        self._custody: Custody | None = None

    async def take(self, custody: Custody) -> None:
        self.payloads.require_up()
        self.payloads.journals.check(custody)
        self._custody = custody

    async def journals(self) -> set[str]:
        self.payloads.require_up()
        return set(self.payloads.journals.epochs)

    async def forget_other_journals(self) -> None:
        self.payloads.require_up()
        self.payloads.journals.forget_others(self._custody)

    async def ping(self) -> None:
        self.payloads.require_up()

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        self.payloads.journals.check(self._custody)
        present = await self.present(references)
        for reference, is_there in zip(references, present, strict=True):
            if is_there and reference.payload_id in self.payloads.unannounced:
                payload = self.payloads.unannounced.pop(reference.payload_id)
                self.payloads.confirmed[reference.payload_id] = payload
        return [
            Confirmation.THERE
            if is_there
            else Confirmation.OTHER_SIZE
            if is_sound(each) and self.payloads.find(each.payload_id)
            else Confirmation.MISSING
            for each, is_there in zip(references, present, strict=True)
        ]

    async def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        self.payloads.require_up()
        self.payloads.journals.check(self._custody)
        capacity = self.payloads.capacity_bytes
        size_bytes = sum(len(body) for _, body in payloads)
        if capacity is not None and self.payloads.held_bytes() + size_bytes > capacity:
            raise StoreFullError("the fake store is full")
        for reference, body in payloads:
            self.payloads.confirmed[reference.payload_id] = body

    async def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        self.payloads.require_up()
        found = [self.payloads.find(each.payload_id) or b"" for each in references]
        return [
            body if len(body) == each.size_bytes else b""
            for each, body in zip(references, found, strict=True)
        ]

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        self.payloads.require_up()
        self.payloads.journals.check(self._custody)
        for reference in references:
            self.payloads.drop(reference.payload_id)

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        self.payloads.require_up()
        return [
            is_sound(each) and len(self.payloads.find(each.payload_id) or b"") == each.size_bytes
            for each in references
        ]

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        there = await self.present(references)
        return [each for each, is_there in zip(references, there, strict=True) if not is_there]

    async def confirmed(self) -> AsyncIterator[str]:
        self.payloads.require_up()
        for payload_id in list(self.payloads.confirmed):
            yield payload_id

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        self.payloads.require_up()
        self.payloads.journals.check(self._custody, is_alone=True)
        for payload_id in payload_ids:
            self.payloads.drop(payload_id)

    async def incarnation(self) -> str:
        return "the only one"

    async def sweep_unannounced(self) -> int:
        self.payloads.require_up()
        return 0

    async def concerns(self) -> tuple[str, ...]:
        return ()

    async def usage(self) -> StoreUsage:
        self.payloads.require_up()
        return StoreUsage(
            used_bytes=self.payloads.held_bytes(), limit_bytes=0, capacity_bytes_max=0
        )

    async def close(self) -> None:
        return None
