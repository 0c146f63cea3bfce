"""Kills everything that can be killed, at random, and then balances what everybody was told.

    python tests/chaos/run.py --seconds 900 --seed 7

The clients keep ledgers of everything acknowledged and everything received; the store is a real
Redis that syncs every write. The last line sums up; exit code 0 means that everything balances.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import breadbox  # noqa: E402 - the tests' own packages are found only now
from breadbox.errors import WaitElapsedError  # noqa: E402
from breadbox.types import (  # noqa: E402
    AdmissionOutcome,
    FragmentMetadata,
    PayloadReference,
    ReleaseMode,
)
from chaos.actors import FRAGMENTS_PER_CHUNK, SESSION  # noqa: E402
from chaos.ledger import read_ledgers  # noqa: E402
from support.eventually import eventually_sync  # noqa: E402
from support.redis_server import RedisServer  # noqa: E402
from support.server_process import ServerProcess, plain_environment  # noqa: E402

STALENESS_MAX = 3
USES_MAX = 2
LEASE_S = 3.0
UNANNOUNCED_S = 6.0
SETTLE_S = 120.0
SERVER_OPTIONS = (
    *("--fragments-per-chunk", str(FRAGMENTS_PER_CHUNK), "--capacity-chunks", "300"),
    *("--staleness-max", str(STALENESS_MAX), "--uses-max", str(USES_MAX)),
    *("--lease-s", str(LEASE_S), "--unannounced-s", str(UNANNOUNCED_S), "--open-chunk-s", "3"),
    *("--snapshot-entries", "400", "--drain-grace-s", "1"),
)


@dataclass
class Options:
    seconds: float
    seed: int
    kills_min: int
    empties_redis: bool
    folder: Path


@dataclass
class Tally:
    """What the run came to; every list names what is wrong."""

    kills: Counter = field(default_factory=Counter)
    appended: int = 0
    granted: int = 0
    lost: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.stale, *self.double, *self.leaked, *self.wrong]

    def summary(self) -> str:
        kills = " ".join(f"{name}={count}" for name, count in sorted(self.kills.items()))
        return (
            f"kills {sum(self.kills.values())} ({kills}), appended {self.appended}, "
            f"granted {self.granted}, lost {len(self.lost)}, stale {len(self.stale)}, "
            f"double {len(self.double)}, leaked {len(self.leaked)}, wrong {len(self.wrong)}"
        )


def _with_tests_on_path() -> dict[str, str]:
    """An environment in which the actors' own module is found."""
    environment = plain_environment()
    paths = [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


class Actor:
    """One client process, started again under a new name, or as the same rank, when killed."""

    def __init__(self, chaos: "Chaos", kind: str, name: str, **arguments: int) -> None:
        self.kind = kind
        self._chaos = chaos
        self._name = name
        self._arguments = arguments
        self._incarnation = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Of this incarnation."""
        return f"{self._name}.{self._incarnation}"

    def start(self) -> None:
        self._incarnation += 1
        arguments = dict(self._arguments)
        if self.kind == "rank":
            arguments["first"] = self._chaos.next_rank_number(self._name)
        extra = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        with (self._chaos.folder / f"{self.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "chaos.actors", self.kind, *extra),
                    *("--server", self._chaos.server.address, "--name", self.name),
                    *("--folder", str(self._chaos.folder)),
                    *("--seed", str(self._chaos.rng.getrandbits(32))),
                ],
                env=_with_tests_on_path(),
                stderr=log,
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=30)

    def stop(self) -> int:
        """Ask it to end, and wait."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=SETTLE_S)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


class Chaos:
    """The world: one Redis, one server, several clients, and somebody who kills them."""

    def __init__(self, options: Options, redis: RedisServer) -> None:
        self.options = options
        self.folder = options.folder
        self.rng = random.Random(options.seed)
        self.redis = redis
        self.tally = Tally()
        self.server = ServerProcess(
            *("--store", redis.url, *SERVER_OPTIONS), log=self.folder / "server.log"
        )
        self.publisher = Actor(self, "publisher", "publisher")
        self.others = [
            *(Actor(self, "producer", f"producer-{number}") for number in range(3)),
            *(Actor(self, "learner", f"learner-{number}") for number in range(2)),
            *(Actor(self, "rank", f"rank-{number}", rank=number) for number in range(2)),
        ]

    def next_rank_number(self, name: str) -> int:
        """Where a rank that was killed goes on."""
        numbers = [
            line["number"]
            for line in read_ledgers(self.folder)
            if line["kind"] == "rank" and line["ledger"].startswith(name)
        ]
        return max(numbers, default=-1) + 1

    def run(self) -> None:
        """Let everybody work and kill them, until time is up and enough were killed."""
        self.publisher.start()
        self._wait_for_session()
        for actor in self.others:
            actor.start()
        until = time.monotonic() + self.options.seconds
        give_up_at = time.monotonic() + 3 * self.options.seconds + 120
        while time.monotonic() < until or self.tally.kills["server"] < self.options.kills_min:
            assert time.monotonic() < give_up_at, f"too slow for {self.options.kills_min} kills"
            time.sleep(self.rng.uniform(0.1, 1.5))
            self._kill_something()
            self._check_that_nobody_failed()

    def _wait_for_session(self) -> None:
        with breadbox.connect(self.server.address) as client:
            eventually_sync(lambda: bool(client.get_buffer().session_id), "a session", within_s=60)

    def _kill_something(self) -> None:
        draw = self.rng.random()
        if draw < 0.65:
            self.tally.kills["server"] += 1
            self.server.kill()
            time.sleep(self.rng.choice((0.0, 0.0, 0.5)))
            self.server.start()
        elif draw < 0.75:
            self.tally.kills["redis"] += 1
            self.redis.kill()
            time.sleep(self.rng.uniform(0.0, 0.5))
            self.redis.start()
        elif draw < 0.8 and self.options.empties_redis:
            self.tally.kills["redis emptied"] += 1
            with self.redis.client() as client:
                client.flushall()
        else:
            actor = self.rng.choice([*self.others, self.publisher])
            self.tally.kills[actor.kind] += 1
            actor.kill()
            actor.start()

    def _check_that_nobody_failed(self) -> None:
        for actor in [*self.others, self.publisher]:
            if actor.has_ended():
                self.tally.wrong.append(f"{actor.name} ended by itself: {self._why(actor)}")
                actor.start()

    def _why(self, actor: Actor) -> str:
        notes = [
            line["error"]
            for line in read_ledgers(self.folder)
            if line["ledger"] == actor.name and line["kind"] == "failed"
        ]
        log = (self.folder / f"{actor.name}.log").read_text(errors="replace")
        return notes[-1] if notes else log[-500:]

    def finish(self) -> None:
        """Let everybody stop, and balance the books."""
        for actor in [*self.others, self.publisher]:
            status = actor.stop()
            if status != 0:
                self.tally.wrong.append(f"{actor.name} ended with {status}: {self._why(actor)}")
        with breadbox.connect(self.server.address, reconnect_s=60) as client:
            Audit(self, client).run()

    def end(self) -> None:
        """Kill whatever is left."""
        for actor in [*self.others, self.publisher]:
            actor.end()


class Audit:
    """Balances ledgers, server and store, once everybody has stopped."""

    def __init__(self, chaos: Chaos, client: breadbox.Client) -> None:
        self._chaos = chaos
        self._tally = chaos.tally
        self._client = client
        self._lines = list(read_ledgers(chaos.folder))

    def run(self) -> None:
        self._wait_for_quiet()
        self._check_ledgers()
        self._check_grants()
        self._check_counters()
        self._check_acknowledged()
        self._check_store()
        self._check_that_nothing_is_left()

    def _wait_for_quiet(self) -> None:
        """Leases of killed learners expire; open chunks of killed producers end."""
        state = lambda: self._client.get_buffer().state  # noqa: E731 - read afresh each time
        eventually_sync(
            lambda: (
                (state().lease_count, state().waiter_count, state().open_chunk_count) == (0, 0, 0)
            ),
            "leases, waiters and open chunks ending",
            within_s=SETTLE_S,
        )

    def _of(self, kind: str) -> Iterator[dict]:
        return (line for line in self._lines if line["kind"] == kind)

    def _check_ledgers(self) -> None:
        for line in self._of("wrong"):
            self._tally.wrong.append(f"{line['ledger']} read other bytes: {line}")
        if not self._chaos.options.empties_redis:
            expired = {line["lease"] for line in self._of("expired")}
            for line in self._of("missing"):
                # Of a lease that was over, the payloads may be gone.
                if line["lease"] not in expired:
                    self._tally.lost.append(f"{line['ledger']} was granted nothing: {line}")

    def _check_grants(self) -> None:
        leases: dict[str, dict] = {}
        shares: dict[str, list[set[int]]] = defaultdict(list)
        for line in self._of("granted"):
            self._tally.granted += len(line["fragments"])
            first = leases.setdefault(line["lease"], line)
            if first["fragments"] != line["fragments"]:
                self._tally.double.append(f"lease {line['lease']} was granted in two ways")
            for chunk, staleness, use_count, worker, index, _, session in line["fragments"]:
                if staleness > STALENESS_MAX or session != SESSION:
                    self._tally.stale.append(f"{worker}/{index} in {line['request']}")
                if use_count > USES_MAX:
                    self._tally.double.append(f"chunk {chunk} in use {use_count}")
        for lease, line in leases.items():
            chunks = {fragment[0] for fragment in line["fragments"]}
            if any(chunks & other for other in shares[line["request"]]):
                self._tally.double.append(f"two ranks share a chunk of {line['request']}: {lease}")
            shares[line["request"]].append(chunks)
        self._check_uses(leases)

    def _check_uses(self, leases: dict[str, dict]) -> None:
        consumed: Counter[int] = Counter()
        done = {line["lease"] for line in self._of("released") if line["mode"] == "consumed"}
        for lease in done:
            if lease in leases:
                consumed.update({fragment[0] for fragment in leases[lease]["fragments"]})
        for chunk, uses in consumed.items():
            if uses > USES_MAX:
                self._tally.double.append(f"chunk {chunk} was consumed {uses} times")

    def _check_counters(self) -> None:
        """Whatever came in is held, or left for a reason that a counter names."""
        state = self._client.get_buffer().state
        counters = state.counters
        left = sum(count for name, count in counters.items() if name.startswith("chunks_evicted"))
        discarded = sum(
            count for name, count in counters.items() if name.startswith("fragments_discarded")
        )
        if counters["chunks_closed"] != state.chunk_count + left:
            self._tally.lost.append(
                f"{counters['chunks_closed']} chunks closed, {state.chunk_count} held, {left} left"
            )
        in_chunks = FRAGMENTS_PER_CHUNK * counters["chunks_closed"]
        if counters["fragments_admitted"] != in_chunks + discarded:
            self._tally.lost.append(
                f"{counters['fragments_admitted']} fragments admitted, {in_chunks} in chunks, "
                f"{discarded} discarded"
            )
        acknowledged = len(self._acknowledged())
        self._tally.appended = acknowledged
        if counters["fragments_admitted"] < acknowledged:
            self._tally.lost.append(
                f"{acknowledged} acknowledged, {counters['fragments_admitted']} admitted"
            )

    def _acknowledged(self) -> dict[tuple[str, int], dict]:
        return {
            (line["worker"], line["index"]): line
            for line in self._of("appended")
            if "admitted" in (line["outcome"], line["first"])
        }

    def _check_acknowledged(self) -> None:
        """The server still knows the last fragment that each worker was told is in."""
        latest: dict[str, int] = {}
        for worker, index in self._acknowledged():
            latest[worker] = max(index, latest.get(worker, -1))
        for worker, index in latest.items():
            if not self._is_known(worker, index):
                self._tally.lost.append(f"{worker}/{index} was acknowledged and is not known")

    def _is_known(self, worker: str, index: int) -> bool:
        """Whether the server answers DUPLICATE for an identity, whatever its payload."""
        probe = FragmentMetadata(
            worker_id=worker,
            fragment_index=index,
            session_id=SESSION,
            model_version_min=0,
            model_version_max=0,
            payload=PayloadReference("0" * 32, 1),
            step_count=1,
        )
        (result,) = self._client.append_fragments([probe]).results
        return result.outcome is AdmissionOutcome.DUPLICATE

    def _check_store(self) -> None:
        """Books and store agree byte for byte once orphans had their time."""
        report: dict[str, int] = {}

        def agree() -> bool:
            report.update(self._fsck())
            return not (report["missing"] or report["orphans"] or report["corrupt"])

        try:
            eventually_sync(agree, "books and store agreeing", within_s=SETTLE_S)
        except AssertionError:
            self._tally.leaked.append(f"fsck: {report}")
        state = self._client.get_buffer().state
        weights = report["book_bytes"] - state.payload_bytes
        if weights < 0:
            self._tally.lost.append(f"{report} in the journal, {state.payload_bytes} bytes told")

    def _fsck(self) -> dict[str, int]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "breadbox.cli.main", "fsck", "--json"),
                *("--store", self._chaos.redis.url, "--settle-s", "1"),
            ],
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        report: dict[str, int] = json.loads(done.stdout)
        return report

    def _check_that_nothing_is_left(self) -> None:
        """The session's end leaves no payload, no lease, no waiter."""
        with contextlib.suppress(WaitElapsedError):
            lease = self._client.fetch(fragment_count=FRAGMENTS_PER_CHUNK, max_wait_s=0)
            lease.release(ReleaseMode.CONSUMED)
        self._client.end_session(SESSION)
        with self._chaos.redis.client() as redis:

            def payloads() -> list[bytes]:
                return [key for key in redis.keys("breadbox:{*}:*") if b"{journal}" not in key]

            try:
                eventually_sync(lambda: not payloads(), "payloads going", within_s=60)
            except AssertionError:
                self._tally.leaked += [f"key {key!r}" for key in payloads()]
        state = self._client.get_buffer().state
        if state.lease_count or state.waiter_count or state.payload_bytes:
            self._tally.leaked.append(f"state: {state}")


def run_chaos(options: Options) -> Tally:
    """One run, from nothing to nothing."""
    with RedisServer(is_durable=True) as redis:
        chaos = Chaos(options, redis)
        with chaos.server:
            try:
                chaos.run()
                chaos.finish()
            finally:
                chaos.end()
        return chaos.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--kills-min", type=int, default=20, help="of the server, at least")
    parser.add_argument("--empty-redis", action="store_true", help="empty Redis now and then")
    parsed = parser.parse_args()
    sys.stdout.write(f"seed {parsed.seed}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        tally = run_chaos(
            Options(parsed.seconds, parsed.seed, parsed.kills_min, parsed.empty_redis, Path(folder))
        )
    for problem in tally.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{tally.summary()}\n")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
