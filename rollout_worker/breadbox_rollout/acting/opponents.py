"""Opponents: agents that act with earlier versions of a policy, and send nothing."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model.fragment import Fragment
from breadbox.model.trees import map_tree
from breadbox.model.trees import row as tree_row
from breadbox_policies import State, set_policy_weights
from breadbox_rollout.acting.inference import Inference, joined, write_actions, write_rows
from breadbox_rollout.acting.player import MakeInference, MakePolicy, Participant
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.processes.pool import AgentRows
from breadbox_rollout.sending.models import Model, ModelWatcher

PINNED_VERSION = -1
"""Version number of weights from a file."""


@dataclass(frozen=True, slots=True)
class _Version:
    model_version: int
    inference: Inference


@dataclass(slots=True)
class _Chair:
    """A row: the version that plays it in this episode, and its recurrent state."""

    version: _Version | None = None
    state: State = None


class Opponents(Participant):
    """Play rows with versions drawn evenly from the last *kept_max* and *pinned*."""

    def __init__(
        self,
        make_policy: MakePolicy,
        make_inference: MakeInference,
        watcher: ModelWatcher,
        *,
        kept_max: int,
        pinned: Sequence[Mapping[str, NDArray[Any]]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(make_policy, make_inference, watcher)
        self._pinned_weights = pinned
        self._pinned: list[_Version] = []
        self._kept: deque[_Version] = deque(maxlen=kept_max)
        self._random = random.Random(seed)
        self._chairs: list[list[_Chair]] = []

    @property
    def in_session(self) -> bool:
        return self.model.in_session and bool(self._kept or self._pinned)

    @property
    def versions(self) -> list[int]:
        """Versions to draw from, oldest first; `PINNED_VERSION` for each pinned one."""
        return [version.model_version for version in (*self._pinned, *self._kept)]

    def sit(self, part: AgentRows, groups: Sequence[range]) -> None:
        self.part = part
        self._chairs = [
            [_Chair() for _ in range(len(env_indices) * len(part.labels))] for env_indices in groups
        ]
        self._pinned = [self._made(PINNED_VERSION, weights) for weights in self._pinned_weights]

    def _adopt(self, model: Model) -> None:
        if model.session_id != self.model.session_id:
            self._kept.clear()  # Another run: its policies are no opponents.
        if model.in_session and (model.weights is not None or not self._kept):
            self._kept.append(self._made(model.model_version, model.weights))

    def _made(self, model_version: int, weights: Mapping[str, NDArray[Any]] | None) -> _Version:
        assert self.part is not None
        policy = self._make_policy(self.part.observation_space, self.part.action_space)
        if weights is not None:
            set_policy_weights(policy, weights)
        return _Version(model_version, self._make_inference(policy))

    def act(self, groups: list[int], arrays: list[GroupArrays]) -> Callable[[], list[Fragment]]:
        """See `Participant.act`. Runs every version that plays once, for its rows."""
        chairs = [chair for group in groups for chair in self._chairs[group]]
        first = np.concatenate([entry.first for entry in arrays])
        acts = np.concatenate([entry.acts for entry in arrays])
        obs = joined([entry.obs for entry in arrays])
        rows_of: dict[int, list[int]] = {}
        for row, chair in enumerate(chairs):
            if not acts[row]:
                continue
            if first[row] or chair.version is None:
                chair.version = self._random.choice([*self._pinned, *self._kept])
                chair.state = chair.version.inference.initial_state
            rows_of.setdefault(id(chair.version), []).append(row)
        action = joined([entry.action for entry in arrays])
        value = np.zeros(len(chairs), np.float32)
        for rows in rows_of.values():
            version = chairs[rows[0]].version
            assert version is not None
            decision = version.inference.act(
                map_tree(lambda array, rows=rows: array[rows], obs),
                [chairs[row].state for row in rows],
                first[rows],
            )
            for place, row in enumerate(rows):
                chairs[row].state = decision.states[place]
                write_rows(action, row, tree_row(decision.action, place))
            value[rows] = decision.value
        write_actions(arrays, action, value, self.model.model_version)
        return list
