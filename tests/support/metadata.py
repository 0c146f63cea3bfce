"""Metadata of fragments, for tests of the core and the server."""

import itertools

from breadbox_server.core.model.ids import (
    FragmentIndex,
    ModelVersion,
    PayloadId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import Fragment, Payload
from support.fake_custodian import FakeCustodian

_serial = itertools.count(1)


def make_payload(size_bytes: int = 10) -> Payload:
    """Make a payload whose id no other one of this process has."""
    return Payload(PayloadId(f"{next(_serial):032x}"), size_bytes)


def make_fragment(
    worker_id: str = "w0",
    fragment_index: int = 0,
    *,
    session_id: str = "s0",
    version: int = 0,
    version_max: int | None = None,
    size_bytes: int = 10,
    discontinuity: bool = False,
    step_count: int = 4,
    schema_hash: int = 0,
    priority: float = 1.0,
    numbers: str = "",
    payload: Payload | None = None,
) -> Fragment:
    """Make a fragment; its payload is new unless one is given."""
    return Fragment(
        worker_id=WorkerId(worker_id),
        fragment_index=FragmentIndex(fragment_index),
        session_id=SessionId(session_id),
        model_version_min=ModelVersion(version),
        model_version_max=ModelVersion(version if version_max is None else version_max),
        payload=make_payload(size_bytes) if payload is None else payload,
        step_count=step_count,
        discontinuity=discontinuity,
        schema_hash=schema_hash,
        priority=priority,
        numbers=numbers,
    )


def written_fragment(
    custodian: FakeCustodian, fragment_index: int, session_id: str, worker_id: str = "w"
) -> Fragment:
    """Make a fragment whose payload a client has just written."""
    reference = custodian.write()
    payload = Payload(PayloadId(reference.payload_id), reference.size_bytes)
    return make_fragment(worker_id, fragment_index, session_id=session_id, payload=payload)
