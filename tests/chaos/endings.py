"""Ends servers under load, again and again: every one must end by itself, in time, and say why.

    python tests/chaos/endings.py --rounds 500
    python tests/chaos/endings.py --rounds 20 --kind fenced-off

`sigterm` asks a server to end while producers and a learner are at work; `fenced-off` starts a
second server on the same journal, after which the first one must stop. Clients and stores are real.
The last line sums up; exit code 0 means that all ended as they should.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import grpc  # noqa: E402 - the tests' own packages are found only now

from breadbox.model.errors import StoreError  # noqa: E402
from breadbox.stores import open_store  # noqa: E402
from breadbox.v1 import fragment_pb2  # noqa: E402
from breadbox.v1 import replay_buffer_service_pb2 as pb  # noqa: E402
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub  # noqa: E402
from breadbox_server.maintenance.probe import probe  # noqa: E402
from support.eventually import eventually_sync  # noqa: E402
from support.redis_server import RedisServer  # noqa: E402
from support.server_process import ServerProcess  # noqa: E402

KINDS = ("sigterm", "fenced-off")
GRACES_S = (0.0, 1.0)
"""Without any, calls are cut short while they wait for the store."""
END_S_MAX = 15.0
"""Grace, the flush of deletions, and room for a busy machine; one that hangs never ends."""
NOTICE_S_MAX = 5.0
"""Until a server that was replaced no longer says that it serves."""
PRODUCERS = 4
BATCH = 256
CALL_S = 10.0
STATUSES = {"sigterm": 0, "fenced-off": 2}


@dataclass
class Tally:
    """What the rounds came to."""

    rounds: int = 0
    appended: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def summary(self) -> str:
        """One line."""
        return (
            f"rounds {self.rounds}, appended {self.appended}, exit codes {dict(self.statuses)}, "
            f"longest end {self.longest_s:.1f} s, problems {len(self.problems)}"
        )


class Load:
    """Producers that append all they can, and a learner that consumes. A context manager."""

    def __init__(self, address: str, store_url: str) -> None:
        self._address = address
        self._store_url = store_url
        self._stop = threading.Event()
        self._under_way = threading.Event()
        self.appended = 0
        self.failures: list[BaseException] = []
        self._threads = [
            *(
                threading.Thread(target=self._run, args=(self._produce, k))
                for k in range(PRODUCERS)
            ),
            threading.Thread(target=self._run, args=(self._consume, PRODUCERS)),
        ]

    def wait_until_under_way(self) -> None:
        """Return once fragments have been admitted."""
        assert self._under_way.wait(CALL_S), "no fragment was admitted"

    def _run(self, work: Callable[[ReplayBufferServiceStub, int], None], number: int) -> None:
        try:
            with grpc.insecure_channel(self._address) as channel:
                work(ReplayBufferServiceStub(channel), number)
        except (grpc.RpcError, StoreError):
            return  # The server has ended, or is about to.
        except BaseException as error:  # noqa: BLE001 - raised by `__exit__` in the other thread
            self.failures.append(error)

    def _produce(self, stub: ReplayBufferServiceStub, number: int) -> None:
        store = open_store(self._store_url)
        try:
            index = 0
            while not self._stop.is_set():
                payloads = store.write_many([[memoryview(b"x" * 300)]] * BATCH)
                fragments = [
                    fragment_pb2.FragmentMetadata(
                        worker_id=f"w{number}",
                        fragment_index=index + position,
                        session_id="run",
                        step_count=4,
                        payload=fragment_pb2.PayloadReference(
                            payload_id=payload.payload_id,
                            size_bytes=payload.size_bytes,
                            piece_size_bytes=payload.piece_size_bytes,
                        ),
                    )
                    for position, payload in enumerate(payloads)
                ]
                stub.AppendFragments(pb.AppendFragmentsRequest(fragments=fragments), timeout=CALL_S)
                index += BATCH
                self.appended += BATCH
                self._under_way.set()
        finally:
            store.close()

    def _consume(self, stub: ReplayBufferServiceStub, number: int) -> None:
        del number
        for turn in range(10**9):
            if self._stop.is_set():
                return
            granted = stub.FetchFragments(
                pb.FetchFragmentsRequest(request_id=f"r{turn}", fragment_count=BATCH),
                timeout=CALL_S,
            )
            if granted.grant.lease.lease_id:
                stub.ReleaseLease(
                    pb.ReleaseLeaseRequest(
                        lease_id=granted.grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
                    ),
                    timeout=CALL_S,
                )

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert [] == self.failures


class Endings:
    """Rounds of one kind, on one Redis."""

    def __init__(self, kind: str, redis: RedisServer, folder: Path, seed: int) -> None:
        self._kind = kind
        self._redis = redis
        self._folder = folder
        self._rng = random.Random(seed)
        self.tally = Tally()

    def run(self, rounds: int) -> Tally:
        """Play them."""
        for _ in range(rounds):
            self._play()
            if self.tally.rounds % 25 == 0:
                sys.stderr.write(self.tally.summary() + "\n")
        return self.tally

    def _server(self, name: str, *arguments: str) -> ServerProcess:
        return ServerProcess(
            *("--store", self._redis.url, "--capacity-chunks", "2000"),
            *("--drain-grace-s", str(self._rng.choice(GRACES_S)), "--snapshot-entries", "2000"),
            *(["--take-over"] if name == "successor" else []),
            log=self._folder / f"{name}.log",
        )

    def _play(self) -> None:
        with self._redis.client() as client:
            client.flushall()
        self.tally.rounds += 1
        for log in self._folder.glob("*.log"):
            log.unlink()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._server("server"))
            with grpc.insecure_channel(server.address) as channel:
                stub = ReplayBufferServiceStub(channel)
                stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
            with Load(server.address, self._redis.url) as load:
                load.wait_until_under_way()
                time.sleep(self._rng.uniform(0.0, 0.3))
                if self._kind == "sigterm":
                    began_at = time.monotonic()
                    server.signal(15)
                else:
                    stack.enter_context(self._server("successor", "--take-over"))
                    began_at = time.monotonic()
                    self._see_that_it_notices(server.address)
                self._see_the_end(server, began_at)
            self.tally.appended += load.appended

    def _see_that_it_notices(self, address: str) -> None:
        def is_noticed() -> bool:
            try:
                return probe(address)[0] != "SERVING"
            except grpc.RpcError:
                return True

        try:
            eventually_sync(is_noticed, "its replacement being noticed", within_s=NOTICE_S_MAX)
        except AssertionError as late:
            self._tell(f"says SERVING: {late}")

    def _see_the_end(self, server: ServerProcess, began_at: float) -> None:
        try:
            status = server.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._tell(f"has not ended after {END_S_MAX} s")
            return
        self.tally.statuses[status] += 1
        self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - began_at)
        text = server.log.read_text()
        if status != STATUSES[self._kind]:
            self._tell(f"ended with exit code {status}")
        elif "Traceback" in text:
            self._tell("ended with a traceback")
        elif self._kind == "fenced-off" and "another server" not in text:
            self._tell("does not say that it was replaced")

    def _tell(self, problem: str) -> None:
        kept = self._folder / f"round-{self.tally.rounds}"
        kept.mkdir(exist_ok=True)
        for log in self._folder.glob("*.log"):
            (kept / log.name).write_bytes(log.read_bytes())
        self.tally.problems.append(f"round {self.tally.rounds}: {problem}; logs in {kept}")


def run_endings(kind: str, rounds: int, folder: Path, seed: int) -> Tally:
    """Play rounds of one kind on a Redis of their own."""
    with RedisServer() as redis:
        return Endings(kind, redis, folder, seed).run(rounds)


def main() -> int:
    """Play the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="servers to end of each kind")
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="endings-"))
    problems = 0
    for kind in KINDS if options.kind == "all" else (options.kind,):
        (folder / kind).mkdir()
        tally = run_endings(kind, options.rounds, folder / kind, options.seed)
        problems += len(tally.problems)
        for problem in tally.problems:
            sys.stdout.write(f"{problem}\n")
        sys.stdout.write(f"{kind}, seed {options.seed}: {tally.summary()}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
