"""What can be set by flag, environment or file; nothing else in the server reads those."""

import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal

from breadbox.cli.logs import LogSettings
from breadbox.cli.settings import Bytes, setting
from breadbox.model.presets import PRESETS, Preset
from breadbox.stores import has_secret, redact
from breadbox.stores.urls import GATEWAY_URL, STORE_URLS
from breadbox_server.access.authorization import Role
from breadbox_server.access.tls import TlsFiles
from breadbox_server.base.errors import StartError
from breadbox_server.core.model.config import (
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunksConfig,
    SchemaPolicy,
)
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.samplers import SAMPLERS
from breadbox_server.limits import (
    BUFFERS_MAX,
    CONNECTIONS_MAX,
    INLINE_SIZE_BYTES_CHOICE_MAX,
    INLINE_SIZE_BYTES_MAX,
    UNANNOUNCED_BYTES_MAX,
)

_DEFAULTS: Final = BufferConfig()
_Sampler = Literal[*SAMPLERS]  # type: ignore[valid-type]  # to mypy: any
_OPTIONS: Final = {"limiter.chunk_count": "minimum_chunks"}
"""Names of limits on the command line, where they are not the limits' own."""


def default_store_url(*, is_ephemeral: bool) -> str:
    """Return a directory of this user in shared memory, or else the temporary folder.

    One that is ephemeral is this process's own.
    """
    shared_memory = Path("/dev/shm")
    parent = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    name = f"breadbox-{os.getuid()}"
    return f"file://{parent / (f'{name}-{os.getpid()}' if is_ephemeral else name)}"


class Settings(LogSettings):
    """One server's settings. `repr` hides URLs with passwords."""

    presets = PRESETS

    listen: str = setting("127.0.0.1:50051", metavar="HOST:PORT")
    """Where to answer calls: HOST:PORT, [IPV6]:PORT or unix:PATH; port 0 takes a free one."""
    store: str = setting(
        "",
        secret=True,
        metavar="URL",
        shown="a directory in /dev/shm",
        description=f"Payload store: {', '.join(STORE_URLS)}.",
    )
    client_store: str = setting("", secret=True, metavar="URL")
    """Payload store as clients are told it, with their own credentials; default: --store. Needed
    with --tokens where --store has a password."""
    viewer_store: str = setting("", secret=True, metavar="URL")
    """Payload store for clients of the role viewer, with a user that may read alone; default:
    --client-store."""
    shares_store_password: bool = setting(False, option="share_store_password")
    """Tell every client with a token the password in --store; it may then read and delete all
    payloads and the journal."""
    has_gateway: bool = setting(False, option="gateway")
    """Move payloads through this server, so that clients need neither a way to the store nor its
    password: all clients or, with --client-store, those that show the token of a producer."""
    gateway_unannounced_bytes: Bytes = setting(
        UNANNOUNCED_BYTES_MAX, option="gateway_unannounced", ge=0
    )
    """Bytes that a token may have written through the gateway and not announced yet; also the
    largest payload there."""
    tls_cert: Path | None = None
    """PEM with the server's certificate chain; turns TLS on. Read again when it changes."""
    tls_key: Path | None = None
    """PEM with its private key."""
    tls_client_ca: Path | None = None
    """PEM; every client must show a certificate that this authority has signed."""
    allow_plaintext: bool = False
    """Talk to other machines without encryption, and without --tokens let everybody there do
    everything; for networks that are trusted."""
    allow_anonymous: bool = False
    """Let everybody on other machines do everything, without --tokens or --tls-client-ca."""
    tokens: Path | None = None
    """File of known bearer tokens (breadbox token makes them). Read again when it changes."""
    local_socket: Path | None = None
    """Unix socket for this user alone that answers too, unencrypted; for probes and tools."""
    metrics_listen: str = setting("", metavar="HOST:PORT")
    """Where to serve metrics for Prometheus over HTTP; nothing serves none."""
    preset: Preset | None = None
    """Limits for a kind of learner; what is given besides wins. on-policy: staleness-max 2,
    uses-max 1, sampler uniform, full-policy evict, remover oldest_first. off-policy: staleness-max
    and uses-max without end, capacity-chunks 65536, schema ragged. prioritised: the same with
    sampler prioritised, priority-exponent 0.6. queue: staleness-max without end, uses-max 1,
    full-policy block, sampler oldest_first. stack: the same with sampler newest_first."""
    fragments_per_chunk: int = _DEFAULTS.fragments_per_chunk
    """Consecutive fragments of one worker that are fetched, used and evicted together. This and
    what follows are the limits of every buffer that asks for no others."""
    capacity_chunks: int = _DEFAULTS.capacity_chunks
    """Chunks held for fetches; beyond, --full-policy decides."""
    capacity_bytes: Bytes = _DEFAULTS.capacity_bytes
    """Payload bytes held, such as 8GiB; beyond, --full-policy decides. With a file:// store at most
    half of its file system, of one over 1 GiB all but 512 MiB."""
    staleness_max: int = _DEFAULTS.staleness_max
    """Model versions that data may lag behind; what is staler is evicted."""
    uses_max: int = _DEFAULTS.uses_max
    """Deliveries of a chunk, then it leaves."""
    full_policy: FullPolicy = _DEFAULTS.full_policy
    """When there is no room: evict chunks, or let producers wait."""
    remover: _Sampler = setting(_DEFAULTS.remover, metavar="NAME")
    """Which chunks are evicted when there is no room, by a name as of --sampler; a new one may be
    among them."""
    schema_policy: SchemaPolicy = setting(_DEFAULTS.schema, option="schema")
    """Fragments of a session must have the same arrays and as many steps, or the same arrays alone
    (ragged), or neither (any)."""
    lease_expiry_policy: LeaseExpiryPolicy = _DEFAULTS.lease_expiry_policy
    """Chunks of an expired lease go back for another fetch, or count as used."""
    lease_s: float = _DEFAULTS.lease_s
    """Seconds a lease lives unrenewed."""
    open_chunk_s: float = _DEFAULTS.open_chunk_s
    """Seconds of silence after which a worker's unfinished chunk is discarded."""
    waiters_max: int = _DEFAULTS.waiters_max
    """Fetches that may wait at a time; the next is told to come back."""
    leases_max: int = _DEFAULTS.leases_max
    """Leases alive at a time; then fetches wait."""
    workers_max: int = _DEFAULTS.workers_max
    """Workers (environments) remembered in a session; one more is refused."""
    sampler: _Sampler = setting(
        _DEFAULTS.sampler,
        metavar="NAME",
        description=f"Which chunks a fetch gets: {', '.join(SAMPLERS)}.",
    )
    priority_exponent: float = _DEFAULTS.priority_exponent
    """Power, from 0 to 8, to which prioritised raises priorities; 0: all that are over 0 alike."""
    with_replacement: bool = _DEFAULTS.with_replacement
    """Whether a fetch may get a chunk several times, each of which is a use."""
    minimum_chunks: int = 1
    """A fetch waits until so many chunks are held."""
    buffers_max: int = setting(BUFFERS_MAX, ge=1, le=4096)
    """Named buffers there may be; one more is refused."""
    connections_max: int = setting(CONNECTIONS_MAX, ge=1, le=1_000_000)
    """Connections there may be on an address; one more is closed at once. Fewer where the process
    may not open so many files."""
    unannounced_s: float = setting(600.0, ge=1, le=86_400)
    """Seconds that a payload lives before it is announced."""
    poison_after: int = setting(2, ge=1, le=1_000_000)
    """Readers that cannot read a chunk, after which it is quarantined: served no more, counted, and
    named by `breadbox explain`."""
    piece_size_bytes: Bytes = setting(0, option="piece_size", ge=0)
    """Advice to writers how to cut payloads; 0: as the store thinks best."""
    inline_size_bytes_max: Bytes = setting(
        INLINE_SIZE_BYTES_MAX, option="inline_size_max", ge=0, le=INLINE_SIZE_BYTES_CHOICE_MAX
    )
    """Payloads of up to so many bytes travel with appends and fetches, through this server, which
    writes and reads them; 0: none do, and all clients need the store. Those that are told a file://
    store write and read there in any case: it is nearer."""
    drain_grace_s: float = setting(5.0, ge=0, le=3600)
    """Seconds that running calls get to end on SIGTERM."""
    has_reflection: bool = setting(True, option="reflection")
    """Whether tools such as grpcurl may ask which calls there are."""
    journal: str = setting("auto", secret=True, metavar="URL")
    """Where decisions are made durable: auto (beside the payloads), none, a Redis, file:///DIR."""
    takes_over: bool = setting(False, option="take_over")
    """Take a journal in Redis (from a directory none is displaced) from a server that lives; that
    one ends. Without it, this one starts once the other has ended or shown no sign of life for
    1 s, else refuses to."""
    is_standby: bool = setting(False, option="standby")
    """Follow the journal, in Redis, of a server that leads, and go on in its place when it ends or
    has shown no sign of life for 1 s; with nobody there, lead at once. Give all servers of a
    journal this option: whichever comes first leads."""
    deletes_orphans: bool = setting(False, option="delete_orphans")
    """Delete payloads that no buffer knows however many they are, and although other journals have
    kept payloads in this store: where those are gone."""
    accepts_store: bool = setting(False, option="accept_store")
    """Take another --store than the journal's, in which that has nothing: what the journal knows
    and the store lacks is given up as lost. Without it, such a start is refused."""
    has_journal_sync: bool = setting(False, option="journal_sync")
    """Whether a journal in SQLite must survive the machine, not only the process."""
    snapshot_entries: int = setting(30_000, ge=100)
    """Entries in the journal after which it is made shorter."""
    is_ephemeral: bool = setting(False, option="ephemeral")
    """Delete the directory of a file:// store when the server has stopped. Without --store, one is
    made for this server alone."""
    ready_file: Path | None = None
    """File that gets the bound address once the server answers; deleted when it ends."""
    seed: int | None = None
    """Seed of all random choices, or None for a fresh one."""

    def model_post_init(self, context: Any) -> None:
        """Choose a store where none is given, and see that no setting contradicts another."""
        del context
        if not self.store:
            url = default_store_url(is_ephemeral=self.is_ephemeral)
            object.__setattr__(self, "store", url)
        # What these are made of may contradict each other.
        _ = self.default_config, self.tls

    @property
    def default_config(self) -> BufferConfig:
        """Return limits of the buffer `default`, and of new buffers where nothing else is given."""
        limits = self.chosen(each.name for each in fields(BufferConfig))
        try:
            return BufferConfig(limiter=MinimumChunksConfig(self.minimum_chunks), **limits)
        except InvalidArgumentError as error:
            name = _OPTIONS.get(error.field, error.field)
            option = "--" + name.replace("_", "-")
            raise StartError(f"{option} {error.problem}; see breadbox serve --help") from error

    @property
    def tls(self) -> TlsFiles | None:
        """Return certificates, or None if calls are not encrypted; both files, or StartError."""
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise StartError("--tls-cert and --tls-key go together; give both")
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def check_store_password(self) -> None:
        """Refuse roles that are void because all clients learn the server's own password.

        Without tokens there are no roles: every caller is an administrator.
        """
        is_told = not (self.client_store or self.has_gateway)
        if self.tokens is None or self.shares_store_password or not is_told:
            return
        if has_secret(self.store):
            raise StartError(
                "every client with a token would be told the server's own password of --store; "
                "give --client-store, the URL with a user for clients (SECURITY.md has its "
                "commands), --gateway, so that nobody needs one, or --share-store-password"
            )

    def store_told(self, role: Role) -> str:
        """Return the URL that clients of a role are told."""
        if role is Role.VIEWER and self.viewer_store:
            return self.viewer_store
        is_trusted = role in (Role.LEARNER, Role.ADMIN)
        if self.has_gateway and not (is_trusted and self.client_store):
            return GATEWAY_URL
        return self.client_store or self.store

    def inline_size_told(self, role: Role) -> int:
        """Return the bytes up to which a payload is inline in calls of a role; 0: none is."""
        is_nearer = self.store_told(role).startswith("file:")
        return 0 if is_nearer else self.inline_size_bytes_max

    @property
    def store_shown(self) -> str:
        """The store's URL without its password, for people and logs."""
        return redact(self.store)


def parse_address(text: str, option: str) -> tuple[str, int] | None:
    """Split HOST:PORT or [IPV6]:PORT; return None for unix:PATH."""
    if text.startswith("unix:"):
        return None
    host, colon, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port_text.isascii() and port_text.isdigit()):
        raise StartError(f"{option} is {text!r}, which is not HOST:PORT; try 127.0.0.1:50051")
    port = int(port_text)
    if port > 65_535:
        raise StartError(f"{option} names port {port}; ports go up to 65535")
    return host, port
