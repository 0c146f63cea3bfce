"""Why a server gave no answer, in words that name the remedy. Pure.

gRPC says why in a text only, whose wording differs between versions: what is recognised is said in
our words, the rest is handed on as it came.
"""

import re

from breadbox.model.errors import TlsError, UnavailableError

_NEVER_CONNECTED = re.compile("failed to connect|connections to all backends failing")
"""In gRPC's text where connections were tried, to one server or to several, and none came about."""

_CERTIFICATE = (
    (
        r"certificate has expired",
        "its certificate has expired: renew it (a running server reads the new one by itself)",
    ),
    (r"not yet valid", "its certificate is not valid yet: look at the clocks of both machines"),
    (
        r"Hostname Verification Check failed|not in peer certificate",
        "its certificate is for another name: call the server by a name, or an IP address, that is "
        "in the certificate",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "its certificate is of no authority that this client trusts: name the file with the right "
        "one (--tls-ca, or breadbox.Tls(ca_file=...))",
    ),
)
"""What this side may find wrong with the server's certificate; the first that fits is said."""

_HANDSHAKE = (
    (
        r"WRONG_VERSION_NUMBER",
        "what listens there does not encrypt: connect without TLS, or start the server with "
        "--tls-cert and --tls-key",
    ),
    (
        r"ALERT_(UNKNOWN_CA|.*CERTIFICATE)",
        "it does not take this client's certificate: give one that its --tls-client-ca has signed "
        "and that is still valid (--tls-cert and --tls-key, or breadbox.Tls)",
    ),
    (r"SSL_ERROR_SSL", "the two sides cannot agree on how to encrypt"),
)

_OTHER = (
    (
        r"[Cc]onnection refused",
        "nothing listens there; is the server running, and is this its address as seen from here?",
    ),
    (
        r"Domain name not found|DNS resolution failed|address lookup failed|errors resolving",
        "its name is not known here; look for a typing error, or use an address",
    ),
    (
        r"backend unhealthy",
        "a server is there, and none leads of those that the name stands for: see that all servers "
        "are among its records, and their logs",
    ),
    (r"No such file or directory", "there is no such socket; is the server running?"),
)


def unreachable(details: str, address: str, *, encrypted: bool) -> UnavailableError:
    """The error for a call that nobody answered.

    Args:
        details: What gRPC says of it.
        address: Where the server should be.
        encrypted: Whether this side speaks TLS.

    Returns:
        A TlsError where it is certain that there is a server and that the set-up of certificates
        is at fault; else an UnavailableError.
    """
    for pattern, meaning in _OTHER:
        if re.search(pattern, details):
            return UnavailableError(f"no answer from {address}: {meaning}")
    if _NEVER_CONNECTED.search(details) is None:
        return UnavailableError(f"no answer from {address}: {details}")
    for pattern, meaning in (*_CERTIFICATE, *_HANDSHAKE):
        if encrypted and re.search(pattern, details):
            return TlsError(f"no encrypted connection to {address}: {meaning} ({_cause(details)})")
    return UnavailableError(f"no answer from {address}: {details}{_hint(encrypted)}")


def _cause(details: str) -> str:
    """The end of gRPC's text, which says what was found."""
    found = re.search(r"OPENSSL_internal:(.*)", details) or re.search(
        r"last error: \w+: (?:\S+:\d+: )?(.*)", details
    )
    return (found.group(1) if found else details).removesuffix(": OK")


def _hint(encrypted: bool) -> str:
    """What a connection that is closed without a word may mean."""
    if encrypted:
        return (
            "; a server that asks for certificates (--tls-client-ca) closes connections of clients "
            "without a valid one: see --tls-cert and --tls-key"
        )
    return (
        "; a server with TLS closes connections that are not encrypted: see --tls-ca, or "
        "breadbox.Tls"
    )
