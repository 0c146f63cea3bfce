"""README.md and docs/performance.md show what `make bench-peers` published, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.peers import page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "tables"), [("README.md", page.short_table), ("docs/performance.md", page.tables)]
)
def test_the_tables_are_those_of_the_published_rounds(
    name: str, tables: Callable[[page.Report], str]
) -> None:
    rounds = json.loads((ROOT / "docs" / "images" / "peers.json").read_text())
    block = (ROOT / name).read_text().split(page.BEGIN)[1].split(page.END)[0]

    assert tables(page.Report.from_json(rounds)) == block.removeprefix("\n\n").removesuffix("\n")
