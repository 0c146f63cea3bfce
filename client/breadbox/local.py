"""Run a private server in a child process, for notebooks, scripts and tests."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from breadbox.model.errors import UnavailableError
from breadbox.model.types import (
    AssemblyPolicy,
    FullPolicy,
    LeaseExpiryPolicy,
    SchemaPolicy,
    StalePolicy,
)
from breadbox.shared.child_processes import owned_environment
from breadbox.shared.extras import how_to_install, missing_module
from breadbox.shared.loopback import loopback_host

if TYPE_CHECKING:
    from breadbox.client import Client

POLL_S = 0.01
_LOG_LINES = 15
_START_LIMIT_S = 60.0
_STOP_GRACE_S = 20.0


class ServerOptions(TypedDict, total=False):
    """Options of `local_server`: `uses_max=4` is `--uses-max 4` of `breadbox serve`."""

    store: str
    journal: str
    metrics_listen: str
    preset: str
    fragments_per_chunk: int
    assembly: AssemblyPolicy | str
    group_min: int
    drop_equal: str
    stale: StalePolicy | str
    groups_per_version: int
    lead_versions: int
    required_parts: str
    capacity_chunks: int
    capacity_bytes: int | str
    staleness_max: int
    uses_max: int
    full_policy: FullPolicy | str
    lease_expiry_policy: LeaseExpiryPolicy | str
    lease_s: float
    open_chunk_s: float
    waiters_max: int
    leases_max: int
    workers_max: int
    sampler: str
    remover: str
    priority_exponent: float
    with_replacement: bool
    schema: SchemaPolicy | str
    minimum_chunks: int
    buffers_max: int
    connections_max: int
    unannounced_s: float
    poison_after: int
    piece_size: int | str
    inline_size_max: int | str
    drain_grace_s: float
    reflection: bool
    journal_sync: bool
    snapshot_entries: int
    seed: int
    gateway: bool
    gateway_unannounced: int | str
    log_level: str
    log_format: str


class ServerProcess:
    """A server process that can be killed and restarted at the same address. Not thread-safe."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        start_limit_s: float,
    ) -> None:
        self._arguments = list(arguments)
        self._environment = dict(environment)
        self._folder = folder
        self._ready_file = folder / "ready"
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self.log_file = folder / "server.log"
        """File with the output of all starts."""
        self.address = ""
        """HOST:PORT after the start; the same after a restart."""

    @property
    def process_id(self) -> int | None:
        """Id of the server's process, or None if none is running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server, and block until it answers. The first start chooses the port."""
        give_up_at = self.launch()
        while not self.is_ready(give_up_at):
            time.sleep(POLL_S)

    def launch(self) -> float:
        """Start the server without waiting; return the monotonic time by which it must be ready."""
        self._ready_file.unlink(missing_ok=True)
        listen = self.address or f"{loopback_host()}:0"
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    # -P: the working directory may have modules of the same names.
                    *(sys.executable, "-P", "-m", "breadbox.cli.main", "serve"),
                    *("--listen", listen, "--ready-file", str(self._ready_file)),
                    *self._arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=owned_environment(self._environment),
                start_new_session=True,  # Ctrl-C in the terminal is for the parent alone.
            )
        return time.monotonic() + self._start_limit_s

    def is_ready(self, give_up_at: float) -> bool:
        """Return True if the server answers; raise UnavailableError if it ended, or was late."""
        assert self._process is not None
        with suppress(FileNotFoundError):
            if address := self._ready_file.read_text().strip():
                self.address = address
                return True
        if self._process.poll() is not None:
            raise UnavailableError(
                f"the server ended with exit status {self._process.returncode}: {self.log_tail()}"
            )
        if time.monotonic() > give_up_at:
            self.kill()
            raise UnavailableError(
                f"the server was not ready within {self._start_limit_s:.0f} s: {self.log_tail()}"
            )
        return False

    def log_tail(self) -> str:
        """Return the last lines of the server's output."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def forget_files(self) -> None:
        """Delete the server's folder, with its log, because a killed process could not."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash, and wait until it is gone."""
        self._signal(signal.SIGKILL, grace_s=10.0)

    def stop(self, grace_s: float = _STOP_GRACE_S) -> int:
        """Stop the server with SIGTERM, kill it after `grace_s`, and return its exit status."""
        return self._signal(signal.SIGTERM, grace_s)

    def restart(self) -> None:
        """Kill the server, and start it again at the same address; blocks until it answers."""
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
    start_limit_s: float = _START_LIMIT_S,
) -> Iterator[ServerProcess]:
    """Run `breadbox serve` on a free port of the loopback until the block is left.

    Needs `breadbox[server]`. Blocks until the server answers. It ends with this process, even if
    that is killed.

    Args:
        store: URL of the payload store, or None for a `file://` store in memory that is deleted
            with the server.
        options: Further options of `breadbox serve`.
        environment: Variables to add. Variables BREADBOX_... of this process are not passed on.
        start_limit_s: Seconds in which the server must be ready.

    Raises:
        UnavailableError: The server did not start; has the end of its log.
        ModuleNotFoundError: The server is not installed; says what to install.
    """
    _check_installed("start_server")
    folder = Path(tempfile.mkdtemp(prefix="breadbox-test-", dir=memory_folder()))
    server = ServerProcess(
        [
            *("--store", store or f"file://{folder / 'store'}"),
            *("--metrics-listen", f"{loopback_host()}:0", *options),
        ],
        folder=folder,
        environment={**_clean_environment(), **(environment or {})},
        start_limit_s=start_limit_s,
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local_server(**options: Unpack[ServerOptions]) -> Iterator["Client"]:
    """Run a private server, and yield a client of it; both end when the block is left.

    ```python
    with breadbox.local_server(uses_max=4) as client:
        client.start_session("first-run")
    ```

    The server is a child process on a free port of this machine, `client.address`, so that other
    processes can connect to it too. Its payloads are in memory if the system offers it. They are
    deleted with the server, even if this process is killed. Starting blocks for about a second;
    stopping blocks for at most `drain_grace_s` (5 s) while other clients' calls are in progress.

    Args:
        **options: Options of `breadbox serve`, with underscores, see `ServerOptions`. With a
            `store`, payloads are written there instead, and stay.

    Raises:
        ModuleNotFoundError: The server is not installed; says what to install.
        UnavailableError: The server did not start; has the end of its log.
        TypeError: There is no such option.
    """
    from breadbox.client import connect

    with own_server(options) as server:
        server.start()
        server.forget_files()
        with connect(server.address) as client:
            yield client


@contextmanager
def own_server(options: ServerOptions) -> Iterator[ServerProcess]:
    """Create a server that leaves nothing behind, and stop it at the end; the caller starts it."""
    if unknown := options.keys() - ServerOptions.__annotations__.keys():
        raise TypeError(
            f"local_server has no option {min(unknown)!r}; "
            f"there are {', '.join(ServerOptions.__annotations__)}"
        )
    _check_installed("local_server")
    arguments = [argument for option in options.items() for argument in _as_arguments(*option)]
    with ExitStack() as left, _temporary_folder() as folder:
        if "store" not in options:
            # Ephemeral: if this process is killed, only the server can clear the memory.
            store = tempfile.mkdtemp(prefix="breadbox-local-", dir=memory_folder())
            left.callback(shutil.rmtree, store, ignore_errors=True)
            arguments += ["--store", f"file://{store}", "--ephemeral"]
        server = ServerProcess(
            arguments,
            folder=Path(folder),
            environment=_clean_environment(),
            start_limit_s=_START_LIMIT_S,
        )
        left.callback(server.stop)
        yield server


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="breadbox-local-", ignore_cleanup_errors=True)


def _as_arguments(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value.value if isinstance(value, Enum) else value)]


def memory_folder() -> str | None:
    """Return the folder for an embedded store: in memory if possible, or None for the default."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}


def _check_installed(caller: str) -> None:
    if name := missing_module("server"):
        raise ModuleNotFoundError(
            f"breadbox.{caller} needs the module {name!r}, which is not installed: "
            f"{how_to_install('server')}",
            name=name,
        )
