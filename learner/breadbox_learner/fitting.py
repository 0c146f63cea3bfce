"""Which fragments a learner can train on, and which it leaves out."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from breadbox.trees import Tree, child_path, field_of, flatten
from breadbox.types import ArrayType, FragmentReference
from breadbox_learner.spaces import Spaces

_log = logging.getLogger(__name__)

Arrays = Mapping[str, ArrayType]
"""What a fragment has at each path."""

_LOOSE_FIELDS = frozenset({"final_obs_step", "final_obs", "model_version"})
"""Fields that fragments of one batch may have in different lengths, or not at all."""
WARNINGS_MAX = 16
"""Kinds of misfits that are told; workers of a hundred kinds are told by the first ones."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a fragment does not fit."""

    path: str
    wanted: str
    got: str


def expected_rows(spaces: Spaces, state: Tree) -> dict[str, tuple[int, ...]]:
    """The shape of a step's part of each array that a policy reads, as far as spaces tell.

    Args:
        spaces: What goes into the policy and what comes out.
        state: Its recurrent state for one environment, leaves [1, ...]; None: it has none.
    """
    rows = {**_rows_of(spaces.observation, "obs"), **_rows_of(spaces.action, "action")}
    _, leaves = flatten({"in_state": state})
    return rows | {path: tuple(leaf.shape[1:]) for path, leaf in leaves}


def _rows_of(space: "gymnasium.Space[Any]", path: str) -> dict[str, tuple[int, ...]]:
    if isinstance(space, gymnasium.spaces.Dict):
        parts = [_rows_of(child, child_path(path, key)) for key, child in space.spaces.items()]
    elif isinstance(space, gymnasium.spaces.Tuple):
        parts = [_rows_of(child, child_path(path, i)) for i, child in enumerate(space.spaces)]
    else:
        # Spaces of no fixed shape, such as text, are left to the policy.
        parts = [{} if space.shape is None else {path: tuple(space.shape)}]
    return {name: shape for part in parts for name, shape in part.items()}


class Fitting:
    """Tells what fits from what does not, and says once of each kind why.

    Args:
        rows: See `expected_rows`; empty: fragments have to fit one another only.
    """

    def __init__(self, rows: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._rows = dict(rows or {})
        self._told: set[Misfit] = set()
        self.misfit_count = 0
        """Fragments left out so far."""

    def batch_misfit(self, batch: Any) -> Misfit | None:
        """Why the policy cannot take a stacked batch, leaves [B, T, ...]; None: it can."""
        _, leaves = flatten({name: getattr(batch, name) for name in ("obs", "action", "in_state")})
        return self._policy_misfit(
            {path: ArrayType(str(leaf.dtype), tuple(leaf.shape[1:])) for path, leaf in leaves}
        )

    def kept(
        self, references: Sequence[FragmentReference], described: Sequence[Arrays]
    ) -> list[FragmentReference]:
        """The fragments that the policy can take and that stack with most of the others.

        Of several kinds equally frequent the first is kept. The rest is counted and told.

        Args:
            references: Of a batch.
            described: What each has.
        """
        misfits = [self._policy_misfit(arrays) for arrays in described]
        kinds = [_kind_of(arrays) for arrays in described]
        usable = Counter(k for k, misfit in zip(kinds, misfits, strict=True) if misfit is None)
        wanted = usable.most_common(1)[0][0] if usable else None
        kept = []
        for reference, kind, misfit in zip(references, kinds, misfits, strict=True):
            if misfit is None and wanted is not None:
                misfit = _difference(dict(wanted), dict(kind))
            if misfit is None:
                kept.append(reference)
            else:
                self.leave_out([reference], misfit)
        return kept

    def leave_out(self, references: Sequence[FragmentReference], misfit: Misfit) -> None:
        """Count fragments that do not fit, and say why, once for each kind."""
        self.misfit_count += len(references)
        if misfit in self._told or len(self._told) >= WARNINGS_MAX:
            return
        self._told.add(misfit)
        _log.warning(
            "fragments of worker %s and others like it are left out: %s: wanted %s, got %s",
            references[0].metadata.worker_id,
            misfit.path,
            misfit.wanted,
            misfit.got,
        )

    def _policy_misfit(self, arrays: Arrays) -> Misfit | None:
        for path, row in self._rows.items():
            has_steps = not path.startswith("in_state")
            held = arrays.get(path)
            if held is None:
                if has_steps:  # Without a state the policy starts from its initial one.
                    return Misfit(path, f"an array of {list(row)} a step", "nothing")
                continue
            if held.shape[has_steps:] != row:
                wanted = f"shape {['steps', *row] if has_steps else list(row)}"
                return Misfit(path, wanted.replace("'", ""), f"shape {list(held.shape)}")
        return None


def _kind_of(arrays: Arrays) -> tuple[tuple[str, ArrayType], ...]:
    """What fragments of one batch must have in common."""
    return tuple(sorted(item for item in arrays.items() if field_of(item[0]) not in _LOOSE_FIELDS))


def _difference(wanted: Arrays, got: Arrays) -> Misfit | None:
    for path in sorted({*wanted, *got}):
        if wanted.get(path) != got.get(path):
            return Misfit(path, str(wanted.get(path, "nothing")), str(got.get(path, "nothing")))
    return None
