"""Messages with payload bytes are on the wire what the contract says, however they are packed."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from breadbox.stores.frames import pack, unpack_read, unpack_write
from breadbox.v1 import replay_buffer_service_pb2 as pb

SIZES = st.lists(st.integers(0, 2**40), max_size=5)
DATA = st.binary(max_size=300) | st.integers(0, 70_000).map(bytes)


@given(DATA, st.integers(0, 400), SIZES)
def test_what_is_packed_here_is_what_protobuf_reads(data: bytes, at: int, sizes: list[int]) -> None:
    others = pb.WritePayloadsRequest(size_bytes=sizes).SerializeToString()
    packed = pack([data[:at], memoryview(data)[at:]], others)
    assert pb.WritePayloadsRequest(data=data, size_bytes=sizes) == (
        pb.WritePayloadsRequest.FromString(packed)
    )
    assert pb.ReadPayloadsResponse(data=data) == pb.ReadPayloadsResponse.FromString(pack([data]))


@given(DATA, SIZES)
def test_what_protobuf_writes_is_read_here(data: bytes, sizes: list[int]) -> None:
    message = pb.WritePayloadsRequest(data=data, size_bytes=sizes)
    written = unpack_write(message.SerializeToString())
    assert (data, sizes) == (bytes(written.data), list(written.size_bytes))
    assert data == unpack_read(pb.ReadPayloadsResponse(data=data).SerializeToString())


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"\x0a\x05hello" + tail))
def test_bytes_that_nobody_wrote_are_read_as_protobuf_reads_them(raw: bytes) -> None:
    try:
        wanted = pb.WritePayloadsRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            unpack_write(raw)
        return
    written = unpack_write(raw)
    if raw.count(b"\x0a") < 2:  # Of several `data` an empty last one does not count here.
        assert wanted.data == bytes(written.data)
    assert list(wanted.size_bytes) == list(written.size_bytes)


def test_the_bytes_are_not_copied_when_a_message_is_taken_apart() -> None:
    raw = pack([b"x" * 100_000])
    assert raw is unpack_read(raw).obj
    assert raw is unpack_write(raw).data.obj
