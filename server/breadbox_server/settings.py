"""Define the server's settings; only this module reads flags, environment and settings file."""

import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal

from breadbox.cli.limits import BufferLimits
from breadbox.cli.logs import LogSettings
from breadbox.cli.settings import Bytes, setting
from breadbox.model.presets import Preset
from breadbox.shared.loopback import loopback_host
from breadbox.stores import has_secret, redact
from breadbox.stores.urls import GATEWAY_URL, STORE_URLS
from breadbox_server.access.authorization import Role
from breadbox_server.access.tls import TlsFiles
from breadbox_server.base.errors import StartError
from breadbox_server.core.model.config import (
    AssemblyPolicy,
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunksConfig,
    SchemaPolicy,
    StalePolicy,
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
"""Option names of limits that are not named after their field."""


def default_store_url(*, is_ephemeral: bool) -> str:
    """Return the URL of this user's directory in shared memory, or else in the temporary folder.

    An ephemeral directory belongs to this process alone.
    """
    shared_memory = Path("/dev/shm")
    parent = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    name = f"breadbox-{os.getuid()}"
    return f"file://{parent / (f'{name}-{os.getpid()}' if is_ephemeral else name)}"


class Settings(LogSettings, BufferLimits):
    """One server's settings. `repr` hides URLs with passwords."""

    listen: str = setting(f"{loopback_host()}:50051", metavar="HOST:PORT")
    """Where to answer calls: HOST:PORT, [IPV6]:PORT or unix:PATH; port 0 takes a free one."""
    store: str = setting(
        "",
        secret=True,
        metavar="URL",
        shown="a directory in /dev/shm",
        description=f"Payload store: {', '.join(STORE_URLS)}.",
    )
    client_store: str = setting("", secret=True, metavar="URL")
    """URL of the payload store for clients, with their own credentials; default: --store. Needed
    with --tokens where --store has a password."""
    viewer_store: str = setting("", secret=True, metavar="URL")
    """URL of the store for clients of the role viewer, with a user that may only read; default:
    --client-store."""
    shares_store_password: bool = setting(False, option="share_store_password")
    """Give every client with a token the password in --store; it may then read and delete all
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
    """Answer other machines without encryption, and without --tokens let every client there do
    everything; for networks that are trusted."""
    allow_anonymous: bool = False
    """Let every client on other machines do everything, without --tokens or --tls-client-ca."""
    tokens: Path | None = None
    """File of known bearer tokens (breadbox token makes them). Read again when it changes."""
    local_socket: Path | None = None
    """Also answer on this unix socket, unencrypted, for this user alone; for probes and tools."""
    metrics_listen: str = setting("", metavar="HOST:PORT")
    """Where to serve metrics for Prometheus over HTTP; empty: nowhere."""
    # The limits of every buffer that is created without others; their help is the library's.
    preset: Preset | None = None
    fragments_per_chunk: int = _DEFAULTS.fragments_per_chunk
    """Consecutive fragments of one worker, or members of a group, that are fetched, used and
    evicted together. This option and those below are the limits of every buffer that is created
    without others."""
    assembly: AssemblyPolicy = _DEFAULTS.assembly
    """Make a chunk of consecutive fragments of one worker, or of a group's members, in any order
    and from any worker."""
    group_min: int = _DEFAULTS.group_min
    drop_equal: str = _DEFAULTS.drop_equal
    groups_per_version: int = _DEFAULTS.groups_per_version
    lead_versions: int = _DEFAULTS.lead_versions
    required_parts: str = _DEFAULTS.required_parts
    capacity_chunks: int = _DEFAULTS.capacity_chunks
    capacity_bytes: Bytes = _DEFAULTS.capacity_bytes
    """Payload bytes held, such as 8GiB; beyond, --full-policy decides. With a file:// store at most
    half of its file system, of one over 1 GiB all but 512 MiB."""
    staleness_max: int = _DEFAULTS.staleness_max
    stale: StalePolicy = _DEFAULTS.stale
    """Evict what is staler than --staleness-max, or deliver it late, and count it."""
    uses_max: int = _DEFAULTS.uses_max
    full_policy: FullPolicy = _DEFAULTS.full_policy
    """When there is no room: evict chunks, or let producers wait."""
    remover: _Sampler = setting(_DEFAULTS.remover, metavar="NAME")
    schema_policy: SchemaPolicy = setting(_DEFAULTS.schema, option="schema")
    """Fragments of a session must have the same arrays and as many steps, or the same arrays alone
    (ragged), or neither (any)."""
    lease_expiry_policy: LeaseExpiryPolicy = _DEFAULTS.lease_expiry_policy
    """Return the chunks of an expired lease for another fetch, or count them as used."""
    lease_s: float = _DEFAULTS.lease_s
    open_chunk_s: float = _DEFAULTS.open_chunk_s
    waiters_max: int = _DEFAULTS.waiters_max
    leases_max: int = _DEFAULTS.leases_max
    workers_max: int = _DEFAULTS.workers_max
    sampler: _Sampler = setting(_DEFAULTS.sampler, metavar="NAME")
    priority_exponent: float = _DEFAULTS.priority_exponent
    with_replacement: bool = _DEFAULTS.with_replacement
    minimum_chunks: int = 1
    buffers_max: int = setting(BUFFERS_MAX, ge=1, le=4096)
    """Most named buffers; one more is refused."""
    connections_max: int = setting(CONNECTIONS_MAX, ge=1, le=1_000_000)
    """Most connections on an address; one more is closed immediately. Fewer where the process
    may not open so many files."""
    unannounced_s: float = setting(600.0, ge=1, le=86_400)
    """Seconds after which a payload that was not announced is deleted."""
    poison_after: int = setting(2, ge=1, le=1_000_000)
    """Readers that fail to read a chunk before it is quarantined: no longer served, counted, and
    named by `breadbox explain`."""
    piece_size_bytes: Bytes = setting(0, option="piece_size", ge=0)
    """Piece size that writers are advised to cut payloads into; 0: the store's own."""
    inline_size_bytes_max: Bytes = setting(
        INLINE_SIZE_BYTES_MAX, option="inline_size_max", ge=0, le=INLINE_SIZE_BYTES_CHOICE_MAX
    )
    """Payloads of up to this many bytes are sent inside appends and fetches; this server
    writes and reads them; 0: none are, and all clients need the store. Clients of a file://
    store always write and read it directly, which is faster."""
    drain_grace_s: float = setting(5.0, ge=0, le=3600)
    """Seconds that running calls may take to end after SIGTERM."""
    has_reflection: bool = setting(True, option="reflection")
    """Let tools such as grpcurl list the calls."""
    journal: str = setting("auto", secret=True, metavar="URL")
    """Where decisions are made durable: auto (beside the payloads), none, a Redis, file:///DIR."""
    takes_over: bool = setting(False, option="take_over")
    """Take a journal in Redis (never one in a directory) from a running server, which then
    ends. Without it, this server starts once the other has ended or sent no heartbeat for
    1 s, and otherwise refuses to start."""
    is_standby: bool = setting(False, option="standby")
    """Follow the journal, in Redis, of the leading server, and replace it when it ends or
    has sent no heartbeat for 1 s; without one, lead immediately. Give all servers of a
    journal this option: the first to start leads."""
    deletes_orphans: bool = setting(False, option="delete_orphans")
    """Delete payloads that no buffer knows, however many they are, and even if other journals have
    kept payloads in this store; for stores that those journals no longer use."""
    accepts_store: bool = setting(False, option="accept_store")
    """Accept another --store than the journal's: payloads that the journal knows
    and this store lacks are given up as lost. Without this option such a start is refused."""
    has_journal_sync: bool = setting(False, option="journal_sync")
    """Sync a journal in SQLite to the disk, so that it survives a crash of the machine, too."""
    snapshot_entries: int = setting(30_000, ge=100)
    """Entries in the journal after which a snapshot replaces them."""
    is_ephemeral: bool = setting(False, option="ephemeral")
    """Delete the directory of a file:// store when the server has stopped. Without --store, a
    directory is made for this server alone."""
    ready_file: Path | None = None
    """File to write the bound address to once the server answers; deleted when it ends."""
    seed: int | None = None
    """Seed of all random choices; default: another at each start."""

    def model_post_init(self, context: Any) -> None:
        """Choose a store if none is given, and refuse settings that contradict each other."""
        del context
        if not self.store:
            url = default_store_url(is_ephemeral=self.is_ephemeral)
            object.__setattr__(self, "store", url)
        # Both properties refuse settings that contradict each other.
        _ = self.default_config, self.tls

    @property
    def default_config(self) -> BufferConfig:
        """Return the limits of the buffer `default`, and of new buffers without their own."""
        limits = self.chosen(each.name for each in fields(BufferConfig))
        try:
            return BufferConfig(limiter=MinimumChunksConfig(self.minimum_chunks), **limits)
        except InvalidArgumentError as error:
            name = _OPTIONS.get(error.field, error.field)
            option = "--" + name.replace("_", "-")
            raise StartError(f"{option} {error.problem}; see breadbox serve --help") from error

    @property
    def tls(self) -> TlsFiles | None:
        """Return the certificate files, or None for plaintext; refuse one without its key."""
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise StartError("--tls-cert and --tls-key go together; give both")
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def check_store_password(self) -> None:
        """Refuse tokens if all clients would get the server's own password, which makes roles void.

        Without tokens there are no roles: every caller is an administrator.
        """
        is_sent = not (self.client_store or self.has_gateway)
        if self.tokens is None or self.shares_store_password or not is_sent:
            return
        if has_secret(self.store):
            raise StartError(
                "every client with a token would get the server's own password of --store; "
                "give --client-store, the URL with a user for clients (SECURITY.md has its "
                "commands), --gateway, so that no client needs one, or --share-store-password"
            )

    def store_told(self, role: Role) -> str:
        """Return the store URL that the server sends to clients of a role."""
        if role is Role.VIEWER and self.viewer_store:
            return self.viewer_store
        is_trusted = role in (Role.LEARNER, Role.ADMIN)
        if self.has_gateway and not (is_trusted and self.client_store):
            return GATEWAY_URL
        return self.client_store or self.store

    def inline_size_told(self, role: Role) -> int:
        """Return the largest inline payload, in bytes, in calls of a role; 0: none is inline."""
        is_nearer = self.store_told(role).startswith("file:")
        return 0 if is_nearer else self.inline_size_bytes_max

    @property
    def store_shown(self) -> str:
        """The store's URL without its password, for logs."""
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
