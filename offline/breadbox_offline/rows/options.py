"""How rows of recorded data become episodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits
from breadbox_offline.rows.schema import OfflineSchema


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
    """Rows belong to several agents: `agent_id` is needed, and agents may act at different
    times."""
    module_of: Mapping[str, str] | Callable[[str], str] | None = None
    """Module of an agent, where there is no `module_id` column, or None if no module is named."""
    ignore_final_observation: bool = False
    """Fill in zeros for the observation after the last step instead of reading `new_obs`."""
    held_rows_max: int = 1_000_000
    """Rows of unfinished episodes that wait for their rest; beyond it the oldest are used as they
    are."""
    limits: DataLimits = DEFAULT_LIMITS

    def module_id_of(self, agent_id: str | None) -> str | None:
        """The module of an agent by `module_of`; None when it names none."""
        if self.module_of is None or agent_id is None:
            return None
        if callable(self.module_of):
            return self.module_of(agent_id)
        return self.module_of.get(agent_id)
