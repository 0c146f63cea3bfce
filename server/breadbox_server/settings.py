"""What can be set, by flag, environment or file: names, units, defaults, checks.

The command line reads the environment (`BREADBOX_<OPTION>`) and the file (`--config`) through
click; nothing else in the server looks at either.
"""

import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from breadbox.stores import has_secret, redact
from breadbox.stores.urls import GATEWAY_URL
from breadbox_server.core.config import BufferConfig
from breadbox_server.errors import StartError
from breadbox_server.limits import BUFFERS_MAX, CONNECTIONS_MAX, UNANNOUNCED_BYTES_MAX
from breadbox_server.transport import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One server's settings, checked by whoever made them. `repr` hides URLs with passwords."""

    listen: str = "127.0.0.1:50051"
    """HOST:PORT, [IPV6]:PORT or unix:PATH; port 0 takes a free one."""
    store: str = field(repr=False)
    """URL of the payload store, as the server and its clients open it."""
    local_socket: Path | None = None
    """Unix socket, for this user alone, that is listened on too; for probes and tools beside it."""
    client_store: str = field(default="", repr=False)
    """URL of the payload store as clients are told it; empty: the same as the server's."""
    has_gateway: bool = False
    """Whether payloads pass through the server: those of producers, and where `client_store` is
    empty everybody's."""
    gateway_unannounced_bytes: int = UNANNOUNCED_BYTES_MAX
    """What a token may have written through the gateway and not announced; a payload is no
    larger."""
    tls: TlsFiles | None = None
    """Certificates; None: calls are not encrypted."""
    allow_plaintext: bool = False
    """Whether other machines may be talked to in the clear."""
    allow_anonymous: bool = False
    """Whether other machines may do everything without a token or a certificate."""
    shares_store_password: bool = False
    """Whether clients with tokens are told the server's own password of the store."""
    tokens: Path | None = None
    """File of the tokens that are known; None: nobody is asked for one."""
    metrics_listen: str = ""
    """HOST:PORT of the metrics; empty: none."""
    default_config: BufferConfig = field(default_factory=BufferConfig)
    """Limits of the buffer `default`, and of new buffers where nothing else is said."""
    buffers_max: int = BUFFERS_MAX
    """Buffers held at a time."""
    connections_max: int = CONNECTIONS_MAX
    """Connections that `listen` takes at a time, and as many a `local_socket`; the next is closed
    at once. Fewer where the process may not open so many files."""
    unannounced_s: float = 600.0
    """Seconds that a payload lives before it is announced."""
    poison_after: int = 2
    """Leases in which a chunk is told of as unreadable before it is granted no more."""
    piece_size_bytes: int = 0
    """Advice to writers; 0: as the store thinks best."""
    drain_grace_s: float = 5.0
    """Seconds that running calls get to end when the server stops."""
    has_reflection: bool = True
    """Whether tools may ask the server for its methods."""
    journal: str = field(default="auto", repr=False)
    """URL of the journal's Redis or directory; "auto": beside the payloads; "none": none."""
    takes_over: bool = False
    """Whether a server that writes the journal in Redis is displaced although it lives."""
    deletes_orphans: bool = False
    """Whether payloads that no buffer knows are deleted however many they are, and whichever
    journals may have known them."""
    accepts_store: bool = False
    """Whether another store than that of the last start, in which the journal has left no word, is
    taken although payloads are given up with it."""
    has_journal_sync: bool = False
    """Whether a turn in SQLite must survive the machine, not only the process."""
    snapshot_entries: int = 30_000
    """Entries in the journal after which a new snapshot is made."""
    is_ephemeral: bool = False
    """Whether a `file://` store is deleted when the server has stopped."""
    ready_file: Path | None = None
    """Gets the bound address once the server answers."""
    seed: int | None = None
    """Of all random choices; None: a fresh one."""

    def check_store_password(self) -> None:
        """See that roles are not void because everybody is told the server's own password.

        Without tokens there are no roles: everybody is an administrator.

        Raises:
            StartError: They would be, and nobody asked for that.
        """
        is_told = not (self.client_store or self.has_gateway)
        if self.tokens is None or self.shares_store_password or not is_told:
            return
        if has_secret(self.store):
            raise StartError(
                "every client with a token would be told the server's own password of --store; "
                "give --client-store, the URL with a user for clients (SECURITY.md has its "
                "commands), --gateway, so that nobody needs one, or --share-store-password"
            )

    def store_told(self, *, is_producer: bool) -> str:
        """The URL that a client is told."""
        if self.has_gateway and (is_producer or not self.client_store):
            return GATEWAY_URL
        return self.client_store or self.store

    @property
    def store_shown(self) -> str:
        """The store's URL without its password, for people and logs."""
        return redact(self.store)


def default_store_url() -> str:
    """A directory of this user in shared memory; where there is none, in the temporary folder."""
    shared_memory = Path("/dev/shm")
    parent = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    return f"file://{parent / f'breadbox-{os.getuid()}'}"


def parse_address(text: str, option: str) -> tuple[str, int] | None:
    """Split HOST:PORT or [IPV6]:PORT; None for unix:PATH.

    Raises:
        StartError: It is neither.
    """
    if text.startswith("unix:"):
        return None
    host, colon, port_text = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port_text.isascii() and port_text.isdigit()):
        raise StartError(f"{option} is {text!r}, which is not HOST:PORT; try 127.0.0.1:50051")
    port = int(port_text)
    if port > 65_535:
        raise StartError(f"{option} names port {port}; ports go up to 65535")
    return host, port


def read_config_file(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read options from a YAML file: a mapping from option names, with `-` or `_`, to values.

    Raises:
        StartError: The file cannot be read, is no such mapping, or names an unknown option.
    """
    # Most servers have no such file, and starts should be quick.
    import yaml

    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise StartError(
                    f"--config {path} cannot be used: others may write it; chmod o-w {path}"
                )
            content = yaml.safe_load(file)
    except OSError as error:
        raise StartError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        at = f", line {where.line + 1}" if where else ""
        raise StartError(f"--config {path} is not YAML{at}; mend it or leave it out") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise StartError(f"--config {path} must be a mapping from options to values")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise StartError(
            f"--config {path} names unknown options {', '.join(unknown)}; "
            "see breadbox serve --help for those there are"
        )
    return values
