"""What the arrays of a session's fragments are, and how two fragments differ in that (B30)."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from breadbox_server.core.model.errors import SchemaMismatchError

NO_SCHEMA: Final = 0
"""The `schema_hash` of a fragment whose producer declares no schema."""

ORIGINS_MAX: Final = 16
"""Most origins of a schema that are compared; further ones are ignored."""

SCHEMAS_MAX: Final = 16
"""Most schemas of a session that are remembered. Beyond them, no producer is asked for its own."""

_KINDS: Final = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


_SEQUENCES_REMEDY: Final = (
    "the same arrays, but for the number of tokens and the lengths of the context; start "
    "a new session for others"
)


class SchemaArray(NamedTuple):
    """Path, dtype and per-step shape of one array of a fragment."""

    path: str
    dtype: str
    """As the payload format writes it, such as "<f4"."""
    shape: tuple[int, ...]
    """Shape of one step, or of the whole array where it has no steps."""

    def describe(self) -> str:
        """Return dtype and shape as people write them: "float32[84, 84]"."""
        order, kind, size = self.dtype[:1], self.dtype[1:2], self.dtype[2:]
        name = self.dtype
        if order in "<|" and kind in _KINDS and size.isdecimal():
            name = _KINDS[kind] if kind == "b" else f"{_KINDS[kind]}{8 * int(size)}"
        # Of a sequence's context the ranks alone are known.
        lengths = ", ".join("any" if length < 0 else str(length) for length in self.shape)
        return f"{name}[{lengths}]"


class SchemaOrigin(NamedTuple):
    """What a producer says its steps come from; compared where both say it, and not understood."""

    path: str
    """What is said, such as "environment wrappers"."""
    text: str

    def describe(self) -> str:
        """Return the text."""
        return self.text


Schema = tuple[SchemaArray | SchemaOrigin, ...]
"""Arrays, then origins; no path twice among either."""

UNSAID: Final[Schema] = ()
"""The schema of fragments whose producer declares none."""


class SessionSchemas(dict[int, Schema]):
    """The schemas of the current session, by hash, as declared; at most `SCHEMAS_MAX`."""

    @property
    def first_hash(self) -> int | None:
        """The hash of the schema declared first, or None if none was."""
        return next(iter(self), None)

    @property
    def is_full(self) -> bool:
        """Whether no more are remembered."""
        return len(self) >= SCHEMAS_MAX

    def joined(self, schema: Schema, session: str) -> Schema:
        """Return the first schema with what a like one adds to its origins.

        Raise SchemaMismatchError, with a path, if arrays differ, or an origin that both say.
        """
        first_hash = self.first_hash
        assert first_hash is not None, "S1: a schema to compare with"
        first = self[first_hash]
        wanted, got = _by_path(first, SchemaArray), _by_path(schema, SchemaArray)
        paths = [path for path in wanted | got if wanted.get(path) != got.get(path)]
        said, says = _by_path(first, SchemaOrigin), _by_path(schema, SchemaOrigin)
        others = sorted(path for path in said.keys() & says if said[path] != says[path])
        if paths and _is_sequence(wanted) != _is_sequence(got):
            kinds = ("fragments of steps", "sequences of tokens")
            raise SchemaMismatchError(
                session,
                "kind",
                *(kinds[_is_sequence(each)] for each in (wanted, got)),
                remedy=f"to send {kinds[_is_sequence(wanted)]}; give the others a buffer of their "
                "own",
            )
        if paths:
            # What follows a step differs with the observation, which says more.
            path = min(paths, key=lambda path: (path.startswith("next_obs"), path))
            raise SchemaMismatchError(
                session,
                path,
                _described(wanted.get(path), is_said=bool(first)),
                _described(got.get(path), is_said=bool(schema)),
                more_count=len(paths) - 1,
                **({"remedy": _SEQUENCES_REMEDY} if _is_sequence(wanted) else {}),
            )
        if others:
            texts = said[others[0]].describe(), says[others[0]].describe()
            raise SchemaMismatchError(
                session,
                others[0],
                *texts,
                more_count=len(others) - 1,
                remedy="one environment, wrappers and policy options; start a new session for "
                "others, or let a worker that differs on purpose say nothing of them (`breadbox "
                "rollout --no-declare-origin`)",
            )
        new = [origin for path, origin in says.items() if path not in said]
        return (*first, *new[: ORIGINS_MAX - len(said)])

    def find(self, schema_hash: int) -> Schema | None:
        """Return the schema for a hash, or None if unknown; `NO_SCHEMA` always resolves."""
        return UNSAID if schema_hash == NO_SCHEMA else self.get(schema_hash)

    def note(self, schema_hash: int) -> None:
        """Remember `NO_SCHEMA` if an admitted fragment declares no schema."""
        if schema_hash == NO_SCHEMA and NO_SCHEMA not in self and not self.is_full:
            self[NO_SCHEMA] = UNSAID


def _by_path(
    schema: Schema, kind: type[SchemaArray] | type[SchemaOrigin]
) -> dict[str, SchemaArray | SchemaOrigin]:
    return {part.path: part for part in schema if isinstance(part, kind)}


def _is_sequence(arrays: Mapping[str, SchemaArray | SchemaOrigin]) -> bool:
    return any(path.startswith("tokens.") for path in arrays)


def _described(array: SchemaArray | SchemaOrigin | None, *, is_said: bool) -> str:
    if array is not None:
        return array.describe()
    return "nothing" if is_said else "no schema said"
