"""Assemble rows into episodes, on whole columns: Python runs once per episode, not per row.

O1 An episode holds rows of one key, in ascending `t` without repeats. O2 A part ends where rows do
not continue each other (gap, end flag, other observation), and keeps its true final observation. O3
Every row is in one episode, waiting, or reported.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding.rows import row_types
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import SchemaError
from breadbox_offline.report import FindingKind, FindingPolicy, ValidationReport
from breadbox_offline.rows.columns import Columns, RowTable, read_rows
from breadbox_offline.rows.options import MappingOptions, RowGrouping

Key = tuple[str | None, str | None]


def map_rows(columns: Columns, options: MappingOptions, report: ValidationReport) -> list[Episode]:
    """Return the episodes of one set of rows, including unfinished ones."""
    if options.grouping == RowGrouping.ONE_STEP:
        return one_step_episodes(read_rows(columns, options), options)
    assembler = RowAssembler(options, report)
    return [*assembler.add(columns), *assembler.finish()]


def one_step_episodes(table: RowTable, options: MappingOptions) -> list[Episode]:
    """Return every row as an episode of one step; without `multi_agent` agents are ignored."""
    pairs = trees.map_tree(
        lambda obs, new_obs: np.stack([obs, new_obs], axis=1), table.obs, table.new_obs
    )
    agent_ids = table.agent_ids if options.multi_agent else None
    episodes = []
    for row in range(len(table)):
        agent_id = None if agent_ids is None else agent_ids[row]
        episodes.append(
            _episode_of(
                table,
                row,
                row + 1,
                id=uuid.uuid4().hex if table.eps_ids is None else table.eps_ids[row],
                agent_id=agent_id,
                module_id=_module_id(table, row, agent_id, options) if agent_ids else None,
                observations=trees.row(pairs, row),
            )
        )
    return episodes


def _module_id(
    table: RowTable, row: int, agent_id: str | None, options: MappingOptions
) -> str | None:
    if table.module_ids is not None:
        return table.module_ids[row]
    return options.module_id_of(agent_id)


def _episode_of(table: RowTable, start: int, stop: int, **own: Any) -> Episode:
    return Episode(
        actions=trees.rows(table.actions, start, stop),
        rewards=table.rewards[start:stop],
        terminated=bool(table.terminated[stop - 1]),
        truncated=bool(table.truncated[stop - 1]),
        infos=None if table.infos is None else [{}, *table.infos[start:stop]],
        extra_model_outputs={
            name: trees.rows(extra, start, stop) for name, extra in table.extras.items()
        },
        **own,
    )


def step_times(t: NDArray[np.int64] | None, start: int, stop: int) -> NDArray[np.int64] | None:
    """Return the timesteps of some rows, or None if they are consecutive or unknown."""
    if t is None or t[stop - 1] - t[start] == stop - start - 1:
        return None
    return t[start:stop]


class RowAssembler:
    """Assemble batches of rows; at most `held_rows_max` unfinished rows wait. Not thread-safe."""

    def __init__(self, options: MappingOptions, report: ValidationReport) -> None:
        self._options = options
        self._report = report
        self._held: list[RowTable] = []
        self._held_count = 0
        """Number of rows that wait."""

    def add(self, columns: Columns, *, first_row: int = 0) -> list[Episode]:
        """Return the episodes that these rows complete; rows of other episodes wait."""
        table = read_rows(columns, self._options, first_row=first_row)
        if self._held:
            _check_same_columns(self._held[0], table)
        count = self._held_count + len(table)
        if count <= self._options.held_rows_max and not (table.terminated | table.truncated).any():
            # They complete no episode: all rows are joined, and looked through, once some do.
            self._hold(table.take(np.arange(len(table))))
            return []
        table = RowTable.joined([*self._take_held(), table])
        groups = _Groups.of(table)
        is_open = ~groups.any_done(table)
        waiting = np.flatnonzero(is_open[groups.codes])
        if len(waiting) > self._options.held_rows_max:
            oldest_first = groups.codes[waiting]
            excess = oldest_first[len(waiting) - self._options.held_rows_max - 1]
            is_open[: excess + 1] = False
            waiting = np.flatnonzero(is_open[groups.codes])
        if len(waiting):
            ready = np.flatnonzero(~is_open[groups.codes])
            self._hold(table.take(waiting))
            table = table.take(ready)
            groups = _Groups.of(table)
        return _assemble(table, groups, self._options, self._report) if len(table) else []

    def finish(self) -> list[Episode]:
        """Return the episodes of the rows that waited, unfinished as they are."""
        if not self._held:
            return []
        table = RowTable.joined(self._take_held())
        return _assemble(table, _Groups.of(table), self._options, self._report)

    def _hold(self, table: RowTable) -> None:
        if len(table):
            self._held.append(table)
            self._held_count += len(table)

    def _take_held(self) -> list[RowTable]:
        held, self._held, self._held_count = self._held, [], 0
        return held


def _check_same_columns(held: RowTable, table: RowTable) -> None:
    if held.extras.keys() != table.extras.keys():
        raise SchemaError(
            f"these rows have the extra columns {sorted(table.extras)}, those of an unfinished "
            f"episode before them {sorted(held.extras)}"
        )
    for name, before, now in (
        ("obs", held.obs, table.obs),
        ("actions", held.actions, table.actions),
        *((name, held.extras[name], extra) for name, extra in table.extras.items()),
    ):
        if row_types(before) != row_types(now):
            raise SchemaError("has another shape than in the rows before", column=name)


@dataclass(frozen=True, slots=True)
class _Groups:
    codes: NDArray[np.int64]
    """int64[N]; group of each row."""
    keys: list[Key]

    @classmethod
    def of(cls, table: RowTable) -> "_Groups":
        count = len(table)
        if table.eps_ids is None:
            return cls._without_ids(table)
        agents: list[Any] = table.agent_ids or [None] * count
        numbers: dict[Key, int] = {}
        codes = np.fromiter(
            (
                numbers.setdefault(key, len(numbers))
                for key in zip(table.eps_ids, agents, strict=True)
            ),
            dtype=np.int64,
            count=count,
        )
        return cls(codes, list(numbers))

    @classmethod
    def _without_ids(cls, table: RowTable) -> "_Groups":
        """Group rows in their order; an end flag, or a gap in `t`, starts a new group."""
        starts = np.zeros(len(table), dtype=np.bool_)
        starts[1:] = (table.terminated | table.truncated)[:-1]
        if table.t is not None:
            starts[1:] |= np.diff(table.t) != 1
        codes = np.cumsum(starts, dtype=np.int64)
        return cls(codes, [(None, None)] * (int(codes[-1]) + 1 if len(codes) else 0))

    def any_done(self, table: RowTable) -> NDArray[np.bool_]:
        done = np.zeros(len(self.keys), dtype=np.bool_)
        done[self.codes[table.terminated | table.truncated]] = True
        return done


@dataclass(slots=True)
class _Parts:
    table: RowTable
    groups: _Groups
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    skipped: set[int]


def _assemble(
    table: RowTable, groups: _Groups, options: MappingOptions, report: ValidationReport
) -> list[Episode]:
    parts = _find_parts(table, groups, options, report)
    table, observations = parts.table, _all_observations(parts)
    group_starts = np.searchsorted(parts.groups.codes, np.arange(len(groups.keys)))
    episodes = []
    for number, (start, stop) in enumerate(
        zip(parts.starts.tolist(), parts.stops.tolist(), strict=True)
    ):
        code = int(parts.groups.codes[start])
        if code in parts.skipped:
            continue
        episode_id, agent_id = parts.groups.keys[code]
        t = table.t
        episode = _episode_of(
            table,
            start,
            stop,
            id=episode_id or "",
            agent_id=agent_id,
            module_id=_module_id(table, start, agent_id, options),
            observations=trees.rows(observations, start + number, stop + number + 1),
            t_started=start - int(group_starts[code]) if t is None else int(t[start]),
            step_times=step_times(t, start, stop) if options.multi_agent else None,
        )
        if episode_id is None:
            # A digest as id, so that reading the same rows again is noticed.
            episode.id = episode.content_digest().hex()
        episodes.append(episode)
    return episodes


def _find_parts(
    table: RowTable, groups: _Groups, options: MappingOptions, report: ValidationReport
) -> _Parts:
    order = _ordered_rows(table, groups, report)
    if not np.array_equal(order, np.arange(len(table))):
        table, groups = table.take(order), _Groups(groups.codes[order], groups.keys)
    codes = groups.codes
    follows = np.diff(codes) == 0
    ended = (table.terminated | table.truncated)[:-1]
    breaks = ~follows | ended
    truncated = table.truncated.copy()
    skipped: set[int] = set()
    for kind, found, why in _discontinuities(table, follows & ~ended, options):
        for before in np.flatnonzero(found).tolist():
            policy = _note(report, kind, why, table, groups, before + 1)
            if policy is FindingPolicy.SKIP:
                skipped.add(int(codes[before]))
            elif policy is FindingPolicy.TRUNCATE:
                breaks[before] = truncated[before] = True
    edges = np.flatnonzero(breaks) + 1
    return _Parts(
        table=replace(table, truncated=truncated),
        groups=groups,
        starts=np.concatenate([np.zeros(1, dtype=np.int64), edges]),
        stops=np.concatenate([edges, np.full(1, len(table))]),
        skipped=skipped,
    )


def _ordered_rows(table: RowTable, groups: _Groups, report: ValidationReport) -> NDArray[np.int64]:
    """Return rows by group, then by `t`; the first of rows with the same `t`."""
    if table.t is None:
        return np.argsort(groups.codes, kind="stable")
    order = np.lexsort((table.t, groups.codes))
    repeats = (np.diff(groups.codes[order]) == 0) & (np.diff(table.t[order]) == 0)
    for row in order[1:][repeats].tolist():
        why = "a row of this timestep came before"
        _note(report, FindingKind.REPEATED_STEP, why, table, groups, row)
    return np.concatenate([order[:1], order[1:][~repeats]])


def _discontinuities(
    table: RowTable, inner: NDArray[np.bool_], options: MappingOptions
) -> Iterator[tuple[FindingKind, NDArray[np.bool_], str]]:
    """Yield where consecutive rows of one open episode do not continue each other, and why."""
    gaps = np.zeros_like(inner)
    if table.t is not None and not options.multi_agent:
        gaps = inner & (np.diff(table.t) != 1)
        yield FindingKind.GAP, gaps, "timesteps before it are missing"
    if options.ignore_final_observation or not inner.any():
        return
    reached = trees.rows_equal(trees.rows(table.new_obs, None, -1), trees.rows(table.obs, 1, None))
    seams = inner & ~gaps & ~reached
    yield FindingKind.SEAM, seams, "the step before led to another observation"


def _note(
    report: ValidationReport,
    kind: FindingKind,
    why: str,
    table: RowTable,
    groups: _Groups,
    position: int,
) -> FindingPolicy:
    episode_id, agent_id = groups.keys[int(groups.codes[position])]
    t = None if table.t is None else int(table.t[position])
    row = int(table.numbers[position])
    return report.note(kind, why, episode_id=episode_id, agent_id=agent_id, t=t, row=row)


def _all_observations(parts: _Parts) -> Tree:
    """Return the observations of every row, and after each part the last one, in one buffer."""
    table, part_count = parts.table, len(parts.starts)
    numbers = np.repeat(np.arange(part_count), parts.stops - parts.starts)
    places = np.arange(len(table)) + numbers
    final_places = parts.stops + np.arange(part_count)

    def fill(obs: NDArray[Any], new_obs: NDArray[Any]) -> NDArray[Any]:
        dtype = np.result_type(obs, new_obs)
        buffer = np.empty((len(obs) + part_count, *obs.shape[1:]), dtype=dtype)
        buffer[places] = obs
        buffer[final_places] = new_obs[parts.stops - 1]
        return buffer

    return trees.map_tree(fill, table.obs, table.new_obs)
