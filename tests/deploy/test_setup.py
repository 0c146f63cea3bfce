"""`make demo` on a machine of anybody's: old Pythons, pip's settings, silent steps, no answer."""

import ast
import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_venv.py"
AS_OLD_PYTHON = (
    "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); "
    f"sys.argv = [{str(SCRIPT)!r}, sys.argv[1]]; "
    f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
)


@pytest.fixture
def setup_venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_as_old_python(folder: Path, path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", AS_OLD_PYTHON, str(folder)],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_python_can_read_the_script_that_tells_it_so() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 7))


def test_an_old_python_is_told_what_is_needed_and_nothing_is_made(tmp_path: Path) -> None:
    done = run_as_old_python(tmp_path / "venv", path=tmp_path)
    assert 2 == done.returncode, done.stderr
    assert "Python 3.11 or newer is needed; this is" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_a_newer_python_on_the_path_is_taken_instead_of_an_old_one(tmp_path: Path) -> None:
    newer = tmp_path / "python3.12"
    newer.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "given $*"\n')
    newer.chmod(0o755)
    done = run_as_old_python(tmp_path / "venv", path=tmp_path)
    assert (0, f"given {SCRIPT} {tmp_path / 'venv'}") == (
        done.returncode,
        done.stdout.splitlines()[-1],
    ), done


def test_uv_is_told_what_pip_is_configured_with(setup_venv: ModuleType) -> None:
    settings = {
        "index-url": "https://index.example/simple",
        "extra-index-url": "https://a.example https://b.example",
        "find-links": r"/wheels\n/more",
        "no-index": "true",
    }
    assert [
        *("--default-index", "https://index.example/simple"),
        *("--index", "https://a.example", "--index", "https://b.example"),
        *("--find-links", "/wheels", "--find-links", "/more", "--no-index"),
    ] == setup_venv.configured_for_uv(settings)
    assert [] == setup_venv.configured_for_uv({})


def test_pips_environment_wins_over_its_files(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nfind-links = /from-file\nindex-url = https://file.example\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/from-environment")
    settings = setup_venv.Installer(sys.executable, "", str(tmp_path)).settings()
    assert ("/from-environment", "https://file.example") == (
        settings["find-links"],
        settings["index-url"],
    )


def test_an_index_that_does_not_answer_is_given_up_in_time(setup_venv: ModuleType) -> None:
    """Also one that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not setup_venv.answers(f"http://127.0.0.1:{port}/torch/", within_s=0.05)
    assert not setup_venv.answers(f"http://127.0.0.1:{port}/torch/", within_s=5.0)


def test_a_step_that_says_nothing_is_said_to_go_on(
    setup_venv: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setattr(setup_venv, "QUIET_S", 0.05)
    go_on, script = tmp_path / "go-on", "until [ -e $0 ]; do sleep 0.05; done"
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "half-of-a-wheel").write_bytes(bytes(3_000_000))
    step = setup_venv.Step("torch", str(tmp_path / "scratch"))
    say, told = setup_venv.say, []

    def end_when_told(text: str) -> None:
        told.append(text)
        go_on.touch()
        say(text)

    monkeypatch.setattr(setup_venv, "say", end_when_told)
    assert step.run(["sh", "-c", script, str(go_on)], dict(os.environ))
    assert re.fullmatch(r"torch: still at it, \d+ s, 3 MB received", told[0])


def test_what_a_failed_step_said_is_shown_and_of_one_that_succeeds_the_downloads(
    setup_venv: ModuleType, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    lines = "echo Collecting numpy; echo Downloading numpy.whl '(16.6 MB)'; printf half"
    for ending, expected in (
        ("", b"Downloading numpy.whl (16.6 MB)\n"),
        ("; exit 1", b"Downloading numpy.whl (16.6 MB)\nCollecting numpy\nhalf"),
    ):
        step = setup_venv.Step("numpy", str(tmp_path), setup_venv.SHOWN)
        assert (not ending) == step.run(["sh", "-c", lines + ending], dict(os.environ))
        assert expected == capfdbinary.readouterr().out
