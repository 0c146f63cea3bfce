"""Token files for tests."""

from pathlib import Path

from breadbox_server.authorization import Role
from breadbox_server.tokens import digest_of, new_token


def write_token_file(path: Path) -> dict[Role, str]:
    """Write a file with one fresh token for each role; gives the tokens."""
    tokens = {role: new_token() for role in Role}
    path.write_text(
        "".join(
            f"{role.value} {role.value}-1 sha256:{digest_of(token).hex()}\n"
            for role, token in tokens.items()
        )
    )
    return tokens
