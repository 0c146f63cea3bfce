"""All limits of a buffer as a message and as text, and back."""

from typing import Final

from google.protobuf import json_format

from breadbox_server.base import conversion as convert
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import DomainError
from breadbox_server.journal.encoding.frames import JournalFormatError
from breadbox_server.journal.v1.journal_pb2 import BufferLimits

_BEYOND_THE_WIRE: Final = {
    "outcomes_per_worker_max": "outcomes_per_worker_max",
    "requests_remembered_max": "requests_remembered_max",
    "retry_delay_seconds": "retry_delay_s",
}
"""Fields of the message that no call sets, and what the core calls them."""


def put_limits(value: BufferConfig, message: BufferLimits) -> None:
    """Fill a message with limits."""
    message.config.CopyFrom(convert.to_config(value))
    for field, name in _BEYOND_THE_WIRE.items():
        setattr(message, field, getattr(value, name))


def limits_of(message: BufferLimits) -> BufferConfig:
    """The limits of a message; one that is absent, since it is newer, has its default.

    Raises:
        DomainError: They cannot be.
    """
    beyond = {
        name: getattr(message, field)
        for field, name in _BEYOND_THE_WIRE.items()
        if message.HasField(field)
    }
    return convert.config(message.config, BufferConfig(**beyond))


def limits_to_text(value: BufferConfig) -> str:
    """Limits as one line of JSON."""
    message = BufferLimits()
    put_limits(value, message)
    return json_format.MessageToJson(message, indent=None)


def limits_of_text(text: str) -> BufferConfig:
    """Read what `limits_to_text` wrote, of whichever version.

    Raises:
        JournalFormatError: It is nothing of the kind.
    """
    try:
        return limits_of(json_format.Parse(text, BufferLimits(), ignore_unknown_fields=True))
    except (json_format.ParseError, DomainError) as error:
        raise JournalFormatError(f"limits cannot be read: {error}") from error
