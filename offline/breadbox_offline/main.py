"""`breadbox import` and `breadbox export`."""

import json
import os
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from breadbox.cli import frame
from breadbox.cli.base import import_from_here, printable
from breadbox.cli.command import command
from breadbox.cli.connection import Target
from breadbox.cli.settings import Bytes, of_one_call, setting
from breadbox.model.options import calling_as, process_name
from breadbox_offline.errors import OfflineDataError, UnsupportedDatasetError
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.minari_dataset import MINARI_SCHEME, write_minari
from breadbox_offline.files.readers import PARQUET
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.limits import DataLimits, bounded_memory
from breadbox_offline.report import FindingKind, FindingPolicy, ValidationPolicy
from breadbox_offline.rows.options import MappingOptions, OfflineSchema
from breadbox_offline.service import (
    ImportCounts,
    append_episodes,
    ensure_demo_buffer,
    join_session,
    read_buffer,
)

_FINDINGS_SHOWN = 10
_MEMORY_BYTES_MIN = 1 << 26
_RECONNECT_S = 30.0
"""Seconds to wait for a server that restarts."""


class ImportSettings(Target):
    """The episodes to import, and their buffer."""

    path: str = of_one_call(positional=True)
    buffer: str = "demo"
    """Created if it does not exist, without limits of uses and staleness."""
    step_count: int = setting(32, ge=1)
    """Steps of a fragment; use that of the buffers that a learner mixes it with. The last one is
    shorter, if the buffer takes that."""
    capacity_chunks: int = setting(65_536, ge=1)
    """Capacity of the buffer, if it is created."""
    columns: tuple[str, ...] = of_one_call((), option="column", metavar="CANONICAL=PHYSICAL")
    """Name of a column in the data, such as obs=o_t. Repeatable."""
    unfinished: Literal["truncate", "skip", "raise"] = "truncate"
    """What to do with an episode that nothing ended."""
    take_over: bool = of_one_call(False)
    """Add to the buffer's session although other processes use it."""
    multi_agent: bool = of_one_call(False)
    """Rows belong to several agents (agent_id)."""
    memory_max: Bytes = setting(4 * 2**30, ge=_MEMORY_BYTES_MIN)
    """Memory that reading may take; a file that needs more is refused. At least 64MiB."""


@command(ImportSettings, "import")
def import_episodes(settings: ImportSettings) -> None:
    """Import the episodes at PATH into a buffer.

    PATH is a Parquet, JSON lines or msgpack file, a folder of them, a folder that `breadbox
    generate` wrote, or minari:NAME.
    """
    path, buffer, step_count = settings.path, settings.buffer, settings.step_count
    dataset = Dataset(
        path,
        mapping=MappingOptions(
            schema=_parse_schema(settings.columns),
            multi_agent=settings.multi_agent,
            limits=DataLimits.within(settings.memory_max),
        ),
        policy=ValidationPolicy({FindingKind.UNFINISHED: FindingPolicy(settings.unfinished)}),
    )
    settings.check()
    with (
        # Imports of one host are one user of a session: the next one adds to it.
        calling_as(f"{process_name().partition('/')[0]}/import"),
        settings.connect(buffer=buffer, reconnect_s=_RECONNECT_S) as client,
        bounded_memory(settings.memory_max, path),
    ):
        client.list_buffers()  # Raises if the server cannot be reached, before anything is read.
        # A file that cannot be read leaves neither a buffer nor a session behind.
        episodes = dataset.episodes()
        first = [*islice(episodes, 1)]
        description = ensure_demo_buffer(client, buffer, capacity_chunks=settings.capacity_chunks)
        counts = append_episodes(
            client,
            chain(first, episodes),
            join_session(client, description, take_over=settings.take_over),
            step_count=step_count,
        )
    if settings.as_json:
        click.echo(json.dumps(_as_json(counts, dataset)))
    else:
        _print(counts, dataset, buffer)
    if not counts.fragment_count:
        raise OfflineDataError(
            f"nothing was imported: its {counts.step_count} steps do not fill a fragment of "
            f"{step_count}; --step-count can be {counts.step_count} at most"
            if counts.step_count
            else "nothing was imported: it holds no episode that can be used",
            file=path,
        )
    if counts.dropped_step_count:
        click.echo(
            f"Warning: the last {counts.dropped_step_count} of {counts.step_count} steps did not "
            f"fill a fragment of {step_count} and were left out: the buffer takes one length only, "
            "and one with --schema ragged takes every length",
            err=True,
        )


def _as_json(counts: ImportCounts, dataset: Dataset) -> dict[str, Any]:
    return {
        "episodes": counts.episode_count,
        "steps": counts.step_count,
        "fragments": counts.fragment_count,
        "dropped_steps": counts.dropped_step_count,
        "assumed_states": counts.assumed_state_count,
        "findings": {kind.value: count for kind, count in dataset.report.counts.items()},
    }


def _print(counts: ImportCounts, dataset: Dataset, buffer: str) -> None:
    click.echo(
        f"{frame.counted(counts.episode_count, 'episode')} with "
        f"{frame.counted(counts.step_count, 'step')}: "
        f"{frame.counted(counts.fragment_count, 'fragment')} in buffer {buffer!r}"
    )
    if counts.assumed_state_count:
        click.echo(
            f"{counts.assumed_state_count} fragments start where no recurrent state was recorded: "
            "they say zeros; the --step-count of the recording would keep its states"
        )
    for finding in dataset.report.findings[:_FINDINGS_SHOWN]:
        click.echo(f"  {printable(str(finding))}")
    if dataset.report.counts:
        click.echo(printable(dataset.report.summary()))


class ExportSettings(Target):
    """The buffer to export, and the file."""

    buffer: str = "default"
    """Buffer to read."""
    out: str
    """File to write, .parquet or .msgpack; or minari:NAME, a new local Minari dataset."""
    overwrite: bool = of_one_call(False)
    """Replace an existing file."""
    layout: Literal["steps", "episodes"] = "steps"
    """Rows of a Parquet file: steps, or whole serialized episodes."""
    env_id: str | None = setting(None, option="env")
    """Take the spaces of this Gymnasium environment for a Minari dataset, and name it there."""
    max_wait_s: float = setting(10.0, ge=0.0)
    """Seconds to wait for chunks that learners have leased."""


@command(ExportSettings, "export")
def export_episodes(settings: ExportSettings) -> None:
    """Write the episodes that a buffer holds to a file, without using anything up."""
    out, env_id = settings.out, settings.env_id
    is_minari = out.startswith(MINARI_SCHEME)
    is_of_steps = out.endswith(PARQUET) and settings.layout == "steps"
    if env_id is not None and not is_minari:
        # BREADBOX_ENV may be set for other commands, so only a typed option is a mistake.
        source = click.get_current_context().get_parameter_source("env_id")
        if source is ParameterSource.COMMANDLINE:
            raise UnsupportedDatasetError("--env is for --out minari:NAME only", file=out)
    if settings.overwrite and is_minari:
        raise UnsupportedDatasetError("--overwrite is for files only", file=out)
    if not settings.overwrite and not is_minari and os.path.lexists(out):
        raise UnsupportedDatasetError("is there already; --overwrite replaces it", file=out)
    import_from_here()
    settings.check()
    with (
        settings.connect(buffer=settings.buffer, reconnect_s=_RECONNECT_S) as client,
        # Closed before the client, so that an export that fails returns the chunks.
        closing(
            read_buffer(
                client,
                settings.buffer,
                max_wait_s=settings.max_wait_s,
                yields_parts=is_of_steps and not is_minari,
            )
        ) as held,
    ):
        first = next(held, None)
        if first is None:
            waiting = client.get_buffer(settings.buffer).state.open_fragment_count
            raise OfflineDataError(
                f"nothing was written: buffer {settings.buffer!r} holds no chunk"
                + (f"; {waiting} fragments wait for theirs to fill" if waiting else ""),
                file=out,
            )
        episodes = chain([first], held)
        if is_minari:
            counts = write_minari(episodes, out, env_id=env_id)
        else:
            counts = write_episodes(episodes, Path(out), layout=settings.layout)
    if settings.as_json:
        written = {"episodes": counts.episode_count, "steps": counts.step_count}
        click.echo(json.dumps({"out": out, **written}))
    else:
        click.echo(
            f"{frame.counted(counts.episode_count, 'episode')}, "
            f"{frame.counted(counts.step_count, 'step')} written to {out}"
        )


def _parse_schema(columns: tuple[str, ...]) -> OfflineSchema:
    pairs = [column.partition("=") for column in columns]
    for canonical, _, physical in pairs:
        if not canonical or not physical:
            raise OfflineDataError(f"--column wants CANONICAL=PHYSICAL, got {canonical!r}")
    try:
        return OfflineSchema(columns={canonical: physical for canonical, _, physical in pairs})
    except ValueError as error:
        raise OfflineDataError(f"--column: {error}".replace("\n", " ")) from error
