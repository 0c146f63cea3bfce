"""Run child processes that start together, are watched together, and end with their parent."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from breadbox.shared.child_processes import owned_environment


@dataclass(frozen=True, slots=True)
class ExitedProcess:
    """A child that ended, with the end of its log."""

    name: str
    return_code: int
    last_lines: tuple[str, ...]


class ProcessGroup:
    """Start `breadbox` commands and stop them in reverse; Ctrl-C reaches only the parent."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._children: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def start(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """Start `breadbox ARGUMENTS` with its output in `<log folder>/<name>.log`."""
        log = (self._log_folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=owned_environment(environment),
            start_new_session=True,
        )
        self._children[name] = (process, log)

    def return_code(self, name: str) -> int | None:
        """Return the exit status of a child, or None while it runs."""
        return self._children[name][0].poll()

    def exited(self) -> list[ExitedProcess]:
        """Return the children that have ended, in the order of their start."""
        return [
            ExitedProcess(name, process.returncode, self.last_lines(name))
            for name, (process, _) in self._children.items()
            if process.poll() is not None
        ]

    def last_lines(self, name: str, line_count: int = 12) -> tuple[str, ...]:
        """Return the end of a child's log."""
        text = (self._log_folder / f"{name}.log").read_text(errors="replace")
        return tuple(text.splitlines()[-line_count:])

    def stop(self, names: Sequence[str], grace_s: float) -> None:
        """Send the named children SIGTERM, wait at most `grace_s` for all, then kill the rest."""
        processes = [self._children[name][0] for name in names if name in self._children]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        give_up_at = time.monotonic() + grace_s
        for process in processes:
            try:
                process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Kill whatever still runs and close the logs. Idempotent."""
        self.stop(list(self._children), grace_s=0.0)
        for _, log in self._children.values():
            log.close()
        self._children.clear()
