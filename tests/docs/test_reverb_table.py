"""The tables of docs/studies, docs/which-read.md, ARCHITECTURE.md and CONTRIBUTING.md hold."""

import re
from pathlib import Path

import pytest

from breadbox.model.presets import PRESETS, UNLIMITED

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*?)\|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/studies/reverb.md").read_text())


def test_all_behaviours_are_there_once_and_in_order() -> None:
    assert list(map(str, range(1, 73))) == [number for number, *_ in ROWS]


@pytest.mark.parametrize(("number", "there", "here", "held"), ROWS)
def test_a_behaviour_that_is_had_names_a_test_that_exists(
    number: str, there: str, here: str, held: str
) -> None:
    assert re.match(r"same|better: |not\b", here), here
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held)
    assert named or here.startswith("not")
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), name
        told = re.match(r"test_reverb_((?:\d+_and_)*\d+)_", name)
        assert told is None or number in re.split(r"_and_", told[1])


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_says_what_a_preset_sets(name: str) -> None:
    rows = dict(
        re.findall(r"^\| `([\w-]+)` \| (.*) \|$", (ROOT / "docs/which-read.md").read_text(), re.M)
    )
    base = {"prioritised": "off-policy", "stack": "queue"}.get(name)
    known = PRESETS[base] if base else {}
    assert rows[name].startswith("the same, " if base else "")
    for limit, value in PRESETS[name].items():
        if known.get(limit) != value:
            shown = "without end" if value == UNLIMITED else str(value)
            assert re.search(rf"`{limit}`( and `\w+`)? {re.escape(shown)}", rows[name]), limit


def test_what_the_architecture_says_where_is_is_there() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().split("### Where is")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!where is|---)(.+?) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 10
    for _, places in rows:
        root, file = ROOT / "server/breadbox_server", None
        for word, code in re.findall(r"\b(client)\b|`([\w./]+)`", places):
            if word:
                root = ROOT / "client/breadbox"
            elif "." in code or "/" in code:
                file = root / code
                assert file.exists(), file
            else:
                assert file is not None
                assert re.search(rf"^ *(async )?(def|class) {code}\b", file.read_text(), re.M), code


def test_the_worked_changes_count_and_name_files_that_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Four worked")[1].split("\n## ")[0]
    changes = re.findall(r"^### [^\n]*: (\d) files$(.*?)(?=^###|\Z)", section, re.M | re.DOTALL)
    assert 4 == len(changes)
    for count, text in changes:
        files = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
        assert (int(count), len(files)) == (len(files), len(set(files)))
        (proof,) = re.findall(r"^Proof: `\.venv/bin/python -m pytest (.+)`$", text, re.MULTILINE)
        named = re.findall(r"`((?:client|protos|server|tests)/[\w/.]+)`", text) + proof.split()
        for path in {*named} - {"client/breadbox/stores/NAME.py"}:
            assert (ROOT / path).exists(), path
