"""The addresses that a server answers on: found to be free, then taken."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import grpc

from breadbox_server.access.tls import check_anonymous, check_plaintext
from breadbox_server.base.errors import StartError
from breadbox_server.settings import Settings, parse_address

ANSWER_S: Final = 1.0
"""Seconds for whoever listens on a unix socket to take a connection; a kernel does so at once."""
TURN_S: Final = 2.0
"""Seconds to wait for another server that takes a socket in the same folder at this moment."""
TURN_PERIOD_S: Final = 0.02


def check_addresses(settings: Settings) -> None:
    """Find out whether the addresses to listen on can be had, without taking them.

    Raises:
        StartError: One is taken, not ours, or malformed; or others could listen in, or give
            orders.
    """
    if settings.local_socket is not None:
        _check_unused(f"unix:{settings.local_socket}", "--local-socket")
    address = parse_address(settings.listen, "--listen")
    check_plaintext(
        address and address[0],
        has_tls=settings.tls is not None,
        is_allowed=settings.allow_plaintext,
    )
    check_anonymous(
        address and address[0],
        has_tokens=settings.tokens is not None,
        has_client_ca=settings.tls is not None and settings.tls.client_ca_file is not None,
        # Plaintext is for a network that is trusted, where a token could be overheard.
        is_allowed=settings.allow_anonymous or settings.allow_plaintext,
    )
    if address is None:
        _check_unused(settings.listen, "--listen")
    else:
        check_free(*address, "--listen")


def bind(
    server: grpc.aio.Server, settings: Settings, credentials: grpc.ServerCredentials | None
) -> str:
    """Take the addresses to listen on; gives the one that is told.

    Args:
        server: Answers there.
        settings: Name the addresses.
        credentials: Of the address of `listen`; None: calls are not encrypted.

    Raises:
        StartError: See `check_addresses`; something may have changed since it was asked.
    """
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
    shown_host = f"[{host}]" if ":" in host else host
    return f"{shown_host}:{bound_port}"


def bound_port(address: str) -> int:
    """The port of an address that `bind` gave; 0: it is a unix socket."""
    return 0 if address.startswith("unix:") else int(address.rpartition(":")[2])


def check_free(host: str, port: int, option: str) -> None:
    """Find out why an address cannot be bound; gRPC would only say that it failed.

    Raises:
        StartError: The address is taken, or no address of this machine.
    """
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
            raise StartError(
                f"{option} {host}:{port} cannot be used: {os.strerror(error.errno or 0)}; "
                "stop what runs there or choose another port (0 takes a free one)"
            ) from error


def _check_unused(listen: str, option: str) -> None:
    """See that nobody listens on a unix socket: gRPC would take the path away from who does.

    Raises:
        StartError: Somebody does.
    """
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
    """The path of a unix socket, from either form of its address."""
    path = listen.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


@contextlib.contextmanager
def _turn_in(folder: Path) -> Iterator[None]:
    """Be the only server that takes a socket in a folder, inside the block.

    After `TURN_S`, and where folders cannot be opened or locked, it goes on without: the lock only
    keeps two that start in the same moment apart.
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
    """Listen on a unix socket that only this user may open; it needs no encryption.

    Raises:
        StartError: It cannot be made, or another server has come first.
    """
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
