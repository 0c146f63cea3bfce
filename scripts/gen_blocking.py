"""Write the blocking client from the asyncio client, or check that what is committed is current.

The code of each module of `PAIRS` is written in the asyncio one; the blocking one is that without
its `async` and `await`. Docstrings are written in the blocking module, once for both: this script
keeps them, and `breadbox.aio` shows them in `help()`. What both call to wait, `interpreter` and
`prefetched` of `breadbox.transport`, is written by hand for either.

Usage: python scripts/gen_blocking.py [--check]
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client" / "breadbox"
PAIRS = {f"aio/{name}.py": f"{name}.py" for name in ("client", "lease", "loader", "service")}

HEADER = "# Code: breadbox/{source}, made by scripts/gen_blocking.py. Docstrings: written here.\n"

WORDS = {
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclosing": "closing",
}
"""Names of the asyncio client, and what they are called in the blocking one."""

PATTERNS = {
    r"from breadbox\.transport\.aio\.entering import Entering\n": "",
    r"breadbox\.(transport\.)?aio\.": r"breadbox.\1",
    r"\bfor (\w+) in (\w+):\n +yield \1$": r"yield from \2",
    r"\basync (?=with|for|def)": "",
    r"\bawait (?=\w)": "",
    r"AsyncGenerator\[(.+), None\]": r"Generator[\1, None, None]",
    r"Awaitable\[([\w.]+)\]": r"\1",
    r"\bAwaitable, |^    Awaitable,\n": "",
    r"\"Entering\[(\w+)\]\"": r'"\1"',
    r"\bEntering\((.+)\)$": r"\1",
    r"    def open_store\(self\)": "    @property\n    def store(self)",
}
"""What is written otherwise, wherever it stands: regular expressions."""


def blocking(source: str, docstrings: dict[str, str]) -> str:
    """Return the blocking twin of a module of the asyncio client.

    Raises:
        ValueError: Something of asyncio's is left.
    """
    text = without_docstrings((CLIENT / source).read_text())
    for pattern, replacement in PATTERNS.items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    for name, replacement in WORDS.items():
        text = re.sub(rf"\b{name}\b", replacement, text)
    if left := re.search(r"(?i)\w*async\w*|\bawait\w*|\w*aio\b|\banext\b|\baiter\b", text):
        raise ValueError(f"{source} has what nothing is said about: {left[0]}")
    return tidied(HEADER.format(source=source) + with_docstrings(text, docstrings))


def documented(node: Documented, name: str = "") -> Iterator[tuple[str, Documented]]:
    """Yield what can have a docstring, by qualified name; overloads have none."""
    yield name, node
    for each in node.body:
        if not isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.unparse(each.body[0]) != "...":
            yield from documented(each, f"{name}.{each.name}")


def docstrings_of(text: str) -> dict[str, str]:
    """Return the docstrings of a module as they are written, by qualified name."""
    return {
        name: str(ast.get_source_segment(text, node.body[0]))
        for name, node in documented(ast.parse(text))
        if ast.get_docstring(node)
    }


def without_docstrings(text: str) -> str:
    """Return a module without its docstrings."""
    lines = text.splitlines(keepends=True)
    for _, node in documented(ast.parse(text)):
        if ast.get_docstring(node):
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * len(
                lines[first.lineno - 1 : first.end_lineno]
            )
    return "".join(lines)


def with_docstrings(text: str, docstrings: dict[str, str]) -> str:
    """Return a module that has no docstrings with these."""
    lines = text.splitlines(keepends=True)
    for name, node in documented(ast.parse(text)):
        if name in docstrings:
            first = node.body[0]
            marks = getattr(first, "decorator_list", [])
            at = min(each.lineno for each in (first, *marks)) - 1
            lines[at] = f"{' ' * first.col_offset}{docstrings[name]}\n{lines[at]}"
    return "".join(lines)


def tidied(text: str) -> str:
    """Return a module as `make fix-format` would have it."""
    ruff = [sys.executable, "-m", "ruff"]
    for options in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *options, "--stdin-filename", CLIENT / "client.py", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        text = done.stdout
    return text


def main() -> int:
    """Write the blocking client, or with --check return 1 and name the modules that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for source, target in PAIRS.items():
        docstrings = docstrings_of((CLIENT / target).read_text())
        text = blocking(source, docstrings)
        if not check:
            (CLIENT / target).write_text(text)
        elif text != (CLIENT / target).read_text():
            stale.append(target)
    if stale:
        print(f"stale in client/breadbox: {', '.join(stale)}; run `make blocking`")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
