"""Who is measured: where it comes from, and its process once it runs."""

import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from bench.peers.side import Order, Side
from bench.processes import cpu_s

_ROOT = Path(__file__).parents[2]
_INSTALL_S_MAX = 1800.0
_IMPORT_S_MAX = 120.0
_START_S_MAX = 300.0


@dataclass(frozen=True)
class Contender:
    """Somebody who does what `rows` says."""

    name: str
    module: str
    distribution: str
    """Whose version is told."""
    requirement: str = ""
    """What pip installs into an environment of its own; nothing: it runs in this one."""
    imports: str = ""
    streams: bool = False
    """Whether its callers are `Streaming`."""

    def python(self, out: Path) -> Path:
        """The interpreter that runs it."""
        return out / f"peer-{self.distribution}" / "bin" / "python" if self.requirement else _HERE


_HERE = Path(sys.executable)
OURS = Contender("Breadbox", "bench.peers.breadbox", "breadbox", imports="breadbox", streams=True)
"""On its default store, shared memory."""
OURS_ON_REDIS = replace(OURS, name="Breadbox on Redis", module="bench.peers.breadbox_redis")
REVERB = Contender(
    "Reverb", "bench.peers.reverb", "dm-reverb", "dm-reverb[tensorflow]", "reverb", streams=True
)
BARE = Contender("bare socket", "bench.peers.bare", "numpy", imports="numpy")
CONTENDERS = (
    OURS,
    OURS_ON_REDIS,
    REVERB,
    Contender(
        "TransferQueue",
        "bench.peers.transferqueue",
        "TransferQueue",
        "TransferQueue",
        "transfer_queue",
    ),
    Contender("redis-py with pickle", "bench.peers.pickled", "redis", imports="redis"),
    BARE,
)


Role = Literal["caller", "server", "Redis"]
"""Role of a process in what a row needs."""
ROLES: tuple[Role, ...] = get_args(Role)


class NoContestError(Exception):
    """Somebody cannot be measured; says why."""


def installed(contender: Contender, out: Path) -> str:
    """Install it where it is not; its version.

    Raises:
        NoContestError: It cannot be installed, or not imported.
    """
    python = contender.python(out)
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    try:
        return _version(contender, python)
    except NoContestError:
        if not contender.requirement:
            raise
    command = [str(python), "-m", "pip", "install", "--quiet", contender.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S_MAX)
    except subprocess.TimeoutExpired:
        raise NoContestError(f"pip took longer than {_INSTALL_S_MAX:.0f} s") from None
    if done.returncode:
        raise NoContestError(f"pip: {_last_line(done.stderr)}")
    return _version(contender, python)


def _version(contender: Contender, python: Path) -> str:
    script = (
        f"import importlib.metadata, {contender.imports}\n"
        f"print(importlib.metadata.version({contender.distribution!r}))"
    )
    try:
        done = subprocess.run(
            [python, "-c", script], capture_output=True, text=True, timeout=_IMPORT_S_MAX
        )
    except subprocess.TimeoutExpired:
        raise NoContestError(f"importing it took longer than {_IMPORT_S_MAX:.0f} s") from None
    if done.returncode:
        raise NoContestError(_last_line(done.stderr))
    return done.stdout.strip().splitlines()[-1]


class Running:
    """A contender's process, with all that it started."""

    def __init__(self, contender: Contender, out: Path) -> None:
        """Start it.

        Raises:
            NoContestError: It does not start.
        """
        self.name = contender.name
        self._streams = contender.streams
        self._roles: dict[int, Role] = {}
        self._ended = ""
        self._log = out / f"{contender.module.rpartition('.')[2]}.log"
        with self._log.open("w") as log:
            self._side = Side(
                [str(contender.python(out)), "-m", contender.module], cwd=str(_ROOT), stderr=log
            )
        try:
            self._within(_START_S_MAX, self._side.hear)
        except NoContestError as error:
            raise NoContestError(f"it did not start: {error}") from None

    def ask(self, order: Order, limit_s: float) -> Any:
        """Have it do something; its answer.

        Raises:
            NoContestError: It ended, now or before, or took longer than `limit_s` and was ended.
        """
        if self._ended:
            raise NoContestError(self._ended)
        if order.kind in ("stream", "streams") and not self._streams:
            raise NoContestError("it has no such writer")

        def ask() -> Any:
            self._side.tell(order)
            return self._side.hear()

        return self._within(limit_s, ask)

    def cpu_s(self) -> dict[tuple[Role, int], float]:
        """Seconds of processor time so far, by role and process."""
        used = {}
        for process in self._family():
            try:
                used[self._role(process), process.pid] = cpu_s(process.pid)
            except (psutil.NoSuchProcess, OSError):
                continue
        return used

    def _role(self, process: psutil.Process) -> Role:
        if process.pid not in self._roles:
            is_caller = process.pid == self._side.pid or "crowd" in process.cmdline()
            is_redis = process.name() in ("redis-server", "valkey-server")
            self._roles[process.pid] = "caller" if is_caller else "Redis" if is_redis else "server"
        return self._roles[process.pid]

    def close(self) -> None:
        """End it, and what it started."""
        family = self._family()
        self._side.close()
        _kill(family)

    def _within(self, limit_s: float, act: Callable[[], Any]) -> Any:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _kill(self._family())

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            return act()
        except (RuntimeError, BrokenPipeError) as error:
            timer.cancel()
            self.close()
            self._ended = (
                f"took longer than {limit_s:.0f} s"
                if is_late.is_set()
                else f"{error}: {_last_line(self._log.read_text())}"
            )
            raise NoContestError(self._ended) from None
        finally:
            timer.cancel()

    def _family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._side.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _kill(family: Sequence[psutil.Process]) -> None:
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it gave no reason"
