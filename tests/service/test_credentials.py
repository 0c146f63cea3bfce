"""`breadbox secrets`: what it makes fits together, and is made once."""

import secrets
from pathlib import Path

import pytest
import redis
import yaml
from click.testing import CliRunner

from breadbox.model.errors import InvalidRequestError
from breadbox.model.options import ClientOptions
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation
from breadbox_server.access.authorization import Role
from breadbox_server.access.credentials import (
    ACL,
    CONFIG,
    STORE,
    TOKENS,
    make_secrets,
    write_secrets,
)
from breadbox_server.access.tokens import TokenFile
from support.redis_server import RedisServer
from support.store_contract import read_back


def content(directory: Path) -> dict[str, bytes]:
    """What every file of a folder holds."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    write_secrets(tmp_path / "made", "redis:6379")
    before = content(tmp_path / "made")
    again = write_secrets(tmp_path / "made", "elsewhere:1")

    assert [] == again
    assert before == content(tmp_path / "made")
    assert 9 == len(before)


def test_users_of_an_earlier_version_get_the_rights_that_they_lack(tmp_path: Path) -> None:
    write_secrets(tmp_path, "redis:6379")
    path = tmp_path / ACL
    now = path.read_text()
    earlier = now.replace("user default off ~* &* +@all", "user default off")
    earlier = earlier.replace(" +acl|getuser", "")
    path.write_text(f"{earlier}# Somebody's.\nuser somebody on #{'0' * 64} ~a* +get\n")
    before = content(tmp_path)
    made = write_secrets(tmp_path, "elsewhere:1")
    after = content(tmp_path)

    assert [path] == made
    assert f"{now}# Somebody's.\nuser somebody on #{'0' * 64} ~a* +get\n" == path.read_text()
    assert 0o600 == path.stat().st_mode & 0o777
    assert [ACL] == [name for name, held in before.items() if held != after[name]]
    assert [] == write_secrets(tmp_path, "redis:6379")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("user default off ~* &* +@all", None),
        ("user default off", "may not do everything"),
        ("user default on nopass ~other:* &* +@all", "may not do everything"),
    ],
)
async def test_a_default_user_as_whom_redis_cannot_read_its_file_is_a_concern(
    tmp_path: Path, line: str, said: str | None
) -> None:
    """Redis 7 reads its append-only file as `default`, and drops what that user may not do."""
    redis_server = RedisServer(with_tcp=True, is_durable=True, users=tmp_path / ACL)
    write_secrets(tmp_path, f"127.0.0.1:{redis_server.port}")
    users = (tmp_path / ACL).read_text()
    assert "user default off ~* &* +@all" in users.splitlines()
    (tmp_path / ACL).write_text(users.replace("user default off ~* &* +@all", line))
    with redis_server:
        custodian = open_custodian(yaml.safe_load((tmp_path / CONFIG).read_text())["store"])
        concerns = await custodian.concerns()
        await custodian.close()

    if said is None:
        assert () == concerns
    else:
        (concern,) = concerns
        assert said in concern
        assert "`~* &* +@all`" in concern


async def test_a_user_that_may_not_ask_after_default_is_a_concern(tmp_path: Path) -> None:
    redis_server = RedisServer(with_tcp=True, is_durable=True, users=tmp_path / ACL)
    write_secrets(tmp_path, f"127.0.0.1:{redis_server.port}")
    (tmp_path / ACL).write_text((tmp_path / ACL).read_text().replace(" +acl|getuser", ""))
    with redis_server:
        custodian = open_custodian(yaml.safe_load((tmp_path / CONFIG).read_text())["store"])
        (concern,) = await custodian.concerns()
        await custodian.close()

    assert "cannot be seen, since this server's user lacks +acl|getuser" in concern


def test_nobody_else_can_read_what_was_made(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    write_secrets(directory, "redis:6379")

    assert 0o700 == directory.stat().st_mode & 0o777
    readable = {path.relative_to(directory).as_posix() for path in directory.rglob("*")
                if path.stat().st_mode & 0o077}  # fmt: skip
    assert {"dashboards", "dashboards/password"} == readable


def test_each_role_has_a_token_that_the_servers_file_knows(tmp_path: Path) -> None:
    write_secrets(tmp_path, "redis:6379")
    file = TokenFile(tmp_path / TOKENS)

    for role in Role:
        caller = file.caller_of((tmp_path / role.value / "token").read_text())
        assert caller is not None
        assert role is caller.role


def test_a_token_that_was_deleted_is_made_anew_and_the_old_one_ends(tmp_path: Path) -> None:
    write_secrets(tmp_path, "redis:6379")
    path = tmp_path / "producer" / "token"
    old = path.read_text()
    path.unlink()
    made = write_secrets(tmp_path, "redis:6379")
    file = TokenFile(tmp_path / TOKENS)

    assert [path] == made
    assert file.caller_of(old) is None
    assert file.caller_of(path.read_text()) is not None
    assert {role.value: 1 for role in Role} == file.counts()


async def test_redis_takes_its_users_and_each_may_do_its_work(tmp_path: Path) -> None:
    with RedisServer(with_tcp=True) as server:
        address = f"127.0.0.1:{server.port}"
        write_secrets(tmp_path, address)
        with server.client() as admin:
            users = (tmp_path / "redis" / "users.acl").read_text().splitlines()
            # This client is the default user, which goes last.
            for line in reversed(users):
                _, name, *rules = line.split()
                admin.execute_command("ACL", "SETUSER", name, "reset", *rules)
        urls = yaml.safe_load((tmp_path / CONFIG).read_text())
        store = open_store((tmp_path / STORE).read_text())
        custodian = open_custodian(urls["store"])
        references = store.write_many([[memoryview(secrets.token_bytes(100))]])
        confirmed = await custodian.confirm(references)
        read = read_back(store, references)
        store.close()
        await custodian.close()
        with redis.Redis(port=server.port, username="probe", password="-") as probe:
            alive = probe.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                probe.get("breadbox:{a}:b")
        with (
            redis.Redis(port=server.port) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()

    assert (tmp_path / STORE).read_text() == urls["client-store"]
    assert [Confirmation.THERE] == confirmed
    assert 1 == len(read)
    assert alive


def test_another_users_folder_is_left_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    done = CliRunner().invoke(make_secrets, [str(directory)])

    assert 2 == done.exit_code
    assert "other users may write it" in done.stderr
    assert {} == content(directory)


def test_a_client_reads_its_token_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("bbx_secret\n")

    metadata = dict(ClientOptions(token=f"@{tmp_path}/token").metadata())
    assert "Bearer bbx_secret" == metadata["authorization"]


@pytest.mark.parametrize(
    ("written", "problem"),
    [(None, "cannot be read"), (b"", "not empty"), (b"\xff", "plain text")],
)
def test_a_tokens_file_that_holds_none_is_said_so(
    tmp_path: Path, written: bytes | None, problem: str
) -> None:
    if written is not None:
        (tmp_path / "token").write_bytes(written)
    with pytest.raises(InvalidRequestError, match=problem):
        ClientOptions(token=f"@{tmp_path}/token").metadata()


def test_help_shows_the_files_line_by_line() -> None:
    shown = CliRunner().invoke(make_secrets, ["--help"]).output
    assert "\n  server/tokens       for breadbox serve --tokens\n" in shown
    assert "\\b" not in shown
