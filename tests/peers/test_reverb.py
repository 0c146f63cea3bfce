"""Reverb itself beside the adapter: the same program, and what it observes of either.

Reverb runs in the environment of its own in which `make bench-peers` measures it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.peers.contenders import CONTENDERS, NoContestError, installed

from peers.packages import environment, give_up

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1000)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "reverb" / "behaviours.py"
RUN_LIMIT_S = 200.0


def observed(python: Path, module: str, more: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, PROGRAM, module],
        env=environment() | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert 0 == done.returncode, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the program observed of Reverb, and of the adapter."""
    (theirs,) = (each for each in CONTENDERS if each.name == "Reverb")
    out = ROOT / "bench" / "out"
    out.mkdir(parents=True, exist_ok=True)
    try:
        installed(theirs, out)
    except NoContestError as error:
        give_up(f"Reverb cannot be installed: {error}")
    return (
        observed(theirs.python(out), "reverb", {"TF_CPP_MIN_LOG_LEVEL": "3"}),
        observed(
            Path(sys.executable),
            "breadbox_adapters.reverb",
            {"PYTHONPATH": os.pathsep.join(sys.path)},
        ),
    )


@pytest.mark.parametrize(
    ("beginning", "count"),
    [
        pytest.param("band", 21, id="rate limiters let as many inserts and samples through"),
        pytest.param(("step", "open", "closed"), 72, id="signatures accept and refuse the same"),
        pytest.param("", 123, id="structures, closed writers, and all else"),
    ],
)
def test_a_program_observes_the_same_of_reverb_and_of_the_adapter(
    both: tuple[dict[str, Any], dict[str, Any]], beginning: str | tuple[str, ...], count: int
) -> None:
    theirs, ours = (
        {name: each for name, each in found.items() if name.startswith(beginning)} for found in both
    )
    assert count == len(theirs)
    assert theirs == ours
