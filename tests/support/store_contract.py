"""What every payload store must do: one suite, run by the fake, the directory and Redis alike.

A subclass offers the fixture `faces`: a writer's store and the custodian of the same payloads.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from breadbox.model.errors import ClosedError, PayloadCorruptError, PayloadMissingError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import (
    PRELUDE_BYTES,
    Confirmation,
    Custody,
    Part,
    PartsStore,
    PayloadCustodian,
    PayloadStore,
    Segment,
    StoreSharedError,
    StoreTakenError,
)
from breadbox.stores.keys import new_payload_id

HEAD_BYTES = 49
PIECE_BYTES = 64 * 1024
"""What the stores under test cut at, where they cut."""

SIZES_BYTES = (HEAD_BYTES, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 7)


@dataclass
class Faces:
    """Both faces of one store, and more of the second."""

    store: PayloadStore
    open_custodian: Callable[[], PayloadCustodian]
    custodians: list[PayloadCustodian] = field(default_factory=list)
    """Those that were opened."""

    @property
    def custodian(self) -> PayloadCustodian:
        return self.custodians[0] if self.custodians else self.another()

    def another(self) -> PayloadCustodian:
        """Another server's."""
        self.custodians.append(self.open_custodian())
        return self.custodians[-1]


@dataclass
class RangeReceiver:
    """Receives the same byte ranges of every payload, and remembers what was asked of it."""

    ranges: Sequence[tuple[int, int]]
    wants_whole: bool = False
    head_size_bytes: int = HEAD_BYTES
    heads: dict[int, bytes] = field(default_factory=dict)
    received: dict[int, list[bytearray]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def foresee(self, position: int) -> None:
        """Foresee nothing: random bytes are not like others."""

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        assert len(prelude) == PRELUDE_BYTES
        return self.head_size_bytes

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        self.heads[position] = bytes(head)
        self.received[position] = [bytearray(stop - start) for start, stop in self.ranges]
        return [
            Segment(start, memoryview(memory))
            for (start, _), memory in zip(self.ranges, self.received[position], strict=True)
        ]

    def arrived(self, position: int, digests: Sequence[int] | None = None) -> None:
        self.order.append(position)


def payload_of(size_bytes: int) -> bytes:
    """Random bytes: two payloads are never alike."""
    return secrets.token_bytes(size_bytes)


def in_buffers(payload: bytes) -> list[memoryview]:
    """A payload cut into buffers of odd lengths, an empty one among them."""
    view = memoryview(payload)
    return [view[:33], view[33:33], view[33:1033], view[1033:]]


def read_back(
    store: PayloadStore, references: Sequence[PayloadReference], *, wants_whole: bool = True
) -> list[bytes]:
    """Whole payloads, by way of `read_many`."""
    payloads = []
    for reference in references:
        receiver = RangeReceiver([(HEAD_BYTES, reference.size_bytes)], wants_whole)
        store.read_many([reference], receiver)
        payloads.append(receiver.heads[0] + bytes(receiver.received[0][0]))
    return payloads


class StoreContract:
    """The suite."""

    def write(self, faces: Faces, *payloads: bytes) -> list[PayloadReference]:
        return faces.store.write_many([in_buffers(payload) for payload in payloads])

    def test_what_was_written_is_read(self, faces: Faces) -> None:
        payloads = [payload_of(size_bytes) for size_bytes in SIZES_BYTES]
        references = self.write(faces, *payloads)
        assert payloads == read_back(faces.store, references)
        assert payloads == read_back(faces.store, references, wants_whole=False)

    def test_references_say_sizes_and_have_fresh_ids(self, faces: Faces) -> None:
        payload = payload_of(1000)
        references = self.write(faces, payload, payload)
        assert [1000, 1000] == [reference.size_bytes for reference in references]
        assert 2 == len({reference.payload_id for reference in references})

    def test_nothing_written_gives_no_references(self, faces: Faces) -> None:
        assert [] == faces.store.write_many([])
        faces.store.read_many([], RangeReceiver([]))

    @pytest.mark.parametrize("wants_whole", [True, False])
    def test_ranges_are_received_across_pieces(self, faces: Faces, wants_whole: bool) -> None:
        payload = payload_of(4 * PIECE_BYTES)
        ranges = [(50, 60), (60, 61), (PIECE_BYTES - 5, 3 * PIECE_BYTES + 5)]
        ranges.append((4 * PIECE_BYTES - 1, 4 * PIECE_BYTES))
        references = self.write(faces, payload, payload)
        receiver = RangeReceiver(ranges, wants_whole)
        faces.store.read_many(references, receiver)
        wanted = [payload[start:stop] for start, stop in ranges]
        assert {0: wanted, 1: wanted} == {
            position: [bytes(each) for each in received]
            for position, received in receiver.received.items()
        }
        assert [0, 1] == sorted(receiver.order)

    @pytest.mark.parametrize("wants_whole", [True, False])
    def test_ranges_with_gaps_of_any_length_between_them_are_received(
        self, faces: Faces, wants_whole: bool
    ) -> None:
        """Arrays begin at multiples of 64, and a store may read small gaps or go around them."""
        payload = payload_of(3 * PIECE_BYTES)
        ranges = []
        at = HEAD_BYTES
        for gap_bytes in (0, 1, 63, 64, 4095, 4096, 4097, 20_000, 0, 30):
            start = at + gap_bytes
            ranges.append((start, start + 3000))
            at = start + 3000
        references = self.write(faces, payload)
        receiver = RangeReceiver(ranges, wants_whole)
        faces.store.read_many(references, receiver)
        assert [payload[start:stop] for start, stop in ranges] == [
            bytes(each) for each in receiver.received[0]
        ]

    @pytest.mark.parametrize("wants_whole", [True, False])
    def test_a_head_may_be_longer_than_a_piece(self, faces: Faces, wants_whole: bool) -> None:
        payload = payload_of(3 * PIECE_BYTES)
        head_bytes = 2 * PIECE_BYTES + 3
        receiver = RangeReceiver([], wants_whole, head_size_bytes=head_bytes)
        faces.store.read_many(self.write(faces, payload), receiver)
        assert payload[:head_bytes] == receiver.heads[0]

    @pytest.mark.parametrize("wants_whole", [True, False])
    def test_a_head_that_claims_more_than_the_payload_is_corrupt(
        self, faces: Faces, wants_whole: bool
    ) -> None:
        references = self.write(faces, payload_of(2 * PIECE_BYTES))
        receiver = RangeReceiver([], wants_whole, head_size_bytes=2 * PIECE_BYTES + 1)
        with pytest.raises(PayloadCorruptError):
            faces.store.read_many(references, receiver)

    def test_a_payload_shorter_than_a_prelude_is_corrupt(self, faces: Faces) -> None:
        references = faces.store.write_many([[memoryview(b"short")]])
        with pytest.raises(PayloadCorruptError):
            faces.store.read_many(references, RangeReceiver([], wants_whole=True))

    @pytest.mark.parametrize("wants_whole", [True, False])
    def test_a_missing_payload_is_named_and_the_store_goes_on(
        self, faces: Faces, wants_whole: bool
    ) -> None:
        payload = payload_of(2 * PIECE_BYTES)
        kept, gone = self.write(faces, payload, payload)
        faces.store.delete_many([gone])
        with pytest.raises(PayloadMissingError) as caught:
            faces.store.read_many([kept, gone], RangeReceiver([(50, 60)], wants_whole))
        assert gone.payload_id in str(caught.value)
        assert [payload] == read_back(faces.store, [kept])

    def test_a_reference_of_another_size_is_corrupt(self, faces: Faces) -> None:
        (reference,) = self.write(faces, payload_of(1000))
        for size_bytes in (999, 1001):
            wrong = PayloadReference(reference.payload_id, size_bytes)
            with pytest.raises(PayloadCorruptError):
                faces.store.read_many([wrong], RangeReceiver([], wants_whole=True))

    @pytest.mark.parametrize(
        "reference",
        [
            PayloadReference("../../etc/passwd", 100),
            PayloadReference("0" * 31, 100),
            PayloadReference("A" * 32, 100),
            PayloadReference("0" * 32, 0),
            PayloadReference("0" * 32, -1),
            PayloadReference("0" * 32, 1 << 60),
            PayloadReference("0" * 32, 1 << 30, 1),
        ],
        ids=repr,
    )
    async def test_unsound_references_are_refused(
        self, faces: Faces, reference: PayloadReference
    ) -> None:
        with pytest.raises(PayloadCorruptError):
            faces.store.read_many([reference], RangeReceiver([], wants_whole=True))
        if isinstance(faces.store, PartsStore):
            with pytest.raises(PayloadCorruptError):
                faces.store.read_parts([Part(reference, 0, [memoryview(bytearray(1))])])
        assert [Confirmation.MISSING] == await faces.custodian.confirm([reference])
        assert [False] == await faces.custodian.present([reference])
        assert [reference] == await faces.custodian.missing([reference])
        assert [reference] * 300 == await faces.custodian.missing([reference] * 300)
        await faces.custodian.delete([reference])

    def test_an_exception_of_the_receiver_leaves_as_it_is(self, faces: Faces) -> None:
        class RefusalError(Exception):
            pass

        class Refusing(RangeReceiver):
            def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
                raise RefusalError

        payload = payload_of(3 * PIECE_BYTES)
        references = self.write(faces, payload)
        for wants_whole in (True, False):
            with pytest.raises(RefusalError):
                faces.store.read_many(references, Refusing([], wants_whole))
        assert [payload] == read_back(faces.store, references)

    async def test_confirmed_payloads_are_listed_and_stay_readable(self, faces: Faces) -> None:
        payloads = [payload_of(1000), payload_of(2 * PIECE_BYTES), payload_of(1000)]
        references = self.write(faces, *payloads)
        assert [] == [payload_id async for payload_id in faces.custodian.confirmed()]
        assert [Confirmation.THERE] * 2 == await faces.custodian.confirm(references[:2])
        listed = {payload_id async for payload_id in faces.custodian.confirmed()}
        assert {reference.payload_id for reference in references[:2]} == listed
        assert payloads == read_back(faces.store, references)

    async def test_confirming_again_answers_alike(self, faces: Faces) -> None:
        references = self.write(faces, payload_of(1000), payload_of(3 * PIECE_BYTES))
        assert [Confirmation.THERE] * 2 == await faces.custodian.confirm(references)
        assert [Confirmation.THERE] * 2 == await faces.custodian.confirm(references)

    async def test_payloads_that_ride_along_are_kept_under_their_ids(self, faces: Faces) -> None:
        bodies = [payload_of(size_bytes) for size_bytes in (1, 100, 64 * 1024)]
        kept = [(PayloadReference(new_payload_id(), len(body)), body) for body in bodies]
        references = [reference for reference, _ in kept]
        await faces.custodian.keep(kept)
        assert bodies == await faces.custodian.read(references)
        listed = {payload_id async for payload_id in faces.custodian.confirmed()}
        assert {reference.payload_id for reference in references} == listed
        assert [Confirmation.THERE] * 3 == await faces.custodian.confirm(references)
        await faces.custodian.delete(references)
        assert [b""] * 3 == await faces.custodian.read(references)

    async def test_very_many_payloads_ride_along(self, faces: Faces) -> None:
        kept = [(PayloadReference(new_payload_id(), 10), payload_of(10)) for _ in range(1500)]
        await faces.custodian.keep(kept)
        assert [body for _, body in kept] == await faces.custodian.read([each for each, _ in kept])

    async def test_nothing_rides_along_where_there_is_nothing(self, faces: Faces) -> None:
        await faces.custodian.keep([])
        assert [] == await faces.custodian.read([])

    async def test_what_is_not_there_as_it_is_said_is_read_as_nothing(self, faces: Faces) -> None:
        whole, gone = self.write(faces, payload_of(1000), payload_of(1000))
        faces.store.delete_many([gone])
        other = PayloadReference(whole.payload_id, 999)
        assert [b"", b""] == await faces.custodian.read([gone, other])
        unsound = PayloadReference("../../etc/passwd", 100)
        assert [b""] == await faces.custodian.read([unsound])

    async def test_confirm_tells_which_are_missing(self, faces: Faces) -> None:
        references = self.write(faces, *[payload_of(2 * PIECE_BYTES) for _ in range(4)])
        faces.store.delete_many([references[1]])
        await faces.custodian.delete([references[2]])
        wanted = [True, False, False, True]
        lacking = [references[1], references[2]]
        assert wanted == await faces.custodian.present(references)
        assert lacking == await faces.custodian.missing(references)
        assert lacking * 100 == await faces.custodian.missing(references * 100)
        small = self.write(faces, *[payload_of(100) for _ in range(3)])
        faces.store.delete_many([small[1]])
        mixed = await faces.custodian.missing([*small, *references] * 400)
        assert Counter([small[1], *lacking] * 400) == Counter(mixed)
        assert wanted == [bool(each) for each in await faces.custodian.confirm(references)]
        assert lacking * 100 == await faces.custodian.missing(references * 100)
        assert wanted == [bool(each) for each in await faces.custodian.confirm(references)]
        assert [] == await faces.custodian.confirm([])

    async def test_payloads_of_another_size_than_said_are_not_confirmed(self, faces: Faces) -> None:
        true = self.write(faces, payload_of(1000), payload_of(3 * PIECE_BYTES + 5))
        lies = [
            replace(reference, size_bytes=reference.size_bytes + more)
            for reference in true
            for more in (-1, 1, -reference.size_bytes + 1, 1 << 30)
        ]
        lies += [replace(true[0], piece_size_bytes=PIECE_BYTES, size_bytes=PIECE_BYTES)]
        found = await faces.custodian.confirm([*lies, *true, *lies])
        assert all(each in (Confirmation.OTHER_SIZE, Confirmation.MISSING) for each in found[:9])
        assert [Confirmation.OTHER_SIZE] * 2 == found[:2]
        assert found[:9] == found[11:]
        assert [Confirmation.THERE] * 2 == found[9:11]
        listed = {payload_id async for payload_id in faces.custodian.confirmed()}
        assert {reference.payload_id for reference in true} == listed

    async def test_deleted_payloads_are_gone_wherever_they_stood(self, faces: Faces) -> None:
        payloads = [payload_of(size) for size in (1000, 1000, 3 * PIECE_BYTES, 3 * PIECE_BYTES)]
        references = self.write(faces, *payloads)
        await faces.custodian.confirm([references[0], references[2]])
        await faces.custodian.delete(references[:2])
        await faces.custodian.delete_ids([each.payload_id for each in references[2:]])
        assert [False] * 4 == await faces.custodian.present(references)
        await faces.custodian.delete(references)
        await faces.custodian.delete_ids([each.payload_id for each in references] + ["../x"])
        assert [] == [payload_id async for payload_id in faces.custodian.confirmed()]

    async def test_a_server_that_was_replaced_confirms_and_deletes_nothing(
        self, faces: Faces
    ) -> None:
        """Some are one piece and some are several: each goes its own way to Redis."""
        sizes = (1000, 3 * PIECE_BYTES) * 4
        references = self.write(faces, *(payload_of(size) for size in sizes))
        old, new = faces.custodian, faces.another()
        await old.take(Custody("one", 7))
        assert [Confirmation.THERE] * 4 == await old.confirm(references[:4])
        await new.take(Custody("one", 8))
        assert [Confirmation.THERE] * 8 == await new.confirm(references)
        for act in (
            old.confirm(references),
            old.confirm(references[:1]),
            old.keep([(references[0], payload_of(1000))]),
            old.delete(references),
            old.delete(references[1:2]),
            old.delete_ids([each.payload_id for each in references]),
        ):
            with pytest.raises(StoreTakenError):
                await act
        assert [True] * 8 == await new.present(references)
        await new.delete(references)
        assert [False] * 8 == await new.present(references)

    async def test_an_epoch_that_grows_is_taken_with_it(self, faces: Faces) -> None:
        references = self.write(faces, *(payload_of(100) for _ in range(3)))
        old, new, custody = faces.custodian, faces.another(), Custody("one", 7)
        await old.take(custody)
        await new.take(Custody("one", 8))
        await new.confirm(references)
        custody.epoch = 9
        await old.delete(references[:1])
        assert [False, True, True] == await old.present(references)
        with pytest.raises(StoreTakenError):
            await new.delete(references[2:])

    async def test_what_another_journal_may_know_is_not_deleted_for_an_orphan(
        self, faces: Faces
    ) -> None:
        references = self.write(faces, *(payload_of(100) for _ in range(64)))
        payload_ids = [each.payload_id for each in references]
        one, two = faces.custodian, faces.another()
        await one.take(Custody("one", 1_000))
        await two.take(Custody("two", 5))
        await two.confirm(references)
        assert "two" in await one.journals()
        with pytest.raises(StoreSharedError):
            await one.delete_ids(payload_ids)
        assert [True] * 64 == await one.present(references)
        # Its own it may delete, and what it is told to.
        await two.delete(references[:1])
        await one.forget_other_journals()
        assert await one.journals() <= {"one"}
        await one.delete_ids(payload_ids)
        assert [False] * 64 == await one.present(references)

    async def test_who_writes_no_journal_is_of_no_epoch(self, faces: Faces) -> None:
        references = self.write(faces, *(payload_of(100) for _ in range(3)))
        server, beside = faces.custodian, faces.another()
        await server.take(Custody("one", 7))
        await server.confirm(references)
        await beside.take(Custody("one", 0))
        await beside.delete_ids([references[0].payload_id])
        await server.delete(references[1:2])
        assert [False, False, True] == await server.present(references)
        await beside.take(Custody("two", 0))
        with pytest.raises(StoreSharedError):
            await beside.delete_ids([references[2].payload_id])

    async def test_the_store_answers(self, faces: Faces) -> None:
        await faces.custodian.ping()
        assert 0 == await faces.custodian.sweep_unannounced()

    async def test_closing_twice_is_closing_once(self, faces: Faces) -> None:
        faces.store.close()
        faces.store.close()
        await faces.custodian.close()
        with pytest.raises(ClosedError):
            faces.store.write_many([])
