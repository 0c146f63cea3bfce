"""Options of click, made of the fields of settings classes: click shows, completes and parses them.

What was typed is read by the settings class, as what a variable or a file says is.
"""

import enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from breadbox.cli.settings import SIZE, SettingField
from breadbox.model.sizes import size_name


class _Unread(click.Parameter):
    """A parameter whose text click leaves as it is."""

    def resolve_envvar_value(self, ctx: click.Context) -> None:
        """Leave the variable to `breadbox.cli.command`; the help names it."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Leave the text to the settings class."""
        del ctx
        return value

    def value_is_missing(self, value: Any) -> bool:
        """Leave it to the settings class: a variable or a file may give the value."""
        del value
        return False


class _Option(_Unread, click.Option):
    pass


class _Argument(_Unread, click.Argument):
    pass


class _Named(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A kind of text, by its name in the help."""

    def __init__(self, name: str) -> None:
        self.name = name


def parameter(field: SettingField) -> click.Parameter:
    """Return the option, or argument, that a field is."""
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
    """The default as it could be given."""
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
