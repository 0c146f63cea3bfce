"""Writes the table of limits into SECURITY.md, from `breadbox_server.limits`; --check compares."""

import argparse
import sys
from pathlib import Path

from breadbox_server.limits import LIMITS

TARGET = Path(__file__).resolve().parents[1] / "SECURITY.md"
BEGIN = "<!-- limits: written by scripts/gen_limits.py -->\n"
END = "<!-- end of limits -->\n"


def table() -> str:
    """All limits, in Markdown."""
    lines = [
        "| what | of | limit | at the limit | set by | seen in |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for limit in LIMITS:
        option, metric = (f"`{text}`" if text else "" for text in (limit.option, limit.metric))
        cells = (limit.name, limit.scope.value, limit.shown, limit.at_limit, option, metric)
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """A document with the table of now between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Write the table, or with --check return 1 if it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    text = TARGET.read_text()
    renewed = with_table(text)
    if check and renewed != text:
        print("the table of limits in SECURITY.md is stale; run make limits")
        return 1
    TARGET.write_text(renewed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
