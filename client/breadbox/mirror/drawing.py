"""Draw steps, fragments and episodes from a memory, and copy them into batches."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.batches import Prioritised, SequenceBatch, StepBatch
from breadbox.mirror.storage.columns import TREES, Columns
from breadbox.mirror.storage.index import NONE, Numbers
from breadbox.mirror.storage.step_storage import StepStorage
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox.model.trees import map_tree, rows
from breadbox.model.types import Device
from breadbox.reading.devices import tensor_of

GoalStrategy = Literal["future", "final", "episode"]
"""Step of the episode that a step's goal is taken from: its achieved goal."""
Relabel = Callable[[Any, Any, Tree], Any]
"""Function from achieved goals, desired goals and extras to rewards."""
ACHIEVED = "achieved_goal"
DESIRED = "desired_goal"

_DRAWS_MAX: Final = 1000
"""Failed draws after which nothing can be drawn."""
RewardMap = Callable[[NDArray[np.float32]], NDArray[Any]]
"""Function from rewards to the same number of rewards."""


class Draws:
    """Choose steps to draw, under the lock of the storage."""

    def __init__(self, held: StepStorage, rng: np.random.Generator) -> None:
        self.rng = rng
        self._held = held

    def steps(self, count: int) -> Numbers:
        """Draw steps uniformly, with replacement."""
        index = self._held.index
        low, high = index.low, index.high
        drawn = self.rng.integers(low, high, count)
        if not index.unusable_count:
            return drawn
        usable = self._held.columns.column("is_usable")
        for _ in range(_DRAWS_MAX):
            wrong = np.flatnonzero(~usable[self._held.rows(drawn)])
            if not len(wrong):
                return drawn
            drawn[wrong] = self.rng.integers(low, high, len(wrong))
        # Hardly any step can be drawn: find those that can.
        every = low + np.flatnonzero(usable[self._held.kept_rows()])
        if not len(every):
            raise InvalidRequestError("batch_size", "finds no step to sample; see wait_until")
        drawn[wrong] = self.rng.choice(every, len(wrong))
        return drawn

    def by_priority(
        self, count: int, prioritised: Prioritised
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """Draw steps in proportion to their priorities, with replacement."""
        tree = self._held.tree(prioritised.alpha)
        total = tree.total
        if total <= 0.0:
            raise InvalidRequestError("prioritised", "finds all priorities 0: there is no draw")
        positions = tree.draw(self.rng.random(count))
        share = tree.weights(positions) / total * self._held.index.usable_count
        weight = share**-prioritised.beta
        low = self._held.index.low
        numbers = low + self._held.rows(positions - low)
        return numbers, (weight / weight.max()).astype(np.float32)

    def fragments(
        self, count: int, prioritised: Prioritised | Literal[False]
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """Draw fragments with a kept first step and a known recurrent state."""
        index = self._held.index
        fragments, states = index.fragments, index.states
        assert states is not None
        drawn = np.full(count, NONE, dtype=np.int64)
        left = np.arange(count)
        for _ in range(_DRAWS_MAX):
            if prioritised:
                steps, _ = self.by_priority(len(left), prioritised)
                found = self._held.columns.column("fragment")[self._held.rows(steps)]
            else:
                found = self.rng.integers(index.fragment_low, fragments.end, len(left))
            fits = fragments.get("start", found) >= index.low
            fits &= states.has(found)
            drawn[left[fits]] = found[fits]
            left = left[~fits]
            if not len(left):
                return drawn, self._weights_of(drawn, prioritised)
        raise InvalidRequestError("batch_size", "finds no fragment with its recurrent state")

    def _weights_of(
        self, drawn: Numbers, prioritised: Prioritised | Literal[False]
    ) -> NDArray[np.float32]:
        if not prioritised:
            return np.ones(len(drawn), np.float32)
        index, tree = self._held.index, self._held.tree(prioritised.alpha)
        sums = np.empty(len(drawn))
        for place, number in enumerate(drawn.tolist()):
            steps = np.arange(index.fragments.get("start", number), index.end_of(number))
            sums[place] = tree.weights(self._held.rows(steps)).sum()
        weight = (sums / tree.total * index.state_count) ** -prioritised.beta
        normalised: NDArray[np.float32] = (weight / weight.max()).astype(np.float32)
        return normalised

    def whole_episodes(self, count: int) -> tuple[Numbers, Numbers]:
        """Draw whole episodes uniformly; return the first step number and the length of each."""
        whole, episodes = self._whole(), self._held.index.episodes
        drawn = whole[self.rng.integers(len(whole), size=count)]
        return episodes.get("start", drawn), episodes.get("count", drawn)

    def steps_of_whole_episodes(self, count: int) -> Numbers:
        """Draw steps of whole episodes, uniformly."""
        whole, episodes = self._whole(), self._held.index.episodes
        ends = np.cumsum(episodes.get("count", whole))
        points = self.rng.integers(ends[-1], size=count)
        found = np.searchsorted(ends, points, side="right")
        starts = episodes.get("start", whole[found])
        offsets = points - (ends[found] - episodes.get("count", whole[found]))
        drawn, _ = self.onwards(starts, offsets[:, None])
        return drawn[:, 0]

    def _whole(self) -> Numbers:
        whole = self._held.index.whole_episodes()
        if not len(whole):
            raise InvalidRequestError("count", "finds no whole episode")
        return whole

    def window(self, starts: Numbers, length: int) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return numbers [B, length] of the steps from each start on; see `StepIndex.onwards`."""
        return self.onwards(starts, np.broadcast_to(np.arange(length), (len(starts), length)))

    def onwards(self, starts: Numbers, offsets: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return numbers [B, L] of the steps at offsets from starts; see `StepIndex.onwards`."""
        owners = self._held.columns.column("fragment")[self._held.rows(starts)]
        return self._held.index.onwards(starts, owners, offsets)

    def windows_at(
        self,
        starts: Numbers,
        n_step: int,
        gamma: float,
        weight: NDArray[np.float32],
        device: Device | None = None,
        reward_map: RewardMap | None = None,
    ) -> Callable[[], StepBatch]:
        """Look up the windows that begin at some steps; return a function that copies them."""
        columns, count = self._held.columns, len(starts)
        rows = self._held.rows(starts)
        if n_step == 1 and reward_map is None:
            discount = np.full(count, gamma, np.float32)
            return lambda: step_batch(columns, rows, rows, discount, weight, device)
        numbers, mask = self.window(starts, n_step)
        window = self._held.rows(numbers)
        ended = columns.column("terminated")[window] | columns.column("truncated")[window]
        mask[:, 1:] &= columns.column("is_usable")[window[:, 1:]] & ~ended[:, :-1]
        mask = np.logical_and.accumulate(mask, axis=1)
        lengths = mask.sum(axis=1)
        last = window[np.arange(count), lengths - 1]
        powers = np.power(gamma, np.arange(n_step + 1), dtype=np.float64)
        rewards = columns.column("reward")[window]
        rewards = np.where(mask, rewards if reward_map is None else reward_map(rewards), 0.0)
        returns = (rewards * powers[:-1]).sum(axis=1).astype(np.float32)
        discount = powers[lengths].astype(np.float32)
        return lambda: step_batch(
            columns, rows, last, discount, weight, device, returns=returns, lengths=lengths
        )


def relabelled_with(batch: StepBatch, reached: Tree, relabel: Relabel) -> StepBatch:
    """Replace the goals of a batch's first steps by *reached* ones, and rewards by *relabel*'s."""
    if not isinstance(batch.obs, dict) or not {ACHIEVED, DESIRED} <= batch.obs.keys():
        raise InvalidRequestError("obs", f"must be a dict with {ACHIEVED!r} and {DESIRED!r}")
    count = len(reached[ACHIEVED])
    goals, kept = reached[ACHIEVED], batch.obs[DESIRED]
    if goals.shape[1:] != kept.shape[1:] or not np.can_cast(goals.dtype, kept.dtype, "same_kind"):
        wanted, got = (f"{each.dtype}{[*each.shape[1:]]}" for each in (kept, goals))
        raise InvalidRequestError("obs", f"has {DESIRED!r} {wanted} and {ACHIEVED!r} {got}")
    goals = goals.astype(kept.dtype, copy=False)
    obs, next_obs = dict(batch.obs), dict(batch.next_obs)
    for tree in (obs, next_obs):
        tree[DESIRED] = np.concatenate([goals, tree[DESIRED][count:]])
    rewards = np.asarray(
        relabel(next_obs[ACHIEVED][:count], goals, rows(batch.extras, 0, count)), np.float32
    )
    if rewards.shape != (count,):
        raise InvalidRequestError(
            "relabel", f"must return float32[{count}], returned {[*rewards.shape]}"
        )
    reward = np.concatenate([rewards, batch.reward[count:]])
    return replace(batch, obs=obs, next_obs=next_obs, reward=reward)


def step_batch(
    columns: Columns,
    first: Numbers,
    last: Numbers,
    discount: NDArray[np.float32],
    weight: NDArray[np.float32],
    device: Device | None,
    *,
    returns: NDArray[np.float32] | None = None,
    lengths: NDArray[np.int64] | None = None,
) -> StepBatch:
    """Copy steps: observation and action from first rows, next observation from last rows.

    Windows of several steps have their `returns` and `lengths`.
    """
    field = columns.field
    leaf: Callable[[Any], Any] = (
        partial(tensor_of, device=device) if device is not None else lambda array: array
    )
    begun = columns.gather(first, leaf)
    done = begun if last is first else columns.gather(last, leaf)
    return StepBatch(
        reward=field(begun, "reward") if returns is None else leaf(returns),
        next_obs=columns.next_obs(done),
        terminated=field(done, "terminated"),
        truncated=field(done, "truncated"),
        discount=leaf(discount),
        weight=leaf(weight),
        window_length=None if lengths is None else leaf(lengths),
        **{name: field(begun, name) for name in ("handle", "episode_id", "model_version")},
        **{name: columns.tree(name, begun) for name in TREES},
    )


def sequence_batch(
    columns: Columns,
    rows: Numbers,
    mask: NDArray[np.bool_],
    burn_in: int,
    state: Tree,
    weight: NDArray[np.float32],
) -> SequenceBatch:
    """Copy sequences of steps [B, L], with zeros where there is no step."""
    gathered = columns.gather(rows)
    is_short = not mask.all()
    obs, next_obs = columns.tree("obs", gathered), columns.next_obs(gathered)
    handle = columns.field(gathered, "handle")
    if is_short:
        # Empty the frames first: finding them needs the rows, which are emptied next.
        for tree in (obs, next_obs):
            map_tree(lambda leaf: operator.setitem(leaf, ~mask, 0), tree)
        gathered.records[~mask] = 0
        handle[~mask] = NONE
    fields = ("reward", "terminated", "truncated", "first", "model_version")
    return SequenceBatch(
        obs=obs,
        next_obs=next_obs,
        mask=mask,
        is_burn_in=np.arange(mask.shape[1]) < burn_in,
        in_state=state,
        weight=weight,
        handle=handle,
        **{name: columns.field(gathered, name) for name in fields},
        **{name: columns.tree(name, gathered) for name in TREES if name != "obs"},
    )
