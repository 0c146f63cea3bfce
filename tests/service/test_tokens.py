from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import tokens
from breadbox_server.authorization import Role
from breadbox_server.errors import StartError
from breadbox_server.tokens import TokenFile, digest_of, new_token, parse, token
from support.served import served
from support.token_files import write_token_file

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"producer sha256:{DIGEST}", "line 1 is not `ROLE NAME sha256:HEX`"),
        (f"# one\nproducer a b sha256:{DIGEST}", "line 2 is not `ROLE NAME sha256:HEX`"),
        ("producer a sha256:1234", "line 1 is not `ROLE NAME sha256:HEX`"),
        (f"producer a md5:{DIGEST}", "line 1 is not `ROLE NAME sha256:HEX`"),
        (f"root a sha256:{DIGEST}", "line 1 names no role; there are producer, learner, admin"),
        (f"admin a sha256:{DIGEST}\nadmin b sha256:{DIGEST}", "a token stands in it twice"),
        (f"admin a sha256:{DIGEST}\nadmin a sha256:{'cd' * 32}", "a name stands in it twice"),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_the_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse(text)

    assert problem == str(refused.value)


def test_a_plain_token_in_the_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    """The commonest mistake: the token instead of its hash."""
    secret = new_token()
    path = tmp_path / "tokens"
    path.write_text(f"admin me {secret}\n")
    with pytest.raises(StartError) as refused:
        TokenFile(path)

    assert secret not in str(refused.value)
    assert "line 1" in str(refused.value)


def test_more_tokens_than_the_limit_are_refused() -> None:
    text = "".join(
        f"producer w{number} sha256:{number:064x}\n" for number in range(tokens.TOKENS_MAX + 1)
    )
    with pytest.raises(ValueError, match="257 tokens; the limit is 256"):
        parse(text)


def test_a_missing_file_keeps_the_server_from_starting(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory"):
        TokenFile(tmp_path / "tokens")


def test_every_entry_is_compared_whichever_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the time of a call does not tell where in the file a token stands."""
    known = write_token_file(tmp_path / "tokens")
    file = TokenFile(tmp_path / "tokens")
    compared: list[bytes] = []
    compare = tokens.hmac.compare_digest

    def counting(first: bytes, second: bytes) -> bool:
        compared.append(first)
        return compare(first, second)

    monkeypatch.setattr(tokens.hmac, "compare_digest", counting)
    roles = [file.role_of(known[Role.PRODUCER]), file.role_of("wrong")]

    assert [Role.PRODUCER, None] == roles
    assert 6 == len(compared)


def test_a_changed_file_is_taken_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    old = write_token_file(path)
    file = TokenFile(path)
    new = write_token_file(tmp_path / "next")
    (tmp_path / "next").replace(path)
    file.refresh()

    assert None is file.role_of(old[Role.ADMIN])
    assert Role.ADMIN is file.role_of(new[Role.ADMIN])


@pytest.mark.parametrize("content", ["nonsense\n", "\xff", None], ids=repr)
def test_a_file_that_cannot_be_used_leaves_the_old_tokens_for_a_while_and_then_none(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    failures: list[None] = []
    now = [1000.0]
    file = TokenFile(path, on_failure=lambda: failures.append(None), clock=lambda: now[0])
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="latin-1")
    file.refresh()
    now[0] += tokens.GRACE_S - 1
    file.refresh()
    within = file.role_of(known[Role.LEARNER])
    now[0] += 1
    file.refresh()
    beyond = file.role_of(known[Role.LEARNER])
    usable = [file.is_usable]
    renewed = write_token_file(path)
    file.refresh()

    assert (Role.LEARNER, None) == (within, beyond)
    assert 1 == len(failures)
    assert [False, True] == [*usable, file.is_usable]
    assert Role.LEARNER is file.role_of(renewed[Role.LEARNER])


@pytest.mark.parametrize("content", ["", "# {}", "\n# nobody\n"])
def test_a_file_without_tokens_lets_nobody_in(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    file = TokenFile(path)
    path.write_text(content.format(path.read_text().replace("\n", "\n# ")))
    # At the second look: whoever writes a file in place empties it first.
    file.refresh()
    at_first = file.role_of(known[Role.ADMIN])
    file.refresh()

    assert (Role.ADMIN, None) == (at_first, file.role_of(known[Role.ADMIN]))


def test_a_file_that_is_written_in_place_lets_everybody_in_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    content = path.read_text()
    file = TokenFile(path)
    path.write_text("")
    file.refresh()
    assert Role.ADMIN is file.role_of(known[Role.ADMIN])
    path.write_text(content)
    file.refresh()
    file.refresh()
    assert Role.ADMIN is file.role_of(known[Role.ADMIN])


@pytest.mark.parametrize("content", ["", "# only this\n\n"])
def test_a_server_does_not_start_with_a_file_without_tokens(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(StartError, match="it holds no token, so nobody could call"):
        TokenFile(tmp_path / "tokens")


def test_a_file_that_goes_away_leaves_the_old_tokens_and_is_taken_when_it_is_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    file = TokenFile(path)
    path.unlink()
    file.refresh()
    assert Role.LEARNER is file.role_of(known[Role.LEARNER])

    renewed = write_token_file(path)
    file.refresh()
    assert Role.LEARNER is file.role_of(renewed[Role.LEARNER])


async def test_a_running_server_takes_a_changed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens.TokenFile.keep_fresh, "__defaults__", (0.005,))
    path = tmp_path / "tokens"
    write_token_file(path)
    async with served(tokens=path) as world:
        known = write_token_file(tmp_path / "next")
        (tmp_path / "next").replace(path)
        headers = (("authorization", f"Bearer {known[Role.ADMIN]}"),)
        code = None
        while code is not grpc.StatusCode.OK:
            code = await world.stub.ListBuffers(pb.ListBuffersRequest(), metadata=headers).code()


def test_the_command_makes_a_token_and_its_line() -> None:
    done = CliRunner().invoke(token, ["--role", "learner", "--name", "gpu-box"])
    made = done.stdout.strip()
    (entry,) = parse(done.stderr)

    assert 0 == done.exit_code
    assert (Role.LEARNER, "gpu-box") == (entry.role, entry.name)
    assert digest_of(made) == entry.digest
    assert made not in done.stderr


def test_the_command_refuses_a_name_that_the_file_could_not_hold() -> None:
    done = CliRunner().invoke(token, ["--role", "learner", "--name", "gpu box"])

    assert 2 == done.exit_code
    assert "" == done.stdout


def test_an_entry_does_not_show_its_digest() -> None:
    (entry,) = parse(f"admin me sha256:{DIGEST}")

    assert "ab" * 4 not in repr(entry)
