"""Lets everything happen that can, at random, and then balances what everybody was told.

    python tests/chaos/run.py --seconds 900 --seed 7

The clients keep ledgers of everything acknowledged and everything received. README.md beside this
says what happens and what must hold. The last line of a run sums up; exit code 0 means that
everything balances.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

import breadbox  # noqa: E402 - the tests' own packages are found only now
from chaos.actors import FRAGMENTS_PER_CHUNK, PRODUCERS  # noqa: E402
from chaos.audit import SETTLE_S, STALENESS_MAX, USES_MAX, Audit  # noqa: E402
from chaos.faults import LASTS_S, OF_DISK, OF_REDIS, WEIGHTS, Faults  # noqa: E402
from chaos.groups import GROUP_MIN, GROUP_SIZE  # noqa: E402
from chaos.ledger import read_ledgers  # noqa: E402
from chaos.servers import Servers  # noqa: E402
from chaos.tally import Tally  # noqa: E402
from chaos.tickets import LIMITS as LIMITS_OF_TICKETS  # noqa: E402
from chaos.worlds import World, disk_world, redis_world  # noqa: E402
from support.eventually import eventually_sync  # noqa: E402
from support.proxy import Proxy  # noqa: E402
from support.server_process import ServerProcess, plain_environment  # noqa: E402

LEASE_S = 3.0
UNANNOUNCED_S = 6.0
HUNG_S = 60.0
"""Without a sign of life: longer than any call may take when everything is there again."""
LIMITS = (
    *("--fragments-per-chunk", str(FRAGMENTS_PER_CHUNK), "--capacity-chunks", "300"),
    *("--staleness-max", str(STALENESS_MAX), "--uses-max", str(USES_MAX)),
)
LIMITS_OF_ALL = ("--preset", "off-policy", "--fragments-per-chunk", "1")
"""Of a buffer that keeps everything for as long as a run takes."""
LIMITS_OF_GROUPS = (
    *("--preset", "groups", "--fragments-per-chunk", str(GROUP_SIZE)),
    *("--group-min", str(GROUP_MIN), "--capacity-chunks", "60"),
    *("--staleness-max", str(STALENESS_MAX), "--uses-max", str(USES_MAX)),
)
SAMPLERS = ("oldest_first", "newest_first", "uniform", "freshest_first", "prioritised")
SERVER_OPTIONS = (
    *("--lease-s", str(LEASE_S), "--unannounced-s", str(UNANNOUNCED_S), "--open-chunk-s", "3"),
    *("--snapshot-entries", "400", "--drain-grace-s", "1"),
)
CAPACITY_STEPS = 10_000
CAPACITY_STEPS_OF_ALL = 250_000
CAPACITY_STEPS_OF_FEW = 40
"""Of a mirror most of whose steps are gone when they get priorities."""
DISK_SHARE = 0.25
"""Of a run over both stores, the time of the one on a small disk."""


@dataclass
class Options:
    seconds: float
    seed: int
    folder: Path
    store: str = "redis"
    faults: frozenset[str] = frozenset(WEIGHTS) - {"empty-redis"}
    kills_min: int = 0
    """Of the server, at least."""
    has_each: bool = False
    """Whether it goes on until each fault has happened."""
    keeps_all: bool = False
    """Whether nothing leaves the buffer, and a mirror holds all of it: nobody fetches."""
    has_standby: bool = False
    """Whether there are two servers, of which one leads; only over Redis."""
    has_groups: bool = False
    """Whether producers send members of groups; a seed chooses sampler and full policy."""
    has_tickets: bool = False
    """Whether producers take tickets for the groups that they fill; needs `has_groups`."""
    is_told: bool = False
    """Whether each fault is written down as it happens."""


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
        self._born_ns = 0

    @property
    def name(self) -> str:
        """Of this incarnation."""
        return f"{self._name}.{self._incarnation}"

    @property
    def ledger(self) -> Path:
        """Of this incarnation."""
        return self._chaos.folder / f"{self.name}.ledger"

    def start(self) -> None:
        self._incarnation += 1
        arguments = dict(self._arguments)
        if self.kind == "rank":
            arguments["first"] = self._chaos.next_rank_number(self._name)
        extra = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        if self._chaos.rolls_back:
            extra.append("--rolls-back")
        if self._chaos.options.has_groups:
            extra.append("--groups")
        if self._chaos.options.has_tickets:
            extra.append("--tickets")
        with (self._chaos.folder / f"{self.name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "chaos.actors", self.kind, *extra),
                    *("--server", self._chaos.clients_address, "--name", self.name),
                    *("--folder", str(self._chaos.folder)),
                    *("--width", str(self._chaos.world.width)),
                    *("--seed", str(self._chaos.rng.getrandbits(32))),
                ],
                env=_with_tests_on_path(),
                stderr=log,
            )
        self.ledger.touch()
        self._born_ns = self.ledger.stat().st_mtime_ns

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=30)

    def ask_to_stop(self) -> None:
        """Let it end after what it is doing."""
        self.signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: It did not end in time.
        """
        assert self._process is not None
        return self._process.wait(timeout=HUNG_S)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def is_at_work(self) -> bool:
        """Whether it has shown a sign of life."""
        return self.ledger.stat().st_mtime_ns != self._born_ns

    @property
    def silence_s(self) -> float:
        """Seconds since its last sign of life."""
        return time.time() - self.ledger.stat().st_mtime


class Chaos:
    """One store, one server (now and then two), several clients, and what happens to them."""

    def __init__(self, options: Options, world: World, front: Proxy) -> None:
        self.options = options
        self.world = world
        self.front = front
        """What clients take for the server."""
        self.folder = options.folder
        self.rng = random.Random(options.seed)
        self.tally = Tally()
        self._began_at = time.monotonic()
        self._servers: list[ServerProcess] = []
        """All that were ever made."""
        self._limits: tuple[str, ...] = LIMITS_OF_ALL if options.keeps_all else LIMITS
        if options.has_groups:
            policy = self.rng.choice(("evict", "block"))
            varied = ("--sampler", self.rng.choice(SAMPLERS), "--full-policy", policy)
            self.say(" ".join(varied))
            paced = LIMITS_OF_TICKETS if options.has_tickets else ()
            self._limits = (*LIMITS_OF_GROUPS, *varied, *paced)
        self.server: ServerProcess | Servers
        if options.has_standby:
            pair = [self.new_server("--standby") for _ in range(2)]
            self.server = Servers(pair, self.tally.wrong)
        else:
            self.server = self.new_server()
        self.publisher = Actor(self, "publisher", "publisher")
        capacity = CAPACITY_STEPS_OF_ALL if options.keeps_all else CAPACITY_STEPS
        self.mirrors = [
            Actor(self, "mirror", "mirror", capacity=capacity),
            Actor(self, "mirror", "small-mirror", capacity=CAPACITY_STEPS_OF_FEW),
        ]
        self.producers = [
            Actor(self, "producer", f"producer-{number}", number=number)
            for number in range(PRODUCERS)
        ]
        self.actors = [
            *self.producers,
            *([] if options.keeps_all else self._users()),
            *self.mirrors,
            self.publisher,
        ]
        self._faults = Faults(self, set(options.faults))

    def _users(self) -> list[Actor]:
        """Whoever uses chunks up, or misses none of them."""
        return [
            *(Actor(self, "learner", f"learner-{number}") for number in range(2)),
            *(Actor(self, "rank", f"rank-{number}", rank=number) for number in range(2)),
            Actor(self, "reader", "reader"),
            Actor(self, "subscriber", "subscriber"),
            *([Actor(self, "watcher", "watcher")] if self.options.has_groups else []),
        ]

    @property
    def rolls_back(self) -> bool:
        """Whether the books may become those of an earlier instant."""
        return "older-redis" in self._faults.names

    def new_server(self, *arguments: str) -> ServerProcess:
        """A server on this store that does not run yet."""
        made = ServerProcess(
            *(*self.world.server_arguments, *self._limits, *SERVER_OPTIONS, *arguments),
            log=self.folder / f"server-{len(self._servers) + 1}.log",
        )
        self._servers.append(made)
        return made

    @property
    def clients_address(self) -> str:
        """Where clients look for the server."""
        return self.server.address if self.options.has_standby else self.front.address

    def lead_to_server(self) -> None:
        """Lead clients that connect from now on to the server that there is now."""
        if self.options.has_standby:
            return  # They find it by themselves.
        host, port = self.server.address.rsplit(":", 1)
        self.front.target = (host, int(port))

    def say(self, what: str) -> None:
        """Tell what happens, if somebody wants to know."""
        if self.options.is_told:
            sys.stdout.write(f"{time.monotonic() - self._began_at:8.2f} {what}\n")
            sys.stdout.flush()

    def next_rank_number(self, name: str) -> int:
        """Where a rank that was killed goes on."""
        numbers = [
            line["number"]
            for line in read_ledgers(self.folder)
            if line["kind"] == "rank" and line["ledger"].startswith(name)
        ]
        return max(numbers, default=-1) + 1

    def run(self) -> None:
        """Let everybody work and things happen, until time is up and enough were killed."""
        self.server.start()
        self.lead_to_server()
        self.publisher.start()
        self._wait_for_session()
        for actor in self.actors:
            if actor is not self.publisher:
                actor.start()
        # On a busy machine they take long to come: nobody is killed before all are there.
        at_work = lambda: all(actor.is_at_work() for actor in self.actors)  # noqa: E731
        eventually_sync(at_work, "everybody being at work", within_s=120)
        until = time.monotonic() + self.options.seconds
        give_up_at = time.monotonic() + 3 * self.options.seconds + 120
        while (
            time.monotonic() < until
            or self.tally.faults["kill-server"] < self.options.kills_min
            or (self.options.has_each and self._faults.has_new)
        ):
            assert time.monotonic() < give_up_at, f"too slow for {self.options.kills_min} kills"
            time.sleep(self.rng.uniform(0.1, 1.5))
            self._faults.happen()
            self._check_actors()
        self._faults.heal()

    def _wait_for_session(self) -> None:
        with breadbox.connect(self.server.address) as client:
            eventually_sync(lambda: bool(client.get_buffer().session_id), "a session", within_s=60)

    def _check_actors(self) -> None:
        for actor in self.actors:
            if actor.has_ended():
                self.tally.wrong.append(f"{actor.name} ended by itself: {self._why(actor)}")
                actor.start()
            elif actor.silence_s > HUNG_S + LASTS_S[1] and not self._faults.is_lasting(actor.name):
                self.tally.hung.append(f"{actor.name} showed no sign of life for {HUNG_S} s")
                actor.kill()
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
        if self.options.has_groups:
            # Where producers wait for room, a partial group waits until learners have made some.
            self._stop(self.producers)
            self._wait_for_groups()
        # Mirrors last: they end with all that there is, and those of a moment ago have yet to come.
        stopped = [*self.mirrors, *(self.producers if self.options.has_groups else [])]
        self._stop([each for each in self.actors if each not in stopped])
        eventually_sync(
            lambda: all(each.is_at_work() or each.has_ended() for each in self.mirrors),
            "every mirror being at work",
            within_s=120,
        )
        self._stop(self.mirrors)
        with breadbox.connect(self.server.address, reconnect_s=SETTLE_S) as client:
            Audit(
                *(self.folder, self.world, client, self.tally),
                empties_redis="empty-redis" in self._faults.names,
                has_groups=self.options.has_groups,
                has_tickets=self.options.has_tickets,
                keeps_all=self.options.keeps_all,
            ).run()

    def _wait_for_groups(self) -> None:
        with breadbox.connect(self.server.address, reconnect_s=SETTLE_S) as client:
            eventually_sync(
                lambda: client.get_buffer().state.open_chunk_count == 0,
                "every group ending",
                within_s=SETTLE_S,
            )

    def _stop(self, actors: list[Actor]) -> None:
        """Let these end after what they are doing."""
        for actor in actors:
            actor.ask_to_stop()
        for actor in actors:
            try:
                status = actor.wait()
            except subprocess.TimeoutExpired:
                self.tally.hung.append(f"{actor.name} did not stop within {HUNG_S} s")
                actor.kill()
                continue
            # One that was only just started had nothing to finish, and no ear yet.
            is_new_born = status == -signal.SIGTERM and not actor.ledger.stat().st_size
            if status != 0 and not is_new_born:
                self.tally.wrong.append(f"{actor.name} ended with {status}: {self._why(actor)}")

    def end(self) -> None:
        """Kill whatever is left."""
        self._faults.heal()
        for actor in self.actors:
            actor.end()
        for server in self._servers:
            server.end()


def run_chaos(options: Options) -> Tally:
    """One run, from nothing to nothing."""
    make_world = redis_world if options.store == "redis" else disk_world
    with make_world(options.folder) as world, Proxy(("127.0.0.1", 0)) as front:
        chaos = Chaos(options, world, front)
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
    parser.add_argument("--kills-min", type=int, default=0, help="of the server, at least")
    parser.add_argument("--store", choices=("redis", "file", "both"), default="both")
    parser.add_argument("--empty-redis", action="store_true", help="empty Redis now and then")
    parser.add_argument(
        "--only", action="append", choices=sorted(WEIGHTS), help="let nothing else happen"
    )
    parser.add_argument(
        "--standby", action="store_true", help="two servers on one journal, over Redis alone"
    )
    parser.add_argument(
        "--groups", action="store_true", help="producers send members of groups, in any order"
    )
    parser.add_argument(
        "--tickets", action="store_true", help="producers take tickets for groups that they fill"
    )
    parser.add_argument("--verbose", action="store_true", help="tell each fault as it happens")
    parser.add_argument("--keep", type=Path, help="folder for ledgers and logs; must not exist")
    parsed = parser.parse_args()
    sys.stdout.write(f"seed {parsed.seed}\n")
    sys.stdout.flush()
    faults = frozenset(parsed.only or WEIGHTS) - (
        frozenset() if parsed.empty_redis or parsed.only else {"empty-redis"}
    )
    has_problems = False
    if parsed.standby:
        parsed.store = "redis"
    for store in ("redis", "file") if parsed.store == "both" else (parsed.store,):
        share = 1.0
        if parsed.store == "both":
            share = DISK_SHARE if store == "file" else 1.0 - DISK_SHARE
        if not faults - (OF_DISK if store == "redis" else OF_REDIS):
            continue
        with contextlib.ExitStack() as stack:
            if parsed.keep is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            else:
                folder = parsed.keep / store
                folder.mkdir(parents=True)
            tally = run_chaos(
                Options(
                    seconds=share * parsed.seconds,
                    seed=parsed.seed,
                    folder=folder,
                    store=store,
                    faults=faults,
                    kills_min=parsed.kills_min,
                    has_standby=parsed.standby,
                    has_groups=parsed.groups or parsed.tickets,
                    has_tickets=parsed.tickets,
                    is_told=parsed.verbose,
                )
            )
        for problem in tally.problems:
            sys.stdout.write(f"{problem}\n")
        sys.stdout.write(f"{store}: {tally.summary()}\n")
        sys.stdout.flush()
        has_problems = has_problems or bool(tally.problems)
    return 1 if has_problems else 0


if __name__ == "__main__":
    sys.exit(main())
