"""Draw training samples from an `EpisodeBuffer`: steps, sequences, rows. Every draw ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding.rows import pick_pair, stack
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import EpisodeBuffer, HeldStep
from breadbox_offline.errors import SamplingError

N_STEP = "n_step"
WEIGHTS = "weights"
MOMENT = "moment"
DISCOUNT = "discount"
_REDRAWS_MAX = 16


class ShortWindow(Enum):
    """How a sequence that starts near the end of its episode is handled."""

    SHORTEN = "shorten"
    """It ends with the episode."""
    SHIFT = "shift"
    """It starts earlier, so that it is full unless the episode is shorter than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """How single steps are drawn; raises `SamplingError` for numbers out of range."""

    n_step: int | tuple[int, int] = 1
    """Steps summed into one, or a range [low, high) to draw their number from for every item."""
    discount: float = 0.99
    """Per step, 0 to 1; used when several are summed."""
    with_discount: bool = True
    """Add the column `discount`: factor of the value after the item, 0 if it is terminated."""
    with_extras: bool = False
    """Keep the extra model outputs of the first step."""
    with_infos: bool = False
    """Keep the infos of both observations."""

    def __post_init__(self) -> None:
        low, high = self.n_step_range
        if low < 1 or high <= low:
            raise SamplingError(f"n_step must be at least 1, or a range [low, high); {self.n_step}")
        if not 0.0 <= self.discount <= 1.0:
            raise SamplingError(f"discount must be between 0 and 1, got {self.discount}")

    @property
    def n_step_range(self) -> tuple[int, int]:
        """Lowest n, and the number above the highest."""
        return (self.n_step, self.n_step + 1) if isinstance(self.n_step, int) else self.n_step

    def powers(self) -> NDArray[Any]:
        """Return the powers of the discount from 0 to the largest n."""
        return self.discount ** np.arange(self.n_step_range[1])


def sample_steps(
    buffer: EpisodeBuffer,
    count: int,
    sampling: StepSampling | None = None,
    *,
    positions: NDArray[np.int64] | None = None,
) -> list[Episode]:
    """Draw exactly `count` items, each an episode of one step.

        An item that starts at step t and sums n steps leads from o_t to o_(t+n). Near the end of
        an episode fewer steps are summed; the item has the end flags, and the column `n_step` says
        how many. Raises SamplingError if the buffer is empty or `count` is below 1.

    Args:
        buffer: Buffer to draw from.
        count: Number of items; uniform over all held steps, with replacement.
        sampling: How to draw, or None for single steps.
        positions: Positions of `count` steps to return instead, such as an epoch's share.
    """
    sampling = sampling or StepSampling()
    _check_steps(buffer, count)
    positions = _draw(buffer, count, positions, buffer.step_count)
    lengths = _draw_lengths(buffer, count, sampling)
    powers = sampling.powers()
    buffer.counters.sampled_step_count += count
    return [
        _sum_steps(held, n, powers, sampling)
        for held, n in zip(buffer.held_steps(positions), lengths, strict=True)
    ]


def _check_steps(buffer: EpisodeBuffer, count: int) -> None:
    if count < 1:
        raise SamplingError(f"at least 1 item must be drawn, got {count}")
    if not buffer.step_count:
        raise SamplingError("the episode buffer is empty: nothing can be drawn")


def _draw(
    buffer: EpisodeBuffer, count: int, positions: NDArray[np.int64] | None, held_count: int
) -> NDArray[np.int64]:
    if positions is None:
        return buffer.draws.steps(count, held_count)
    if len(positions) != count:
        raise SamplingError(f"{len(positions)} positions for {count} items")
    return positions


def _draw_lengths(buffer: EpisodeBuffer, count: int, sampling: StepSampling) -> list[int]:
    low, high = sampling.n_step_range
    return [low] * count if high - low == 1 else buffer.draws.lengths(count, low, high).tolist()


def _sum_steps(held: HeldStep, n: int, powers: NDArray[Any], sampling: StepSampling) -> Episode:
    episode, step = held.episode, held.step
    n = min(n, len(episode) - step)
    low = episode.lookback + step
    is_end = step + n == len(episode)
    terminated = episode.terminated and is_end
    extras: dict[str, Tree] = {}
    if sampling.with_extras:
        extras = {
            name: trees.rows(output, low, low + 1)
            for name, output in episode.extra_model_outputs.items()
        }
    extras[N_STEP] = np.array([n])
    extras[WEIGHTS] = np.ones(1)
    if sampling.with_discount:
        extras[DISCOUNT] = np.array([0.0 if terminated else powers[1] ** n])
    infos = episode.infos if sampling.with_infos else None
    return Episode(
        id=episode.id,
        agent_id=episode.agent_id,
        module_id=episode.module_id,
        observations=pick_pair(episode.observations, low, low + n),
        actions=trees.rows(episode.actions, low, low + 1),
        rewards=_discounted_sum(episode.rewards[low : low + n], powers),
        terminated=terminated,
        truncated=episode.truncated and is_end,
        t_started=episode.t_started + step,
        infos=None if infos is None else [infos[low], infos[low + n]],
        extra_model_outputs=extras,
    )


def _discounted_sum(rewards: NDArray[Any], powers: NDArray[Any]) -> NDArray[Any]:
    if len(rewards) == 1:
        return rewards
    dtype = rewards.dtype if rewards.dtype.kind == "f" else np.dtype(np.float64)
    return np.array([powers[: len(rewards)] @ rewards.astype(np.float64)], dtype=dtype)


def sample_moments(
    buffer: EpisodeBuffer,
    count: int,
    sampling: StepSampling | None = None,
    *,
    positions: NDArray[np.int64] | None = None,
) -> list[list[Episode]]:
    """Draw exactly `count` moments, each with an item of every agent that acted in it.

    A moment is an environment step of one episode. An item is an episode of one step, like those of
    `sample_steps`; its `t_started` is the moment's environment step. If several steps are summed,
    they are the agent's own next ones, at whatever times it acted. All items of a moment sum the
    same number of steps, except near an agent's end. The column `moment` numbers the draws from 0,
    so that rows of different agents can be matched. Raises SamplingError if the buffer is empty, or
    `count` is below 1 or not the number of positions.

    Args:
        buffer: Buffer to draw from.
        count: Number of moments; uniform over all held ones, with replacement.
        sampling: How to draw, or None for single steps.
        positions: `count` numbers below `buffer.moment_count` of moments to return instead.
    """
    sampling = sampling or StepSampling()
    _check_steps(buffer, count)
    positions = _draw(buffer, count, positions, buffer.moment_count)
    lengths = _draw_lengths(buffer, count, sampling)
    powers = sampling.powers()
    drawn: list[list[Episode]] = []
    for moment, n in zip(buffer.moments(positions), lengths, strict=True):
        items = [_sum_steps(held, n, powers, sampling) for held in moment.steps]
        for item in items:
            item.t_started = moment.time
            item.extra_model_outputs[MOMENT] = np.array([len(drawn)])
        buffer.counters.sampled_step_count += len(items)
        drawn.append(items)
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSampling:
    """How sequences are drawn; raises `SamplingError` for numbers out of range."""

    length: int
    """Steps of a full sequence."""
    lookback: int = 0
    """Earlier steps kept as context; fewer at the start of an episode."""
    start_margin: int = 0
    """Steps that must follow the first one in its episode, for a burn-in."""
    short_window: ShortWindow = ShortWindow.SHORTEN
    n_step: int = 1
    """Must be 1: sequences are of single steps."""

    def __post_init__(self) -> None:
        if self.n_step != 1:
            raise SamplingError(f"sequences are of single steps: n_step must be 1, {self.n_step}")
        if self.length < 1 or self.lookback < 0 or self.start_margin < 0:
            raise SamplingError(f"lengths must not be negative: {self}")


def sample_sequences(
    buffer: EpisodeBuffer, step_count: int, sampling: SequenceSampling
) -> list[Episode]:
    """Draw slices of episodes with `step_count` steps in all; the last slice is cut to fit.

    Raises SamplingError for an empty buffer, `step_count` below 1, or only episodes that are
    shorter than the start margin.
    """
    _check_steps(buffer, step_count)
    sequences: list[Episode] = []
    missing = step_count
    while missing > 0:
        held = _draw_start(buffer, sampling.start_margin)
        length = min(sampling.length, missing)
        start = held.step
        if sampling.short_window is ShortWindow.SHIFT:
            start = max(0, min(start, len(held.episode) - length))
        stop = min(start + length, len(held.episode))
        sequences.append(_with_weights(held.episode.slice(start, stop, lookback=sampling.lookback)))
        missing -= stop - start
    buffer.counters.sampled_step_count += step_count
    return sequences


def _draw_start(buffer: EpisodeBuffer, margin: int) -> HeldStep:
    for _ in range(_REDRAWS_MAX):
        held = buffer.held_steps(buffer.draws.steps(1, buffer.step_count))[0]
        if held.step + margin < len(held.episode):
            return held
        buffer.counters.redrawn_count += 1
    return _draw_among_usable(buffer, margin)


def _draw_among_usable(buffer: EpisodeBuffer, margin: int) -> HeldStep:
    """Draw uniformly over the steps that enough others follow, by going through every episode."""
    episodes = buffer.episodes()
    usable = np.array([max(0, len(episode) - margin) for episode in episodes])
    ends = np.cumsum(usable)
    if not ends[-1]:
        raise SamplingError(f"no held episode has more than {margin} steps")
    position = int(buffer.draws.steps(1, int(ends[-1]))[0])
    number = int(np.searchsorted(ends, position, side="right"))
    return HeldStep(episodes[number], position - int(ends[number] - usable[number]))


def _with_weights(sequence: Episode) -> Episode:
    count = len(sequence.rewards)
    sequence.extra_model_outputs[N_STEP] = np.ones(count, dtype=np.int64)
    sequence.extra_model_outputs[WEIGHTS] = np.ones(count)
    return sequence


def sample_rows(buffer: EpisodeBuffer, row_count: int, length: int) -> dict[str, Tree]:
    """Draw a batch of rows of exactly `length` slots, without padding.

    An episode of k steps fills k + 1 slots: its observations, the action taken there (for the last
    observation the last action again) and the reward that led there (0 for the first). After an
    episode's end a row continues with another episode's start. `is_last` also marks where a row is
    cut. Raises SamplingError if the buffer is empty or a number is below 1.
    """
    if length < 1:
        raise SamplingError(f"rows must have at least 1 slot, got {length}")
    _check_steps(buffer, row_count)
    rows = [_fill_row(buffer, length) for _ in range(row_count)]
    buffer.counters.sampled_step_count += row_count * length
    return {name: stack([row[name] for row in rows]) for name in rows[0]}


def _fill_row(buffer: EpisodeBuffer, length: int) -> dict[str, Tree]:
    parts: list[dict[str, Tree]] = []
    filled = 0
    while filled < length:
        held = buffer.held_steps(buffer.draws.steps(1, buffer.step_count))[0]
        start = 0 if parts else held.step
        part = _slots(held.episode, start, min(start + length - filled, len(held.episode) + 1))
        parts.append(part)
        filled += len(part["rewards"])
    return {name: trees.concat([part[name] for part in parts]) for name in parts[0]}


def _slots(episode: Episode, start: int, stop: int) -> dict[str, Tree]:
    slots = np.arange(start, stop)
    last = len(episode)
    reached = slots == last
    led_here = np.concatenate([np.zeros(1, episode.rewards.dtype), episode.own_rewards()])
    is_first = slots == 0
    is_first[0] = True
    is_last = reached.copy()
    is_last[-1] = True
    return {
        "obs": trees.rows(episode.own_observations(), start, stop),
        "actions": trees.take(episode.own_actions(), np.minimum(slots, last - 1)),
        "rewards": led_here[start:stop],
        "is_first": is_first,
        "is_last": is_last,
        "is_terminated": reached & episode.terminated,
        "is_truncated": reached & episode.truncated,
    }


def epoch_positions(buffer: EpisodeBuffer, count: int) -> Sequence[NDArray[np.int64]]:
    """Return every held step once, shuffled, in shares of `count`; the last may be smaller."""
    order = buffer.draws.order(buffer.step_count)
    return [order[start : start + count] for start in range(0, len(order), count)]
