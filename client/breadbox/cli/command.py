"""What every command is made of: settings, a file of them, errors in one line."""

import inspect
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from pydantic import ValidationError

from breadbox.cli.group import Unusable
from breadbox.cli.options import parameter
from breadbox.cli.settings import HIDDEN, SettingField, Settings, fields_of

S = TypeVar("S", bound=Settings)


def command(
    settings: type[S],
    name: str | None = None,
    *,
    reads_variable: bool = False,
    shares_file_of: type[Settings] | None = None,
    **attributes: Any,
) -> Callable[[Callable[[S], Any]], click.Command]:
    """Make a command of a function of its settings.

    Args:
        settings: The class whose fields are its options.
        name: Of the command; None: the function's.
        reads_variable: Whether `BREADBOX_CONFIG` names its file, too: for processes that have a
            file of their own, not for those that people call beside them.
        shares_file_of: Another command's settings, which its file may have beside its own; what is
            the other's alone is passed over.
        **attributes: Of `click.Command`.
    """

    def decorate(function: Callable[[S], Any]) -> click.Command:
        fields = {each.option: each for each in fields_of(settings)}
        others = _options_of_file(fields_of(shares_file_of) if shares_file_of else ())

        def run(config: Path | None, **values: Any) -> Any:
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
            # Docstrings with a backslash are raw: click's mark of lines that stay as they are.
            help=(inspect.getdoc(function) or "").replace("\\b\n", "\b\n"),
            params=[*map(parameter, fields.values()), _config(reads_variable=reads_variable)],
            **attributes,
        )

    return decorate


def _flag(field: SettingField) -> str:
    if field.said("positional"):
        return field.name.upper()
    return f"--{field.option.replace('_', '-')}"


def _problem(found: Mapping[str, Any], *, is_shown: bool) -> str:
    """What is wrong with a value, behind its name."""
    if found["type"] == "missing":
        return "is missing"
    if found["type"] == "value_error":
        return str(found["msg"]).removeprefix("Value error, ")
    # Pydantic says besides why it is not a number; the value says so, too.
    text = re.sub(", (unable to|got) .*", "", found["msg"]).replace("Input should", "must")
    return f"{text}, got {found['input']!r}" if is_shown else text


def _config(*, reads_variable: bool) -> click.Option:
    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="BREADBOX_CONFIG" if reads_variable else None,
        show_envvar=True,
        help="YAML file with any of these options; flags and environment win over it.",
    )


def _options_of_file(fields: tuple[SettingField, ...]) -> set[str]:
    return {each.option for each in fields if each.said("file", True)}


def _values(path: Path, fields: Mapping[str, SettingField], others: set[str]) -> dict[str, Any]:
    """What a file says, by option; what is among `others` is passed over.

    Raises:
        Unusable: It cannot be read, or names an unknown option.
    """
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
        # A secret that was hidden is given elsewhere, and nothing is what nobody said.
        if value is None or (field.is_secret and value == HIDDEN):
            continue
        if field.is_many and not isinstance(value, list):
            value = [value]
        # As the command line would have it: YAML makes numbers and truths of what is a name.
        values[option] = value if isinstance(value, list | dict) else str(value)
    return values


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
