"""Settings of every command that calls a server: its address, and credentials."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from breadbox.cli.settings import Settings, of_one_call, setting
from breadbox.environment import DEFAULT_SERVER

if TYPE_CHECKING:
    from breadbox.client import Client

RECONNECT_S: Final = 0.0
"""A person waits for the answer, so an absent server is an error immediately."""


class Connection(Settings):
    """A server, and credentials for it."""

    server: str = DEFAULT_SERVER
    """Address of the server, HOST:PORT or unix:PATH; of servers on one journal all, with commas."""
    token: str | None = setting(None, secret=True)
    """Bearer token, or @FILE that holds it; better set in the environment than given here."""
    tls: bool = False
    """Encrypt; on by itself when a certificate is named."""
    tls_ca: Path | None = None
    """PEM file with the authorities to trust."""
    tls_cert: Path | None = None
    """PEM file with the certificate of this process, where the server asks for one."""
    tls_key: Path | None = None
    """PEM file with its key."""
    store_url: str | None = setting(None, secret=True)
    """Where payloads are, seen from here; default: where the server says."""

    def connect(self, *, buffer: str = "default", **options: Any) -> "Client":
        """Make a client, with further options of `breadbox.connect`; sends nothing."""
        from breadbox.client import connect
        from breadbox.model.options import Tls

        files = (self.tls_ca, self.tls_cert, self.tls_key)
        return connect(
            self.server,
            buffer=buffer,
            token=self.token or None,
            tls=Tls(*files) if self.tls or any(files) else None,
            store_url=self.store_url or None,
            **options,
        )


class Target(Connection):
    """A server that a person asks something, and the form of the answer."""

    deadline_s: float = setting(5.0, ge=0.01)
    """Seconds in which the server must answer."""
    as_json: bool = of_one_call(False, option="json")
    """Print JSON instead of tables."""

    def connect(
        self, *, buffer: str = "default", reconnect_s: float = RECONNECT_S, **options: Any
    ) -> "Client":
        """Make a client that fails immediately when no server answers, by default."""
        return super().connect(
            buffer=buffer, deadline_s=self.deadline_s, reconnect_s=reconnect_s, **options
        )

    def check(self) -> None:
        """Call the server once, so that a long command reports at its start that it is away."""
        with self.connect() as client:
            client.list_buffers()
