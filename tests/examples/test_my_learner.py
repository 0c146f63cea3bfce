"""Goal: the programs of docs/my-learner.md learn, alone and in parts, and the page shows them.

Method: each is run as a reader runs it, and prints its mean returns.
"""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import breadbox
from support.documents import BLOCKS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = "docs/my-learner.md"

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(660)]

SCRIPTS = {
    "environment": "reach.py",
    "ppo-act": "ppo_dict.py",
    "ppo-learn": "ppo_dict.py",
    "ppo-advantages": "ppo_dict.py",
    "continuous-policy": "ppo_continuous.py",
    "continuous-act": "ppo_continuous.py",
    "sac-learn": "sac_mirror.py",
}
"""Where the lines of the page's blocks are."""

LEARNED = -8.0
"""A mean return that is beyond chance: directions by chance get less than -20."""


def example(name: str, *words: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / name), *words]


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo_dict.py", "ppo_continuous.py", "sac_mirror.py"])
def test_two_producers_and_a_learner_reach_the_goal(name: str) -> None:
    ended = subprocess.run(example(name), capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert 0 == ended.returncode, said
    returns = [float(each) for each in re.findall(r"mean return (-[\d.]+)$", ended.stdout, re.M)]
    assert returns[0] < returns[-1], said
    assert returns[-1] > LEARNED, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("ppo_dict.py", "on-policy"),
        ("ppo_continuous.py", "on-policy"),
        ("sac_mirror.py", "off-policy"),
    ],
)
def test_producer_and_learner_meet_at_a_server(name: str, preset: str) -> None:
    with breadbox.local_server(preset=preset) as client:
        parts = [subprocess.Popen(example(name, part, client.address)) for part in ("learn", "act")]
        try:
            known = None
            while known is None or (known.model_version or 0) < 3:
                assert [None, None] == [part.poll() for part in parts]
                known = client.watch_model(known, max_wait_s=10) or known
        finally:
            for part in parts:
                part.kill()
                part.wait()
        counters = client.get_buffer().state.counters
    assert counters["fragments_admitted"] >= 32
    assert 0 == counters["fragments_wrong_session"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_shows_lines_of_the_scripts(name: str) -> None:
    code = BLOCKS[f"{PAGE}#{name}"].code
    script = (EXAMPLES / SCRIPTS[name]).read_text()
    assert any(textwrap.indent(code, " " * depth) in script for depth in (0, 4, 8, 12))


def test_every_block_of_the_page_is_of_a_script() -> None:
    blocks = [each.place for each in BLOCKS.values() if each.language == "python"]
    assert [f"{PAGE}#{name}" for name in SCRIPTS] == [
        place for place in blocks if place.startswith(f"{PAGE}#")
    ]


@pytest.mark.parametrize("names", [("ppo_dict.py",), ("sac_mirror.py",)])
def test_producer_and_learner_have_about_60_lines_together(names: tuple[str, ...]) -> None:
    parts = {"act", "learn", "advantages_of", "minimise"}
    count = sum(
        (node.end_lineno or 0) - node.lineno + 1
        for name in names
        for node in ast.parse((EXAMPLES / name).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in parts
    )
    assert count <= 66


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(
        path.read_text()
        for folder in ("examples", "demo", "peers")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    )
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert [] == [name for name in names if name not in tests]
