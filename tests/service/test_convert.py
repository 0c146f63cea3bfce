"""Ids on their way in: shared while they are in use, never kept for ever."""

from breadbox.v1 import fragment_pb2
from breadbox_server.base import conversion as convert


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
