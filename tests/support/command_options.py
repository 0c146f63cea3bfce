"""Which settings a command of ours reads from the environment."""

import click

from breadbox.cli.main import load_command
from breadbox.transport.heartbeat import AGE_VARIABLE, FILE_VARIABLE


def command_options(command: str) -> set[str]:
    """Environment variables that a command of ours reads."""
    found = load_command(command)
    if isinstance(found, click.Group):
        found = found.commands["create"]
    assert isinstance(found, click.Command)
    names = {option.name for option in found.params if option.name}
    flags = {
        flag.split("/")[0].removeprefix("--").replace("-", "_")
        for option in found.params
        for flag in option.opts
        if flag.startswith("--")
    }
    return {f"BREADBOX_{name.upper()}" for name in names | flags} | {FILE_VARIABLE, AGE_VARIABLE}
