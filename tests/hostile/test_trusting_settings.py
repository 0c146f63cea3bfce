"""Settings under which strangers are obeyed, or passwords handed out, are refused at the start."""

import subprocess
from pathlib import Path

import pytest

from breadbox.model.errors import StoreUrlError
from breadbox.stores import has_secret, open_custodian, redact
from breadbox_server.access.tokens import TokenFile, new_token
from support.certificates import Authority
from support.redis_server import RedisServer
from support.server_process import END_S, ServerProcess, plain_environment, serve_command
from support.token_files import line_of, write_token_file

pytestmark = pytest.mark.integration

SECRET = "this-is-the-secret"


def refusal(*arguments: str) -> str:
    """Start a server that must not start; gives what it says."""
    process = subprocess.Popen(
        serve_command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
    try:
        _, told = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.wait()
    assert 2 == process.returncode, told
    assert "Traceback" not in told
    return told


def tls_options(folder: Path) -> tuple[list[str], Authority]:
    authority = Authority(folder)
    signed = authority.sign("server")
    return [
        *("--tls-cert", str(signed.cert_file), "--tls-key", str(signed.key_file)),
        *("--store", f"file://{folder}/store"),
    ], authority


def test_a_server_with_tls_that_would_obey_anybody_does_not_start(tmp_path: Path) -> None:
    """A stranger could delete a buffer."""
    options, _ = tls_options(tmp_path)
    told = refusal("--listen", "0.0.0.0:0", *options)

    assert "--tokens" in told
    assert "--allow-anonymous" in told


@pytest.mark.parametrize("asked", ["--allow-anonymous", "--tls-client-ca", "--tokens"])
def test_a_server_with_tls_starts_where_it_was_said_who_may_call(
    tmp_path: Path, asked: str
) -> None:
    options, authority = tls_options(tmp_path)
    write_token_file(tmp_path / "tokens")
    values = {"--tls-client-ca": authority.ca_file, "--tokens": tmp_path / "tokens"}
    options += [asked, *([str(values[asked])] if asked in values else [])]
    with ServerProcess(*options, listen="0.0.0.0:0", log=tmp_path / "log") as server:
        assert 0 == server.stop()


def test_a_server_does_not_hand_its_own_password_to_tokens_unless_asked_by_name(
    tmp_path: Path,
) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    with RedisServer(with_tcp=True, password=SECRET) as redis:
        url = f"redis://:{SECRET}@127.0.0.1:{redis.port}/0"
        options = ["--store", url, "--tokens", str(tmp_path / "tokens")]
        told = refusal("--listen", "127.0.0.1:0", *options)
        asked = ServerProcess(*options, "--share-store-password", log=tmp_path / "log")
        with asked:
            assert 0 == asked.stop()

    assert tokens
    assert "--client-store" in told
    assert "--share-store-password" in told
    assert SECRET not in told


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}/x@host:6379/0",
        f"redis://:{SECRET}#x@host:6379/0",
        f"redis://:{SECRET}?x@host:6379/0",
        f"redis://:x/{SECRET}@host:6379/0",
        f"redis://:x#{SECRET}@host:6379/0",
        f"redis://:x?{SECRET}@host:6379/0",
        f"redis://user:1/{SECRET}@host:6379/0",
        f"redis://user:1#{SECRET}@host/0",
        f"rediss://user:1?{SECRET}@host/0",
        f"redis+cluster://user:x/{SECRET}@host:6379,other:6379",
        f"redis+sentinel://user:x?{SECRET}@host:26379/name",
        f"file://user:{SECRET}#1@host/dir",
    ],
)
def test_a_password_with_signs_of_a_url_is_shown_nowhere(url: str) -> None:
    assert SECRET not in redact(url)
    assert has_secret(url)
    with pytest.raises(StoreUrlError) as refused:
        open_custodian(url)
    assert SECRET not in str(refused.value)
    assert "%2F" in str(refused.value)


def test_a_server_that_refuses_such_a_url_does_not_show_its_password() -> None:
    url = f"redis://user:1/{SECRET}@host:6379/0"
    told = refusal("--listen", "127.0.0.1:0", "--store", url)

    assert SECRET not in told
    assert "%2F" in told


def test_who_could_write_a_servers_files_does_not_become_its_administrator(tmp_path: Path) -> None:
    """A line that anybody may add would make anybody an administrator."""
    for option, content in (
        ("--tokens", f"admin me sha256:{'ab' * 32}\n"),
        ("--config", "allow-anonymous: true\n"),
    ):
        path = tmp_path / option
        path.write_text(content)
        path.chmod(0o666)
        told = refusal("--store", f"file://{tmp_path}/store", option, str(path))

        assert f"others may write it; chmod o-w {path}" in told


def test_a_token_file_that_others_may_write_from_now_on_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"admin me sha256:{'ab' * 32}\n")
    file = TokenFile(path)
    planted = new_token()
    path.write_text(path.read_text() + line_of("admin planted", planted))
    path.chmod(0o606)
    file.refresh()

    assert file.caller_of(planted) is None
    assert not file.is_usable
