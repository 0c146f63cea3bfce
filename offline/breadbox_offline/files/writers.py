"""Write files that every reader here, and RLlib, can read back."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from breadbox.model import trees
from breadbox_offline.decoding.arrow import to_arrow
from breadbox_offline.decoding.dtypes import RefusedError, plain_dtype
from breadbox_offline.decoding.images import image_features
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.serialized import pack_episode
from breadbox_offline.errors import OfflineDataError, SchemaError, UnsupportedDatasetError
from breadbox_offline.files.readers import MSGPACK, PARQUET
from breadbox_offline.rows.options import Column
from breadbox_offline.training.prelearner import ITEM


@dataclass(frozen=True, slots=True)
class WrittenCounts:
    """Numbers of what was written."""

    episode_count: int
    step_count: int


def write_episodes(
    episodes: Iterable[Episode], path: Path, *, layout: str = "steps"
) -> WrittenCounts:
    """Write episodes to one file, which gets its name once it is complete.

    Frames, uint8[H, W, C] with 1, 3 or 4 channels, become columns of images in the layout `steps`.

    Args:
        episodes: Any number; one is in memory at a time, and a row group. In the layout `steps`
            each may be a part of one, followed by the next part.
        path: Ends with `.parquet` or `.msgpack`.
        layout: In a Parquet file, `steps` (a row is a step, readable by everything) or `episodes`
            (a row is a serialized episode, readable by RLlib 2.60 and by this package).

    Raises:
        UnsupportedDatasetError: The suffix or the layout is unknown, or the file cannot be written,
            for example for lack of room; nothing is left of it then.
        SchemaError: An episode has other columns than the first.
        OfflineDataError: An episode has values that could not be read back, such as dates.
    """
    open_writer = _writer_of(path, layout)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _written_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = open_writer(unfinished)
    episode_count = step_count = 0
    before: Episode | None = None
    try:
        for episode in episodes:
            with _written_to(path):
                _check_readable(episode)
                writer.write(episode)
            episode_count += before is None or not before.leads_to(episode)
            step_count += len(episode)
            before = episode
        with _written_to(path):
            writer.close()
            unfinished.replace(path)
    finally:
        with suppress(OSError):  # A file that failed is removed anyway.
            writer.close()
        unfinished.unlink(missing_ok=True)
    return WrittenCounts(episode_count, step_count)


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Some of pyarrow's errors have only a message.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UnsupportedDatasetError(f"cannot be written: {reason}", file=str(path)) from error
    except OfflineDataError as error:
        error.add_place(file=str(path))
        raise


def _check_readable(episode: Episode) -> None:
    recorded = {Column.OBS: episode.observations, Column.ACTIONS: episode.actions}
    for name, tree in (recorded | episode.extra_model_outputs).items():
        for path, leaf in trees.leaves(tree, name):
            try:
                plain_dtype(np.asarray(leaf).dtype.str)
            except RefusedError as error:
                raise OfflineDataError(f"cannot be exported: {error}", column=path) from None


def _writer_of(path: Path, layout: str) -> "Callable[[Path], _ParquetWriter | _MsgpackWriter]":
    if path.suffix == PARQUET and layout == "steps":
        return lambda file: _ParquetWriter(file, _step_table)
    if path.suffix == PARQUET and layout == "episodes":
        return lambda file: _ParquetWriter(file, _item_table)
    if path.suffix in MSGPACK:
        return _MsgpackWriter
    raise UnsupportedDatasetError(
        f"cannot be written with layout {layout!r}: wanted .parquet (steps, episodes) or .msgpack",
        file=str(path),
    )


ROW_GROUP_BYTES: Final = 32 * 2**20
"""Bytes of rows that are written together; encoding numbers takes several times as much memory."""


class _ParquetWriter:
    def __init__(self, path: Path, table_of: Callable[[Episode], pa.Table]) -> None:
        self._path = path
        self._table_of = table_of
        self._writer: parquet.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._is_closed = False

    def write(self, episode: Episode) -> None:
        self._append(self._table_of(episode))

    def close(self) -> None:
        """Complete the file; idempotent. A file without episodes gets an empty column of items."""
        if not self._is_closed and self._writer is None:
            self._append(pa.table({ITEM: pa.array([], pa.binary())}))
        is_first, self._is_closed = not self._is_closed, True
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                if is_first and self._waiting:
                    self._flush(writer)
            finally:
                writer.close()

    def _append(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._path, table.schema, compression="zstd")
        if table.schema != self._writer.schema:
            raise SchemaError(
                f"an episode has the columns {table.schema.names} of types {table.schema.types}; "
                f"the first had {self._writer.schema.names} of {self._writer.schema.types}"
            )
        self._waiting.append(table)
        self._waiting_bytes += table.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush(self._writer)

    def _flush(self, writer: parquet.ParquetWriter) -> None:
        table = pa.concat_tables(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        row_bytes = table.nbytes // max(1, len(table))
        writer.write_table(table, row_group_size=max(1, ROW_GROUP_BYTES // max(1, row_bytes)))


def _step_table(episode: Episode) -> pa.Table:
    count = len(episode)
    columns = step_columns(episode)
    # Both columns of observations have nearly the same rows: each is converted once.
    observations = to_arrow(episode.own_observations(), count + 1, Column.OBS)
    made = {Column.OBS: observations.slice(0, count), Column.NEW_OBS: observations.slice(1, count)}
    table = pa.table(
        {
            name: made[name] if name in made else to_arrow(tree, count, name)
            for name, tree in columns.items()
        }
    )
    return table.replace_schema_metadata(image_features(table.schema))


def _item_table(episode: Episode) -> pa.Table:
    return pa.table({ITEM: pa.array([pack_episode(episode)], pa.large_binary())})


class _MsgpackWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, episode: Episode) -> None:
        self._file.write(pack_episode(episode))

    def close(self) -> None:
        self._file.close()


def step_columns(episode: Episode) -> dict[str, Any]:
    """Return an episode as columns with one row per step, as `map_rows` reads them."""
    count = len(episode)
    observations = episode.own_observations()
    last = np.arange(count) == count - 1
    extras = episode.own_extra_model_outputs()
    columns: dict[str, Any] = {
        Column.EPS_ID: np.full(count, episode.id),
        Column.T: np.arange(episode.t_started, episode.t),
        Column.OBS: trees.rows(observations, 0, -1),
        Column.NEW_OBS: trees.rows(observations, 1, None),
        Column.ACTIONS: episode.own_actions(),
        Column.REWARDS: episode.own_rewards(),
        Column.TERMINATEDS: last & episode.terminated,
        Column.TRUNCATEDS: last & episode.truncated,
        # A tree without leaves has no rows, and can be no column.
        **{name: tree for name, tree in sorted(extras.items()) if any(trees.leaves(tree))},
    }
    for name, value in ((Column.AGENT_ID, episode.agent_id), (Column.MODULE_ID, episode.module_id)):
        if value is not None:
            columns[name] = np.full(count, value)
    return columns
