"""The example of a learner that samples from a mirror learns what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(660)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "dqn_mirror.py"


@pytest.mark.long
def test_dqn_with_two_actors_learns_cartpole_through_the_mirror() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), "--target", "195", "--seconds-max", "500"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == ended.returncode, ended.stdout + ended.stderr
    (mean,) = re.findall(r"^mean return ([\d.]+)$", ended.stdout, re.MULTILINE)
    assert float(mean) >= 195.0


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 150
