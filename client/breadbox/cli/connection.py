"""Settings of every command that calls a server: its address, and credentials."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from breadbox.cli.settings import Settings, of_one_call, setting
from breadbox.environment import DEFAULT_SERVER

if TYPE_CHECKING:
    from breadbox.client import Client

RECONNECT_S: Final = 0.0
"""A person waits for the answer, so an unreachable server is an error immediately."""


class Connection(Settings):
    """A server, and credentials for it."""

    server: str = DEFAULT_SERVER
    """Address of the server, HOST:PORT or unix:PATH; with standbys those of all, with commas."""
    token: str | None = setting(None, secret=True)
    """Bearer token, or @FILE with the token; safer as a variable than as an option."""
    tls: bool = False
    """Encrypt; also on if a certificate is named."""
    tls_ca: Path | None = None
    """PEM file of the authorities to trust."""
    tls_cert: Path | None = None
    """PEM file of this process's certificate, if the server requires one."""
    tls_key: Path | None = None
    """PEM file with its key."""
    store_url: str | None = setting(None, secret=True)
    """URL of the payload store as seen from here; default: the one that the server returns."""

    def connect(self, *, buffer: str = "default", **options: Any) -> "Client":
        """Make a client, with further options of `breadbox.connect`, without a call."""
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
    """A server for a person's command, and the form of the output."""

    deadline_s: float = setting(5.0, ge=0.01)
    """Seconds in which the server must answer."""
    as_json: bool = of_one_call(False, option="json")
    """Print JSON instead of tables."""

    def connect(
        self, *, buffer: str = "default", reconnect_s: float = RECONNECT_S, **options: Any
    ) -> "Client":
        """Make a client that, by default, fails immediately if the server is unreachable."""
        return super().connect(
            buffer=buffer, deadline_s=self.deadline_s, reconnect_s=reconnect_s, **options
        )

    def check(self) -> None:
        """Call the server once, so that a long command fails at its start if it is unreachable."""
        with self.connect() as client:
            client.list_buffers()
