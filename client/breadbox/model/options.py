"""Options of a client's connection: addresses, credentials, time limits; checked on creation."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any, Final

import grpc

from breadbox.model.errors import InvalidRequestError
from breadbox.model.paths import read_regular

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # The library retries itself, because it knows which calls are safe to repeat.
    ("grpc.enable_retries", 0),
    # A restarted server is found within about a second, not within gRPC's default of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Time of one attempt: a connection takes several round trips, more with TLS, and the host may
    # be busy.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection that died in silence becomes UNAVAILABLE after at most 40 s, also while a fetch
    # blocks. gRPC waits for the longer of its two timeouts of a ping.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A restarted server may have another address. gRPC resolves the name again when a connection
    # ends, but by default only once in 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Metadata only: 4096 fragments are about 1 MiB. The bound protects from a broken peer.
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 64 * 2**20),
)
_SEVERAL_OPTIONS: Final = (
    # For names of several servers: gRPC checks the health of each, and calls one that is SERVING.
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}',
    ),
)
_STANDBY_OPTIONS: Final = (
    # With another server to call, leave a server that hangs or is cut off within 15 s.
    ("grpc.keepalive_time_ms", 12_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
)
_SEVERAL: Final = ("dns:", "ipv4:", "ipv6:")
_NO_PORT = ("unix:", "unix-abstract:", "dns:", "xds:", "ipv4:", "ipv6:")
"""Kinds of addresses that gRPC parses itself."""
WAIT_S_MAX_PER_CALL = 240.0
"""Longest server-side wait of one RPC, below the server's cap of 300 s. A longer wait is several
RPCs under one request_id; it is rarely split, because each split loses the queue position."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates for an encrypted connection, as PEM files.

    ```python
    tls = breadbox.Tls(ca_file="ca.pem")  # then: breadbox.connect(address, tls=tls)
    ```
    """

    ca_file: str | os.PathLike[str] | None = None
    """Certificate authorities to trust, or None for gRPC's own."""
    cert_file: str | os.PathLike[str] | None = None
    """This client's certificate, if the server requires one, or None; needs `key_file`."""
    key_file: str | os.PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files, or raise InvalidRequestError; certificate and key need each other."""
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequestError("tls", "needs both cert_file and key_file, or neither")
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls.ca_file", self.ca_file),
            private_key=_read("tls.key_file", self.key_file),
            certificate_chain=_read("tls.cert_file", self.cert_file),
        )


def _read(name: str, path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return read_regular(path)
    except OSError as error:
        raise InvalidRequestError(name, f"cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The arguments of `connect` except the address, checked on construction.

    Raises:
        InvalidRequestError: A value is out of its range.
    """

    buffer: str = "default"
    """Buffer of calls that name none."""
    tls: Tls | None = None
    """Certificates, or None for an unencrypted connection."""
    token: str | None = field(default=None, repr=False)
    """Bearer token sent with every call, or None. Without TLS the network can read it. `@FILE`
    reads it from a file."""
    deadline_s: float = 10.0
    """Seconds that server or store may take to answer, besides a requested wait."""
    reconnect_s: float = 30.0
    """Seconds for which a call retries while server or store are unreachable or silent; 0 for no
    retry. Silence blocks a call for at most `deadline_s` and this together."""
    append_wait_s: float = 300.0
    """Seconds for which an append waits while buffer or store is full; then BackpressureError."""
    codecs: str | Mapping[str, str] = "raw"
    """Codecs of the arrays of appended fragments: one codec ("raw", "lz4", "zstd", "zstd:LEVEL"),
    or codecs by pattern over array names ({"obs*": "zstd"}); arrays without a match stay raw."""
    store_url: str | None = field(default=None, repr=False)
    """URL of the payload store as seen from this host, or None for the one that the server returns.
    It may contain a password."""

    def __post_init__(self) -> None:
        for name, smallest in (("deadline_s", 1e-3), ("reconnect_s", 0), ("append_wait_s", 0)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= smallest):
                raise InvalidRequestError(
                    name, f"must be a finite number of seconds of at least {smallest}, got {value}"
                )
        if not self.buffer:
            raise InvalidRequestError("buffer", "must not be empty")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Read the certificates, or return None for an unencrypted connection."""
        return None if self.tls is None else self.tls.credentials()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the gRPC metadata of every call: this process's name, and the token if any."""
        process = (("breadbox-process", process_name()),)
        token = self.token or ""
        if token.startswith("@"):
            try:
                token = (_read("token", token[1:]) or b"").decode("ascii").strip()
            except UnicodeDecodeError:
                raise InvalidRequestError("token", "must be a file of plain text") from None
            if not token:
                raise InvalidRequestError("token", "must be a file that is not empty")
        return (*process, ("authorization", f"Bearer {token}")) if token else process


def process_name() -> str:
    """Return HOST/PID, by which a server knows the users of a session.

    A restarted container has the same name again. A process that works for another one has that
    one's name, see `calling_as`.
    """
    host = gethostname().encode("ascii", "replace").decode()
    return _names.get(os.getpid()) or f"{host}/{os.getpid()}"


@contextmanager
def calling_as(name: str) -> Iterator[None]:
    """Have clients that this process makes in the block call under another process's name."""
    before = _names.copy()
    _names[os.getpid()] = name
    try:
        yield
    finally:
        _names.clear()
        _names.update(before)


_names: Final[dict[int, str]] = {}
"""Names that processes have taken, by process: a fork has a name of its own."""


def channel_options(
    address: str, *, is_one_of_many: bool = False, is_shared: bool = True
) -> tuple[tuple[str, Any], ...]:
    """Return gRPC's options of a channel to an address, alone or one of several.

    `is_shared`: it may use the connection that another channel of this process has there.
    """
    named = dict[str, Any](CHANNEL_OPTIONS)
    # Containers are given `http_proxy` for the web, which no server here is behind.
    named["grpc.enable_http_proxy"] = int("grpc_proxy" in os.environ)
    named["grpc.use_local_subchannel_pool"] = int(not is_shared)
    if address.startswith(_SEVERAL):
        named.update(_SEVERAL_OPTIONS)
    if address.startswith(_SEVERAL) or is_one_of_many:
        named.update(_STANDBY_OPTIONS)
    return tuple(named.items())


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    is_one_of_many: bool = False,
    is_shared: bool = True,
) -> grpc.Channel:
    """Open a channel to one address, encrypted with credentials; see `channel_options`."""
    arguments = channel_options(address, is_one_of_many=is_one_of_many, is_shared=is_shared)
    if credentials is None:
        return grpc.insecure_channel(address, options=arguments)
    return grpc.secure_channel(address, credentials, options=arguments)


def split_addresses(text: str) -> tuple[str, ...]:
    """Split a text into addresses at commas; an address that gRPC parses itself stays whole."""
    return (text,) if text.startswith((*_SEVERAL, "xds:")) else tuple(text.split(","))


def check_addresses(text: str) -> str:
    """Check each address of a text, and return the text without spaces."""
    if not isinstance(text, str):
        return check_address(text)
    return ",".join([check_address(each) for each in split_addresses(text.strip())])


def check_address(address: str) -> str:
    """Check an address, and return it without spaces."""
    if not isinstance(address, str) or not address.strip():
        raise InvalidRequestError("address", f"must be HOST:PORT or unix:PATH, got {address!r}")
    if "://" in address and not address.startswith(("dns://", "unix://", "xds://")):
        raise InvalidRequestError(
            "address", f"must be HOST:PORT or unix:PATH without a scheme, got {address!r}"
        )
    address = address.strip()
    if (
        not address.startswith(_NO_PORT)
        and re.fullmatch(r"(\[.+\]|[^:]+):\d{1,5}", address) is None
    ):
        # Without a port gRPC would use 443.
        raise InvalidRequestError(
            "address", f"must be HOST:PORT or unix:PATH, got {address!r}; servers listen on 50051"
        )
    return address
