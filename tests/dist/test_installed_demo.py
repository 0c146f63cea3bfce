"""`breadbox demo` of an installed wheel, in an empty folder, far from any checkout."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("BREADBOX_", "PYTHONPATH", "VIRTUAL_ENV"))
}
PNG = b"\x89PNG\r\n\x1a\n"


def run_well(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with nothing but `breadbox[demo]` in it."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir")
    run_well(*pip, folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run_well(sys.executable, "-m", "venv", folder / "environment", cwd=folder)
    programs = folder / "environment" / "bin"
    python = programs / "python"
    # As `make demo` has it: a CPU build, where one can be had.
    script = ROOT / "scripts" / "setup_venv.py"
    run_well(sys.executable, script, "--torch-only", python, cwd=folder)
    wanted = f"breadbox[demo] @ {wheel.as_uri()}"
    run_well(python, "-m", "pip", "install", "-q", wanted, cwd=folder)
    return programs


def test_the_demo_of_a_wheel_learns_and_leaves_what_that_of_a_checkout_leaves(
    installed: Path, tmp_path: Path
) -> None:
    where = run_well(
        installed / "python", "-c", "import breadbox; print(breadbox.__file__)", cwd=tmp_path
    )
    assert installed.parent in Path(where.strip()).parents

    told = run_well(installed / "breadbox", "demo", cwd=tmp_path)

    assert re.search(r"^mean return [\d.]+ over the last 100 episodes", told, re.MULTILINE)
    (run_folder,) = (tmp_path / "runs").iterdir()
    assert told.splitlines()[-1] == f"report: {run_folder / 'report.png'}"
    left = {path.name for path in run_folder.iterdir()}
    assert {
        *("report.png", "progress.jsonl", "checkpoint.safetensors"),
        *("server.log", "learner.log", "worker-0.log", "worker-1.log"),
    } <= left
    assert (run_folder / "report.png").read_bytes().startswith(PNG)
    records = [
        json.loads(line) for line in (run_folder / "progress.jsonl").read_text().splitlines()
    ]
    assert records[-1]["return_mean_100"] >= 195
    assert [] == [path for path in tmp_path.iterdir() if path.name != "runs"]
