"""The pages that explain what `breadbox stats` and the metrics count."""

import re
from pathlib import Path

from breadbox_server.core.model.counters import DURABLE, EPHEMERAL
from breadbox_server.core.model.events import DiscardReason, EvictionReason
from breadbox_server.core.model.inputs import AdmissionOutcome

METRICS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate.md"


def test_the_page_explains_every_counter_that_is_shown_and_says_which_begin_anew() -> None:
    section = PAGE.read_text().split("## What `breadbox stats` shows")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`)( \*)? \|", section, re.MULTILINE)
    explained = {name: bool(star) for names, star in rows for name in re.findall(r"`(\w+)`", names)}

    assert {name: name in EPHEMERAL for name in DURABLE | EPHEMERAL} == explained


def test_the_page_of_metrics_names_every_end_of_a_fragment() -> None:
    rows = {
        name: labels
        for name, labels in re.findall(
            r"^\| `(\w+)` \| counter \| (.*?) \|", METRICS.read_text(), re.M
        )
    }
    for name, label, kind in (
        ("breadbox_fragments_total", "outcome", AdmissionOutcome),
        ("breadbox_fragments_discarded_total", "reason", DiscardReason),
        ("breadbox_chunks_evicted_total", "reason", EvictionReason),
    ):
        values = ", ".join(each.value for each in kind)
        assert f"`buffer`, `{label}` ({values})" == rows[name]
