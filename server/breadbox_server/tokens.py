"""Bearer tokens: a file of their hashes, read again when it changes.

A line is `ROLE NAME sha256:HEX`; `#` begins a comment. `breadbox token` makes a token and its line.
A token has 256 random bits, so one round of SHA-256 without salt keeps the file from giving any
away; that would not hold for a password that a person chose.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from breadbox_server.authorization import Role
from breadbox_server.errors import StartError

log = logging.getLogger(__name__)

TOKENS_MAX: Final = 256
"""Each call compares its token with all of them, so that time tells nothing."""
FILE_SIZE_BYTES_MAX: Final = 2**20
RELOAD_PERIOD_S: Final = 1.0
PREFIX: Final = "bbx_"
"""Begins every token, so that scanners of logs and repositories can find one that leaked."""
_LINE: Final = re.compile(
    r"(?P<role>\S+)[ \t]+(?P<name>[A-Za-z0-9._-]{1,64})[ \t]+sha256:(?P<digest>[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token that is known; the token itself is not."""

    role: Role
    name: str
    """For people, and for taking it out of the file again."""
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""


def digest_of(token: str) -> bytes:
    """What the file holds of a token."""
    return hashlib.sha256(token.encode()).digest()


def parse(text: str) -> tuple[TokenEntry, ...]:
    """Read the lines of a token file.

    Raises:
        ValueError: A line is malformed, a name or a token stands twice, there are too many lines,
            or none; the message names the line's number and never shows the line.
    """
    entries: list[TokenEntry] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ValueError(f"line {number} is not `ROLE NAME sha256:HEX`")
        try:
            role = Role(match["role"])
        except ValueError:
            roles = ", ".join(role.value for role in Role)
            raise ValueError(f"line {number} names no role; there are {roles}") from None
        entries.append(TokenEntry(role, match["name"], bytes.fromhex(match["digest"])))
    if not entries:
        raise ValueError("it holds no token, so nobody could call")
    if len(entries) > TOKENS_MAX:
        raise ValueError(f"it holds {len(entries)} tokens; the limit is {TOKENS_MAX}")
    for what, values in (
        ("name", [entry.name for entry in entries]),
        ("token", [entry.digest.hex() for entry in entries]),
    ):
        if len(set(values)) < len(values):
            raise ValueError(f"a {what} stands in it twice")
    return tuple(entries)


class TokenFile:
    """The tokens of a file, as it was when it was last readable.

    Args:
        path: The file. It may be a link that is replaced, as a Kubernetes secret is.
        on_failure: Called when a changed file cannot be used; the old tokens stay.

    Raises:
        StartError: The file cannot be used; says why and never shows its content.
    """

    def __init__(self, path: Path, on_failure: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._on_failure = on_failure
        self._seen = self._stamp()
        try:
            self._entries = self._read()
        except (OSError, ValueError) as error:
            raise StartError(
                f"--tokens {path} cannot be used: {_reason(error)}; "
                "make lines for it with breadbox token"
            ) from error

    def role_of(self, token: str) -> Role | None:
        """The role of a token; looks at every entry, whichever matches."""
        digest = digest_of(token)
        found: Role | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.role
        return found

    def counts(self) -> dict[str, int]:
        """Tokens by role."""
        counted = Counter(entry.role.value for entry in self._entries)
        return {role.value: counted[role.value] for role in Role}

    async def keep_fresh(self, period_s: float = RELOAD_PERIOD_S) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used leaves the old tokens."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._entries = self._read()
        except (OSError, ValueError) as error:
            self._on_failure()
            log.error("%s cannot be used, the old tokens stay: %s", self._path, _reason(error))  # noqa: TRY400
        else:
            log.info("%s was read again: %s", self._path, self.counts())

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            seen = self._path.stat()
        except OSError:
            return None
        return seen.st_ino, seen.st_size, seen.st_mtime_ns

    def _read(self) -> tuple[TokenEntry, ...]:
        with self._path.open("rb") as file:
            content = file.read(FILE_SIZE_BYTES_MAX + 1)
        if len(content) > FILE_SIZE_BYTES_MAX:
            raise ValueError(f"it is larger than {FILE_SIZE_BYTES_MAX} bytes")
        try:
            text = content.decode("ascii")
        except UnicodeDecodeError:
            raise ValueError("it is not plain text") from None
        return parse(text)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or "it cannot be read") if isinstance(error, OSError) else str(error)


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


@click.command()
@click.option(
    "--role",
    required=True,
    type=click.Choice([role.value for role in Role]),
    help="What it may do.",
)
@click.option("--name", required=True, help="For people: whose it is, or what for.")
def token(role: str, name: str) -> None:
    """Make a bearer token.

    The token goes to standard output, for whoever shall use it (BREADBOX_TOKEN). Its line for the
    server's token file (breadbox serve --tokens) goes to standard error; it gives the token away to
    nobody.
    """
    made = new_token()
    line = f"{role} {name} sha256:{digest_of(made).hex()}"
    try:
        parse(line)
    except ValueError as error:
        raise click.BadParameter(
            "must be 1 to 64 characters of A-Z a-z 0-9 . _ -", param_hint="--name"
        ) from error
    click.echo(made)
    click.echo(line, err=True)
