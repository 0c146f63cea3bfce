"""The page that explains what `breadbox stats` counts."""

import re
from pathlib import Path

from breadbox_server.core.state.counters import DURABLE, EPHEMERAL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate.md"


def test_the_page_explains_every_counter_that_is_shown_and_says_which_begin_anew() -> None:
    section = PAGE.read_text().split("## What `breadbox stats` shows")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`)( \*)? \|", section, re.MULTILINE)
    explained = {name: bool(star) for names, star in rows for name in re.findall(r"`(\w+)`", names)}

    assert {name: name in EPHEMERAL for name in DURABLE | EPHEMERAL} == explained
