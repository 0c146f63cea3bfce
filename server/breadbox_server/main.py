"""`breadbox serve`: parse, run until a signal, exit."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from click.core import ParameterSource

from breadbox.cli import logs
from breadbox.cli.command import Unusable
from breadbox.cli.settings import SizeBytes
from breadbox.stores import has_secret
from breadbox.stores.private_files import new_opener
from breadbox.tasks import end_tasks
from breadbox_server.app import RunningServer, serving, tune_garbage_collection
from breadbox_server.core.config import (
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunksConfig,
)
from breadbox_server.core.errors import InvalidArgumentError
from breadbox_server.core.samplers import SAMPLERS
from breadbox_server.errors import StartError
from breadbox_server.limits import BUFFERS_MAX, CONNECTIONS_MAX
from breadbox_server.settings import (
    Settings,
    default_store_url,
    read_config_file,
)
from breadbox_server.transport import tls_files

log = logging.getLogger(__name__)

_DEFAULTS = BufferConfig()

END_S_MAX: Final = 30.0
"""Seconds beyond the grace after which an end that hangs is broken off: more than all the bounds of
its steps together."""


class OneLineCommand(click.Command):
    """A command whose wrong options are told in one line, as everything else that is wrong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, telling what is wrong without the usage text."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise Unusable(
                f"{error.format_message().rstrip('.?')}; see '{ctx.command_path} --help'"
            ) from error


def _option(flag: str, *names: str, **kwargs: Any) -> Callable[[Any], Any]:
    """An option that is also `BREADBOX_<OPTION>` in the environment."""
    name = flag.split("/")[0].removeprefix("--")
    environment = f"BREADBOX_{name.replace('-', '_').upper()}"
    shown = {"show_envvar": True, "show_default": True}
    return click.option(flag, *names, envvar=environment, **(shown | kwargs))


def _take_config_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Let the file's values stand below flags and environment, above the defaults."""
    if path is not None:
        known = {parameter.name: None for parameter in ctx.command.params if parameter.name}
        try:
            ctx.default_map = read_config_file(path, known)
        except StartError as error:
            raise Unusable(str(error)) from error
    return path


@click.command(cls=OneLineCommand)
@_option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=_take_config_file,
    help="YAML file with any of these options; flags and environment win over it.",
)
@_option(
    "--listen",
    default="127.0.0.1:50051",
    metavar="HOST:PORT",
    help="Where to answer calls; port 0 takes a free one.",
)
@_option(
    "--store",
    default=default_store_url,
    metavar="URL",
    show_default="a directory in /dev/shm",
    help="Payload store: file:///DIR, redis://..., rediss://..., unix:///SOCKET, redis+cluster://HOST,HOST...",
)
@_option(
    "--client-store",
    default="",
    metavar="URL",
    show_envvar=True,
    help="Payload store as clients are told it, with their own credentials; default: --store. "
    "Needed with --tokens where --store has a password.",
)
@_option(
    "--share-store-password",
    "shares_store_password",
    is_flag=True,
    help="Tell every client with a token the password in --store; it may then read and delete all "
    "payloads and the journal.",
)
@_option(
    "--gateway/--no-gateway",
    "has_gateway",
    help="Move payloads through this server, so that clients need neither a way to the store nor "
    "its password: all clients or, with --client-store, those that show the token of a producer.",
)
@_option(
    "--gateway-unannounced",
    "gateway_unannounced_bytes",
    type=SizeBytes(),
    default="1GiB",
    help="Bytes that a token may have written through the gateway and not announced yet; also the "
    "largest payload there.",
)
@_option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PEM with the server's certificate chain; turns TLS on. Read again when it changes.",
)
@_option(
    "--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="PEM with its private key."
)
@_option(
    "--tls-client-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PEM; every client must show a certificate that this authority has signed.",
)
@_option(
    "--allow-plaintext",
    is_flag=True,
    help="Talk to other machines without encryption, and without --tokens let everybody there do "
    "everything; for networks that are trusted.",
)
@_option(
    "--allow-anonymous",
    is_flag=True,
    help="Let everybody on other machines do everything, without --tokens or --tls-client-ca.",
)
@_option(
    "--tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of known bearer tokens (breadbox token makes them). Read again when it changes.",
)
@_option(
    "--local-socket",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Unix socket for this user alone that answers too, unencrypted; for probes and tools.",
)
@_option(
    "--metrics-listen",
    default="",
    show_default=False,
    metavar="HOST:PORT",
    help="Where to serve metrics for Prometheus over HTTP; nothing serves none.",
)
@_option(
    "--fragments-per-chunk",
    type=int,
    default=_DEFAULTS.fragments_per_chunk,
    help="Consecutive fragments of one worker that are fetched, used and evicted together. This "
    "and what follows are the limits of every buffer that asks for no others.",
)
@_option(
    "--capacity-chunks",
    type=int,
    default=_DEFAULTS.capacity_chunks,
    help="Chunks held for fetches; beyond, --full-policy decides.",
)
@_option(
    "--capacity-bytes",
    type=SizeBytes(),
    default="8GiB",
    help="Payload bytes held, such as 8GiB; beyond, --full-policy decides. With a file:// store at "
    "most half of its file system, of one over 1 GiB all but 512 MiB.",
)
@_option(
    "--staleness-max",
    type=int,
    default=_DEFAULTS.staleness_max,
    help="Model versions that data may lag behind; what is staler is evicted.",
)
@_option(
    "--uses-max",
    type=int,
    default=_DEFAULTS.uses_max,
    help="Deliveries of a chunk, then it leaves.",
)
@_option(
    "--full-policy",
    type=click.Choice([policy.value for policy in FullPolicy]),
    default=_DEFAULTS.full_policy.value,
    help="When there is no room: evict the oldest chunk, or let producers wait.",
)
@_option(
    "--lease-expiry-policy",
    type=click.Choice([policy.value for policy in LeaseExpiryPolicy]),
    default=_DEFAULTS.lease_expiry_policy.value,
    help="Chunks of an expired lease go back for another fetch, or count as used.",
)
@_option(
    "--lease-s", type=float, default=_DEFAULTS.lease_s, help="Seconds a lease lives unrenewed."
)
@_option(
    "--open-chunk-s",
    type=float,
    default=_DEFAULTS.open_chunk_s,
    help="Seconds of silence after which a worker's unfinished chunk is discarded.",
)
@_option(
    "--waiters-max",
    type=int,
    default=_DEFAULTS.waiters_max,
    help="Fetches that may wait at a time; the next is told to come back.",
)
@_option(
    "--leases-max",
    type=int,
    default=_DEFAULTS.leases_max,
    help="Leases alive at a time; then fetches wait.",
)
@_option(
    "--workers-max",
    type=int,
    default=_DEFAULTS.workers_max,
    help="Workers (environments) remembered in a session; one more is refused.",
)
@_option(
    "--sampler",
    type=click.Choice(list(SAMPLERS)),
    default=_DEFAULTS.sampler,
    help="Which chunks a fetch gets.",
)
@_option(
    "--minimum-chunks", type=int, default=1, help="A fetch waits until so many chunks are held."
)
@_option(
    "--buffers-max",
    type=click.IntRange(1, 4096),
    default=BUFFERS_MAX,
    help="Named buffers there may be; one more is refused.",
)
@_option(
    "--connections-max",
    type=click.IntRange(1, 1_000_000),
    default=CONNECTIONS_MAX,
    help="Connections there may be on an address; one more is closed at once.",
)
@_option(
    "--unannounced-s",
    type=click.FloatRange(1, 86_400),
    default=600.0,
    help="Seconds that a payload lives before it is announced.",
)
@_option(
    "--poison-after",
    type=click.IntRange(1, 1_000_000),
    default=2,
    help="Readers that cannot read a chunk, after which it is quarantined: served no more, "
    "counted, and named by `breadbox explain`.",
)
@_option(
    "--piece-size",
    type=SizeBytes(),
    default="0",
    help="Advice to writers how to cut payloads; 0: as the store thinks best.",
)
@_option(
    "--drain-grace-s",
    type=click.FloatRange(0, 3600),
    default=5.0,
    help="Seconds that running calls get to end on SIGTERM.",
)
@_option(
    "--reflection/--no-reflection",
    "has_reflection",
    default=True,
    help="Whether tools such as grpcurl may ask which calls there are.",
)
@_option(
    "--journal",
    default="auto",
    metavar="URL",
    help="Where decisions are made durable: auto (beside the payloads), none, a Redis, file:///DIR.",
)
@_option(
    "--take-over",
    "takes_over",
    is_flag=True,
    help="Take a journal in Redis (from a directory none is displaced) from a server that lives; "
    "that one ends. Without it, this one starts once the other has ended or shown no sign of life "
    "for 1.5 s, else refuses to.",
)
@_option(
    "--delete-orphans",
    "deletes_orphans",
    is_flag=True,
    help="Delete payloads that no buffer knows however many they are, and although other journals "
    "have kept payloads in this store: where those are gone.",
)
@_option(
    "--accept-store",
    "accepts_store",
    is_flag=True,
    help="Take another --store than the journal's, in which that has nothing: what the journal "
    "knows and the store lacks is given up as lost. Without it, such a start is refused.",
)
@_option(
    "--journal-sync/--no-journal-sync",
    "has_journal_sync",
    default=False,
    help="Whether a journal in SQLite must survive the machine, not only the process.",
)
@_option(
    "--snapshot-entries",
    type=click.IntRange(100),
    default=30_000,
    help="Entries in the journal after which it is made shorter.",
)
@_option(
    "--ephemeral",
    "is_ephemeral",
    is_flag=True,
    help="Delete the directory of a file:// store when the server has stopped.",
)
@_option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that gets the bound address once the server answers; deleted when it ends.",
)
@_option("--seed", type=int, default=None, help="Of all random choices; none: a fresh one.")
@logs.log_options
def serve(**options: Any) -> None:
    """Run the replay-buffer server until SIGTERM or Ctrl-C.

    Says on standard output, in one line, where it answers. On the first signal it tells everybody
    who waits, ends what runs, and stops; a second signal ends it at once.
    """
    logs.configure(options.pop("log_level"), options.pop("log_format"))
    _warn_of_visible_secrets()
    _allow_many_connections()
    try:
        settings = _settings(options)
        asyncio.run(_serve_until_signal(settings))
    except StartError as error:
        raise Unusable(" ".join(str(error).split())) from error


def _warn_of_visible_secrets() -> None:
    """Tell who gave a password as an argument that every user of this machine can read it."""
    context = click.get_current_context()
    for name in ("store", "client_store", "journal"):
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
    """Use all the open files that the system allows this process: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _settings(options: dict[str, Any]) -> Settings:
    """Typed settings of the command line's values.

    Raises:
        StartError: A limit is out of its range, or limits contradict each other.
    """
    try:
        config = BufferConfig(
            **{name: options.pop(name) for name in _CONFIG_OPTIONS},
            full_policy=FullPolicy(options.pop("full_policy")),
            lease_expiry_policy=LeaseExpiryPolicy(options.pop("lease_expiry_policy")),
            limiter=MinimumChunksConfig(options.pop("minimum_chunks")),
        )
    except InvalidArgumentError as error:
        option = "--" + error.field.replace("_", "-")
        raise StartError(f"{option} {error.problem}; see breadbox serve --help") from error
    tls = tls_files(options.pop("tls_cert"), options.pop("tls_key"), options.pop("tls_client_ca"))
    return Settings(
        default_config=config, piece_size_bytes=options.pop("piece_size"), tls=tls, **options
    )


_CONFIG_OPTIONS = (
    "fragments_per_chunk",
    "capacity_chunks",
    "capacity_bytes",
    "staleness_max",
    "uses_max",
    "lease_s",
    "open_chunk_s",
    "waiters_max",
    "leases_max",
    "workers_max",
    "sampler",
)


async def _serve_until_signal(settings: Settings) -> None:
    ending = _Ending(asyncio.get_running_loop(), settings.drain_grace_s + END_S_MAX)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the loop's own handlers: while it reads a journal back, or is stuck, it runs none.
        signal.signal(number, ending.on_signal)
    tune_garbage_collection()
    async with serving(settings, leftovers=ending.leftovers, on_end=ending.begin) as server:
        ending.is_serving = True
        tune_garbage_collection()
        _announce(server, settings)
        ending.ready_file = settings.ready_file
        await ending.wanted.wait()
    # Calls that were cut off, and steps of the end that were left behind.
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})


class _Ending:
    """Sees to it that this process ends when it is asked to, or has to, whatever hangs.

    Args:
        loop: Runs the server.
        within_s: Seconds that an end may take, all its bounded steps together, before the process
            ends without the rest.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, within_s: float) -> None:
        self._loop = loop
        self._within_s = within_s
        self._is_asked = False
        self.wanted = asyncio.Event()
        """Set by the first signal."""
        self.is_serving = False
        self.ready_file: Path | None = None
        """Goes as soon as the end begins: nobody is told any more where the server answers."""
        self.leftovers = ExitStack()
        """What a process that ends early must not leave behind either."""

    def on_signal(self, number: int, frame: object) -> None:
        """Begin to end; the second time, and while nobody is served yet, end at once."""
        del number, frame
        if self._is_asked or not self.is_serving:
            self._exit_at_once(int(self._is_asked))
        self._is_asked = True
        self._watch()
        self._loop.call_soon_threadsafe(self.wanted.set)

    def begin(self) -> None:
        """Take note that the server begins to end, for whatever reason."""
        self._forget_ready_file()
        self._watch()

    def _watch(self) -> None:
        """End the process, telling where it hangs, if its end takes too long."""
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


def _announce(server: RunningServer, settings: Settings) -> None:
    """Say where the server answers, to people, to scripts and to the ready file."""
    line = f"breadbox: serving on {server.address} store={settings.store_shown}"
    if server.metrics_address:
        line += f" metrics=http://{server.metrics_address}/metrics"
    if settings.ready_file is not None:
        # Renamed into place, so that whoever waits for it never reads half an address.
        half = settings.ready_file.with_name(settings.ready_file.name + ".half")
        with open(half, "w", opener=new_opener) as file:
            file.write(server.address + "\n")
        half.chmod(0o644)
        half.replace(settings.ready_file)
    # Last: whoever reads the line may rely on the file.
    click.echo(line)
