"""Count habits of words that readers stumble over, and hold each count.

A count may only fall: lower the number in `HELD` when it does. The rules: name the actor (client,
producer, learner, server); a summary is a verb and its object, an attribute a noun phrase; the
trade's word where there is one.

Usage: python scripts/check_words.py [--list HABIT]
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = [
    *(
        "client",
        "adapters",
        "server",
        "rollout_worker",
        "learner",
        "offline",
        "policies",
        "demo",
        "console",
        "protos",
    ),
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs"),
]
GENERATED = ("/v1/", "docs/reference/")

HABITS = {
    "unnamed actor": r"\b(who|whoever|whom|whose|somebody|someone)\b",
    "tell": r"\b(tells?|told|telling)\b",
    "'; None:' for 'or None if'": r"; None: ",
    "summary that begins with 'Of'": r'"""Of ',
    "ride along": r"\b(rid(e|es|ing)|rode) along\b",
    "books, signs of life, standing in line": r"\b(the books|signs? of life|stands? in line)\b",
    "mend": r"\bmend(s|ed|ing)?\b",
}

HELD = {
    "unnamed actor": 55,
    "tell": 6,
    "summary that begins with 'Of'": 0,
    "'; None:' for 'or None if'": 0,
    "ride along": 0,
    "mend": 0,
    "books, signs of life, standing in line": 0,
}
"""Lines with a habit, at most."""


def lines() -> Iterator[tuple[str, int, str]]:
    """Every line of the product and of its documents, with file and number."""
    command = ["git", "ls-files", "--", *PLACES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        if name.endswith((".py", ".md", ".proto")) and not any(part in name for part in GENERATED):
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                yield name, number, line


def main() -> int:
    """Compare each habit's lines with the number held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", metavar="HABIT", choices=HABITS, help="show the lines of one")
    shown = parser.parse_args().list
    counts = dict.fromkeys(HABITS, 0)
    for name, number, line in lines():
        for habit, pattern in HABITS.items():
            if re.search(pattern, line):
                counts[habit] += 1
                if habit == shown:
                    print(f"{name}:{number}: {line.strip()}")
    is_worse = False
    for habit, count in counts.items():
        verdict = "" if count == HELD[habit] else f"; {HELD[habit]} are held"
        is_worse |= count > HELD[habit]
        print(f"{count:5} lines with: {habit}{verdict}")
    if is_worse:
        print("more than before: say it plainly, see CONTRIBUTING.md")
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
