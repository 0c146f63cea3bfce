"""Encrypted connections, with certificates that the tests make."""

import asyncio
import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

import breadbox
from breadbox.aio import connect
from breadbox.model.errors import TlsError, UnauthenticatedError, UnavailableError
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server.access import tls
from breadbox_server.access.authorization import Role
from breadbox_server.access.tls import TlsFiles
from breadbox_server.base.errors import StartError
from breadbox_server.rpc.listening import check_exposure
from breadbox_server.settings import Settings
from support.certificates import DAY, Authority, Signed
from support.served import CALL_S, code_of, empty_request, served
from support.token_files import write_token_file

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods]
EXPIRED = datetime.timedelta(days=-1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files(signed: Signed, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(signed.cert_file, signed.key_file, client_ca)


def trusting(authority: Authority, own: Signed | None = None) -> breadbox.Tls:
    if own is None:
        return breadbox.Tls(ca_file=authority.ca_file)
    return breadbox.Tls(authority.ca_file, own.cert_file, own.key_file)


async def lists_buffers(address: str, tls: breadbox.Tls | None, token: str | None = None) -> bool:
    async with await connect(address, tls=tls, token=token, reconnect_s=0) as client:
        try:
            return len(await client.list_buffers()) == 1
        except UnavailableError:
            return False


async def codes_of_all(address: str, tls: breadbox.Tls) -> set[grpc.StatusCode]:
    """What every method answers, the handshake failing or not."""
    async with grpc.aio.secure_channel(address, tls.credentials()) as channel:
        stub = ReplayBufferServiceStub(channel)
        return {
            await code_of(getattr(stub, name)(empty_request(name), timeout=CALL_S))
            for name in METHODS
        }


async def test_an_encrypted_server_is_called_by_those_who_trust_its_authority(
    authority: Authority,
) -> None:
    async with served(tls=files(authority.sign("server"))) as world:
        assert await lists_buffers(world.server.address, trusting(authority))


async def test_an_encrypted_server_does_not_answer_in_the_clear(authority: Authority) -> None:
    async with served(tls=files(authority.sign("server"))) as world:
        assert not await lists_buffers(world.server.address, None)


async def test_a_client_does_not_talk_to_a_server_of_another_authority(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    async with served(tls=files(other.sign("server"))) as world:
        codes = await codes_of_all(world.server.address, trusting(authority))

    assert {grpc.StatusCode.UNAVAILABLE} == codes


async def test_a_client_does_not_talk_to_a_server_whose_certificate_has_expired(
    authority: Authority,
) -> None:
    async with served(tls=files(authority.sign("server", valid=EXPIRED))) as world:
        codes = await codes_of_all(world.server.address, trusting(authority))

    assert {grpc.StatusCode.UNAVAILABLE} == codes


async def test_a_client_does_not_talk_to_a_server_of_another_name(authority: Authority) -> None:
    async with served(tls=files(authority.sign("server", host="192.0.2.1"))) as world:
        assert not await lists_buffers(world.server.address, trusting(authority))


async def test_a_client_that_must_show_a_certificate_and_does_is_served(
    authority: Authority,
) -> None:
    tls = files(authority.sign("server"), authority.ca_file)
    async with served(tls=tls) as world:
        assert await lists_buffers(
            world.server.address, trusting(authority, authority.sign("worker"))
        )


async def test_a_client_without_a_certificate_gets_no_answer_from_any_method(
    authority: Authority,
) -> None:
    tls = files(authority.sign("server"), authority.ca_file)
    async with served(tls=tls) as world:
        codes = await codes_of_all(world.server.address, trusting(authority))

    assert {grpc.StatusCode.UNAVAILABLE} == codes


async def test_a_client_whose_certificate_has_expired_gets_no_answer_from_any_method(
    authority: Authority,
) -> None:
    tls = files(authority.sign("server"), authority.ca_file)
    expired = authority.sign("worker", valid=EXPIRED)
    async with served(tls=tls) as world:
        codes = await codes_of_all(world.server.address, trusting(authority, expired))

    assert {grpc.StatusCode.UNAVAILABLE} == codes


async def test_a_client_of_an_unknown_authority_gets_no_answer_from_any_method(
    authority: Authority, tmp_path: Path
) -> None:
    tls = files(authority.sign("server"), authority.ca_file)
    stranger = Authority(tmp_path, "other").sign("worker")
    async with served(tls=tls) as world:
        codes = await codes_of_all(world.server.address, trusting(authority, stranger))

    assert {grpc.StatusCode.UNAVAILABLE} == codes


async def test_a_certificate_does_not_stand_in_for_a_token(
    authority: Authority, tmp_path: Path
) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    tls = files(authority.sign("server"), authority.ca_file)
    shown = trusting(authority, authority.sign("worker"))
    async with served(tls=tls, tokens=tmp_path / "tokens") as world:
        with pytest.raises(UnauthenticatedError):
            await lists_buffers(world.server.address, shown)
        assert await lists_buffers(world.server.address, shown, tokens[Role.PRODUCER])


async def test_a_renewed_certificate_is_shown_without_a_restart(authority: Authority) -> None:
    old = authority.sign("server", valid=EXPIRED)
    async with served(tls=files(old)) as world:
        assert not await lists_buffers(world.server.address, trusting(authority))
        authority.sign("server")

        assert await lists_buffers(world.server.address, trusting(authority))


async def test_renewed_files_that_cannot_be_used_leave_the_old_certificate(
    authority: Authority,
) -> None:
    signed = authority.sign("server")
    async with served(tls=files(signed)) as world:
        signed.cert_file.write_text("half of a certifi")

        assert await lists_buffers(world.server.address, trusting(authority))
        assert 1 == world.server.metrics.registry.get_sample_value(
            "breadbox_credential_reload_failures_total"
        )


@pytest.mark.parametrize(
    ("dates", "said"),
    [
        ({"valid": EXPIRED}, "certificate has expired"),
        ({"begins": DAY, "valid": 2 * DAY}, "certificate is not yet valid"),
    ],
)
async def test_a_renewed_certificate_that_is_not_valid_now_leaves_the_old_one(
    authority: Authority,
    dates: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(tls=files(authority.sign("server"))) as world:
        authority.sign("server", **dates)
        for _ in range(2):  # It is said once, not by each connection.
            assert await lists_buffers(world.server.address, trusting(authority))
        assert 1 == world.server.metrics.registry.get_sample_value(
            "breadbox_credential_reload_failures_total"
        )
        assert said in caplog.text
        monkeypatch.setattr(tls, "AGAIN_S", 0.0)
        authority.sign("server", **dates)
        for failures in (2, 3):  # Read again after a while: it may be valid then.
            assert await lists_buffers(world.server.address, trusting(authority))
            assert failures == world.server.metrics.registry.get_sample_value(
                "breadbox_credential_reload_failures_total"
            )


async def test_a_renewed_certificate_that_is_not_for_its_key_leaves_the_old_one(
    authority: Authority,
) -> None:
    signed = authority.sign("server")
    async with served(tls=files(signed)) as world:
        signed.cert_file.write_bytes(authority.sign("other").cert_file.read_bytes())

        assert await lists_buffers(world.server.address, trusting(authority))
        assert 1 == world.server.metrics.registry.get_sample_value(
            "breadbox_credential_reload_failures_total"
        )


async def test_the_blocking_client_speaks_tls_too(authority: Authority) -> None:
    def buffers(address: str) -> int:
        with breadbox.connect(address, tls=trusting(authority)) as client:
            return len(client.list_buffers())

    async with served(tls=files(authority.sign("server"))) as world:
        assert 1 == await asyncio.to_thread(buffers, world.server.address)


async def test_the_local_socket_answers_beside_an_encrypted_port_to_its_owner_alone(
    authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "local.sock"
    async with served(tls=files(authority.sign("server")), local_socket=path) as world:
        assert await lists_buffers(f"unix:{path}", None)
        assert not await lists_buffers(world.server.address, None)
        assert 0 == path.stat().st_mode & 0o077


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "breadbox.example"])
def test_plaintext_that_others_could_hear_has_to_be_asked_for(host: str) -> None:
    with pytest.raises(StartError, match="--allow-plaintext"):
        check_exposure(Settings(tokens=Path("t")), host)
    check_exposure(Settings(tokens=Path("t"), tls_cert=Path("c"), tls_key=Path("k")), host)
    check_exposure(Settings(allow_plaintext=True), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_plaintext_that_stays_on_this_machine_is_fine(host: str) -> None:
    check_exposure(Settings(), host)


async def test_a_server_that_others_could_hear_does_not_start() -> None:
    with pytest.raises(StartError, match="is open to other machines"):
        async with served(listen="0.0.0.0:0"):
            pass


@pytest.mark.parametrize(
    ("cert", "key", "client_ca"),
    [("c", None, None), (None, "k", None), (None, None, "a"), ("c", None, "a")],
)
def test_half_of_a_certificate_is_refused(
    cert: str | None, key: str | None, client_ca: str | None
) -> None:
    paths = [Path(name) if name else None for name in (cert, key, client_ca)]
    with pytest.raises(StartError, match="go together"):
        Settings(tls_cert=paths[0], tls_key=paths[1], tls_client_ca=paths[2])


async def test_files_that_do_not_belong_together_are_told_by_name(authority: Authority) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    with pytest.raises(StartError, match=r"first\.pem and .*second\.key are no certificate"):
        async with served(tls=TlsFiles(first.cert_file, second.key_file)):
            pass


async def test_a_missing_certificate_is_told_by_name(authority: Authority, tmp_path: Path) -> None:
    signed = authority.sign("server")
    with pytest.raises(StartError, match=r"No such file or directory: .*absent\.pem"):
        async with served(tls=TlsFiles(tmp_path / "absent.pem", signed.key_file)):
            pass


# What a person is told ---------------------------------------------------------------------------


async def told(address: str, tls: breadbox.Tls | None) -> UnavailableError:
    """What both clients say, given half a minute in which to try again."""
    async with await connect(address, tls=tls) as client:
        with pytest.raises(UnavailableError) as of_asyncio:
            await client.list_buffers()

    def call() -> None:
        with breadbox.connect(address, tls=tls) as client:
            client.list_buffers()

    with pytest.raises(UnavailableError) as of_threads:
        await asyncio.to_thread(call)
    assert str(of_asyncio.value) == str(of_threads.value)
    assert [] == getattr(of_asyncio.value, "__notes__", []), "tried once"
    return of_asyncio.value


@pytest.mark.parametrize(
    ("signed_by", "fields", "words"),
    [
        ("other", {}, "no authority that this client trusts"),
        ("ca", {"valid": EXPIRED}, "has expired"),
        ("ca", {"host": "192.0.2.1"}, "for another name"),
    ],
)
async def test_a_certificate_that_does_not_fit_is_told_at_once_and_in_words(
    signed_by: str, fields: dict[str, Any], words: str, authority: Authority, tmp_path: Path
) -> None:
    signer = authority if signed_by == "ca" else Authority(tmp_path, signed_by)
    async with served(tls=files(signer.sign("server", **fields))) as world:
        error = await told(world.server.address, trusting(authority))

    assert isinstance(error, TlsError)
    assert words in str(error)


async def test_a_client_that_encrypts_is_told_that_the_server_does_not(
    authority: Authority,
) -> None:
    async with served() as world:
        error = await told(world.server.address, trusting(authority))

    assert isinstance(error, TlsError)
    assert "does not encrypt" in str(error)


async def test_a_client_in_the_clear_is_told_that_the_server_may_encrypt(
    authority: Authority,
) -> None:
    async with (
        served(tls=files(authority.sign("server"))) as world,
        await connect(world.server.address, reconnect_s=0) as client,
    ):
        with pytest.raises(UnavailableError, match="--tls-ca"):
            await client.list_buffers()


async def test_a_client_without_a_certificate_is_told_that_one_may_be_asked_for(
    authority: Authority,
) -> None:
    tls = files(authority.sign("server"), authority.ca_file)
    async with served(tls=tls) as world:
        address = world.server.address
        async with await connect(address, tls=trusting(authority), reconnect_s=0) as client:
            with pytest.raises(UnavailableError, match="--tls-client-ca"):
                await client.list_buffers()
