"""What the commands that talk to a server share: options, connecting, and how they print."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import breadbox
from breadbox.cli.terminal import printable
from breadbox.options import Tls

Command = TypeVar("Command", bound=Callable[..., Any])

RECONNECT_S = 0.0
"""A person waits for the answer: a server that is away is told at once."""


def option(flag: str, *names: str, **settings: Any) -> Callable[[Command], Command]:
    """An option that is also `BREADBOX_<OPTION>` in the environment."""
    name = flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    shown = {"show_envvar": True, "show_default": True}
    return click.option(flag, *names, envvar=f"BREADBOX_{name}", **(shown | settings))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Which server, how to reach it, and how to print what it says."""

    server: str
    token: str | None = dataclasses.field(repr=False)
    tls: Tls | None
    deadline_s: float
    as_json: bool
    store_url: str | None = dataclasses.field(default=None, repr=False)

    def connect(
        self, *, buffer: str = "default", reconnect_s: float = RECONNECT_S
    ) -> breadbox.Client:
        """Make a client; fails at once when nobody answers, unless told otherwise."""
        return breadbox.connect(
            self.server,
            buffer=buffer,
            token=self.token,
            tls=self.tls,
            deadline_s=self.deadline_s,
            reconnect_s=reconnect_s,
            store_url=self.store_url,
        )

    def check(self) -> None:
        """Ask the server once: a person is told at once that it is away, or wants a token.

        For commands that then work for long, and ride through a restart of the server.

        Raises:
            UnavailableError, UnauthenticatedError: See there.
        """
        with self.connect() as client:
            client.list_buffers()


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a server; the command gets them as one `target`."""

    def with_target(
        server: str,
        token: str | None,
        tls: bool,
        tls_ca: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        store_url: str | None,
        deadline_s: float,
        as_json: bool,
        **rest: Any,
    ) -> Any:
        files = tls_ca or tls_cert or tls_key
        credentials = Tls(tls_ca, tls_cert, tls_key) if tls or files else None
        target = Target(server, token, credentials, deadline_s, as_json, store_url)
        return command(target=target, **rest)

    with_target.__name__ = command.__name__
    with_target.__doc__ = command.__doc__
    # Decorators of the command stand above these in the help.
    with_target.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for decorate in reversed(_SERVER_OPTIONS):
        with_target = decorate(with_target)
    return with_target


_SERVER_OPTIONS = (
    option("--server", default="localhost:50051", help="Address of the server, HOST:PORT."),
    option(
        "--token", default=None, help="Bearer token; better set in the environment, or as @FILE."
    ),
    option("--tls", is_flag=True, help="Encrypt; on by itself when a certificate is named."),
    option("--tls-ca", default=None, help="PEM file with the authorities to trust."),
    option("--tls-cert", default=None, help="PEM file with this client's certificate."),
    option("--tls-key", default=None, help="PEM file with its key."),
    option(
        "--store-url",
        default=None,
        help="Where payloads are, seen from here; default: where the server says.",
    ),
    option(
        "--deadline-s",
        default=5.0,
        type=click.FloatRange(min=0.01),
        help="Seconds in which the server must answer.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
)


def plain(value: Any) -> Any:
    """A value as JSON knows it: dataclasses and mappings as objects, enums as their value."""
    match value:
        case Enum():
            return value.value
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
            }
        case _:
            return value


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print a value as JSON, indented, or as one line for a stream of them."""
    click.echo(json.dumps(plain(value), indent=None if is_line else 2))


def console() -> Console:
    """The terminal, or the file that stdout is; wide where nobody limits it."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=160)


def table(*columns: str, title: str | None = None) -> Table:
    """A table whose columns are text on the left; mark numbers with a leading `#`."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith("#")
        made.add_column(
            column.lstrip("#"), justify="right" if is_number else "left", no_wrap=is_number
        )
    return made


def shown(text: object) -> str:
    """What others chose, for a console that reads markup: it shows as it is, and does nothing."""
    return escape(printable(str(text)))


def rows(made: Table, lines: Iterable[Iterable[object]]) -> Table:
    """Fill a table; cells show as they are, markup in them too."""
    for line in lines:
        made.add_row(*(Text(printable(str(cell))) for cell in line))
    return made


class FittedTable:
    """A table that leaves out columns, one after the other, until the others fit whole.

    Args:
        columns: As for `table`.
        lines: A cell for each column.
        expendable: Columns that may be left out, the least wanted first.
    """

    def __init__(
        self,
        columns: Sequence[str],
        lines: Iterable[Iterable[object]],
        *,
        expendable: Sequence[str],
    ) -> None:
        self._columns = columns
        self._lines = [[*line] for line in lines]
        self._expendable = expendable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the width that there is."""
        left_out: list[str] = []
        made = self._without(left_out)
        for column in self._expendable:
            if console.measure(made, options=options.update_width(_ENDLESS)).maximum <= (
                options.max_width
            ):
                break
            left_out.append(column)
            made = self._without(left_out)
        yield made
        if left_out:
            names = ", ".join(column.lstrip("#") for column in left_out)
            yield f"[dim]left out, since the window is narrow: {names}[/]"

    def _without(self, left_out: Sequence[str]) -> Table:
        kept = [index for index, column in enumerate(self._columns) if column not in left_out]
        made = table(*(self._columns[index] for index in kept))
        return rows(made, ([line[index] for index in kept] for line in self._lines))


_ENDLESS = 10_000
"""Columns of characters; more than any table takes."""


def size_text(size_bytes: float) -> str:
    """Bytes for people: "20.1 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count_text(count: int) -> str:
    """A count for people: "12,345"."""
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """A count of things for people: "1 buffer", "2 buffers"."""
    return f"{count_text(count)} {noun}{'' if count == 1 else 's'}"


def rate_text(per_second: float) -> str:
    """A rate for people, with as many digits as mean something."""
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.2g}/s"
