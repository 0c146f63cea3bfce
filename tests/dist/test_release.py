"""Goal: what HEAD has can be released today, installed by anyone, and run on what ran before.

Method: a release is made of a clone, by the commands of CONTRIBUTING.md, up to its tag. Its
distributions go into a package index on loopback, with all that they depend on and nothing else.
Every Python on the path installs it from there. What the commit before wrote into both kinds of
store is read by the release, and by the commit before once more.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from support.composition import missing_engine
from support.redis_server import RedisServer
from support.server_process import ServerProcess, plain_environment

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(sys.prefix)
UPGRADED_FROM = os.environ.get("BREADBOX_UPGRADED_FROM", "HEAD^")
"""The commit whose server wrote the data that the release takes over."""

WRITE = """
import sys
import numpy as np
import breadbox

address, worker, first, end = *sys.argv[1:3], *map(int, sys.argv[3:])
flags = np.zeros(4, np.bool_)
with breadbox.connect(address) as client:
    client.start_session("run")
    version = client.get_buffer().model_version
    client.create_subscription("reader")
    for index in range(first, end):
        sent = np.full((4, 1000), index, np.float32)
        client.append(breadbox.Fragment(
            worker_id=worker, fragment_index=index, session_id="run",
            model_version_min=version, model_version_max=version,
            obs=sent, action=np.zeros(4, np.int64), reward=np.ones(4, np.float32),
            terminated=flags, truncated=flags, first=flags, episode_id=np.zeros(4, np.int64),
            next_obs=sent[-1],
        ))
    client.publish("run", version + 1, {"weight": np.full(1000, version + 1, np.float32)})
"""
READ = """
import sys
import numpy as np
import breadbox

found = []
with breadbox.connect(sys.argv[1]) as client:
    for read in client.tail(max_wait_s=0.5, subscription="reader", is_acknowledging=False):
        for each in read.fragments:
            assert (each.obs == each.fragment_index).all(), each
            found.append(f"{each.worker_id}:{each.fragment_index}")
    state, weights = client.load_model()
    assert (weights["weight"] == state.model_version).all(), (state, weights)
print(state.session_id, state.model_version, *sorted(found))
"""

FORMATS = """
from breadbox.payload import FORMAT_VERSION
from breadbox_server.journal.encoding.codec import VERSION
print(FORMAT_VERSION, VERSION)
"""


class Release(NamedTuple):
    """A release that was made of a clone."""

    clone: Path
    version: str


def run_well(
    *command: str | Path, cwd: Path = ROOT, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    environment = {**plain_environment(), **variables}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def own_packages(clone: Path) -> dict[str, str]:
    """Variables with which Python takes the clone's packages, and not those of the checkout."""
    folders = {str(path.parents[1]) for path in clone.glob("*/breadbox*/__init__.py")}
    return {"PYTHONPATH": os.pathsep.join(sorted(folders))}


def make(clone: Path, *words: str) -> str:
    """Run a target of the clone's Makefile in the environment of these tests, as it stands."""
    ready = [word for name in (".ready", ".release") for word in ("-o", f"{ENVIRONMENT}/{name}")]
    return run_well(
        *("make", *ready, *words, f"VENV={ENVIRONMENT}"), cwd=clone, variables=own_packages(clone)
    )


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    clone = tmp_path_factory.mktemp("release") / "breadbox"
    run_well("git", "clone", "-q", ROOT, clone)
    text = (clone / "pyproject.toml").read_text()
    version = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)[0]
    if f"## [{version}]" in (clone / "CHANGELOG.md").read_text():
        major, minor, _ = version.split(".")
        version = f"{major}.{int(minor) + 1}.0"
    make(clone, "release", f"VERSION={version}")
    author = ("-c", "user.name=Rehearsal", "-c", "user.email=rehearsal@example.invalid")
    run_well("git", *author, "commit", "-q", "-a", "-m", f"release: {version}", cwd=clone)
    run_well("git", *author, "tag", "-a", f"v{version}", "-m", version, cwd=clone)
    return Release(clone, version)


@pytest.fixture(scope="module")
def wheels(release: Release) -> list[Path]:
    """Wheels of the tag, built and checked as the workflow builds them: compiled, and for all."""
    make(release.clone, "dist", f"ARGS=--commit v{release.version} --untried")
    built = (release.clone / "dist").glob("*.whl")
    return sorted(built, key=lambda wheel: wheel.stem.endswith("-any"))


def works(python: str) -> bool:
    """Whether a Python is on the path, and can make environments."""
    command = [python, "-c", "import ensurepip, venv"]
    return (
        bool(shutil.which(python))
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )


PYTHONS = [f"python3.{minor}" for minor in range(11, 15) if works(f"python3.{minor}")]


@pytest.fixture(scope="module")
def index(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that configure pip with the index alone."""
    folder = tmp_path_factory.mktemp("index")
    for python in PYTHONS:
        download = (python, "-m", "pip", "download", "-q", "--only-binary", ":all:")
        run_well(*download, "-d", folder, f"breadbox[server] @ {wheels[0].as_uri()}")
    for path in [*folder.glob("*.whl"), *wheels]:
        name = re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower()
        (folder / "simple" / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "simple" / name)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": "",
            "PIP_NO_CACHE_DIR": "1",
        }
        server.shutdown()
        thread.join()


def test_the_contract_of_a_release_is_frozen_and_nothing_else_of_it_was_forgotten(
    release: Release,
) -> None:
    make(release.clone, "released-protos")
    run_well("git", "diff", "--exit-code", f"v{release.version}", cwd=release.clone)
    tests = ("tests/deploy/test_versions.py", "tests/deploy/test_lock.py")
    run_well(
        *(sys.executable, "-m", "pytest", "-q", *tests), cwd=release.clone,
        variables=own_packages(release.clone),
    )  # fmt: skip
    (workflow,) = re.findall(
        r"run: \|\n((?: +grep .+\n)+)", (ROOT / ".github/workflows/release.yml").read_text()
    )
    run_well("bash", "-euc", workflow, cwd=release.clone, variables={"TAG": f"v{release.version}"})


def test_the_wheel_for_every_platform_installs_and_works(wheels: list[Path]) -> None:
    said = run_well(sys.executable, ROOT / "scripts/try_wheel.py", wheels[-1])
    assert wheels[-1].stem.endswith("-any")
    assert "and works" in said


@pytest.mark.parametrize("python", PYTHONS)
def test_a_release_installs_from_an_index_and_works(
    python: str, release: Release, index: dict[str, str]
) -> None:
    said = run_well(python, ROOT / "scripts/try_wheel.py", release.version, variables=index)
    assert "and works" in said


def test_the_site_is_built_of_the_tag(release: Release) -> None:
    make(release.clone, "docs")
    assert release.version in (release.clone / "build/docs/changelog.html").read_text()


@pytest.mark.containers
@pytest.mark.parametrize("image", ["server", "rollout_worker", "learner"])
def test_an_image_of_the_tag_has_the_version(release: Release, image: str) -> None:
    if problem := missing_engine():
        pytest.skip(problem)
    name = f"breadbox/{image.replace('_', '-')}:rehearsal"
    tag = f"v{release.version}"
    archive = release.clone.parent / f"{image}.tar"
    run_well("git", "archive", "-o", archive, tag, cwd=release.clone)
    with archive.open("rb") as context:
        command = ["docker", "build", "-q", "-f", f"{image}/Dockerfile", "-t", name, "-"]
        subprocess.run(command, stdin=context, check=True, stdout=subprocess.DEVNULL)
    try:
        said = run_well("docker", "run", "--rm", "--network", "none", name, "--version")
    finally:
        run_well("docker", "image", "rm", name)
    assert release.version in said


@pytest.fixture(scope="module")
def pythons(
    index: dict[str, str], release: Release, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Interpreters with the commit before, and with the release."""
    folder = tmp_path_factory.mktemp("upgrade")
    (folder / "source").mkdir()
    run_well("git", "archive", "-o", folder / "source.tar", UPGRADED_FROM)
    run_well("tar", "xf", "source.tar", "-C", "source", cwd=folder)
    wheel = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run_well(*wheel, "-w", folder, folder / "source", variables={"BREADBOX_COMPILE": "0"})
    (before,) = folder.glob("*.whl")
    sources = (f"breadbox[server] @ {before.as_uri()}", f"breadbox[server]=={release.version}")
    made = []
    for name, source in zip(("before", "release"), sources, strict=True):
        python = folder / name / "bin" / "python"
        run_well(sys.executable, "-m", "venv", "--without-pip", folder / name)
        install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", source)
        run_well(*install, variables=index)
        made.append(python)
    return made[0], made[1]


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_a_release_reads_what_the_commit_before_wrote_and_the_other_way_around(
    kind: str, pythons: tuple[Path, Path], tmp_path: Path
) -> None:
    before, release = pythons

    def write(python: Path, worker: str, first: int, end: int) -> None:
        run_well(python, "-c", WRITE, server.address, worker, str(first), str(end), cwd=tmp_path)

    def read(python: Path) -> list[str]:
        return run_well(python, "-c", READ, server.address, cwd=tmp_path).split()

    with RedisServer(is_durable=True) as redis:
        store = redis.url if kind == "redis" else f"file://{tmp_path / 'store'}"
        arguments = ("--store", store, "--preset", "off-policy")
        server = ServerProcess(*arguments, log=tmp_path / "server.log", python=before)
        with server:
            write(before, "a", 0, 3)
            first = ["run", "1", "a:0", "a:1", "a:2"]
            # Readers first, then the server, then producers: docs/upgrade.md.
            assert first == read(release)
            server.stop()
            server.python = release
            server.start()
            assert first == read(release) == read(before)
            write(before, "a", 3, 4)
            write(release, "b", 0, 2)
            last = ["run", "3", "a:0", "a:1", "a:2", "a:3", "b:0", "b:1"]
            assert last == read(release)
            server.kill()
            server.start()
            assert last == read(release)
            # Back again, unless the release writes a format that the commit before refuses.
            if run_well(before, "-c", FORMATS) == run_well(release, "-c", FORMATS):
                server.stop()
                server.python = before
                server.start()
                assert last == read(before)
