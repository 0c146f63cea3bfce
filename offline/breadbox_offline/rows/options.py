"""Choose which column holds what, and how rows of recorded data become episodes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from breadbox_offline.errors import MissingColumnError, SchemaError
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits


class Column:
    """Canonical names of columns; the data has them too unless the schema maps them."""

    EPS_ID = "eps_id"
    AGENT_ID = "agent_id"
    MODULE_ID = "module_id"
    OBS = "obs"
    ACTIONS = "actions"
    REWARDS = "rewards"
    INFOS = "infos"
    NEW_OBS = "new_obs"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    T = "t"
    AGENT_INDEX = "agent_index"
    DONES = "dones"


DONE = "done"
CANONICAL_COLUMNS = (*(name for key, name in vars(Column).items() if key.isupper()), "unroll_id")
_NEVER_EXTRA = frozenset({Column.DONES, Column.AGENT_INDEX, "type"})
"""Columns that recorders write for themselves, which are no model outputs."""


@dataclass(frozen=True)
class OfflineSchema:
    """Physical column names by canonical ones; SchemaError for unknown or doubly mapped names."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Overrides `{canonical: physical}`; other columns have their canonical names."""
    unmapped: Literal["keep", "drop", "error"] = "keep"
    """Other columns: "keep" as extra model outputs, "drop", or "error" to refuse them."""

    def __post_init__(self) -> None:
        unknown = sorted(self.columns.keys() - set(CANONICAL_COLUMNS))
        if unknown:
            raise SchemaError(
                f"unknown canonical columns {', '.join(unknown)}; known are "
                f"{', '.join(CANONICAL_COLUMNS)}"
            )
        canonical_of: dict[str, str] = {}
        for canonical, physical in self.columns.items():
            other = canonical_of.setdefault(physical, canonical)
            if other != canonical:
                raise SchemaError(f"column {physical!r} is mapped twice: {other}, {canonical}")

    def physical(self, canonical: str) -> str:
        """Return the physical name of a canonical column."""
        return self.columns.get(canonical, canonical)

    def find(self, canonical: str, held: Mapping[str, object]) -> str | None:
        """Return the physical column if the data has it and no override maps another name to it."""
        physical = self.physical(canonical)
        if physical not in held:
            return None
        if canonical not in self.columns and physical in self.columns.values():
            return None
        return physical

    def require(self, canonical: str, held: Mapping[str, object], needed_for: str = "") -> str:
        """Return the column like `find`, or raise `MissingColumnError`."""
        physical = self.find(canonical, held)
        if physical is None:
            raise MissingColumnError(self.physical(canonical), list(held), needed_for=needed_for)
        return physical

    def extra_columns(self, held: Iterable[str], used: Iterable[str]) -> list[str]:
        """Return columns without a canonical name, in order; `SchemaError` if they are refused."""
        mapped = {*CANONICAL_COLUMNS, *self.columns.values(), *used, *_NEVER_EXTRA}
        extra = [name for name in held if name not in mapped]
        if self.unmapped == "drop":
            return []
        if self.unmapped == "error" and extra:
            raise SchemaError("is not mapped, and the schema refuses that", column=extra[0])
        return extra


class RowGrouping(StrEnum):
    """What a row of column data is."""

    ASSEMBLE = "assemble"
    """A step; rows of one episode and agent are joined in the order of `t`."""
    ONE_STEP = "one_step"
    """An episode of one step that starts at 0, in row order; `t` is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingOptions:
    """How rows become episodes."""

    schema: OfflineSchema = field(default_factory=OfflineSchema)
    grouping: RowGrouping = RowGrouping.ASSEMBLE
    packed_columns: frozenset[str] | None = None
    """Canonical or physical names of columns with packed arrays as text or bytes (`obs` means
    `new_obs` too), or None for columns with a first text value that looks packed."""
    observation_space: Any = None
    """A Gymnasium space or a `SpaceSpec`, to convert composite observations stored as JSON."""
    action_space: Any = None
    """The same for actions."""
    multi_agent: bool = False
    """True if rows belong to several agents, at different times; needs `agent_id`."""
    module_of: Mapping[str, str] | Callable[[str], str] | None = None
    """Module by agent if there is no `module_id` column, or None if no module is named."""
    ignore_final_observation: bool = False
    """Fill in zeros for the observation after the last step instead of reading `new_obs`."""
    held_rows_max: int = 1_000_000
    """Most rows of unfinished episodes that wait; beyond it the oldest are used as they are."""
    limits: DataLimits = DEFAULT_LIMITS

    def module_id_of(self, agent_id: str | None) -> str | None:
        """Return the module of an agent by `module_of`, or None if it has none."""
        if self.module_of is None or agent_id is None:
            return None
        if callable(self.module_of):
            return self.module_of(agent_id)
        return self.module_of.get(agent_id)
