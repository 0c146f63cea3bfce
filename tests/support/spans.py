"""Code spans of pages and notebooks: the words in running text that a reader may type."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.documents import ROOT

PAGES = (
    *("README.md", "SECURITY.md", "ARCHITECTURE.md", "CONTRIBUTING.md"),
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
)


@dataclass(frozen=True)
class Span:
    """A code span."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def spans() -> Iterator[Span]:
    """Every code span of the pages, and of the notebooks' texts, outside fenced blocks."""
    for page in PAGES:
        yield from spans_in(page, (ROOT / page).read_text())
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield from spans_in(f"examples/{path.name}", "".join(cell["source"]))


def spans_in(page: str, text: str) -> Iterator[Span]:
    """Every code span of a text; a table's escaped bars are bars."""
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced:
            for _, found in re.findall(r"(`+)(.+?)\1", line):
                yield Span(page, number, found.strip().replace("\\|", "|"))
