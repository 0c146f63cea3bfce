"""Check which fragments a learner can train on."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import Tree, child_path, field_of, flatten, is_within
from breadbox.model.types import ArrayType, FragmentReference
from breadbox.payload.dtypes import BFLOAT16
from breadbox.reading.batches import Batch
from breadbox_learner.spaces import Spaces

_log = logging.getLogger(__name__)

Arrays = Mapping[str, ArrayType]
"""Types of a fragment's arrays, by path."""
_LOOSE_FIELDS = frozenset({"final_obs_step", "final_obs", "model_version"})
"""Fields that fragments of one batch may have in different lengths, or not at all."""
_FLAGS = ("terminated", "truncated", "first")
_NUMBERS = ("reward", "log_prob")
_STEP_ROWS = dict.fromkeys((*_FLAGS, "reward", "episode_id"), ())
_RETURN = "extras.episode_return"
_VALUES_READ = ("obs", "action", "next_obs", "in_state", "final_obs", *_NUMBERS)
"""Fields that the policy or its loss reads."""
_FIELDS_READ = (*_STEP_ROWS, "obs", "action", "next_obs", "final_obs", "in_state", "extras")
WARNINGS_MAX = 16
"""Most kinds of misfits that are logged."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """The reason why a fragment does not fit."""

    path: str
    wanted: str
    got: str


def expected_rows(spaces: Spaces, state: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shape of a step of each array that a policy reads; `state` leaves are [1, ...]."""
    # The policy checks spaces without a fixed shape, such as text.
    rows = {path: tuple(space.shape) for path, space in _parts(spaces) if space.shape is not None}
    _, leaves = flatten({"in_state": state})
    if state is not None and not leaves:
        raise InvalidRequestError(
            "policy",
            f"has {state!r} as its initial state, which contains no tensor: "
            "return None for a policy without memory",
        )
    return rows | {path: tuple(leaf.shape[1:]) for path, leaf in leaves}


def expected_ranges(spaces: Spaces) -> dict[str, tuple[Any, Any]]:
    """Return the least and greatest value of each array of discrete choices."""
    ranges: dict[str, tuple[Any, Any]] = {}
    for path, space in _parts(spaces):
        if isinstance(space, gymnasium.spaces.Discrete):
            ranges[path] = (int(space.start), int(space.start) + int(space.n) - 1)
        elif isinstance(space, gymnasium.spaces.MultiDiscrete):
            start = space.start.astype(np.int64)
            ranges[path] = (start, start + space.nvec.astype(np.int64) - 1)
        elif isinstance(space, gymnasium.spaces.MultiBinary):
            ranges[path] = (0, 1)
    return ranges


def _parts(spaces: Spaces) -> Iterator[tuple[str, "gymnasium.Space[Any]"]]:
    yield from _parts_of(spaces.observation, "obs")
    yield from _parts_of(spaces.action, "action")


def _parts_of(
    space: "gymnasium.Space[Any]", path: str
) -> Iterator[tuple[str, "gymnasium.Space[Any]"]]:
    children: Any = ()
    if isinstance(space, gymnasium.spaces.Dict):
        children = space.spaces.items()
    elif isinstance(space, gymnasium.spaces.Tuple):
        children = enumerate(space.spaces)
    else:
        yield path, space
    for key, child in children:
        yield from _parts_of(child, child_path(path, key))


class Fitting:
    """Check fragments against `rows` and `spaces`, if known; log each kind of misfit once."""

    def __init__(
        self, rows: Mapping[str, tuple[int, ...]] | None = None, spaces: Spaces | None = None
    ) -> None:
        self._rows = {**_STEP_ROWS, **rows} if rows else {}
        self._spaces = spaces
        self._ranges = {} if spaces is None else expected_ranges(spaces)
        self._logged: set[Misfit] = set()
        self.misfit_count = 0
        """Number of fragments left out so far."""

    def batch_misfit(self, batch: Batch) -> Misfit | None:
        """Return why the policy cannot take a stacked batch, leaves [B, T, ...], or None."""
        for field in ("obs", "next_obs", "final_obs", "action") if self._spaces else ():
            assert self._spaces is not None
            space = self._spaces.action if field == "action" else self._spaces.observation
            tree = getattr(batch, field)
            if not (_has_form(space, tree) or (tree is None and field == "final_obs")):
                return Misfit(field, f"the form of {space}"[:200], "another")
        _, leaves = flatten({name: getattr(batch, name) for name in _FIELDS_READ})
        return self.misfit(
            {
                path: ArrayType(
                    _type_name(leaf), tuple(leaf.shape[not path.startswith("final_obs") :])
                )
                for path, leaf in leaves
            }
        )

    def faulty(self, batch: Batch) -> dict[int, Misfit]:
        """Return rows that would end the training: invalid choices, NaN, steps out of range."""
        found: dict[int, Misfit] = {}

        def blame(wrong: Tensor, rows: Any, misfit: Misfit) -> None:
            """Add the batch row of each wrong entry, which `rows` gives if not None."""
            for row in wrong.nonzero().flatten().tolist():
                found.setdefault(row if rows is None else int(rows[row]), misfit)

        for path, leaf in flatten({name: getattr(batch, name) for name in _VALUES_READ})[1]:
            values = torch.as_tensor(leaf)
            if values.numel() == 0:
                continue
            rows = None if not path.startswith("final_obs") else batch.final_obs_row
            if values.is_floating_point():
                blame(_not_finite(values), rows, Misfit(path, "finite numbers", "others"))
            bounds = self._ranges.get(_observed(path))
            if bounds is not None:
                low, high = (torch.as_tensor(each, device=values.device) for each in bounds)
                if not values.is_floating_point():
                    values = values.long()  # Tensors of some unsigned types cannot be compared.
                # A choice has no axis: its `next_obs` is [B], its `final_obs` [F].
                wrong = ((values < low) | (values > high)).reshape(len(values), -1).any(1)
                blame(wrong, rows, Misfit(path, f"{bounds[0]} to {bounds[1]}", "others"))
        if batch.final_obs_step is not None:
            steps = torch.as_tensor(batch.final_obs_step)
            step_count = batch.reward.shape[1]
            wrong = (steps < 0) | (steps >= step_count)
            misfit = Misfit("final_obs_step", f"steps below {step_count}", "others")
            blame(wrong, batch.final_obs_row, misfit)
        return found

    def kept(
        self, references: Sequence[FragmentReference], described: Sequence[Arrays]
    ) -> list[FragmentReference]:
        """Return fragments that fit and stack with most others; count and log the rest."""
        misfits = [self.misfit(arrays) for arrays in described]
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
                self.leave_out(reference, misfit)
        return kept

    def leave_out(self, reference: FragmentReference, misfit: Misfit) -> None:
        """Count a fragment that does not fit, and log each kind of reason once."""
        self.misfit_count += 1
        if misfit in self._logged or len(self._logged) >= WARNINGS_MAX:
            return
        self._logged.add(misfit)
        _log.warning(
            "fragments of worker %s and others like it are left out: %s: wanted %s, got %s",
            reference.metadata.worker_id,
            misfit.path,
            misfit.wanted,
            misfit.got,
        )

    def misfit(self, arrays: Arrays) -> Misfit | None:
        """Return why the policy cannot take a fragment that has these arrays, or None."""
        for path, row in self._rows.items():
            has_steps = not path.startswith("in_state")
            # Without a recurrent state the policy starts from its initial one.
            misfit = _misfit_at(arrays, path, row, has_rows=has_steps, is_needed=has_steps)
            if misfit is None and field_of(path) == "obs":
                rest = path.removeprefix("obs")
                has_final = any(field_of(each) == "final_obs" for each in arrays)
                misfit = _misfit_at(
                    arrays, "next_obs" + rest, row, has_rows=False, is_needed=True
                ) or _misfit_at(arrays, "final_obs" + rest, row, has_rows=True, is_needed=has_final)
            if misfit is not None:
                return misfit
        if self._rows and any(is_within(path, _RETURN) and path != _RETURN for path in arrays):
            return Misfit(_RETURN, "an array", "several")
        return _misfit_at(arrays, _RETURN, (), has_rows=True, is_needed=False)


def _misfit_at(
    arrays: Arrays, path: str, row: tuple[int, ...], *, has_rows: bool, is_needed: bool
) -> Misfit | None:
    held = arrays.get(path)
    if held is None:
        return Misfit(path, f"an array of {list(row)} a step", "nothing") if is_needed else None
    if held.shape[has_rows:] != row or len(held.shape) != len(row) + has_rows:
        wanted = f"shape {['steps', *row] if has_rows else list(row)}"
        return Misfit(path, wanted.replace("'", ""), f"shape {list(held.shape)}")
    if not _is_of_kind(path, held.type_name):
        return Misfit(path, "numbers" if path not in _FLAGS else "flags", held.type_name)
    return None


def _has_form(space: "gymnasium.Space[Any]", tree: Tree) -> bool:
    """Return True if a tree has the nodes of a space, and a leaf for each of its leaves."""
    if isinstance(space, gymnasium.spaces.Dict):
        return isinstance(tree, dict) and all(
            key in tree and _has_form(part, tree[key]) for key, part in space.spaces.items()
        )
    if isinstance(space, gymnasium.spaces.Tuple):
        return (
            isinstance(tree, list | tuple)
            and len(tree) == len(space.spaces)
            and all(_has_form(part, child) for part, child in zip(space.spaces, tree, strict=True))
        )
    return tree is not None and not isinstance(tree, dict | list | tuple)


def _is_of_kind(path: str, type_name: str) -> bool:
    if type_name == BFLOAT16:
        return path not in _STEP_ROWS
    dtype = np.dtype(type_name)
    if dtype.kind not in ("b" if path in _FLAGS else "biuf"):
        return False
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):  # In another byte order, or wider than tensors can be.
        return False
    return True


def _type_name(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        if leaf.dtype is torch.bfloat16:
            return BFLOAT16
        return torch.empty(0, dtype=leaf.dtype).numpy().dtype.str
    return str(leaf.dtype.str)


def _observed(path: str) -> str:
    """Return the path in `obs` of a next or final observation's array."""
    field = field_of(path)
    return "obs" + path.removeprefix(field) if field in ("next_obs", "final_obs") else path


def _not_finite(values: Tensor) -> Tensor:
    rows = values.reshape(len(values), -1)
    # One pass in the usual case: a sum is finite only if its parts are.
    wrong = ~rows.sum(1).isfinite()
    for row in wrong.nonzero().flatten().tolist():
        wrong[row] = not bool(rows[row].isfinite().all())
    return wrong


def _kind_of(arrays: Arrays) -> tuple[tuple[str, ArrayType], ...]:
    """Return what fragments of one batch must have in common."""
    return tuple(sorted(item for item in arrays.items() if field_of(item[0]) not in _LOOSE_FIELDS))


def _difference(wanted: Arrays, got: Arrays) -> Misfit | None:
    for path in sorted({*wanted, *got}):
        if wanted.get(path) != got.get(path):
            return Misfit(path, str(wanted.get(path, "nothing")), str(got.get(path, "nothing")))
    return None
