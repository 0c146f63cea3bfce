"""Messages whose parts are counted before they are parsed."""

import pytest
from google.protobuf.message import Message
from hypothesis import given

from breadbox.payload import encode_tree
from breadbox.v1 import payload_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire.message_parts import check_few_parts
from support.forged_payloads import sections_of
from support.payload_trees import trees

LAYOUT = payload_pb2.DESCRIPTOR.message_types_by_name["PayloadLayout"]
APPEND = pb.DESCRIPTOR.message_types_by_name["AppendFragmentsRequest"]


def layout_of(tree: object) -> bytes:
    return sections_of(b"".join(encode_tree(tree)))[0]


def count_of(message: Message) -> int:
    """Parts at levels that can hold repeated ones, packed numbers as one."""
    count = 0
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        is_packed = field.message_type is None and field.name == "shape"
        items = [value] if is_packed or not hasattr(value, "__len__") else value
        items = [value] if isinstance(value, str) else items
        count += len(items)
        if field.message_type is not None and not is_map:
            count += sum(count_of(item) for item in items)
    return count


@given(tree=trees())
def test_a_message_has_as_many_parts_as_are_counted_and_no_fewer(tree: object) -> None:
    raw = layout_of(tree)
    count = count_of(payload_pb2.PayloadLayout.FromString(raw))
    check_few_parts(raw, LAYOUT, count)
    with pytest.raises(ValueError, match="fields and items"):
        check_few_parts(raw, LAYOUT, count - 1)


@pytest.mark.parametrize(
    "item",
    [b"\x0a\x02\x1a\x00", b"\x0a\x04\x12\x02\x12\x00", b"\x0a\x04\x0a\x02\x22\x00"],
    ids=["trees", "values of a dict", "parameters of arrays"],
)
def test_items_count_at_every_level(item: bytes) -> None:
    with pytest.raises(ValueError, match="more than 100 fields and items"):
        check_few_parts(item * 101, LAYOUT, 100)


def test_items_that_cannot_multiply_are_one_part_whatever_they_hold() -> None:
    fragment = pb.AppendFragmentsRequest(fragments=[{"worker_id": "w" * 200, "step_count": 1}])
    raw = fragment.SerializeToString() * 50
    check_few_parts(raw, APPEND, 50)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a",
        b"\x0a\x7f",
        b"\x0a\x04\x12\x05abc",
        b"\x0b\x0c",
        b"\x0f",
        b"\x09",
        b"\x0d123",
        b"\x80" * 11,
        b"\x08",
    ],
    ids=repr,
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"ends|wire type|ten bytes"):
        check_few_parts(b"\x1a\x06abcdef" * 4 + raw, LAYOUT, 8)
