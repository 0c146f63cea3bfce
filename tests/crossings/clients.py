"""The clients of a row, as processes that it starts, orders about and ends."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.eventually import eventually_sync
from support.server_process import plain_environment

TESTS = Path(__file__).resolve().parent.parent
STARTS_S = 60.0
"""For a process to start, on a busy machine."""
WORKS_S = 25.0
"""For what was ordered."""
END_S = 30.0
"""For whoever is told to end while nothing is in the way."""


class WrongError(Exception):
    """A row went wrong; says in which part of its life, and how."""


class Actor:
    """A client of a buffer, in a process of its own.

    Args:
        folder: Of its ledgers and logs.
        buffer: Its ledgers begin with this name.
        kind: As of `crossings.actors`.
        options: Of that command, beside those that are of one life of it.
        environment: Says where the server is, once there is one.
    """

    def __init__(
        self,
        folder: Path,
        buffer: str,
        kind: str,
        options: Mapping[str, object],
        environment: Callable[[], Mapping[str, str]],
    ) -> None:
        self._folder = folder
        self._buffer = buffer
        self.kind = kind
        self._options = [
            text for name, value in options.items() for text in (f"--{name}", str(value))
        ]
        self._environment = environment
        self._lives = 0
        self._ordered = 0
        self._told: list[dict[str, Any]] = []
        self._read_bytes = 0
        """Of its ledger, so far."""
        self._process: subprocess.Popen[str] | None = None

    @property
    def name(self) -> str:
        """Of this life of it."""
        return f"{self._buffer}.{self.kind}.{self._lives}"

    def start(self) -> None:
        """Start it, and do not wait until it is ready."""
        self._lives += 1
        self._ordered = self._read_bytes = 0
        self._told = []
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {**self._environment(), "PYTHONPATH": os.pathsep.join(paths)}
        with (self._folder / f"{self.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "crossings.actors", self.kind),
                    *("--name", self.name, "--buffer", self._buffer),
                    *("--life", str(self._lives), "--folder", str(self._folder)),
                    *self._options,
                ],
                env=plain_environment() | more,
                stdin=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_ready(self) -> None:
        """Return once it waits for orders."""
        self._wait(
            lambda: any(line["kind"] == "began" for line in self._lines()), "starting", STARTS_S
        )

    def order(self, do: str, **how: int) -> None:
        """Tell it what to do next, and do not wait."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._ordered += 1
        self._process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self._process.stdin.flush()

    def finish(self, within_s: float = WORKS_S) -> None:
        """Wait until it has done all that it was told."""
        self._wait(lambda: self.is_done, "doing what it was told", within_s)

    @property
    def is_done(self) -> bool:
        """Whether it has done all that it was told."""
        return len([line for line in self._lines() if line["kind"] == "done"]) >= self._ordered

    def _wait(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        def holds() -> bool:
            if condition():
                return True
            assert self._process is not None
            if (status := self._process.poll()) is not None:
                raise WrongError(f"{self.name} ended with {status} while {what}: {self._why()}")
            return False

        try:
            eventually_sync(holds, f"{self.name} {what}", within_s=within_s)
        except AssertionError as error:
            raise WrongError(f"{error}: {self._why()}") from None

    def _lines(self) -> list[dict[str, Any]]:
        """What it has written down; reads what is new, since it is asked very often."""
        with contextlib.suppress(FileNotFoundError), self._ledger.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # The rest is not written yet, and would be read as a line of its own.
                self._read_bytes += len(line)
                self._told.append(json.loads(line))
        return self._told

    @property
    def _ledger(self) -> Path:
        return self._folder / f"{self.name}.ledger"

    def _why(self) -> str:
        told = [line["what"] for line in self._lines() if line["kind"] == "wrong"]
        log = (self._folder / f"{self.name}.log").read_text(errors="replace")
        return told[-1] if told else log[-600:]

    def end(self) -> None:
        """Let it end in good order; it has to, soon."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.terminate()
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise WrongError(f"{self.name} did not end within {END_S} s") from None
        finally:
            self.kill()
        if status:
            raise WrongError(f"{self.name} ended with {status}: {self._why()}")

    def kill(self) -> None:
        """Kill it, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
