"""Steps of which every array says which step it is, and a check of what is drawn of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from breadbox.mirror import StepMemory
from breadbox.model.fragment import Fragment
from support.fragments import vector_fragment

DEPTH = 4
STEPS = 16
EPISODE = 5
WIDTH = 300


def told_fragment(index: int, *, has_frames: bool) -> Fragment:
    """Sixteen steps in episodes of five, with a recurrent state that is their fragment's index."""
    numbers = np.arange(index * STEPS, (index + 1) * STEPS + 1)
    stacks = numbers[:, None] + np.arange(-DEPTH + 1, 1)
    obs = np.broadcast_to(stacks[:, :, None], (*stacks.shape, WIDTH)).astype(np.int32)
    ended = numbers[:-1] % EPISODE == EPISODE - 1
    final = obs[1:][ended]
    return replace(
        vector_fragment(index, step_count=STEPS),
        obs=obs[:-1] if has_frames else obs[:-1, -1, :4],
        next_obs=obs[-1] if has_frames else obs[-1, -1, :4],
        final_obs=final if has_frames else final[:, -1, :4],
        final_obs_step=ended.nonzero()[0].astype(np.int32),
        terminated=ended,
        first=numbers[:-1] % EPISODE == 0,
        episode_id=numbers[:-1] // EPISODE,
        action=numbers[:-1],
        in_state={"h": np.full(2, index, np.int64)},
    )


def problems_of(memory: StepMemory, rng: np.random.Generator) -> list[str]:
    """Draw in one of all ways; returns what does not fit together in it."""
    kind = rng.choice(["steps", "prioritised", "sequences", "episodes", "handles"])
    if kind in ("steps", "prioritised"):
        batch = memory.sample(32, n_step=2, prioritised=kind == "prioritised")
        return _problems(batch, 2)
    if kind == "episodes":
        return [
            problem
            for batch in memory.sample_episodes(3)
            for problem in _problems(batch, 1) + _unless(len(batch) == EPISODE, len(batch))
        ]
    if kind == "handles":
        every = memory.handles()
        if not len(every):
            return []
        handles = rng.choice(every, 32)
        told = 1.0 / (1 + handles % 97)
        memory.update_priorities(handles, told)
        kept = memory.priorities(handles)
        return _unless((np.isnan(kept) | (kept == told)).all(), handles, kept)
    sequences = memory.sample_sequences(8, length=24)
    shown = sequences.obs.reshape(8, 24, -1)[..., -1]
    steps = sequences.in_state["h"][:, :1] * STEPS + np.arange(24)
    right = (shown == steps) & (sequences.action == steps) & (_numbers(sequences.handle) == steps)
    return _unless((right | ~sequences.mask).all(), shown, sequences.in_state)


def _problems(batch: Any, n_step: int) -> list[str]:
    rows = len(batch)
    shown = batch.obs.reshape(rows, -1)[:, -1]
    later = batch.next_obs.reshape(rows, -1)[:, -1]
    is_two = (shown % EPISODE != EPISODE - 1) & (n_step == 2)
    newest = ~is_two | (later == shown + 2) | (batch.discount > 0.985)
    return _unless(
        (shown == batch.action).all()
        and ((later == shown + 1) | (is_two & (later == shown + 2))).all()
        and newest.all()
        and (_numbers(batch.handle) == shown).all()
        and (batch.episode_id == shown // EPISODE).all()
        and (np.ptp(batch.obs.reshape(rows, -1, batch.obs.shape[-1]), -1) == 0).all(),
        shown,
        batch.action,
        later,
        batch.handle,
    )


def _numbers(handles: Any) -> Any:
    return (handles >> 24) * STEPS + (handles & 0xFFFFFF)


def _unless(is_right: Any, *told: Any) -> list[str]:
    return [] if is_right else [" ".join(str(each) for each in told)]
