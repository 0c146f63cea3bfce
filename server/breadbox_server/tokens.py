"""Bearer tokens: a file of their hashes, read again when it changes.

A line is `ROLE NAME sha256:HEX`; `#` begins a comment. `breadbox token` makes a token and its line.
Taking a line out revokes its token, and a file without any lets nobody in. One that is gone or
cannot be read or understood says nothing, so what it said last holds for `GRACE_S` more; then
nobody is let in.
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
from time import monotonic
from typing import Final

import click

from breadbox_server.authorization import Role
from breadbox_server.errors import StartError
from breadbox_server.limits import TOKENS_MAX

log = logging.getLogger(__name__)

FILE_SIZE_BYTES_MAX: Final = 2**20
RELOAD_PERIOD_S: Final = 1.0
GRACE_S: Final = 300.0
"""Seconds for which the old tokens stay when the file is gone or cannot be used: time to mend it,
and an end to tokens that somebody meant to revoke."""
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
        ValueError: A line is malformed, a name or a token stands twice, or there are too many
            lines; the message names the line's number and never shows the line.
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
    """The tokens of a file, as it was when it was last readable, for at most `GRACE_S`.

    Args:
        path: The file. It may be a link that is replaced, as a Kubernetes secret is.
        on_failure: Called when a changed file cannot be used; the old tokens stay for the grace.
        clock: Monotonic seconds.

    Raises:
        StartError: The file cannot be used, or holds no token; says why and never shows its
            content.
    """

    def __init__(
        self,
        path: Path,
        on_failure: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._path = path
        self._on_failure = on_failure
        self._clock = clock
        self._seen = self._stamp()
        self._unusable_since: float | None = None
        self._was_empty = False
        try:
            self._entries = self._read()
        except (OSError, ValueError) as error:
            raise _cannot_start(path, _reason(error)) from error
        if not self._entries:
            raise _cannot_start(path, "it holds no token, so nobody could call")

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

    @property
    def is_usable(self) -> bool:
        """Whether the file could be used when it was last looked at."""
        return self._unusable_since is None

    async def keep_fresh(
        self, on_change: Callable[[], None], period_s: float = RELOAD_PERIOD_S
    ) -> None:
        """Read the file again whenever it has changed, until cancelled.

        Args:
            on_change: Called when other tokens are known than before.
            period_s: Seconds between two looks.
        """
        while True:
            await asyncio.sleep(period_s)
            known = self._entries
            self.refresh()
            if self._entries != known:
                on_change()

    def refresh(self) -> None:
        """Read the file again if it has changed.

        One that cannot be used leaves the old tokens for `GRACE_S`. One that is empty counts at the
        second look: whoever writes it in place empties it first.
        """
        stamp = self._stamp()
        if stamp == self._seen and not self._was_empty:
            self._end_grace()
            return
        self._seen = stamp
        try:
            entries = self._read()
        except (OSError, ValueError) as error:
            self._was_empty = False
            self._on_failure()
            if self._unusable_since is None:
                self._unusable_since = self._clock()
            log.error(  # noqa: TRY400 - the reason says it all
                "%s cannot be used: %s; the old tokens stay for at most %.0f s",
                self._path,
                _reason(error),
                GRACE_S,
            )
            self._end_grace()
            return
        if not entries and not self._was_empty:
            self._was_empty = True
            return
        self._was_empty = False
        self._unusable_since = None
        self._entries = entries
        if entries:
            log.info("%s was read again: %s", self._path, self.counts())
        else:
            log.warning("%s holds no token any more: nobody is let in", self._path)

    def _end_grace(self) -> None:
        since = self._unusable_since
        if self._entries and since is not None and self._clock() - since >= GRACE_S:
            self._entries = ()
            log.error("%s could not be used for %.0f s: nobody is let in", self._path, GRACE_S)

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            seen = self._path.stat()
        except OSError:
            return None
        # The last: of a file that could not be read only the mode may have been mended.
        return seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns

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


def _cannot_start(path: Path, why: str) -> StartError:
    return StartError(
        f"--tokens {path} cannot be used: {why}; make lines for it with breadbox token"
    )


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
