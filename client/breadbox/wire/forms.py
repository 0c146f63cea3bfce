"""Map a message to a plain value by one table, from which both conversions are compiled.

A `MessageMapping` pairs fields of the same name, `x_duration` or `x_seconds` with `x_s`, and enum
members of the same name; a table names the rest. The conversions are compiled at their first use,
so that they are as fast as functions written by hand: every fragment passes through some of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_args

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
V = TypeVar("V")
NOTHING: Mapping[str, Any] = {}


def seconds(span: Duration) -> float:
    """Return the seconds of a span."""
    return float(span.seconds + span.nanos / 1e9)


def put_seconds(span_s: float, message: Duration) -> None:
    """Fill a message with a span."""
    message.FromNanoseconds(round(span_s * 1e9))


class MessageMapping(Generic[M, V]):
    """The pairs of a message's fields and a value's attributes; creation fails if one is missing.

    `names`: attributes by field, if they differ. By attribute: `parts`, mappings of fields that are
    messages; `reads`, functions applied to read values; `absent`, values of absent fields; `same`,
    an earlier attribute to reuse the object of if equal; `within`, columns that are the message's
    own fields. `beside`: attributes that `read` gets as further arguments. `left_out`: unread
    fields.
    """

    def __init__(
        self,
        message_type: type[M],
        value_type: Callable[..., V],
        *,
        names: Mapping[str, str] = NOTHING,
        parts: Mapping[str, Any] = NOTHING,
        reads: Mapping[str, Callable[[Any], Any]] = NOTHING,
        absent: Mapping[str, Any] = NOTHING,
        same: Mapping[str, str] = NOTHING,
        within: Mapping[str, "Columns[Any] | Functions"] = NOTHING,
        beside: Sequence[str] = (),
        left_out: Sequence[str] = (),
    ) -> None:
        self.message_type = message_type
        self.value_type: Any = value_type
        self._parts = parts
        self._reads = reads
        self._absent = absent
        self._same = same
        self._within = within
        self._beside = beside
        taken = {*left_out, *(name for columns in within.values() for name in columns.fields)}
        fields: Sequence[Any] = message_type.DESCRIPTOR.fields
        self.fields: dict[str, Any] = {
            names.get(field.name) or _name_of(field): field
            for field in fields
            if field.name not in taken
        }
        wanted = {*self._attributes} - {*beside, *within}
        assert wanted == {*self.fields}, (value_type, wanted ^ {*self.fields})

    @property
    def _attributes(self) -> tuple[str, ...]:
        kind = self.value_type
        if named := getattr(kind, "_fields", None):
            return tuple(named)
        return tuple([each.name for each in fields(kind) if each.init])

    def _kinds(self, attribute: str) -> tuple[Any, ...]:
        annotation = self.value_type.__annotations__[attribute]
        return get_args(annotation) or (annotation,)

    @cached_property
    def read(self) -> Callable[..., V]:
        """Function from a message to a value."""
        known: dict[str, Any] = {"kind": self.value_type}
        # Positional arguments if possible, because they are faster.
        by_place = self.value_type.__match_args__
        arguments = [
            f"{'' if name in by_place else f'{name}='}{self._reading(name, known)}"
            for name in self._attributes
        ]
        heads = ", ".join(["m", *self._beside])
        source = f"def read({heads}):\n return kind({', '.join(arguments)})"
        read: Callable[..., V] = _compiled(source, known)
        return read

    def _reading(self, name: str, known: dict[str, Any]) -> str:
        if name in self._beside:
            return name
        if name in self._within:
            known[f"{name}_"] = self._within[name].read
            return f"{name}_(m)"
        field, part = self.fields[name], self._part(name)
        is_repeated = field.default_value == []
        as_is = (dict if field.message_type else tuple) if is_repeated else None
        change = self._reads.get(name) or (part.read if part else as_is)
        known[f"{name}_"], known[f"{name}0"] = change, self._absent.get(name)
        term = f"m.{field.name}"
        if change:
            term = f"tuple(map({name}_, {term}))" if is_repeated and part else f"{name}_({term})"
        if name in self._same.values():
            return f"({name}1 := {term})"
        if first := self._same.get(name):
            return f"({first}1 if (each := {term}) == {first}1 else each)"
        if field.has_presence and (name in self._absent or type(None) in self._kinds(name)):
            term = f"{term} if m.HasField({field.name!r}) else {name}0"
        return term

    @cached_property
    def put(self) -> Callable[[V, M], None]:
        """Function that fills a message, its second argument, in place; constructors would copy."""
        known: dict[str, Any] = {}
        lines = [self._putting(name, known) for name in (*self.fields, *self._within)]
        put: Callable[[V, M], None] = _compiled(
            "\n".join(["def put(v, m):", " pass", *lines]), known
        )
        return put

    def _putting(self, name: str, known: dict[str, Any]) -> str:
        term = f"v.{name}"
        if name in self._within:
            known[f"{name}_"] = self._within[name].put
            return f" {name}_({term}, m)"
        field, part = self.fields[name], self._part(name)
        place = f"m.{field.name}"
        is_repeated = field.default_value == []
        known[f"{name}_"], known[f"{name}0"] = part.put if part else None, self._absent.get(name)
        if field.message_type and part is None:
            return f" {place}.update({term})"
        if field.message_type and is_repeated:
            return f" for each in {term}: {name}_(each, {place}.add())"
        if is_repeated:
            return f" {place}.extend({term})"
        has_none = field.message_type or name in self._absent or type(None) in self._kinds(name)
        # With `!=` a dataclass would compare itself with None field by field.
        differs = f"!= {name}0" if name in self._absent else "is not None"
        condition = f"if {term} {differs}: " if has_none else ""
        if field.message_type:
            return f" {condition}{name}_({term}, {place})"
        return f" {condition}{place} = {f'{name}_({term})' if part else term}"

    def _part(self, name: str) -> Any:
        field = self.fields[name]
        if name in self._parts:
            return self._parts[name]
        if field.message_type is Duration.DESCRIPTOR:
            return DURATION
        if field.enum_type:
            kinds = self._kinds(name)
            known = members(field.enum_type, next(each for each in kinds if each is not type(None)))
            if type(None) in kinds:
                known[0] = None
            return Functions(known.__getitem__, known.numbers.__getitem__)
        return None

    def message(self, value: V) -> M:
        """Return the message for a value."""
        message = self.message_type()
        self.put(value, message)
        return message

    def misfit(self, value: V) -> tuple[str, Any, Exception]:
        """Return the attribute that `put` refuses, its value, and the error."""
        for name in self.fields:
            known: dict[str, Any] = {}
            line = self._putting(name, known)
            try:
                _compiled(f"def put(v, m):\n{line}", known)(value, self.message_type())
            except Exception as error:  # noqa: BLE001 - returned
                part, refused = self._parts.get(name), getattr(value, name)
                return (
                    part.misfit(refused) if type(part) is MessageMapping else (name, refused, error)
                )
        raise AssertionError("a value that does not fit has an attribute that does not")

    def given(self, message: M) -> dict[str, Any]:
        """Return a message's present fields by attribute; unspecified enums count as absent."""
        found = {}
        for name, field in self.fields.items():
            value = getattr(message, field.name)
            if message.HasField(field.name) if field.has_presence else value:
                part = self._part(name)
                try:
                    found[name] = part.read(value) if part else value
                except ValueError:
                    found[name] = None
        return found


class Functions:
    """Conversions written by hand; `fields` are the message's fields that they cover."""

    def __init__(
        self, read: Callable[[Any], Any], put: Callable[..., Any], fields: Sequence[str] = ()
    ) -> None:
        self.read = read
        self.put = put
        self.fields: Sequence[str] = fields


DURATION = Functions(seconds, put_seconds)


class Choice(Functions):
    """A message with only a `oneof`; a field with an empty message is converted to its name."""

    def __init__(self, oneof: str, forms: Mapping[str, MessageMapping[Any, Any]] = NOTHING) -> None:
        def read(message: Message) -> Any:
            field = message.WhichOneof(oneof)
            return forms[field].read(getattr(message, field)) if field in forms else field

        def put(value: Any, message: Message) -> None:
            for field, form in forms.items():
                if isinstance(value, form.value_type):
                    form.put(value, getattr(message, field))
                    return
            names = [each.name for each in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
            if value in forms or value not in names:
                raise ValueError(f"must be one of {', '.join(names)}")
            getattr(message, value).SetInParent()

        super().__init__(read, put)


class Columns(Generic[V]):
    """Rows of one type as columns, a repeated field for each attribute.

    `names`: fields, if the names differ. `defaults`: a column with only this value is left out.
    `parts`: conversions of columns that are no lists of values. `within`: attributes of several
    columns.
    """

    def __init__(
        self,
        row_type: Callable[..., V],
        *,
        names: Mapping[str, str] = NOTHING,
        defaults: Mapping[str, Any] = NOTHING,
        parts: Mapping[str, Any] = NOTHING,
        within: Mapping[str, "Columns[Any] | Functions"] = NOTHING,
    ) -> None:
        make = getattr(row_type, "_make", None)
        # `_make` of a named tuple is faster than its type.
        self._make_rows: Any = lambda columns: (
            map(make, zip(*columns, strict=True)) if make else map(row_type, *columns)
        )
        attributes: tuple[str, ...] = row_type.__match_args__  # type: ignore[attr-defined]
        self._columns = [
            (
                within[name] if name in within else parts.get(name),
                None if name in within else names.get(name, name),
                attrgetter(name),
                defaults.get(name, _NO_DEFAULT),
            )
            for name in attributes
        ]
        own: list[str] = [field for _, field, _, _ in self._columns if field]
        self.fields: Sequence[str] = (
            *own,
            *(field for each in within.values() for field in each.fields),
        )

    def put(self, rows: Sequence[V], message: Any) -> None:
        """Fill a message with rows."""
        for part, field, get, default in self._columns:
            values = list(map(get, rows))
            if field is None:
                part.put(values, message)  # type: ignore[union-attr]
            elif values.count(default) < len(values) or default is _NO_DEFAULT:
                column = getattr(message, field)
                column.extend(values) if part is None else part.put(values, column)

    def read(self, message: Any) -> tuple[V, ...]:
        """Return the rows of a message."""
        columns: list[Any] = []
        for part, field, _, _ in self._columns:
            column = message if field is None else getattr(message, field)
            columns.append(column if part is None else part.read(column))
        count = max(map(len, columns))
        for place, (_, field, _, default) in enumerate(self._columns):
            if len(columns[place]) != count:
                if columns[place] or default is _NO_DEFAULT:
                    raise ValueError(f"{len(columns[place])} of {field} for {count}")
                columns[place] = repeat(default, count)
        return tuple(self._make_rows(columns))


_NO_DEFAULT = object()


class members(dict[int, Any]):  # noqa: N801 - read as a function
    """Return the members of an enum by number: `LEASE_END_EXPIRED` is `LeaseEnd.EXPIRED`."""

    def __init__(self, on_wire: Any, enum: type[Enum]) -> None:
        zero = on_wire.values_by_number[0].name
        prefix = zero.removesuffix("UNSPECIFIED")
        super().__init__(
            (on_wire.values_by_name[f"{prefix}{each.name}"].number, each) for each in enum
        )
        self.numbers = _Numbers({member: number for number, member in self.items()})
        self._name = on_wire.name

    def __missing__(self, number: int) -> Any:
        raise ValueError(f"{self._name} has no value {number} here")


class _Numbers(dict[Any, int]):
    """Numbers of an enum's members."""

    def __missing__(self, value: Any) -> int:
        raise ValueError(f"must be one of {', '.join(map(str, self))}")


def _name_of(field: Any) -> str:
    if field.message_type is Duration.DESCRIPTOR:
        return f"{field.name.removesuffix('_duration')}_s"
    name = field.name.removesuffix("_seconds")
    return field.name if name == field.name else f"{name}_s"


def _compiled(source: str, known: dict[str, Any]) -> Any:
    # Source made from the tables of this package alone, as `dataclasses` makes methods.
    found: dict[str, Any] = {}
    exec(source, known, found)
    return found.popitem()[1]
