"""`RowLayout`: which column of old-stack SampleBatch rows holds what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from breadbox_offline.decoding import packing
from breadbox_offline.errors import MissingColumnError
from breadbox_offline.rows import columns as read
from breadbox_offline.rows.columns import Columns
from breadbox_offline.rows.options import (
    ACTIONS,
    AGENT_ID,
    EPS_ID,
    INFOS,
    MODULE_ID,
    NEW_OBS,
    OBS,
    REWARDS,
    MappingOptions,
    T,
)
from breadbox_offline.rows.row_table import find_flag_columns


@dataclass(slots=True)
class RowLayout:
    """Where things are, by their physical names; decided once for all rows."""

    options: MappingOptions
    obs: str
    actions: str
    rewards: str
    new_obs: str | None
    """None also when final observations are to be ignored."""
    terminated: str | None
    truncated: str | None
    eps_id: str | None
    agent_id: str | None
    module_id: str | None
    t: str | None
    infos: str | None
    extras: list[str]
    packed: dict[str, bool]
    """Per column of samples, whether text in it is a packed array."""

    @classmethod
    def of(cls, columns: Columns, options: MappingOptions) -> "RowLayout":
        """Find the columns."""
        schema = options.schema
        read.row_count(columns)
        terminated, truncated = find_flag_columns(columns, schema)
        agent_id = schema.find(AGENT_ID, columns)
        if options.multi_agent and agent_id is None:
            raise MissingColumnError(
                schema.physical(AGENT_ID), list(columns), needed_for="several agents"
            )
        ignores_final = options.ignore_final_observation
        layout = cls(
            options=options,
            obs=schema.require(OBS, columns),
            actions=schema.require(ACTIONS, columns),
            rewards=schema.require(REWARDS, columns),
            new_obs=None if ignores_final else schema.find(NEW_OBS, columns),
            terminated=terminated,
            truncated=truncated,
            eps_id=schema.find(EPS_ID, columns),
            agent_id=agent_id,
            module_id=schema.find(MODULE_ID, columns),
            t=schema.find(T, columns),
            infos=schema.find(INFOS, columns),
            extras=schema.extra_columns(
                columns, [name for name in (terminated, truncated) if name is not None]
            ),
            packed={},
        )
        read.demand_flat(
            columns,
            [
                *(layout.rewards, layout.terminated, layout.truncated, layout.eps_id),
                *(layout.agent_id, layout.module_id, layout.t),
            ],
        )
        layout.packed = {
            physical: _holds_packed(columns[physical], canonical, physical, options)
            for physical, canonical in layout.sample_columns().items()
        }
        return layout

    def sample_columns(self) -> dict[str, str]:
        """The columns with one sample per step: physical to canonical name."""
        named = {self.obs: OBS, self.actions: ACTIONS} | {name: name for name in self.extras}
        if self.new_obs is not None:
            named[self.new_obs] = NEW_OBS
        return named


def _holds_packed(
    rows: Sequence[Any], canonical: str, physical: str, options: MappingOptions
) -> bool:
    if isinstance(rows, dict | tuple):
        return False
    if options.packed_columns is not None:
        return read.is_packed(rows, canonical, physical, options)
    first = rows[0] if len(rows) else None
    if isinstance(first, np.ndarray | list) and len(first):
        first = first[0]
    return packing.looks_packed(first)
