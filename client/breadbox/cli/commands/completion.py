"""`breadbox completion`: what a shell needs to complete commands and options."""

import click
from click.shell_completion import get_completion_class

_HINTS = {
    "bash": 'eval "$(breadbox completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(breadbox completion zsh)"   # in ~/.zshrc',
    "fish": "breadbox completion fish | source   # in ~/.config/fish/config.fish",
}


@click.command(epilog="\b\n" + "\n".join(_HINTS.values()))
@click.argument("shell", type=click.Choice(list(_HINTS)))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; evaluate it when the shell starts."""
    from breadbox.cli.main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"click cannot complete in {shell}")
    click.echo(kind(cli, {}, "breadbox", "_BREADBOX_COMPLETE").source())
