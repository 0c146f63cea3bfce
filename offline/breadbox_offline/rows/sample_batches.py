"""Read the old stack's SampleBatch rows: a row has an episode's steps, split at `eps_id`."""

import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding import packing
from breadbox_offline.decoding.rows import as_arrays
from breadbox_offline.decoding.spaces import SpaceSpec
from breadbox_offline.episodes.episode import Episode, Info
from breadbox_offline.errors import MissingColumnError, OfflineDataError
from breadbox_offline.report import FindingKind, ValidationReport
from breadbox_offline.rows import columns as read
from breadbox_offline.rows.assembly import step_times
from breadbox_offline.rows.columns import Columns
from breadbox_offline.rows.options import Column, MappingOptions


def map_sample_batches(
    columns: Columns, options: MappingOptions, report: ValidationReport
) -> list[Episode]:
    """Return the episodes of SampleBatch rows; report malformed rows and use the others."""
    reader = _RowReader(columns, options)
    episodes: list[Episode] = []
    for row in range(read.row_count(columns)):
        try:
            episodes.extend(reader.read_row(row))
        except OfflineDataError as error:
            report.note(FindingKind.MALFORMED, error.problem, row=row, column=error.column)
    return episodes


@dataclass(frozen=True, slots=True)
class _Samples:
    column: Any
    name: str
    is_observation: bool
    is_packed: bool
    spec: SpaceSpec | None

    @property
    def is_plain(self) -> bool:
        return self.spec is None and not self.is_packed


class _RowReader:
    def __init__(self, columns: Columns, options: MappingOptions) -> None:
        schema = options.schema
        read.row_count(columns)
        self._columns = columns
        self._options = options
        self._terminated, self._truncated = read.find_flag_columns(columns, schema)
        self._eps_id, self._agent_id, self._module_id, self._t, self._infos = (
            schema.find(name, columns)
            for name in (Column.EPS_ID, Column.AGENT_ID, Column.MODULE_ID, Column.T, Column.INFOS)
        )
        if options.multi_agent and self._agent_id is None:
            raise MissingColumnError(
                schema.physical(Column.AGENT_ID), list(columns), needed_for="several agents"
            )
        obs, actions, self._rewards = (
            schema.require(name, columns) for name in (Column.OBS, Column.ACTIONS, Column.REWARDS)
        )
        # Also None if final observations are ignored.
        new_obs = None if options.ignore_final_observation else schema.find(Column.NEW_OBS, columns)
        flags = [name for name in (self._terminated, self._truncated) if name is not None]
        extras = schema.extra_columns(columns, flags)
        read.check_flat(
            columns, [self._rewards, *flags, self._eps_id, self._agent_id, self._module_id, self._t]
        )
        self._obs = self._samples_of(obs, Column.OBS)
        self._new_obs = None if new_obs is None else self._samples_of(new_obs, Column.NEW_OBS)
        self._actions = self._samples_of(actions, Column.ACTIONS)
        self._extras = {name: self._samples_of(name, name) for name in extras}

    def _samples_of(self, physical: str, canonical: str) -> _Samples:
        rows = self._columns[physical]
        if isinstance(rows, dict | tuple):
            is_packed = False
        elif self._options.packed_columns is not None:
            is_packed = read.is_packed(rows, canonical, physical, self._options)
        else:
            first = rows[0] if len(rows) else None
            if isinstance(first, np.ndarray | list) and len(first):
                first = first[0]
            is_packed = packing.looks_packed(first)
        spec = read.space_spec(canonical, self._options)
        return _Samples(rows, physical, canonical in (Column.OBS, Column.NEW_OBS), is_packed, spec)

    def read_row(self, row: int) -> list[Episode]:
        rewards = read.float_numbers(self._columns[self._rewards][row], self._rewards)
        count = len(rewards)
        starts = self._episode_starts(row, count)
        stops = [*starts[1:], count]
        obs = self._read_samples(self._obs, row, count)
        # `obs` has all observations but an episode's final one. The last observation replaces a
        # final one that was not recorded.
        lasts = np.array(stops) - 1
        if self._new_obs is None:
            final_obs = trees.take(obs, lasts)
        else:
            final_obs = self._read_samples(self._new_obs, row, count, lasts)
        actions = self._read_samples(self._actions, row, count)
        terminated = self._flags(self._terminated, row, count)
        truncated = self._flags(self._truncated, row, count)
        infos = self._read_infos(row, count)
        extras = {
            name: self._read_samples(samples, row, count) for name, samples in self._extras.items()
        }
        t = self._timesteps(row, count)
        all_ids = zip(
            *(self._ids_at(name, row, starts) for name in (self._eps_id, self._agent_id)),
            self._ids_at(self._module_id, row, starts),
            strict=True,
        )
        episodes = []
        for number, (start, stop, (episode_id, agent_id, module_id)) in enumerate(
            zip(starts, stops, all_ids, strict=True)
        ):
            # A recording without any flag holds whole episodes.
            is_terminated = truncated is None if terminated is None else bool(terminated[stop - 1])
            episodes.append(
                Episode(
                    id=uuid.uuid4().hex if episode_id is None else episode_id,
                    agent_id=agent_id,
                    module_id=module_id or self._options.module_id_of(agent_id),
                    observations=trees.concat(
                        [trees.rows(obs, start, stop), trees.rows(final_obs, number, number + 1)]
                    ),
                    actions=trees.rows(actions, start, stop),
                    rewards=rewards[start:stop],
                    terminated=is_terminated,
                    # If another episode follows in the row and nothing ended this one: truncated.
                    truncated=(truncated is not None and bool(truncated[stop - 1]))
                    or not (stop == count or is_terminated),
                    t_started=int(t[start]),
                    step_times=step_times(t, start, stop) if self._options.multi_agent else None,
                    infos=None if infos is None else infos[start : stop + 1],
                    extra_model_outputs={
                        name: trees.rows(extra, start, stop) for name, extra in extras.items()
                    },
                )
            )
        return episodes

    def _flat(self, name: str, row: int) -> NDArray[Any]:
        """Return a row's values of a column with one value per step, or one for all steps."""
        held = self._columns[name][row]
        return held if type(held) is np.ndarray and held.ndim else np.atleast_1d(held)

    def _episode_starts(self, row: int, count: int) -> list[int]:
        changes: set[int] = set()
        for name in (self._eps_id, self._agent_id):
            held = () if name is None else self._flat(name, row)
            if len(held) > 1:
                self._check_steps(held, count, name)
                changes.update(np.flatnonzero(held[1:] != held[:-1]).tolist())
        return [0, *(step + 1 for step in sorted(changes))] if count else []

    def _ids_at(self, name: str | None, row: int, starts: list[int]) -> list[str] | list[None]:
        if name is None:
            return [None] * len(starts)
        held = self._flat(name, row)
        return read.id_texts(held[starts] if len(held) > 1 else held.repeat(len(starts)), name)

    def _check_steps(self, values: Any, count: int, name: str | None) -> None:
        if len(values) != count:
            raise OfflineDataError(
                f"has {len(values)} steps, column {self._rewards!r} has {count}", column=name
            )

    def _read_samples(
        self, how: _Samples, row: int, count: int, places: NDArray[np.int64] | None = None
    ) -> Tree:
        value = read.row_of(how.column, row)
        is_array = isinstance(value, np.ndarray) and value.ndim > 0
        try:
            if is_array and how.is_plain and value.dtype != object:
                self._check_steps(value, count, how.name)
                return value if places is None else value[places]
            if isinstance(value, dict | tuple):
                tree = as_arrays(np.asarray, value)
                self._check_steps(next(trees.leaves(tree))[1], count, how.name)
                return tree if places is None else trees.take(tree, places)
            limits = self._options.limits
            if how.is_packed:
                value = packing.unpack_if_packed(value, limits=limits)
            _check_array(value, how)
            self._check_steps(value, count, how.name)
            if places is not None:
                value = np.asarray(value)[places]
            if how.is_packed:
                value = packing.unpack_column(value, how.name, limits=limits)
            if how.spec is not None:
                value = read.convert_samples(value, how.spec)
            return read.stack_samples(value)
        except OfflineDataError as error:
            error.add_place(column=how.name)
            raise

    def _flags(self, name: str | None, row: int, count: int) -> NDArray[np.bool_] | None:
        if name is None:
            return None
        flags = read.bool_flags(self._flat(name, row), name)
        self._check_steps(flags, count, name)
        return flags

    def _read_infos(self, row: int, count: int) -> list[Info] | None:
        """Return T + 1 infos of T steps, given T + 1, or T without the first."""
        name = self._infos
        if name is None:
            return None
        infos = read.infos_of(read.row_of(self._columns[name], row), name)
        if len(infos) not in (count, count + 1):
            raise OfflineDataError(
                f"has {len(infos)} infos for {count} steps; wanted {count} or {count + 1}",
                column=name,
            )
        return infos if len(infos) == count + 1 else [{}, *infos]

    def _timesteps(self, row: int, count: int) -> NDArray[np.int64]:
        """Return int64[count], also for a row with only its first timestep."""
        if self._t is None:
            return np.arange(count)
        t = read.whole_numbers(self._flat(self._t, row), self._t)
        if not len(t):
            raise OfflineDataError("is empty", column=self._t)
        return t if len(t) == count else t[0] + np.arange(count)


def _check_array(value: Any, how: _Samples) -> None:
    is_array = isinstance(value, np.ndarray) and value.ndim
    if not is_array and (how.is_observation or not isinstance(value, list)):
        raise OfflineDataError(
            f"is a {type(value).__name__}; wanted an array with one value per step, or a packed one"
        )
