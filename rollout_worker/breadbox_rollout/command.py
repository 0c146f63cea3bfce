"""What the commands share: options that are environment variables too, a file, one-line errors."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from breadbox.errors import ReplayBufferError
from breadbox_rollout.settings import read_config


class Unusable(click.ClickException):
    """Something that the user can mend; printed as one line."""

    exit_code = 2


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


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Call *stop* on the first SIGTERM or SIGINT; a second one ends the process at once.

    Yields:
        An event that is set once a signal came.
    """
    came = threading.Event()

    def handle(number: int, _: object) -> None:
        if came.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        came.set()
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
