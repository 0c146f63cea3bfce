"""`breadbox serve` as a real process, started and ended by a test."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

END_S = 20.0
MEMORY_BYTES_MORE = 2**30
"""Address space that a server under attack has beyond what it maps when idle."""
_STANDBY = re.compile(r"breadbox: standing by on (?P<address>\S+)$")
_READY = re.compile(r"breadbox: serving on (?P<address>\S+) store=\S+( metrics=(?P<metrics>\S+))?")


def serve_command(*arguments: str, python: str | Path = sys.executable) -> list[str]:
    """The command line of a server, of the Breadbox that an interpreter has."""
    return [str(python), "-m", "breadbox.cli.main", "serve", *arguments]


def plain_environment() -> dict[str, str]:
    """This process's environment without settings of ours."""
    return {name: text for name, text in os.environ.items() if not name.startswith("BREADBOX_")}


def status_bytes(pid: int, name: str) -> int:
    """What the system says of a process's memory: `VmSize`, `VmRSS`, `VmHWM`, ..."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


class ServerProcess:
    """One server process. A context manager; `kill` and `start` again to test restarts.

    The port is chosen at the first start and kept, so that clients find a restarted server.
    `files_max` bounds the files that it may open, `memory_bytes_more` the address space that it may
    map once it serves, beyond what it has mapped by then. `python` may be changed between starts.
    """

    def __init__(
        self,
        *arguments: str,
        log: Path,
        listen: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
        files_max: int | None = None,
        memory_bytes_more: int | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self.python = python
        self._files_max = files_max
        self._memory_bytes_more = memory_bytes_more
        self.arguments: Sequence[str] = arguments
        self.log = log
        self.address = listen
        self.metrics_url = ""
        self.ready_line = ""
        self._environment = plain_environment() | dict(environment or {})
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def probe_address(self) -> str:
        """Where it answers without certificates: its local socket, if it has one."""
        if "--local-socket" in self.arguments:
            return f"unix:{self.arguments[self.arguments.index('--local-socket') + 1]}"
        return self.address

    def start(self, within_s: float | None = None) -> None:
        """Start, and return once it says that it serves.

        Args:
            within_s: Seconds it may take to serve, or to end; None: for ever.

        Raises:
            AssertionError: It ended; says what its log holds.
            TimeoutError: It did neither, and was killed.
        """
        self._spawn()
        self.wait_serving(within_s)

    def start_standby(self, within_s: float = END_S) -> None:
        """Start it with `--standby`, and return once it says that it stands by; see `start`."""
        self._spawn()
        line = self._read_line(within_s)
        match = _STANDBY.match(line.strip())
        if match is None:
            self._give_up()
        else:
            self.address = match["address"]

    def wait_serving(self, within_s: float | None = None) -> None:
        """Return once it says that it serves; see `start`."""
        self.ready_line = self._read_line(within_s)
        if _STANDBY.match(self.ready_line.strip()):
            self.ready_line = self._read_line(within_s)
        match = _READY.match(self.ready_line)
        if match is None:
            self._give_up()
            return
        self.address = match["address"]
        self.metrics_url = match["metrics"] or ""
        if self._memory_bytes_more is not None:
            bound = status_bytes(self.pid, "VmSize") + self._memory_bytes_more
            resource.prlimit(self.pid, resource.RLIMIT_AS, (bound, bound))

    def _spawn(self) -> None:
        assert self._process is None
        listen = ("--listen", self.address)
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*self._bounds(), *serve_command(*listen, *self.arguments, python=self.python)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
            )

    def _read_line(self, within_s: float | None) -> str:
        """The next line that it says; empty: it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        timer = threading.Timer(within_s or 0.0, self._process.kill)
        if within_s is not None:
            timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if timer.finished.is_set() and not line and within_s is not None:
            is_late = self._process.wait(timeout=END_S) == -signal.SIGKILL
            if is_late:
                self._reap()
                raise TimeoutError(f"the server neither served nor ended within {within_s} s")
        return line

    def _give_up(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._reap()
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def _bounds(self) -> list[str]:
        """What bounds the files of the command that follows.

        Not Python code between fork and exec: there gRPC polls in threads of its own, and ends the
        process when its files are closed under them.
        """
        if self._files_max is None:
            return []
        return ["sh", "-c", f'ulimit -n {self._files_max} && exec "$@"', "sh"]

    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def poll(self) -> int | None:
        """The exit status of one that has ended by itself; None: it runs, or was ended."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal; nothing if it has ended by itself."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, end_s: float = END_S) -> int:
        """Wait for its end, at most so long; gives the exit status."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=end_s)
        finally:
            self._process.kill()
            self._reap()

    def stop(self) -> int:
        """Ask it to end, and wait; gives the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill it as a crash would, and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """Kill it if it runs, and let go of it also if it has ended by itself. Idempotent."""
        if self._process is not None:
            self.kill()

    def _reap(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        with process.stdout:
            process.wait(timeout=END_S)

    def __enter__(self) -> "ServerProcess":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
