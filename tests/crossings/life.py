"""The life that every row lives, whatever its settings: README.md says what happens in it."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import numpy as np

import breadbox
from breadbox.model.errors import PermissionDeniedError, ReplayBufferError
from breadbox.model.types import BufferConfig, FullPolicy, ReleaseMode
from breadbox_server.maintenance.probe import probe
from chaos.ledger import Ledger
from crossings.actors import consume, fetch, is_right, weights_of
from crossings.clients import END_S, WORKS_S, Actor, WrongError
from crossings.ledger import Books, Items, books_of, by_step, items_of, lines_of
from crossings.settings import Setting
from crossings.world import CAPACITY, LEASE_S, TEAMS, World
from support.eventually import eventually_sync
from support.fsck_process import MUST_BE_0, fsck_report
from support.server_process import ServerProcess

MORE = 8
"""Fragments beyond what the buffer holds."""
TAKEN = 4
USED = 20
LATE = 2
"""Of the last version: producers find room for all that comes after `USED`."""
SETTLE_S = 10.0
"""In which everything has to be as it must, once nothing is in the way."""
TRIES_S = 1.0
"""For producers that must not get in, to try."""
LEADS_S = 15.0
"""From a leader's cut until its standby leads, and it says no more that it serves."""
MOVES_ON_S = 30.0
"""From a leader's cut until every client has gone on with the other."""
REPLACED = 2
"""Exit status of a server whose journal the other one took."""
WIDTHS = {"inline": 8, "gateway": 1500, "direct": 1500}
"""Numbers in an observation: so that payloads ride along, or do not."""
KEEPS_ALL = 2**40
LIMITS = {
    "on-policy": (2, 1, FullPolicy.EVICT),
    "off-policy": (KEEPS_ALL, KEEPS_ALL, FullPolicy.EVICT),
    "queue": (KEEPS_ALL, 1, FullPolicy.BLOCK),
    "stack": (KEEPS_ALL, 1, FullPolicy.BLOCK),
}
"""Versions of staleness, uses, and what happens when full, of each preset."""
MINESTUDIO = {
    "max_chunks": CAPACITY,
    "max_staleness": 2,
    "max_reuse": 1,
    "fragments_per_chunk": 1,
}


class Team:
    """A buffer and its clients."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.buffer = f"{TEAMS[number]}-{number}"
        self._world = world
        producer = world.setting.producer
        self.producer = self._actor(producer, _role(producer))
        self.learner = self._actor("learner", "learner")
        self.subscriber = self._actor("subscriber", "learner")
        self.ledger = Ledger(world.folder / f"{self.buffer}.row.ledger")
        """Of what the row itself does as a learner."""
        self.config = BufferConfig()
        self.version = 1

    def _actor(self, kind: str, role: str) -> Actor:
        setting = self._world.setting
        options = {
            "team": self.number,
            "schema": setting.schema,
            "width": WIDTHS[setting.path],
            "per-chunk": setting.per_chunk,
            "tickets": int(setting.assembly == "tickets"),
        }
        environment = partial(self._world.environment, self.buffer, role)
        return Actor(self._world.folder, self.buffer, kind, options, environment)

    @property
    def actors(self) -> list[Actor]:
        return [self.producer, self.learner, self.subscriber]


def _role(producer: str) -> str:
    """That of a training that adds steps and learns from them is `admin`, for its own buffers."""
    return "admin" if producer == "cleanrl" else "producer"


class Life:
    """One row.

    Args:
        setting: What meets.
        folder: Of ledgers and logs; empty.
        seed: Of what a row decides by chance.
        say: Takes each part of the life as it begins.
    """

    def __init__(
        self, setting: Setting, folder: Path, seed: int, say: Callable[[str], None]
    ) -> None:
        self.setting = setting
        self._rng = random.Random(seed)
        self._say = say
        self._stack = ExitStack()
        self._wrong: list[str] = []
        self.world = World(setting, folder, self._stack, self._wrong)
        self.teams = [Team(self.world, number) for number in range(setting.tenants)]
        self._clients: dict[tuple[str, str], breadbox.Client] = {}
        self._part = ""

    def live(self) -> str:
        """Live; gives what went wrong, or nothing."""
        parts = (
            *("begin", "fill", "return_a_lease", "kill_a_learner", "use", "publish_more"),
            *("stop_and_start_everything", "resume", "cut_off", "grow_stale", "disturb"),
            *("drain", "compare_with_the_store", "end"),
        )
        with self._stack:
            try:
                for part in parts:
                    self._part = part
                    self._say(part)
                    getattr(self, f"_{part}")()
                    if part not in ("begin", "end"):
                        self._check()
            except (WrongError, AssertionError, ReplayBufferError, TimeoutError) as error:
                return f"{self._part}: {type(error).__name__}: {error}"
            finally:
                self._kill_all()
        return ""

    # Its parts ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start everything, and a session in each team's buffer."""
        self.world.start()
        for team in self.teams:
            self._make_buffer(team)
            learner = self._client(team, "learner")
            learner.start_session(team.buffer, model_version=1)
            self._publish(team, 1)
            team.config = self._describe(team).config
            self._see_limits(team)
        self._start([team.subscriber for team in self.teams if self.setting.retains])
        if self.setting.producer != "cleanrl":
            self._start([team.producer for team in self.teams])

    def _make_buffer(self, team: Team) -> None:
        match self.setting.producer:
            case "cleanrl":
                self._start([team.producer])  # It makes its own.
            case "minestudio":
                from breadbox_adapters.minestudio import ReplayBufferInterface

                admin = self._client(team, "admin")
                ReplayBufferInterface(MINESTUDIO, client=admin, buffer=team.buffer).close()
            case _:
                self._client(team, "admin").create_buffer(team.buffer)

    def _see_limits(self, team: Team) -> None:
        """By what is documented of presets; an adapter has limits of its own."""
        config = team.config
        if self.setting.producer in ("cleanrl", "minestudio"):
            return
        found = (config.staleness_max, config.uses_max, config.full_policy)
        if found != LIMITS[self.setting.preset] or config.capacity_chunks != (
            CAPACITY // self.setting.per_chunk
        ):
            raise WrongError(f"the limits are {config}")

    def _fill(self) -> None:
        """Append more than there is room for: what is oldest leaves, or producers wait."""
        for team in self.teams:
            team.producer.order("produce", count=CAPACITY + MORE, version=team.version)
        for team in self.teams:
            self._wait_filled(team)

    def _wait_filled(self, team: Team) -> None:
        if team.config.full_policy is FullPolicy.EVICT:
            team.producer.finish()
            return
        self._soon(partial(self._holds, team, CAPACITY), "the buffer being full", WORKS_S)

    def _holds(self, team: Team, count: int) -> bool:
        """Whether a buffer holds so many fragments or more, those under lease aside."""
        return self._describe(team).state.chunk_count * self.setting.per_chunk >= count

    def _return_a_lease(self) -> None:
        """Take some of a full buffer, and give them back, while producers wait for room."""
        leases = []
        for team in self.teams:
            lease = fetch(self._client(team, "learner"), team.ledger, TAKEN, WORKS_S)
            leases.append((team, lease.__enter__()))
        self._let_them_try()
        for _, lease in leases:
            lease.release(ReleaseMode.RETURNED)

    def _kill_a_learner(self) -> None:
        """Kill a learner that holds some; its lease ends by itself."""
        self._start([team.learner for team in self.teams])
        for team in self.teams:
            team.learner.order("hold", count=TAKEN)
        for team in self.teams:
            team.learner.finish()
            team.learner.kill()
        self._let_them_try()
        for team in self.teams:
            is_over = partial(self._has_no_lease, team)
            self._soon(is_over, "the lease of a killed learner ending", LEASE_S + SETTLE_S)

    def _has_no_lease(self, team: Team) -> bool:
        return self._describe(team).state.lease_count == 0

    def _let_them_try(self) -> None:
        """Give producers that wait the time to get in, where they must not."""
        for team in self.teams:
            got_in = partial(self._holds, team, CAPACITY - TAKEN + 1)
            with contextlib.suppress(AssertionError):
                eventually_sync(got_in, "a producer getting in", within_s=TRIES_S)

    def _use(self) -> None:
        """Use some, so that whoever waited gets in."""
        for team in self.teams:
            self._consume(team, USED)
        for team in self.teams:
            team.producer.finish()

    def _publish(self, team: Team, version: int) -> None:
        team.version = version
        self._client(team, "learner").publish(team.buffer, version, weights_of(version))
        team.ledger.note("published", version=version)

    def _publish_more(self) -> None:
        """Publish the next version, with weights."""
        for team in self.teams:
            self._publish(team, team.version + 1)

    def _stop_and_start_everything(self) -> None:
        """Ask everybody to end, Redis last, and start all again; some producers stay."""
        stays = self._rng.random() < 0.5
        for team in self.teams:
            for actor in team.actors:
                if not (stays and actor is team.producer):
                    actor.end()
        self._close_clients()
        self.world.stop_servers()
        self.world.stop_store()
        self.world.start_store()
        self.world.start_servers()
        self._start([team.producer for team in self.teams if not stays])
        self._start([team.subscriber for team in self.teams if self.setting.retains])
        for team in self.teams:
            self._see_model(team)

    def _see_model(self, team: Team) -> None:
        client = self._client(team, "learner")
        state = client.watch_model(None)
        if state is None or (state.session_id, state.model_version) != (team.buffer, team.version):
            raise WrongError(f"the model is {state}, not version {team.version} of {team.buffer}")
        if state.weights is None:
            raise WrongError(f"version {team.version} has lost its weights")
        wanted = weights_of(team.version)
        if not np.array_equal(client.service.load_weights(state.weights)["w"], wanted["w"]):
            raise WrongError(f"the weights of version {team.version} are others")

    def _resume(self) -> None:
        """Let a new learner go on where the one before was, and producers with its version."""
        self._start([team.learner for team in self.teams])
        for team in self.teams:
            team.version += 1
            team.ledger.note("published", version=team.version)
            team.learner.order("resume", version=team.version)
            team.learner.order("consume", count=TAKEN)
        for team in self.teams:
            team.learner.finish()
            self._see_model(team)
            team.producer.order("produce", count=MORE, version=team.version)
        for team in self.teams:
            team.producer.finish()

    def _cut_off(self) -> None:
        """Cut a server off from its store, and see producers and learners go on."""
        for team in self.teams:
            team.producer.order("produce", count=TAKEN, version=team.version)
            team.learner.order("consume", count=2)
        if self.setting.standby and self.world.proxies:
            self._cut_off_leader()
        else:
            with self._store_away():
                for team in self.teams:
                    team.producer.order("produce", count=TAKEN, version=team.version)
        for team in self.teams:
            team.producer.finish()
            team.learner.finish()

    def _cut_off_leader(self) -> None:
        leader = self.world.leader()
        others = [each for each in self.world.servers if each is not leader]
        for way in self.world.proxies[self.world.servers.index(leader)]:
            way.fall_silent()
        began_at = time.monotonic()
        for team in self.teams:
            team.producer.order("produce", count=TAKEN, version=team.version)
            team.learner.order("consume", count=2)
        self._soon(lambda: self._says(others[0]) == "SERVING", "the standby leading", LEADS_S)
        self._soon(
            lambda: self._says(leader) != "SERVING", "the leader saying that it is none", LEADS_S
        )
        for team in self.teams:
            for actor in (team.producer, team.learner):
                actor.finish(max(0.0, MOVES_ON_S - (time.monotonic() - began_at)))
        self.world.heal()
        status = leader.wait(END_S)
        if status != REPLACED:
            raise WrongError(f"a leader that was replaced ended with {status}")
        leader.start_standby()

    @contextlib.contextmanager
    def _store_away(self) -> Iterator[None]:
        """Let the store fall silent until the server has noticed; one with a directory is killed
        instead."""
        if self.setting.store == "file":
            (server,) = self.world.servers
            server.kill()
            yield
            server.start()
            return
        for way in (way for ways in self.world.proxies for way in ways):
            way.fall_silent()
        if self.world.cluster is not None:
            self.world.signal_store(signal.SIGSTOP)
        try:
            yield
            self._soon(self._has_noticed, "an outage being noticed", SETTLE_S)
        finally:
            self.world.heal()

    def _has_noticed(self) -> bool:
        try:
            with self.world.connect(
                self.teams[0].buffer, "admin", deadline_s=1.0, reconnect_s=0.0
            ) as client:
                return bool(client.get_buffer().state.outage)
        except ReplayBufferError:
            return True

    def _says(self, server: ServerProcess) -> str:
        try:
            return probe(server.probe_address, within_s=1.0)[0]
        except grpc.RpcError as error:
            return str(error)

    def _grow_stale(self) -> None:
        """Publish until what was appended before the cut is stale, where anything ever is."""
        for team in self.teams:
            self._publish(team, team.version + 3)
            team.producer.order("produce", count=LATE, version=team.version)
        for team in self.teams:
            team.producer.finish()

    def _disturb(self) -> None:
        """Try what is another team's."""
        if len(self.teams) < 2:
            return
        mine, theirs = self.teams
        if self.setting.tokens:
            client = self._client(mine, "learner")
            for call in (
                lambda: client.service.fetch_fragments(1, buffer=theirs.buffer),
                lambda: client.service.read_fragments(buffer=theirs.buffer),
                lambda: client.end_session(theirs.buffer, buffer=theirs.buffer),
                lambda: client.service.publish_model(theirs.buffer, 99, buffer=theirs.buffer),
            ):
                try:
                    call()
                except PermissionDeniedError:
                    continue
                raise WrongError(f"a token of {mine.buffer} may use {theirs.buffer}")
            if [mine.buffer] != [each.name for each in client.list_buffers()]:
                raise WrongError(f"{mine.buffer} sees {client.list_buffers()}")
        # What one team is done with is no matter of the other's.
        self._consume(mine, self.setting.per_chunk)
        self._see_model(theirs)

    def _drain(self) -> None:
        """Use up all that there is, where use makes an end of it."""
        for team in self.teams:
            if (team.config.uses_max or 0) < KEEPS_ALL:
                self._consume(team, 10 * CAPACITY, wait_s=0.2)

    def _compare_with_the_store(self) -> None:
        """See that the store holds what the journal says, and nothing else."""
        report: dict[str, int] = {}

        def agree() -> bool:
            report.update(fsck_report(environment=self.world.environments[0]))
            return not any(report[name] for name in MUST_BE_0)

        self._soon(agree, "books and store agreeing", WORKS_S, lambda: str(report))

    def _end(self) -> None:
        """End actors and sessions: nothing is left."""
        for team in self.teams:
            self._end_session(team)
        for team in self.teams:
            self._soon(partial(self._is_empty, team), f"the end of {team.buffer}", SETTLE_S)
        self._soon(lambda: not self.world.payloads(), "payloads going", WORKS_S)
        self._wrong += [each for team in self.teams for each in self._told_wrong(team)]
        self._close_clients()
        self.world.stop_servers()
        if self._wrong:
            raise WrongError("; ".join(self._wrong))

    def _end_session(self, team: Team) -> None:
        if self.setting.retains:
            self._soon(partial(self._has_read_all, team), "the reader reading all", SETTLE_S)
        for actor in team.actors:
            actor.end()
        if self.setting.retains and (problems := self._books(team).problems_of_reader()):
            raise WrongError(f"{team.buffer}: {problems}")
        self._client(team, "learner").end_session(team.buffer)

    def _has_read_all(self, team: Team) -> bool:
        (reader,) = self._describe(team).subscriptions
        return reader.lag_chunk_count == 0

    def _is_empty(self, team: Team) -> bool:
        state = self._describe(team).state
        left = (
            *(state.chunk_count, state.open_chunk_count, state.fragment_count),
            *(state.payload_bytes, state.lease_count, state.waiter_count),
            state.retained_chunk_count,
        )
        return not any(left)

    def _told_wrong(self, team: Team) -> list[str]:
        """What the team's clients found wrong."""
        lines = lines_of(self.world.folder, team.buffer)
        return [line["what"] for line in lines if line["kind"] == "wrong"]

    # What must hold ----------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare each buffer with the books, once all is quiet."""
        for team in self.teams:
            found: list[str] = []

            def is_right_now(team: Team = team, found: list[str] = found) -> bool:
                found[:] = self._problems(team)
                return not found

            try:
                eventually_sync(is_right_now, "the books", within_s=SETTLE_S)
            except AssertionError:
                raise WrongError(f"{team.buffer}: {'; '.join(found)}") from None

    def _problems(self, team: Team) -> list[str]:
        if wrong := self._told_wrong(team):
            raise WrongError(f"{team.buffer}: {wrong}")
        held = self._held(team)
        books = self._books(team)
        problems = books.problems(held, team.number)
        state = self._describe(team).state
        counters = state.counters
        given_up = {
            name: counters[f"chunks_evicted_{name}"]
            for name in ("payload_lost", "quarantined", "deleted", "session_ended")
            if counters[f"chunks_evicted_{name}"]
        }
        if given_up:
            problems.append(f"chunks were given up: {given_up}")
        evicted = self.setting.per_chunk * counters["chunks_evicted_capacity"]
        if books.evicted != evicted:
            problems.append(f"{books.evicted} had to leave for others, {evicted} are counted")
        if self.setting.per_chunk > 1:
            problems += self._problems_of_ends(team, state)
        return problems

    def _problems_of_ends(self, team: Team, state: breadbox.types.BufferState) -> list[str]:
        """Each group ends once, whole; what became of its chunk changes the end at most."""
        ends = self._client(team, "learner").group_ends()
        problems = [str(each) for each in ends if each.reason.value in ("partial", "incomplete")]
        there = sum(each.member_count for each in ends) + state.open_fragment_count
        came = state.counters["fragments_admitted"]
        if there != came or len({each.group for each in ends}) < len(ends):
            problems.append(f"{came} members came in, {there} are of ends or open")
        given = state.counters["tickets_given"] if self.setting.assembly == "tickets" else 0
        ended = state.counters["tickets_ended_group_ended"]
        if (given - ended, given > 0) != (state.ticket_count, self.setting.assembly == "tickets"):
            problems.append(f"{given} tickets were given, {ended} ended, {state.ticket_count} left")
        return problems

    def _held(self, team: Team) -> list[Items]:
        """What the buffer holds, read without a trace."""
        held: list[Items] = []
        for read in self._client(team, "admin").tail(max_wait_s=0.0):
            for fragment in read.fragments:
                if not is_right(fragment):
                    raise WrongError(f"{items_of(fragment)} does not hold what was written")
                held.append(items_of(fragment))
        return by_step(held) if self._is_by_step else held

    def _books(self, team: Team) -> Books:
        return books_of(
            *(self.world.folder, team.buffer, team.config),
            is_by_step=self._is_by_step,
            per_chunk=self.setting.per_chunk,
        )

    @property
    def _is_by_step(self) -> bool:
        return self.setting.producer == "cleanrl"

    # Helpers -----------------------------------------------------------------------------------

    @staticmethod
    def _start(actors: Sequence[Actor]) -> None:
        """Start them together, and return once all are ready."""
        for actor in actors:
            actor.start()
        for actor in actors:
            actor.wait_ready()

    def _consume(self, team: Team, count: int, wait_s: float = WORKS_S) -> None:
        consume(
            *(self._client(team, "learner"), team.ledger, count, wait_s),
            per_chunk=self.setting.per_chunk,
        )

    def _describe(self, team: Team) -> breadbox.types.BufferDescription:
        return self._client(team, "admin").get_buffer()

    def _client(self, team: Team, role: str) -> breadbox.Client:
        key = (team.buffer, role)
        if key not in self._clients:
            self._clients[key] = self.world.connect(team.buffer, role)
        return self._clients[key]

    def _close_clients(self) -> None:
        while self._clients:
            self._clients.popitem()[1].close()

    @staticmethod
    def _soon(
        condition: Callable[[], bool],
        what: str,
        within_s: float,
        found: Callable[[], str] = str,
    ) -> None:
        try:
            eventually_sync(condition, what, within_s=within_s)
        except AssertionError as error:
            raise WrongError(f"{error} {found()}".strip()) from None

    def _kill_all(self) -> None:
        for team in self.teams:
            for actor in team.actors:
                actor.kill()
            team.ledger.close()
        self._close_clients()
