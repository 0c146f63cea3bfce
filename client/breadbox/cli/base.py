"""Groups, errors and printable text, which every command needs before its settings are imported."""

import os
import sys
from typing import Final

import click

REPLACEMENT: Final = "\ufffd"


class Unusable(click.ClickException):
    """An error that the user can fix; printed as one line."""

    exit_code = 2


class Bug(click.ClickException):
    """An error that the user can only report; printed as one line."""

    exit_code = 70


class Group(click.Group):
    """Commands by name; an unknown name gets those that are spelt alike."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or raise UsageError."""
        name = args[0]
        command = self.get_command(ctx, name)
        if command is not None or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        alike = " or ".join(map(repr, get_close_matches(name, self.list_commands(ctx))))
        hint = f" Did you mean {alike}?" if alike else ""
        raise click.UsageError(f"No such command {name!r}.{hint}", ctx)

    def add(self, command: click.Command) -> click.Command:
        """Add a command, as a decorator."""
        self.add_command(command)
        return command


def printable(text: str) -> str:
    """Replace unprintable characters of a text, because escape sequences could deceive."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else REPLACEMENT for sign in text)


def import_from_here() -> None:
    """Let `module:factory` name a module of the current folder, as `python -m` would."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
