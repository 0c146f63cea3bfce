"""Command-line options made from the fields of a settings class, so that neither can drift."""

import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from breadbox.cli.settings import JsonObject

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(settings: type[BaseModel]) -> Callable[[F], F]:
    """Give a command one option per field: `--like-this`, and `BREADBOX_LIKE_THIS`.

    Ranges are left to the settings class, which also checks what comes from a file.
    """

    def decorate(command: F) -> F:
        for name, field in reversed(settings.model_fields.items()):
            command = _option(name, field)(command)
        return command

    return decorate


def _option(name: str, field: FieldInfo) -> Callable[[F], F]:
    flag = name.replace("_", "-")
    is_switch = field.annotation is bool
    default = None if field.default is PydanticUndefined else field.default
    help_text = " ".join((field.description or "").split())
    shown = default not in (None, "") and not is_switch
    return click.option(
        f"--{flag}/--no-{flag}" if is_switch else f"--{flag}",
        name,
        envvar=f"BREADBOX_{name.upper()}",
        show_envvar=True,
        type=_click_type(field.annotation),
        default=default,
        show_default=shown or is_switch,
        help=help_text,
    )


def _click_type(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return _click_type(next(a for a in typing.get_args(annotation) if a is not type(None)))
    if origin is Literal:
        return click.Choice(typing.get_args(annotation))
    if origin is dict:
        return JsonObject()
    if annotation is Path:
        return click.Path(path_type=Path)
    return annotation
