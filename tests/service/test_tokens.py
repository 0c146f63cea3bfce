import hmac
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.access import tokens
from breadbox_server.access.authorization import Caller, Quotas, Role
from breadbox_server.access.tokens import TokenFile, digest_of, new_token, parse, token
from breadbox_server.base.errors import StartError
from breadbox_server.limits import TOKENS_MAX
from support.served import served
from support.token_files import write_token_file

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"producer sha256:{DIGEST}", "line 1 is not `ROLE NAME sha256:HEX [KEY=VALUE ...]`"),
        (
            f"# one\nproducer a b sha256:{DIGEST}",
            "line 2 is not `ROLE NAME sha256:HEX [KEY=VALUE ...]`",
        ),
        ("producer a sha256:1234", "line 1 is not `ROLE NAME sha256:HEX [KEY=VALUE ...]`"),
        (f"producer a md5:{DIGEST}", "line 1 is not `ROLE NAME sha256:HEX [KEY=VALUE ...]`"),
        (
            f"root a sha256:{DIGEST}",
            "line 1 names no role; use one of producer, learner, viewer, admin",
        ),
        (f"admin a sha256:{DIGEST}\nadmin b sha256:{DIGEST}", "it has a token twice"),
        (f"admin a sha256:{DIGEST}\nadmin a sha256:{'cd' * 32}", "it has a name twice"),
        (
            f"admin a sha256:{DIGEST} secret=yes",
            "line 1: it has an unknown limit; use buffers, workers, workers_max, "
            "bytes_held_max, appends_per_s_max",
        ),
        (f"admin a sha256:{DIGEST} workers=a workers=b", "line 1: it has workers twice"),
        (
            f"admin a sha256:{DIGEST} buffers=a,,b",
            "line 1: buffers must be 1 to 16 patterns with commas between them, each of "
            "A-Z a-z 0-9 . _ - *, where * stands for any run of characters",
        ),
        (
            f"admin a sha256:{DIGEST} workers_max=0",
            "line 1: workers_max must be a whole number of at least 1",
        ),
        (
            f"admin a sha256:{DIGEST} bytes_held_max=many",
            "line 1: bytes_held_max must be a size such as 8GiB, 500MB or 1048576",
        ),
        (
            f"admin a sha256:{DIGEST} appends_per_s_max=nan",
            "line 1: appends_per_s_max must be a number above 0, such as 200 or 0.5",
        ),
    ],
)
def test_a_file_that_is_not_right_is_refused_with_the_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse(text)

    assert problem == str(refused.value)


@pytest.mark.parametrize("empty", ["buffers", "workers"])
def test_a_bound_to_nothing_is_not_taken_for_none(empty: str) -> None:
    with pytest.raises(ValueError, match=f"line 1: {empty} must be 1 to 16 patterns"):
        parse(f"producer a sha256:{DIGEST} {empty}=")


def test_a_line_says_what_bounds_the_token() -> None:
    (entry,) = parse(
        f"producer a sha256:{DIGEST} buffers=a-*,shared workers=a:* workers_max=8 "
        "bytes_held_max=2GiB appends_per_s_max=12.5  # team a"
    )
    (free,) = parse(f"learner b sha256:{DIGEST}")

    quotas = Quotas(workers_max=8, bytes_held_max=2 << 30, appends_per_s_max=12.5)
    assert Caller("a", Role.PRODUCER, ("a-*", "shared"), ("a:*",), quotas) == entry.caller
    assert Caller("b", Role.LEARNER, ("*",), None, Quotas()) == free.caller


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
    text = "".join(f"producer w{number} sha256:{number:064x}\n" for number in range(TOKENS_MAX + 1))
    with pytest.raises(ValueError, match="257 tokens; the limit is 256"):
        parse(text)


def test_a_missing_file_keeps_the_server_from_starting(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory"):
        TokenFile(tmp_path / "tokens")


def role_of(file: TokenFile, token: str) -> Role | None:
    caller = file.caller_of(token)
    return None if caller is None else caller.role


def test_every_entry_is_compared_whichever_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the time of a call does not tell where in the file a token stands."""
    known = write_token_file(tmp_path / "tokens")
    file = TokenFile(tmp_path / "tokens")
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counting(first: bytes, second: bytes) -> bool:
        compared.append(first)
        return compare(first, second)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    roles = [role_of(file, known[Role.PRODUCER]), role_of(file, "wrong")]

    assert [Role.PRODUCER, None] == roles
    assert 2 * len(known) == len(compared)


def test_a_changed_file_is_taken_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    old = write_token_file(path)
    file = TokenFile(path)
    new = write_token_file(tmp_path / "next")
    (tmp_path / "next").replace(path)
    file.refresh()

    assert None is role_of(file, old[Role.ADMIN])
    assert Role.ADMIN is role_of(file, new[Role.ADMIN])


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
    within = role_of(file, known[Role.LEARNER])
    now[0] += 1
    file.refresh()
    beyond = role_of(file, known[Role.LEARNER])
    usable = [file.is_usable]
    renewed = write_token_file(path)
    file.refresh()

    assert (Role.LEARNER, None) == (within, beyond)
    assert 1 == len(failures)
    assert [False, True] == [*usable, file.is_usable]
    assert Role.LEARNER is role_of(file, renewed[Role.LEARNER])


@pytest.mark.parametrize("content", ["", "# {}", "\n# nobody\n"])
def test_a_file_without_tokens_lets_nobody_in(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    file = TokenFile(path)
    path.write_text(content.format(path.read_text().replace("\n", "\n# ")))
    # At the second look: whoever writes a file in place empties it first.
    file.refresh()
    at_first = role_of(file, known[Role.ADMIN])
    file.refresh()

    assert (Role.ADMIN, None) == (at_first, role_of(file, known[Role.ADMIN]))


def test_a_file_that_is_written_in_place_lets_everybody_in_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    content = path.read_text()
    file = TokenFile(path)
    path.write_text("")
    file.refresh()
    assert Role.ADMIN is role_of(file, known[Role.ADMIN])
    path.write_text(content)
    file.refresh()
    file.refresh()
    assert Role.ADMIN is role_of(file, known[Role.ADMIN])


@pytest.mark.parametrize("content", ["", "# only this\n\n"])
def test_a_server_does_not_start_with_a_file_without_tokens(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(StartError, match="it holds no token, so no client could call"):
        TokenFile(tmp_path / "tokens")


def test_a_file_that_goes_away_leaves_the_old_tokens_and_is_taken_when_it_is_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens"
    known = write_token_file(path)
    file = TokenFile(path)
    path.unlink()
    file.refresh()
    assert Role.LEARNER is role_of(file, known[Role.LEARNER])

    renewed = write_token_file(path)
    file.refresh()
    assert Role.LEARNER is role_of(file, renewed[Role.LEARNER])


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
    assert Caller("gpu-box", Role.LEARNER) == entry.caller
    assert digest_of(made) == entry.digest
    assert made not in done.stderr


def test_the_command_refuses_a_name_that_the_file_could_not_hold() -> None:
    done = CliRunner().invoke(token, ["--role", "learner", "--name", "gpu box"])

    assert 2 == done.exit_code
    assert "" == done.stdout


def test_the_command_adds_lines_to_a_file_that_a_server_reads(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first = add(path, "--role", "admin", "--name", "me")
    bounds = ("--buffer", "a-*", "--buffer", "b", "--worker", "w:*", "--workers-max", "8")
    quotas = ("--bytes-held-max", "2GiB", "--appends-per-s-max", "0.5")
    second = add(path, "--role", "producer", "--name", "them", *bounds, *quotas)
    file = TokenFile(path)

    assert 0o600 == path.stat().st_mode & 0o777
    assert [path] == list(tmp_path.iterdir())
    assert Caller("me", Role.ADMIN) == file.caller_of(first)
    assert Caller(
        "them", Role.PRODUCER, ("a-*", "b"), ("w:*",), Quotas(8, 2 << 30, 0.5)
    ) == file.caller_of(second)


def test_the_command_keeps_what_stands_in_a_file_and_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\nadmin me sha256:{DIGEST}")
    path.chmod(0o640)
    add(path, "--role", "producer", "--name", "them")

    assert ["# ours", f"admin me sha256:{DIGEST}"] == path.read_text().splitlines()[:2]
    assert 0o640 == path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f"admin them sha256:{DIGEST}\n", "it has a name twice"),
        ("nonsense\n", "line 1 is not"),
        ("\xff", "it is not plain text"),
    ],
)
def test_the_command_leaves_a_file_as_it_is_that_would_be_none(
    tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(content, encoding="latin-1")
    done = CliRunner().invoke(token, ["--role", "producer", "--name", "them", "--file", str(path)])

    assert (2, "") == (done.exit_code, done.stdout)
    assert f"{path} stays as it is: {problem}" in done.stderr
    assert content.encode("latin-1") == path.read_bytes()


def test_lines_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with ThreadPoolExecutor(8) as adding:
        for number in range(32):
            adding.submit(tokens.add_line, path, f"admin a{number} sha256:{number:064x}")

    assert {f"a{number}" for number in range(32)} == {
        entry.caller.name for entry in parse(path.read_text())
    }


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--buffer", "a b", "each of A-Z a-z 0-9 . _ - *"),
        ("--worker", "a#b", "printable ASCII without space, comma and #"),
        ("--worker", "a,b c", "printable ASCII"),
        ("--workers-max", "none", "whole number of at least 1"),
        ("--bytes-held-max", "2GX", "a size such as 8GiB"),
        ("--appends-per-s-max", "-1", "a number above 0"),
    ],
)
def test_the_command_says_which_bound_is_malformed(option: str, value: str, problem: str) -> None:
    done = CliRunner().invoke(token, ["--role", "producer", "--name", "them", option, value])

    assert (2, "") == (done.exit_code, done.stdout)
    assert f"Invalid value for {option}: must be" in done.stderr
    assert problem in done.stderr


def add(path: Path, *options: str) -> str:
    """Add a line with the command; gives the token."""
    done = CliRunner().invoke(token, [*options, "--file", str(path)])
    assert (0, "") == (done.exit_code, done.stderr)
    return done.stdout.strip()


def test_an_entry_does_not_show_its_digest() -> None:
    (entry,) = parse(f"admin me sha256:{DIGEST}")

    assert "ab" * 4 not in repr(entry)
