"""The latest small payloads in memory: bounded, and gone with what they are a copy of."""

from breadbox_server.admission.payloads import RecentPayloads
from breadbox_server.core.model.ids import PayloadId

A, B, C = PayloadId("a"), PayloadId("b"), PayloadId("c")


def test_those_that_came_first_go_for_later_ones() -> None:
    recent = RecentPayloads(10)
    for payload_id, body in ((A, b"1234"), (B, b"123456"), (C, b"1")):
        recent.add(payload_id, body)
    assert [b"", b"123456", b"1"] == [recent.get(each) for each in (A, B, C)]
    assert 7 == recent.size_bytes


def test_what_is_larger_than_the_room_is_not_kept() -> None:
    recent = RecentPayloads(3)
    recent.add(A, b"1234")
    assert (b"", 0) == (recent.get(A), recent.size_bytes)


def test_what_is_forgotten_takes_no_room() -> None:
    recent = RecentPayloads(10)
    recent.add(A, b"1234")
    recent.forget([A, B])
    recent.forget([A])
    assert (b"", 0) == (recent.get(A), recent.size_bytes)
