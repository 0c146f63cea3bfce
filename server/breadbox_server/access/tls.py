"""Read the server's certificates, again whenever their files change."""

import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Final

import grpc

from breadbox.model.paths import read_regular, stamp_of
from breadbox.shared.threads import CallThreads, HungError
from breadbox.stores.deadline import Deadline
from breadbox_server.base.errors import StartError

log = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
"""Seconds for which a new connection waits for a look at the files."""
_DATE_CODES: Final = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
AGAIN_S: Final = 60.0
"""Seconds until refused certificates are read again: one that was not valid yet may be now."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificates of the server, as PEM files; read again when they change."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    """The authority that must have signed each client's certificate, or None if they need none."""


def server_credentials(files: TlsFiles, on_failure: Callable[[], None]) -> grpc.ServerCredentials:
    """Return credentials that follow their files: a renewed certificate needs no restart.

    Each new connection checks the files. Unusable ones, and certificates that are not valid now,
    leave the old in use, and `on_failure` is called, from any thread; they are read again when they
    change, and each minute. Raises StartError if they cannot be used at the start.
    """
    try:
        first = _read(files)
    except (OSError, ValueError) as error:
        raise StartError(f"TLS cannot be used: {error}") from error
    seen, again_at = _stamps(files), inf
    # One thread: looks do not overlap. It is not gRPC's, which a disk that hangs would keep.
    threads = CallThreads("certificates", 1)

    def renewed() -> Any:
        nonlocal seen, again_at
        stamps = _stamps(files)
        if stamps == seen and monotonic() < again_at:
            return None
        # Refused ones are read again after a while.
        seen, again_at = stamps, monotonic() + AGAIN_S
        certificates = _read(files, must_be_valid=True)
        again_at = inf
        log.info("certificates were read again")
        return certificates

    def fetch() -> Any:
        """Return the new certificates, or None if nothing changed; gRPC calls it in its threads."""
        try:
            return threads.call(renewed, Deadline(ANSWER_S).left_s)
        except (OSError, ValueError, HungError) as error:
            on_failure()
            why = error if str(error) else "their disk does not answer"
            log.error("new certificates cannot be used, the old ones stay: %s", why)  # noqa: TRY400
            return None

    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=files.client_ca_file is not None
    )


def _paths(files: TlsFiles) -> list[Path]:
    optional = [files.client_ca_file] if files.client_ca_file else []
    return [files.key_file, files.cert_file, *optional]


def _stamps(files: TlsFiles) -> list[tuple[int, ...] | None]:
    return [stamp_of(path) for path in _paths(files)]


def _read(files: TlsFiles, *, must_be_valid: bool = False) -> Any:
    key, certificate, *authorities = map(read_regular, _paths(files))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Do not prompt for a password on the terminal: refuse an encrypted key.
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
    if must_be_valid:
        _check_valid(context, files.cert_file)
    return grpc.ssl_server_certificate_configuration(
        [(key, certificate)],
        root_certificates=authorities[0] if authorities else None,
    )


def _check_valid(context: ssl.SSLContext, cert_file: Path) -> None:
    """Raise ValueError for a certificate that has expired or is not valid yet, by a handshake."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # Trust the certificate itself.
    trusting.load_verify_locations(cert_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        # Other problems are for clients to judge.
        if getattr(error, "verify_code", 0) in _DATE_CODES:
            raise ValueError(f"{cert_file}: {error.verify_message}") from error  # type: ignore[attr-defined]
