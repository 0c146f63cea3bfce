"""Make commands of settings classes: click's options, variables, values of files, error lines."""

import enum
import inspect
import os
import re
import stat
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError

from breadbox.cli.base import Unusable
from breadbox.cli.settings import HIDDEN, SIZE, SettingField, Settings, fields_of
from breadbox.model.paths import regular
from breadbox.model.sizes import size_name

S = TypeVar("S", bound=Settings)

PREFIX: Final = "BREADBOX_"
SIMILAR_MIN: Final = 0.8
"""Similarity, 0 to 1, from which an unknown variable counts as a mistyped one."""
RESEMBLING: Final = frozenset(
    {"CONSOLE_PORT", "FRAGMENTS_PER_BATCH", "FRAGMENTS_PER_CHUNK", "INTERVAL_S", "LOG_INTERVAL_S"}
    | {"PONG_TARGET_RETURN", "PONG_TIME_LIMIT_S", "STEPS_MAX", "TOKEN", "TOKENS", "USES_MAX"}
)
"""Variables of one command, or of the composition, that resemble those of another command."""


def command(
    settings: type[S],
    name: str | None = None,
    *,
    reads_variable: bool = False,
    shares_file_of: type[Settings] | None = None,
    **attributes: Any,
) -> Callable[[Callable[[S], Any]], click.Command]:
    """Make a command of a function and its settings class.

    `reads_variable`: `BREADBOX_CONFIG` may also name its file; for long-running processes.
    `shares_file_of`: settings of another command, which are ignored in a file of both.
    """

    def decorate(function: Callable[[S], Any]) -> click.Command:
        fields = {each.option: each for each in fields_of(settings)}
        others = _options_of_file(fields_of(shares_file_of) if shares_file_of else ())

        def run(config: Path | None, **values: Any) -> Any:
            _check_variables(fields)
            source = click.get_current_context().get_parameter_source
            typed = {
                option: values[each.name]
                for option, each in fields.items()
                if source(each.name) is ParameterSource.COMMANDLINE
            }
            environment = {
                option: text.split() if each.is_many else text
                for option, each in fields.items()
                if each.variable and (text := os.environ.get(each.variable))
            }
            file = _values(config, fields, others) if config else {}
            given = {**file, **environment, **typed}
            preset = settings.presets.get(str(given.get("preset")), {})
            try:
                made = settings.model_validate({**preset, **given})
            except ValidationError as error:
                found = error.errors(include_url=False)[0]
                option = str(found["loc"][0])
                if option in typed or option not in given:
                    where = _flag(fields[option])
                elif option in environment:
                    where = str(fields[option].variable)
                else:
                    where = f"--config {config}: {option}"
                path = click.get_current_context().command_path
                text = _problem(found, is_shown=not fields[option].is_secret)
                raise Unusable(f"{where} {text}; see '{path} --help'") from None
            return function(made)

        return click.Command(
            name or function.__name__,
            callback=run,
            # Docstrings with a backslash are raw: \b keeps click from wrapping lines.
            help=(inspect.getdoc(function) or "").replace("\\b\n", "\b\n"),
            params=[*map(_parameter, fields.values()), _config(reads_variable=reads_variable)],
            **attributes,
        )

    return decorate


def _check_variables(fields: Mapping[str, SettingField]) -> None:
    """Raise Unusable for a variable that is probably a mistyped one of this command."""
    known = {
        variable.removeprefix(PREFIX) for each in fields.values() if (variable := each.variable)
    }
    for name in sorted(os.environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in known or rest in RESEMBLING:
            continue
        if meant := get_close_matches(rest, known, n=1, cutoff=SIMILAR_MIN):
            path = click.get_current_context().command_path
            raise Unusable(
                f"the variable {name} is unknown; did you mean {PREFIX}{meant[0]}? Correct it or "
                f"unset it; see '{path} --help'"
            )


def _flag(field: SettingField) -> str:
    if field.said("positional"):
        return field.name.upper()
    return f"--{field.option.replace('_', '-')}"


def _problem(found: Mapping[str, Any], *, is_shown: bool) -> str:
    if found["type"] == "missing":
        return "is missing"
    if found["type"] == "value_error":
        return str(found["msg"]).removeprefix("Value error, ")
    # Pydantic adds why it is no number, which the value shows anyway.
    text = re.sub(", (unable to|got) .*", "", found["msg"]).replace("Input should", "must")
    return f"{text}, got {found['input']!r}" if is_shown else text


def _config(*, reads_variable: bool) -> click.Option:
    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="BREADBOX_CONFIG" if reads_variable else None,
        show_envvar=True,
        help="YAML file with any of these options; flags and environment variables override it.",
    )


def _options_of_file(fields: tuple[SettingField, ...]) -> set[str]:
    return {each.option for each in fields if each.said("file", True)}


def _values(path: Path, fields: Mapping[str, SettingField], others: set[str]) -> dict[str, Any]:
    known = _options_of_file(tuple(fields.values()))
    given = read_config(path)
    unknown = sorted(given.keys() - known - others)
    if unknown:
        raise Unusable(
            f"--config {path} names unknown options: {', '.join(unknown)}; "
            f"see '{click.get_current_context().command_path} --help' for those there are"
        )
    values: dict[str, Any] = {}
    for option in given.keys() & known:
        field, value = fields[option], given[option]
        # A hidden secret comes from another place.
        if value is None or (field.is_secret and value == HIDDEN):
            continue
        if field.is_many and not isinstance(value, list):
            value = [value]
        # As text, like on the command line: YAML turns some names into numbers and booleans.
        values[option] = value if isinstance(value, list | dict) else str(value)
    return values


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file: a mapping from option names, with `-` or `_`, to values."""
    # Imported here for quick starts: most calls have no file, and a client alone has no YAML.
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise Unusable("--config needs the module 'yaml': pip install pyyaml") from error
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise Unusable(
                    f"--config {path} cannot be used: others may write it; chmod o-w {path}"
                )
            content = yaml.safe_load(file)
    except OSError as error:
        raise Unusable(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        at = f", line {where.line + 1}" if where else ""
        raise Unusable(f"--config {path} is not YAML{at}; fix it or leave it out") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Unusable(f"--config {path} must be a mapping from options to values")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


class _Unread(click.Parameter):
    def resolve_envvar_value(self, ctx: click.Context) -> None:
        pass

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        return value

    def value_is_missing(self, value: Any) -> bool:
        return False


class _Option(_Unread, click.Option):
    pass


class _Argument(_Unread, click.Argument):
    pass


class _Named(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    def __init__(self, name: str) -> None:
        self.name = name


def _parameter(field: SettingField) -> click.Parameter:
    required = field.info.is_required()
    shared: dict[str, Any] = {"type": _type(field), "metavar": field.said("metavar")}
    if field.said("positional"):
        nargs = -1 if field.is_many else 1
        return _Argument([field.name], nargs=nargs, required=required, **shared)
    if not required:
        shared["default"] = _default(field)
    flag = declared = f"--{field.option.replace('_', '-')}"
    if field.kind is bool:
        del shared["type"]
        if field.variable or field.said("file", True):
            declared = f"{flag}/--no-{flag[2:]}"
        shared |= {"is_flag": True, "show_default": shared.get("default") is True}
    else:
        default = shared.get("default")
        has_text = default not in (None, "", ()) and not callable(default)
        shared |= {"multiple": field.is_many, "show_default": field.said("shown") or has_text}
    if field.variable:
        shared |= {"envvar": field.variable, "show_envvar": True}
    return _Option([declared, field.name], required=required, help=field.help, **shared)


def _default(field: SettingField) -> Any:
    default, factory = field.info.default, field.info.default_factory
    if factory is not None:
        return "{}" if factory is dict else factory
    if SIZE in field.rules and default is not None:
        return size_name(default)
    return default.value if isinstance(default, enum.Enum) else default


def _type(field: SettingField) -> Any:
    kind = field.kind
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return click.Choice([member.value for member in kind])
    if SIZE in field.rules:
        return _Named("size")
    if get_origin(kind) is dict:
        return _Named("json")
    if kind is Path:
        is_folder = bool(field.said("folder"))
        return click.Path(dir_okay=is_folder, file_okay=not is_folder)
    ge, gt, le, lt = map(field.bound, ("ge", "gt", "le", "lt"))
    if any(bound is not None for bound in (ge, gt, le, lt)):
        ranged: Any = click.IntRange if kind is int else click.FloatRange
        opened = {"min_open": gt is not None, "max_open": lt is not None}
        return ranged(ge if gt is None else gt, le if lt is None else lt, **opened)
    return kind
