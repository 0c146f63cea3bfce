"""Old-stack SampleBatch rows: every column of a row holds the steps of a whole episode.

A row is usually one episode; where its `eps_id` changes it is split. Observations may be dense,
lists, or packed whole or one by one; end flags may have any of the names that recorders used.
"""

import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding import packing
from breadbox_offline.decoding.rows import as_arrays
from breadbox_offline.episodes.episode import Episode, Info
from breadbox_offline.errors import OfflineDataError
from breadbox_offline.report import FindingKind, ValidationReport
from breadbox_offline.rows import columns as read
from breadbox_offline.rows.assembly import step_times
from breadbox_offline.rows.columns import Columns
from breadbox_offline.rows.options import ACTIONS, NEW_OBS, OBS, MappingOptions
from breadbox_offline.rows.plain_rows import blocks, fill_infos, read_plain_rows
from breadbox_offline.rows.row_layout import RowLayout


def map_sample_batches(
    columns: Columns, options: MappingOptions, report: ValidationReport
) -> list[Episode]:
    """Episodes of SampleBatch rows, in row order; a malformed row is reported, others are used."""
    layout = RowLayout.of(columns, options)
    reader = _RowReader(layout)
    episodes: list[Episode] = []
    for low, high in blocks(columns, layout, read.row_count(columns)):
        plain = read_plain_rows(columns, layout, low, high)
        if plain is not None:
            episodes.extend(plain)
            continue
        for row in range(low, high):
            try:
                episodes.extend(reader.read_row(columns, row))
            except OfflineDataError as error:
                report.note(FindingKind.MALFORMED, error.problem, row=row, column=error.column)
    return episodes


@dataclass(frozen=True, slots=True)
class _RowReader:
    """Reads a row whatever its recorder put into it."""

    layout: RowLayout

    def read_row(self, columns: Columns, row: int) -> list[Episode]:
        """The episodes of one row."""
        rewards = read.float_numbers(columns[self.layout.rewards][row], self.layout.rewards)
        starts = self._episode_starts(columns, row, len(rewards))
        stops = [*starts[1:], len(rewards)]
        steps = self._read_steps(columns, row, rewards, stops)
        ids = self._ids_at(columns, self.layout.eps_id, row, starts)
        agent_ids = self._ids_at(columns, self.layout.agent_id, row, starts)
        module_ids = self._ids_at(columns, self.layout.module_id, row, starts)
        return [
            self._episode(steps, number, start, stop, (episode_id, agent_id, module_id))
            for number, (start, stop, episode_id, agent_id, module_id) in enumerate(
                zip(starts, stops, ids, agent_ids, module_ids, strict=True)
            )
        ]

    def _episode_starts(self, columns: Columns, row: int, count: int) -> list[int]:
        """Steps at which another episode, or another agent's, starts."""
        changes = np.zeros(count, dtype=np.bool_)
        changes[:1] = True
        for name in (self.layout.eps_id, self.layout.agent_id):
            held = None if name is None else np.atleast_1d(np.asarray(columns[name][row]))
            if held is not None and len(held) > 1:
                self._demand_steps(held, count, name)
                changes[1:] |= held[1:] != held[:-1]
        return np.flatnonzero(changes).tolist()

    def _ids_at(
        self, columns: Columns, name: str | None, row: int, starts: list[int]
    ) -> list[str] | list[None]:
        if name is None:
            return [None] * len(starts)
        held = np.atleast_1d(np.asarray(columns[name][row]))
        return read.id_texts(held[starts] if len(held) > 1 else held.repeat(len(starts)), name)

    def _read_steps(
        self, columns: Columns, row: int, rewards: NDArray[Any], stops: list[int]
    ) -> "_Steps":
        count = len(rewards)
        obs = self._samples(columns, self.layout.obs, OBS, row, count)
        # Of the observations that steps led to, only an episode's last is not in `obs` as well.
        last_places = [stop - 1 for stop in stops]
        if self.layout.new_obs is None:
            final_obs = trees.take(obs, np.array(last_places, dtype=np.int64))
        else:
            final_obs = self._samples(
                columns, self.layout.new_obs, NEW_OBS, row, count, last_places
            )
        return _Steps(
            obs=obs,
            final_obs=final_obs,
            actions=self._samples(columns, self.layout.actions, ACTIONS, row, count),
            rewards=rewards,
            terminated=self._flags(columns, self.layout.terminated, row, count),
            truncated=self._flags(columns, self.layout.truncated, row, count),
            infos=self._infos(columns, row, count),
            extras={
                name: self._samples(columns, name, name, row, count) for name in self.layout.extras
            },
            t=self._timesteps(columns, row, count),
        )

    def _demand_steps(self, values: Any, count: int, name: str | None) -> None:
        if len(values) != count:
            raise OfflineDataError(
                f"has {len(values)} steps, column {self.layout.rewards!r} has {count}", column=name
            )

    def _samples(
        self,
        columns: Columns,
        physical: str,
        canonical: str,
        row: int,
        count: int,
        places: list[int] | None = None,
    ) -> Tree:
        """The samples of one row, or those at some places, as a tree of arrays."""
        value = read.row_of(columns[physical], row)
        try:
            if isinstance(value, dict | tuple):
                tree = as_arrays(np.asarray, value)
                self._demand_steps(next(trees.leaves(tree))[1], count, physical)
                return tree if places is None else trees.take(tree, np.array(places))
            limits = self.layout.options.limits
            if self.layout.packed[physical]:
                value = packing.unpack_if_packed(value, limits=limits)
            _demand_array(value, is_observation=canonical in (OBS, NEW_OBS))
            self._demand_steps(value, count, physical)
            if places is not None:
                value = np.asarray(value)[places]
            if self.layout.packed[physical]:
                value = packing.unpack_column(value, physical, limits=limits)
            spec = read.space_spec(canonical, self.layout.options)
            if spec is not None:
                value = read.convert_samples(value, spec)
            return read.stack_samples(value)
        except OfflineDataError as error:
            error.add_place(column=physical)
            raise

    def _flags(
        self, columns: Columns, name: str | None, row: int, count: int
    ) -> NDArray[np.bool_] | None:
        if name is None:
            return None
        flags = read.bool_flags(np.atleast_1d(np.asarray(columns[name][row])), name)
        self._demand_steps(flags, count, name)
        return flags

    def _infos(self, columns: Columns, row: int, count: int) -> list[Info] | None:
        if self.layout.infos is None:
            return None
        infos = read.row_of(columns[self.layout.infos], row)
        return fill_infos(infos, count, self.layout.infos)

    def _timesteps(self, columns: Columns, row: int, count: int) -> NDArray[np.int64]:
        """int64[count]; where a row says only when it starts, the ones that follow."""
        name = self.layout.t
        if name is None:
            return np.arange(count)
        t = read.whole_numbers(np.atleast_1d(np.asarray(columns[name][row])), name)
        if not len(t):
            raise OfflineDataError("is empty", column=name)
        return t if len(t) == count else t[0] + np.arange(count)

    def _episode(
        self,
        steps: "_Steps",
        number: int,
        start: int,
        stop: int,
        ids: tuple[str | None, str | None, str | None],
    ) -> Episode:
        episode_id, agent_id, module_id = ids
        is_last = stop == len(steps)
        terminated, truncated = steps.flags_at(stop - 1)
        observations = [
            trees.rows(steps.obs, start, stop),
            trees.rows(steps.final_obs, number, number + 1),
        ]
        return Episode(
            id=uuid.uuid4().hex if episode_id is None else episode_id,
            agent_id=agent_id,
            module_id=module_id or self.layout.options.module_id_of(agent_id),
            observations=trees.concat(observations),
            actions=trees.rows(steps.actions, start, stop),
            rewards=steps.rewards[start:stop],
            terminated=terminated,
            # A row goes on with another episode: if nothing ended this one, it was cut off here.
            truncated=truncated or not (is_last or terminated),
            t_started=int(steps.t[start]),
            step_times=step_times(steps.t, start, stop)
            if self.layout.options.multi_agent
            else None,
            infos=None if steps.infos is None else steps.infos[start : stop + 1],
            extra_model_outputs={
                name: trees.rows(extra, start, stop) for name, extra in steps.extras.items()
            },
        )


@dataclass(slots=True)
class _Steps:
    """One row, decoded."""

    obs: Tree
    final_obs: Tree
    """What each episode led to, leaves [episodes, ...]; where it was not recorded, the last
    observation stands in for it."""
    actions: Tree
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_] | None
    truncated: NDArray[np.bool_] | None
    infos: list[Info] | None
    extras: dict[str, Tree]
    t: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rewards)

    def flags_at(self, step: int) -> tuple[bool, bool]:
        """Terminated, truncated; a recording without any flag holds whole episodes."""
        if self.terminated is None and self.truncated is None:
            return True, False
        return (
            self.terminated is not None and bool(self.terminated[step]),
            self.truncated is not None and bool(self.truncated[step]),
        )


def _demand_array(value: Any, *, is_observation: bool) -> None:
    if isinstance(value, np.ndarray) and value.ndim:
        return
    if isinstance(value, list) and not is_observation:
        return
    raise OfflineDataError(
        f"is a {type(value).__name__}; wanted an array with one value per step, or a packed one"
    )
