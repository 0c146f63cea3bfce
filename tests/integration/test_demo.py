"""`breadbox demo` as a user meets it: real processes, real learning, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.eventually import eventually_sync

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SHARED_MEMORY = Path("/dev/shm")


def demo_command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "breadbox.cli.main", "demo", "--out", str(out), *arguments]


def stores() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("breadbox-demo-*")}


def processes_of(out: Path) -> list[str]:
    """Command lines of live processes that mention the run's folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # It ended while we looked.
            continue
        if str(out) in command and int(folder.name) != os.getpid():
            found.append(command)
    return found


def test_demo_learns_leaves_a_report_and_nothing_else(tmp_path: Path) -> None:
    stores_before = stores()
    done = subprocess.run(
        demo_command(tmp_path, "--target-return", "50", "--time-limit", "200", "--seed", "1"),
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    (run,) = tmp_path.iterdir()
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert str(run / "report.png") in done.stdout
    records = [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]
    assert records[-1]["return_mean_100"] >= 50
    assert stores_before == stores()
    assert [] == processes_of(tmp_path)


@pytest.mark.long
def test_demo_ends_with_status_1_at_its_time_limit(tmp_path: Path) -> None:
    done = subprocess.run(
        demo_command(tmp_path, "--target-return", "1000000", "--time-limit", "15"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 1 == done.returncode, done.stdout + done.stderr
    assert "time limit" in done.stdout
    assert [] == processes_of(tmp_path)


def started_demo(directory: Path) -> subprocess.Popen[str]:
    """A demo that trains until it is stopped; its server and the others run."""
    demo = subprocess.Popen(
        demo_command(directory, "--target-return", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    # The first line comes once the server runs and the others have been started.
    assert "learner waits for" in demo.stdout.readline()
    return demo


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "hang-up"])
def test_ctrl_c_or_a_closed_terminal_stops_every_process_and_removes_the_store(
    tmp_path: Path, number: signal.Signals
) -> None:
    stores_before = stores()
    demo = started_demo(tmp_path)

    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)

    assert 130 == demo.returncode, output
    assert "Traceback" not in output
    assert stores_before == stores()
    assert [] == processes_of(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has to tell the children")
def test_a_demo_that_is_killed_leaves_no_process_and_no_store(tmp_path: Path) -> None:
    stores_before = stores()
    demo = started_demo(tmp_path)
    assert processes_of(tmp_path)

    demo.kill()
    demo.communicate(timeout=60)

    eventually_sync(lambda: not processes_of(tmp_path), "the end of all processes", within_s=60.0)
    assert stores_before == stores()
