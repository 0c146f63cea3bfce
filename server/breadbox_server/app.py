"""Composition root: builds everything, and owns the order in which it starts and stops."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from breadbox import stores
from breadbox.stores.base import PayloadCustodian, PayloadParts
from breadbox.stores.urls import parse_store_url
from breadbox.v1 import replay_buffer_service_pb2, replay_buffer_service_pb2_grpc
from breadbox_server import limits
from breadbox_server.access.authorization import Gate, Role
from breadbox_server.access.tls import server_credentials
from breadbox_server.access.tokens import TokenFile
from breadbox_server.base.clock import Clock, LoopBeat, LoopClock
from breadbox_server.base.conversion import payload_of
from breadbox_server.base.errors import StartError
from breadbox_server.base.jobs import CLOSE_S_MAX, Jobs, with_time_limit
from breadbox_server.base.unforeseen import run_on
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.gateway.transfers import Gateway
from breadbox_server.journal.journal_state import check_standby, open_journal_state
from breadbox_server.journal.standby import Standby, outlasting
from breadbox_server.journal.storage.interface import JournalError
from breadbox_server.maintenance.reconciliation import Reconciler
from breadbox_server.maintenance.store_opening import (
    hold_directory,
    open_store,
    store_needed,
    told_of_silence,
)
from breadbox_server.metrics.clients import ClientCensus
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.metrics.port import metrics_served
from breadbox_server.rpc.health import Health
from breadbox_server.rpc.interceptors import CallInterceptor
from breadbox_server.rpc.leading import LeadershipStatus, Shutdown
from breadbox_server.rpc.listening import (
    PortConnections,
    bind,
    check_addresses,
    check_free,
    connections_max,
    server_options,
    shown_host,
)
from breadbox_server.rpc.service import ReplayBufferService
from breadbox_server.rpc.traffic import Traffic
from breadbox_server.settings import Settings, parse_address

SERVICE_NAME: Final = replay_buffer_service_pb2.DESCRIPTOR.services_by_name[
    "ReplayBufferService"
].full_name
HEALTH_NAME: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCHED_S_MIN: Final = 10.0
"""A standby that has known a store's start for longer need not compare with it: the leader has."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    address: str
    """As bound: a port of 0 has become the real one."""
    metrics_address: str
    """Empty if no metrics are served."""
    driver: Driver
    metrics: Metrics


@asynccontextmanager
async def serving(
    settings: Settings,
    *,
    custodian: PayloadCustodian | None = None,
    parts: PayloadParts | None = None,
    clock: Clock | None = None,
    leftovers: ExitStack | None = None,
    on_end: Callable[[], None] = lambda: None,
    on_standby: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[RunningServer]:
    """Run a server inside the block; drain it when the block ends.

    `custodian` and `parts` (gateway) are opened from the settings if None. `leftovers` gets what a
    process that ends early has to delete. `on_end` is called once, when the server begins to end;
    `on_standby` with the bound address once a standby answers, before the block begins.

    StartError says what, why and what to do. ExceptionGroup: a part failed, which is a bug.
    """
    async with AsyncExitStack() as opened:
        steps = _Steps(settings, opened)
        # What is cheap to find wrong comes first: nothing has been read, taken or changed yet,
        # least of all the journal of a server that runs.
        steps.check_settings()
        steps.read_credentials()
        steps.serve_metrics()
        await steps.open_store(custodian, leftovers or ExitStack())
        steps.build_server(on_end)
        with _one_line_errors():
            async with Jobs(steps.shutdown.fail) as jobs:
                steps.watch_callers(jobs)
                try:
                    # A standby answers health checks, and waits, inside this step.
                    await steps.open_journal(on_standby)
                    steps.build_driver(clock)
                    steps.build_service(parts)
                    if not settings.is_standby:
                        steps.listen()
                    await steps.start_driver(jobs)
                    await steps.lead(jobs)
                    yield RunningServer(
                        steps.address, steps.metrics_address, steps.driver, steps.metrics
                    )
                finally:
                    # What fails from here on must not cut the end short.
                    jobs.release_block()
                    await steps.shutdown.drain()


class _Steps:
    """The steps of a start, in order; `opened` is closed in reverse when the jobs have ended."""

    def __init__(self, settings: Settings, opened: AsyncExitStack) -> None:
        self.settings = settings
        self.opened = opened
        self.metrics = Metrics(CollectorRegistry())
        self.metrics_address = ""
        self.address = ""
        self._known_start = ("", inf)
        """The payload store's incarnation, and since when a standby has known it."""

    def check_settings(self) -> None:
        self.settings.check_store_password()
        check_standby(self.settings)
        check_addresses(self.settings)

    def read_credentials(self) -> None:
        settings, failures = self.settings, self.metrics.credential_reload_failures
        self.credentials: grpc.ServerCredentials | None = None
        self.tokens: TokenFile | None = None
        if settings.tls is not None:
            self.credentials = server_credentials(settings.tls, failures.inc)
        if settings.tokens is not None:
            self.tokens = tokens = TokenFile(settings.tokens, on_failure=failures.inc)
            self.metrics.know_tokens(tokens.names())
            self.metrics.tokens_usable.set_function(lambda: float(tokens.is_usable))

    def serve_metrics(self) -> None:
        if self.settings.metrics_listen:
            address = parse_address(self.settings.metrics_listen, "--metrics-listen")
            if address is None:
                raise StartError("--metrics-listen must be HOST:PORT")
            host, port = address
            check_free(host, port, "--metrics-listen")
            bound = self.opened.enter_context(metrics_served(host, port, self.metrics.registry))
            self.metrics_address = f"{shown_host(host)}:{bound}"

    async def open_store(self, custodian: PayloadCustodian | None, leftovers: ExitStack) -> None:
        with told_of_silence(f"--store {self.settings.store_shown}"):
            self.opened.enter_context(hold_directory(self.settings, leftovers))
            opened = await open_store(self.settings, custodian)
        self.custodian, self.concerns, self.settings = opened
        self.opened.push_async_callback(
            with_time_limit, self.custodian.close, CLOSE_S_MAX, "closing the store"
        )

    def build_server(self, on_end: Callable[[], None]) -> None:
        settings, metrics = self.settings, self.metrics
        census = ClientCensus(monotonic)
        for role in Role:
            metrics.clients.labels(role.value).set_function(partial(census.count, role))
        self.connections = PortConnections()
        room = connections_max(settings)
        self.traffic = Traffic(metrics, self.connections, room)
        self.interceptor = CallInterceptor(metrics, Gate(self.tokens), census, self.traffic)
        self.server = grpc.aio.server(interceptors=[self.interceptor], options=server_options(room))
        self.entrance = _Entrance()
        self.server.add_generic_rpc_handlers((self.entrance,))
        health = Health(("", SERVICE_NAME))
        health_pb2_grpc.add_HealthServicer_to_server(health, self.server)
        if settings.has_reflection:
            names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.server)
        has_others = settings.is_standby
        self.leading = LeadershipStatus(self.interceptor, health, metrics, has_others=has_others)
        self.shutdown = Shutdown(self.server, self.leading, settings.drain_grace_s, on_end)

    def watch_callers(self, jobs: Jobs) -> None:
        beat = LoopBeat()
        self.metrics.loop_lag_seconds.set_function(lambda: beat.lag_s)
        jobs.start(beat.run())
        jobs.start(run_on(self.traffic.run, "watching connections"))
        if tokens := self.tokens:

            def take_tokens() -> None:
                self.metrics.know_tokens(tokens.names())
                self.interceptor.recheck()

            jobs.start(run_on(partial(tokens.keep_fresh, take_tokens), "reading tokens again"))

    async def open_journal(self, on_standby: Callable[[str], None]) -> None:
        """Build the core from its journal; a standby follows it here until it leads."""

        async def stand_by(standby: Standby) -> None:
            self.leading.stand_by(standby)
            with store_needed(self.settings):
                self._known_start = (await self.custodian.incarnation(), monotonic())
            self.listen()
            await self.server.start()
            on_standby(self.address)

        rng = random.Random(self.settings.seed)
        self.journal = await self.opened.enter_async_context(
            open_journal_state(self.settings, rng, self.metrics, self.custodian, stand_by)
        )
        await self._ask_store(self._take_custody)

    async def _take_custody(self) -> None:
        if self.journal.journal is not None:
            # Confirm and delete on behalf of the journal from now on.
            await self.custodian.take(self.journal.journal.custody)
        if self.settings.deletes_orphans:
            await self.custodian.forget_other_journals()

    async def _ask_store(self, step: Callable[[], Awaitable[None]]) -> None:
        with store_needed(self.settings):
            await (outlasting(step, "beginning to lead") if self.settings.is_standby else step())

    def build_driver(self, clock: Clock | None) -> None:
        settings, journal = self.settings, self.journal
        self.clock = clock or LoopClock(asyncio.get_running_loop(), starts_at=journal.now)
        self.driver = Driver(
            journal.buffers,
            self.custodian,
            clock=self.clock,
            metrics=self.metrics,
            limits=DriverLimits(
                unowned_s=settings.unannounced_s,
                poison_after=settings.poison_after,
                inline_size_bytes_max=settings.inline_size_bytes_max,
                read_kept_bytes_max=settings.default_config.capacity_bytes // limits.READ_KEPT_PART,
            ),
            journal=journal.journal,
        )
        self.reconciler = Reconciler(
            self.driver,
            self.custodian,
            clock=self.clock,
            metrics=self.metrics,
            orphan_s=settings.unannounced_s,
            # A directory is locked, and a journal is fenced. A Redis without a journal may be
            # shared, with servers that know of other payloads.
            deletes_orphans=journal.journal is not None
            or bool(parse_store_url(settings.store).directory),
            is_asked=settings.deletes_orphans,
            let_go=journal.let_go,
        )

    def build_service(self, parts: PayloadParts | None) -> None:
        gateway = None
        if self.settings.has_gateway:
            gateway = self._open_gateway(parts)
            self.opened.callback(gateway.close)
        service = ReplayBufferService(
            self.driver,
            metrics=self.metrics,
            settings=self.settings,
            journal_epoch=lambda: self.journal.epoch,
            concerns=self.concerns,
            gateway=gateway,
        )
        replay_buffer_service_pb2_grpc.add_ReplayBufferServiceServicer_to_server(
            service, self.entrance
        )

    def _open_gateway(self, parts: PayloadParts | None) -> Gateway:
        settings, driver = self.settings, self.driver
        with store_needed(settings):
            parts = parts or stores.open_store(
                settings.store,
                unannounced_s=settings.unannounced_s,
                piece_size_bytes=limits.PART_BYTES,
            )
        gateway = Gateway(
            parts,
            driver.core.buffers,
            refers_to=driver.reading.refers_to,
            is_leased=driver.reading.leases.is_held_by,
            check_written=driver.appends.quotas.check_written,
            unannounced_s=settings.unannounced_s,
            unannounced_bytes_max=settings.gateway_unannounced_bytes,
            delete=lambda reference: driver.deletions.put([payload_of(reference)]),
            now=self.clock.now,
            metrics=self.metrics,
        )
        driver.appends.is_written_by_another = gateway.unannounced.is_anothers
        return gateway

    def listen(self) -> None:
        """Take the addresses; a server that has not started answers nobody there."""
        self.address = bind(self.server, self.settings, self.credentials)
        self.connections.listen_at(self.address)

    async def start_driver(self, jobs: Jobs) -> None:
        self.shutdown.driver = self.driver
        jobs.start(self.driver.run(self.shutdown.fail))
        self.driver.core.pump()
        incarnation, since = self._known_start
        has_watched = monotonic() - since >= WATCHED_S_MIN
        await self._ask_store(partial(self.reconciler.begin, incarnation if has_watched else ""))
        await self.driver.turns.settled()
        note = partial(asyncio.to_thread, self.journal.note_settings)
        await outlasting(note, "noting the settings beside the journal")

    async def lead(self, jobs: Jobs) -> None:
        jobs.start(run_on(self.reconciler.run, "comparing buffers and store"))
        if self.journal.compaction is not None:
            run = partial(self.journal.compaction.run, self.driver.turns.lose)
            jobs.start(run_on(run, "shortening the journal"))
        self.leading.begin(self.driver)
        jobs.start(self.driver.turns.watch_claim(self.leading.be_certain))
        if not self.settings.is_standby:
            await self.server.start()


class _Entrance(grpc.GenericRpcHandler):
    """Leads calls to the service once there is one: what the generated code adds a service to."""

    def __init__(self) -> None:
        self._handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, name: str, handlers: Any) -> None:
        """Ignore the handlers: a server on asyncio has no use for these."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handlers[0].service(details) if self._handlers else None


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raise what an operator can fix as a StartError, also when a task group has wrapped it."""
    try:
        yield
    except BaseExceptionGroup as group:
        fixable, rest = group.split((StartError, JournalError))
        if fixable is None or rest is not None:
            raise
        error: BaseException = fixable
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise StartError(str(error)) from error


def tune_garbage_collection() -> None:
    """Keep the cycle collector from stopping the loop; call before and after everything is built.

    A full collection with 10^6 fragments takes a second and finds nothing: what the core holds has
    no cycles. So none happens by itself, what stands at the start is frozen, and young objects are
    collected in portions of a few milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1_000_000)
