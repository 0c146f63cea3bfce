"""MineStudio's data types (online.utils.rollout.datatypes)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox_adapters.minestudio.trees import auto_stack, auto_to_torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FragmentIndex:
    """Which fragment of which worker.

    Equal to, and hashed as, MineStudio's own index of the same fragment, so that either finds what
    is kept under the other.
    """

    worker_uuid: str
    fid_in_worker: int
    """From 0, contiguous."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FragmentIndex) or type(other).__name__ == FragmentIndex.__name__:
            theirs = (
                getattr(other, "worker_uuid", None),
                getattr(other, "fid_in_worker", None),
            )
            return (self.worker_uuid, self.fid_in_worker) == theirs
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.worker_uuid, self.fid_in_worker))


@dataclass(frozen=True)
class FragmentMetadata:
    """What the buffer is told of a fragment."""

    model_version: int
    """Of the fragment's oldest step."""
    session_id: str
    worker_uuid: str
    fid_in_worker: int


@dataclass
class SampleFragment:
    """T consecutive steps of one worker."""

    obs: Any
    """A dict with leaves [T, ...], or a tensor."""
    action: Any
    """A dict with leaves [T, ...], or a tensor."""
    next_done: NDArray[np.bool_]
    """bool[T]; the episode ended with this step."""
    reward: NDArray[np.float32]
    """float32[T]."""
    first: NDArray[np.bool_]
    """bool[T]; the step starts an episode."""
    in_state: Any
    """Recurrent state before step 0: arrays with a batch axis; None for none."""
    worker_uuid: str
    fid_in_worker: int
    next_obs: Any
    """The observation after the last step."""
    episode_uuids: list[str]
    """One per step."""

    @property
    def index(self) -> FragmentIndex:
        """Which fragment it is."""
        return FragmentIndex(self.worker_uuid, self.fid_in_worker)

    def print(self) -> None:
        """Write every field to the log, level INFO."""
        for each in fields(self):
            _log.info("%s, %s: %s", self.index, each.name, getattr(self, each.name))


class FragmentDataDict(dict[Any, Any]):
    """Anything by fragment index: values, advantages, log-probabilities."""

    def format_batch(self, fragments: Sequence[SampleFragment], device: Any) -> Any:
        """Stack what is kept for these fragments, in their order, as tensors on a device.

        Raises:
            KeyError: Nothing is kept for one of them.
        """
        return auto_to_torch(auto_stack([self[each.index] for each in fragments]), device)


@dataclass
class StepRecord:
    """One step as a rollout worker reports it; reward and flags are those of the step before."""

    worker_uuid: str
    obs: dict[str, Any]
    state: Any
    action: dict[str, Any]
    last_reward: float
    last_terminated: bool
    last_truncated: bool
    model_version: int
    episode_uuid: str
    session_id: str
