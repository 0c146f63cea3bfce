"""Checks of names, ids and numbers that a caller sent; each raises InvalidArgumentError."""

import re
from functools import lru_cache

from breadbox_server.core.model.config import (
    BUFFER_NAME_LENGTH_MAX,
    FRAGMENT_INDEX_MAX,
    MODEL_VERSION_MAX,
    NAME_SIZE_BYTES_MAX,
    PART_NAME_BYTES_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    TOKENS,
)
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import ModelVersion
from breadbox_server.core.model.inputs import Fragment, Payload

PAYLOAD_SIZE_BYTES_MAX = 2**40
PART_VERSION = ModelVersion(2**62)
"""Version of parts, above all: they do not make their group stale."""
STEP_COUNT_MAX = 2**31
WORLD_SIZE_MAX = 65_536
_BUFFER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{BUFFER_NAME_LENGTH_MAX - 1}}}")
_PAYLOAD_ID = re.compile(r"[0-9a-f]{32}")


def check_buffer_name(field: str, name: str) -> None:
    """Refuse a buffer name that could not stand in a key, a path or a metric's label."""
    if not isinstance(name, str) or _BUFFER_NAME.fullmatch(name) is None:
        raise InvalidArgumentError(
            field, "must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )


@lru_cache(maxsize=4096)
def check_name(field: str, name: str) -> None:
    """Refuse an id that is empty, long or unprintable; the error does not repeat it."""
    # Remembered, since nearly all fragments come with names that were checked before.
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(field, "must not be empty")
    if not name.isprintable():
        raise InvalidArgumentError(field, "must be printable text")
    if len(name) > NAME_SIZE_BYTES_MAX or len(name.encode()) > NAME_SIZE_BYTES_MAX:
        raise InvalidArgumentError(field, f"must be at most {NAME_SIZE_BYTES_MAX} bytes of UTF-8")
    if "/" in name or "\\" in name:
        raise InvalidArgumentError(field, "must not hold path separators")


def check_int(field: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse what is not a whole number from `minimum` to `maximum`, both included."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise InvalidArgumentError(
            field, f"must be a whole number from {minimum} to {maximum}, got {value!r}"
        )


def check_version(field: str, version: int) -> None:
    """Refuse a model version that is negative or absurdly large."""
    check_int(field, version, 0, MODEL_VERSION_MAX)


def check_priority(field: str, priority: float) -> None:
    """Refuse a priority that is negative, no number, or too large to be added up."""
    # Written so that NaN is refused.
    if not (isinstance(priority, int | float) and 0.0 <= priority <= PRIORITY_MAX):
        raise InvalidArgumentError(
            field, f"must be a number from 0 to {PRIORITY_MAX:g}, got {priority!r}"
        )


def check_payload(field: str, payload: Payload) -> None:
    """Refuse a payload whose id or sizes are malformed."""
    if not isinstance(payload.payload_id, str) or _PAYLOAD_ID.fullmatch(payload.payload_id) is None:
        raise InvalidArgumentError(
            f"{field}.payload_id", "must be 32 lower-case hexadecimal digits"
        )
    check_int(f"{field}.size_bytes", payload.size_bytes, 1, PAYLOAD_SIZE_BYTES_MAX)
    check_int(f"{field}.piece_size_bytes", payload.piece_size_bytes, 0, PAYLOAD_SIZE_BYTES_MAX)


def check_fragment(fragment: Fragment) -> None:
    """Refuse a fragment that is malformed whatever the state of the buffer."""
    is_part = fragment.part or (fragment.numbers and not fragment.payload.size_bytes)
    check_name("worker_id", fragment.worker_id)
    if fragment.session_id or not is_part:
        check_name("session_id", fragment.session_id)
    check_int("fragment_index", fragment.fragment_index, 0, FRAGMENT_INDEX_MAX)
    check_version("model_version_min", fragment.model_version_min)
    check_version("model_version_max", fragment.model_version_max)
    if fragment.model_version_max < fragment.model_version_min:
        raise InvalidArgumentError(
            "model_version_max",
            f"must be at least model_version_min ({fragment.model_version_min}), "
            f"got {fragment.model_version_max}",
        )
    check_int("step_count", fragment.step_count, 1, STEP_COUNT_MAX)
    if fragment.priority != PRIORITY_DEFAULT:
        check_priority("priority", fragment.priority)
    if is_part:
        _check_part(fragment)
    else:
        check_payload("payload", fragment.payload)


def check_part_name(field: str, name: str) -> None:
    """Refuse a name that no part can have; the error does not repeat it."""
    if not name.isprintable() or len(name.encode()) > PART_NAME_BYTES_MAX:
        raise InvalidArgumentError(
            field, f"must be at most {PART_NAME_BYTES_MAX} bytes of printable text"
        )
    if name == TOKENS:
        raise InvalidArgumentError(field, f"cannot be {TOKENS!r}, the name of a member's sequence")


def _check_part(fragment: Fragment) -> None:
    name, payload = fragment.part, fragment.payload
    check_part_name("part", name)
    if name or payload.payload_id:
        check_payload("payload", payload)
