"""AReaL's staleness manager by tickets: its own tests, unpatched, and random histories.

AREAL is the folder of a clone of its repository (inclusionAI/AReaL); its package is not needed.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from peers.areal.staleness_manager import StalenessManager
from peers.packages import environment

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

TESTS = Path(__file__).resolve().parents[1]
THEIR_TESTS = "tests/test_staleness_manager.py"
THEIR_TEST_COUNT = 45


class Versions:
    """What AReaL asks for the current version."""

    def __init__(self) -> None:
        self.version = 0

    def get_version(self) -> int:
        return self.version


def test_random_histories_have_the_capacity_of_areals_formula() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    for _ in range(30):
        batch, staleness = rng.randrange(1, 9), rng.randrange(4)
        versions, running, accepted = Versions(), 0, 0
        manager = StalenessManager(versions, 10**6, batch, staleness)
        for _ in range(60):
            match rng.choice(["submit", "submit", "accept", "reject", "publish"]):
                case "submit":
                    manager.on_rollout_submitted()
                    running += 1
                case "accept" if running:
                    manager.on_rollout_accepted()
                    running, accepted = running - 1, accepted + 1
                case "reject" if running:
                    manager.on_rollout_rejected()
                    running -= 1
                case "publish":
                    versions.version += rng.randrange(1, 3)
            formula = (staleness + versions.version + 1) * batch - accepted - running
            assert formula == manager.get_capacity()


@pytest.mark.skipif("AREAL" not in os.environ, reason="AREAL does not name a clone of AReaL")
def test_areals_own_tests_pass(tmp_path: Path) -> None:
    package = tmp_path / "areal" / "infra"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "staleness_manager.py").write_text(
        "from peers.areal.staleness_manager import StalenessManager as StalenessManager\n"
    )
    theirs = tmp_path / "test_staleness_manager.py"
    theirs.write_text((Path(os.environ["AREAL"]) / THEIR_TESTS).read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", theirs.name],
        cwd=tmp_path,
        env=environment(tmp_path, TESTS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout
    assert f"{THEIR_TEST_COUNT} passed" in done.stdout
