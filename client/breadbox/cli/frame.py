"""Print JSON, tables, sizes, counts and rates."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from pydantic_core import to_jsonable_python
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from breadbox.cli.base import printable
from breadbox.model.sizes import counted as counted


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print a value as JSON, indented, or as one line for a stream of them."""
    plain = to_jsonable_python(value, fallback=dict)
    click.echo(json.dumps(plain, indent=None if is_line else 2))


def console() -> Console:
    """Return a console for stdout; 160 columns wide if that is no terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=160)


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table with columns of text; a leading `#` marks columns of numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column.startswith("#")
        made.add_column(
            column.lstrip("#"), justify="right" if is_number else "left", no_wrap=is_number
        )
    return made


def shown(text: object) -> str:
    """Escape foreign text, such as names, for a console that reads markup."""
    return escape(printable(str(text)))


def rows(made: Table, lines: Iterable[Iterable[object]]) -> Table:
    """Fill a table; markup in cells is printed, not interpreted."""
    for line in lines:
        made.add_row(*(Text(printable(str(cell))) for cell in line))
    return made


class FittedTable:
    """A table that leaves out *expendable* columns, one by one, until the others fit."""

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
            yield f"[dim]left out, because the window is narrow: {names}[/]"

    def _without(self, left_out: Sequence[str]) -> Table:
        kept = [index for index, column in enumerate(self._columns) if column not in left_out]
        made = table(*(self._columns[index] for index in kept))
        return rows(made, ([line[index] for index in kept] for line in self._lines))


_ENDLESS = 10_000
"""Width in characters that is more than any table needs."""


def size_text(size_bytes: float) -> str:
    """Return a size to read: "20.1 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count_text(count: int) -> str:
    """Return a count to read: "12,345"."""
    return f"{count:,}"


def rate_text(per_second: float) -> str:
    """Return a rate to read: "12/s", "0.25/s"."""
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.2g}/s"
