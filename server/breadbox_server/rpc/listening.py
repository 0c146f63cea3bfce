"""The gRPC server's options and addresses, which are found to be free, then taken; connections."""

import contextlib
import errno
import fcntl
import logging
import os
import resource
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import grpc

from breadbox.shared.loopback import is_loopback
from breadbox_server import limits
from breadbox_server.base.errors import StartError
from breadbox_server.settings import Settings, parse_address

log = logging.getLogger(__name__)

OPEN_FILES: Final = "/dev/fd"
ANSWER_S: Final = 1.0
"""Seconds for whoever listens on a unix socket to take a connection; a kernel does so at once."""
TURN_S: Final = 2.0
"""Seconds to wait for another server that takes a socket in the same folder at this moment."""
TURN_PERIOD_S: Final = 0.02


def server_options(connections_max: int) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC server that takes so many connections on an address."""
    return (
        ("grpc.max_allowed_incoming_connections", connections_max),
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
        # gRPC waits for the longer of its two timeouts of a ping.
        ("grpc.http2.ping_timeout_ms", _ms(limits.KEEPALIVE_ANSWER_S)),
        # gRPC's default would hang up on clients that ping while a fetch blocks.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(limits.PING_INTERVAL_S_MIN)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", _ms(limits.HANDSHAKE_S)),
    )


def _ms(span_s: float) -> int:
    return round(span_s * 1000)


def connections_max(settings: Settings) -> int:
    """Return the connections of an address: as set, or fewer for lack of open files."""
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


def check_addresses(settings: Settings) -> None:
    """Check that the addresses can be had, without taking them, and are safe; or StartError."""
    if settings.local_socket is not None:
        _check_unused(f"unix:{settings.local_socket}", "--local-socket")
    address = parse_address(settings.listen, "--listen")
    if address is None:
        _check_unused(settings.listen, "--listen")
        return
    check_exposure(settings, address[0])
    check_free(*address, "--listen")


def check_exposure(settings: Settings, host: str) -> None:
    """Refuse plaintext, and callers without a proof, on the network unless asked for by name."""
    if is_loopback(host):
        return
    if not (settings.tls or settings.allow_plaintext):
        raise StartError(
            f"--listen {host} is open to other machines and calls would not be encrypted; give "
            "--tls-cert and --tls-key, or --allow-plaintext where the network is trusted"
        )
    # Plaintext is for a network that is trusted, where a token could be overheard.
    is_allowed = settings.allow_anonymous or settings.allow_plaintext
    if not (settings.tokens or settings.tls_client_ca or is_allowed):
        raise StartError(
            f"--listen {host} is open to other machines and everybody there would be an "
            "administrator; give --tokens (breadbox token makes them) or --tls-client-ca, or "
            "--allow-anonymous where the network is trusted"
        )


def bind(
    server: grpc.aio.Server, settings: Settings, credentials: grpc.ServerCredentials | None
) -> str:
    """Take the addresses to listen on, and return that of `listen`, as bound."""
    check_addresses(settings)
    if settings.local_socket is not None:
        _bind_socket(server, f"unix:{settings.local_socket}", "--local-socket")
    listen = settings.listen
    address = parse_address(listen, "--listen")
    if address is None:
        _bind_socket(server, listen, "--listen")
        return listen
    host, _ = address
    try:
        if credentials is None:
            bound_port = server.add_insecure_port(listen)
        else:
            bound_port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        bound_port = 0
    if bound_port == 0:
        raise StartError(f"--listen {listen} cannot be used; choose another address")
    return f"{shown_host(host)}:{bound_port}"


def shown_host(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def check_free(host: str, port: int, option: str) -> None:
    """Raise a StartError that says why an address cannot be bound, as gRPC would not."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartError(
            f"{option}: host {host!r} cannot be resolved; use an IP address"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            remedy = "stop the process there, or choose another port (0 takes a free one)"
            if error.errno == errno.EADDRNOTAVAIL:
                remedy = "give an address of this machine"
            raise StartError(
                f"{option} {shown_host(host)}:{port} cannot be used: "
                f"{os.strerror(error.errno or 0)}; {remedy}"
            ) from error


def _check_unused(listen: str, option: str) -> None:
    """Raise if a server listens on a unix socket: gRPC would take the path away from it."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_S)
        try:
            probe.connect(_path_of(listen))
        except (FileNotFoundError, ConnectionRefusedError):
            return  # Nothing there, or what a server that was killed has left.
        except (TimeoutError, BlockingIOError):
            pass  # Somebody listens who has no time, or is stopped.
        except OSError as error:
            raise StartError(
                f"{option} {listen} cannot be used: {error.strerror or error}; choose another path"
            ) from error
    raise StartError(
        f"{option} {listen} is in use by another server; stop that one or choose another path"
    )


def _path_of(listen: str) -> str:
    path = listen.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


@contextlib.contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Be the only server that takes a socket in a folder, inside the block.

    Goes on without after `TURN_S`: the lock only keeps simultaneous starts apart.
    """
    until = monotonic() + TURN_S
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            while monotonic() < until:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    sleep(TURN_PERIOD_S)
        yield


def _bind_socket(server: grpc.aio.Server, listen: str, option: str) -> None:
    with _turn_in(Path(_path_of(listen)).parent):
        _check_unused(listen, option)
        mask = os.umask(0o077)
        try:
            with contextlib.suppress(RuntimeError):
                if server.add_insecure_port(listen):
                    return
        finally:
            os.umask(mask)
    raise StartError(f"{option} {listen} cannot be used; is its folder there and writable?")


class PortConnections:
    """Connections to a TCP port that this process has taken, named as gRPC names peers."""

    def __init__(self) -> None:
        self._port = 0
        """0 if there are none."""

    def listen_at(self, address: str) -> None:
        """Look at the connections to an address that `bind` returned, from now on."""
        self._port = 0 if address.startswith("unix:") else int(address.rpartition(":")[2])

    def peers(self) -> set[str]:
        """Return all peers; takes some microseconds for every open file. From any thread."""
        return {peer for _, peer in self._files()}

    def close(self, peers: Iterable[str]) -> None:
        """Hang up on some peers; gRPC sees their ends. From any thread."""
        wanted = set(peers)
        for file, peer in self._files():
            if peer in wanted:
                # What was seen may have been closed since, and its number be another's: a copy
                # stays what it is.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as copy:
                    if self._peer_of(copy) == peer:
                        copy.shutdown(socket.SHUT_RDWR)

    def _files(self) -> Iterator[tuple[int, str]]:
        if not self._port:
            return
        for name in os.listdir(OPEN_FILES):
            file = int(name)
            try:
                seen = socket.socket(fileno=file)
            except OSError:
                continue  # No socket, or closed meanwhile.
            try:
                peer = self._peer_of(seen)
            finally:
                seen.detach()
            if peer is not None:
                yield file, peer

    def _peer_of(self, seen: socket.socket) -> str | None:
        try:
            if (
                seen.family not in (socket.AF_INET, socket.AF_INET6)
                or seen.getsockname()[1] != self._port
            ):
                return None
            host, port = seen.getpeername()[:2]
        except OSError:
            return None
        # gRPC listens on one socket for both families.
        host = host.removeprefix("::ffff:")
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
