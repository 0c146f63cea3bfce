"""What the commands share: options that are environment variables too, a file, one-line errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from breadbox.cli.command import Unusable
from breadbox.errors import ReplayBufferError
from breadbox_rollout.settings import read_config


class OneLineCommand(click.Command):
    """A command that tells everything that the user can mend in one line, with exit code 2."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, without the usage text on a mistake."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            problem = error.format_message().rstrip(".")
            raise Unusable(f"{problem}; see '{ctx.command_path} --help'") from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run, turning what is expected to go wrong into a line."""
        try:
            return super().invoke(ctx)
        except ReplayBufferError as error:
            raise Unusable(" ".join(str(error).split())) from error


def option(flag: str, **kwargs: Any) -> Callable[[Any], Any]:
    """Declare an option that is also `BREADBOX_<OPTION>` in the environment."""
    name = flag.split("/")[0].removeprefix("--")
    environment = f"BREADBOX_{name.replace('-', '_').upper()}"
    return click.option(flag, envvar=environment, show_envvar=True, show_default=True, **kwargs)


def config_option() -> Callable[[Any], Any]:
    """Declare `--config`: a file whose values stand below flags and environment."""
    return option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_take_config,
        is_eager=True,
        expose_value=False,
        help="YAML file of options; flags and environment variables stand above it.",
    )


def _take_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    known = {parameter.name for parameter in ctx.command.params if parameter.name}
    try:
        ctx.default_map = read_config(path, known)
    except ReplayBufferError as error:
        raise Unusable(str(error)) from error
