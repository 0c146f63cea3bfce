"""A fragment: T consecutive steps of one worker, as arrays.

Step t is the policy's observation and action at time t, and the environment's answer to them:
`reward[t]`, `terminated[t]` and `truncated[t]` answer `action[t]`.
"""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.model.summaries import summary, summary_html
from breadbox.model.types import FragmentMetadata

Tree = Any
"""Nested dicts (string keys), lists and tuples of numpy arrays, or None."""


def tree_size_bytes(tree: Tree) -> int:
    """Return the bytes of all arrays of a tree, before any codec; 0 for None."""
    match tree:
        case None:
            return 0
        case dict():
            return sum(tree_size_bytes(child) for child in tree.values())
        case list() | tuple():
            return sum(tree_size_bytes(child) for child in tree)
        case _:
            return int(getattr(tree, "nbytes", 0))


@dataclass(slots=True, kw_only=True)
class Fragment:
    """T steps of one worker. Leaves of trees are `[T, ...]` unless said otherwise.

    Attributes:
        worker_id: The worker that played it.
        fragment_index: Position in the worker's sequence within the session, contiguous from 0.
        session_id: The session it was played for.
        model_version_min: Version that produced the oldest step.
        model_version_max: Version that produced the newest step.
        obs: Observations of the policy; any dtypes, [T, ...].
        action: Actions of the policy; any dtypes, [T, ...].
        reward: float32[T], undiscounted.
        terminated: bool[T]; the episode ended in a terminal state with this step.
        truncated: bool[T]; the episode was cut off after this step (time limit, aborted
            environment).
        first: bool[T]; this step starts an episode; first[t] == ended[t-1] within a fragment.
        episode_id: int64[T]; the same number for all steps of an episode.
        next_obs: Observation after the last step, leaves [...]. If that step ended an episode, the
            first of the next one or, from a `StepWriter`, the final observation.
        in_state: Recurrent state before step 0, leaves [...] without a batch axis, or None. If step
            0 starts an episode, rollout workers store the policy's initial state.
        final_obs_step: int32[K]; ascending steps at which an episode ended with a true final
            observation is known.
        final_obs: Final observations of those K episodes, leaves [K, ...], or None if K is 0.
        log_prob: float32[T]; log-probability of `action` under the policy that acted.
        value: float32[T]; value estimate of the policy that acted, in reward units.
        model_version: int64[T]; version that produced each step, or None if min equals max.
        extras: Anything else, leaves [T, ...]. Rollout workers, `StepWriter` and `breadbox import`
            add `episode_return`, float32[T], and `episode_length`, int64[T]: return and steps of
            the episode that ended with this step, counted from its start even if earlier fragments
            were dropped; NaN and 0 if no episode ended, or it was aborted.
        discontinuity: True if step 0 does not follow the last step of the previous fragment,
            because steps between them were dropped.
        priority: Priority for samplers that use it, from 0 to 1e30; a chunk has the largest of its
            fragments', until `Client.update_priorities` sets it.
    """

    worker_id: str
    fragment_index: int
    session_id: str
    model_version_min: int
    model_version_max: int
    obs: Tree
    action: Tree
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    episode_id: NDArray[np.int64]
    next_obs: Tree
    in_state: Tree = None
    final_obs_step: NDArray[np.int32] | None = None
    final_obs: Tree = None
    log_prob: NDArray[np.float32] | None = None
    value: NDArray[np.float32] | None = None
    model_version: NDArray[np.int64] | None = None
    extras: dict[str, Tree] = field(default_factory=dict)
    discontinuity: bool = False
    priority: float = 1.0

    def __repr__(self) -> str:
        """Show worker, index and session, and the leaves with dtypes and shapes, in one line."""
        return summary("Fragment", self._facts(), self._arrays())

    def _repr_html_(self) -> str:
        return summary_html("Fragment", self._facts(), self._arrays())

    def _facts(self) -> list[str]:
        low, high = self.model_version_min, self.model_version_max
        return [
            *(f"{name}={getattr(self, name)!r}" for name in ("worker_id", "fragment_index")),
            f"session_id={self.session_id!r}",
            f"model version {low}" if low == high else f"model versions {low} to {high}",
            *(["discontinuity"] if self.discontinuity else []),
            *([f"priority={self.priority:g}"] if self.priority != 1.0 else []),
        ]

    def _arrays(self) -> dict[str, Tree]:
        return {name: getattr(self, name) for name in _ARRAY_FIELDS}

    @property
    def step_count(self) -> int:
        """T, the number of steps."""
        return len(self.reward)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, before any codec: its size in memory."""
        total = 0
        # Called for every appended fragment, so arrays are not walked as trees.
        for value in _arrays_of(self):
            if type(value) is np.ndarray:
                total += value.nbytes
            elif value is not None:
                total += tree_size_bytes(value)
        return total

    @property
    def ended(self) -> NDArray[np.bool_]:
        """bool[T]; terminated or truncated."""
        # Flags may be integers of two types, of which numpy takes no bits together.
        ended: NDArray[np.bool_] = np.logical_or(self.terminated, self.truncated)
        return ended


METADATA_FIELDS: Final = tuple(
    each.name for each in fields(FragmentMetadata) if each.name in Fragment.__dataclass_fields__
)
"""Fields that a fragment shares with its metadata; the others are arrays."""
_ARRAY_FIELDS: Final = tuple(
    each.name for each in fields(Fragment) if each.name not in METADATA_FIELDS
)
_arrays_of = attrgetter(*_ARRAY_FIELDS)
