""".ci/run, with a `make` and a `docker` of this test's: what fails once is run twice, and named."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE = """#!/bin/sh
echo "$@" >> calls
[ "$1" != verify-format ] || echo "formats and types"
mkdir -p .pytest_cache/v/cache
for each in $FAILING; do
  if [ "$1" = "${each%:*}" ] && [ "$(grep -cE "^$1( |$)" calls)" -le "${each#*:}" ]; then
    echo "{\\"tests/$1.py::test_of[$1 1]\\": true, \\"tests/$1.py::test_2\\": true}" \\
      > .pytest_cache/v/cache/lastfailed
    exit 2
  fi
done
"""


def run(folder: Path, failing: str) -> tuple[int, list[str], list[str]]:
    """Exit status, lines, and calls of `make`; `failing` has TARGET:TIMES."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    tools = folder / "tools"
    tools.mkdir()
    for name, text in (("make", MAKE), ("docker", "#!/bin/sh\n"), ("git", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for name in ("promtool", "chromium"):
        (tools / name).symlink_to("make")
    done = subprocess.run(
        [folder / ".ci" / "run"],
        env={"PATH": f"{tools}:{os.environ['PATH']}", "FAILING": failing},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), (folder / "calls").read_text().splitlines()


def test_nothing_is_run_twice_where_nothing_fails(tmp_path: Path) -> None:
    status, lines, calls = run(tmp_path, "")
    assert (0, ["formats and types"]) == (status, lines)
    assert len(calls) == len(set(calls))


def test_what_passes_the_second_time_is_named_at_the_end(tmp_path: Path) -> None:
    status, lines, calls = run(tmp_path, "test:1 test-peers:1")
    assert 0 == status
    assert [
        f"ci: was run twice: {name}: tests/{name}.py::{test}"
        for name in ("test", "test-peers")
        for test in (f"test_of[{name} 1]", "test_2")
    ] == lines[-4:]
    again = "SIDE_BY_SIDE= ARGS=--last-failed --last-failed-no-failures none"
    assert [f"test {again}", f"test-peers {again}"] == [each for each in calls if again in each]


@pytest.mark.parametrize(
    "failing", ["test:2", "release-rehearsal:1", "setup:1", "verify-format:1", "smoke:1"]
)
def test_what_fails_for_good_fails_the_whole(tmp_path: Path, failing: str) -> None:
    status, lines, _ = run(tmp_path, failing)
    assert 2 == status
    named = [line for line in lines if "was run twice" in line]
    assert (2 if failing == "test:2" else 0) == len(named)
    assert ("formats and types" in lines) == (failing != "setup:1")
