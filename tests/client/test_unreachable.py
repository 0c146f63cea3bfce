"""Why a server gave no answer: gRPC's texts, as they were recorded, and what is made of them."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from breadbox.model.errors import TlsError, UnavailableError
from breadbox.wire.status import from_rpc_error, unreachable

HERE = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
SSL = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:"


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            f"{HERE}{SSL}OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer "
            "certificate: OK",
            "--tls-ca",
        ),
        (f"{HERE}{SSL}OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed: OK", "--tls-ca"),
        (
            f"{HERE}{SSL}OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "expired",
        ),
        (
            f"{HERE}Custom verification check failed with error: UNAUTHENTICATED: Hostname "
            "Verification Check failed.",
            "another name",
        ),
        (f"{HERE}Peer name server is not in peer certificate", "another name"),
        (
            f"{HERE}{SSL}OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification "
            "context: OK",
            "does not encrypt",
        ),
        (f"{HERE}{SSL}OPENSSL_internal:TLSV1_ALERT_UNKNOWN_CA", "--tls-client-ca"),
        (f"{HERE}{SSL}OPENSSL_internal:SSLV3_ALERT_CERTIFICATE_EXPIRED", "--tls-client-ca"),
        (f"{HERE}{SSL}OPENSSL_internal:NO_SHARED_CIPHER", "NO_SHARED_CIPHER"),
    ],
)
def test_certificates_that_do_not_fit_are_named_with_the_remedy(details: str, words: str) -> None:
    error = unreachable(details, "host:1", encrypted=True)
    assert isinstance(error, TlsError)
    assert "host:1" in str(error)
    assert words in str(error)


def test_of_grpcs_words_only_the_cause_is_repeated() -> None:
    error = unreachable(f"{HERE}Hostname Verification Check failed.", "host:1", encrypted=True)
    assert str(error).endswith("(Hostname Verification Check failed.)")


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (f"{HERE}Failed to connect to remote host: Connection refused", "nothing listens there"),
        (
            "errors resolving host:1: [field:hostname lookup error:address lookup failed for "
            "host:1: Domain name not found]",
            "name is not known",
        ),
        ("DNS resolution failed for host:1: C-ares status is not ARES_SUCCESS", "name is not"),
        (f"{HERE}Failed to connect to remote host: No such file or directory", "no such socket"),
        (
            "connections to all backends failing; last error: ipv4:127.0.0.2:1: backend unhealthy",
            "none of those with this name leads",
        ),
        ("Socket closed", "Socket closed"),
        ("keepalive watchdog timeout", "watchdog"),
    ],
)
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_has_nothing_to_do_with_encryption_does_not_speak_of_it(
    details: str, words: str, encrypted: bool
) -> None:
    error = unreachable(details, "host:1", encrypted=encrypted)
    assert UnavailableError is type(error)
    assert words in str(error)
    assert "tls" not in str(error).lower()


@pytest.mark.parametrize(("encrypted", "words"), [(False, "--tls-ca"), (True, "--tls-client-ca")])
def test_a_connection_closed_without_a_word_says_what_that_may_mean(
    encrypted: bool, words: str
) -> None:
    """It may also be a server that dies, so this is tried again."""
    error = unreachable(f"{HERE}Socket closed", "host:1", encrypted=encrypted)
    assert UnavailableError is type(error)
    assert words in str(error)


def test_what_a_proxy_says_of_its_own_certificates_is_handed_on() -> None:
    details = "upstream connect error: CERTIFICATE_VERIFY_FAILED: certificate has expired"
    error = unreachable(details, "host:1", encrypted=True)
    assert UnavailableError is type(error)
    assert details in str(error)


@pytest.mark.parametrize("details", ["CANCELLED", ""])
def test_a_call_that_the_server_gave_up_says_so(details: str) -> None:
    cancelled = AioRpcError(grpc.StatusCode.CANCELLED, Metadata(), Metadata(), details)
    error = from_rpc_error(cancelled, "host:1", encrypted=False)
    assert isinstance(error, UnavailableError)
    assert "no answer from host:1: it gave the call up" == str(error)
