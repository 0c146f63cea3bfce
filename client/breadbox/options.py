"""How a client talks to its server: addresses, credentials, time limits; checked once."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from breadbox.errors import InvalidRequestError

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # The library tries again by itself, knowing what is safe to repeat; gRPC must not do so unseen.
    ("grpc.enable_retries", 0),
    # A restarted server is found within about a second, not within gRPC's default of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # An attempt may take so long: a connection is made in several trips over the link, with TLS in
    # more, to a host that may be busy.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A cut cable becomes UNAVAILABLE after at most 40 s, also while a fetch blocks in silence.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Metadata only: 4096 fragments are about 1 MiB. The bound is against a broken peer.
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 64 * 2**20),
)
_SEVERAL_OPTIONS: Final = (
    # Behind these gRPC finds several servers, and asks each for its health: the one that serves is
    # called.
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}',
    ),
    # A server that was started again may have another address: gRPC asks for the name's records
    # when a connection ends, by default not twice in 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)
_STANDBY_OPTIONS: Final = (
    # There is another server to go to: one that is cut off, or stands still, is left within 15 s.
    ("grpc.keepalive_time_ms", 12_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
)
_SEVERAL: Final = ("dns:", "ipv4:", "ipv6:")
"""Kinds of addresses that may stand for several servers."""
_NO_PORT = ("unix:", "unix-abstract:", "dns:", "xds:", "ipv4:", "ipv6:")
"""Kinds of addresses that gRPC reads in its own way."""
WAIT_S_MAX_PER_CALL = 240.0
"""Longest server-side wait of one RPC, below the server's cap of 300 s. A longer wait is cut into
several RPCs under the same request_id; a cut gives up the place in the queue, so they are few."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates for an encrypted connection, as PEM files; None: the system's, or none."""

    ca_file: str | os.PathLike[str] | None = None
    """Whom to trust; None: the certificate authorities that gRPC brings."""
    cert_file: str | os.PathLike[str] | None = None
    """This client's certificate, where the server asks for one; needs `key_file`."""
    key_file: str | os.PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            InvalidRequestError: A file cannot be read, or only one of certificate and key is given.
        """
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
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(name, f"cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Everything that `connect` takes but the address; checked on construction.

    Raises:
        InvalidRequestError: A value is out of its range.
    """

    buffer: str = "default"
    """Buffer that calls are about unless they say otherwise."""
    tls: Tls | None = None
    """None: not encrypted."""
    token: str | None = field(default=None, repr=False)
    """Sent as a bearer token with every call. Without TLS anybody on the way can read it. `@FILE`
    stands for what the file holds."""
    deadline_s: float = 10.0
    """Seconds for which server or store may be silent, on top of a wait that was asked for."""
    reconnect_s: float = 30.0
    """Seconds for which a call tries again with a server or store that is away or silent. 0: not at
    all. Nobody's silence holds up a call for longer than `deadline_s` and this together."""
    append_wait_s: float = 300.0
    """Seconds for which an append waits while buffer or store is full; then BackpressureError."""
    codecs: str | Mapping[str, str] = "raw"
    """How arrays of appended fragments are encoded: one codec ("raw", "lz4", "zstd", "zstd:LEVEL"),
    or codecs by pattern over array names ({"obs*": "zstd"}); what no pattern matches stays raw."""
    store_url: str | None = field(default=None, repr=False)
    """Where payloads live, seen from here; None: where the server says. May hold a password."""

    def __post_init__(self) -> None:
        for name, smallest in (("deadline_s", 1e-3), ("reconnect_s", 0), ("append_wait_s", 0)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= smallest):
                raise InvalidRequestError(
                    name, f"must be a finite number of seconds of at least {smallest}, got {value}"
                )
        if not self.buffer:
            raise InvalidRequestError("buffer", "must not be empty")

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """What accompanies every call.

        Raises:
            InvalidRequestError: The token's file cannot be read, or is not text.
        """
        token = self.token or ""
        if token.startswith("@"):
            try:
                token = (_read("token", token[1:]) or b"").decode("ascii").strip()
            except UnicodeDecodeError:
                raise InvalidRequestError("token", "must be a file of plain text") from None
            if not token:
                raise InvalidRequestError("token", "must be a file that is not empty")
        return (("authorization", f"Bearer {token}"),) if token else None


def channel_options(address: str, *, is_one_of_many: bool) -> tuple[tuple[str, Any], ...]:
    """What gRPC is told of a connection to an address.

    Args:
        address: One that `split_addresses` gave.
        is_one_of_many: Whether there are others to go to.
    """
    named = dict[str, Any](CHANNEL_OPTIONS)
    if address.startswith(_SEVERAL):
        named.update(_SEVERAL_OPTIONS)
    if address.startswith(_SEVERAL) or is_one_of_many:
        named.update(_STANDBY_OPTIONS)
    return tuple(named.items())


def open_channel(
    address: str,
    options: ClientOptions,
    *,
    is_one_of_many: bool = False,
    more: tuple[tuple[str, int], ...] = (),
) -> grpc.Channel:
    """A channel to one address, encrypted if the options say so."""
    arguments = (*channel_options(address, is_one_of_many=is_one_of_many), *more)
    if options.tls is None:
        return grpc.insecure_channel(address, options=arguments)
    return grpc.secure_channel(address, options.tls.credentials(), options=arguments)


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses that a text names, separated by commas; those that gRPC reads stay whole."""
    return (text,) if text.startswith((*_SEVERAL, "xds:")) else tuple(text.split(","))


def check_addresses(text: str) -> str:
    """Refuse addresses of which one cannot be one; gives them without spaces.

    Raises:
        InvalidRequestError: One is empty, or looks like a URL of something else.
    """
    if not isinstance(text, str):
        return check_address(text)
    return ",".join([check_address(each) for each in split_addresses(text.strip())])


def check_address(address: str) -> str:
    """Refuse an address that cannot be one.

    Raises:
        InvalidRequestError: It is empty, or looks like a URL of something else.
    """
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
        # gRPC would try port 443.
        raise InvalidRequestError(
            "address", f"must be HOST:PORT or unix:PATH, got {address!r}; servers listen on 50051"
        )
    return address
