"""Settings classes: the fields define a command's options, variables, keys of files and help.

`lease_s: float = setting(60.0, gt=0)`, with a string below, defines the option `--lease-s`, the
variable `BREADBOX_LEASE_S`, the key `lease_s` of a YAML file, a default, a range and a help line. A
field without a default is required. Values that code passes are checked too.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Final, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from breadbox.model.errors import InvalidRequestError
from breadbox.model.sizes import parse_size_bytes

HIDDEN: Final = "(hidden)"
"""Replaces a secret in output; read from a file, it counts as not given."""


def _size_bytes(value: Any) -> Any:
    return parse_size_bytes(value) if isinstance(value, str) else value


def _object(value: Any) -> Any:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise ValueError(f'must be a JSON object such as {{"frameskip": 4}}, got {value!r}')  # noqa: TRY004 - pydantic reports no other
    return found


SIZE: Final = BeforeValidator(_size_bytes)
Bytes = Annotated[int, SIZE]
"""A size, which options, variables and files may write with a unit: 500MB, 8GiB."""
JsonObject = Annotated[dict[str, Any], BeforeValidator(_object)]
"""A mapping, which options and variables write as JSON."""


def setting(
    default: Any = ...,
    *,
    option: str | None = None,
    secret: bool = False,
    metavar: str | None = None,
    shown: str = "",
    environment: bool = True,
    file: bool = True,
    folder: bool = False,
    positional: bool = False,
    **rules: Any,
) -> Any:
    """Declare a field of a settings class; without a default a value is required.

    `secret` hides the value in all output; `shown` is the help's text for the default.
    `environment` and `file` allow a variable and a file's key; `folder` marks a path of a folder;
    `positional` makes an argument instead of an option; `rules` are arguments of `pydantic.Field`.
    """
    said: Any = {
        "metavar": metavar,
        "shown": shown,
        "environment": environment,
        "file": file,
        "folder": folder,
        "positional": positional,
    }
    aliases: Any = {"validation_alias": option, "serialization_alias": option}
    return Field(default, repr=not secret, json_schema_extra=said, **aliases, **rules)


def of_one_call(default: Any = ..., **particulars: Any) -> Any:
    """Declare a field that only the command line can set: no variable, and no file."""
    return setting(default, environment=False, file=False, **particulars)


class Settings(BaseModel):
    """Base of settings classes; `repr` and errors hide secrets."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        defer_build=True,
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The command line's defaults, by the value of `preset`."""

    def check_fixed(self, option: str, **wanted: tuple[Any, str]) -> None:
        """Raise InvalidRequestError for a setting without the value that an option needs."""
        for name, (value, why) in wanted.items():
            if getattr(self, name) != value:
                raise InvalidRequestError(name, f"must be {value!r} with {option}: {why}")

    def chosen(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of the options that are among names, by option."""
        fields = {each.option: each.name for each in fields_of(type(self))}
        return {name: getattr(self, fields[name]) for name in names if name in fields}

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data, by option; secrets are hidden."""
        dumped = self.model_dump(mode="json", by_alias=True)
        plain = {}
        for each in fields_of(type(self)):
            if each.said("file", True):
                value = dumped[each.option]
                plain[each.option] = (HIDDEN if value else None) if each.is_secret else value
        return plain

    def as_yaml(self) -> str:
        """Return `plain` as text that `--config` can read."""
        import yaml

        return str(yaml.safe_dump(self.plain(), sort_keys=False))


@dataclass(frozen=True, slots=True)
class SettingField:
    """One field of a settings class, for commands."""

    name: str
    info: FieldInfo
    help: str
    kind: Any
    """Type of a value that is not None, or of one of several values."""
    is_many: bool
    """True if it may be given several times."""
    rules: tuple[Any, ...]
    """Metadata that limits its values, such as ranges."""

    @property
    def option(self) -> str:
        """Name for users, with underscores."""
        return str(self.info.validation_alias or self.name)

    @property
    def variable(self) -> str | None:
        """Name of its environment variable, or None."""
        return f"BREADBOX_{self.option.upper()}" if self.said("environment", True) else None

    @property
    def is_secret(self) -> bool:
        """True if the value is hidden in all output."""
        return not self.info.repr

    def said(self, what: str, default: Any = None) -> Any:
        """Return an argument that `setting` got."""
        said = self.info.json_schema_extra
        return said.get(what, default) if isinstance(said, Mapping) else default

    def bound(self, name: str) -> Any:
        """Return the bound `ge`, `gt`, `le` or `lt` of its range, or None."""
        found = (getattr(rule, name, None) for rule in self.rules)
        return next((each for each in found if each is not None), None)


def fields_of(settings: type[Settings]) -> tuple[SettingField, ...]:
    """Return every field of a settings class, its own before those of its bases."""
    own, *bases = [each for each in settings.__mro__ if issubclass(each, Settings)]
    order = dict.fromkeys(
        name for each in (own, *reversed(bases)) for name in inspect.get_annotations(each)
    )
    fields = settings.model_fields
    return tuple(_field(name, fields[name], bases) for name in order if name in fields)


def _field(name: str, info: FieldInfo, bases: list[type[Settings]]) -> SettingField:
    # A field that only changes a default inherits its help.
    inherited = [base.model_fields[name].description for base in bases if name in base.model_fields]
    text = next(filter(None, [info.description, *inherited]), "")
    kind, rules = info.annotation, info.metadata
    if get_origin(kind) in (UnionType, Union):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if is_many := get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        rules = [*rules, *more]
    return SettingField(name, info, " ".join(text.split()), kind, is_many, tuple(rules))
