"""How a caller is told that there is no answer, and how long before its deadline."""

import logging
import secrets
from typing import Final

import grpc
from google.rpc import code_pb2, status_pb2

from breadbox_server.base.errors import InternalError
from breadbox_server.rpc import status

log = logging.getLogger(__name__)

REQUEST_ID_BYTES: Final = 8
ANSWER_MARGIN_S: Final = 0.15
"""Kept free before a call's deadline, so that the reason for no answer still reaches the caller;
less than what a wait that was asked for keeps free."""
NOT_DONE: Final = "the server was not done in time"


class NotDoneError(Exception):
    """The caller's time is almost up, and nothing else is the matter."""


def answer_s(left_s: float | None) -> float | None:
    """Of the seconds that a caller has left, those in which it has to be answered."""
    return None if left_s is None else left_s - min(ANSWER_MARGIN_S, left_s / 4)


def told(error: Exception, method: str) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """What a caller is told of an error.

    An exception without a row in `status` is our bug: the caller gets INTERNAL with a request id,
    never the exception's text; the log has both.
    """
    if isinstance(error, NotDoneError):
        late = status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED, message=NOT_DONE)
        return grpc.StatusCode.DEADLINE_EXCEEDED, late
    if isinstance(error, status.TELLABLE):
        return status.code_of(error), status.to_status(error)
    internal = InternalError(secrets.token_hex(REQUEST_ID_BYTES))
    log.error("%s failed; told as request id %s", method, internal.request_id, exc_info=error)
    return grpc.StatusCode.INTERNAL, status.to_status(internal)
