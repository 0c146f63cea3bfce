"""Convert the steps of TorchRL's collectors to fragments, and samples to TorchRL's layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breadbox.mirror import Prioritised, ReplayMirror, SequenceBatch, StepBatch
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment, Tree, fragment_of
from breadbox.model.trees import concat, map_tree, plain_array, row, rows, rows_equal, take
from breadbox.writing.fragmenter import EPISODE_COLUMNS, EpisodeTotals

FLAGS = ("done", "terminated", "truncated")
OBSERVATION = "observation"
_OUTCOME = (*FLAGS, "reward")
_SAMPLED = ("index", "priority_weight", "is_init", "steps_to_next_obs")
"""Entries of samples that `extend` does not store."""


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
    """bool[N]: True for a step that starts an episode; or None if unknown."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Steps":
        """Convert nested dicts of tensors [N, ...]; refuse missing entries and other shapes."""
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
            # A step that is done but not terminal is truncated.
            truncated=truncated | (done & ~terminated),
            extras={key: _arrays(each) for key, each in data.items() if key not in left_out},
            starts=_column(data["is_init"], "is_init") if "is_init" in data else None,
        )

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(slots=True)
class Stream:
    """A worker and its latest step, so that a step that does not follow is noticed."""

    worker_id: str
    session_id: str
    model_version: int
    fragment_index: int = 0
    episode_id: int = 0
    is_over: bool = True
    """True if its latest step ended an episode, or there is none."""
    next_obs: Tree = field(default=None, repr=False)
    """Observation after its latest step, leaves [...]."""
    totals: EpisodeTotals = field(default_factory=EpisodeTotals, repr=False)

    def fragments(self, steps: Steps, step_count_max: int) -> Iterator[Fragment]:
        """Cut steps into fragments, where one does not follow, and after `step_count_max`."""
        count = len(steps)
        ended = steps.terminated | steps.truncated
        follows = np.ones(count, np.bool_)
        reached = rows(steps.next_obs, 0, -1)
        follows[1:] = ended[:-1] | rows_equal(reached, rows(steps.obs, 1, None))
        latest = map_tree(lambda leaf: leaf[None], self.next_obs)
        follows[0] = self.is_over or bool(rows_equal(latest, rows(steps.obs, 0, 1))[0])
        start = 0
        while start < count:
            stop = start + 1
            while stop < min(count, start + step_count_max) and follows[stop]:
                stop += 1
            yield self._fragment(steps, start, stop, is_gap=not follows[start])
            start = stop

    def _fragment(self, steps: Steps, start: int, stop: int, *, is_gap: bool) -> Fragment:
        ended = (steps.terminated | steps.truncated)[start:stop]
        starts = steps.starts[start] if is_gap and steps.starts is not None else self.is_over
        ends = np.flatnonzero(ended)
        if is_gap:
            self.episode_id += 1
            self.totals.lose()
        fragment = fragment_of(
            *(self.session_id, self.worker_id, self.fragment_index),
            obs=rows(steps.obs, start, stop),
            action=rows(steps.action, start, stop),
            reward=steps.reward[start:stop],
            next_obs=row(steps.next_obs, stop - 1),
            terminated=steps.terminated[start:stop],
            truncated=steps.truncated[start:stop],
            starts_episode=bool(starts),
            episode_id=self.episode_id,
            model_version=self.model_version,
            final_obs_step=ends.astype(np.int32) if len(ends) else None,
            final_obs=take(steps.next_obs, start + ends) if len(ends) else None,
            discontinuity=is_gap,
        )
        totals = self.totals.columns(fragment.reward, fragment.first, ended)
        fragment.extras = {**rows(steps.extras, start, stop), **totals}
        self.fragment_index += 1
        self.episode_id += int(ended.sum())
        self.is_over = bool(ended[-1])
        self.next_obs = map_tree(np.array, fragment.next_obs)
        return fragment


def as_dict(batch: StepBatch) -> dict[str, Any]:
    """Return a batch [B, ...] with TorchRL's names and shapes."""
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
    if batch.window_length is not None:
        data["steps_to_next_obs"] = batch.window_length.unsqueeze(-1)
    if batch.log_prob is not None:
        data["sample_log_prob"] = batch.log_prob
    if batch.value is not None:
        data["state_value"] = batch.value.unsqueeze(-1)
    for name, extra in (batch.extras or {}).items():
        if name not in EPISODE_COLUMNS:  # Samples have the entries that were extended.
            data.setdefault(name, extra)
    return data


def _at_root(obs: Tree) -> dict[str, Any]:
    return dict(obs) if isinstance(obs, dict) else {OBSERVATION: obs}


def _arrays(tree: Any) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _arrays(child) for key, child in tree.items()}
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy().copy()
    return np.array(plain_array(tree))


def _column(values: Any, name: str) -> NDArray[Any]:
    array = np.asarray(_arrays(values))
    if array.size != len(array):
        raise InvalidRequestError(
            "data", f"must have one {name} for each step, got shape {list(array.shape)}"
        )
    return array.reshape(-1)


ROUNDS_MAX = 100
"""Most draws for a sample; after so many, hardly any sequence stays within an episode."""
_TREES = (
    *("obs", "action", "reward", "next_obs", "terminated", "truncated", "handle", "model_version"),
    *("log_prob", "value", "extras"),
)


def draw_slices(
    mirror: ReplayMirror, count: int, length: int, *, prioritised: bool | Prioritised
) -> StepBatch:
    """Draw slices with equal probability, concatenated; the last step of each is truncated."""
    drawn: list[dict[str, Tree]] = []
    have = 0
    for _ in range(ROUNDS_MAX):
        batch = mirror.sample_sequences(count, length=length, prioritised=prioritised)
        # A sequence continues over ends of episodes, and stops with its worker's steps.
        whole = np.flatnonzero(batch.mask.all(1) & ~batch.ended[:, :-1].any(1))[: count - have]
        have += len(whole)
        drawn.append(_taken(batch, whole))
        if have == count:
            return _laid_out(concat(drawn), length)
    raise InvalidRequestError(
        "slice_len", f"finds too few episodes of {length} steps: {have} slices of {count}"
    )


def _taken(batch: SequenceBatch, chosen: Any) -> dict[str, Tree]:
    trees = {name: getattr(batch, name) for name in _TREES}
    return {
        **{name: map_tree(lambda leaf: leaf[chosen], tree) for name, tree in trees.items()},
        "weight": np.repeat(batch.weight[chosen, None], batch.mask.shape[1], axis=1),
    }


def _laid_out(slices: Tree, length: int) -> StepBatch:
    trees: dict[str, Any] = map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), slices)
    trees["truncated"][length - 1 :: length] |= ~trees["terminated"][length - 1 :: length]
    step_count = len(trees["reward"])
    return StepBatch(
        **trees,
        discount=np.ones(step_count, np.float32),
        episode_id=np.arange(step_count) // length,
    )
