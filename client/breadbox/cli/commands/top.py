"""`breadbox top`: all buffers, live."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group
from rich.live import Live

import breadbox
from breadbox.cli import frame
from breadbox.cli.command import command
from breadbox.cli.commands.stats import staleness_text
from breadbox.cli.connection import Target
from breadbox.cli.settings import of_one_call, setting
from breadbox.diagnosis import rates_of
from breadbox.model.errors import DeadlineExceededError, UnavailableError
from breadbox.model.types import BufferDescription


@dataclass(frozen=True, slots=True)
class Sample:
    """State of all buffers at one time, and rates since the sample before."""

    seen_at: float
    buffers: Mapping[str, BufferDescription]
    rates: Mapping[str, Mapping[str, float]]
    """Rates by buffer, empty for a new one."""
    problem: str = ""
    """Why the server did not answer, or empty; the buffers are then those of the sample before."""


def next_sample(client: breadbox.Client, before: Sample | None, *, now: float) -> Sample:
    """Read all buffers; an unreachable server gives a sample with a problem, not an error."""
    try:
        buffers = {description.name: description for description in client.list_buffers()}
    except (UnavailableError, DeadlineExceededError) as error:
        return Sample(now, before.buffers if before else {}, {}, str(error))
    if before is None or before.problem:
        return Sample(now, buffers, {})
    watched_s = max(now - before.seen_at, 1e-3)
    rates = {
        name: rates_of(before.buffers[name], description, watched_s)
        for name, description in buffers.items()
        if name in before.buffers
    }
    return Sample(now, buffers, rates)


def samples(client: breadbox.Client, interval_s: float, count: int | None) -> Iterator[Sample]:
    """Yield samples, the first one immediately."""
    sample: Sample | None = None
    taken = 0
    while count is None or taken < count:
        if sample is not None:
            time.sleep(max(0.0, sample.seen_at + interval_s - time.monotonic()))
        sample = next_sample(client, sample, now=time.monotonic())
        taken += 1
        yield sample


def render(sample: Sample, server: str, moment: str) -> Group:
    """Return a sample as text."""
    outages = [buffer.state.outage for buffer in sample.buffers.values()]
    problem = sample.problem or next(filter(None, outages), "")
    state = (
        f"[red]{frame.shown(problem)}[/]"
        if problem
        else frame.counted(len(sample.buffers), "buffer")
    )
    reasons = [
        frame.shown(
            f"{name}: a fetch {'waits' if description.state.waiter_count else 'would wait'}, "
            f"{description.state.waiting_reason}"
        )
        for name, description in sample.buffers.items()
        if description.state.waiting_reason
    ]
    return Group(
        f"[bold]breadbox top[/]  {frame.shown(server)}  {moment}  {state}",
        "",
        _table(sample),
        "",
        *reasons,
    )


_COLUMNS = (
    *("buffer", "session", "#version", "#chunks", "#full", "#bytes", "#in", "#out", "#stale"),
    *("#refused", "#leases", "#waiters", "#workers", "staleness"),
)
_EXPENDABLE = (
    *("#workers", "session", "#leases", "#refused", "staleness", "#bytes", "#waiters", "#stale"),
    *("#full", "#version", "#out", "#in"),
)


def _table(sample: Sample) -> frame.FittedTable:
    lines = [_line(sample, name) for name in sorted(sample.buffers)]
    return frame.FittedTable(_COLUMNS, lines, expendable=_EXPENDABLE)


def _line(sample: Sample, name: str) -> tuple[object, ...]:
    description = sample.buffers[name]
    state, config = description.state, description.config
    rates = sample.rates.get(name)

    def rate(title: str) -> str:
        return frame.rate_text(rates[title]) if rates else "-"

    return (
        name,
        _short(description.session_id) or "-",
        "-" if description.model_version is None else description.model_version,
        frame.count_text(state.chunk_count),
        f"{100 * _fullness(description):.0f} %" if config.capacity_chunks else "-",
        frame.size_text(state.payload_bytes),
        rate("fragments admitted"),
        rate("chunks delivered"),
        rate("fragments refused as stale"),
        rate("fragments asked to wait"),
        state.lease_count,
        state.waiter_count,
        state.worker_count,
        staleness_text(description),
    )


def _fullness(description: BufferDescription) -> float:
    state, config = description.state, description.config
    return max(
        state.chunk_count / (config.capacity_chunks or 1),
        state.payload_bytes / config.capacity_bytes if config.capacity_bytes else 0.0,
    )


def _short(session_id: str, length_max: int = 16) -> str:
    return session_id if len(session_id) <= length_max else f"{session_id[: length_max - 1]}…"


class TopSettings(Target):
    """Interval and number of samples."""

    interval_s: float = setting(1.0, ge=0.1, le=3600)
    """Seconds between samples."""
    count: int | None = of_one_call(None, ge=1)
    """Stop after so many samples."""


@command(TopSettings)
def top(settings: TopSettings) -> None:
    """Watch all buffers live; Ctrl-C ends it. With --json it prints a line per sample."""
    with settings.connect() as client:
        client.list_buffers()  # A wrong address ends the command immediately.
        if settings.as_json:
            for sample in samples(client, settings.interval_s, settings.count):
                frame.print_json(sample, is_line=True)
            return
        console = frame.console()
        if not console.is_terminal:
            for sample in samples(client, settings.interval_s, settings.count):
                console.print(render(sample, settings.server, _moment()))
            return
        with Live(console=console, auto_refresh=False, screen=settings.count is None) as live:
            try:
                for sample in samples(client, settings.interval_s, settings.count):
                    live.update(render(sample, settings.server, _moment()), refresh=True)
            except KeyboardInterrupt:
                return


def _moment() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
