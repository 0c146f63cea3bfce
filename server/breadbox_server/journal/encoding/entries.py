"""The core's entries as messages, and back: a table for each kind, and columns for runs."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message

from breadbox.wire.forms import Columns, Functions, MessageMapping
from breadbox_server.base.conversion import (
    CONFIG,
    METADATA,
    PAYLOAD,
    SCHEMA,
    as_one_object,
    given_limits,
)
from breadbox_server.core.model import entries as core
from breadbox_server.core.model import inputs
from breadbox_server.core.model.config import PRIORITY_DEFAULT, BufferConfig
from breadbox_server.core.model.entries import Entry, FragmentTaken
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment, Payload
from breadbox_server.journal.encoding.frames import JournalFormatError, NewerFormatError
from breadbox_server.journal.v1 import journal_pb2 as pb

RUN_MIN: Final = 16
"""Fragments in a row from which on columns cost less than a message for each."""
_Messages = RepeatedCompositeFieldContainer[pb.Entry]

_NO_CALL_SETS: Final = {
    "outcomes_per_worker_max": "outcomes_per_worker_max",
    "requests_remembered_max": "requests_remembered_max",
    "retry_delay_seconds": "retry_delay_s",
}
"""Limits beside those of `breadbox.v1.BufferConfig`: fields, and attributes of the core's."""


def _put_limits(value: BufferConfig, message: pb.BufferLimits) -> None:
    CONFIG.put(value, message.config)
    for field, name in _NO_CALL_SETS.items():
        setattr(message, field, getattr(value, name))


def _limits_of(message: pb.BufferLimits) -> BufferConfig:
    """Read limits; one that is absent, since it is newer, has its default."""
    more = {
        name: getattr(message, field)
        for field, name in _NO_CALL_SETS.items()
        if message.HasField(field)
    }
    return BufferConfig(**given_limits(message.config), **more)


LIMITS: Final = Functions(_limits_of, _put_limits)


def limits_to_text(value: BufferConfig) -> str:
    """Write limits as one line of JSON."""
    message = pb.BufferLimits()
    LIMITS.put(value, message)
    return json_format.MessageToJson(message, indent=None)


def limits_of_text(text: str) -> BufferConfig:
    """Read what `limits_to_text` wrote, of whichever version."""
    try:
        message = json_format.Parse(text, pb.BufferLimits(), ignore_unknown_fields=True)
        return _limits_of(message)
    except (json_format.ParseError, DomainError) as error:
        raise JournalFormatError(f"limits cannot be read: {error}") from error


def _put_strings(values: list[str], column: pb.StringColumn) -> None:
    places = {text: place for place, text in enumerate(dict.fromkeys(values))}
    column.strings.extend(places)
    column.places.extend(map(places.__getitem__, values))


def _strings_of(column: pb.StringColumn) -> list[str]:
    strings = list(map(as_one_object, column.strings))
    try:
        return list(map(strings.__getitem__, column.places))
    except IndexError:
        raise ValueError("a place beyond the strings") from None


_STRINGS: Final = Functions(_strings_of, _put_strings)


def _versions_of(column: Sequence[int]) -> list[int]:
    """Read numbers of which very many are equal as one object each, as the core has them."""
    shared: dict[int, int] = {}
    return list(map(shared.setdefault, column, column))


_VERSIONS: Final = Functions(_versions_of, lambda values, column: column.extend(values))
_OF_TYPE: Final[dict[int, Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: False,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.0,
    FieldDescriptor.CPPTYPE_MESSAGE: "",
    FieldDescriptor.CPPTYPE_STRING: "",
}
_DEFAULTS: Final = {
    field.name: _OF_TYPE.get(field.cpp_type, 0) for field in pb.FragmentColumns.DESCRIPTOR.fields
} | {"priority": PRIORITY_DEFAULT}
_PARTS: Final = {
    field.name: _STRINGS for field in pb.FragmentColumns.DESCRIPTOR.fields if field.message_type
} | {"model_version_min": _VERSIONS, "model_version_max": _VERSIONS}
FRAGMENTS: Final = Columns(
    Fragment,
    defaults=_DEFAULTS,
    parts=_PARTS,
    within={"payload": Columns(Payload, defaults=_DEFAULTS, parts=_PARTS)},
)
"""Columns take half the time of a message per fragment, both ways. They are named as what they are
of, and new ones need nothing here."""


def _put_priorities(pairs: Sequence[tuple[int, float]], message: pb.PrioritiesUpdated) -> None:
    message.chunk_ids.extend([chunk_id for chunk_id, _ in pairs])
    message.priorities.extend([priority for _, priority in pairs])


def _form(
    message_type: type[Message], entry_type: type[Any], **table: Any
) -> MessageMapping[Any, Any]:
    return MessageMapping(message_type, entry_type, beside=("buffer",), **table)


_PRIORITIES: Final = Functions(
    lambda message: tuple(zip(message.chunk_ids, message.priorities, strict=True)),
    _put_priorities,
    fields=("chunk_ids", "priorities"),
)
_SESSION: Final = {"session_id": as_one_object}
_FORMS: Final[dict[str, MessageMapping[Any, Any]]] = {
    "buffer_created": _form(
        pb.BufferCreated, core.BufferCreated, names={"limits": "config"}, parts={"config": LIMITS}
    ),
    "time_passed": _form(pb.TimePassed, core.TimePassed),
    "tickets_given": _form(pb.TicketsGiven, core.TicketsGiven, names={"lease_seconds": "lease_s"}),
    "ticket_renewed": _form(pb.TicketRenewed, inputs.RenewTicket),
    "ticket_given_back": _form(pb.TicketGivenBack, inputs.GiveBackTicket),
    "members_dropped": _form(pb.MembersDropped, inputs.DropMembers),
    "grant_made": _form(pb.GrantMade, core.GrantMade, names={"lease_seconds": "leases_s"}),
    "session_started": _form(pb.SessionStarted, inputs.StartSession, reads=_SESSION),
    "session_ended": _form(pb.SessionEnded, inputs.EndSession, reads=_SESSION),
    "model_published": _form(
        pb.ModelPublished, inputs.PublishModel, reads=_SESSION, parts={"weights": PAYLOAD}
    ),
    "lease_renewed": _form(pb.LeaseRenewed, inputs.RenewLease),
    "lease_released": _form(pb.LeaseReleased, inputs.ReleaseLease, names={"end": "mode"}),
    "grant_undone": _form(pb.GrantUndone, inputs.UndeliveredGrant),
    "payloads_dropped": _form(pb.PayloadsDropped, inputs.DropPayloads),
    "unreadable_reported": _form(pb.UnreadableReported, inputs.ReportUnreadable),
    "buffer_updated": _form(
        pb.BufferUpdated, inputs.UpdateBuffer, names={"limits": "config"}, parts={"config": LIMITS}
    ),
    "buffer_deleted": _form(pb.BufferDeleted, inputs.DeleteBuffer),
    "schema_told": _form(
        pb.SchemaTold,
        inputs.DeclareSchema,
        names={"hash": "schema_hash"},
        reads=_SESSION,
        parts={"schema": SCHEMA},
    ),
    "priorities_updated": _form(
        pb.PrioritiesUpdated,
        inputs.UpdatePriorities,
        names={"deleted_chunk_ids": "deleted"},
        within={"priorities": _PRIORITIES},
    ),
    "subscription_created": _form(
        pb.SubscriptionCreated, inputs.Subscribe, names={"retaining": "is_retaining"}
    ),
    "chunks_acknowledged": _form(pb.ChunksAcknowledged, inputs.Acknowledge),
    "subscription_deleted": _form(pb.SubscriptionDeleted, inputs.Unsubscribe),
}
_KINDS: Final = {form.value_type: kind for kind, form in _FORMS.items()}
_TAKEN: Final = {
    AdmissionOutcome.ADMITTED: "fragment_admitted",
    AdmissionOutcome.STALE: "fragment_stale",
}


def put_entries(entries: Sequence[tuple[float, Entry]], messages: _Messages) -> None:
    """Add entries to a turn's, in order."""
    if len(entries) < RUN_MIN:
        _put_each(entries, messages)
        return
    for buffer, group in groupby(entries, _buffer_of_run):
        run = list(group)
        if buffer is None or len(run) < RUN_MIN:
            _put_each(run, messages)
            continue
        message = messages.add(buffer=buffer)
        message.fragments_admitted.nows.extend([now for now, _ in run])
        fragments = [taken.fragment for _, taken in run]  # type: ignore[union-attr]
        FRAGMENTS.put(fragments, message.fragments_admitted.fragments)


def _buffer_of_run(timed: tuple[float, Entry]) -> BufferName | None:
    entry = timed[1]
    is_admitted = type(entry) is FragmentTaken and entry.outcome is AdmissionOutcome.ADMITTED
    return entry.buffer if is_admitted else None


def _put_each(entries: Iterable[tuple[float, Entry]], messages: _Messages) -> None:
    for now, entry in entries:
        message = messages.add()
        message.now = now
        message.buffer = entry.buffer
        if type(entry) is FragmentTaken:
            METADATA.put(entry.fragment, getattr(message, _TAKEN[entry.outcome]))
        else:
            kind = _KINDS[type(entry)]
            decision = getattr(message, kind)
            decision.SetInParent()
            _FORMS[kind].put(entry, decision)


def entries_of(messages: Iterable[pb.Entry]) -> list[tuple[float, Entry]]:
    """The entries of a turn, in order."""
    read: list[tuple[float, Entry]] = []
    buffer = BufferName("")
    for message in messages:
        kind = message.WhichOneof("decision")
        if message.buffer != buffer:
            buffer = BufferName(as_one_object(message.buffer))
        if kind == "fragment_admitted":
            fragment = METADATA.read(message.fragment_admitted)
            read.append((message.now, FragmentTaken(buffer, fragment, AdmissionOutcome.ADMITTED)))
        elif kind == "fragments_admitted":
            run = message.fragments_admitted
            taken = [
                FragmentTaken(buffer, each, AdmissionOutcome.ADMITTED)
                for each in FRAGMENTS.read(run.fragments)
            ]
            read += zip(run.nows, taken, strict=True)
        elif kind == "fragment_stale":
            fragment = METADATA.read(message.fragment_stale)
            read.append((message.now, FragmentTaken(buffer, fragment, AdmissionOutcome.STALE)))
        elif kind is None:
            raise NewerFormatError("it holds an entry of a kind that this server does not know")
        else:
            read.append((message.now, _FORMS[kind].read(getattr(message, kind), buffer)))
    return read
