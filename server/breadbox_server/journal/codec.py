"""How turns and snapshots are written: compressed JSON with a version, nothing that is executed.

Entries are frozen dataclasses of the core. Each is written as its class's name and its fields'
values in order; names of fields are not written, so `VERSION` must grow with any change to an
entry class or to the snapshot (a test pins the schema to the version).
"""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from sys import intern
from typing import Any, Final, NamedTuple, get_args, get_origin

import zstandard

from breadbox_server.core import entries as core_entries
from breadbox_server.core.errors import DomainError
from breadbox_server.core.inputs import AdmissionOutcome, Fragment, Payload

VERSION: Final = 1
"""Of turns and snapshots. A reader refuses any other."""
COMPRESSION_LEVEL: Final = 1
"""Snapshots are written in the background but read while everybody waits for the server."""
SNAPSHOT_SIZE_BYTES_MAX: Final = 2**30
"""Size of a decompressed snapshot beyond which it is taken for damage, declared or not."""

Entry = Any
"""Any of `breadbox_server.core.entries.Entry`."""


class JournalFormatError(Exception):
    """A record cannot be read: damaged, or written by another version of Breadbox."""


class Turn(NamedTuple):
    """What was decided together: instants of the server's clock, and entries."""

    entries: list[tuple[float, Entry]]


class Snapshot(NamedTuple):
    """The core after a turn."""

    sequence: int
    """The turn; 0 is before the first."""
    now: float
    """An instant that the server's clock had reached."""
    state: Any
    """Plain data, as the core gave it."""


# --- turns -----------------------------------------------------------------------------------


def encode_turn(entries: Iterable[tuple[float, Entry]]) -> bytes:
    """Write one turn. Small, and so not compressed: most turns hold a handful of entries."""
    body = [[now, type(entry).__name__, *_ENCODERS[type(entry)](entry)] for now, entry in entries]
    return json.dumps([VERSION, body], separators=(",", ":")).encode()


def decode_turn(data: bytes) -> Turn:
    """Read one turn.

    Raises:
        JournalFormatError: It is damaged, or of another version.
    """
    record = _loads(data)
    if not (isinstance(record, list) and len(record) == 2):
        raise JournalFormatError("a record is not a turn")
    version, body = record
    _check_version(version)
    try:
        entries = []
        for now, name, *values in body:
            entries.append((float(now), _DECODERS[name](values)))
    except (DomainError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise JournalFormatError(f"a turn holds an entry that cannot be read: {error!r}") from error
    return Turn(entries)


# --- snapshots -------------------------------------------------------------------------------


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Write one snapshot."""
    text = json.dumps(
        [VERSION, snapshot.sequence, snapshot.now, snapshot.state], separators=(",", ":")
    )
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(text.encode())


def decode_snapshot(data: bytes) -> Snapshot:
    """Read one snapshot.

    Raises:
        JournalFormatError: It is damaged, or of another version.
    """
    try:
        # zstandard heeds `max_output_size` only where the frame does not say its size.
        if zstandard.frame_content_size(data) > SNAPSHOT_SIZE_BYTES_MAX:
            raise JournalFormatError("a snapshot is damaged: it claims to be too large")
        text = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=SNAPSHOT_SIZE_BYTES_MAX
        )
    except zstandard.ZstdError as error:
        raise JournalFormatError(f"a snapshot is damaged: {error}") from error
    record = _loads(text)
    if not (isinstance(record, list) and len(record) == 4):
        raise JournalFormatError("a record is not a snapshot")
    version, sequence, now, state = record
    _check_version(version)
    return Snapshot(sequence, now, state)


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise JournalFormatError(f"a record is damaged: {error}") from error


def _check_version(version: Any) -> None:
    if version != VERSION:
        raise JournalFormatError(
            f"it was written in format {version!r}, and this server reads format {VERSION}"
        )


# --- dataclasses to lists and back -----------------------------------------------------------

Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]


def schema() -> list[str]:
    """Every entry class with its fields and their types, for the test that pins `VERSION`."""
    lines = []
    for kind in _classes_within(_KINDS.values()):
        hints = typing.get_type_hints(kind)
        fields = ", ".join(
            f"{field.name}: {_type_name(hints[field.name])}" for field in dataclasses.fields(kind)
        )
        lines.append(f"{kind.__name__}({fields})")
    return sorted(lines)


def _classes_within(kinds: Iterable[type]) -> set[type]:
    """Dataclasses, and those that their fields hold."""
    found: set[type] = set()
    waiting: list[Any] = list(kinds)
    while waiting:
        kind = waiting.pop()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind not in found:
            found.add(kind)
            waiting.extend(typing.get_type_hints(kind).values())
        waiting.extend(get_args(kind))
    return found


def _type_name(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{kind.__name__}[{', '.join(str(member.value) for member in kind)}]"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _make_encoder(kind: Any) -> Encoder | None:
    """How values of a type are written; None: as they are."""
    if isinstance(kind, typing.NewType):
        return _make_encoder(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda member: member.value
    if dataclasses.is_dataclass(kind):
        return _make_fields_encoder(kind)
    if get_origin(kind) in (typing.Union, types.UnionType):
        return _make_union_encoder(kind)
    if get_origin(kind) is tuple:
        (item, _) = get_args(kind)
        encode = _make_encoder(item)
        return list if encode is None else lambda items: [encode(value) for value in items]
    if kind in (str, int, float, bool):
        return None
    raise TypeError(f"{kind} cannot be journalled")


def _make_fields_encoder(kind: Any) -> Encoder:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    encoders = [_make_encoder(hints[name]) for name in names]
    plain = all(encode is None for encode in encoders)
    if plain:
        return lambda value: [getattr(value, name) for name in names]
    pairs = list(zip(names, encoders, strict=True))
    return lambda value: [
        getattr(value, name) if encode is None else encode(getattr(value, name))
        for name, encode in pairs
    ]


def _make_union_encoder(kind: Any) -> Encoder | None:
    """A union is one class or None, or several dataclasses told apart by name."""
    members = [member for member in get_args(kind) if member is not types.NoneType]
    if len(members) == 1:
        encode = _make_encoder(members[0])
        return None if encode is None else lambda value: None if value is None else encode(value)
    encoders = {member: _make_encoder(member) for member in members}
    return lambda value: (
        None
        if value is None
        else [
            type(value).__name__,
            *encoders[type(value)](value),  # type: ignore[misc]
        ]
    )


def _make_decoder(kind: Any) -> Decoder | None:
    """How values of a type are read; None: as they are."""
    if isinstance(kind, typing.NewType):
        return _make_decoder(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if dataclasses.is_dataclass(kind):
        return _make_fields_decoder(kind)
    if get_origin(kind) in (typing.Union, types.UnionType):
        return _make_union_decoder(kind)
    if get_origin(kind) is tuple:
        (item, _) = get_args(kind)
        decode = _make_decoder(item)
        return tuple if decode is None else lambda items: tuple(decode(value) for value in items)
    return None


def _make_fields_decoder(kind: Any) -> Decoder:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    decoders = [(field.name, _make_decoder(hints[field.name])) for field in fields]

    def decode(values: Sequence[Any]) -> Any:
        if len(values) != len(decoders):
            raise ValueError(f"{kind.__name__} has {len(decoders)} fields, not {len(values)}")
        return kind(
            **{
                name: value if decode is None else decode(value)
                for (name, decode), value in zip(decoders, values, strict=True)
            }
        )

    return decode


def _encode_taken(taken: core_entries.FragmentTaken) -> list[Any]:
    """Write a fragment as `_make_fields_encoder` would, in a third of the time."""
    fragment, payload = taken.fragment, taken.fragment.payload
    return [
        taken.buffer,
        [
            fragment.worker_id,
            fragment.fragment_index,
            fragment.session_id,
            fragment.model_version_min,
            fragment.model_version_max,
            [payload.payload_id, payload.size_bytes, payload.piece_size_bytes],
            fragment.step_count,
            fragment.discontinuity,
        ],
        _OUTCOME_VALUES[taken.outcome],
    ]


def _decode_taken(values: Sequence[Any]) -> core_entries.FragmentTaken:
    """Read a fragment as `_make_fields_decoder` would, in a third of the time.

    Nearly all of a long journal is fragments, and a restart waits for them. Equal ids are made one
    object, so that the core need not copy them.
    """
    buffer, plain, outcome = values
    worker_id, index, session_id, version_min, version_max, payload, steps, discontinuity = plain
    payload_id, size_bytes, piece_size_bytes = payload
    # Without the names' types: to call these would take a tenth of the time.
    return core_entries.FragmentTaken.restored(
        intern(buffer),  # type: ignore[arg-type]
        Fragment.restored(
            intern(worker_id),  # type: ignore[arg-type]
            index,
            intern(session_id),  # type: ignore[arg-type]
            version_min,
            version_min if version_min == version_max else version_max,
            Payload.restored(payload_id, size_bytes, piece_size_bytes),
            steps,
            discontinuity,
        ),
        _OUTCOMES[outcome],
    )


def _make_union_decoder(kind: Any) -> Decoder | None:
    members = [member for member in get_args(kind) if member is not types.NoneType]
    if len(members) == 1:
        decode = _make_decoder(members[0])
        return None if decode is None else lambda value: None if value is None else decode(value)
    decoders = {member.__name__: _make_decoder(member) for member in members}
    return lambda value: None if value is None else decoders[value[0]](value[1:])  # type: ignore[misc]


_OUTCOMES: Final = {outcome.value: outcome for outcome in AdmissionOutcome}
_OUTCOME_VALUES: Final = {outcome: outcome.value for outcome in AdmissionOutcome}
_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in get_args(core_entries.Entry)}
_ENCODERS: Final[dict[type, Encoder]] = {
    kind: _make_fields_encoder(kind) for kind in _KINDS.values()
} | {core_entries.FragmentTaken: _encode_taken}
_DECODERS: Final[dict[str, Decoder]] = {
    name: _make_fields_decoder(kind) for name, kind in _KINDS.items()
} | {core_entries.FragmentTaken.__name__: _decode_taken}
