"""What every command is made of: settings, a file of them, errors in one line."""

import inspect
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from breadbox.cli.group import Unusable
from breadbox.cli.settings import HIDDEN, Field, Settings, fields_of
from breadbox.errors import InvalidRequestError

S = TypeVar("S", bound=Settings)


class SettingsCommand(click.Command):
    """A command that names the file a wrong value is from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options, and what a file says instead of them."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param else None
            path = ctx.meta.get(_FILE)
            if path is None or name not in (ctx.default_map or {}):
                raise
            source = ctx.get_parameter_source(name or "")
            if source is not click.core.ParameterSource.DEFAULT_MAP:
                raise
            raise Unusable(f"--config {path}: {error.format_message()}") from error


_FILE = "breadbox.config"


def command(
    settings: type[S], name: str | None = None, *, reads_variable: bool = False, **attributes: Any
) -> Callable[[Callable[[S], Any]], click.Command]:
    """Make a command of a function of its settings.

    Args:
        settings: The class whose fields are its options.
        name: Of the command; None: the function's.
        reads_variable: Whether `BREADBOX_CONFIG` names its file, too: for processes that have a
            file of their own, not for those that people call beside them.
        **attributes: Of `click.Command`.
    """

    def decorate(function: Callable[[S], Any]) -> click.Command:
        fields = fields_of(settings)

        def run(**values: Any) -> Any:
            values |= _of_preset(settings, values)
            typed = {each.name: each.typed(values[each.name]) for each in fields}
            try:
                made = settings(**typed)
            except InvalidRequestError as error:
                path = click.get_current_context().command_path
                flag = f"--{error.field.replace('_', '-')}"
                raise Unusable(f"{flag} {error.problem}; see '{path} --help'") from error
            return function(made)

        return SettingsCommand(
            name or function.__name__,
            callback=run,
            # Docstrings with a backslash are raw: click's mark of lines that stay as they are.
            help=(inspect.getdoc(function) or "").replace("\\b\n", "\b\n"),
            params=[*(each.parameter() for each in fields), _config(fields, reads_variable)],
            **attributes,
        )

    return decorate


def _of_preset(settings: type[Settings], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a preset says of settings that neither a flag, a variable nor a file gives."""
    context = click.get_current_context()
    return {
        name: value
        for name, value in settings.presets.get(values.get("preset") or "", {}).items()
        if context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
    }


def _config(fields: tuple[Field, ...], reads_variable: bool) -> click.Option:
    def take(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
        if path is not None:
            ctx.meta[_FILE] = path
            ctx.default_map = _values(path, fields, ctx.command_path)

    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="BREADBOX_CONFIG" if reads_variable else None,
        show_envvar=True,
        is_eager=True,
        expose_value=False,
        callback=take,
        help="YAML file with any of these options; flags and environment win over it.",
    )


def _values(path: Path, fields: tuple[Field, ...], command_path: str) -> dict[str, Any]:
    """What a file says, by field.

    Raises:
        Unusable: It cannot be read, or names an unknown option.
    """
    known = {each.option: each for each in fields if each.said.file}
    given = read_config(path)
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise Unusable(
            f"--config {path} names unknown options: {', '.join(unknown)}; "
            f"see '{command_path} --help' for those there are"
        )
    values = {}
    for option, value in given.items():
        field = known[option]
        # A secret that was hidden is given elsewhere, and nothing is what nobody said.
        if value is not None and not (field.said.secret and value == HIDDEN):
            values[field.name] = _as_given(value, field, path)
    return values


def _as_given(value: Any, field: Field, path: Path) -> Any:
    """A value as the command line would have it, so that both are read by the same rules."""
    if field.is_many:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, list) or (isinstance(value, Mapping) and not field.is_object):
        raise Unusable(f"--config {path}: {field.option} wants one value, got {value!r}")
    return value if isinstance(value, Mapping) or field.kind is bool else str(value)


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file: a mapping from option names, with `-` or `_`, to values.

    Raises:
        Unusable: It cannot be read, others may write it, or it is no such mapping.
    """
    # Most calls have no such file, and starts should be quick; what a client needs has no YAML.
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise Unusable("--config needs the module 'yaml': pip install pyyaml") from error
    try:
        with path.open(encoding="utf-8") as file:
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
        raise Unusable(f"--config {path} is not YAML{at}; mend it or leave it out") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Unusable(f"--config {path} must be a mapping from options to values")
    return {str(key).replace("-", "_"): value for key, value in content.items()}
