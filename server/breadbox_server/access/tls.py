"""What stands between the server and the network: certificates, and where plaintext is allowed."""

import ipaddress
import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from breadbox_server.base.errors import StartError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificates of the server, as PEM files; read again when they change."""

    cert_file: Path
    """The server's certificate, with the chain up to the authority."""
    key_file: Path
    client_ca_file: Path | None = None
    """The authority that must have signed every client's certificate, or None if none is asked."""


def tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """The files that options name; None where they name none.

    Raises:
        StartError: One is given without the other.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise StartError("--tls-cert and --tls-key go together; give both")
    return TlsFiles(cert, key, client_ca)


def check_plaintext(host: str | None, *, has_tls: bool, is_allowed: bool) -> None:
    """Refuse to talk in the clear to other machines, unless it was asked for by name.

    Args:
        host: The address listened on, or None for a unix socket.
        has_tls: Whether connections are encrypted.
        is_allowed: Whether plaintext was asked for.

    Raises:
        StartError: They are not, others could listen in, and nobody asked for that.
    """
    if has_tls or is_allowed or host is None or is_loopback(host):
        return
    raise StartError(
        f"--listen {host} is open to other machines and calls would not be encrypted; give "
        "--tls-cert and --tls-key, or --allow-plaintext where the network is trusted"
    )


def check_anonymous(
    host: str | None, *, has_tokens: bool, has_client_ca: bool, is_allowed: bool
) -> None:
    """Refuse to serve every caller on the network without a proof, unless asked for by name.

    Args:
        host: The address listened on, or None for a unix socket.
        has_tokens: Whether every caller must show a token.
        has_client_ca: Whether every caller must show a certificate.
        is_allowed: Whether callers without either were asked for.

    Raises:
        StartError: They would be administrators, and nobody asked for that.
    """
    if has_tokens or has_client_ca or is_allowed or host is None or is_loopback(host):
        return
    raise StartError(
        f"--listen {host} is open to other machines and everybody there would be an "
        "administrator; give --tokens (breadbox token makes them) or --tls-client-ca, or "
        "--allow-anonymous where the network is trusted"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host's address; a name other than localhost: no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_credentials(files: TlsFiles, on_failure: Callable[[], None]) -> grpc.ServerCredentials:
    """Credentials that follow their files: a renewed certificate needs no restart.

    Args:
        files: What to read; each new connection looks whether they changed.
        on_failure: Called when changed files cannot be used; the old ones stay. From any thread.

    Raises:
        StartError: The files cannot be used; says which and why.
    """
    try:
        first = _read(files)
    except (OSError, ValueError) as error:
        raise StartError(f"TLS cannot be used: {error}") from error
    follower = _Follower(files, on_failure)
    return grpc.dynamic_ssl_server_credentials(
        first, follower.fetch, require_client_authentication=files.client_ca_file is not None
    )


class _Follower:
    """Gives gRPC new certificates when the files have changed. Called from gRPC's threads."""

    def __init__(self, files: TlsFiles, on_failure: Callable[[], None]) -> None:
        self._files = files
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._seen = _stamps(files)

    def fetch(self) -> Any:
        """Return what gRPC should use from now on, or None if it has it already."""
        with self._lock:
            stamps = _stamps(self._files)
            if stamps == self._seen:
                return None
            self._seen = stamps
            try:
                renewed = _read(self._files)
            except (OSError, ValueError) as error:
                self._on_failure()
                log.error("new certificates cannot be used, the old ones stay: %s", error)  # noqa: TRY400
                return None
            log.info("certificates were read again")
            return renewed


def _paths(files: TlsFiles) -> list[Path]:
    optional = [files.client_ca_file] if files.client_ca_file else []
    return [files.cert_file, files.key_file, *optional]


def _stamps(files: TlsFiles) -> list[tuple[int, int, int] | None]:
    def stamp(path: Path) -> tuple[int, int, int] | None:
        try:
            seen = path.stat()
        except OSError:
            return None
        return seen.st_ino, seen.st_size, seen.st_mtime_ns

    return [stamp(path) for path in _paths(files)]


def _read(files: TlsFiles) -> Any:
    """Read and check the files.

    Raises:
        OSError: One cannot be read.
        ValueError: They are not what they should be, or do not belong together.
    """
    for path in _paths(files):
        with path.open("rb"):
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Never asked for on a terminal: an encrypted key is refused instead.
        context.load_cert_chain(files.cert_file, files.key_file, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"{files.cert_file} and {files.key_file} are no certificate and its unencrypted key"
        ) from error
    if files.client_ca_file is not None:
        try:
            context.load_verify_locations(files.client_ca_file)
        except ssl.SSLError as error:
            raise ValueError(f"{files.client_ca_file} holds no certificate") from error
    return grpc.ssl_server_certificate_configuration(
        [(files.key_file.read_bytes(), files.cert_file.read_bytes())],
        root_certificates=files.client_ca_file.read_bytes() if files.client_ca_file else None,
    )
