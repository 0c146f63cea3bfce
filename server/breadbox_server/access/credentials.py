"""`breadbox secrets`: make the secrets of one installation, in one folder for each process."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import yaml

from breadbox.cli.base import Unusable
from breadbox.cli.command import command
from breadbox.cli.settings import Settings, of_one_call, setting
from breadbox.model.paths import read_regular
from breadbox.stores.disk import make_private_directory, new_opener, replace_text
from breadbox_server.access.authorization import Role
from breadbox_server.access.tokens import add_line, digest_of, new_token

ACL: Final = "redis/users.acl"
STORE: Final = "admin/store"
CONFIG: Final = "server/config.yml"
TOKENS: Final = "server/tokens"
PASSWORD: Final = "dashboards/password"
PASSWORD_BYTES: Final = 24
SERVER_RIGHTS: Final = (
    "~breadbox:* resetchannels +@all -@dangerous +info +client|setname +cluster|slots "
    "+cluster|shards +acl|getuser"
)
"""Rights of the server in Redis. When it starts, it reads those of the user `default`."""
DEFAULT_RIGHTS: Final = "~* &* +@all"
"""Rights of the user `default`, which is off: no client can use it. Redis reads its append-only
file as this user, and drops transactions and scripts that contain a command without its right."""
CLIENT_RIGHTS: Final = (
    "~breadbox:{[0-9a-f]*}:* resetchannels -@all +get +getrange +set +unlink +strlen +ping +hello "
    "+auth +client|setname +select +command +cluster|slots +cluster|shards"
)
"""Rights of clients in Redis: no command that would list payloads; a client must know the id."""
VIEWER_RIGHTS: Final = CLIENT_RIGHTS.replace(" +set +unlink", "")
"""Rights of viewers in Redis: those of clients without writing and deleting."""
PROBE_RIGHTS: Final = "resetchannels -@all +ping"


class SecretsSettings(Settings):
    """Options of `breadbox secrets`."""

    directory: Path = of_one_call(positional=True, folder=True)
    redis: str = setting("redis:6379", metavar="HOST:PORT", environment=False)
    """Address of Redis for server and clients."""


@command(SecretsSettings, "secrets")
def make_secrets(settings: SecretsSettings) -> None:
    r"""Make the tokens and passwords of an installation, in DIRECTORY.

    \b
    server/tokens       for breadbox serve --tokens
    server/config.yml   for breadbox serve --config: store URLs with passwords
    redis/users.acl     for redis-server --aclfile; it holds hashes only
    producer/token      for rollout workers, as BREADBOX_TOKEN=@FILE
    learner/token       for learners
    viewer/token        for the console, and for other read-only tools
    admin/token         for an operator's command line
    admin/store         the store's URL for clients, for BREADBOX_STORE_URL
    dashboards/password for Grafana

    Existing files stay. A token file that was deleted is made again, which revokes the old token;
    users of Redis made by an earlier version get the rights that they lack.
    """
    try:
        made = write_secrets(settings.directory, settings.redis)
    except (OSError, ValueError) as error:
        raise Unusable(f"{settings.directory} cannot be used: {error}") from error
    for path in made:
        click.echo(f"made {path}")


def write_secrets(directory: Path, redis: str) -> list[Path]:
    """Make the missing files and return their paths.

    `redis` is its HOST:PORT for server and clients. Raises ValueError for a broken token file.
    """
    make_private_directory(directory, has_parents=True)
    made: list[Path] = []

    def write(name: str, text: str) -> None:
        path = directory / name
        make_private_directory(path.parent)
        with open(path, "w", opener=new_opener) as file:
            file.write(text)
        made.append(path)

    # These files contain the same passwords, so they are made together.
    if not all((directory / name).exists() for name in (ACL, STORE, CONFIG)):
        passwords = {
            user: secrets.token_hex(PASSWORD_BYTES) for user in ("server", "client", "viewer")
        }
        urls = {
            user: f"redis://breadbox-{user}:{password}@{redis}/0"
            for user, password in passwords.items()
        }
        write(ACL, _acl(passwords))
        write(STORE, urls["client"])
        options = {"store": "server", "client-store": "client", "viewer-store": "viewer"}
        write(CONFIG, yaml.safe_dump({name: urls[user] for name, user in options.items()}))
    elif (better := _with_rights(users := read_regular(directory / ACL).decode())) != users:
        replace_text(directory / ACL, better)
        made.append(directory / ACL)
    for role in Role:
        if not (directory / role.value / "token").exists():
            token = new_token()
            make_private_directory(directory / "server")
            # Replace the old token's line: an operator deletes a token file to revoke the token.
            line = f"{role.value} {role.value} sha256:{digest_of(token).hex()}"
            add_line(directory / TOKENS, line, replaces=role.value)
            write(f"{role.value}/token", token)
    if not (directory / PASSWORD).exists():
        write(PASSWORD, secrets.token_hex(PASSWORD_BYTES))
        # Grafana's user must be able to read it; the folder above is private.
        (directory / PASSWORD).chmod(0o644)
        (directory / PASSWORD).parent.chmod(0o755)
    return made


def _acl(passwords: Mapping[str, str]) -> str:
    users = (
        f"user default off {DEFAULT_RIGHTS}",
        f"user probe on nopass {PROBE_RIGHTS}",
        f"user breadbox-server on #{_hash(passwords['server'])} {SERVER_RIGHTS}",
        f"user breadbox-client on #{_hash(passwords['client'])} {CLIENT_RIGHTS}",
        f"user breadbox-viewer on #{_hash(passwords['viewer'])} {VIEWER_RIGHTS}",
    )
    return "".join(f"{user}\n" for user in users)


def _with_rights(users: str) -> str:
    """Return the text of an ACL file with the rights added that earlier versions did not give."""
    lines = users.splitlines(keepends=True)
    return "".join(
        line.replace(line.rstrip(), line.rstrip() + _lacking(line.split()), 1) for line in lines
    )


def _lacking(words: Sequence[str]) -> str:
    match words:
        case ["user", "default", "off", *rules] if "+@all" not in rules:
            return f" {DEFAULT_RIGHTS}"
        case ["user", "breadbox-server", *rules] if not {"+acl|getuser", "+@admin"} & {*rules}:
            return " +acl|getuser"
    return ""


def _hash(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
