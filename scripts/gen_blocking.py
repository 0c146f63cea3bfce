"""Write the blocking client from the asyncio client, or check that what is committed is current.

Each module of `PAIRS` is the asyncio one without its `async` and `await`. What they call to wait,
`interpreter` and `run_ahead` of `breadbox.transport`, is written by hand for either. Edit the
asyncio module, then run `make blocking`.

Usage: python scripts/gen_blocking.py [--check]
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client" / "breadbox"
PAIRS = {f"aio/{name}.py": f"{name}.py" for name in ("client", "lease", "loader")}

HEADER = "# Made from {source} by scripts/gen_blocking.py; edit that, run `make blocking`.\n"

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
    r"\b[Aa]n async context manager": "a context manager",
    r"\basync (?=with|for|def)": "",
    r"\bawait (?=\w)": "",
    r"AsyncGenerator\[(.+), None\]": r"Generator[\1, None, None]",
    r"Awaitable\[(\w+)\]": r"\1",
    r"\bAwaitable, ": "",
    r"\"Entering\[(\w+)\]\"": r'"\1"',
    r"\bEntering\((.+)\)$": r"\1",
    r"; awaited several at a time\.": "; called from several threads.",
}
"""What is written otherwise, wherever it stands: regular expressions, by line."""

PASSAGES = {
    "aio/client.py": {
        '"""The asyncio client:': '"""The blocking client:',
        """\
    For the loop it was made in, and not thread-safe: `close` makes calls of other tasks fail with
    ClosedError. `asyncio.CancelledError` and the `TimeoutError` of `asyncio.timeout` are never
    converted.
""": """\
    Thread-safe: any number of threads may call any method at a time; `close` makes calls of other
    threads fail with ClosedError. Not for use after a fork: gRPC's threads do not survive it, so
    every call in a child process raises ClosedError; connect in the child, or spawn it.
""",
        "    async def open_store(self)": "    @property\n    def store(self)",
    },
    "aio/lease.py": {
        """\
    A cancellation is an exception like others. Not for several tasks at a time.
""": """\
    Not thread-safe but for `released` and `expired`: one thread at a time works on a lease.
""",
        """\
        Leaving the loop early cancels the loads in progress once the generator is closed;
        `contextlib.aclosing` does that immediately.

""": "",
        """\
                for fragment in fragments:
                    yield fragment
""": """\
                yield from fragments
""",
    },
}
"""What the two say differently: each stands in its module once."""


def blocking(source: str) -> str:
    """The blocking twin of a module of the asyncio client.

    Raises:
        ValueError: A passage is not there as it should be, or something of asyncio's is left.
    """
    text = (CLIENT / source).read_text()
    for passage, replacement in PASSAGES.get(source, {}).items():
        if text.count(passage) != 1:
            raise ValueError(f"{source} does not have once: {passage}")
        text = text.replace(passage, replacement)
    for pattern, replacement in PATTERNS.items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    for name, replacement in WORDS.items():
        text = re.sub(rf"\b{name}\b", replacement, text)
    if left := re.search(r"(?i)\w*async\w*|\bawait\w*|\w*aio\b|\banext\b|\baiter\b", text):
        raise ValueError(f"{source} has what nothing is said about: {left[0]}")
    return tidied(HEADER.format(source=f"breadbox/{source}") + text)


def tidied(text: str) -> str:
    """A module as `make fix-format` would have it."""
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
        text = blocking(source)
        if not check:
            (CLIENT / target).write_text(text)
        elif text != (CLIENT / target).read_text():
            stale.append(target)
    if stale:
        print(f"stale in client/breadbox: {', '.join(stale)}; run `make blocking`")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
