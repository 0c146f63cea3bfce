"""Keep bearer tokens in a file of SHA-256 hashes, which is read again when it changes.

A line is `ROLE NAME sha256:HEX`, then limits as `KEY=VALUE`; `#` begins a comment. Removing a
line revokes its token. If the file is gone or unusable, the old tokens stay valid for `GRACE_S`,
then none is. One unsalted round of SHA-256 is enough for a token of 256 random bits, not for
a password.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

import click

from breadbox.cli.base import Unusable
from breadbox.cli.command import command
from breadbox.cli.settings import Settings, setting
from breadbox.model.paths import read_regular, regular, stamp_of
from breadbox.model.sizes import parse_size_bytes
from breadbox.shared.threads import CallThreads, HungError
from breadbox.stores.deadline import Deadline
from breadbox.stores.disk import replace_text
from breadbox_server.access.authorization import Caller, Quotas, Role
from breadbox_server.base.errors import StartError
from breadbox_server.limits import PATTERNS_MAX, TOKENS_MAX

log = logging.getLogger(__name__)

FILE_SIZE_BYTES_MAX: Final = 2**20
RELOAD_PERIOD_S: Final = 1.0
ANSWER_S: Final = 5.0
"""Seconds that reading the file may take."""
GRACE_S: Final = 300.0
"""Seconds for which the old tokens stay valid while the file cannot be used: time to fix it."""
PREFIX: Final = "bbx_"
"""Prefix of every token, by which scanners of logs and repositories find leaked ones."""
_LINE: Final = re.compile(
    r"(?P<role>\S+)[ \t]+(?P<name>[A-Za-z0-9._-]{1,64})[ \t]+sha256:(?P<digest>[0-9a-f]{64})"
    r"(?P<bounds>(?:[ \t]+[a-z_]+=[!-~]*)*)"
)
_FORM: Final = "`ROLE NAME sha256:HEX [KEY=VALUE ...]`"
_BUFFER_PATTERN: Final = r"[A-Za-z0-9._*-]{1,64}"
_WORKER_PATTERN: Final = r'[!"$-+\--~]{1,128}'
_PATTERNS: Final = (
    f"1 to {PATTERNS_MAX} patterns with commas between them, each of {{}}, "
    "where * stands for any run of characters"
)


class TokenEntry(NamedTuple):
    """A line of the token file: a token's SHA-256 and its caller."""

    caller: Caller
    digest: bytes


def digest_of(token: str) -> bytes:
    """Return a token's SHA-256."""
    return hashlib.sha256(token.encode()).digest()


def parse(text: str) -> tuple[TokenEntry, ...]:
    """Parse a token file; a ValueError has the number of a wrong line, never its text."""
    entries: list[TokenEntry] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ValueError(f"line {number} is not {_FORM}")
        try:
            role = Role(match["role"])
        except ValueError:
            roles = ", ".join(role.value for role in Role)
            raise ValueError(f"line {number} names no role; use one of {roles}") from None
        try:
            caller = _bounded(Caller(match["name"], role), match["bounds"].split())
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        entries.append(TokenEntry(caller, bytes.fromhex(match["digest"])))
    if len(entries) > TOKENS_MAX:
        raise ValueError(f"it holds {len(entries)} tokens; the limit is {TOKENS_MAX}")
    for what, values in (
        ("name", [entry.caller.name for entry in entries]),
        ("token", [entry.digest.hex() for entry in entries]),
    ):
        if len(set(values)) < len(values):
            raise ValueError(f"it has a {what} twice")
    return tuple(entries)


_BOUNDS: Final[Mapping[str, tuple[str, Callable[[str], Any], str]]] = {
    "buffers": (
        f"{_BUFFER_PATTERN}(,{_BUFFER_PATTERN}){{0,{PATTERNS_MAX - 1}}}",
        lambda text: tuple(text.split(",")),
        _PATTERNS.format("A-Z a-z 0-9 . _ - *"),
    ),
    "workers": (
        f"{_WORKER_PATTERN}(,{_WORKER_PATTERN}){{0,{PATTERNS_MAX - 1}}}",
        lambda text: tuple(text.split(",")),
        _PATTERNS.format("printable ASCII without space, comma and #"),
    ),
    "workers_max": (r"[0-9]{1,15}", int, "a whole number of at least 1"),
    "bytes_held_max": (r".+", parse_size_bytes, "a size such as 8GiB, 500MB or 1048576"),
    "appends_per_s_max": (
        r"[0-9]{1,9}(\.[0-9]{1,6})?",
        float,
        "a number above 0, such as 200 or 0.5",
    ),
}
"""The limits that may follow the hash: pattern, parser, and a description for errors."""


def _read_bound(key: str, text: str) -> Any:
    form, read, wanted = _BOUNDS[key]
    with contextlib.suppress(ValueError):
        if re.fullmatch(form, text) and (value := read(text)):
            return value
    raise ValueError(f"{key} must be {wanted}")


def _bounded(caller: Caller, bounds: Sequence[str]) -> Caller:
    given: dict[str, Any] = {}
    for bound in bounds:
        key, _, text = bound.partition("=")
        if key not in _BOUNDS:
            raise ValueError(f"it has an unknown limit; use {', '.join(_BOUNDS)}")
        if key in given:
            raise ValueError(f"it has {key} twice")
        given[key] = _read_bound(key, text)
    patterns = {key: given.pop(key) for key in ("buffers", "workers") if key in given}
    return replace(caller, **patterns, quotas=Quotas(**given))


class TokenFile:
    """The tokens of a file; `on_failure` is called when the changed file cannot be used."""

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
        self._threads = CallThreads("tokens", 1)
        self._seen = stamp_of(self._path)
        self._unusable_since: float | None = None
        self._was_empty = False
        try:
            self._entries = self._read()
        except (OSError, ValueError) as error:
            raise _cannot_start(path, _reason(error)) from error
        if not self._entries:
            raise _cannot_start(path, "it holds no token, so no client could call")

    def caller_of(self, token: str) -> Caller | None:
        """Return a token's caller, or None; compares all entries: the time reveals nothing."""
        digest = digest_of(token)
        found: Caller | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of tokens of each role."""
        counted = Counter(entry.caller.role.value for entry in self._entries)
        return {role.value: counted[role.value] for role in Role}

    def names(self) -> frozenset[str]:
        """The names of all tokens."""
        return frozenset(entry.caller.name for entry in self._entries)

    @property
    def is_usable(self) -> bool:
        """True if the file could be used when it was last read."""
        return self._unusable_since is None

    async def keep_fresh(
        self, on_change: Callable[[], None], period_s: float = RELOAD_PERIOD_S
    ) -> None:
        """Read the file again whenever it has changed, until cancelled; report changed tokens."""
        while True:
            await asyncio.sleep(period_s)
            known = self._entries
            try:
                # Threads of its own: neither a store's disk nor this file's holds up the other.
                await self._threads.run(self.refresh, Deadline(ANSWER_S).left_s)
            except HungError:
                self._seen = None  # It is read again as soon as that ends, changed or not.
                self._count_unusable("its disk does not answer")
            if self._entries != known:
                on_change()

    def refresh(self) -> None:
        """Read the file again if it has changed; if unusable, keep the old tokens for `GRACE_S`.

        An empty file counts only if still empty at the next call: some editors empty it first.
        """
        stamp = stamp_of(self._path)
        if stamp == self._seen and not self._was_empty:
            self._end_grace()
            return
        self._seen = stamp
        try:
            entries = self._read()
        except (OSError, ValueError) as error:
            self._was_empty = False
            self._count_unusable(_reason(error))
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
            log.warning("%s holds no token any more: all calls are refused", self._path)

    def _count_unusable(self, why: str) -> None:
        self._on_failure()
        if self._unusable_since is None:
            self._unusable_since = self._clock()
        log.error(
            "%s cannot be used: %s; the old tokens stay for at most %.0f s",
            *(self._path, why, GRACE_S),
        )
        self._end_grace()

    def _end_grace(self) -> None:
        since = self._unusable_since
        if self._entries and since is not None and self._clock() - since >= GRACE_S:
            self._entries = ()
            log.error("%s could not be used for %.0f s: all calls are refused", self._path, GRACE_S)

    def _read(self) -> tuple[TokenEntry, ...]:
        with open(self._path, "rb", opener=regular) as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ValueError(f"others may write it; chmod o-w {self._path}")
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
    """Return a new token of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


_EXAMPLES: Final = """\b
Examples:
  breadbox token --role admin --name me --file tokens
  breadbox token --role producer --name team-a --buffer 'team-a-*' \\
      --worker 'a-*' --file tokens
  breadbox token --role producer --name guest --buffer guest --workers-max 8 \\
      --bytes-held-max 2GiB --appends-per-s-max 200 --file tokens
"""


class TokenSettings(Settings):
    """Options of `breadbox token`."""

    role: Role = setting(environment=False)
    """Role of the token, which decides the calls it may make."""
    name: str = setting(environment=False)
    """Name of the token in logs and metrics: its owner or purpose."""
    buffers: tuple[str, ...] = setting((), option="buffer", metavar="PATTERN", environment=False)
    """Buffers that the token may use; * matches any text. Repeat the option for more. Without it:
    all buffers."""
    workers: tuple[str, ...] = setting((), option="worker", metavar="PATTERN", environment=False)
    """Workers that it may append as; repeat the option for more. Without it: all. A worker started
    with --worker-name a-1 appends as a-1-0, a-1-1, and so on."""
    workers_max: str | None = setting(None, metavar="COUNT", environment=False)
    """Most workers that may append with the token."""
    bytes_held_max: str | None = setting(None, metavar="SIZE", environment=False)
    """Most held bytes that were appended with the token."""
    appends_per_s_max: str | None = setting(None, metavar="RATE", environment=False)
    """Most fragments appended with it per second, averaged over a few seconds. Episode reports
    have a limit of the same number."""
    path: Path | None = setting(None, option="file", environment=False)
    """Add the line to this token file, which is made if missing; a server that reads it
    accepts the token within a second."""


@command(TokenSettings, epilog=_EXAMPLES)
def token(settings: TokenSettings) -> None:
    """Make a bearer token.

    The token is printed to standard output, for a client's BREADBOX_TOKEN. Its line
    for the server's token file (breadbox serve --tokens) is printed to standard error, or added
    to --file; it does not reveal the token.
    """
    made = new_token()
    line = f"{settings.role.value} {settings.name} sha256:{digest_of(made).hex()}"
    for key in _BOUNDS:
        value = getattr(settings, key)
        text = value if isinstance(value, str) else ",".join(value or ())
        if text:
            try:
                _read_bound(key, text)
            except ValueError as error:
                option = key.removesuffix("s") if key in ("buffers", "workers") else key
                raise click.BadParameter(
                    str(error).removeprefix(f"{key} "), param_hint=f"--{option.replace('_', '-')}"
                ) from error
            line += f" {key}={text}"
    try:
        parse(line)
    except ValueError as error:
        raise click.BadParameter(
            "must be 1 to 64 characters of A-Z a-z 0-9 . _ -", param_hint="--name"
        ) from error
    if settings.path is None:
        click.echo(made)
        click.echo(line, err=True)
        return
    try:
        add_line(settings.path, line)
    except (OSError, ValueError) as error:
        raise Unusable(f"{settings.path} stays as it is: {_reason(error)}") from error
    click.echo(made)


def add_line(path: Path, line: str, *, replaces: str = "") -> None:
    """Add a line to a token file, or replace `replaces`, atomically; a new file has mode 0600."""
    path = path.resolve()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Held until closed: a second process that adds a line waits.
        fcntl.flock(directory, fcntl.LOCK_EX)
        _add_line(path, line, replaces)
    finally:
        os.close(directory)


def _add_line(path: Path, line: str, replaces: str) -> None:
    try:
        old = read_regular(path).decode("ascii")
    except FileNotFoundError:
        old = ""
    except UnicodeDecodeError:
        raise ValueError("it is not plain text") from None
    kept = [each for each in old.splitlines() if not replaces or each.split()[1:2] != [replaces]]
    text = "\n".join([*kept, line, ""])
    parse(text)
    replace_text(path, text)
