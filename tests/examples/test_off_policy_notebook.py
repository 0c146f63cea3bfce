"""Goal: examples/off_policy.ipynb does what it says, from its first cell to its last."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.notebooks import executed, shown_by

NOTEBOOK = Path(__file__).parents[2] / "examples" / "off_policy.ipynb"

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280), pytest.mark.long]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return executed(NOTEBOOK, tmp_path_factory.mktemp("notebook"))


def test_every_step_that_was_added_was_sent_and_resets_were_left_out(cells: list[Any]) -> None:
    shown = shown_by(cells, "writer.counts")["text/plain"]
    counts = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", shown)}
    assert 1_800 < counts["added"] < 2_000
    assert (counts["added"], 0, 0) == (counts["sent"], counts["dropped"], counts["waiting"])


def test_a_sample_is_shown_as_a_table_with_windows(cells: list[Any]) -> None:
    shown = shown_by(cells, "mirror.sample(4, n_step=3, gamma=0.99)")["text/html"]
    words = " ".join(re.sub(r"<[^>]*>", " ", shown).split())
    assert "obs float32 [4, 4]" in words
    assert "window_length int64 [4]" in words


def test_the_network_learns_and_the_returns_are_plotted(cells: list[Any]) -> None:
    before, after = map(
        float, re.findall(r"\d+\.\d+", shown_by(cells, "means[0], means[-1]")["text/plain"])
    )
    assert before < 40
    assert after > 80
    assert len(shown_by(cells, 'plt.title("CartPole-v1");')["image/png"]) > 10_000


def test_priorities_are_set_and_a_new_mirror_has_the_same_steps(cells: list[Any]) -> None:
    update = "mirror.update_priorities(batch.handle, error_of(batch).detach().abs() + 1e-3)"
    assert "64" == shown_by(cells, update)["text/plain"]
    last = "before, again.inserted_step_count, bool(again.holds(batch.handle).all())"
    before, again, holds = shown_by(cells, last)["text/plain"].strip("()").split(", ")
    assert (before, "True") == (again, holds)
