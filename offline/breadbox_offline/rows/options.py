"""How rows of recorded data become episodes, and which column holds what."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from breadbox_offline.errors import MissingColumnError, SchemaError
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits


class Column:
    """Names that a mapping knows; each stands for itself unless the schema says otherwise."""

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
"""Columns that recorders write for themselves; they are no model outputs."""


@dataclass(frozen=True)
class OfflineSchema:
    """Canonical to physical column names; `SchemaError` for unknown names or one column for two."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Overrides `{canonical: physical}`; what is not named here stands for itself."""
    unmapped: Literal["keep", "drop", "error"] = "keep"
    """Columns that are neither: extra model outputs, ignored, or refused."""

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
        """The physical name of a canonical column."""
        return self.columns.get(canonical, canonical)

    def find(self, canonical: str, held: Mapping[str, object]) -> str | None:
        """Return the physical column if the data has it and no override gave it to another name."""
        physical = self.physical(canonical)
        if physical not in held:
            return None
        if canonical not in self.columns and physical in self.columns.values():
            return None
        return physical

    def require(self, canonical: str, held: Mapping[str, object], needed_for: str = "") -> str:
        """Return the column as `find`, or raise `MissingColumnError`."""
        physical = self.find(canonical, held)
        if physical is None:
            raise MissingColumnError(self.physical(canonical), list(held), needed_for=needed_for)
        return physical

    def extra_columns(self, held: Iterable[str], used: Iterable[str]) -> list[str]:
        """Return unmapped columns with no canonical name, in order; `SchemaError` if refused."""
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
    """A step: rows of one episode and agent are put together in the order of `t`."""
    ONE_STEP = "one_step"
    """An episode of its own, of one step, in row order, starting at 0; `t` is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingOptions:
    """How rows become episodes."""

    schema: OfflineSchema = field(default_factory=OfflineSchema)
    grouping: RowGrouping = RowGrouping.ASSEMBLE
    packed_columns: frozenset[str] | None = None
    """Canonical or physical names of columns in which text and bytes are packed arrays (`obs`
    stands for `new_obs` too). None: a column is packed when its first text value looks so."""
    observation_space: Any = None
    """A Gymnasium space or a `SpaceSpec`: composite observations stored as JSON are converted."""
    action_space: Any = None
    """The same for actions."""
    multi_agent: bool = False
    """Rows belong to several agents, at different times: `agent_id` is needed."""
    module_of: Mapping[str, str] | Callable[[str], str] | None = None
    """Module of an agent, where there is no `module_id` column, or None if no module is named."""
    ignore_final_observation: bool = False
    """Fill in zeros for the observation after the last step instead of reading `new_obs`."""
    held_rows_max: int = 1_000_000
    """Rows of unfinished episodes that wait; beyond it the oldest are used as they are."""
    limits: DataLimits = DEFAULT_LIMITS

    def module_id_of(self, agent_id: str | None) -> str | None:
        """The module of an agent by `module_of`; None when it names none."""
        if self.module_of is None or agent_id is None:
            return None
        if callable(self.module_of):
            return self.module_of(agent_id)
        return self.module_of.get(agent_id)
