"""Payloads that came along with an answer are read without the store, and believed as little."""

from dataclasses import replace

import numpy as np
import pytest

from breadbox.model.errors import PayloadCorruptError, PayloadMissingError
from breadbox.model.types import FragmentReference, PayloadReference
from breadbox.payload import encode_fragment, read_fragments
from breadbox.stores.base import PayloadStore
from breadbox.stores.deadline import Deadline
from breadbox.stores.reading import InlineStore, StoreOnUse
from support.announced import metadata_of
from support.fake_store import FakeStore
from support.fragments import vector_fragment
from support.store_contract import HEAD_BYTES, RangeReceiver, payload_of

NOWHERE = StoreOnUse(lambda deadline: pytest.fail("the store was opened"))


def referring_to(body: bytes, name: str = "a") -> PayloadReference:
    return PayloadReference(name * 32, len(body))


def test_what_came_along_is_read_without_the_store() -> None:
    body = payload_of(1000)
    reference = referring_to(body)
    receiver = RangeReceiver([(100, 200), (200, 201), (990, 1000)])
    InlineStore({reference.payload_id: body}, NOWHERE).read_many([reference], receiver)
    assert body[:HEAD_BYTES] == receiver.heads[0]
    assert [body[100:200], body[200:201], body[990:]] == [bytes(x) for x in receiver.received[0]]
    assert [0] == receiver.order


def test_what_did_not_come_along_is_read_from_the_store() -> None:
    inner = FakeStore()
    bodies = [payload_of(1000) for _ in range(4)]
    stored = inner.write_many([[memoryview(bodies[0])], [memoryview(bodies[2])]])
    came = [referring_to(bodies[1], "a"), referring_to(bodies[3], "b")]
    riding = {came[0].payload_id: bodies[1], came[1].payload_id: bodies[3]}
    receiver = RangeReceiver([(HEAD_BYTES, 1000)])
    references = [stored[0], came[0], stored[1], came[1]]
    InlineStore(riding, inner).within(Deadline(1.0)).read_many(references, receiver)
    assert bodies == [receiver.heads[k] + bytes(receiver.received[k][0]) for k in range(4)]
    assert [0, 1, 2, 3] == sorted(receiver.order)


@pytest.mark.parametrize("size_bytes", [1, 47, 999, 1001])
def test_bytes_of_another_size_than_said_are_corrupt(size_bytes: int) -> None:
    body = payload_of(size_bytes)
    reference = PayloadReference("a" * 32, 1000)
    store = InlineStore({reference.payload_id: body}, NOWHERE)
    with pytest.raises(PayloadCorruptError, match=f"{size_bytes} bytes"):
        store.read_many([reference], RangeReceiver([]))
    with pytest.raises(PayloadCorruptError, match=f"{size_bytes} bytes"):
        store.map_many([reference])


@pytest.mark.parametrize(
    ("size_bytes", "head_bytes", "ranges"),
    [(5, HEAD_BYTES, []), (100, 101, []), (100, 10, []), (100, HEAD_BYTES, [(90, 101)])],
    ids=["shorter than a prelude", "head too long", "head too short", "range beyond the end"],
)
def test_a_payload_that_lies_about_itself_is_corrupt(
    size_bytes: int, head_bytes: int, ranges: list[tuple[int, int]]
) -> None:
    body = payload_of(size_bytes)
    reference = referring_to(body)
    receiver = RangeReceiver(ranges, head_size_bytes=head_bytes)
    with pytest.raises(PayloadCorruptError):
        InlineStore({reference.payload_id: body}, NOWHERE).read_many([reference], receiver)


def test_a_bit_that_flipped_on_the_way_is_found() -> None:
    fragment = vector_fragment(3)
    body = b"".join(encode_fragment(fragment))
    reference = FragmentReference(metadata_of(fragment, referring_to(body)), 0, 0, 1)
    (read,) = read_fragments(InlineStore({"a" * 32: body}, NOWHERE), [reference])
    assert np.array_equal(fragment.obs, read.obs)
    for position in (20, 45, 60, len(body) // 2, len(body) - 1):
        damaged = bytearray(body)
        damaged[position] ^= 4
        with pytest.raises(PayloadCorruptError):
            read_fragments(InlineStore({"a" * 32: bytes(damaged)}, NOWHERE), [reference])


def test_a_mapping_of_what_came_along_is_its_readers_own() -> None:
    body = payload_of(100)
    reference = referring_to(body)
    store = InlineStore({reference.payload_id: body}, NOWHERE)
    (view,) = store.map_many([reference]) or []
    view[0] ^= 1
    (again,) = store.map_many([reference]) or []
    assert body == bytes(again) != bytes(view)


def test_what_is_mapped_in_part_is_mapped_by_the_store() -> None:
    inner = FakeStore()
    one, other = inner.write_many([[memoryview(b"x" * 100)], [memoryview(b"y" * 100)]])
    mapped = InlineStore({other.payload_id: b"y" * 100}, inner).map_many([one, other]) or []
    assert [b"x" * 100, b"y" * 100] == [bytes(each) for each in mapped]


def test_a_store_is_opened_when_it_is_needed_and_once() -> None:
    opened: list[Deadline | None] = []
    inner = FakeStore()

    def open_store(deadline: Deadline | None) -> PayloadStore:
        opened.append(deadline)
        return inner

    store = StoreOnUse(open_store)
    assert [] == store.write_many([])
    assert [] == opened
    deadline = Deadline(1.0)
    (reference,) = store.within(deadline).write_many([[memoryview(b"x" * 100)]])
    assert [deadline] == opened
    store.delete_many([reference])
    with pytest.raises(PayloadMissingError):
        store.read_many([replace(reference)], RangeReceiver([]))
    store.close()
