"""Pages show what `make bench-peers` published, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.peers import page
from bench.report import marks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("README.md", page.short_table),
        ("docs/studies/performance.md", page.tables),
        ("docs/producers.md", page.producers_table),
    ],
)
def test_the_tables_are_those_of_the_published_rounds(
    name: str, tables: Callable[[page.Report], str]
) -> None:
    rounds = json.loads((ROOT / "docs" / "images" / "peers.json").read_text())
    begin, end = marks(page.COMMAND)
    block = (ROOT / name).read_text().split(begin)[1].split(end)[0]

    assert tables(page.Report.from_json(rounds)) == block.removeprefix("\n\n").removesuffix("\n")
