"""`breadbox stats`: what a buffer holds, and what it has counted."""

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table

from breadbox.cli import frame
from breadbox.cli.command import command
from breadbox.cli.connection import Target
from breadbox.cli.settings import of_one_call
from breadbox.model.presets import UNLIMITED
from breadbox.model.types import (
    ArrayType,
    BufferConfig,
    BufferDescription,
    MinimumChunks,
    SampleToInsertRatio,
    SchemaPolicy,
)

COLUMNS = 80
"""Of a terminal whose width nobody changed."""


class StatsSettings(Target):
    """Which buffers, and how much of them."""

    names: tuple[str, ...] = of_one_call((), positional=True, metavar="[BUFFER]...")
    show_zeros: bool = of_one_call(False, option="all")
    """Show counters that are zero, too."""


@command(StatsSettings)
def stats(settings: StatsSettings) -> None:
    """Show what buffers hold and have counted; without a name, of all buffers.

    docs/operate.md says what each counter counts.
    """
    with settings.connect() as client:
        found = [client.get_buffer(name) for name in settings.names] or list(client.list_buffers())
    if settings.as_json:
        frame.print_json(found)
        return
    console = frame.console()
    for number, description in enumerate(found):
        if number:
            console.print()
        console.print(describe(description, show_zeros=settings.show_zeros))


def describe(description: BufferDescription, *, show_zeros: bool) -> Group:
    """One buffer as text: what it is, what it holds, what it counted."""
    counters = {
        name: count for name, count in description.state.counters.items() if count or show_zeros
    }
    counted = [(name, frame.count_text(count)) for name, count in counters.items()]
    outage, waiting = outage_text(description), waiting_text(description)
    return Group(
        headline(description),
        # Above the numbers, which are old while it lasts.
        *([outage] if outage else []),
        limits_text(description.config),
        "",
        _gauges(description),
        *([waiting] if waiting else []),
        "",
        frame.rows(frame.table("counter", "#total"), counted) if counted else "nothing counted yet",
    )


def headline(description: BufferDescription) -> str:
    """Name, session and version in one line."""
    if not description.session_id:
        return f"[bold]{frame.shown(description.name)}[/]  no session is current"
    return (
        f"[bold]{frame.shown(description.name)}[/]  "
        f"session {frame.shown(description.session_id)}, "
        f"model version {description.model_version}"
    )


def waiting_text(description: BufferDescription) -> str:
    """What a fetch waits for, as a sentence; empty when it would not."""
    reason = description.state.waiting_reason
    return f"A fetch would wait: {frame.shown(reason)}." if reason else ""


def outage_text(description: BufferDescription) -> str:
    """What does not answer the server, as a sentence; empty when everything does."""
    outage = description.state.outage
    return f"[red]OUTAGE[/]: {frame.shown(outage)}." if outage else ""


def _gauges(description: BufferDescription) -> Table:
    state, config = description.state, description.config
    lines = [
        ("chunks", frame.count_text(state.chunk_count), of(config.capacity_chunks)),
        (
            "payload bytes",
            frame.size_text(state.payload_bytes),
            f"of {frame.size_text(config.capacity_bytes)}" if config.capacity_bytes else "",
        ),
        ("fragments", frame.count_text(state.fragment_count), ""),
        (
            "open chunks",
            frame.count_text(state.open_chunk_count),
            f"with {frame.counted(state.open_fragment_count, 'fragment')}",
        ),
        ("leases", frame.count_text(state.lease_count), of(config.leases_max)),
        ("waiters", frame.count_text(state.waiter_count), of(config.waiters_max)),
        ("workers", frame.count_text(state.worker_count), of(config.workers_max)),
        ("staleness", staleness_text(description), at_most(config.staleness_max)),
    ]
    return frame.rows(frame.table("", "#now", "limit"), lines)


def schema_table(number: int, schema: Mapping[str, ArrayType]) -> Table | str:
    """What fragments hold, a line for each array."""
    if not schema:
        return "Fragments whose producer does not say what is in them."
    title = "path" if number == 0 else f"path (schema {number + 1})"
    lines = [
        (frame.shown(path), each.type_name, " × ".join(map(str, each.shape)) or "-")
        for path, each in schema.items()
    ]
    return frame.rows(frame.table(title, "dtype", "shape"), lines)


def of(limit: int | None) -> str:
    """A limit beside its gauge."""
    return "" if limit is None else f"of {limit:,}"


def staleness_text(description: BufferDescription) -> str:
    """Chunks by staleness: "0: 12, 1: 3"."""
    held = description.state.chunk_count_by_staleness
    return ", ".join(f"{staleness}: {count:,}" for staleness, count in held.items()) or "-"


def limits_text(config: BufferConfig) -> str:
    """The limits that are not gauges, in lines that a terminal of 80 columns need not break."""
    parts = [
        f"{frame.counted(config.fragments_per_chunk or 1, 'fragment')} per chunk",
        uses_text(config.uses_max or 1),
        f"full: {config.full_policy.value if config.full_policy else '?'}",
        f"sampler {frame.shown(config.sampler)}",
    ]
    if config.schema is SchemaPolicy.RAGGED:
        parts.append("fragments of any length")
    if config.schema is SchemaPolicy.ANY:
        parts.append("any schema")
    match config.limiter:
        case MinimumChunks(chunk_count=count) if count > 1:
            parts.append(f"waits for {count} chunks")
        case SampleToInsertRatio(ratio=ratio, error_chunks=error, lead_chunks=lead):
            ahead = f", producers ahead by {lead:g}" if lead else ""
            parts.append(f"{ratio:g} ± {error:g} uses per chunk{ahead}")
        case _:
            pass
    lines = parts[:1]
    for part in parts[1:]:
        lines[-1] += ","
        if len(lines[-1]) + 1 + len(part) < COLUMNS:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def uses_text(uses_max: int) -> str:
    """How often a chunk may be used."""
    if uses_max >= UNLIMITED:
        return "used without end"
    return f"used at most {frame.counted(uses_max, 'time')}"


def at_most(count: int | None) -> str:
    """A limit beside a gauge that is no count of things held."""
    return "without end" if count is not None and count >= UNLIMITED else f"at most {count}"
