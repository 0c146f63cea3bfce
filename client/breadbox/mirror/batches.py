"""A mirror's samples: steps, and sequences of steps, as stacked arrays or tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox.model.summaries import Summarized
from breadbox.model.trees import map_tree, rows
from breadbox.model.types import Device
from breadbox.reading.devices import tensor_of


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Draw steps in proportion to a power of their priorities.

    Raises:
        InvalidRequestError: An exponent is out of its range.
    """

    alpha: float = 0.6
    """Exponent of priorities, 0 (uniform) to 10. The first draw with a new one reads all steps."""
    beta: float = 0.4
    """Exponent of the importance weights, 0 (all 1) to 10; 1 corrects the draw in full."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not 0 <= value <= 10:
                raise InvalidRequestError(name, f"must be from 0 to 10, got {value!r}")


class _Leaves(Summarized):
    __slots__ = ()
    _unit = ""
    handle: Any

    def _arrays(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.handle)

    def _facts(self) -> list[str]:
        return [f"{len(self)} {self._unit}"]

    def to_torch(self, device: Device = "cpu") -> Self:
        """Return the batch with torch tensors as leaves; on the CPU they share its memory.

        Raises:
            UnsupportedArrayError: torch has no type for an array, such as text.
            InvalidRequestError: There is no such device.
        """
        changed = {
            name: map_tree(partial(tensor_of, device=device), tree)
            for name, tree in self._arrays().items()
        }
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(slots=True, kw_only=True, repr=False)
class StepBatch(_Leaves):
    """B steps, drawn one by one; row b of every leaf belongs to one of them.

    With n-step returns each stands for a window of up to n steps of one worker, which ends early at
    the end of an episode, at a discontinuity and at the worker's newest step. Leaves are copies, as
    numpy arrays, or torch tensors if a device was given; rows need not be contiguous.

    Attributes:
        obs: Observations at the window's first step; leaves [B, ...].
        action: Actions of that step; leaves [B, ...].
        reward: float32[B]; sum of the window's rewards, discounted by gamma for each step.
        next_obs: Observations after the window's last step; leaves [B, ...]. If that step ended an
            episode, its true final observation; if that of a terminal state is unknown, the
            observation before it, which no loss should use.
        terminated: bool[B]; the window's last step ended the episode in a terminal state.
        truncated: bool[B]; the window's last step was the last before the episode was cut off.
        discount: float32[B]; gamma to the power of the window's steps: the factor of the value of
            `next_obs`, unless `terminated`.
        window_length: int64[B]; number of the window's steps, or None for single steps.
        weight: float32[B]; importance weight divided by the batch's largest; 1 for uniform draws.
        handle: int64[B]; of the window's first step, for `update_priorities`. Never used again.
        episode_id: int64[B].
        model_version: int64[B]; version that acted at the window's first step.
        log_prob: float32[B] of the action under the policy that acted, or None if fragments have
            none.
        value: float32[B] of that policy, or None if fragments have none.
        extras: Extras of the fragments at the window's first step; leaves [B, ...].
    """

    _unit = "steps"
    obs: Tree
    action: Tree
    reward: Any
    next_obs: Tree
    terminated: Any
    truncated: Any
    discount: Any
    weight: Any
    handle: Any
    episode_id: Any
    model_version: Any
    log_prob: Any = None
    value: Any = None
    extras: Tree = field(default_factory=dict)
    window_length: Any = None

    def split(self, size: int) -> Iterator["StepBatch"]:
        """Yield views of *size* rows each, in order; the last may be shorter."""
        for start in range(0, len(self), size):
            changed = {
                name: rows(tree, start, start + size) for name, tree in self._arrays().items()
            }
            yield StepBatch(**changed)


@dataclass(slots=True, kw_only=True, repr=False)
class SequenceBatch(_Leaves):
    """B sequences of L consecutive steps of one worker each, L being burn-in and length together.

    A sequence continues over the ends of episodes, which `first` and `ended` mark. Behind a
    discontinuity, or the worker's newest step, the rest is zeros, and False in `mask`.

    Attributes:
        obs: Leaves [B, L, ...].
        action: Leaves [B, L, ...].
        reward: float32[B, L].
        next_obs: Observations after each step, as in `StepBatch`; leaves [B, L, ...].
        terminated: bool[B, L].
        truncated: bool[B, L].
        first: bool[B, L]; the step starts an episode: the recurrent state before it is a new one.
        mask: bool[B, L]; True where there is a step.
        is_burn_in: bool[L]; the step only warms up the recurrent state.
        in_state: The worker's recurrent state before the first step, leaves [B, ...], or None if
            fragments have none.
        weight: float32[B], as in `StepBatch`.
        handle: int64[B, L]; -1 where there is no step.
        model_version: int64[B, L].
        log_prob: float32[B, L], or None if fragments have none.
        value: float32[B, L], or None if fragments have none.
        extras: Leaves [B, L, ...].
    """

    _unit = "sequences"
    obs: Tree
    action: Tree
    reward: Any
    next_obs: Tree
    terminated: Any
    truncated: Any
    first: Any
    mask: Any
    is_burn_in: Any
    in_state: Tree
    weight: Any
    handle: Any
    model_version: Any
    log_prob: Any = None
    value: Any = None
    extras: Tree = field(default_factory=dict)

    @property
    def ended(self) -> Any:
        """bool[B, L]; terminated or truncated."""
        return self.terminated | self.truncated
