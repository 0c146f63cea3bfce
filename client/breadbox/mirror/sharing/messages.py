"""Encode the messages between a mirror's process and the processes that read its memory.

They use sockets that keep messages apart; each message is one line of JSON. Before the first, each
end checks that the other is of the same user.
"""

import json
import os
import secrets
import socket
import struct
from typing import Any, Final

from breadbox.model import errors
from breadbox.model.errors import PermissionDeniedError, ReplayBufferError

MESSAGE_BYTES_MAX: Final = 1 << 16
_ADDRESS_PREFIX: Final = "breadbox-mirror-"


def new_address() -> str:
    """Return a random address for a mirror's process on this host."""
    return _ADDRESS_PREFIX + secrets.token_hex(16)


def place_of(address: str) -> str:
    """Return the abstract socket name of an address, which leaves no file behind."""
    return "\0" + address


def is_address(text: object) -> bool:
    """Return True if a text looks like an address of `new_address`."""
    return isinstance(text, str) and text.startswith(_ADDRESS_PREFIX)


def require_same_user(connection: socket.socket) -> None:
    """Raise PermissionDeniedError if the other end is another user's process."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user_id, _ = struct.unpack("3i", data)
    if user_id != os.geteuid():
        raise PermissionDeniedError(
            f"the process at the other end is of user {user_id}, this one of {os.geteuid()}: a "
            "mirror is shared among processes of one user"
        )


def encode(message: Any) -> bytes:
    """Encode plain data, or an error, as a message."""
    if isinstance(message, BaseException):
        message = {"error": _described(message)}
    return json.dumps(message, default=os.fspath).encode()


def decode(data: bytes) -> Any:
    """Decode a message.

    Raises:
        ReplayBufferError: The message is this error.
    """
    message = json.loads(data)
    if isinstance(message, dict) and "error" in message:
        raise _remade(message["error"])
    return message


def _described(error: BaseException) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in vars(error).items()
        if value is None or isinstance(value, str | int | float)
    }
    return {"kind": type(error).__name__, "text": str(error)[:10_000], "fields": plain}


def _remade(described: dict[str, Any]) -> ReplayBufferError:
    """Return an error of this library as it was, or any other by its name and text."""
    kind = getattr(errors, described["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, ReplayBufferError)):
        return ReplayBufferError(f"{described['kind']}: {described['text']}")
    error = kind.__new__(kind)
    error.args = (described["text"],)
    vars(error).update(described["fields"])
    return error
