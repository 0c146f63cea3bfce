"""Token files for tests."""

from pathlib import Path

from breadbox_server.access.authorization import Role
from breadbox_server.access.tokens import digest_of, new_token


def write_token_file(path: Path) -> dict[Role, str]:
    """Write a file with one fresh token for each role; gives the tokens."""
    tokens = {role: new_token() for role in Role}
    path.write_text(
        "".join(line_of(f"{role.value} {role.value}-1", token) for role, token in tokens.items())
    )
    return tokens


def write_tokens(path: Path, *lines: str) -> list[str]:
    """Write a file with a fresh token for each of the lines "ROLE NAME [KEY=VALUE ...]"."""
    tokens = [new_token() for _ in lines]
    whole = path.with_name(f"{path.name}.whole")
    whole.write_text("".join(map(line_of, lines, tokens)))
    whole.replace(path)
    return tokens


def line_of(line: str, token: str) -> str:
    """The line of a token file for "ROLE NAME [KEY=VALUE ...]"."""
    role, name, *bounds = line.split()
    return " ".join((role, name, f"sha256:{digest_of(token).hex()}", *bounds)) + "\n"


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
