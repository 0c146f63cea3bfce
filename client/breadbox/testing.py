"""For tests of code that uses Breadbox: a real server in a process of its own, gone when done.

```python
with breadbox.testing.start_server() as server, breadbox.connect(server.address) as client:
    client.start_session("run-1")
```

Needs the extra `breadbox[server]`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from breadbox.errors import UnavailableError

_POLL_S = 0.01
_LOG_LINES = 15


class ServerProcess:
    """A server process that can be killed and started again at the same address.

    Not thread-safe. Its output is in `log_file`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        start_limit_s: float,
    ) -> None:
        """Use `start_server` instead."""
        self._arguments = list(arguments)
        self._environment = dict(environment)
        self._ready_file = folder / "ready"
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self.log_file = folder / "server.log"
        """Where the output of all starts goes."""
        self.address = ""
        """HOST:PORT once started; the same after a restart."""

    @property
    def process_id(self) -> int | None:
        """Of the running server; None when there is none."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start, and wait until it answers. The first start chooses the port.

        Raises:
            UnavailableError: It ended at once, or was not ready in time; has the end of its log.
        """
        self._ready_file.unlink(missing_ok=True)
        listen = self.address or "127.0.0.1:0"
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "breadbox.cli.main", "serve", "--listen", listen),
                    *("--ready-file", str(self._ready_file), *self._arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the parent alone.
            )
        self.address = self._await_ready(self._process)

    def _await_ready(self, process: subprocess.Popen[bytes]) -> str:
        give_up_at = time.monotonic() + self._start_limit_s
        while time.monotonic() < give_up_at:
            with suppress(FileNotFoundError):
                if address := self._ready_file.read_text().strip():
                    return address
            if process.poll() is not None:
                raise UnavailableError(
                    f"the server ended with exit status {process.returncode}: {self.log_tail()}"
                )
            time.sleep(_POLL_S)
        self.kill()
        raise UnavailableError(
            f"the server was not ready within {self._start_limit_s:.0f} s: {self.log_tail()}"
        )

    def log_tail(self) -> str:
        """The last lines of its output."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def kill(self) -> None:
        """Kill it with SIGKILL, as a crash would, and wait until it is gone."""
        self._signal(signal.SIGKILL, grace_s=10.0)

    def stop(self, grace_s: float = 20.0) -> int:
        """Ask it to end with SIGTERM; kill it after `grace_s`. Returns its exit status."""
        return self._signal(signal.SIGTERM, grace_s)

    def restart(self) -> None:
        """Kill it, and start it again at the same address."""
        self.kill()
        self.start()

    def _signal(self, number: int, grace_s: float) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


@contextmanager
def start_server(
    *,
    store: str | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    start_limit_s: float = 60.0,
) -> Iterator[ServerProcess]:
    """Run `breadbox serve` on a free port of the loopback until the block is left.

    Args:
        store: URL of the payload store; None: a `file://` store in memory that goes with it.
        options: Further options of `breadbox serve`.
        environment: Variables to add. Those named BREADBOX_... of this process are not passed on.
        start_limit_s: Seconds in which it must be ready.

    Raises:
        UnavailableError: It could not be started; has the end of its log.
    """
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="breadbox-test-", dir=shared_memory))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    server = ServerProcess(
        [
            *("--store", store or f"file://{folder / 'store'}"),
            *("--metrics-listen", "127.0.0.1:0", *options),
        ],
        folder=folder,
        environment={**clean, **(environment or {})},
        start_limit_s=start_limit_s,
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
