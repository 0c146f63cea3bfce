"""How several processes share the tests."""

from pathlib import Path

import pytest

from support import spreading

SPREAD = "integration/test_spread.py"
SHARING = "integration/test_sharing.py"
ATTACK = "hostile/test_attack.py"
QUICK = "core/test_quick.py"
FILES = {
    SPREAD: "pytestmark = pytest.mark.integration\n",
    SHARING: 'pytestmark = [pytest.mark.slow]\n@pytest.fixture(scope="module")\n',
    ATTACK: "pytestmark = pytest.mark.integration\n",
    QUICK: "def test_it() -> None: ...\n",
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(spreading, "ROOT", tmp_path)
    return tmp_path


def test_tests_are_spread_where_they_wait_and_share_nothing() -> None:
    assert [SPREAD] == [path for path in FILES if spreading.is_spread(path)]


def test_slow_files_come_first_and_neighbours_are_of_different_files(root: Path) -> None:
    other = "integration/test_other.py"
    (root / other).write_text(FILES[SPREAD])
    given = [QUICK, SPREAD, SPREAD, SHARING, SHARING, other, other, ATTACK]
    keys = spreading.order(given)
    ordered = [path for _, path in sorted(zip(keys, given, strict=True), key=lambda each: each[0])]
    assert [SHARING, SHARING, ATTACK, SPREAD, other, SPREAD, other, QUICK] == ordered
