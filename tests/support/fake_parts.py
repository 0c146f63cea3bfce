"""What a gateway writes to and reads from, in memory, beside a `FakeCustodian`."""

import threading
from collections.abc import Sequence

from breadbox.model.errors import PayloadMissingError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import Part
from breadbox.stores.deadline import Deadline
from breadbox.stores.keys import new_payload_id
from support.fake_custodian import FakeCustodian


class FakeParts:
    """Implements `PayloadParts`.

    Tests hold its threads in the middle of a write by clearing `may_write`, and let it fail by
    setting `error`.
    """

    def __init__(self, custodian: FakeCustodian) -> None:
        self.custodian = custodian
        self.payloads: dict[str, bytearray] = {}
        self.discarded: list[str] = []
        self.error: Exception | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.writing = threading.Event()
        self.is_closed = False

    def new_reference(self, size_bytes: int) -> PayloadReference:
        return PayloadReference(new_payload_id(), size_bytes)

    def write_parts(self, parts: Sequence[Part]) -> None:
        self.writing.set()
        self.may_write.wait()
        if self.error is not None:
            raise self.error
        for reference, offset_bytes, buffers in parts:
            payload = self.payloads.setdefault(reference.payload_id, bytearray())
            assert offset_bytes == len(payload)
            for buffer in buffers:
                payload += buffer
            if len(payload) == reference.size_bytes:
                self.custodian.unannounced.add(reference.payload_id)

    def read_parts(self, parts: Sequence[Part]) -> None:
        for reference, offset_bytes, buffers in parts:
            if reference.payload_id not in self.payloads:
                raise PayloadMissingError(reference.payload_id)
            at = offset_bytes
            for buffer in buffers:
                buffer[:] = self.payloads[reference.payload_id][at : at + len(buffer)]
                at += len(buffer)

    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        self.discarded += [each.payload_id for each in references]

    def within(self, deadline: Deadline) -> "FakeParts":
        return self

    def close(self) -> None:
        self.is_closed = True
