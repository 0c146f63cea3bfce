"""Composition root: builds everything, and owns the order in which it starts and stops."""

import asyncio
import fcntl
import gc
import logging
import random
import resource
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from breadbox import __version__
from breadbox.model.errors import StoreError, StoreUrlError
from breadbox.stores import open_custodian, open_parts
from breadbox.stores.base import PayloadCustodian, PayloadParts
from breadbox.stores.disk import MIB, UnsafePathError, make_private_directory, opener
from breadbox.stores.urls import parse_store_url, redact
from breadbox.v1 import replay_buffer_service_pb2, replay_buffer_service_pb2_grpc
from breadbox_server import limits
from breadbox_server.access.authorization import Gate, Role
from breadbox_server.access.tls import server_credentials
from breadbox_server.access.tokens import TokenFile
from breadbox_server.base.clock import Clock, LoopClock
from breadbox_server.base.conversion import payload_of
from breadbox_server.base.errors import StartError
from breadbox_server.base.jobs import CLOSE_S_MAX, Jobs, bounded
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.gateway.transfers import Gateway
from breadbox_server.journal.journal_state import JournalState, check_standby, open_journal_state
from breadbox_server.journal.standby import Standby
from breadbox_server.journal.storage.interface import JournalError
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.limits import READ_KEPT_PART
from breadbox_server.maintenance.reconciliation import Reconciler
from breadbox_server.metrics.clients import ClientCensus
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.metrics.port import metrics_served
from breadbox_server.rpc.connections import PortConnections
from breadbox_server.rpc.health import Health
from breadbox_server.rpc.interceptors import CallInterceptor
from breadbox_server.rpc.leading import Leading
from breadbox_server.rpc.listening import bind, bound_port, check_addresses, check_free
from breadbox_server.rpc.service import ReplayBufferService, StoreAdvice
from breadbox_server.rpc.traffic import Traffic
from breadbox_server.settings import Settings, parse_address

log = logging.getLogger(__name__)

SERVICE_NAME: Final = replay_buffer_service_pb2.DESCRIPTOR.services_by_name[
    "ReplayBufferService"
].full_name
HEALTH_NAME: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
STOP_S_MAX: Final = 2.0
"""Seconds beyond the grace in which gRPC has to cut off the calls that are left."""
WATCHED_S_MIN: Final = 10.0
"""Seconds in which a server that leads has compared its books with a store that was started again:
a standby that has known that start for longer need not do so before it serves."""
FLUSH_S_MAX: Final = 5.0
"""Seconds that the last deletions may take; what is left is deleted at the next start."""


def _ms(span_s: float) -> int:
    return round(span_s * 1000)


def _server_options() -> tuple[tuple[str, int], ...]:
    return (
        # Two servers must not share a port unseen, which gRPC allows by default.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
        # The prepared list of a fetch of 10^5 fragments is about 30 MiB.
        ("grpc.max_send_message_length", 64 * 2**20),
        ("grpc.max_metadata_size", limits.METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", limits.METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", limits.STREAMS_MAX),
        # What comes of a request unasked for; not more because a connection is fast.
        ("grpc.http2.lookahead_bytes", limits.WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server.max_pending_requests", limits.UNASKED_MAX),
        ("grpc.server.max_pending_requests_hard_limit", limits.UNASKED_MAX_HARD),
        ("grpc.max_connection_idle_ms", _ms(limits.IDLE_S)),
        ("grpc.max_connection_age_ms", _ms(limits.AGE_S)),
        ("grpc.max_connection_age_grace_ms", _ms(limits.AGE_GRACE_S)),
        ("grpc.keepalive_time_ms", _ms(limits.KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(limits.KEEPALIVE_ANSWER_S)),
        # gRPC's default would hang up on clients that ping while a fetch blocks.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _ms(limits.PING_INTERVAL_S_MIN)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", _ms(limits.HANDSHAKE_S)),
    )


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    address: str
    """As bound: a port of 0 has become the real one."""
    metrics_address: str
    """Empty: no metrics are served."""
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

    Args:
        settings: What to run.
        custodian: The payload store; None: opened from the settings.
        parts: The same, for the gateway, if there is one.
        clock: Where instants come from; None: the loop's.
        leftovers: Gets what is to be deleted by whoever ends the process without ending the block.
        on_end: Called once, as soon as the server begins to end, for whatever reason.
        on_standby: Called with the bound address once a standby answers, which is before the block
            begins: that is when it leads.

    Raises:
        StartError: Something that the settings name cannot be used; says what, why, what to do.
        ExceptionGroup: A part of the server failed, which is a bug; the block was cancelled.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics(CollectorRegistry())
        # What is cheap to find wrong first: nothing has been read, taken or changed yet, least of
        # all the journal of a server that runs.
        settings.check_store_password()
        check_standby(settings)
        check_addresses(settings)
        credentials = _credentials(settings, metrics)
        tokens = _read_tokens(settings, metrics)
        metrics_address = stack.enter_context(_metrics_served(settings, metrics))
        stack.enter_context(_store_directory(settings, leftovers or ExitStack()))
        custodian = await _open_store(settings, custodian)
        concerns = await _concerns(settings, custodian)
        stack.push_async_callback(bounded, custodian.close, CLOSE_S_MAX, "closing the store")
        settings = await _fitted(settings, custodian)
        seed = settings.seed if settings.seed is not None else random.SystemRandom().getrandbits(64)
        rng = random.Random(seed)
        census = ClientCensus((clock or LoopClock(asyncio.get_running_loop())).now)
        for role in Role:
            metrics.clients.labels(role.value).set_function(partial(census.count, role))
        connections_max = _connections_max(settings)
        connections = PortConnections()
        traffic = Traffic(metrics, connections, connections_max)
        interceptor = CallInterceptor(metrics, Gate(tokens), census, traffic=traffic)
        health = Health(("", SERVICE_NAME))
        leading = Leading(interceptor, health, metrics, has_others=settings.is_standby)
        entrance = _Entrance()
        server = _build_server(settings, interceptor, health, entrance, connections_max)

        ending = _Ending(server, leading, settings.drain_grace_s, on_end)

        address = ""
        watched = _Watched()

        def listen() -> None:
            nonlocal address
            address = bind(server, settings, credentials)
            connections.port = bound_port(address)

        async def stand_by(standby: Standby) -> None:
            """Answer those who ask for health, and tell all others that another server leads."""
            leading.stand_by(standby)
            await watched.begin(custodian)
            listen()
            await server.start()
            on_standby(address)

        with _one_line_errors():
            async with Jobs(ending.fail) as jobs:
                jobs.start(traffic.run())
                if tokens:
                    jobs.start(
                        tokens.keep_fresh(partial(_take_tokens, tokens, metrics, interceptor))
                    )
                try:
                    books = await stack.enter_async_context(
                        open_journal_state(settings, rng, metrics, custodian, stand_by)
                    )
                    await _take_store(custodian, settings, books)
                    clock = clock or LoopClock(asyncio.get_running_loop(), starts_at=books.now)
                    driver = _build_driver(settings, books, custodian, clock, metrics)
                    reconciler = Reconciler(
                        driver,
                        custodian,
                        clock=clock,
                        metrics=metrics,
                        orphan_s=settings.unannounced_s,
                        deletes_orphans=_is_alone(settings, books),
                        is_asked=settings.deletes_orphans,
                        let_go=books.let_go,
                    )
                    gateway = _open_gateway(settings, driver, clock, metrics, parts)
                    if gateway is not None:
                        stack.callback(gateway.close)
                    service = _build_service(settings, driver, metrics, gateway, books, concerns)
                    entrance.lead_to(service)
                    if not settings.is_standby:
                        listen()
                    ending.driver = driver
                    jobs.start(driver.run(ending.fail))
                    await _open_books(driver, reconciler, books, watched.incarnation())
                    jobs.start(reconciler.run())
                    if books.compaction is not None:
                        jobs.start(books.compaction.run(driver.turns.lose))
                    leading.begin(driver)
                    jobs.start(driver.turns.watch_claim(leading.be_certain))
                    if not settings.is_standby:
                        await server.start()
                    yield RunningServer(address, metrics_address, driver, metrics)
                finally:
                    # What fails from here on must not cut the end short.
                    jobs.release_block()
                    await ending.drain()


def _build_driver(
    settings: Settings,
    books: JournalState,
    custodian: PayloadCustodian,
    clock: Clock,
    metrics: Metrics,
) -> Driver:
    return Driver(
        books.buffers,
        custodian,
        clock=clock,
        metrics=metrics,
        limits=DriverLimits(
            unowned_s=settings.unannounced_s,
            poison_after=settings.poison_after,
            inline_size_bytes_max=settings.inline_size_bytes_max,
            read_kept_bytes_max=settings.default_config.capacity_bytes // READ_KEPT_PART,
        ),
        journal=books.journal,
    )


class _Entrance(grpc.GenericRpcHandler):
    """Leads calls to a service that there may be only once a server answers already."""

    def __init__(self) -> None:
        self._handlers: list[Any] = []

    def lead_to(self, service: ReplayBufferService) -> None:
        """Lead calls there from now on."""
        replay_buffer_service_pb2_grpc.add_ReplayBufferServiceServicer_to_server(service, self)

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Of the server that the generated code takes this for."""
        self._handlers += handlers

    def add_registered_method_handlers(self, name: str, handlers: Any) -> None:
        """The same; one that runs on asyncio has no use for these."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call; None: the method is of nobody."""
        found = (handler.service(details) for handler in self._handlers)
        return next((each for each in found if each is not None), None)


class _Ending:
    """How a server ends: in order, each step bounded; what is cut short the next start mends.

    Args:
        server: Answers calls.
        leading: Says that they are not answered any more.
        grace_s: Seconds that running calls get to end.
        on_end: Called once, when the end begins.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        leading: Leading,
        grace_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._server = server
        self._leading = leading
        self.driver: Driver | None = None
        """Finishes what was begun; None: nothing was."""
        self._grace_s = grace_s
        self._on_end = on_end
        self._has_begun = False
        self._has_failed = False

    def fail(self, error: BaseException) -> None:
        """Say at once that, and why, the server does not serve any more; a job cannot go on."""
        if not self._has_failed:
            self._has_failed = True
            if isinstance(error, JournalError | StartError):
                log.error("ending: %s", error)
            else:
                log.error("ending, which is a bug", exc_info=error)
            self._begin()

    def _begin(self) -> None:
        """What takes no time, and happens at once. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            self._leading.end()
            self._on_end()

    async def drain(self) -> None:
        """Refuse what is new, end what runs, write down and delete what is left.

        Of a server that failed nothing can become durable any more: who waits for that is cut off
        at once.
        """
        driver = self.driver
        if driver is None:
            # Nobody was served: what the start has begun ends with it, and no end is watched.
            self._leading.end()
            await bounded(partial(self._server.stop, 0.0), STOP_S_MAX, "ending the server")
            return
        log.info("draining")
        self._begin()
        driver.drain()
        grace_s = 0.0 if self._has_failed else self._grace_s
        await bounded(
            partial(self._server.stop, grace_s), grace_s + STOP_S_MAX, "ending the calls that run"
        )
        if not self._has_failed:
            await bounded(driver.flush, FLUSH_S_MAX, "writing down and deleting what is left")
        if left := len(driver.deletions):
            log.warning("%d payloads are left for deletion", left)
        log.info("stopped")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Tell what an operator can mend as a StartError, also when a task group has wrapped it.

    Raises:
        StartError: Nothing else went wrong than what an operator can mend.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        mendable, rest = group.split((StartError, JournalError))
        if mendable is None or rest is not None:
            raise
        error: BaseException = mendable
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise StartError(str(error)) from error


class _Watched:
    """Which start of the payload store a standby has known for long enough."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._since = inf

    async def begin(self, custodian: PayloadCustodian) -> None:
        """Take note of it.

        Raises:
            StartError: The store does not answer.
        """
        try:
            self._incarnation = await custodian.incarnation()
        except StoreError as error:
            raise StartError(f"--store stopped answering: {error}; start again") from error
        self._since = monotonic()

    def incarnation(self) -> str:
        """Empty: not for so long that who led has certainly compared books and store since."""
        return self._incarnation if monotonic() - self._since >= WATCHED_S_MIN else ""


async def _open_books(
    driver: Driver, reconciler: Reconciler, books: JournalState, watched: str = ""
) -> None:
    """Bring the books up to date before anybody is served.

    Args:
        driver: Their owner.
        reconciler: Compares them with the store.
        books: As they were opened.
        watched: See `Reconciler.begin`.

    Raises:
        StartError: The store went away meanwhile.
    """
    driver.core.pump()
    try:
        await reconciler.begin(watched)
    except StoreError as error:
        raise StartError(f"--store stopped answering: {error}; start again") from error
    await driver.turns.settled()
    books.note_settings()


def _is_alone(settings: Settings, books: JournalState) -> bool:
    """Whether nobody but this server can know of a payload in the store.

    A directory is locked, and the journal is fenced; a Redis without a journal may be shared.
    """
    return books.journal is not None or parse_store_url(settings.store).kind == "file"


def _credentials(settings: Settings, metrics: Metrics) -> grpc.ServerCredentials | None:
    """The certificates to show; None: calls are not encrypted."""
    if settings.tls is None:
        return None
    return server_credentials(settings.tls, metrics.credential_failures.inc)


def _read_tokens(settings: Settings, metrics: Metrics) -> TokenFile | None:
    """The tokens that are known; None: nobody is asked for one."""
    if settings.tokens is None:
        return None
    tokens = TokenFile(settings.tokens, on_failure=metrics.credential_failures.inc)
    metrics.know_tokens(tokens.names())
    metrics.tokens_usable.set_function(lambda: float(tokens.is_usable))
    return tokens


def _open_gateway(
    settings: Settings,
    driver: Driver,
    clock: Clock,
    metrics: Metrics,
    parts: PayloadParts | None,
) -> Gateway | None:
    """What moves payloads, where the settings want it.

    Raises:
        StartError: The store went away meanwhile.
    """
    if not settings.has_gateway:
        return None
    try:
        parts = parts or open_parts(
            settings.store,
            unannounced_s=settings.unannounced_s,
            piece_size_bytes=limits.PART_BYTES,
        )
    except StoreError as error:
        raise StartError(f"--store stopped answering: {error}; start again") from error
    gateway = Gateway(
        parts,
        driver.core.buffers,
        refers_to=driver.reading.refers_to,
        check_written=driver.appends.quotas.check_written,
        unannounced_s=settings.unannounced_s,
        unannounced_bytes_max=settings.gateway_unannounced_bytes,
        delete=lambda reference: driver.deletions.put([payload_of(reference)]),
        now=clock.now,
        metrics=metrics,
    )
    driver.appends.is_written_by_another = gateway.unannounced.is_anothers
    return gateway


def _take_tokens(tokens: TokenFile, metrics: Metrics, interceptor: CallInterceptor) -> None:
    """Go by other tokens than before."""
    metrics.know_tokens(tokens.names())
    interceptor.recheck()


def _build_server(
    settings: Settings,
    interceptor: CallInterceptor,
    health: Health,
    entrance: _Entrance,
    connections_max: int,
) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[interceptor],
        options=(
            *_server_options(),
            ("grpc.max_allowed_incoming_connections", connections_max),
        ),
    )
    server.add_generic_rpc_handlers((entrance,))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if settings.has_reflection:
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return server


def _build_service(
    settings: Settings,
    driver: Driver,
    metrics: Metrics,
    gateway: Gateway | None,
    books: JournalState,
    concerns: Sequence[str],
) -> ReplayBufferService:
    return ReplayBufferService(
        driver,
        metrics=metrics,
        store_advice=StoreAdvice(
            url=settings.store_told(is_producer=False),
            producers_url=settings.store_told(is_producer=True),
            unannounced_s=settings.unannounced_s,
            piece_size_bytes=settings.piece_size_bytes,
            inline_size_bytes_max=settings.inline_size_told(is_producer=False),
            producers_inline_size_bytes_max=settings.inline_size_told(is_producer=True),
            server_version=__version__,
            journal_epoch=lambda: books.epoch,
            concerns=concerns,
        ),
        default_config=settings.default_config,
        gateway=gateway,
    )


def _connections_max(settings: Settings) -> int:
    """What was asked for, less where the open files of this process do not suffice for it.

    At the limit of open files the server could neither close a connection that is one too many
    nor reach the store.
    """
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files_max == resource.RLIM_INFINITY:
        return settings.connections_max
    address_count = 1 if settings.local_socket is None else 2
    room = max(1, (files_max - limits.RESERVED_FILES) // address_count)
    if room < settings.connections_max:
        log.warning(
            "%d open files leave room for %d connections instead of %d (--connections-max); "
            "raise the limit (ulimit -n, LimitNOFILE)",
            files_max,
            room,
            settings.connections_max,
        )
    return min(room, settings.connections_max)


@contextmanager
def _metrics_served(settings: Settings, metrics: Metrics) -> Iterator[str]:
    """Serve the metrics over HTTP inside the block; yields the bound address, or nothing."""
    if not settings.metrics_listen:
        yield ""
        return
    address = parse_address(settings.metrics_listen, "--metrics-listen")
    if address is None:
        raise StartError("--metrics-listen must be HOST:PORT")
    host, port = address
    check_free(host, port, "--metrics-listen")
    with metrics_served(host, port, metrics.registry) as bound:
        yield f"{host}:{bound}"


async def _open_store(settings: Settings, custodian: PayloadCustodian | None) -> PayloadCustodian:
    """Open the payload store and see that it answers.

    Raises:
        StartError: The URL is malformed or the store does not answer.
    """
    try:
        if custodian is None:
            custodian = open_custodian(settings.store, unannounced_s=settings.unannounced_s)
        await custodian.ping()
    except StoreUrlError as error:
        raise StartError(f"--store cannot be used: {error}") from error
    except StoreError as error:
        if custodian is not None:
            await custodian.close()
        raise StartError(
            f"--store {settings.store_shown} does not answer: {error}; "
            "start it, or give another URL, with user and password where it asks for them"
        ) from error
    return custodian


async def _concerns(settings: Settings, custodian: PayloadCustodian) -> list[str]:
    """Warn of settings under which store or journal may lose what they have; also returned.

    Raises:
        StartError: One of them does not answer any more.
    """
    try:
        found = [f"--store {settings.store_shown}: {each}" for each in await custodian.concerns()]
    except StoreError as error:
        raise _cannot_use(settings, error) from error
    # A journal that cannot be used is refused by its own start.
    with suppress(StoreUrlError, StoreError):
        place = JournalPlace.choose(settings.journal, settings.store)
        if place is not None and place.is_shared and place.where != settings.store:
            async with AsyncExitStack() as stack:
                journal = open_custodian(place.where)
                stack.push_async_callback(journal.close)
                shown = redact(place.where)
                found += [f"--journal {shown}: {each}" for each in await journal.concerns()]
    for each in found:
        log.warning("%s", each)
    return found


async def _take_store(custodian: PayloadCustodian, settings: Settings, books: JournalState) -> None:
    """Confirm and delete on behalf of the journal from now on.

    Raises:
        StartError: The store does not answer, or another server has taken over meanwhile.
    """
    try:
        if books.journal is not None:
            await custodian.take(books.journal.custody)
        if settings.deletes_orphans:
            await custodian.forget_other_journals()
    except StoreError as error:
        raise _cannot_use(settings, error) from error


@contextmanager
def _store_directory(settings: Settings, leftovers: ExitStack) -> Iterator[None]:
    """Hold a `file://` store for this server alone; delete it afterwards if it is ephemeral.

    An ephemeral one is put among the leftovers as well: it goes however the process ends.

    Raises:
        StartError: Another server uses it, or it is to be ephemeral and is not empty.
    """
    try:
        parsed = parse_store_url(settings.store)
    except StoreUrlError as error:
        raise StartError(f"--store cannot be used: {error}") from error
    if parsed.kind != "file":
        if settings.is_ephemeral:
            raise StartError("--ephemeral is for file:// stores; leave it out")
        yield
        return
    directory = Path(parsed.directory)
    try:
        if settings.is_ephemeral and directory.exists() and any(directory.iterdir()):
            raise StartError(
                f"--ephemeral would delete {directory}, which is not empty; "
                "name a new directory, or delete it"
            )
        make_private_directory(directory, has_parents=True)
        lock = open(directory / "server.lock", "w", opener=opener)  # noqa: SIM115 - held below
    except UnsafePathError as error:
        raise StartError(f"--store cannot be used: {error.strerror}") from error
    except OSError as error:
        raise StartError(
            f"--store {settings.store_shown} cannot be used: {error.strerror}; "
            "give a directory that this user may write"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartError(
                f"--store {settings.store_shown} is in use by another server; stop that one (which "
                "--take-over cannot displace from a directory) or give another directory"
            ) from error
        if settings.is_ephemeral:
            leftovers.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            yield
        finally:
            if settings.is_ephemeral:
                shutil.rmtree(directory, ignore_errors=True)


async def _fitted(settings: Settings, custodian: PayloadCustodian) -> Settings:
    """Promise no buffer more bytes than the store can hold.

    Raises:
        StartError: The store does not answer any more.
    """
    try:
        usage = await custodian.usage()
    except StoreError as error:
        raise _cannot_use(settings, error) from error
    fitting = usage.capacity_bytes_max
    if not fitting or settings.capacity_bytes <= fitting:
        return settings
    log.warning(
        "--capacity-bytes is %.0f MiB, and the store takes %.0f in all: buffers hold %.0f MiB; "
        "for more, give Redis more maxmemory, or a directory a larger file system (docker run "
        "--shm-size)",
        settings.capacity_bytes / MIB,
        usage.limit_bytes / MIB,
        fitting / MIB,
    )
    return settings.model_copy(update={"capacity_bytes": fitting})


def _cannot_use(settings: Settings, error: StoreError) -> StartError:
    return StartError(f"--store {settings.store_shown} cannot be used: {error}; start again")


def tune_garbage_collection() -> None:
    """Keep the cycle collector from stopping the loop; call before and after everything is built.

    A full collection looks at every object held: with 10^6 fragments that is about a second in
    which nobody is answered, and it finds nothing, because what the core holds has no cycles and
    is freed by reference count. So full collections do not happen by themselves, what stands at
    the start is never looked at, and young objects are collected in portions of a few milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1_000_000)
