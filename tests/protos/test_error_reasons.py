"""One table of errors: every reason that the server gives, the library reads, and no other."""

import re
from pathlib import Path

import grpc
import pytest

from breadbox.model import errors
from breadbox.v1 import errors_pb2
from breadbox.wire import status
from breadbox_server.core.model.errors import DomainError
from breadbox_server.rpc import status as server_status


def told(kind: type[Exception]) -> str:
    return errors_pb2.ErrorReason.Name(server_status.TABLE[kind].reason)


def test_server_and_library_know_exactly_the_reasons_of_the_contract() -> None:
    reasons = set(errors_pb2.ErrorReason.values()) - {errors_pb2.ERROR_REASON_UNSPECIFIED}
    assert reasons == {row.reason for row in server_status.TABLE.values()}
    assert reasons == set(status.BY_REASON)


def test_a_reason_of_a_newer_server_is_read_by_its_code() -> None:
    failure = status.Failure(grpc.StatusCode.PERMISSION_DENIED, "text", reason="MOON_FULL")
    assert isinstance(status.error_of(failure), errors.PermissionDeniedError)


def test_reasons_are_unique_but_for_kinds_of_one_error() -> None:
    kinds = [kind for kind in server_status.TABLE if kind.__base__ not in server_status.TABLE]
    reasons = [told(kind) for kind in kinds]
    assert sorted(set(reasons)) == sorted(reasons)


def test_both_sides_use_one_domain() -> None:
    assert server_status.DOMAIN == status.DOMAIN


@pytest.mark.parametrize("kind", sorted(server_status.TABLE, key=str))
def test_a_hint_to_wait_and_the_retry_of_the_library_agree(kind: type[Exception]) -> None:
    """What carries a delay is what the library waits for, and the other way round."""
    row = server_status.TABLE[kind]
    failure = status.Failure(row.code, "text", reason=told(kind), retry_delay_s=row.retry_delay_s)
    error = status.error_of(failure)
    assert (row.retry_delay_s is not None) == isinstance(error, errors.BackpressureError)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_code_without_a_reason_is_read(code: grpc.StatusCode) -> None:
    error = status.error_of(status.Failure(code, "text"))
    assert isinstance(error, errors.ReplayBufferError)
    assert "text" in str(error)


@pytest.mark.parametrize(
    "text", ["Concurrent RPC limit exceeded!", "Too many pending requests for this server"]
)
def test_a_transport_that_has_no_room_asks_to_wait(text: str) -> None:
    error = status.error_of(status.Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    assert isinstance(error, errors.BackpressureError)


@pytest.mark.parametrize(
    "text",
    [
        "SERVER: Received message larger than max (5000000 vs. 4194304)",
        "CLIENT: Sent message larger than max (5000000 vs. 4194304)",
        "received metadata size exceeds hard limit (70000 vs. 65536)",
    ],
)
def test_what_is_too_large_stays_so(text: str) -> None:
    error = status.error_of(status.Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    assert isinstance(error, errors.LimitExceededError)
    assert "send less" in str(error)


def test_the_domain_errors_fields_arrive_in_the_librarys_error() -> None:
    from breadbox_server.core.model import errors as core

    cases: list[tuple[DomainError, dict[str, object]]] = [
        (core.InvalidArgumentError("rank", "is odd"), {"field": "rank", "problem": "is odd"}),
        (core.BufferNotFoundError("b"), {"buffer": "b"}),
        (core.SessionNotCurrentError("a", "b"), {"session_id": "a", "current_session_id": "b"}),
        (core.VersionRegressedError(7, 3), {"current": 7, "announced": 3}),
        (core.LeaseNotFoundError("x"), {"lease_id": "x"}),
        (
            core.RequestMismatchError("r", "world_size", 2, 3),
            {"fetch_request_id": "r", "field": "world_size", "first": 2, "now": 3},
        ),
        (core.WaitersFullError(9), {"retry_delay_s": server_status.RETRY_DELAY_S}),
    ]
    for domain_error, wanted in cases:
        sent = server_status.to_status(domain_error)
        failure = status.read_failure(
            server_status.row_of(domain_error).code,
            sent.message,
            {"grpc-status-details-bin": sent.SerializeToString()},
        )
        error = status.error_of(failure)
        assert wanted == {name: getattr(error, name) for name in wanted}


def documented() -> dict[str, tuple[str, str]]:
    """docs/reference/errors.md: reason to code and error of the library."""
    rows = {}
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md").read_text()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4:
            for code, reason in re.findall(r"`([A-Z_]+)` `([A-Z_]+)`", cells[2]):
                rows[reason] = (code, cells[0].strip("`"))
    return rows


def test_the_documented_table_is_the_one_that_is_used() -> None:
    used = {}
    for kind, row in server_status.TABLE.items():
        failure = status.Failure(
            row.code, "text", reason=told(kind), retry_delay_s=row.retry_delay_s
        )
        used[told(kind)] = (row.code.name, type(status.error_of(failure)).__name__)
    assert used == documented()
