"""The attributes of a payload, for inspection: its producer, session and place."""

from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError

from breadbox.model.errors import PayloadCorruptError, UnsupportedArrayError
from breadbox.payload.arrays.limits import ATTRIBUTE_CHARACTERS_MAX, ATTRIBUTES_MAX
from breadbox.v1 import payload_pb2
from breadbox.wire.message_parts import require_few_parts

_KIND: Final = payload_pb2.DESCRIPTOR.message_types_by_name["PayloadAttributes"]

_PARTS_MAX: Final = 64 * ATTRIBUTES_MAX
"""So many that those of usual payloads are not counted."""


def serialize_attributes(attributes: Mapping[str, str]) -> bytes:
    """Return the attributes section of a payload; two of them joined are one as well.

    Raises:
        UnsupportedArrayError: They are beyond a limit, or no UTF-8 text.
    """
    try:
        raw = payload_pb2.PayloadAttributes(values=attributes).SerializeToString(deterministic=True)
    except (UnicodeEncodeError, ValueError) as error:
        raise UnsupportedArrayError("", "an attribute is not UTF-8 text") from error
    if len(attributes) > ATTRIBUTES_MAX:
        raise UnsupportedArrayError("", f"more than {ATTRIBUTES_MAX} attributes")
    if len(raw) > ATTRIBUTE_CHARACTERS_MAX:  # Else no single one can be too long.
        for name, text in attributes.items():
            if max(len(name), len(text)) > ATTRIBUTE_CHARACTERS_MAX:
                raise UnsupportedArrayError("", f"attribute {name[:40]!r} is too long")
    return raw


def parse_attributes(raw: bytes) -> dict[str, str]:
    """Read an attributes section.

    Raises:
        PayloadCorruptError: It is none, or beyond a limit.
    """
    try:
        require_few_parts(raw, _KIND, _PARTS_MAX)
        attributes = payload_pb2.PayloadAttributes.FromString(raw)
    except (DecodeError, ValueError) as error:
        raise PayloadCorruptError(f"a payload's attributes cannot be read: {error}") from error
    if len(attributes.values) > ATTRIBUTES_MAX:
        raise PayloadCorruptError(f"a payload has {len(attributes.values)} attributes")
    return dict(attributes.values)
