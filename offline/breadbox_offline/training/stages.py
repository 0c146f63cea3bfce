"""The stages of the default pipeline, and a few that algorithms add."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox.writing.advantages import estimate_advantages
from breadbox_offline.decoding.rows import stack
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import OfflineDataError, SamplingError
from breadbox_offline.rows.options import Column
from breadbox_offline.training.pipeline import (
    DEFAULT_MODULE,
    Draft,
    Pipeline,
    PipelineContext,
    RowSpan,
    Stage,
)

if TYPE_CHECKING:
    import torch

STATE_IN = "state_in"
STATE_OUT = "state_out"
NEXT_STATE_IN = "next_state_in"
SEQ_LENS = "seq_lens"
LOSS_MASK = "loss_mask"
RETURNS_TO_GO = "returns_to_go"
ADVANTAGES = "advantages"
VALUE_TARGETS = "value_targets"


def default_pipeline(*, next_observations: bool = True, tensors: bool = True) -> Pipeline:
    """Return the usual stages; `next_observations` adds `new_obs`, `tensors` ends in torch."""
    stages: list[tuple[str, Stage]] = [("observations", add_observations)]
    if next_observations:
        stages.append(("next_observations", add_next_observations))
    stages += [
        ("columns", add_columns),
        ("rows", cut_rows),
        ("states", add_states),
        ("modules", map_agents_to_modules),
        ("batch", batch_items),
    ]
    if tensors:
        stages.append(("tensors", convert_to_tensors))
    return Pipeline(stages)


def add_observations(draft: Draft, _context: PipelineContext) -> None:
    """Add `obs`: the observation before each step."""
    draft.columns.setdefault(
        Column.OBS, [trees.rows(e.observations, e.lookback, -1) for e in draft.episodes]
    )


def add_next_observations(draft: Draft, _context: PipelineContext) -> None:
    """Add `new_obs`: the observation after each step."""
    draft.columns.setdefault(
        Column.NEW_OBS, [trees.rows(e.observations, e.lookback + 1, None) for e in draft.episodes]
    )


def add_columns(draft: Draft, _context: PipelineContext) -> None:
    """Add `actions`, `rewards`, end flags, and extra model outputs that all episodes have."""
    episodes, columns = draft.episodes, draft.columns
    columns.setdefault(Column.ACTIONS, [episode.own_actions() for episode in episodes])
    rewards = [episode.own_rewards() for episode in episodes]
    columns.setdefault(
        Column.REWARDS,
        [each if each.dtype.kind == "f" else each.astype(np.float32) for each in rewards],
    )
    columns.setdefault(
        Column.TERMINATEDS, [_flag_at(len(e), len(e) - 1, e.terminated) for e in episodes]
    )
    columns.setdefault(
        Column.TRUNCATEDS, [_flag_at(len(e), len(e) - 1, e.truncated) for e in episodes]
    )
    extras = [episode.own_extra_model_outputs() for episode in episodes]
    for name in extras[0] if extras else ():
        if name not in (STATE_IN, STATE_OUT) and all(name in each for each in extras):
            columns.setdefault(name, [each[name] for each in extras])


def cut_rows(draft: Draft, context: PipelineContext) -> None:
    """For recurrent modules: cut every episode into rows of `row_length` steps."""
    if not context.is_stateful or draft.rows is not None:
        return
    if context.row_length < 1:
        raise SamplingError("a recurrent module needs row_length (max_seq_len) of at least 1")
    draft.row_length = context.row_length
    draft.rows = [
        RowSpan(index, start, min(start + context.row_length, len(episode)))
        for index, episode in enumerate(draft.episodes)
        for start in range(0, len(episode), context.row_length)
    ]


def add_states(draft: Draft, context: PipelineContext) -> None:
    """Add `state_in`, and `next_state_in` beside `new_obs`: the recorded or initial state."""
    if draft.rows is None or STATE_IN in draft.row_columns:
        return
    map_agents_to_modules(draft, context)
    modules = draft.modules or []

    def states(offset: int) -> list[Tree]:
        found = []
        for row in draft.rows or []:
            state = recorded_state(draft.episodes[row.episode], row.start + offset)
            found.append(context.initial_states[modules[row.episode]] if state is None else state)
        return found

    draft.row_columns[STATE_IN] = states(0)
    if Column.NEW_OBS in draft.columns:
        draft.row_columns[NEXT_STATE_IN] = states(1)


def map_agents_to_modules(draft: Draft, context: PipelineContext) -> None:
    """Choose each episode's module to train: its own, else the mapping's, else the default."""
    if draft.modules is not None:
        return
    draft.modules = [_module_of(episode, context) for episode in draft.episodes]


def batch_items(draft: Draft, context: PipelineContext) -> None:
    """Make one batch per module: steps concatenated, or rows padded with zeros and masked."""
    map_agents_to_modules(draft, context)
    members: dict[str, list[int]] = {}
    for index, module in enumerate(draft.modules or []):
        members.setdefault(module, []).append(index)
    for module, indices in members.items():
        if draft.rows is None:
            draft.batches[module] = {
                name: trees.concat([held[index] for index in indices])
                for name, held in draft.columns.items()
            }
        else:
            chosen = set(indices)
            numbers = [n for n, row in enumerate(draft.rows) if row.episode in chosen]
            draft.batches[module] = _pad_rows(draft, numbers, context)


def convert_to_tensors(draft: Draft, context: PipelineContext) -> None:
    """Convert to torch: float32, int64, text unchanged. Copies to CUDA do not block."""
    import torch

    device = torch.device(context.device)
    draft.batches = {
        module: {
            name: trees.map_tree(lambda leaf: _tensor(leaf, device), tree)
            for name, tree in batch.items()
        }
        for module, batch in draft.batches.items()
    }


def add_one_step(draft: Draft, _context: PipelineContext) -> None:
    """Add a bootstrap step to every episode, masked by `loss_mask`; goes before `observations`."""
    # The step repeats the last entries with reward 0; end flags stay on the last real step.
    originals = draft.episodes
    draft.episodes = [_with_one_step(episode) for episode in originals]
    draft.columns[Column.TERMINATEDS] = [
        _flag_at(len(e) + 1, len(e) - 1, e.terminated) for e in originals
    ]
    draft.columns[Column.TRUNCATEDS] = [
        _flag_at(len(e) + 1, len(e) - 1, e.truncated or not e.is_done) for e in originals
    ]
    draft.columns[LOSS_MASK] = [np.arange(len(e) + 1) < len(e) for e in originals]


def make_returns_to_go(discount: float) -> Stage:
    """Return a stage that adds `returns_to_go`: discounted sums of the rewards from a step on."""

    def add_returns_to_go(draft: Draft, _context: PipelineContext) -> None:
        draft.columns[RETURNS_TO_GO] = [
            returns_to_go(episode.own_rewards(), discount) for episode in draft.episodes
        ]

    return add_returns_to_go


def returns_to_go(rewards: NDArray[Any], discount: float) -> NDArray[np.float32]:
    """Return discounted sums of the rewards from each step on, summed in float64."""
    sums = np.empty(len(rewards))
    total = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        total = float(rewards[step]) + discount * total
        sums[step] = total
    return sums.astype(np.float32)


def make_advantages(discount: float, gae_lambda: float) -> Stage:
    """Return a stage adding `advantages` and `value_targets` by GAE; needs T + 1 `values`."""

    def add_advantages(draft: Draft, context: PipelineContext) -> None:
        if context.values is None:
            raise SamplingError("advantages need a value function in the context")
        estimated = _estimate(draft.episodes, context.values, discount, gae_lambda)
        draft.columns[ADVANTAGES] = [advantage for advantage, _ in estimated]
        draft.columns[VALUE_TARGETS] = [target for _, target in estimated]

    return add_advantages


def _estimate(
    episodes: Sequence[Episode],
    value_function: Callable[[Sequence[Episode]], Sequence[NDArray[Any]]],
    discount: float,
    gae_lambda: float,
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    values = value_function(episodes)
    counts = np.array([len(episode) for episode in episodes])
    shape = (len(episodes), int(counts.max()))
    value, reward, final = np.zeros(shape), np.zeros(shape), np.full(shape, np.nan)
    terminated, truncated = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    for row, (episode, held) in enumerate(zip(episodes, values, strict=True)):
        count = len(episode)
        if len(held) != count + 1:
            raise OfflineDataError(f"{len(held)} values for {count} steps; wanted {count + 1}")
        value[row, :count], reward[row, :count] = held[:count], episode.own_rewards()
        final[row, count - 1] = held[count]
        terminated[row, count - 1] = episode.terminated
        truncated[row, count - 1] = not episode.terminated
    estimated = estimate_advantages(
        value=value,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        final_value=final,
        next_value=np.zeros(len(episodes)),
        step_count=counts,
        discount=discount,
        gae_lambda=gae_lambda,
    )
    return [
        (estimated.advantage[row, :count], estimated.target[row, :count])
        for row, count in enumerate(counts.tolist())
    ]


def _flag_at(count: int, step: int, is_set: bool) -> NDArray[np.bool_]:
    flags: NDArray[np.bool_] = (np.arange(count) == step) & is_set
    return flags


def recorded_state(episode: Episode, step: int) -> Tree | None:
    """Return the state before a step, from the output of the one before or as recorded, or None."""
    out, into = (episode.extra_model_outputs.get(name) for name in (STATE_OUT, STATE_IN))
    place = episode.lookback + step
    if out is not None and place > 0:
        return trees.row(out, place - 1)
    if into is not None and place < len(episode.rewards):
        return trees.row(into, place)
    return episode.in_states.get(episode.t_started + step)


def _module_of(episode: Episode, context: PipelineContext) -> str:
    if episode.module_id is not None:
        return episode.module_id
    if episode.agent_id is None or context.module_of is None:
        return DEFAULT_MODULE
    if callable(context.module_of):
        return context.module_of(episode.agent_id)
    return context.module_of.get(episode.agent_id, DEFAULT_MODULE)


def _pad_rows(draft: Draft, numbers: list[int], context: PipelineContext) -> dict[str, Tree]:
    rows = [(draft.rows or [])[number] for number in numbers]
    batch = {name: _padded(held, rows, draft.row_length) for name, held in draft.columns.items()}
    lengths = np.array([row.stop - row.start for row in rows])
    steps = np.arange(draft.row_length)[None, :]
    real = steps < lengths[:, None]
    if context.burn_in:
        warming = np.array([draft.episodes[row.episode].t_started + row.start > 0 for row in rows])
        real &= ~(warming[:, None] & (steps < context.burn_in))
    batch[LOSS_MASK] = real & batch[LOSS_MASK] if LOSS_MASK in batch else real
    batch[SEQ_LENS] = lengths
    for name, states in draft.row_columns.items():
        batch[name] = stack([states[number] for number in numbers])
    return batch


def _padded(held: list[Tree], rows: list[RowSpan], length: int) -> Tree:
    def pad(*leaves: NDArray[Any]) -> NDArray[Any]:
        shape = (len(rows), length, *leaves[0].shape[1:])
        padded = np.zeros(shape, dtype=np.result_type(*{leaf.dtype for leaf in leaves}))
        for number, (row, leaf) in enumerate(zip(rows, leaves, strict=True)):
            padded[number, : row.stop - row.start] = leaf[row.start : row.stop]
        return padded

    chosen = [held[row.episode] for row in rows]
    return trees.map_tree(pad, chosen[0], *chosen[1:])


def _with_one_step(episode: Episode) -> Episode:
    def repeat_last(tree: Tree) -> Tree:
        return trees.concat([tree, trees.rows(tree, -1, None)])

    infos, times = episode.infos, episode.step_times
    return replace(
        episode,
        observations=repeat_last(episode.observations),
        actions=repeat_last(episode.actions),
        rewards=np.concatenate([episode.rewards, np.zeros(1, episode.rewards.dtype)]),
        infos=None if infos is None else [*infos, infos[-1]],
        extra_model_outputs={
            name: repeat_last(output) for name, output in episode.extra_model_outputs.items()
        },
        truncated=episode.truncated or not episode.is_done,
        step_times=None if times is None else np.append(times, times[-1] + 1),
    )


def _tensor(leaf: Any, device: "torch.device") -> Any:
    import torch

    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind in "OUSV":
        return leaf
    if leaf.dtype.kind == "f":
        leaf = leaf.astype(np.float32, copy=False)
    elif leaf.dtype.kind in "iu" and leaf.dtype != np.uint8:
        leaf = leaf.astype(np.int64, copy=False)
    if not leaf.flags.writeable or not leaf.flags.c_contiguous:
        leaf = leaf.copy()
    tensor = torch.from_numpy(leaf)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
