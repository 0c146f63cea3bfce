"""Ids on their way in: shared while they are in use, never kept for ever."""

from contextlib import nullcontext

import pytest

from breadbox.v1 import fragment_pb2, schema_pb2
from breadbox.wire.schemas import ORIGIN_TEXT_LENGTH_MAX, ORIGINS_MAX
from breadbox_server.base import conversion as convert
from breadbox_server.core.model.errors import InvalidArgumentError


def metadata(worker_id: str, session_id: str = "run") -> fragment_pb2.FragmentMetadata:
    payload = fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=1)
    return fragment_pb2.FragmentMetadata(
        worker_id=worker_id, session_id=session_id, payload=payload, step_count=1
    )


def test_equal_ids_of_different_calls_are_one_object() -> None:
    (first,) = convert.fragments([metadata("worker-1")])
    (second,) = convert.fragments([metadata("worker-1")])
    assert first.worker_id is second.worker_id
    assert first.session_id is second.session_id


def test_ids_that_callers_make_up_are_kept_in_bounded_number_and_length() -> None:
    long = convert.as_one_object("x" * 1_000_000)
    assert long is not convert.as_one_object("x" * 1_000_000)
    numbers = range(convert.IDS_SHARED_MAX + 10)
    made = [convert.as_one_object(f"made-up-{number}") for number in numbers]
    last, first = numbers[-1], numbers[0]
    assert made[last] is convert.as_one_object(f"made-up-{last}")
    assert made[first] is not convert.as_one_object(f"made-up-{first}")


ARRAY = schema_pb2.SchemaArray(path="obs", dtype="<f4", shape=[3])
LONGEST = "x" * ORIGIN_TEXT_LENGTH_MAX


def test_the_hash_of_a_schema_leaves_its_origin_out_so_that_older_servers_know_it() -> None:
    plain = schema_pb2.Schema(arrays=[ARRAY])
    said = schema_pb2.Schema(arrays=[ARRAY], origin={"wrappers": "none"})
    assert list(convert.schemas([plain])) == list(convert.schemas([said]))
    ((_, schema),) = convert.schemas([said]).items()
    assert said == convert.to_schema(schema)


@pytest.mark.parametrize(
    ("origin", "fits"),
    [
        ({f"n{number}": LONGEST for number in range(ORIGINS_MAX)}, True),
        ({f"n{number}": "" for number in range(ORIGINS_MAX + 1)}, False),
        ({"wrappers": LONGEST + "x"}, False),
        ({LONGEST + "x": "none"}, False),
        ({"wrappers": "a\x1b[2Jb"}, False),
        ({"wrap\nper": "none"}, False),
    ],
    ids=["the most", "one more", "longer text", "longer name", "escape", "line break"],
)
def test_an_origin_is_bounded_in_number_and_length_and_printable(
    origin: dict[str, str], fits: bool
) -> None:
    message = schema_pb2.Schema(arrays=[ARRAY], origin=origin)
    with nullcontext() if fits else pytest.raises(InvalidArgumentError, match="16 origins"):
        assert 1 == len(convert.schemas([message]))
