"""Numbers of sequences as text, and back, for clients and servers."""

import json
from collections.abc import Mapping
from typing import Any, Final

from breadbox.model.errors import InvalidRequestError
from breadbox.model.types import NUMBER_BYTES_MAX, NUMBERS_MAX, Number, checked_numbers
from breadbox.wire.forms import Functions

TEXT_LENGTH_MAX: Final = NUMBERS_MAX * (2 * len("\\u0000") * NUMBER_BYTES_MAX + 8)
"""Most characters of all numbers of a sequence: each of a text may be written as six."""
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_text(numbers: Mapping[str, Number]) -> str:
    """Return numbers as the metadata has them."""
    return _encode(checked_numbers(numbers)) if numbers else ""


def from_text(text: str) -> dict[str, Any]:
    """Return the numbers of a metadata."""
    numbers: dict[str, Any] = json.loads(text) if text else {}
    return numbers


def check(text: str) -> None:
    """Raise InvalidRequestError for a text that is no numbers, or too many or too large."""
    try:
        numbers = from_text(text) if len(text) <= TEXT_LENGTH_MAX else None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("numbers", "are not JSON") from error
    if not isinstance(numbers, dict):
        raise InvalidRequestError("numbers", f"are no object of at most {TEXT_LENGTH_MAX} letters")
    checked_numbers(numbers)


NUMBERS: Final = Functions(from_text, to_text)
