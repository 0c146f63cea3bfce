"""`breadbox serve`: parse, run until a signal, exit."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NoReturn

import click
from click.core import ParameterSource

from breadbox.cli.base import Bug
from breadbox.cli.command import command
from breadbox.cli.signals import signals_in_thread
from breadbox.shared.tasks import end_tasks
from breadbox.stores import has_secret
from breadbox.stores.disk import new_opener
from breadbox_server.app import RunningServer, serving, tune_garbage_collection
from breadbox_server.base.errors import BugError
from breadbox_server.settings import Settings

log = logging.getLogger(__name__)

END_S_MAX: Final = 30.0
"""Seconds beyond the grace after which a hung end is broken off: more than its steps' bounds."""


@command(Settings, reads_variable=True)
def serve(settings: Settings) -> None:
    """Run the replay-buffer server until SIGTERM or Ctrl-C.

    Prints one line with its address when it serves, and with --standby another when it stands by.
    The first signal answers all waiting calls, ends the running ones, and stops the server. A
    second signal ends the server immediately.
    """
    settings.configure_logs()
    _warn_of_visible_secrets()
    _allow_many_connections()
    ending = _Ending(settings.drain_grace_s + END_S_MAX)
    # Not the loop's own handlers: while it reads a journal back, or is stuck, it runs none.
    with signals_in_thread(ending.on_signal):
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(_serve_until_signal(settings, ending))
        except BugError as error:
            log.critical("%s", error.__cause__, exc_info=error.__cause__)
            raise Bug(str(error)) from error


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _warn_of_visible_secrets() -> None:
    context = click.get_current_context()
    for name in ("store", "client_store", "viewer_store", "journal"):
        url = str(context.params[name])
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and has_secret(url):
            flag = name.replace("_", "-")
            log.warning(
                "the password in --%s stands in the process list; "
                "give the URL in BREADBOX_%s or with --config instead",
                flag,
                name.upper(),
            )


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve_until_signal(settings: Settings, ending: "_Ending") -> None:
    tune_garbage_collection()
    async with serving(
        settings, leftovers=ending.leftovers, on_end=ending.begin, on_standby=_announce_standby
    ) as server:
        ending.serves_on(asyncio.get_running_loop())
        tune_garbage_collection()
        _announce(server, settings)
        ending.ready_file = settings.ready_file
        await ending.wanted.wait()
    # Calls that were cut off, and steps of the end that were left behind.
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})


class _Ending:
    """End this process when asked to, within `within_s` seconds, or just go, whatever hangs."""

    def __init__(self, within_s: float) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._within_s = within_s
        self._is_asked = False
        self.wanted = asyncio.Event()
        """Set by the first signal."""
        self.ready_file: Path | None = None
        """Deleted as soon as the end begins: it names the address at which the server answers."""
        self.leftovers = ExitStack()
        """What a process that ends early must not leave behind either."""

    def serves_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take note that calls are answered: an end has to be in order from now on."""
        self._loop = loop

    def on_signal(self, number: int) -> None:
        del number
        if self._is_asked or self._loop is None:
            self._exit_at_once(int(self._is_asked))
        self._is_asked = True
        self._watch()
        with contextlib.suppress(RuntimeError):  # The loop has ended by itself meanwhile.
            self._loop.call_soon_threadsafe(self.wanted.set)

    def begin(self) -> None:
        self._watch()
        self._forget_ready_file()

    def _watch(self) -> None:
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(self._within_s, exit=True, file=sys.__stderr__)

    def _forget_ready_file(self) -> None:
        if self.ready_file is not None:
            self.ready_file.unlink(missing_ok=True)

    def _exit_at_once(self, code: int) -> NoReturn:
        """End without cleaning up, but for what nobody else would: the rest survives a crash."""
        with contextlib.suppress(OSError):
            self._forget_ready_file()
        self.leftovers.close()
        os._exit(code)


def _announce_standby(address: str) -> None:
    click.echo(f"breadbox: standing by on {address}")


def _announce(server: RunningServer, settings: Settings) -> None:
    line = f"breadbox: serving on {server.address} store={settings.store_shown}"
    if server.metrics_address:
        line += f" metrics=http://{server.metrics_address}/metrics"
    if settings.ready_file is not None:
        # Renamed into place: a reader never finds half an address.
        half = settings.ready_file.with_name(settings.ready_file.name + ".half")
        with open(half, "w", opener=new_opener) as file:
            file.write(server.address + "\n")
        half.chmod(0o644)
        half.replace(settings.ready_file)
    # Last: a reader of the line may rely on the file.
    click.echo(line)
