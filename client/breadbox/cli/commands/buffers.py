"""`breadbox buffers`: list, create, change and delete buffers, end their sessions."""

import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Literal

import click

from breadbox.cli import frame
from breadbox.cli.base import Group, Unusable, printable
from breadbox.cli.command import command
from breadbox.cli.commands.stats import describe, outage_text, schema_table, staleness_text
from breadbox.cli.connection import Target
from breadbox.cli.limits import BufferLimits
from breadbox.cli.settings import of_one_call, setting
from breadbox.model.errors import InvalidRequestError
from breadbox.model.types import (
    AssemblyPolicy,
    BufferConfig,
    BufferDescription,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunks,
    SampleToInsertRatio,
    SchemaPolicy,
    StaleBy,
    StalePolicy,
)

if TYPE_CHECKING:
    from breadbox.client import Client

_LIMITS = tuple(each.name.replace("_", "-") for each in fields(BufferConfig))
_Limit = Literal[*_LIMITS]  # type: ignore[valid-type]  # to mypy: any


@click.group(cls=Group)
def buffers() -> None:
    """List, create, change and delete buffers, end their sessions."""


@buffers.add
@command(Target, "list")
def list_buffers(target: Target) -> None:
    """List all buffers."""
    with target.connect() as client:
        found = client.list_buffers()
    if target.as_json:
        frame.print_json(found)
        return
    console = frame.console()
    console.print(table(found))
    if outage := next(filter(None, map(outage_text, found)), ""):
        console.print(outage)


_COLUMNS = (
    *("name", "session", "#version", "#chunks", "#capacity", "#bytes", "staleness", "#waiters"),
)
_EXPENDABLE = ("session", "#capacity", "staleness", "#bytes", "#waiters", "#version")


def table(found: Iterable[BufferDescription]) -> frame.FittedTable:
    """Return a line for each buffer, with as many columns as the window has room for."""
    return frame.FittedTable(_COLUMNS, [_line(each) for each in found], expendable=_EXPENDABLE)


def _line(description: BufferDescription) -> tuple[object, ...]:
    state, config = description.state, description.config
    return (
        description.name,
        description.session_id or "-",
        "-" if description.model_version is None else description.model_version,
        frame.count_text(state.chunk_count),
        "-" if config.capacity_chunks is None else frame.count_text(config.capacity_chunks),
        frame.size_text(state.payload_bytes),
        staleness_text(description),
        state.waiter_count,
    )


class ShowSettings(Target):
    """The buffer to show."""

    name: str = of_one_call("default", positional=True)


@buffers.add
@command(ShowSettings, short_help="Show a buffer, and the arrays of its fragments.")
def show(settings: ShowSettings) -> None:
    """Show a buffer, and the arrays of its fragments: paths, dtypes and shapes of one step."""
    with settings.connect() as client:
        description = client.get_buffer(settings.name)
    _show(settings, description)
    if settings.as_json:
        return
    console = frame.console()
    console.print("")
    for number, schema in enumerate(description.schemas):
        console.print(schema_table(number, schema))
    if not description.schemas:
        console.print("No fragment of the session was appended yet: its arrays are not known.")


class LimitSettings(Target, BufferLimits):
    """A buffer and its limits."""

    name: str = of_one_call(positional=True)
    assembly: AssemblyPolicy | None = setting(None, environment=False)
    """Make a chunk of consecutive fragments of one worker, or of a group's members, in any order
    and from any worker; can be changed only without a session."""
    stale: StalePolicy | None = setting(None, environment=False)
    """Evict what is staler than --staleness-max; or deliver it late, and count it; or let fetches
    wait so that nothing becomes so."""
    stale_by: StaleBy | None = setting(None, environment=False)
    """Count staleness from the oldest or the newest step or token of a fragment; can be changed
    only without a session."""
    full_policy: FullPolicy | None = setting(None, environment=False)
    """When there is no room: evict chunks, or let producers wait."""
    schema_policy: SchemaPolicy | None = setting(None, option="schema", environment=False)
    """Fragments of a session must have the same arrays and as many steps, or the same arrays alone
    (ragged), or neither (any)."""
    lease_expiry_policy: LeaseExpiryPolicy | None = setting(None, environment=False)
    """Return the chunks of an expired lease for another fetch, or count them as used."""
    ratio: float | None = setting(None, environment=False)
    """Uses per inserted chunk, to be kept approximately."""
    error_chunks: float | None = setting(None, environment=False)
    """Half the width of the band around --ratio, in uses."""
    lead_chunks: float | None = setting(None, environment=False)
    """Middle of the band, in uses that inserts are ahead of --ratio; 0 unless given."""

    def config(self) -> BufferConfig:
        """Return the given limits; the others are None."""
        limiter: MinimumChunks | SampleToInsertRatio | None = None
        if self.ratio is not None:
            if self.error_chunks is None:
                raise InvalidRequestError("--ratio", "needs --error-chunks, the width of its band")
            limiter = SampleToInsertRatio(
                self.ratio, self.error_chunks, self.minimum_chunks or 1, self.lead_chunks or 0.0
            )
        elif self.error_chunks is not None or self.lead_chunks is not None:
            given = "--lead-chunks" if self.error_chunks is None else "--error-chunks"
            raise InvalidRequestError(given, "needs --ratio")
        elif self.minimum_chunks is not None:
            limiter = MinimumChunks(self.minimum_chunks)
        limits = self.chosen(each.name for each in fields(BufferConfig))
        return BufferConfig(limiter=limiter, **limits)


def _show(target: Target, description: BufferDescription) -> None:
    if target.as_json:
        frame.print_json(description)
    else:
        frame.console().print(describe(description, show_zeros=False))


@buffers.add
@command(LimitSettings, short_help="Create a buffer, with your limits or the server's.")
def create(settings: LimitSettings) -> None:
    """Create a buffer; limits that are not given take the server's defaults."""
    config = settings.config()
    with settings.connect() as client:
        _show(settings, client.create_buffer(settings.name, config))


class UpdateSettings(LimitSettings):
    """A buffer, and changes of its limits."""

    reset: tuple[_Limit, ...] = of_one_call((), metavar="LIMIT")
    """Limit that gets the server's default again, such as uses-max; may be given several times."""


@buffers.add
@command(UpdateSettings, short_help="Change limits of a buffer while it runs.")
def update(settings: UpdateSettings) -> None:
    """Change limits while running; others stay the same, and chunks beyond them are evicted."""
    config = settings.config()
    if config == BufferConfig() and not settings.reset:
        raise InvalidRequestError("limits", "are missing; give at least one option")
    reset = [name.replace("-", "_") for name in settings.reset]
    with settings.connect() as client:
        _show(settings, client.update_buffer(settings.name, config, reset=reset))


class EndingSettings(Target):
    """The buffer that loses its contents."""

    name: str = of_one_call(positional=True)
    yes: bool = of_one_call(False)
    """Do not ask."""

    def confirm(self, what: str, description: BufferDescription) -> None:
        """Ask if a buffer may go with its contents, unless --yes is given."""
        if not self.yes:
            held = frame.counted(description.state.fragment_count, "fragment")
            self.ask(f"{what} with its {held}?")

    def ask(self, question: str) -> None:
        """Ask, and end if the answer is no; raise Unusable if no terminal can answer."""
        try:
            is_agreed = click.confirm(question, err=True)
        except click.Abort as error:
            if sys.stdin.isatty():
                raise
            click.echo(err=True)
            raise Unusable("cannot ask, because this is no terminal: use --yes") from error
        if not is_agreed:
            raise click.Abort

    def report(self, verb: str, what: str) -> None:
        """Print what was deleted or ended."""
        if self.as_json:
            frame.print_json({verb: what})
        else:
            click.echo(f"{verb} {printable(what)}")


class DeleteSettings(EndingSettings):
    """The buffers to delete."""

    name: str = of_one_call("", positional=True)
    prefix: str | None = of_one_call(None)
    """Instead of a name: all buffers with names that begin with this,"""
    idle_s: float = of_one_call(0.0, ge=0)
    """and that no client has used for this many seconds, such as those of killed runs."""

    def names(self, client: "Client") -> list[str]:
        """Return the names of the chosen buffers, as they are now."""
        return [
            each.name
            for each in client.list_buffers()
            if each.name.startswith(self.prefix or "") and each.state.idle_s >= self.idle_s
        ]


@buffers.add
@command(DeleteSettings, short_help="Delete a buffer, or several, with everything in them.")
def delete(settings: DeleteSettings) -> None:
    """Delete a buffer, or all idle ones with --prefix, with everything in them."""
    name = settings.name
    if bool(name) == (settings.prefix is not None):
        raise InvalidRequestError("name", "or --prefix: give one of them")
    with settings.connect() as client:
        if name:
            settings.confirm(f"Delete buffer {name!r}", client.get_buffer(name))
            client.delete_buffer(name)
            settings.report("deleted", name)
            return
        found = settings.names(client)
        if found and not settings.yes:
            settings.ask(f"Delete {frame.counted(len(found), 'buffer')}: {', '.join(found)}?")
        # Checked again: an idle buffer may be in use by the time of the answer.
        found = [each for each in settings.names(client) if each in found]
        for each in found:
            client.delete_buffer(each)
    if settings.as_json:
        frame.print_json({"deleted": found})
    else:
        click.echo("\n".join(f"deleted {printable(each)}" for each in found) or "nothing to delete")


@buffers.add
@command(EndingSettings, "end-session", short_help="End the session of a buffer.")
def end_session(settings: EndingSettings) -> None:
    """End the session of a buffer, such as one that a dead learner left, with its chunks.

    A learner that still runs starts its session again.
    """
    name = settings.name
    with settings.connect() as client:
        description = client.get_buffer(name)
        session_id = description.session_id
        if not session_id:
            raise InvalidRequestError("name", f"{name!r} is a buffer without a session")
        settings.confirm(f"End session {session_id!r} of buffer {name!r}", description)
        client.end_session(session_id, buffer=name)
    settings.report("ended", session_id)
