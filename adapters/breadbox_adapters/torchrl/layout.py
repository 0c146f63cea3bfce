"""Steps as TorchRL's collectors lay them out, and as fragments.

A step of TorchRL has what was seen and done at its root and what came of it under "next". Whatever
is in both, but reward and flags, is part of the observation; of the rest of the root, all but the
action is an extra. An observation that is one array is "observation"; one that is a dict of arrays
has its entries at the root, as TorchRL has those of Gymnasium's Dict spaces.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breadbox.mirror import StepBatch
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.trees import leaves, map_tree

FLAGS = ("done", "terminated", "truncated")
OBSERVATION = "observation"
_OUTCOME = (*FLAGS, "reward")
_SAMPLED = ("index", "priority_weight", "is_init", "steps_to_next_obs")
"""What samples have beside steps: not stored where somebody extends a buffer with samples."""
_LOG_PROB, _VALUE = "sample_log_prob", "state_value"


@dataclass(frozen=True, slots=True)
class Steps:
    """N steps, in arrays with N rows."""

    obs: Tree
    next_obs: Tree
    action: Tree
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    extras: dict[str, Tree]
    starts: NDArray[np.bool_] | None
    """Whether a step is told to start an episode; None: nobody tells."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Steps":
        """Steps of nested dicts of tensors [N, ...], as `TensorDict.to_dict` gives them.

        Raises:
            InvalidRequestError: There is no "next", no "reward" in it, no "action", or rewards and
                flags are not one number for each step.
        """
        after = data.get("next")
        if not isinstance(after, Mapping) or "reward" not in after or "action" not in data:
            raise InvalidRequestError(
                "data", 'must have "action", "next" and ("next", "reward"), as collectors give it'
            )
        seen = {key: _arrays(data[key]) for key in after if key not in _OUTCOME and key in data}
        led_to = {key: _arrays(after[key]) for key in seen}
        ended = {name: _column(after[name], name) for name in FLAGS if name in after}
        reward = _column(after["reward"], "reward").astype(np.float32)
        truncated = ended.get("truncated", np.zeros(len(reward), np.bool_)).astype(np.bool_)
        done = ended.get("done", truncated).astype(np.bool_)
        terminated = ended.get("terminated", done & ~truncated).astype(np.bool_)
        is_one = list(seen) == [OBSERVATION] and not isinstance(seen[OBSERVATION], dict)
        left_out = {*seen, *FLAGS, *_SAMPLED, "next", "action"}
        return cls(
            obs=seen[OBSERVATION] if is_one else seen,
            next_obs=led_to[OBSERVATION] if is_one else led_to,
            action=_arrays(data["action"]),
            reward=reward,
            terminated=terminated,
            # What is done and not terminal was cut off.
            truncated=truncated | (done & ~terminated),
            extras={key: _arrays(each) for key, each in data.items() if key not in left_out},
            starts=_column(data["is_init"], "is_init") if "is_init" in data else None,
        )

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(slots=True)
class Stream:
    """One worker: where its steps stand, so that those given next are known to follow, or not."""

    worker_id: str
    session_id: str
    model_version: int
    fragment_index: int = 0
    episode_id: int = 0
    is_over: bool = True
    """Its latest step ended an episode, or there is none."""
    next_obs: Tree = field(default=None, repr=False)
    """What its latest step led to, leaves [...]."""

    def fragments(self, steps: Steps, step_count_max: int) -> Iterator[Fragment]:
        """Cut steps where one does not follow the one before it, and after so many.

        Args:
            steps: As many as there are, in the order in which they were played. Where they were
                not, as in shuffled data, each step is a fragment.
            step_count_max: Steps of a fragment at most.
        """
        count = len(steps)
        ended = steps.terminated | steps.truncated
        follows = np.ones(count, np.bool_)
        follows[1:] = ended[:-1] | _same(_slice(steps.next_obs, 0, -1), _slice(steps.obs, 1, None))
        follows[0] = self.is_over or bool(
            _same(map_tree(lambda leaf: leaf[None], self.next_obs), _slice(steps.obs, 0, 1))[0]
        )
        start = 0
        while start < count:
            stop = start + 1
            while stop < min(count, start + step_count_max) and follows[stop]:
                stop += 1
            yield self._fragment(steps, start, stop, is_gap=not follows[start])
            start = stop

    def _fragment(self, steps: Steps, start: int, stop: int, *, is_gap: bool) -> Fragment:
        ended = (steps.terminated | steps.truncated)[start:stop]
        first = np.concatenate([[self.is_over], ended[:-1]])
        if is_gap and steps.starts is not None:
            first[0] = bool(steps.starts[start])
        ends = np.flatnonzero(ended)
        if is_gap:
            self.episode_id += 1
        # The counter goes on with the next step after an end.
        episode_id = self.episode_id + np.concatenate([[0], np.cumsum(ended)[:-1]])
        fragment = Fragment(
            worker_id=self.worker_id,
            fragment_index=self.fragment_index,
            session_id=self.session_id,
            model_version_min=self.model_version,
            model_version_max=self.model_version,
            obs=_slice(steps.obs, start, stop),
            action=_slice(steps.action, start, stop),
            reward=steps.reward[start:stop],
            terminated=steps.terminated[start:stop],
            truncated=steps.truncated[start:stop],
            first=first,
            episode_id=episode_id.astype(np.int64),
            next_obs=map_tree(lambda leaf: leaf[stop - 1], steps.next_obs),
            final_obs_step=ends.astype(np.int32) if len(ends) else None,
            final_obs=map_tree(lambda leaf: leaf[start:stop][ends], steps.next_obs)
            if len(ends)
            else None,
            extras=_slice(steps.extras, start, stop),
            discontinuity=is_gap,
        )
        self.fragment_index += 1
        self.episode_id += int(ended.sum())
        self.is_over = bool(ended[-1])
        self.next_obs = map_tree(np.array, fragment.next_obs)
        return fragment


def as_dict(batch: StepBatch, gamma: float | None) -> dict[str, Any]:
    """A batch of tensors as TorchRL names and shapes its parts.

    Args:
        batch: With tensors as leaves, [B, ...].
        gamma: Discount of an n-step batch, whose windows' steps are told; None: of single steps.
    """
    ended = {
        "terminated": batch.terminated.unsqueeze(-1),
        "truncated": batch.truncated.unsqueeze(-1),
        "done": (batch.terminated | batch.truncated).unsqueeze(-1),
    }
    data: dict[str, Any] = {
        **_at_root(batch.obs),
        "action": batch.action,
        **{name: torch.zeros_like(flag) for name, flag in ended.items()},
        "next": {**_at_root(batch.next_obs), "reward": batch.reward.unsqueeze(-1), **ended},
        "index": batch.handle,
        "priority_weight": batch.weight,
    }
    if gamma is not None:
        count = torch.log(batch.discount.double()) / float(np.log(gamma))
        data["steps_to_next_obs"] = count.round().long().unsqueeze(-1)
    if batch.log_prob is not None:
        data[_LOG_PROB] = batch.log_prob
    if batch.value is not None:
        data[_VALUE] = batch.value.unsqueeze(-1)
    for name, extra in (batch.extras or {}).items():
        data.setdefault(name, extra)
    return data


def _at_root(obs: Tree) -> dict[str, Any]:
    return dict(obs) if isinstance(obs, dict) else {OBSERVATION: obs}


def _arrays(tree: Any) -> Tree:
    """The same with arrays instead of tensors, which are copied: collectors write over theirs."""
    if isinstance(tree, Mapping):
        return {key: _arrays(child) for key, child in tree.items()}
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy().copy()
    return np.array(tree)


def _column(values: Any, name: str) -> NDArray[Any]:
    """One number for each step, [N].

    Raises:
        InvalidRequestError: There are more.
    """
    array = np.asarray(_arrays(values))
    if array.size != len(array):
        raise InvalidRequestError(
            "data", f"must have one {name} for each step, got shape {list(array.shape)}"
        )
    return array.reshape(-1)


def _slice(tree: Tree, start: int, stop: int | None) -> Tree:
    return map_tree(lambda leaf: leaf[start:stop], tree)


def _same(one: Tree, other: Tree) -> NDArray[np.bool_]:
    """Whether rows of two trees are equal, bool[N]; NaN equals itself."""
    pairs = [(a, b) for (_, a), (_, b) in zip(leaves(one), leaves(other), strict=True)]
    count = len(pairs[0][0])
    same = np.ones(count, np.bool_)
    for a, b in pairs:
        equal = (a == b) | ((a != a) & (b != b))
        same &= equal.all(axis=tuple(range(1, equal.ndim)))
    return same
