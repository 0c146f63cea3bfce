"""Behaviour cloning: train a policy to act like recorded episodes; an example of offline use."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import EpisodeBuffer
from breadbox_offline.episodes.sampling import StepSampling, epoch_positions, sample_steps
from breadbox_offline.errors import SamplingError
from breadbox_offline.rows.options import Column
from breadbox_offline.training.pipeline import DEFAULT_MODULE, PipelineContext
from breadbox_offline.training.prefetch import Prefetcher
from breadbox_offline.training.stages import default_pipeline
from breadbox_policies import PolicyModule


@dataclass(frozen=True, slots=True, kw_only=True)
class CloningConfig:
    """Settings of cloning."""

    epochs: int = 10
    """Passes over all recorded steps."""
    batch_size: int = 256
    """Steps of one gradient update."""
    lr: float = 1e-3
    """Adam's step size."""
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class CloningResult:
    """Numbers and losses of cloning."""

    episode_count: int
    step_count: int
    losses: tuple[float, ...]
    """Mean negative log-probability of the recorded actions, by epoch."""


def clone_policy(
    policy: PolicyModule, episodes: Iterable[Episode], config: CloningConfig | None = None
) -> CloningResult:
    """Train a feed-forward policy, in place, to give recorded actions high probability.

    Args:
        policy: A policy of `breadbox_policies.make_policy`, on the config's device.
        episodes: Validated ones, such as `Dataset.episodes()`, all held in memory. SamplingError
            without any.
        config: Settings, or None for the defaults.
    """
    config = config or CloningConfig()
    held = list(episodes)
    if not held:
        raise SamplingError("there is no episode to clone")
    buffer = EpisodeBuffer(sum(len(episode) for episode in held), seed=config.seed)
    buffer.add_all(held)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)
    losses = tuple(_train_epoch(policy, optimizer, buffer, config) for _ in range(config.epochs))
    return CloningResult(len(held), buffer.step_count, losses)


def _train_epoch(
    policy: PolicyModule,
    optimizer: torch.optim.Optimizer,
    buffer: EpisodeBuffer,
    config: CloningConfig,
) -> float:
    pipeline = default_pipeline(next_observations=False)
    context = PipelineContext(device=config.device)
    sampling = StepSampling(with_discount=False)
    shares = epoch_positions(buffer, config.batch_size)
    batches = (
        pipeline(sample_steps(buffer, len(share), sampling, positions=share), context)
        for share in shares
    )
    total = 0.0
    with Prefetcher(batches) as drafts:
        for draft in drafts:
            loss = _negative_log_likelihood(policy, draft.batches[DEFAULT_MODULE])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
    return total / len(shares)


def _negative_log_likelihood(policy: PolicyModule, batch: dict[str, Tree]) -> torch.Tensor:
    """Return the batch's mean; every step is a sequence of one that starts an episode."""
    size = len(batch[Column.REWARDS])
    first = torch.ones((size, 1), dtype=torch.bool, device=batch[Column.REWARDS].device)
    obs, action = (
        trees.map_tree(lambda leaf: leaf[:, None], batch[name])
        for name in (Column.OBS, Column.ACTIONS)
    )
    evaluation = policy.evaluate(obs, action, policy.initial_state(size), first)
    return -evaluation.log_prob.mean()
