"""The examples of prioritised and of recurrent Q-learning reach what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(660)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGETS = {"prioritised_dqn.py": 195.0, "recurrent_q.py": 120.0}


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_two_actors_and_a_learner_reach_the_target(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False
    )
    assert 0 == ended.returncode, ended.stdout + ended.stderr
    returns = [float(each) for each in re.findall(r"return ([\d.]+)$", ended.stdout, re.MULTILINE)]
    assert returns[-1] >= TARGETS[name]


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 150
