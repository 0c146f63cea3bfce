"""Numbers of sequences as bytes, and back, for clients and servers."""

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import DecodeError

from breadbox.model.errors import InvalidRequestError
from breadbox.model.types import NUMBER_BYTES_MAX, NUMBERS_MAX, Number, checked_numbers
from breadbox.v1 import fragment_pb2
from breadbox.wire.forms import Functions

NUMBERS_BYTES_MAX: Final = NUMBERS_MAX * (2 * NUMBER_BYTES_MAX + 16)
"""Most bytes of all numbers of a sequence."""
_FIELDS: Final[Mapping[Any, str]] = {int: "integer", float: "real", bool: "flag", str: "text"}


def to_bytes(numbers: Mapping[str, Number]) -> bytes:
    """Return numbers as the metadata has them: equal bytes for equal numbers."""
    if not numbers:
        return b""
    message = fragment_pb2.Numbers()
    for name, value in checked_numbers(numbers).items():
        setattr(message.values[name], _FIELDS[type(value)], value)
    return message.SerializeToString(deterministic=True)


def from_bytes(raw: bytes) -> dict[str, Number]:
    """Return the numbers of a metadata, less those of a kind that this library does not know."""
    if not raw:
        return {}
    values = fragment_pb2.Numbers.FromString(raw).values
    kinds = [(name, value, value.WhichOneof("value")) for name, value in values.items()]
    return {name: getattr(value, kind) for name, value, kind in kinds if kind}


def check(raw: bytes) -> None:
    """Raise InvalidRequestError for bytes that are no numbers, too many or too large."""
    if len(raw) > NUMBERS_BYTES_MAX:
        raise InvalidRequestError("numbers", f"must be at most {NUMBERS_BYTES_MAX} bytes")
    try:
        checked_numbers(from_bytes(raw))
    except DecodeError as error:
        raise InvalidRequestError("numbers", "are not a serialised Numbers") from error


NUMBERS: Final = Functions(from_bytes, to_bytes)
