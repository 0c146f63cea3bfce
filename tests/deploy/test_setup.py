"""`make demo` on any machine: old Pythons, pip's settings, an index without an answer."""

import ast
import importlib.util
import io
import os
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


@pytest.mark.parametrize(
    ("variables", "file", "expected"),
    [
        ({}, "", False),
        ({}, "[global]\nindex-url = https://pypi.org/simple\n", False),
        ({}, "[global]\nextra-index-url = https://more.example\n", False),
        ({}, "[install]\nindex-url = https://own.example\n", True),
        ({}, "[global]\nno-index = true\n", True),
        ({"PIP_INDEX_URL": "https://own.example"}, "", True),
    ],
)
def test_an_index_of_ones_own_is_known_by_pips_configuration(
    setup_venv: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    file: str,
    expected: bool,
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    (tmp_path / "pip.conf").write_text(file)
    for name, value in {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expected == setup_venv.has_own_index(sys.executable)


def test_an_index_that_does_not_answer_is_given_up_in_time(setup_venv: ModuleType) -> None:
    """Also one that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not setup_venv.answers(f"http://127.0.0.1:{port}/torch/", within_s=0.05)
    assert not setup_venv.answers(f"http://127.0.0.1:{port}/torch/", within_s=5.0)


def test_uv_installs_where_it_is_and_pip_has_no_sources_of_its_own_and_pip_if_it_fails(
    setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "uv"):
        (tmp_path / name).write_text(
            f'#!/bin/sh\ncase "$*" in *config*) cat pip.conf;; *--version) ;; *) '
            f'echo "{name} $*" >> calls; [ ! -e {name}-fails ];; esac\n'
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(setup_venv, "ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    python, config, calls = str(tmp_path / "python"), tmp_path / "pip.conf", tmp_path / "calls"

    def called() -> list[str]:
        told = [line.split()[0] for line in calls.read_text().splitlines()]
        calls.unlink()
        return told

    config.write_text("")
    assert setup_venv.install(python, "numpy")
    assert ["uv"] == called()
    (tmp_path / "uv-fails").touch()
    assert setup_venv.install(python, "numpy")
    assert ["uv", "python"] == called()
    config.write_text("global.find-links='/wheels'\n")
    assert setup_venv.install(python, "numpy")
    assert ["python"] == called()
    (tmp_path / "python-fails").touch()
    assert not setup_venv.install(python, "numpy")


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, _ = indexes
    monkeypatch.setattr(setup_venv, "CPU_INDEX_URL", cpu.url)
    assert setup_venv.install_torch(str(python))
    assert "9.1+cpu" == torch_version(python)
    cpu.asked.clear()
    assert setup_venv.install_torch(str(python))
    assert [] == cpu.asked


def test_torch_comes_from_the_index_that_pip_is_configured_with(
    setup_venv: ModuleType,
    python: Path,
    indexes: tuple[Index, Index],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, own = indexes
    monkeypatch.setattr(setup_venv, "CPU_INDEX_URL", cpu.url)
    monkeypatch.setenv("PIP_INDEX_URL", own.url)
    assert setup_venv.install_torch(str(python))
    assert ("9.2", []) == (torch_version(python), cpu.asked)


@pytest.mark.long
def test_a_torch_whose_installation_was_interrupted_is_made_whole(
    setup_venv: ModuleType,
    python: Path,
    indexes: tuple[Index, Index],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, own = indexes
    monkeypatch.setenv("PIP_INDEX_URL", own.url)
    assert setup_venv.install_torch(str(python))
    (module,) = python.parent.parent.glob("lib/python*/site-packages/torch.py")
    module.unlink()
    assert "" == torch_version(python)
    assert setup_venv.install_torch(str(python))
    assert "9.2" == torch_version(python)
