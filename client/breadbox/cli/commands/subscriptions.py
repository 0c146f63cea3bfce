"""`breadbox subscriptions`: named cursors of readers, their lag, and the chunks they missed."""

import click

from breadbox.cli import frame
from breadbox.cli.base import Group
from breadbox.cli.command import command
from breadbox.cli.commands.buffers import EndingSettings
from breadbox.cli.connection import Target
from breadbox.cli.settings import of_one_call
from breadbox.model.errors import SubscriptionNotFoundError
from breadbox.model.types import Subscription


@click.group(cls=Group)
def subscriptions() -> None:
    """List, create, show, move and delete subscriptions: named cursors of readers."""


class OfBuffer(Target):
    """A buffer."""

    buffer: str = of_one_call("default")
    """Buffer of the subscription."""


@subscriptions.add
@command(OfBuffer, "list")
def list_subscriptions(settings: OfBuffer) -> None:
    """List the subscriptions of a buffer."""
    with settings.connect() as client:
        found = client.get_buffer(settings.buffer).subscriptions
    if settings.as_json:
        frame.print_json(found)
    elif found:
        frame.console().print(frame.FittedTable(_COLUMNS, map(_line, found), expendable=("kind",)))
    else:
        frame.console().print(f"Buffer {settings.buffer!r} has no subscriptions.")


_COLUMNS = ("name", "kind", "#behind", "#bytes", "#seconds", "#missed", "#acknowledged")


def _line(each: Subscription) -> tuple[object, ...]:
    return (
        each.name,
        "retaining" if each.retaining else "plain",
        frame.count_text(each.lag_chunk_count),
        frame.size_text(each.lag_bytes),
        f"{each.lag_s:.1f}",
        frame.count_text(each.missed_chunk_count),
        each.acknowledged_chunk_id,
    )


class CreateSettings(OfBuffer):
    """A subscription to create."""

    name: str = of_one_call(positional=True)
    retaining: bool = of_one_call(False)
    """Keep payloads of chunks that are used up or stale until it has passed them, while the buffer
    has room."""
    after_chunk_id: int | None = of_one_call(None)
    """Begin after this chunk; default: with the oldest one held."""


@subscriptions.add
@command(CreateSettings)
def create(settings: CreateSettings) -> None:
    """Create a subscription; one of the same name and kind stays as it is."""
    with settings.connect(buffer=settings.buffer) as client:
        _show(
            settings,
            client.create_subscription(
                settings.name, retaining=settings.retaining, after_chunk_id=settings.after_chunk_id
            ),
        )


class ShowSettings(OfBuffer):
    """A subscription."""

    name: str = of_one_call(positional=True)


@subscriptions.add
@command(ShowSettings)
def show(settings: ShowSettings) -> None:
    """Show one subscription: its position and its lag."""
    with settings.connect() as client:
        found = client.get_buffer(settings.buffer).subscriptions
    _show(settings, _named(found, settings.name))


def _named(found: tuple[Subscription, ...], name: str) -> Subscription:
    for each in found:
        if each.name == name:
            return each
    raise SubscriptionNotFoundError(name)


def _show(settings: Target, shown: Subscription) -> None:
    if settings.as_json:
        frame.print_json(shown)
        return
    kept = "keeps chunks that it has not passed" if shown.retaining else "keeps nothing"
    last = shown.acknowledged_chunk_id
    behind = frame.counted(shown.lag_chunk_count, "chunk")
    console = frame.console()
    console.print(f"{frame.shown(shown.name)}: {kept}")
    console.print(f"acknowledged up to chunk {last}" if last >= 0 else "acknowledged nothing yet")
    console.print(f"{behind} behind, {frame.size_text(shown.lag_bytes)}, {shown.lag_s:.1f} s")
    if shown.retaining:
        console.print(f"{frame.counted(shown.missed_chunk_count, 'chunk')} missed")


class AcknowledgeSettings(OfBuffer):
    """A subscription, and the last chunk that is done."""

    name: str = of_one_call(positional=True)
    chunk_id: int = of_one_call(positional=True)


@subscriptions.add
@command(AcknowledgeSettings, short_help="Move a subscription forward, as its reader does.")
def acknowledge(settings: AcknowledgeSettings) -> None:
    """Move a subscription forward: chunks up to CHUNK_ID are done, and no longer kept for it.

    It never moves back.
    """
    with settings.connect(buffer=settings.buffer) as client:
        client.acknowledge_chunks(settings.name, settings.chunk_id)
        found = client.get_buffer(settings.buffer).subscriptions
    _show(settings, _named(found, settings.name))


class DeleteSettings(EndingSettings):
    """A subscription to delete."""

    buffer: str = of_one_call("default")
    """Buffer of the subscription."""


@subscriptions.add
@command(DeleteSettings)
def delete(settings: DeleteSettings) -> None:
    """Delete a subscription, and the payloads that were kept for it alone."""
    name = settings.name
    with settings.connect(buffer=settings.buffer) as client:
        shown = _named(client.get_buffer(settings.buffer).subscriptions, name)
        if not settings.yes:
            behind = frame.counted(shown.lag_chunk_count, "chunk")
            settings.ask(f"Delete subscription {name!r}, {behind} behind?")
        client.delete_subscription(name)
    settings.report("deleted", name)
