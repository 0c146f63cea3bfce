"""Commands of other distributions: they join by entry points in the group `breadbox.commands`.

An entry point's name is the command's, and its object a `click.Command`, such as
`breadbox.cli.command` makes. Our own commands are in a table (`breadbox.cli.main.COMMANDS`): they
are all of one distribution, and a checkout has them without being installed again.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from breadbox.cli.group import Unusable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "breadbox.commands"


def joined() -> dict[str, "EntryPoint"]:
    """Where commands of others are, by name; none is imported."""
    if not _is_named():
        return {}
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group=GROUP)}


def origin(entry: "EntryPoint") -> str:
    """The distribution that a command is of."""
    return entry.dist.name if entry.dist else entry.module


def load_joined(entry: "EntryPoint") -> click.Command:
    """Import a command of another distribution.

    Raises:
        Unusable: It cannot be imported, or is none; names the distribution.
    """
    try:
        command = entry.load()
    except (ImportError, AttributeError) as error:
        raise Unusable(
            f"the command {entry.name!r} of {origin(entry)} cannot be loaded: {error}"
        ) from error
    if not isinstance(command, click.Command):
        raise Unusable(f"{entry.value}, of {origin(entry)}, is not a click command")
    return command


def _is_named() -> bool:
    """Whether anything installed names the group; to ask for entry points takes far longer."""
    return any(GROUP.encode() in told for folder in sys.path for told in _declarations(folder))


def _declarations(folder: str) -> Iterator[bytes]:
    """What the distributions in a folder say of their entry points."""
    folder = folder or "."
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith((".dist-info", ".egg-info")):
                with suppress(OSError), open(f"{folder}/{name}/entry_points.txt", "rb", 0) as file:
                    yield file.read()
