"""`make demo` on a machine of anybody's: old Pythons, pip's settings, silent steps, no answer."""

import ast
import importlib.util
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        *("--find-links", "/wheels", "--find-links", "/more"),
        *("--index-strategy", "unsafe-best-match", "--no-index"),
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
    # Pip's spinner, say: what is not shown breaks no silence.
    go_on, script = tmp_path / "go-on", "until [ -e $0 ]; do echo still hidden; sleep 0.01; done"
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "half-of-a-wheel").write_bytes(bytes(3_000_000))
    step = setup_venv.Step("torch", str(tmp_path / "scratch"), re.compile(b"Downloading"))
    say, told = setup_venv.say, []

    def end_when_told(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            go_on.touch()
        say(text)

    monkeypatch.setattr(setup_venv, "say", end_when_told)
    assert step.run(["sh", "-c", script, str(go_on)], dict(os.environ))
    assert re.fullmatch(r"torch: still at it, \d+ s, 3 MB received", told[0])
    assert re.fullmatch(r"torch: still at it, \d+ s, installing", told[1])


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


class Index:
    """A package index on loopback, with a torch in it that is a module with a version."""

    def __init__(self, version: str) -> None:
        self.asked: list[str] = []
        name = f"torch-{version}-py3-none-any.whl"
        wheel, asked = wheel_of(version), self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                is_wheel = self.path.endswith(".whl")
                is_page = self.path == "/torch/"
                self.send_response(200 if is_wheel or is_page else 404)
                self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
                self.end_headers()
                self.wfile.write(wheel if is_wheel else f'<a href="/{name}">{name}</a>'.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def wheel_of(version: str) -> bytes:
    info = f"torch-{version}.dist-info"
    files = {
        "torch.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def python(empty_venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An interpreter without torch, on a machine where nothing is configured."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "BREADBOX_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield empty_venv / "bin" / "python"
    for path in empty_venv.glob("lib/python*/site-packages/torch*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def torch_version(python: Path) -> str:
    code = "import torch; print(torch.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


@pytest.fixture
def indexes() -> Iterator[tuple[Index, Index]]:
    cpu, own = Index("9.1+cpu"), Index("9.2")
    yield cpu, own
    cpu.close()
    own.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's builds are for the CPU")
@pytest.mark.long
def test_torch_comes_from_the_index_of_cpu_builds_where_that_answers_and_only_once(
    setup_venv: ModuleType,
    python: Path,
    indexes: tuple[Index, Index],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, _ = indexes
    monkeypatch.setattr(setup_venv, "CPU_INDEX_URL", cpu.url)
    installer = setup_venv.Installer(str(python), "", str(tmp_path))
    assert setup_venv.install_torch(installer)
    assert "9.1+cpu" == torch_version(python)
    cpu.asked.clear()
    assert setup_venv.install_torch(installer)
    assert [] == cpu.asked


def test_torch_comes_from_the_index_that_pip_is_configured_with(
    setup_venv: ModuleType,
    python: Path,
    indexes: tuple[Index, Index],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, own = indexes
    monkeypatch.setattr(setup_venv, "CPU_INDEX_URL", cpu.url)
    monkeypatch.setenv("PIP_INDEX_URL", own.url)
    assert setup_venv.install_torch(setup_venv.Installer(str(python), "", str(tmp_path)))
    assert ("9.2", []) == (torch_version(python), cpu.asked)


@pytest.mark.long
def test_a_torch_whose_installation_was_interrupted_is_made_whole(
    setup_venv: ModuleType,
    python: Path,
    indexes: tuple[Index, Index],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, own = indexes
    monkeypatch.setenv("PIP_INDEX_URL", own.url)
    installer = setup_venv.Installer(str(python), "", str(tmp_path))
    assert setup_venv.install_torch(installer)
    (module,) = python.parent.parent.glob("lib/python*/site-packages/torch.py")
    module.unlink()
    assert "" == torch_version(python)
    assert setup_venv.install_torch(installer)
    assert "9.2" == torch_version(python)
