"""Goal: examples/quickstart.ipynb does what it says, from its first cell to its last.

Method: run it in a kernel of its own, as Jupyter would, and look at what its cells show.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.notebooks import executed, shown_by

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
TABLES = {
    "fragments[0]": "obs float32 [128, 4]",
    "lease": "env-0 0 1 to 1 128",
    "batch": "obs float32 [8, 128, 4]",
}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of code, executed in a folder that has nothing else in it."""
    return executed(NOTEBOOK, tmp_path_factory.mktemp("notebook"))


@pytest.mark.long
@pytest.mark.parametrize("name", TABLES)
def test_what_holds_arrays_is_shown_as_a_table(cells: list[Any], name: str) -> None:
    words = re.sub(r"<[^>]*>", " ", shown_by(cells, name)["text/html"])
    assert TABLES[name] in " ".join(words.split())


@pytest.mark.long
def test_everything_was_admitted_and_used_up(cells: list[Any]) -> None:
    assert 8 == shown_by(cells, "client.append_many(fragments)")["text/plain"].count("admitted")
    assert "0" == shown_by(cells, "client.get_buffer().state.fragment_count")["text/plain"]


@pytest.mark.long
def test_the_policy_learns_and_the_returns_are_plotted(cells: list[Any]) -> None:
    text = shown_by(cells, "np.nanmean(means[:5]), np.nanmean(means[-5:])")["text/plain"]
    before, after = map(float, re.findall(r"\((\d+\.\d+)\)", text))
    assert before < 50
    assert after > 100
    assert len(shown_by(cells, 'plt.title("CartPole-v1");')["image/png"]) > 10_000


@pytest.mark.parametrize("name", sorted(each.name for each in NOTEBOOK.parent.glob("*.ipynb")))
def test_outputs_are_not_committed(name: str) -> None:
    """They would be of another version than the code; readers run it, or see the site."""
    notebook = json.loads((NOTEBOOK.parent / name).read_text())
    assert [] == [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
