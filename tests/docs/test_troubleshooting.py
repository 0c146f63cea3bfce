"""docs/troubleshooting.md names the causes that `breadbox explain` names, and its default."""

import re
from pathlib import Path

from breadbox import diagnosis
from breadbox.cli.commands.stats import ExplainSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text()


def test_every_cause_has_a_row() -> None:
    section = PAGE.split("## The learner waits")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    named = {cause for names in rows for cause in re.findall(r"`([A-Z_]+)`", names)}
    source = Path(diagnosis.__file__).read_text()
    assert set(re.findall(r'^ +(?:return )?"([A-Z_]+)",', source, re.MULTILINE)) == named


def test_the_page_says_for_how_long_explain_watches() -> None:
    watched_s = ExplainSettings.model_fields["interval_s"].default
    assert {2.0: "two"}[watched_s] in re.findall(r"from (\w+) seconds of the buffer", PAGE)
