"""Settings classes: a command's options, variables, keys of files and help, from its fields.

A frozen dataclass below `Settings` says all there is to say of each setting once. Its field
`lease_s: float = setting(60.0, gt=0)`, with a string below, is the option `--lease-s`, the
variable `BREADBOX_LEASE_S`, the key `lease_s` of a YAML file, a default, a range, and a line of
help. A field without a default has to be given. The class checks what code gives it, too.
"""

import ast
import dataclasses
import enum
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import click

from breadbox.errors import InvalidRequestError
from breadbox.sizes import parse_size_bytes, size_name

Bytes = Annotated[int, "bytes"]
"""A size; options, variables and files may give it a unit: 500MB, 8GiB."""
HIDDEN: Final = "(hidden)"
"""Stands for a secret in what is shown; read from a file, it counts as not given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Particulars:
    """What is said of a setting beside its name, type, default and help."""

    option: str = ""
    """Its name on the command line, in the environment and in files; empty: the field's."""
    metavar: str | None = None
    """Stands for the value in the help."""
    shown: str | None = None
    """The default as the help tells it."""
    environment: bool = True
    """Whether there is a variable for it."""
    file: bool = True
    """Whether a file may have it."""
    secret: bool = False
    """Whether it is shown nowhere."""
    folder: bool = False
    """Whether a path is one of a folder, not of a file."""
    positional: bool = False
    """Whether it is an argument instead of an option."""
    choices: tuple[str, ...] = ()
    """What may be given, where the type does not say so."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def problem(self, value: float) -> str:
        """What is wrong with a number; empty: nothing."""
        if not math.isfinite(value):
            return f"must be a finite number, got {value}"
        for limit, is_right, words in (
            (self.ge, value >= (self.ge or 0), "at least"),
            (self.gt, value > (self.gt or 0), "above"),
            (self.le, value <= (self.le or 0), "at most"),
            (self.lt, value < (self.lt or 0), "below"),
        ):
            if limit is not None and not is_right:
                return f"must be {words} {limit:,}, got {value:,}"
        return ""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    **particulars: Any,
) -> Any:
    """A field of a settings class; for what may be said of it see `Particulars`."""
    said = Particulars(**particulars)
    field: Any = dataclasses.field
    made = {"default": default, "default_factory": default_factory}
    return field(repr=not said.secret, metadata={"said": said}, **made)


def of_one_call(default: Any = dataclasses.MISSING, **particulars: Any) -> Any:
    """A field that is given by hand or not at all: by no variable, and in no file."""
    return setting(default, environment=False, file=False, **particulars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of settings classes.

    Raises:
        InvalidRequestError: A value is out of its range.
    """

    presets: typing.ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What the command line takes for settings that nobody gave, by the value of `preset`."""

    def __post_init__(self) -> None:
        for each in fields_of(type(self)):
            each.check(getattr(self, each.name))

    def plain(self) -> dict[str, Any]:
        """The settings as YAML and JSON know them, by option; secrets are hidden."""
        return {
            each.option: each.plain(getattr(self, each.name))
            for each in fields_of(type(self))
            if each.said.file
        }

    def as_yaml(self) -> str:
        """What `plain` gives as text, readable by `--config`."""
        import yaml

        return str(yaml.safe_dump(self.plain(), sort_keys=False))


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting of a class, with all that is known of it."""

    name: str
    """Of the field."""
    kind: Any
    """Type of a value that is not None, or of one of several."""
    is_many: bool
    """Whether it may be given several times."""
    is_optional: bool
    """Whether it may be None."""
    default: Any
    """Value, or function that makes it; MISSING: it has to be given."""
    said: Particulars
    help: str

    @property
    def option(self) -> str:
        """Its name for users, with underscores."""
        return self.said.option or self.name

    def check(self, value: Any) -> None:
        """Refuse what is no number, a number that is out of range, and what is no choice.

        Raises:
            InvalidRequestError: It is.
        """
        for each in value if self.is_many else (value,):
            self._check_one(each)

    def _check_one(self, value: Any) -> None:
        problem = ""
        if value is None:
            problem = "" if self.is_optional else "is missing"
        elif self.kind in (int, float, Bytes):
            kind = (int, float) if self.kind is float else int
            if isinstance(value, kind) and not isinstance(value, bool):
                problem = self.said.problem(value)
            else:
                problem = f"must be a {'' if self.kind is float else 'whole '}number, got {value!r}"
        elif self.choices and not self.is_enum and not self._are_choices(value):
            problem = f"must be one of {', '.join(self.choices)}, got {value!r}"
        if problem:
            raise InvalidRequestError(self.option, problem)

    def _are_choices(self, value: Any) -> bool:
        """Whether a value, or each of several, may be given."""
        values = value if isinstance(value, tuple) else (value,)
        return all(each in self.choices for each in values)

    @property
    def choices(self) -> tuple[str, ...]:
        """What may be given; empty: anything."""
        if typing.get_origin(self.kind) is Literal:
            return typing.get_args(self.kind)
        if self.is_enum:
            return tuple(member.value for member in self.kind)
        return self.said.choices

    @property
    def is_enum(self) -> bool:
        """Whether values are members of an enum; people give their value."""
        return isinstance(self.kind, enum.EnumMeta)

    @property
    def is_object(self) -> bool:
        """Whether it is a mapping; people give JSON."""
        return typing.get_origin(self.kind) is dict

    def plain(self, value: Any) -> Any:
        """A value as a file has it."""
        if self.said.secret:
            return HIDDEN if value else None
        if isinstance(value, enum.Enum):
            return value.value
        return str(value) if isinstance(value, Path) else value

    def typed(self, value: Any) -> Any:
        """What the command line gave, as the class has it."""
        return self.kind(value) if self.is_enum and value is not None else value

    def parameter(self) -> click.Parameter:
        """The option, or argument, that it is."""
        required = self.default is dataclasses.MISSING
        shared: dict[str, Any] = {"type": self._click_type(), "metavar": self.said.metavar}
        if not required:
            shared["default"] = self._default_text()
        if self.said.positional:
            nargs = -1 if self.is_many else 1
            return click.Argument([self.name], nargs=nargs, required=required, **shared)
        flag = f"--{self.option.replace('_', '-')}"
        if self.kind is bool:
            del shared["type"]
            has_two = self.said.environment or self.said.file
            declared = f"{flag}/--no-{self.option.replace('_', '-')}" if has_two else flag
            shared |= {"is_flag": True, "show_default": self.default is True}
        else:
            declared = flag
            shown = shared.get("default")
            shared["show_default"] = self.said.shown or not (
                shown in (None, "", ()) or callable(shown)
            )
        if self.said.environment:
            shared |= {"envvar": f"BREADBOX_{self.option.upper()}", "show_envvar": True}
        if self.is_many:
            shared["multiple"] = True
        return click.Option([declared, self.name], required=required, help=self.help, **shared)

    def _default_text(self) -> Any:
        """The default as it could be given."""
        default = self.default
        if self.kind == Bytes and isinstance(default, int):
            return size_name(default)
        if self.is_object:
            return "{}"
        return default.value if isinstance(default, enum.Enum) else default

    def _click_type(self) -> Any:
        said = self.said
        if self.choices:
            return click.Choice(self.choices)
        if self.kind == Bytes:
            return SizeBytes()
        if self.is_object:
            return JsonObject()
        if self.kind is Path:
            return click.Path(path_type=Path, dir_okay=said.folder, file_okay=not said.folder)
        low, high = (
            said.ge if said.gt is None else said.gt,
            said.le if said.lt is None else said.lt,
        )
        if self.kind in (int, float) and (low is not None or high is not None):
            ranged = click.IntRange if self.kind is int else click.FloatRange
            opened = {"min_open": said.gt is not None, "max_open": said.lt is not None}
            return ranged(low, high, **opened)  # type: ignore[arg-type]
        return self.kind


_FIELDS: Final[dict[type, tuple[Field, ...]]] = {}


def fields_of(settings: type[Settings]) -> tuple[Field, ...]:
    """Every setting of a class, its own before those of its bases."""
    if settings not in _FIELDS:
        _FIELDS[settings] = tuple(_fields_of(settings))
    return _FIELDS[settings]


def _fields_of(settings: type[Settings]) -> Iterator[Field]:
    hints = typing.get_type_hints(settings, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    bases = [base for base in settings.__mro__ if issubclass(base, Settings) and base != Settings]
    told: set[str] = set()
    for base in (bases[0], *reversed(bases[1:])):
        for name in inspect.get_annotations(base):
            if name not in told:
                told.add(name)
                # One that only changes a default keeps its help.
                texts = (_docs_of(each).get(name) for each in bases)
                yield _field(fields[name], hints[name], next(filter(None, texts), ""))


def _field(field: "dataclasses.Field[Any]", hint: Any, help_text: str) -> Field:
    kind, is_many, is_optional = hint, False, False
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        is_optional = types.NoneType in typing.get_args(kind)
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is tuple:
        kind, is_many = typing.get_args(kind)[0], True
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory
    said = field.metadata.get("said", Particulars())
    return Field(field.name, kind, is_many, is_optional, default, said, help_text)


def _docs_of(settings: type) -> Mapping[str, str]:
    """The strings below the fields of a class, by field."""
    return _docs_in(settings.__module__).get(settings.__name__, {})


@cache
def _docs_in(module: str) -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: dict(_documented(node)) for node in tree.body if isinstance(node, ast.ClassDef)
    }


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for one, following in zip(node.body, node.body[1:], strict=False):
        match one, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())


class SizeBytes(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A size with a unit, such as 8GiB or 500MB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size."""
        try:
            return parse_size_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class JsonObject(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A JSON object, or a mapping of a file."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Read an object."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(value, Mapping):
            self.fail(f'{value!r} is not a JSON object such as {{"frameskip": 4}}', param, ctx)
        return dict(value)
