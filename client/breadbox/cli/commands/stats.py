"""`breadbox stats` and `breadbox explain`: show a buffer's contents, and why a learner waits."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.console import Group
from rich.table import Table

from breadbox.cli import frame
from breadbox.cli.command import command
from breadbox.cli.connection import Target
from breadbox.cli.settings import of_one_call
from breadbox.client import Client
from breadbox.diagnosis import diagnose
from breadbox.model.errors import ReplayBufferError
from breadbox.model.presets import UNLIMITED
from breadbox.model.types import (
    ArrayType,
    AssemblyPolicy,
    BufferConfig,
    BufferDescription,
    MinimumChunks,
    SampleToInsertRatio,
    SchemaPolicy,
)
from breadbox.shared.step_ends import left_out_text, reporting

WORKERS_SHOWN = 20
COLUMNS = 80
"""Width of an ordinary terminal."""


class StatsSettings(Target):
    """The buffers, and the counters."""

    names: tuple[str, ...] = of_one_call((), positional=True, metavar="[BUFFER]...")
    show_zeros: bool = of_one_call(False, option="all")
    """Show counters that are zero too."""


@command(StatsSettings)
def stats(settings: StatsSettings) -> None:
    """Show the contents and counters of buffers; without a name, of all buffers.

    docs/operate.md describes each counter.
    """
    with settings.connect() as client:
        found = [client.get_buffer(name, with_workers=True) for name in settings.names]
        found = found or [_with_workers(client, each) for each in client.list_buffers()]
    if settings.as_json:
        frame.print_json(found)
        return
    console = frame.console()
    for number, description in enumerate(found):
        if number:
            console.print()
        console.print(describe(description, show_zeros=settings.show_zeros))


def _with_workers(client: Client, listed: BufferDescription) -> BufferDescription:
    """Return a buffer with its workers, or as it was listed if these cannot be asked for."""
    try:
        return replace(listed, workers=client.get_buffer(listed.name, with_workers=True).workers)
    except ReplayBufferError:
        return listed


def describe(description: BufferDescription, *, show_zeros: bool) -> Group:
    """Return one buffer as text: limits, gauges, counters."""
    counters = {
        name: count for name, count in description.state.counters.items() if count or show_zeros
    }
    counted = [(name, frame.count_text(count)) for name, count in counters.items()]
    outage, waiting = outage_text(description), waiting_text(description)
    return Group(
        headline(description),
        # Above the numbers, which are old during an outage.
        *([outage] if outage else []),
        limits_text(description.config),
        "",
        _gauges(description),
        *([waiting] if waiting else []),
        "",
        frame.rows(frame.table("counter", "#total"), counted) if counted else "nothing counted yet",
        *(_steps(description, show_zeros) if description.workers else ()),
    )


def _steps(description: BufferDescription, show_all: bool) -> Iterator[Table | str]:
    """Yield where the steps of workers went, the least trained on first."""
    workers = sorted(
        reporting(description.workers),
        key=lambda each: each.trained_count / max(1, each.acted_count),
    )
    shown = workers if show_all else workers[:WORKERS_SHOWN]
    columns = ("acted", "trained", "dropped", "refused", "evicted", "undelivered")
    lines = [
        (
            frame.shown(each.worker_id),
            *[frame.count_text(getattr(each, f"{name}_count")) for name in columns],
            f"{each.fragment_versions:.1f}" if each.steps_per_version else "-",
        )
        for each in shown
    ]
    heads = [f"#{name}" for name in columns]
    excluded, left = left_out_text(description.workers), len(workers) - len(shown)
    yield ""
    yield frame.rows(frame.table("steps of worker", *heads, "#versions"), lines)
    if left:
        yield f"and {frame.counted(left, 'worker')}; --all shows them"
    if excluded:
        yield f"[red]LEFT OUT[/]: {frame.shown(excluded)}."


def headline(description: BufferDescription) -> str:
    """Return name, session and version in one line."""
    if not description.session_id:
        return f"[bold]{frame.shown(description.name)}[/]  no session is current"
    return (
        f"[bold]{frame.shown(description.name)}[/]  "
        f"session {frame.shown(description.session_id)}, "
        f"model version {description.model_version}"
    )


def waiting_text(description: BufferDescription) -> str:
    """Return why a fetch would wait, or empty if it would not."""
    reason = description.state.waiting_reason
    return f"A fetch would wait: {frame.shown(reason)}." if reason else ""


def outage_text(description: BufferDescription) -> str:
    """Return which part does not answer the server, or empty if all do."""
    outage = description.state.outage
    return f"[red]OUTAGE[/]: {frame.shown(outage)}." if outage else ""


def _gauges(description: BufferDescription) -> Table:
    state, config = description.state, description.config
    senders = "groups" if config.assembly is AssemblyPolicy.GROUPS else "workers"
    lines = [
        ("chunks", frame.count_text(state.chunk_count), _of(config.capacity_chunks)),
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
        ("leases", frame.count_text(state.lease_count), _of(config.leases_max)),
        ("waiters", frame.count_text(state.waiter_count), _of(config.waiters_max)),
        (senders, frame.count_text(state.worker_count), _of(config.workers_max)),
        ("staleness", staleness_text(description), _at_most(config.staleness_max)),
    ]
    if config.groups_per_version:
        free_max = (1 + (config.lead_versions or 0)) * config.groups_per_version
        waiting = frame.counted(state.ticket_waiter_count, "request")
        lines.append(("tickets", frame.count_text(state.ticket_count), _of(free_max)))
        lines.append(("for tickets wait", waiting, state.ticket_waiting_reason))
    return frame.rows(frame.table("", "#now", "limit"), lines)


def schema_table(number: int, schema: Mapping[str, ArrayType]) -> Table | str:
    """Return a table with a line for each array of fragments."""
    if not schema:
        return "Fragments of producers that declare no schema."
    title = "path" if number == 0 else f"path (schema {number + 1})"
    lines = [
        (frame.shown(path), each.type_name, " × ".join(map(str, each.shape)) or "-")
        for path, each in schema.items()
    ]
    return frame.rows(frame.table(title, "dtype", "shape"), lines)


def _of(limit: int | None) -> str:
    return "" if limit is None else f"of {limit:,}"


def staleness_text(description: BufferDescription) -> str:
    """Return the number of chunks by staleness: "0: 12, 1: 3"."""
    held = description.state.chunk_count_by_staleness
    return ", ".join(f"{staleness}: {count:,}" for staleness, count in held.items()) or "-"


def limits_text(config: BufferConfig) -> str:
    """Return the limits that are no gauges, in lines that fit a terminal of 80 columns."""
    parts = [
        _chunk_text(config),
        "used without end"
        if (config.uses_max or 1) >= UNLIMITED
        else f"used at most {frame.counted(config.uses_max or 1, 'time')}",
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


def _chunk_text(config: BufferConfig) -> str:
    size = config.fragments_per_chunk or 1
    if config.assembly is not AssemblyPolicy.GROUPS:
        return f"{frame.counted(size, 'fragment')} per chunk"
    at_least = f", or {config.group_min} once it is silent" if config.group_min else ""
    dropped = f", dropped if all have one {config.drop_equal}" if config.drop_equal else ""
    return f"groups of {frame.counted(size, 'member')}{at_least}{dropped}"


def _at_most(count: int | None) -> str:
    return "without end" if count is not None and count >= UNLIMITED else f"at most {count}"


class ExplainSettings(Target):
    """The buffer, and how long to watch it."""

    name: str = of_one_call("default", positional=True, metavar="[BUFFER]")
    fragment_count: int | None = of_one_call(None, ge=1)
    """Fragments that your learner fetches, to estimate how long that takes."""
    interval_s: float = of_one_call(2.0, option="seconds", ge=0.1, le=300)
    """Seconds to watch, to measure rates."""


@command(ExplainSettings)
def explain(settings: ExplainSettings) -> None:
    """Explain why a learner waits on BUFFER, or that it does not."""
    with settings.connect() as client:
        before = client.get_buffer(settings.name)
        started_at = time.monotonic()
        time.sleep(settings.interval_s)
        after = client.get_buffer(settings.name, with_workers=True)
        watched_s = time.monotonic() - started_at
    diagnosis = diagnose(before, after, watched_s, fragment_count=settings.fragment_count)
    if settings.as_json:
        frame.print_json(diagnosis)
        return
    console = frame.console()
    # A terminal wraps words; a file keeps whole lines, for searching.
    soft_wrap = not console.is_terminal
    console.print(f"[bold]{frame.shown(diagnosis.headline)}[/]", soft_wrap=soft_wrap)
    for advice in diagnosis.advice:
        console.print(f"  → {frame.shown(advice)}", soft_wrap=soft_wrap)
    console.print()
    lines = [(name, frame.rate_text(rate)) for name, rate in diagnosis.rates.items()]
    console.print(frame.rows(frame.table("", f"#over {diagnosis.watched_s:.1f} s"), lines))
