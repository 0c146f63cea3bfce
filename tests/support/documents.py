"""The fenced blocks of documents and docstrings."""

import ast
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    place: str
    """The file, and the block's name or number in it, or what its docstring belongs to."""
    language: str
    code: str


def blocks() -> Iterator[Block]:
    """Every block of the documents, and of the docstrings of what is installed."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    sources = (
        *("client/", "adapters/", "server/", "rollout_worker/", "learner/"),
        *("offline/", "policies/", "console/", "demo/"),
    )
    for path in sorted(tracked):
        if path.startswith("docs/reference/"):
            continue  # It repeats blocks of the others.
        if path.endswith(".md"):
            yield from blocks_in((ROOT / path).read_text(), path)
        elif path.startswith(sources):
            source = (ROOT / path).read_text()
            if "```" not in source:
                continue
            for owner, docstring in docstrings(ast.parse(source)):
                yield from blocks_in(docstring, path, owner)


def docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str = ""
) -> Iterator[tuple[str, str]]:
    """Every docstring in something, by its qualified name; that of a module has none."""
    yield name, ast.get_docstring(node) or ""
    for each in node.body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(each, f"{name}.{each.name}".lstrip("."))


def blocks_in(text: str, path: str, owner: str = "") -> Iterator[Block]:
    """Blocks of one text; a comment before one is its name, or else what the text belongs to."""
    found = re.finditer(
        r"(?:<!-- (\S+) -->\n)?^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE
    )
    for number, block in enumerate(found, 1):
        name = block[1] or (owner if owner and number == 1 else f"{owner}{number}")
        yield Block(f"{path}#{name}", block[2], textwrap.dedent(block[3]))


BLOCKS = {block.place: block for block in blocks()}
