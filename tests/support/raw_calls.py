"""Calls by a bare stub, beside servers that are killed and started again."""

from typing import Any

import grpc

DEAD = ("Broken pipe", "Socket closed", "Connection reset")


def called(method: Any, request: Any, **options: Any) -> Any:
    """Call; once more if the connection is found to be that of a server that is gone.

    gRPC may see a connection's end only as it writes the next call, which no server got then.
    """
    try:
        return method(request, **options)
    except grpc.RpcError as error:
        is_dead = error.code() is grpc.StatusCode.UNAVAILABLE
        if not (is_dead and any(each in str(error.details()) for each in DEAD)):
            raise
    return method(request, **options)
