"""`breadbox buffers`: list, create, change and delete buffers."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import click

from breadbox.cli import frame
from breadbox.cli.stats import describe, outage_text, staleness_text
from breadbox.errors import InvalidRequestError
from breadbox.types import (
    BufferConfig,
    BufferDescription,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunks,
    SampleToInsertRatio,
)


@click.group()
def buffers() -> None:
    """List, create, change and delete buffers."""


@buffers.command("list")
@frame.server_options
def list_buffers(target: frame.Target) -> None:
    """List all buffers."""
    with target.connect() as client:
        found = client.list_buffers()
    if target.as_json:
        frame.print_json(found)
        return
    console = frame.console()
    lines = [_line(description) for description in found]
    console.print(frame.FittedTable(_COLUMNS, lines, expendable=_EXPENDABLE))
    if outage := next(filter(None, map(outage_text, found)), ""):
        console.print(outage)


_COLUMNS = (
    *("name", "session", "#version", "#chunks", "#capacity", "#bytes", "staleness", "#waiters"),
)
_EXPENDABLE = ("session", "#capacity", "staleness", "#bytes", "#waiters", "#version")


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


class SizeBytes(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A size with a unit, such as 8GiB or 500MB."""

    name = "size"
    _UNITS: ClassVar[Mapping[str, int]] = {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size."""
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().replace(" ", "")
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        try:
            return int(float(digits) * self._UNITS[text[len(digits) :]])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size such as 8GiB or 500MB", param, ctx)


_COUNT = click.IntRange(min=1)
_COUNT_OR_NONE = click.IntRange(min=0)
_SPAN = click.FloatRange(min=0, min_open=True)

_LIMITS: tuple[Callable[[Any], Any], ...] = (
    click.option("--fragments-per-chunk", type=_COUNT, help="Fragments of a chunk; fixed."),
    click.option("--capacity-chunks", type=_COUNT, help="Chunks held for sampling."),
    click.option("--capacity-bytes", type=SizeBytes(), help="Payload bytes held, such as 8GiB."),
    click.option(
        "--staleness-max", type=_COUNT_OR_NONE, help="Largest staleness served, in versions."
    ),
    click.option("--uses-max", type=_COUNT, help="Deliveries after which a chunk leaves."),
    click.option(
        "--full-policy",
        type=click.Choice([policy.value for policy in FullPolicy]),
        help="At the limit: evict the oldest chunk, or let producers wait.",
    ),
    click.option(
        "--lease-expiry-policy",
        type=click.Choice([policy.value for policy in LeaseExpiryPolicy]),
        help="An expired lease gives its uses back, or counts as consumed.",
    ),
    click.option("--lease-s", type=_SPAN, help="Seconds a lease lives without renewal."),
    click.option("--waiters-max", type=_COUNT, help="Fetches that may wait at a time."),
    click.option("--leases-max", type=_COUNT, help="Leases alive at a time."),
    click.option("--workers-max", type=_COUNT, help="Workers remembered in a session."),
    click.option("--open-chunk-s", type=_SPAN, help="Silence that ends a worker's open chunk."),
    click.option("--sampler", help="uniform, oldest_first or freshest_first."),
    click.option("--minimum-chunks", type=_COUNT_OR_NONE, help="Fetches wait for so many chunks."),
    click.option("--ratio", type=float, help="Keep uses per inserted chunk about this."),
    click.option("--error-chunks", type=float, help="Width of the band around --ratio, in uses."),
)


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option per limit."""
    for decorate in reversed(_LIMITS):
        command = decorate(command)
    return command


def config_of(limits: dict[str, Any]) -> BufferConfig:
    """The configuration that the options name; what was not given stays None.

    Raises:
        InvalidRequestError: Options contradict each other.
    """
    minimum_chunks = limits.pop("minimum_chunks")
    ratio, error_chunks = limits.pop("ratio"), limits.pop("error_chunks")
    full, expiry = limits.pop("full_policy"), limits.pop("lease_expiry_policy")
    limiter: MinimumChunks | SampleToInsertRatio | None = None
    if ratio is not None:
        if error_chunks is None:
            raise InvalidRequestError("--ratio", "needs --error-chunks, the width of its band")
        limiter = SampleToInsertRatio(ratio, error_chunks, minimum_chunks or 1)
    elif error_chunks is not None:
        raise InvalidRequestError("--error-chunks", "needs --ratio")
    elif minimum_chunks is not None:
        limiter = MinimumChunks(minimum_chunks)
    return BufferConfig(
        **limits,
        full_policy=FullPolicy(full) if full else None,
        lease_expiry_policy=LeaseExpiryPolicy(expiry) if expiry else None,
        limiter=limiter,
    )


def _show(target: frame.Target, description: BufferDescription) -> None:
    if target.as_json:
        frame.print_json(description)
    else:
        frame.console().print(describe(description, show_zeros=False))


@buffers.command("create", short_help="Create a buffer, with your limits or the server's.")
@click.argument("name")
@limit_options
@frame.server_options
def create(target: frame.Target, name: str, **limits: Any) -> None:
    """Create a buffer; limits that are not given take the server's defaults."""
    config = config_of(limits)
    with target.connect() as client:
        _show(target, client.create_buffer(name, config))


@buffers.command("update", short_help="Change limits of a buffer while it runs.")
@click.argument("name")
@limit_options
@frame.server_options
def update(target: frame.Target, name: str, **limits: Any) -> None:
    """Change limits while running; what is not given stays, what no longer fits is evicted."""
    config = config_of(limits)
    if config == BufferConfig():
        raise InvalidRequestError("limits", "are missing; give at least one option")
    with target.connect() as client:
        _show(target, client.update_buffer(name, config))


@buffers.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@frame.server_options
def delete(target: frame.Target, name: str, yes: bool) -> None:
    """Delete a buffer with everything in it."""
    with target.connect() as client:
        description = client.get_buffer(name)
        if not yes:
            held = frame.counted(description.state.fragment_count, "fragment")
            click.confirm(f"Delete buffer {name!r} with its {held}?", abort=True)
        client.delete_buffer(name)
    if target.as_json:
        frame.print_json({"deleted": name})
    else:
        click.echo(f"deleted {name}")
