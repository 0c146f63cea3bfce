"""Turn recorded columns into arrays, one row per step: unpack, stack, check flags strictly."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding import packing
from breadbox_offline.decoding.rows import length, row_types, stack
from breadbox_offline.decoding.spaces import SpaceSpec, composite_spec, from_jsonable
from breadbox_offline.episodes.episode import Info
from breadbox_offline.errors import (
    MissingColumnError,
    OfflineDataError,
    SchemaError,
    SpaceMismatchError,
    placed,
)
from breadbox_offline.rows.options import DONE, Column, MappingOptions, OfflineSchema

Columns = Mapping[str, Any]
"""Columns of equal length: arrays, lists, or nested dicts and tuples of arrays."""


def row_of(column: Any, row: int) -> Any:
    """Return one row of a column; of a nested one, a tree."""
    return trees.row(column, row) if isinstance(column, dict | tuple) else column[row]


def rows_of(column: Any) -> list[Any]:
    """Return all rows of a column as a list."""
    if isinstance(column, dict | tuple):
        return [trees.row(column, row) for row in range(length(column))]
    return list(column)


def infos_of(held: Any, name: str) -> list[Mapping[str, Any]]:
    """Return one map per entry of a list of infos, empty for None."""
    if not isinstance(held, list | tuple | np.ndarray):
        raise OfflineDataError(f"holds a {type(held).__name__}, wanted a list of maps", column=name)
    for info in held:
        if info is not None and not isinstance(info, Mapping):
            raise OfflineDataError(f"holds a {type(info).__name__}, wanted a map", column=name)
    return [{} if info is None else info for info in held]


def check_flat(columns: Columns, names: Iterable[str | None]) -> None:
    """Raise SchemaError if one of these columns is nested; they have one value per row."""
    for name in names:
        if name is not None and isinstance(columns[name], dict | tuple):
            raise SchemaError("is nested; wanted one value per row", column=name)


def row_count(columns: Columns) -> int:
    """Return the number of rows of a set of columns."""
    if not columns:
        raise SchemaError("there are no columns")
    first, wanted = None, -1
    for name, values in columns.items():
        held = length(values) if isinstance(values, dict | tuple) else len(values)
        if first is None:
            first, wanted = name, held
        elif held != wanted:
            raise SchemaError(
                f"has {held} rows, column {first!r} has {wanted}",
                row=min(held, wanted),
                column=name,
            )
    return wanted


def is_packed(values: Any, canonical: str, physical: str, options: MappingOptions) -> bool:
    """Return True if text and bytes in this column are packed arrays."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUS":
        return False
    listed = options.packed_columns
    if listed is not None:
        names = {canonical, physical} | ({Column.OBS} if canonical == Column.NEW_OBS else set())
        if canonical == Column.OBS:
            names.add(Column.NEW_OBS)
        return not names.isdisjoint(listed)
    first_text = next((value for value in values if isinstance(value, str | bytes)), None)
    return packing.looks_packed(first_text)


def space_spec(canonical: str, options: MappingOptions) -> SpaceSpec | None:
    """Return the nested space of a column, or None if its samples need no conversion."""
    space = {
        Column.OBS: options.observation_space,
        Column.NEW_OBS: options.observation_space,
        Column.ACTIONS: options.action_space,
    }.get(canonical)
    return composite_spec(space)


def samples_tree(values: Any, canonical: str, physical: str, options: MappingOptions) -> Tree:
    """Return one column of samples as a tree of arrays, [rows, ...]."""
    if isinstance(values, dict | tuple):
        return _stacked(values, physical)
    if is_packed(values, canonical, physical, options):
        values = packing.unpack_column(values, physical, limits=options.limits)
    spec = space_spec(canonical, options)
    with placed(column=physical):
        if spec is not None:
            values = convert_samples(values, spec)
        return stack_samples(values)


def _stacked(tree: Tree, path: str) -> Tree:
    if isinstance(tree, dict):
        return {key: _stacked(each, trees.child_path(path, key)) for key, each in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_stacked(each, trees.child_path(path, at)) for at, each in enumerate(tree))
    with placed(column=path):
        return None if tree is None else stack_samples(tree)


def convert_samples(values: Sequence[Any], spec: SpaceSpec) -> list[Tree]:
    """Convert samples from either of the two stored forms."""
    converted = []
    for row, value in enumerate(values):
        try:
            converted.append(from_jsonable(value, spec))
        except OfflineDataError as error:
            error.row = row
            raise
    return converted


def stack_samples(values: Any) -> Tree:
    """Return a list or object array of samples as a tree of arrays, a plain array as it is."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    if not len(values):
        return np.zeros(0)
    return stack(values)


def bool_flags(values: Any, physical: str) -> NDArray[np.bool_]:
    """Return end flags, given booleans or the numbers 0 and 1."""
    array = np.asarray(values)
    if array.dtype == np.bool_:
        return array
    array = _numbers(array, physical, "end flag")
    _check_one_per_row(array, "iuf", "end flags", "boolean", physical)
    wrong = np.flatnonzero((array != 0) & (array != 1))
    if wrong.size:
        why = "is no end flag; wanted true, false, 0 or 1"
        raise OfflineDataError(why, row=int(wrong[0]), column=physical)
    return array.astype(np.bool_)


def _numbers(array: NDArray[Any], physical: str, what: str) -> NDArray[Any]:
    if array.dtype != object:
        return array
    for row, value in enumerate(array):
        if not isinstance(value, int | float | np.number | np.bool_):
            raise OfflineDataError(
                f"a {type(value).__name__} is no {what}", row=row, column=physical
            )
    return array.astype(np.float64)


def whole_numbers(values: Any, physical: str) -> NDArray[np.int64]:
    """Return timesteps, as int64[rows]."""
    array = np.asarray(values)
    if array.dtype == object or array.dtype.kind == "f":
        array = float_numbers(array, physical)
        wrong = np.flatnonzero(~np.isfinite(array) | (array != np.round(array)))
        if wrong.size:
            raise OfflineDataError(
                "is no timestep; wanted a whole number", row=int(wrong[0]), column=physical
            )
    _check_one_per_row(array, "iuf", "timesteps", "whole number", physical)
    return array.astype(np.int64)


def float_numbers(values: Any, physical: str) -> NDArray[Any]:
    """Return one number per row, in the recorded dtype."""
    array = _numbers(np.asarray(values), physical, "number")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    _check_one_per_row(array, "biuf", "values", "number", physical)
    return array


def _check_one_per_row(
    array: NDArray[Any], kinds: str, what: str, wanted: str, physical: str
) -> None:
    if array.ndim != 1 or array.dtype.kind not in kinds:
        held = f"{array.dtype}{list(array.shape)}"
        raise OfflineDataError(f"{what} are {held}; wanted one {wanted} per row", column=physical)


def id_texts(values: Any, physical: str) -> list[str]:
    """Return ids as text, numbers included."""
    plain = values.tolist() if isinstance(values, np.ndarray) else list(values)
    for row, value in enumerate(plain):
        if value is None or isinstance(value, float):
            raise OfflineDataError(f"a {type(value).__name__} is no id", row=row, column=physical)
    return [value if type(value) is str else str(value) for value in plain]


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
    """Position of each row in the input, for reports."""

    def __len__(self) -> int:
        return len(self.rewards)

    def take(self, rows: NDArray[np.int64]) -> "RowTable":
        """Return chosen rows, as copies."""
        picked = rows.tolist()

        def pick(held: Any) -> Any:
            if isinstance(held, list):
                return [held[row] for row in picked]
            return trees.take(held, rows)

        return RowTable(**{each.name: pick(getattr(self, each.name)) for each in fields(self)})

    @classmethod
    def joined(cls, tables: Sequence["RowTable"]) -> "RowTable":
        """Return the rows of all, in order; all must have the same columns."""

        def chain(columns: list[Any]) -> Any:
            if any([column is None for column in columns]):
                return None
            if isinstance(columns[0], list):
                return [*itertools.chain.from_iterable(columns)]
            return trees.concat(columns)

        return cls(
            **{each.name: chain([getattr(it, each.name) for it in tables]) for each in fields(cls)}
        )


def read_rows(columns: Columns, options: MappingOptions, *, first_row: int = 0) -> RowTable:
    """Return the rows of some columns, as arrays."""
    schema = options.schema
    count = row_count(columns)
    if options.multi_agent:
        schema.require(Column.AGENT_ID, columns, "the data is said to hold several agents")
    names = {
        name: schema.require(name, columns) for name in (Column.OBS, Column.ACTIONS, Column.REWARDS)
    }
    flat = (
        *(Column.REWARDS, Column.TERMINATEDS, Column.TRUNCATEDS, Column.DONES),
        *(Column.EPS_ID, Column.AGENT_ID, Column.MODULE_ID, Column.T),
    )
    found = [schema.find(name, columns) for name in flat]
    check_flat(columns, [*found, *find_flag_columns(columns, schema)])
    terminated, truncated, used = _read_flags(columns, schema, count)
    obs = samples_tree(columns[names[Column.OBS]], Column.OBS, names[Column.OBS], options)
    infos = schema.find(Column.INFOS, columns)
    t = schema.find(Column.T, columns)
    return RowTable(
        obs=obs,
        new_obs=_read_new_obs(columns, obs, options),
        actions=samples_tree(
            columns[names[Column.ACTIONS]], Column.ACTIONS, names[Column.ACTIONS], options
        ),
        rewards=float_numbers(columns[names[Column.REWARDS]], names[Column.REWARDS]),
        terminated=terminated,
        truncated=truncated,
        eps_ids=_read_ids(columns, Column.EPS_ID, schema),
        agent_ids=_read_ids(columns, Column.AGENT_ID, schema),
        module_ids=_read_ids(columns, Column.MODULE_ID, schema),
        t=None if t is None else whole_numbers(columns[t], t),
        infos=None if infos is None else infos_of(rows_of(columns[infos]), infos),
        extras={
            name: samples_tree(columns[name], name, name, options)
            for name in schema.extra_columns(columns, used)
        },
        numbers=np.arange(first_row, first_row + count),
    )


def find_flag_columns(columns: Columns, schema: OfflineSchema) -> tuple[str | None, str | None]:
    """Find the terminated and truncated columns: `terminateds` first, else `dones` or `done`."""
    terminated = schema.find(Column.TERMINATEDS, columns)
    if terminated is None:
        candidates = (Column.DONES, schema.physical(Column.DONES), DONE)
        mapped = {
            physical
            for name, physical in schema.columns.items()
            if name not in (Column.DONES, DONE)
        }
        terminated = next(
            (name for name in candidates if name in columns and name not in mapped), None
        )
    return terminated, schema.find(Column.TRUNCATEDS, columns)


def _read_flags(
    columns: Columns, schema: OfflineSchema, count: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], list[str]]:
    terminated, truncated = find_flag_columns(columns, schema)
    if terminated is None and truncated is None:
        raise MissingColumnError(
            schema.physical(Column.TERMINATEDS),
            list(columns),
            needed_for="or truncateds, dones or done: something must say where episodes end",
        )
    none = np.zeros(count, dtype=np.bool_)
    return (
        none if terminated is None else bool_flags(columns[terminated], terminated),
        none if truncated is None else bool_flags(columns[truncated], truncated),
        [name for name in (terminated, truncated) if name is not None],
    )


def _read_new_obs(columns: Columns, obs: Tree, options: MappingOptions) -> Tree:
    if options.ignore_final_observation:
        return trees.map_tree(np.zeros_like, obs)
    name = options.schema.require(
        Column.NEW_OBS, columns, "the observation that a step led to; or ignore_final_observation"
    )
    new_obs = samples_tree(columns[name], Column.NEW_OBS, name, options)
    if row_types(obs) != row_types(new_obs):
        raise SpaceMismatchError("has observations of another shape than obs", column=name)
    return new_obs


def _read_ids(columns: Columns, canonical: str, schema: OfflineSchema) -> list[str] | None:
    name = schema.find(canonical, columns)
    return None if name is None else id_texts(columns[name], name)
