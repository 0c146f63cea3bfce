"""verl's, NeMo-RL's and TransferQueue's own tests on the module `transfer_queue`, by a real server.

TransferQueue's come with its wheels. Those of verl and NeMo-RL are in their repositories alone:
`BREADBOX_SNAPSHOTS` names a folder with bare copies OWNER+NAME/repo, and without it they are left
out. Nothing of theirs is patched; what their tests import besides is a stand-in, or an empty shell.
"""

import ast
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from types import FunctionType

import pytest

import breadbox_adapters
from breadbox.testing import ServerProcess, start_server
from peers.packages import environment, install, require

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

require("tensordict", "transfer-queue")

from breadbox_adapters import transfer_queue as ours  # noqa: E402

OURS = Path(breadbox_adapters.__file__).parent / "transfer_queue" / "path"
STAND_INS = Path(__file__).parent / "transfer_queue" / "stand_ins"
SNAPSHOTS = "BREADBOX_SNAPSHOTS"
KILLED_EVERY_S = 2.0
RUN_LIMIT_S = 400.0

SKIPS = """
class SkipManager:
    @staticmethod
    def annotate_tq(**_):
        return lambda function: function
"""
TOKENIZERS = """
class PreTrainedTokenizerBase: ...
"""
METADATA = """Metadata-Version: 2.1
Name: nemo-rl
Version: 0.0.0
Requires-Dist: TransferQueue==0.1.11
"""


@contextmanager
def killed_every_2_s(server: ServerProcess) -> Iterator[None]:
    """Kill the server with SIGKILL and start it again, over and over, until the block is left."""
    is_over = threading.Event()
    problems: list[BaseException] = []

    def kill() -> None:
        try:
            while not is_over.wait(KILLED_EVERY_S):
                server.restart()
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        is_over.set()
        killer.join()
    assert [] == problems


@pytest.fixture(params=["running", "killed"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[ServerProcess, Callable[[], bool]]]:
    with start_server() as made:
        yield made, lambda: request.param == "killed"


def whole(server: tuple[ServerProcess, Callable[[], bool]]) -> AbstractContextManager[None]:
    return killed_every_2_s(server[0]) if server[1]() else nullcontext()


def outcomes(
    folder: Path, server: ServerProcess, paths: list[Path], tests: list[Path]
) -> list[int]:
    """Run tests in a process of their own; return how many passed, failed and were left out."""
    (folder / "cwd").mkdir(exist_ok=True)
    report = folder / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-o", "asyncio_mode=auto", "--timeout", "120", f"--rootdir={folder / 'cwd'}"),
            *("--junit-xml", str(report), *map(str, tests)),
        ],
        cwd=folder / "cwd",
        env=environment(*paths, OURS, *map(Path, filter(None, sys.path)))
        | {"BREADBOX_SERVER": server.address},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot()[0]
    total, skipped, *bad = (
        int(suite.attrib[n]) for n in ("tests", "skipped", "failures", "errors")
    )
    sys.stdout.write(done.stdout[-20_000:])  # pytest shows it where the caller's claim fails.
    return [total - skipped - sum(bad), sum(bad), skipped]


@pytest.fixture(scope="session")
def omegaconf(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("omegaconf")
    return [install(each, folder) for each in ("omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3")]


def unpack(repository: str, folder: Path, *paths: str) -> None:
    """Unpack files of the newest commit of a repository's copy."""
    snapshots = os.environ.get(SNAPSHOTS)
    if not snapshots:
        pytest.skip(
            f"{repository}'s tests are in no package: {SNAPSHOTS} names no folder of copies"
        )
    git = Path(snapshots) / repository.replace("/", "+") / "repo"
    archive = subprocess.run(
        ["git", f"--git-dir={git}", "archive", "HEAD", *paths], check=True, capture_output=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_verls_replay_buffer(
    tmp_path: Path, omegaconf: list[Path], server: tuple[ServerProcess, Callable[[], bool]]
) -> None:
    rooms = ("verl", "verl/trainer", "verl/trainer/ppo", "verl/trainer/ppo/v1", "verl/utils")
    buffer = "verl/trainer/ppo/v1/replay_buffer.py"
    tests = "tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py"
    unpack("verl-project/verl", tmp_path / "verl", buffer, tests)
    write(tmp_path / "verl", {f"{room}/__init__.py": "" for room in rooms})
    write(tmp_path / "verl", {"verl/utils/skip/__init__.py": SKIPS})
    with whole(server):
        found = outcomes(
            tmp_path, server[0], [tmp_path / "verl", *omegaconf], [tmp_path / "verl" / tests]
        )
    assert [45, 0, 0] == found


def test_nemo_rls_data_plane(
    tmp_path: Path, omegaconf: list[Path], server: tuple[ServerProcess, Callable[[], bool]]
) -> None:
    """Left out are those of another storage, which is not installed."""
    nemo, beside = tmp_path / "nemo", tmp_path / "beside"
    unpack("NVIDIA-NeMo/RL", nemo, "nemo_rl", "tests/unit/data_plane", "pyproject.toml")
    shells = ("nemo_rl/algorithms", "nemo_rl/algorithms/async_utils", "tests", "tests/unit")
    write(nemo, {f"{shell}/__init__.py": "" for shell in shells})
    write(
        beside,
        {
            "nemo_rl-0.0.0.dist-info/METADATA": METADATA,
            "datasets/__init__.py": "class Dataset: ...\n",
            "requests/__init__.py": "",
            "transformers/__init__.py": TOKENIZERS,
            "transformers/tokenization_utils_base.py": TOKENIZERS,
            "transformers/audio_utils.py": "load_audio = None\n",
            "transformers/video_utils.py": "load_video = None\n",
        },
    )
    tests = [
        nemo / "tests" / "unit" / "data_plane" / name
        for name in ("test_tq_lifecycle.py", "test_seqpack_equivalence.py")
    ]
    with whole(server):
        found = outcomes(tmp_path, server[0], [STAND_INS, beside, nemo, *omegaconf], tests)
    assert [10, 0, 7] == found


@pytest.mark.parametrize(("version", "count"), [("0.1.7", 50), ("0.1.11", 56)])
def test_transfer_queues_own_functions(
    tmp_path: Path,
    omegaconf: list[Path],
    server: tuple[ServerProcess, Callable[[], bool]],
    version: str,
    count: int,
) -> None:
    """Those of its wheel that call the functions and look into the controller."""
    wheel = install(f"TransferQueue=={version}", tmp_path / "wheel")
    # Beside the package they would import it.
    tests = tmp_path / "test_theirs.py"
    tests.write_text((wheel / "tests" / "e2e" / "test_kv_interface_e2e.py").read_text())
    with whole(server):
        found = outcomes(tmp_path, server[0], [STAND_INS, *omegaconf], [tests])
    assert [count, 0, 0] == found


def signatures_of(wheel: Path) -> dict[str, list[tuple[str, str | None]]]:
    """Arguments and defaults of what a wheel defines, read without importing it."""
    found = {}
    for module in ("interface", "client", "metadata"):
        for node in ast.parse((wheel / "transfer_queue" / f"{module}.py").read_text()).body:
            prefix, inner = "", [node]
            if isinstance(node, ast.ClassDef):
                prefix, inner = f"{node.name.removeprefix('Async')}.", node.body
            for each in inner:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found[prefix + each.name] = arguments_of(each.args)
    return found


def arguments_of(them: ast.arguments) -> list[tuple[str, str | None]]:
    places = [*them.posonlyargs, *them.args]
    defaults = [*[None] * (len(places) - len(them.defaults)), *them.defaults]
    pairs = [
        *zip(places, defaults, strict=True),
        *zip(them.kwonlyargs, them.kw_defaults, strict=True),
    ]
    said = [
        (each.arg, None if default is None else ast.unparse(default)) for each, default in pairs
    ]
    # Their decorator gives it; no caller does.
    return [each for each in said if each[0] != "socket"]


def signature_of(function: Callable[..., object]) -> list[tuple[str, str | None]]:
    return [
        (each.name, None if each.default is each.empty else repr(each.default))
        for each in signature(function).parameters.values()
    ]


@pytest.mark.parametrize("version", ["0.1.7", "0.1.11"])
def test_signatures_are_those_of_the_wheel(tmp_path: Path, version: str) -> None:
    theirs = signatures_of(install(f"TransferQueue=={version}", tmp_path))
    mine = {name: getattr(ours, name) for name in ours.__all__}
    for kind in [each for each in mine.values() if isinstance(each, type)]:
        methods = {
            name: each for name, each in vars(kind).items() if isinstance(each, FunctionType)
        }
        mine |= {f"{kind.__name__}.{name}": each for name, each in methods.items()}
    shared = {
        name: signature_of(each)
        for name, each in mine.items()
        if name in theirs and name != "TransferQueueClient.__init__"
    }
    assert {name: theirs[name] for name in shared} == shared
    new = {"save_checkpoint", "load_checkpoint"} if version == "0.1.7" else set()
    functions = {name for name in ours.__all__ if name[0].islower()}
    assert functions - new == functions & {*shared}
    assert 12 <= len({name for name in shared if "." in name})
