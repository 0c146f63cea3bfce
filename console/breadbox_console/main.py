"""`breadbox console`: serve a web page that looks into live buffers."""

import socket
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from breadbox.cli.base import Unusable, import_from_here
from breadbox.cli.command import command
from breadbox.cli.connection import Connection
from breadbox.cli.settings import setting
from breadbox.cli.signals import stop_on_signals
from breadbox.shared.loopback import is_loopback, loopback_host


class ConsoleSettings(Connection):
    """Where pages are served, and how much the console remembers."""

    listen: str = setting(f"{loopback_host()}:8400", option="console_listen")
    """HOST:PORT of the pages."""
    hosts: str = setting("", option="console_hosts")
    """Names, with commas, under which browsers reach it, if it listens beyond this host."""
    listen_cert: Path | None = setting(None, option="console_cert")
    """PEM file with the certificate of the pages: they are served by TLS then."""
    listen_key: Path | None = setting(None, option="console_key")
    """PEM file with its key."""
    allow_plaintext: bool = setting(False, option="console_allow_plaintext")
    """Serve beyond this host without TLS: the network can read tokens and episodes then."""
    keep_s: float = setting(4 * 3600.0, ge=60)
    """Seconds for which episodes stay in the list."""
    keep_steps: int = setting(2_000_000, ge=1000)
    """Most steps that are remembered, for each buffer; a fragment counts as 64 at least."""
    read_fragments_per_s: float = setting(400.0, gt=0)
    """Most fragments of a buffer that are read a second; of a faster buffer a part is seen."""
    renderer: str = ""
    """MODULE:FUNCTION that makes a picture uint8[H, W, 3] of an observation and its step."""
    detokenizer: str = ""
    """MODULE:FUNCTION that makes texts of a list of token ids."""


@command(ConsoleSettings, reads_variable=True)
def console(settings: ConsoleSettings) -> None:
    """Serve a read-only web page that looks into live buffers, until Ctrl-C.

    It reads by cursors and descriptions, so that nothing is used up. Where the server asks for
    tokens, so does the page, and shows what the token may see. With --token the console begins to
    watch before anybody logs in.
    """
    import uvicorn

    from breadbox import aio
    from breadbox.model.options import ClientOptions, Tls
    from breadbox_console.access import Access
    from breadbox_console.app import HEADERS, make_app
    from breadbox_console.serving import BoundedConnection
    from breadbox_console.viewing import Hooks, Viewer
    from breadbox_console.watch import WatchLimits

    host, port = _address(settings.listen)
    is_secure = settings.listen_cert is not None
    if not (is_loopback(host) or is_secure or settings.allow_plaintext):
        raise Unusable(
            f"--console-listen {settings.listen} is reachable from other hosts: give "
            "--console-cert and --console-key, or --console-allow-plaintext behind a proxy"
        )
    import_from_here()
    hooks = Hooks(renderer=_load(settings.renderer), detokenizer=_load(settings.detokenizer))
    files = (settings.tls_ca, settings.tls_cert, settings.tls_key)

    def connect(token: str, address: str = settings.server) -> aio.Client:
        options = ClientOptions(
            token=token or None,
            tls=Tls(*files) if settings.tls or any(files) else None,
            store_url=settings.store_url or None,
            reconnect_s=0.0,
            deadline_s=5.0,
        )
        return aio.Client(address, options)

    kept = (settings.keep_steps, settings.keep_s, settings.read_fragments_per_s)
    access = Access(connect, settings.token or "", WatchLimits(*kept))
    named = [each for each in settings.hosts.split(",") if each]
    hosts = ["localhost", "127.0.0.1", "[::1]", *named] if is_loopback(host) else named or ["*"]
    app = make_app(access, Viewer(hooks), hosts=hosts, is_secure=is_secure)
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        headers=[*HEADERS.items()],
        ssl_certfile=settings.listen_cert,
        ssl_keyfile=settings.listen_key,
        timeout_graceful_shutdown=2,
        http=BoundedConnection,
        ws="none",
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        port = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"console: {'https' if is_secure else 'http'}://{shown}:{port}/")
        server = uvicorn.Server(config)
        app.state.is_ending = lambda: server.should_exit
        # uvicorn ends in order by a signal and then raises it again, which changes nothing; ours is
        # for a signal that comes before uvicorn listens to them.
        with stop_on_signals(lambda _: setattr(server, "should_exit", True)):
            server.run(sockets=[listening])


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise Unusable(f"--console-listen must be HOST:PORT, got {listen!r}")
    return host.strip("[]"), int(port)


def _load(name: str) -> Any:
    if not name:
        return None
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unusable(f"{name!r} must name a function as MODULE:FUNCTION: {error}") from error
