"""A server under attack, and an honest pair beside it that tells whether it is any worse off.

    with ground(tmp_path) as it:
        it.attack(lambda: ..., within_s=5)

The server is a real process that may open so many files, and map so much memory more than it does
when idle. A producer and a learner, processes of their own, work from before the attack until after
it. Then must hold: both are alive and were answered in time, nothing that was acknowledged is lost
or delivered twice, the server's memory is back where it was, and it ends on SIGTERM within its
grace.

"In time" is p99 within half a call's deadline. How it compares with what it was before, and with
what it is meanwhile on another server of this machine that nobody attacks, is printed; it is
demanded, three times either or `P99_S_MIN`, where it is asked for (`make attacks`, on a machine
that does nothing else), since a time is no claim that can be tested beside other tests.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

import breadbox
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.access.authorization import Role
from breadbox_server.access.tokens import new_token
from chaos.ledger import read_ledgers
from support.eventually import eventually_sync
from support.server_process import (
    MEMORY_BYTES_MORE,
    ServerProcess,
    plain_environment,
    status_bytes,
)
from support.token_files import bearer, line_of, write_token_file

TESTS = Path(__file__).resolve().parents[1]
MIB = 2**20
FILES_MAX = 4096
ATTACK_S = 6.0
REST_S_MAX = 15.0
"""Seconds within which everything is as before, once the attack is over."""
P99_S_MAX = 5.0
P99_S_MIN = 0.15
IS_TIMED = bool(os.environ.get("BREADBOX_TIMED_ATTACKS"))
"""Whether p99 is compared, and not only printed."""
QUIET_S = 3.0 if IS_TIMED else 1.0
"""How long the pair is watched before: a p99 that is compared takes more calls."""
BUSY_FACTOR = 3.0
MEMORY_BYTES_KEPT_MAX = 64 * MIB
GRACE_S = 2.0
END_S_MAX = GRACE_S + 4.0
"""Seconds from SIGTERM to the end: the grace, what gRPC gets to cut off calls, and start-up of
nothing at all."""


@dataclass(frozen=True)
class Outcome:
    """What an attack came to."""

    quiet_p99_s: float
    elsewhere_p99_s: float
    """On the server that nobody attacks, during the attack."""
    attack_p99_s: float
    call_count: int
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    files_peak: int

    def __str__(self) -> str:
        return (
            f"p99 quiet {self.quiet_p99_s * 1e3:.1f} ms, elsewhere "
            f"{self.elsewhere_p99_s * 1e3:.1f} ms, under attack "
            f"{self.attack_p99_s * 1e3:.1f} ms of {self.call_count} calls; memory at start "
            f"{self.start_bytes / MIB:.0f} MiB, peak {self.peak_bytes / MIB:.0f}, "
            f"end {self.end_bytes / MIB:.0f}; files at most {self.files_peak}"
        )


class Ground:
    """A running server with its honest pair.

    Args:
        server: The process.
        elsewhere: Another, that nobody attacks.
        folder: Of the ledgers.
        tokens: By role; empty where nobody is asked for one.
    """

    def __init__(
        self,
        server: ServerProcess,
        elsewhere: ServerProcess,
        folder: Path,
        tokens: dict[Role, str],
    ) -> None:
        self.server = server
        self.tokens = tokens
        self._elsewhere = elsewhere
        self._folder = folder
        self._folder_elsewhere = folder / "elsewhere"
        self._folder_elsewhere.mkdir()
        self._pair: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """Where the server answers."""
        return self.server.address

    @property
    def store_url(self) -> str:
        """Of its payload store."""
        return f"file://{self._folder / 'store'}"

    def add_tokens(self, *lines: str) -> list[str]:
        """Let holders of fresh tokens in, one for each of the lines "ROLE NAME [KEY=VALUE ...]"."""
        tokens = [new_token() for _ in lines]
        with (self._folder / "tokens").open("a") as file:
            file.writelines(map(line_of, lines, tokens))
        # A client of its own: whoever asks again and again before is hung up on.
        with grpc.insecure_channel(self.address) as channel:
            ask = ReplayBufferServiceStub(channel).GetStoreConfig

            def is_known() -> bool:
                try:
                    ask(pb.GetStoreConfigRequest(), metadata=bearer(tokens[-1]), timeout=5)
                except grpc.RpcError:
                    return False
                return True

            eventually_sync(is_known, "the tokens being known")
        return tokens

    def read_metrics(self) -> str:
        """What the server tells Prometheus."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=20) as answer:
            return str(answer.read().decode())

    def attack(self, attack: Callable[[], object], *, factor: float = 0.0) -> Outcome:
        """Let the pair work, attack for as long as it takes, and see that nobody was harmed.

        Args:
            attack: What is done; at most `ATTACK_S`, by itself. What it holds open when it ends
                should be closed; an attack that wants to hold on uses the time.
            factor: How many times as long as usual the slowest calls may take, where that is known
                to be more than `BUSY_FACTOR`.
        """
        self._start("learner", Role.LEARNER)
        self._await_first_call("learner")  # Before that there is no session to append to.
        self._start("producer", Role.PRODUCER)
        self._start("onlooker", Role.ADMIN)
        for kind in self._pair:
            self._await_first_call(kind)
        self._await_calls()
        quiet_since = time.monotonic()
        time.sleep(QUIET_S)
        before = resident_bytes(self.server.pid)
        began = time.monotonic()
        with _Watched(self.server.pid) as watched:
            attack()
            # An attack that was over early still meets calls of the pair.
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
        ended = time.monotonic()
        outcome = Outcome(
            _p99_s(self._times_s(quiet_since, began)),
            _p99_s(self._times_s(began, ended, self._folder_elsewhere)),
            _p99_s(self._times_s(began, ended)),
            len(self._times_s(began, ended)),
            *(before, watched.peak_bytes),
            self._rested_bytes(before),
            watched.files_peak,
        )
        sys.stdout.write(f"{outcome}\n")
        usual_s = max(outcome.quiet_p99_s, outcome.elsewhere_p99_s)
        allowed_s = max(P99_S_MIN if IS_TIMED else P99_S_MAX, max(BUSY_FACTOR, factor) * usual_s)
        self._check_pair()
        self._check_ledgers()
        assert outcome.attack_p99_s <= allowed_s, str(outcome)
        assert outcome.end_bytes - before <= MEMORY_BYTES_KEPT_MAX, str(outcome)
        self.check_end()
        return outcome

    def check_end(self) -> None:
        """See that the server ends when it is told to."""
        began = time.monotonic()
        self.server.signal(signal.SIGTERM)
        assert 0 == self.server.wait(4 * END_S_MAX)
        assert time.monotonic() - began <= END_S_MAX, "it took its time to end"

    def end(self) -> None:
        """End what is left of the pair."""
        for process in self._pair.values():
            process.kill()
            process.wait()

    def _start(self, kind: str, role: Role) -> None:
        is_here = kind != "onlooker"
        environment = plain_environment() | {"PYTHONPATH": str(TESTS)}
        if self.tokens and is_here:
            environment["BREADBOX_TOKEN"] = self.tokens[role]
        server = self.server if is_here else self._elsewhere
        folder = self._folder if is_here else self._folder_elsewhere
        arguments = [*(kind, "--name", kind), *("--server", server.address)]
        self._pair[kind] = subprocess.Popen(
            [sys.executable, "-m", "hostile.honest", *arguments, "--folder", str(folder)],
            env=environment,
        )

    def _await_first_call(self, kind: str) -> None:
        folder = self._folder if kind != "onlooker" else self._folder_elsewhere
        eventually_sync(
            lambda: any(each["ledger"] == kind for each in read_ledgers(folder)),
            f"the first call of the {kind}",
            within_s=60,
        )

    def _await_calls(self) -> None:
        eventually_sync(lambda: len(self._lines("granted")) > 10, "deliveries", within_s=60)

    def _lines(self, kind: str, folder: Path | None = None) -> list[dict[str, Any]]:
        return [line for line in read_ledgers(folder or self._folder) if line["kind"] == kind]

    def _times_s(self, since: float, until: float, folder: Path | None = None) -> list[float]:
        """How long the pair's calls took, one that is not answered yet included."""
        folder = folder or self._folder
        calls = self._lines("call", folder)
        times_s = [
            line["took_s"] for line in calls if since <= line["at"] and line["since"] < until
        ]
        for path in folder.glob("*.ledger"):
            last = max(line["at"] for line in calls if line["ledger"] == path.stem)
            # Its calls come every few milliseconds: a silence is a call without an answer.
            if last < until:
                times_s.append(until - last)
        return times_s

    def _rested_bytes(self, before: int) -> int:
        """The server's memory once it is back where it was, or when it should have been."""
        give_up_at = time.monotonic() + REST_S_MAX
        while True:
            now = resident_bytes(self.server.pid)
            if now - before <= MEMORY_BYTES_KEPT_MAX or time.monotonic() > give_up_at:
                return now
            time.sleep(0.1)

    def _check_pair(self) -> None:
        """See that both are alive, and that whoever comes now is served."""
        assert [] == self._lines("failed")
        assert [] == [name for name, process in self._pair.items() if process.poll() is not None]
        token = self.tokens.get(Role.ADMIN)
        with breadbox.connect(self.address, token=token, reconnect_s=5) as newcomer:
            newcomer.get_buffer()

    def _check_ledgers(self) -> None:
        """See that what was acknowledged was delivered once, all of it."""
        producer, learner = self._pair["producer"], self._pair["learner"]
        producer.terminate()
        assert 0 == producer.wait(timeout=60)
        appended = Counter(
            line["index"] for line in self._lines("appended") if line["outcome"] != "stale"
        )
        with contextlib.suppress(AssertionError):
            eventually_sync(
                lambda: len(self._lines("granted")) >= len(appended), "all deliveries", within_s=30
            )
        learner.terminate()
        assert 0 == learner.wait(timeout=60)
        assert appended == Counter(line["index"] for line in self._lines("granted"))


class _Watched:
    """Notes the most memory and files that a process has."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peak_bytes = 0
        self.files_peak = 0

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            with contextlib.suppress(OSError):
                self.peak_bytes = max(self.peak_bytes, resident_bytes(self._pid))
                self.files_peak = max(self.files_peak, len(os.listdir(f"/proc/{self._pid}/fd")))

    def __enter__(self) -> "_Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def attacked_server(
    *arguments: str,
    log: Path,
    environment: dict[str, str] | None = None,
    files_max: int = FILES_MAX,
) -> ServerProcess:
    """A server that may use little more than it does when idle."""
    return ServerProcess(
        *arguments,
        log=log,
        environment=environment,
        files_max=files_max,
        memory_bytes_more=MEMORY_BYTES_MORE,
    )


@contextmanager
def ground(
    folder: Path, *arguments: str, has_tokens: bool = False, files_max: int = FILES_MAX
) -> Iterator[Ground]:
    """A server that may use little more than it does when idle; its pair begins with the attack.

    Args:
        folder: An empty one.
        arguments: More options of the server.
        has_tokens: Whether callers are asked for a token.
        files_max: Files that the server may have open.
    """
    tokens: dict[Role, str] = {}
    if has_tokens:
        tokens = write_token_file(folder / "tokens")
        arguments = (*arguments, "--tokens", str(folder / "tokens"))
    server = attacked_server(
        *("--store", f"file://{folder / 'store'}", "--full-policy", "block"),
        *("--drain-grace-s", str(GRACE_S), "--metrics-listen", "127.0.0.1:0"),
        *arguments,
        log=folder / "server.log",
        files_max=files_max,
    )
    elsewhere = ServerProcess(
        *("--store", f"file://{folder / 'store-elsewhere'}"), log=folder / "elsewhere.log"
    )
    with server, elsewhere:
        it = Ground(server, elsewhere, folder, tokens)
        try:
            yield it
        finally:
            it.end()


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use."""
    return status_bytes(pid, "VmRSS")


def _p99_s(times_s: list[float]) -> float:
    return sorted(times_s)[int(len(times_s) * 0.99)] if times_s else float("inf")
