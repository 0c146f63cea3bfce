"""One seed: a server, its clients, everything that goes wrong, and what must hold at the end."""

import asyncio
import random
import traceback
from dataclasses import dataclass

from breadbox.errors import StoreError
from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.config import BufferConfig, FullPolicy, LeaseExpiryPolicy
from breadbox_server.reconciliation import Reconciler
from simulation.clients import Client, Learner, Ledger, Trainer, Worker
from simulation.faults import Fates, FaultPlan
from simulation.loop import SimulatedClock, run_simulated
from simulation.server import METRICS, SimulatedServer, Variant
from simulation.storage import UNANNOUNCED_S, SimulatedCustodian

QUIET_S = 3 * UNANNOUNCED_S
"""After this long without clients every lease, orphan and deletion has run its course."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed came to."""

    seed: int
    failure: str
    """What did not hold, empty when everything did."""
    where: str
    """Traceback of the failure."""
    simulated_s: float
    kills: int
    admitted: int
    granted: int

    @property
    def line(self) -> str:
        """One line for a terminal."""
        verdict = self.failure or "ok"
        return (
            f"seed {self.seed}: {verdict} ({self.simulated_s:.1f} s, {self.kills} kills, "
            f"{self.admitted} admitted, {self.granted} granted)"
        )


def draw_plan(rng: random.Random) -> FaultPlan:
    """Draw a kind of bad weather."""
    return FaultPlan(
        delay_s=rng.choice([0.002, 0.02, 0.1]),
        slow_probability=rng.choice([0.0, 0.05]),
        drop_probability=rng.choice([0.0, 0.03, 0.1]),
        duplicate_probability=rng.choice([0.0, 0.05]),
        store_error_probability=rng.choice([0.0, 0.03, 0.1]),
        journal_error_probability=rng.choice([0.0, 0.03, 0.1]),
        crash_count=rng.choice([1, 2, 3]),
        partition_count=rng.choice([0, 1, 2]),
        loss_count=rng.choice([0, 0, 1, 4]),
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

    def __init__(self, seed: int, variant: Variant) -> None:
        self._rng = random.Random(f"{seed}/simulation")
        self.fates = Fates(seed, draw_plan(self._rng))
        config = draw_config(self._rng)
        self.ledger = Ledger(config)
        self.server = SimulatedServer(config, self.fates, variant)
        shared = (self.server, self.fates, self.ledger)
        self.trainer = Trainer(*shared, session_count=self._rng.choice([1, 1, 2]))
        self.workers = [Worker(f"worker-{i}", *shared) for i in range(self._rng.choice([1, 2]))]
        self.learners = [Learner(f"learner-{i}", *shared) for i in range(self._rng.choice([1, 3]))]
        self.kills = 0
        self.ended_at = 0.0

    @property
    def clients(self) -> list[Client]:
        return [self.trainer, *self.workers, *self.learners]

    async def run(self) -> None:
        """Let everything happen, then check that nothing was lost, doubled or left behind."""
        try:
            await self._live()
            await self._check_end()
        finally:
            for client in self.clients:
                client.give_up()
            if self.server.driver is not None:
                await self.server.kill()
            self.ended_at = asyncio.get_running_loop().time()

    async def _live(self) -> None:
        await self._start_server()
        async with asyncio.TaskGroup() as group:
            for client in self.clients:
                client_task = group.create_task(client.run())
                if client is self.trainer:
                    training = client_task
            mischief = group.create_task(self._make_mischief())
            audit = group.create_task(self._audit())
            await training
            await mischief
            audit.cancel()
            self.fates.is_healed = True
            for client in self.clients:
                client.is_stopping = True
                client.is_partitioned = False
        for client in self.clients:
            await client.finish()

    async def _start_server(self) -> None:
        await self.server.start()
        assert self.server.buffers is not None
        self.ledger.check_books(self.server.buffers, asyncio.get_running_loop().time())
        self.server.buffers.check_invariants()

    async def _make_mischief(self) -> None:
        """Kill the server, cut clients off, lose payloads: each at a time of its own."""
        plan = self.fates.plan
        acts = [self._kill_and_start] * plan.crash_count + [self._partition] * plan.partition_count
        acts += [self._lose_payloads] * plan.loss_count
        self._rng.shuffle(acts)
        for act in acts:
            await asyncio.sleep(self._rng.uniform(0.1, 4.0))
            self.server.check_alive()
            await act()

    async def _audit(self) -> None:
        """Look now and then, as an operator would."""
        while True:
            await asyncio.sleep(0.25)
            self.server.check_leases()

    async def _kill_and_start(self) -> None:
        self.kills += 1
        await self.server.kill()
        await asyncio.sleep(self._rng.choice([0.01, 0.5, 3.0]))
        await self._start_server()

    async def _partition(self) -> None:
        victim = self._rng.choice(self.clients)
        victim.is_partitioned = True
        await asyncio.sleep(self._rng.choice([0.5, 4.0]))
        victim.is_partitioned = False

    async def _lose_payloads(self) -> None:
        self.server.store.lose_some(self._rng.randrange(1, 4))

    async def _check_end(self) -> None:
        driver, buffers = self.server.driver, self.server.buffers
        assert driver is not None
        assert buffers is not None
        await self.server.finish_calls()
        await driver.flush()
        self.server.check_alive()
        now = asyncio.get_running_loop().time()
        self.ledger.check_books(buffers, now)
        self.server.check_leases()
        twin = self.server.recovered_twin()
        for each in (twin, buffers):
            each.handle_timer(now=now)
        assert twin.snapshot() == buffers.snapshot(), "the journal tells another story"
        await asyncio.sleep(QUIET_S)
        await self._check_store()
        seen = driver.describe(DEFAULT_BUFFER)
        assert (seen.lease_count, seen.waiter_count) == (0, 0), "leases or waiters are left"
        buffers.check_invariants()
        self._check_accounts()

    async def _check_store(self) -> None:
        driver = self.server.driver
        assert driver is not None
        custodian = SimulatedCustodian(self.server.store, self.fates, -1)
        clock = SimulatedClock(asyncio.get_running_loop())
        reconciler = Reconciler(
            driver, custodian, clock=clock, metrics=METRICS, orphan_s=0.0, deletes_orphans=True
        )
        try:
            await reconciler.reconcile()
        except StoreError as error:
            raise AssertionError("a healed store failed") from error
        await driver.flush()
        known = {payload.payload_id for payload in driver.payloads(DEFAULT_BUFFER)}
        kept = self.server.store.confirmed
        assert known <= kept, f"in the books and not in the store: {sorted(known - kept)}"
        assert kept <= known, f"in the store and not in the books: {sorted(kept - known)}"

    def _check_accounts(self) -> None:
        """Every fragment that was admitted is accounted for."""
        assert self.server.driver is not None
        seen = self.server.driver.describe(DEFAULT_BUFFER)
        counters, size = seen.counters, seen.config.fragments_per_chunk
        gone = [n for name, n in counters.items() if name.startswith("chunks_evicted_")]
        given_up = [n for name, n in counters.items() if name.startswith("fragments_discarded_")]
        accounted = seen.open_fragment_count + size * (seen.chunk_count + sum(gone)) + sum(given_up)
        assert counters["fragments_admitted"] == accounted, "fragments left without a reason"
        assert counters["fragments_admitted"] >= len(self.ledger.admitted), "acknowledged and lost"


def replay_command(seed: int, variant_name: str = "real") -> str:
    """Say how to run one seed again."""
    return f"python tests/simulation --variant {variant_name} --seed {seed}"


def simulate(seed: int, variant: Variant | None = None) -> Outcome:
    """Run one seed; the same seed always comes to the same outcome."""
    simulation = Simulation(seed, variant or Variant())
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
        simulation.ended_at - 1000.0,
        simulation.kills,
        len(simulation.ledger.admitted),
        simulation.ledger.grant_count,
    )
