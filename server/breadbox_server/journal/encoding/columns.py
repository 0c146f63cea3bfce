"""Fragments as columns, a repeated field for each of their fields, and back.

Of very many fragments this takes half the time that a message for each takes, both ways. Which
columns there are the schema says: they are named as the fields of `core.inputs.Fragment` and
`Payload`, and new ones need nothing here.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from breadbox_server.base.conversion import as_one_object
from breadbox_server.core.model.config import PRIORITY_DEFAULT
from breadbox_server.core.model.inputs import Fragment, Payload
from breadbox_server.journal.v1.journal_pb2 import FragmentColumns, StringColumn

_FIELDS: Final = FragmentColumns.DESCRIPTOR.fields
_OF_STRINGS: Final = frozenset(field.name for field in _FIELDS if field.message_type is not None)
_OF_TYPE: Final[dict[int, Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: False,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.0,
    FieldDescriptor.CPPTYPE_INT64: 0,
    FieldDescriptor.CPPTYPE_MESSAGE: "",
    FieldDescriptor.CPPTYPE_STRING: "",
    FieldDescriptor.CPPTYPE_UINT64: 0,
}
_DEFAULTS: Final[dict[str, Any]] = {field.name: _OF_TYPE[field.cpp_type] for field in _FIELDS} | {
    "priority": PRIORITY_DEFAULT
}
"""What an absent column stands for."""
_VERSIONS: Final = frozenset({"model_version_min", "model_version_max"})
"""Numbers of which very many are equal: these are one object, as the core has them."""
_GETTERS: Final = {
    name: attrgetter(name if name in Fragment.__slots__ else f"payload.{name}")
    for name in _DEFAULTS
}


def put_fragments(fragments: Sequence[Fragment], message: FragmentColumns) -> None:
    """Fill a message with fragments."""
    for name, get in _GETTERS.items():
        values = list(map(get, fragments))
        if values.count(_DEFAULTS[name]) == len(values):
            continue
        if name in _OF_STRINGS:
            _put_strings(values, getattr(message, name))
        else:
            getattr(message, name).extend(values)


def fragments_of(message: FragmentColumns) -> list[Fragment]:
    """The fragments of a message.

    Raises:
        ValueError: Columns differ in length.
    """
    count = len(message.payload_id)
    shared: dict[int, int] = {}
    columns: dict[str, Iterable[Any]] = {}
    for name, default in _DEFAULTS.items():
        column = getattr(message, name)
        values = _strings_of(column) if name in _OF_STRINGS else column
        if len(values) not in (0, count):
            raise ValueError(f"{len(values)} of {name} for {count} fragments")
        if not values:
            columns[name] = repeat(default, count)
        elif name in _VERSIONS:
            columns[name] = map(shared.setdefault, values, values)
        else:
            columns[name] = values
    columns["payload"] = map(Payload, *(columns.pop(name) for name in Payload.__slots__))
    return list(map(Fragment, *(columns[name] for name in Fragment.__slots__)))


def _put_strings(values: list[str], column: StringColumn) -> None:
    places = {text: place for place, text in enumerate(dict.fromkeys(values))}
    column.strings.extend(places)
    column.places.extend(map(places.__getitem__, values))


def _strings_of(column: StringColumn) -> list[str]:
    strings = list(map(as_one_object, column.strings))
    try:
        return list(map(strings.__getitem__, column.places))
    except IndexError:
        raise ValueError("a place beyond the strings") from None
