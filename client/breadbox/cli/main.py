"""The command line: a group that imports a command only when it is used.

An error that the user can fix ends with one line on stderr and exit code 2, without traceback.
Other distributions add commands by entry points in `breadbox.commands`; ours are in a table.
"""

import errno
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

import breadbox
from breadbox.cli.base import Group, Unusable, printable
from breadbox.shared.child_processes import end_with_parent
from breadbox.shared.extras import MODULES, how_to_install, missing_module

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS: Final = "breadbox.commands"
INTERRUPTED = 130
"""Exit code after Ctrl-C, the same as that of a process which SIGINT ended."""
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("breadbox_server.main:serve", "server", "Run the replay-buffer server."),
    "rollout": ("breadbox_rollout.main:rollout", "rollout-worker", "Run a rollout worker."),
    "learn": ("breadbox_learner.main:learn", "learner", "Train a policy from a buffer."),
    "generate": ("breadbox_rollout.main:generate", "rollout-worker", "Record whole episodes."),
    "console": ("breadbox_console.main:console", "console", "Look into live buffers by browser."),
    "demo": ("breadbox_demo.main:demo", "demo", "Watch an agent learn through the service."),
    "stats": ("breadbox.cli.commands.stats:stats", "", "Show what a buffer holds and has counted."),
    "top": ("breadbox.cli.commands.top:top", "", "Watch all buffers live."),
    "explain": ("breadbox.cli.commands.stats:explain", "", "Say why a learner is waiting."),
    "buffers": ("breadbox.cli.commands.buffers:buffers", "", "Manage buffers and their limits."),
    "subscriptions": ("breadbox.cli.commands.subscriptions:subscriptions", "", "Manage cursors."),
    "fsck": ("breadbox_server.maintenance.fsck:fsck", "server", "Find orphans and losses."),
    "doctor": ("breadbox.cli.commands.doctor:doctor", "", "Check server, store and speed."),
    "token": ("breadbox_server.access.tokens:token", "server", "Make a bearer token."),
    "secrets": (
        "breadbox_server.access.credentials:make_secrets",
        "server",
        "Make all tokens and passwords of an installation.",
    ),
    "import": ("breadbox_offline.main:import_episodes", "offline", "Put episodes in."),
    "export": ("breadbox_offline.main:export_episodes", "offline", "Write episodes out."),
    "transfer-queue-path": (
        "breadbox_adapters.paths:transfer_queue_path",
        "",
        "Print the folder of a module transfer_queue.",
    ),
    "completion": ("breadbox.cli.main:completion", "", "Print shell completion."),
}
"""Place of each command ("module:attribute"), the extra it needs, and its line in the help."""


class LazyGroup(Group):
    """Commands that are imported when they are used; their errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command, in the order of the table, then those of other packages."""
        return [*COMMANDS, *(joined().keys() - COMMANDS.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or return None if there is no such command."""
        if cmd_name in COMMANDS:
            return load_command(cmd_name)
        entry = joined().get(cmd_name)
        return None if entry is None else load_joined(entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands without importing any, and what to install for those that lack modules."""
        lines: dict[str, list[tuple[str, str]]] = {"": []}
        missing = {extra for extra in MODULES if missing_module(extra)}
        for name, (_, extra, text) in COMMANDS.items():
            lines.setdefault(extra if extra in missing else "", []).append((name, text))
        for extra, found in lines.items():
            # The exact source of this copy takes long to find out; the command's error has it.
            title = f'Commands that need "breadbox[{extra}]" installed' if extra else "Commands"
            with formatter.section(title):
                formatter.write_dl(found)
        others = {name: entry for name, entry in joined().items() if name not in COMMANDS}
        if others:
            with formatter.section("Commands of other packages"):
                formatter.write_dl([(name, f"Of {origin(each)}.") for name, each in others.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands, importing none."""
        texts = {name: entry[2] for name, entry in COMMANDS.items()}
        items = [
            CompletionItem(name, help=texts.get(name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code; errors that the user can fix are one line."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            where = error.ctx.command_path if error.ctx else "breadbox"
            _fail(f"{error.format_message().rstrip('.')}; see '{where} --help'", error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort:
            _fail("interrupted", INTERRUPTED)
        except OSError as error:
            if _is_ours(error):  # Deadline errors of the library are OSErrors as well.
                _fail(_text(error), Unusable.exit_code)
            if error.errno == errno.EPIPE and error.filename is None:
                sys.exit(1)  # The reader of the output, such as `head`, has closed it.
            if error.errno is None:
                raise
            _fail(_refusal(error), Unusable.exit_code)
        except ModuleNotFoundError as error:
            name = next(iter(sys.argv[1:] if args is None else args), "")
            if name not in COMMANDS or (error.name or "").startswith("breadbox"):
                raise
            _fail(_needs_extra(name, COMMANDS[name][1], error).message, Unusable.exit_code)
        except Exception as error:
            if not _is_ours(error):
                raise
            _fail(_text(error), Unusable.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str, code: int) -> None:
    click.echo(f"Error: {printable(' '.join(text.split()))}", err=True)
    sys.exit(code)


def _is_ours(error: Exception) -> bool:
    from breadbox.model.errors import ReplayBufferError

    return isinstance(error, ReplayBufferError)


def _text(error: Exception) -> str:
    notes: Sequence[str] = getattr(error, "__notes__", ())
    return " ".join([str(error), *(f"({note})" for note in notes)])


def _refusal(error: OSError) -> str:
    path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{path}{error.strerror}{_REMEDIES.get(error.errno or 0, '')}"


_NO_ROOM = "; make room there, or name a folder elsewhere"
_NO_RIGHT = "; name a place that this user may use"
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: _NO_ROOM,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: _NO_RIGHT,
    errno.EMFILE: "; allow this process more open files (ulimit -n)",
}


def load_command(name: str) -> click.Command:
    """Import a command, or raise Unusable with what to install."""
    target, extra, _ = COMMANDS[name]
    module_name, attribute = target.split(":")
    try:
        command = getattr(import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise _needs_extra(name, extra, error) from error
    if not isinstance(command, click.Command):
        raise TypeError(f"{target} is not a click command")
    return command


def joined() -> dict[str, "EntryPoint"]:
    """Return the commands of other distributions by name, without importing any."""
    if not _is_named():
        return {}
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group=ENTRY_POINTS)}


def origin(entry: "EntryPoint") -> str:
    """Return the distribution of a command."""
    return entry.dist.name if entry.dist else entry.module


def load_joined(entry: "EntryPoint") -> click.Command:
    """Import a command of another distribution, or raise Unusable with its name."""
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
    """Return True if an installed package names the group; `entry_points` itself is slow."""
    return any(
        ENTRY_POINTS.encode() in text for folder in sys.path for text in _declarations(folder)
    )


def _declarations(folder: str) -> Iterator[bytes]:
    folder = folder or "."
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith((".dist-info", ".egg-info")):
                with suppress(OSError), open(f"{folder}/{name}/entry_points.txt", "rb", 0) as file:
                    yield file.read()


def _needs_extra(name: str, extra: str, error: ModuleNotFoundError) -> Unusable:
    return Unusable(
        f"'breadbox {name}' needs the module {error.name!r}, which is not installed: "
        + how_to_install(extra)
    )


CONTEXT: MutableMapping[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(breadbox.__version__, prog_name="breadbox")
def cli() -> None:
    """Breadbox: a replay-buffer service for online reinforcement learning."""


_COMPLETION_LINES = {
    "bash": 'eval "$(breadbox completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(breadbox completion zsh)"   # in ~/.zshrc',
    "fish": "breadbox completion fish | source   # in ~/.config/fish/config.fish",
}


@click.command(epilog="\b\n" + "\n".join(_COMPLETION_LINES.values()))
@click.argument("shell", type=click.Choice(list(_COMPLETION_LINES)))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; evaluate it when the shell starts."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"click cannot complete in {shell}")
    click.echo(kind(cli, {}, "breadbox", "_BREADBOX_COMPLETE").source())


def main() -> None:
    """Run the console script."""
    end_with_parent()
    cli(prog_name="breadbox")


if __name__ == "__main__":
    main()
