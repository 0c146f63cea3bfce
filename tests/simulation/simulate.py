"""One seed: a server, its clients, everything that goes wrong, and what must hold at the end."""

import asyncio
import random
import traceback
from dataclasses import dataclass, replace

from breadbox.model.errors import StoreError
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig, FullPolicy, LeaseExpiryPolicy
from breadbox_server.core.model.inputs import ReleaseLease, ReleaseMode
from breadbox_server.core.samplers import SAMPLERS
from breadbox_server.driver import Driver
from breadbox_server.maintenance.reconciliation import Reconciler
from simulation.clients import Client, Critic, Learner, Ledger, Reader, Trainer, Worker
from simulation.faults import Fates, FaultPlan, World
from simulation.loop import SimulatedClock, run_simulated
from simulation.server import METRICS, Deployment, SimulatedServer, Variant, is_replacement
from simulation.storage import DISK_BYTES, UNANNOUNCED_S, SimulatedCustodian

QUIET_S = 3 * UNANNOUNCED_S
"""After this long without clients every lease, orphan and deletion has run its course."""
FITTED_BYTES = 200
"""Capacity of a buffer on the simulated disk: its payloads take less than half of it."""
BUSY_LOOKS = 200
"""At a server, until it does what is looked for."""
REPLACED_S = 20.0
"""Within so many seconds a server that was replaced ends, once it is awake."""
HEALED_S = 60.0
"""Seconds in which everybody has finished what was begun, once nothing goes wrong any more."""
LIFE_S_MAX = 600.0
"""Seconds that no simulation takes unless somebody hangs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed came to."""

    seed: int
    failure: str
    """What did not hold, empty when everything did."""
    where: str
    """Traceback of the failure."""
    world: World
    simulated_s: float
    kills: int
    admitted: int
    granted: int
    read: int
    """Chunks that readers by a cursor were told of."""
    admitted_lost: int
    """Fragments that were acknowledged, and that a journal without a server forgot."""

    @property
    def line(self) -> str:
        """One line for a terminal."""
        verdict = self.failure or "ok"
        return (
            f"seed {self.seed}, {self.world}: {verdict} ({self.simulated_s:.1f} s, "
            f"{self.kills} kills, {self.admitted} admitted, {self.granted} granted, "
            f"{self.read} read, "
            f"{self.admitted_lost} forgotten)"
        )


def draw_plan(rng: random.Random, world: World) -> FaultPlan:
    """Draw a kind of bad weather."""
    return FaultPlan(
        world=world,
        delay_s=rng.choice([0.002, 0.02, 0.1]),
        slow_probability=rng.choice([0.0, 0.05]),
        drop_probability=rng.choice([0.0, 0.03, 0.1]),
        duplicate_probability=rng.choice([0.0, 0.05]),
        store_error_probability=rng.choice([0.0, 0.03, 0.1]),
        journal_error_probability=rng.choice([0.0, 0.03, 0.1]),
        crash_count=rng.choice([1, 2, 3]),
        partition_count=rng.choice([0, 1, 2]),
        loss_count=rng.choice([0, 0, 1, 4]),
        world_count=rng.choice([1, 2, 4]),
    )


def draw_config(rng: random.Random) -> BufferConfig:
    """Draw limits small enough to be met."""
    return BufferConfig(
        fragments_per_chunk=rng.choice([1, 1, 2]),
        capacity_chunks=rng.choice([4, 8, 100]),
        capacity_bytes=rng.choice([120, 10_000]),
        staleness_max=rng.choice([1, 2, 8]),
        uses_max=rng.choice([1, 1, 2]),
        full_policy=rng.choice(list(FullPolicy)),
        lease_expiry_policy=rng.choice(list(LeaseExpiryPolicy)),
        lease_s=rng.choice([1.0, 4.0]),
        open_chunk_s=rng.choice([2.0, 30.0]),
        outcomes_per_worker_max=1000,
    )


class Simulation:
    """One run of one seed."""

    def __init__(self, seed: int, variant: Variant, world: World) -> None:
        self._rng = random.Random(f"{seed}/simulation")
        self.fates = Fates(seed, draw_plan(self._rng, world))
        self._world_rng = self.fates.rng(world)
        config = draw_config(self._rng)
        if world is World.DISK:
            # As a server does at its start: half of the disk is more than buffers may promise.
            config = replace(config, capacity_bytes=min(config.capacity_bytes, FITTED_BYTES))
        if world is World.SELECTION:
            config = replace(
                config,
                sampler=self._world_rng.choice(list(SAMPLERS)),
                remover=self._world_rng.choice(list(SAMPLERS)),
                with_replacement=self._world_rng.random() < 0.3,
                priority_exponent=self._world_rng.choice([0.5, 1.0]),
            )
        self.ledger = Ledger(config)
        self.deployment = Deployment(config, self.fates, variant)
        self.deployment.on_claim = self._note_claim
        self.deployment.on_take = self._note_take
        self.deployment.on_serve = self._check_start
        shared = (self.deployment, self.fates, self.ledger)
        self.trainer = Trainer(*shared, session_count=self._rng.choice([1, 1, 2]))
        self.workers = [Worker(f"worker-{i}", *shared) for i in range(self._rng.choice([1, 2]))]
        self.learners = [Learner(f"learner-{i}", *shared) for i in range(self._rng.choice([1, 3]))]
        # Drawn apart from all else, so that what others do in a seed is as it was without them.
        rng = random.Random(f"{seed}/readers")
        self.readers = [
            Reader(f"reader-{i}", *shared, subscribes=rng.random() < 0.5)
            for i in range(rng.choice([0, 1, 2]))
        ]
        self.critics = [Critic("critic", *shared)] if world is World.SELECTION else []
        self.kills = 0
        self.ended_at = 0.0
        self._replaced_at: dict[str, float] = {}
        """When the journal of a server, by its name, was claimed by another one."""
        self._copy = self.ledger.copy()
        """As the journal is now that has come back."""
        self._deleted_count = 0
        """Payloads that had been deleted when that copy was made."""
        self._has_rewound = False
        """Whether a server has claimed that journal, and not taken the store yet."""
        self._has_excuse = True
        """Whether the server that is missing was killed, and did not end itself."""

    @property
    def clients(self) -> list[Client]:
        return [self.trainer, *self.workers, *self.learners, *self.critics]

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Let everything happen, then check that nothing was lost, doubled or left behind."""
        try:
            async with asyncio.timeout(LIFE_S_MAX):
                await self._live()
                await self._check_end()
        except TimeoutError as error:
            raise AssertionError("somebody hangs") from error
        finally:
            for client in [*self.clients, *self.readers]:
                client.give_up()
            for server in list(self.deployment.servers):
                await self.deployment.kill(server)
            self.ended_at = self._now

    async def _live(self) -> None:
        await self._until_served()
        async with asyncio.TaskGroup() as group:
            everybody = [*self.clients, *self.readers]
            running = {client: group.create_task(client.run()) for client in everybody}
            mischief = group.create_task(self._make_mischief())
            audit = group.create_task(self._audit())
            await running[self.trainer]
            await mischief
            self.fates.is_healed = True
            healed_at = self._now
            for client in everybody:
                client.is_stopping = True
                client.is_partitioned = False
            await asyncio.wait(running.values())
            audit.cancel()
        await self._until_alone()
        assert self._now <= healed_at + HEALED_S, "who waited went on late"
        for client in everybody:
            await client.finish()

    # --- servers -----------------------------------------------------------------------------

    async def _until_served(self) -> None:
        """Return when a server serves that nobody has replaced; start one if there is none."""
        while not any(not server.is_replaced for server in self.deployment.serving):
            self._look_after_servers()
            if not any(not server.is_replaced for server in self.deployment.servers):
                self.deployment.start(takes_over=self._rng.random() < 0.5)
            await asyncio.sleep(0.05)

    async def _until_alone(self) -> None:
        """Return when every server that was replaced has ended, and one serves."""
        while len(self.deployment.servers) != 1 or not self.deployment.serving:
            await self._until_served()
            self._look_after_servers()
            await asyncio.sleep(0.05)

    def _look_after_servers(self) -> None:
        """Start servers again that ended themselves, and see to it that those do that must."""
        for violation in self.fates.violations:
            raise violation
        for server in list(self.deployment.servers):
            self._check_end_of_replaced(server)
            error = server.failure()
            if error is None:
                continue
            if not is_replacement(error):
                raise error
            self.deployment.servers.remove(server)
            if server.claim is not None and not server.is_replaced:
                # Nobody has replaced it: all that it knew must be found again.
                self._has_excuse = False
                self.deployment.start(takes_over=True)

    def _check_end_of_replaced(self, server: SimulatedServer) -> None:
        if not server.is_replaced or server.process.is_stopped or server.failure() is not None:
            return
        known_at = max(self._replaced_at[server.name], server.process.woken_at)
        assert self._now < known_at + REPLACED_S, f"{server.name} was replaced, and goes on"

    def _note_claim(self) -> None:
        """Take note of who was replaced, and of what no server knows any more."""
        for server in self.deployment.servers:
            if server.is_replaced:
                self._replaced_at.setdefault(server.name, self._now)
        journal = self.deployment.journal
        if journal.is_younger and self._has_excuse:
            self.ledger.rewind(self._copy)
            self._has_rewound = True
            for server in self.deployment.servers:
                # What it tells until it hears of that was true, and is no promise any more.
                server.is_outlived = server.is_outlived or server.is_replaced
        journal.is_younger, self._has_excuse = False, True

    def _note_take(self) -> None:
        """What was deleted since a copy was made is lost to a journal that came back from it."""
        if self._has_rewound:
            store = self.deployment.store
            deleted = store.deleted[self._deleted_count :]
            store.note_lost([each for each in deleted if not store.has(each)])
        self._has_rewound = False
        self.deployment.store.note_unsaved()

    def _check_start(self, server: SimulatedServer) -> None:
        assert server.buffers is not None
        self.deployment.store.note_unsaved()
        if not server.is_replaced:
            self.ledger.check_books(server.buffers, self._now)
            server.buffers.check_invariants()

    # --- mischief ----------------------------------------------------------------------------

    async def _make_mischief(self) -> None:
        """Kill servers, cut clients off, lose payloads, and worse: each at a time of its own."""
        plan = self.fates.plan
        acts = [self._kill_and_start] * plan.crash_count + [self._partition] * plan.partition_count
        acts += [self._lose_payloads] * plan.loss_count
        worlds = {
            World.RIVALS: self._replace,
            World.YOUNGER: self._restore,
            World.DISK: self._fill_disk,
            World.SILENCE: self._fall_silent,
        }
        if plan.world is World.RIVALS_YOUNGER:
            acts += [self._replace, self._restore] * plan.world_count
        elif plan.world in worlds:
            acts += [worlds[plan.world]] * plan.world_count
        self._rng.shuffle(acts)
        for act in acts:
            await asyncio.sleep(self._rng.uniform(0.1, 4.0))
            self._look_after_servers()
            await act()

    async def _audit(self) -> None:
        """Look now and then, as an operator would."""
        while True:
            await asyncio.sleep(0.25)
            self._look_after_servers()
            for server in self.deployment.servers:
                server.check_leases()

    async def _kill_and_start(self) -> None:
        self.kills += 1
        if self.deployment.servers:
            await self.deployment.kill(self._rng.choice(self.deployment.servers))
        await asyncio.sleep(self._rng.choice([0.01, 0.5, 3.0]))
        await self._until_served()

    async def _partition(self) -> None:
        victim = self._rng.choice(self.clients)
        victim.is_partitioned = True
        await asyncio.sleep(self._rng.choice([0.5, 4.0]))
        victim.is_partitioned = False

    async def _lose_payloads(self) -> None:
        self.deployment.store.lose_some(self._rng.randrange(1, 4))

    async def _replace(self) -> None:
        """Stop the server somewhere, start another one, stop that too: or only one of these."""
        rng = self._world_rng
        if rng.random() < 0.7:
            await self._until_busy()
        for server in self.deployment.servers:
            if rng.random() < 0.7:
                self._stop(server)
        await asyncio.sleep(rng.choice([0.0, 0.1, 1.0, 3.0]))
        if rng.random() < 0.8:
            successor = self.deployment.start(takes_over=rng.random() < 0.7)
            if rng.random() < 0.3:
                self._stop(successor)
        await asyncio.sleep(rng.choice([0.1, 1.0, 4.0]))
        await self._until_served()

    async def _until_busy(self) -> None:
        """Return when a server is about to delete something, or soon: then a stop hurts most."""
        for _ in range(BUSY_LOOKS):
            for server in self.deployment.serving:
                assert server.driver is not None
                if _is_releasing(server.driver):
                    return
            await asyncio.sleep(max(0.01, self.fates.plan.delay_s / 2))

    def _stop(self, server: SimulatedServer) -> None:
        """Stop a server between two of its steps, for a while."""
        rng = self._world_rng
        server.process.stop_after(rng.choice([0, rng.randrange(5), rng.randrange(40)]))
        asyncio.get_running_loop().call_later(rng.choice([0.2, 1.0, 3.0, 7.0]), server.process.wake)

    async def _restore(self) -> None:
        """Copy the journal, the store, or both; a while later let them come back so."""
        rng, journal, store = self._world_rng, self.deployment.journal, self.deployment.store
        await self._until_whole()
        for _ in range(rng.choice([0, BUSY_LOOKS])):
            if store.is_announcing:
                break
            await asyncio.sleep(0.01)
        books, payloads = journal.contents.copy(), store.copy()
        told, deleted_count = self.ledger.copy(), len(store.deleted)
        await asyncio.sleep(rng.choice([0.05, 0.5, 2.0, 6.0]))
        # The copy may be of an earlier epoch.
        if self.fates.plan.world is World.RIVALS_YOUNGER:
            await self._replace()
        elif rng.random() < 0.5:
            await self._kill_and_start()
        await self._until_served()
        await self._until_one_speaks()
        has_lost_journal, has_lost_payloads = rng.choice([(1, 1), (1, 1), (1, 0), (0, 1)])
        is_killed = rng.random() < 0.4
        for server in list(self.deployment.servers) if is_killed else ():
            self.kills += 1
            await self.deployment.kill(server)
        if has_lost_payloads:
            self.fates.restarts["store"] += 1
            store.restore(payloads)
        if has_lost_journal:
            self.fates.restarts["journal"] += 1
            journal.restore(books)
            self._copy, self._deleted_count = told, deleted_count
        await asyncio.sleep(rng.choice([0.01, 1.0]))
        await self._until_served()

    async def _until_one_speaks(self) -> None:
        """Return when nobody is awake but the server that claimed last.

        A journal that comes back can tell whose it was by who speaks up, and by nothing else: not
        if a server was replaced just now, and has not heard of it.
        """
        while any(not server.process.is_stopped for server in self._replaced()):
            await asyncio.sleep(0.05)
            await self._until_served()
        for server in self.deployment.serving:
            if not server.is_replaced:
                server.process.wake()

    def _replaced(self) -> list[SimulatedServer]:
        return [server for server in self.deployment.servers if server.is_replaced]

    async def _until_whole(self) -> None:
        """Return when a server has written to the journal since it came back."""
        for _ in range(BUSY_LOOKS):
            if not self.deployment.journal.is_younger:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("a journal that came back was not begun again")

    async def _fill_disk(self) -> None:
        """Let a stranger take all the room there is, or nearly, again and again; then leave."""
        rng, disk = self._world_rng, self.deployment.disk
        assert disk is not None
        left_bytes = rng.choice([0, 0, DISK_BYTES // 10])
        for _ in range(rng.choice([1, 10, 40])):
            disk.strangers_bytes += max(0, disk.free_bytes - left_bytes)
            await asyncio.sleep(0.2)
        disk.strangers_bytes = 0
        await self._until_served()

    async def _fall_silent(self) -> None:
        """Let journal, store, or both take requests without answering."""
        rng = self._world_rng
        self.fates.silent |= rng.choice([{"journal"}, {"store"}, {"journal", "store"}])
        await asyncio.sleep(rng.choice([1.0, 6.0, 6.0, 40.0]))
        self.fates.end_silence(self._now)
        await self._until_served()

    async def _check_end(self) -> None:
        server = self.deployment.server
        driver, buffers = server.driver, server.buffers
        assert driver is not None
        assert buffers is not None
        await server.finish_calls()
        await self._check_readers(buffers)
        await driver.flush()
        self._look_after_servers()
        now = self._now
        self.ledger.check_books(buffers, now)
        server.check_leases()
        twin = self.deployment.recovered_twin()
        for each in (twin, buffers):
            each.handle_timer(now=now)
        assert twin.snapshot() == buffers.snapshot(), "the journal tells another story"
        await asyncio.sleep(QUIET_S)
        self._look_after_servers()
        await self._check_store(driver)
        seen = driver.core.describe(DEFAULT_BUFFER)
        assert (seen.lease_count, seen.waiter_count) == (0, 0), "leases or waiters are left"
        buffers.check_invariants()
        self._check_accounts(driver)

    async def _check_readers(self, buffers: BufferSet) -> None:
        """Nobody misses anything unknowingly."""
        for reader in self.readers:
            await reader.catch_up(buffers.closed_count(DEFAULT_BUFFER) - 1)
            reader.check(buffers)

    async def _check_store(self, driver: Driver) -> None:
        custodian = SimulatedCustodian(self.deployment.store, self.fates, -1)
        clock = SimulatedClock(asyncio.get_running_loop())
        reconciler = Reconciler(
            driver, custodian, clock=clock, metrics=METRICS, orphan_s=0.0, deletes_orphans=True
        )
        try:
            await reconciler.reconcile()
        except StoreError as error:
            raise AssertionError("a healed store failed") from error
        await driver.flush()
        known = {payload.payload_id for payload in driver.core.buffers[DEFAULT_BUFFER].payloads()}
        kept = self.deployment.store.confirmed
        assert known <= kept, f"in the books and not in the store: {sorted(known - kept)}"
        assert kept <= known, f"in the store and not in the books: {sorted(kept - known)}"

    def _check_accounts(self, driver: Driver) -> None:
        """Every fragment that was admitted is accounted for."""
        seen = driver.core.describe(DEFAULT_BUFFER)
        counters, size = seen.counters, seen.config.fragments_per_chunk
        gone = [n for name, n in counters.items() if name.startswith("chunks_evicted_")]
        given_up = [n for name, n in counters.items() if name.startswith("fragments_discarded_")]
        accounted = seen.open_fragment_count + size * (seen.chunk_count + sum(gone)) + sum(given_up)
        assert counters["fragments_admitted"] == accounted, "fragments left without a reason"
        assert counters["fragments_admitted"] >= len(self.ledger.admitted), "acknowledged and lost"


def _is_releasing(driver: Driver) -> bool:
    """Whether payloads are about to be deleted."""
    turn = driver.turns._committing  # noqa: SLF001 - what nobody is told yet
    entries = [] if turn is None else turn.entries
    return bool(len(driver.deletions)) or any(
        isinstance(entry, ReleaseLease) and entry.mode is ReleaseMode.CONSUMED
        for _, entry in entries
    )


def world_of(seed: int) -> World:
    """The world of a seed, unless it is named: each in turn."""
    worlds = list(World)
    return worlds[seed % len(worlds)]


def replay_command(outcome: Outcome, variant_name: str = "real") -> str:
    """Say how to run one seed again."""
    return (
        f"python tests/simulation --variant {variant_name} --world {outcome.world} "
        f"--seed {outcome.seed}"
    )


def simulate(seed: int, variant: Variant | None = None, world: World | None = None) -> Outcome:
    """Run one seed; the same seed always comes to the same outcome."""
    world = world or world_of(seed)
    simulation = Simulation(seed, variant or Variant(), world)
    failure, where = "", ""
    try:
        run_simulated(simulation.run())
    except Exception as error:  # noqa: BLE001  whatever it is, it is the outcome
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        failure = f"{type(error).__name__}: {error}"
        where = "".join(traceback.format_exception(error))
    return Outcome(
        seed,
        failure,
        where,
        world,
        simulation.ended_at - 1000.0,
        simulation.kills,
        len(simulation.ledger.admitted),
        simulation.ledger.grant_count,
        simulation.ledger.read_count,
        simulation.ledger.admitted_lost_count,
    )
