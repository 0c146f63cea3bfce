"""`RowTable`: column data that has been read, decoded and checked, still one row per step."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding.rows import row_types
from breadbox_offline.episodes.episode import Info
from breadbox_offline.errors import MissingColumnError, SpaceMismatchError
from breadbox_offline.rows import columns as read
from breadbox_offline.rows.columns import Columns
from breadbox_offline.rows.options import (
    ACTIONS,
    AGENT_ID,
    DONE,
    DONES,
    EPS_ID,
    INFOS,
    MODULE_ID,
    NEW_OBS,
    OBS,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    MappingOptions,
    OfflineSchema,
    T,
)


@dataclass(slots=True, kw_only=True)
class RowTable:
    """N steps; trees have leaves [N, ...]."""

    obs: Tree
    new_obs: Tree
    actions: Tree
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    eps_ids: list[str] | None
    agent_ids: list[str] | None
    module_ids: list[str] | None
    t: NDArray[np.int64] | None
    infos: list[Info] | None
    extras: dict[str, Tree]
    numbers: NDArray[np.int64]
    """Where each row stood in what was read, for reports."""

    def __len__(self) -> int:
        return len(self.rewards)

    def take(self, rows: NDArray[np.int64]) -> "RowTable":
        """Chosen rows, copied."""
        picked = rows.tolist()

        def pick(values: list[Any] | None) -> list[Any] | None:
            return None if values is None else [values[row] for row in picked]

        return RowTable(
            obs=trees.take(self.obs, rows),
            new_obs=trees.take(self.new_obs, rows),
            actions=trees.take(self.actions, rows),
            rewards=self.rewards[rows],
            terminated=self.terminated[rows],
            truncated=self.truncated[rows],
            eps_ids=pick(self.eps_ids),
            agent_ids=pick(self.agent_ids),
            module_ids=pick(self.module_ids),
            t=None if self.t is None else self.t[rows],
            infos=pick(self.infos),
            extras={name: trees.take(extra, rows) for name, extra in self.extras.items()},
            numbers=self.numbers[rows],
        )

    def append(self, later: "RowTable") -> "RowTable":
        """The rows of both, these first; the columns of both must be the same."""

        def chain(front: list[Any] | None, back: list[Any] | None) -> list[Any] | None:
            return None if front is None or back is None else front + back

        return RowTable(
            obs=trees.concat([self.obs, later.obs]),
            new_obs=trees.concat([self.new_obs, later.new_obs]),
            actions=trees.concat([self.actions, later.actions]),
            rewards=np.concatenate([self.rewards, later.rewards]),
            terminated=np.concatenate([self.terminated, later.terminated]),
            truncated=np.concatenate([self.truncated, later.truncated]),
            eps_ids=chain(self.eps_ids, later.eps_ids),
            agent_ids=chain(self.agent_ids, later.agent_ids),
            module_ids=chain(self.module_ids, later.module_ids),
            t=None if self.t is None or later.t is None else np.concatenate([self.t, later.t]),
            infos=chain(self.infos, later.infos),
            extras={
                name: trees.concat([extra, later.extras[name]])
                for name, extra in self.extras.items()
            },
            numbers=np.concatenate([self.numbers, later.numbers]),
        )


def read_rows(columns: Columns, options: MappingOptions, *, first_row: int = 0) -> RowTable:
    """Read column data; nothing is kept when this raises."""
    schema = options.schema
    count = read.row_count(columns)
    names = {name: schema.require(name, columns) for name in (OBS, ACTIONS, REWARDS)}
    flat = (REWARDS, TERMINATEDS, TRUNCATEDS, DONES, EPS_ID, AGENT_ID, MODULE_ID, T)
    read.demand_flat(
        columns,
        [*(schema.find(name, columns) for name in flat), *find_flag_columns(columns, schema)],
    )
    terminated, truncated, used = _read_flags(columns, schema, count)
    obs = read.samples_tree(columns[names[OBS]], OBS, names[OBS], options)
    infos = schema.find(INFOS, columns)
    t = schema.find(T, columns)
    return RowTable(
        obs=obs,
        new_obs=_read_new_obs(columns, obs, options),
        actions=read.samples_tree(columns[names[ACTIONS]], ACTIONS, names[ACTIONS], options),
        rewards=read.float_numbers(columns[names[REWARDS]], names[REWARDS]),
        terminated=terminated,
        truncated=truncated,
        eps_ids=_read_ids(columns, EPS_ID, schema),
        agent_ids=_read_agent_ids(columns, options),
        module_ids=_read_ids(columns, MODULE_ID, schema),
        t=None if t is None else read.whole_numbers(columns[t], t),
        infos=None if infos is None else read.infos_of(read.rows_of(columns[infos]), infos),
        extras={
            name: read.samples_tree(columns[name], name, name, options)
            for name in schema.extra_columns(columns, used)
        },
        numbers=np.arange(first_row, first_row + count),
    )


def find_flag_columns(columns: Columns, schema: OfflineSchema) -> tuple[str | None, str | None]:
    """The columns that say terminated and truncated, under whichever name recorders used.

    `terminateds` goes first. Without it the old stack's `dones` (under its own name or the
    schema's), or `done`, says terminated.
    """
    terminated = schema.find(TERMINATEDS, columns)
    if terminated is None:
        candidates = (DONES, schema.physical(DONES), DONE)
        mapped = {
            physical for name, physical in schema.columns.items() if name not in (DONES, DONE)
        }
        terminated = next(
            (name for name in candidates if name in columns and name not in mapped), None
        )
    return terminated, schema.find(TRUNCATEDS, columns)


def _read_flags(
    columns: Columns, schema: OfflineSchema, count: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], list[str]]:
    terminated, truncated = find_flag_columns(columns, schema)
    if terminated is None and truncated is None:
        raise MissingColumnError(
            schema.physical(TERMINATEDS),
            list(columns),
            needed_for="or truncateds, dones or done: something must say where episodes end",
        )
    none = np.zeros(count, dtype=np.bool_)
    return (
        none if terminated is None else read.bool_flags(columns[terminated], terminated),
        none if truncated is None else read.bool_flags(columns[truncated], truncated),
        [name for name in (terminated, truncated) if name is not None],
    )


def _read_new_obs(columns: Columns, obs: Tree, options: MappingOptions) -> Tree:
    if options.ignore_final_observation:
        return trees.map_tree(np.zeros_like, obs)
    name = options.schema.require(
        NEW_OBS, columns, "the observation that a step led to; or ignore_final_observation"
    )
    new_obs = read.samples_tree(columns[name], NEW_OBS, name, options)
    if row_types(obs) != row_types(new_obs):
        raise SpaceMismatchError("has observations of another shape than obs", column=name)
    return new_obs


def _read_ids(columns: Columns, canonical: str, schema: OfflineSchema) -> list[str] | None:
    name = schema.find(canonical, columns)
    return None if name is None else read.id_texts(columns[name], name)


def _read_agent_ids(columns: Columns, options: MappingOptions) -> list[str] | None:
    if options.multi_agent:
        options.schema.require(AGENT_ID, columns, "the data is said to hold several agents")
    return _read_ids(columns, AGENT_ID, options.schema)
