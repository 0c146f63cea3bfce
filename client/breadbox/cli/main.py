"""The frame of the command line: a group that imports a command only when it is used.

Every option can also be set as an environment variable: `--lease-s` is `BREADBOX_LEASE_S`. What
goes wrong for a reason that the user can mend (`ReplayBufferError`) ends with one line on stderr
and exit code 2, never with a traceback.
"""

import sys
from importlib import import_module

import click

_VERSION = "0.1.0"


COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("breadbox_server.main:serve", "server", "Run the replay-buffer server."),
    "rollout": ("breadbox_rollout.main:rollout", "rollout-worker", "Run a rollout worker."),
    "learn": ("breadbox_learner.main:learn", "learner", "Train a policy from a buffer."),
    "generate": ("breadbox_rollout.main:generate", "rollout-worker", "Record whole episodes."),
    "demo": ("breadbox.cli.demo:demo", "demo", "Watch an agent learn through the service."),
    "stats": ("breadbox.cli.stats:stats", "", "Show what a buffer holds and has counted."),
    "top": ("breadbox.cli.top:top", "", "Watch all buffers live."),
    "explain": ("breadbox.cli.explain:explain", "", "Say why a learner is waiting."),
    "buffers": ("breadbox.cli.buffers:buffers", "", "List, create, change and delete buffers."),
    "fsck": ("breadbox.cli.fsck:fsck", "server", "Check a payload store for orphans and losses."),
    "doctor": ("breadbox.cli.doctor:doctor", "", "Check address, store, clock, rights and speed."),
    "import": (
        "breadbox_learner.offline.cli:import_episodes",
        "offline",
        "Put episodes in.",
    ),
    "export": (
        "breadbox_learner.offline.cli:export_episodes",
        "offline",
        "Write episodes out.",
    ),
    "completion": ("breadbox.cli.completion:completion", "", "Print shell completion."),
}
"""Command to where it is ("module:attribute"), the extra it needs, and its line in the help."""


class Unusable(click.ClickException):
    """Something that the user can mend; printed as one line."""

    exit_code = 2


class LazyGroup(click.Group):
    """Imports the module of a command when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, in the order of the table."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is no such command."""
        del ctx
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands from the table, importing none."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in COMMANDS.items()])


def load_command(name: str) -> click.Command:
    """Import the command `name`.

    Raises:
        click.ClickException: What it needs is not installed; says how to install it.
    """
    target, extra, _ = COMMANDS[name]
    module_name, attribute = target.split(":")
    try:
        command = getattr(import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise _needs_extra(name, extra, error) from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{target} is not a click command")
    return command


def _needs_extra(name: str, extra: str, error: ModuleNotFoundError) -> click.ClickException:
    wanted = f"breadbox[{extra}]" if extra else "breadbox"
    return Unusable(
        f"'breadbox {name}' needs the module {error.name!r}, which is not installed: "
        f'pip install "{wanted}"'
    )


@click.group(
    cls=LazyGroup,
    context_settings={
        "auto_envvar_prefix": None,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(_VERSION, prog_name="breadbox")
def cli() -> None:
    """Breadbox: a replay-buffer service for online reinforcement learning."""


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(prog_name="breadbox", standalone_mode=True)
    except Exception as error:
        if not _is_expected(error):
            raise
        click.echo(f"Error: {_one_line(error)}", err=True)
        sys.exit(2)


def _is_expected(error: Exception) -> bool:
    from breadbox.errors import ReplayBufferError

    return isinstance(error, ReplayBufferError)


def _one_line(error: Exception) -> str:
    notes = getattr(error, "__notes__", [])
    return " ".join(" ".join([str(error), *(f"({note})" for note in notes)]).split())


if __name__ == "__main__":
    main()
