"""Make one PPO update on a batch of fragments that may be a few versions old.

The clip keeps the policy near the *proximal* one, the learner's policy before the update. A bounded
importance weight corrects for the policy that *acted*. With fresh data this is plain PPO.

A minibatch has single steps, drawn from all fragments, because consecutive steps are alike. A
policy with memory needs them in order: it gets whole fragments. The states that these begin with
are of the policies that acted; a burn-in makes newer ones of them.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import Tree, leaves, map_tree
from breadbox.writing.advantages import VTrace, estimate_advantages_torch, find_successors
from breadbox_learner.ranks import Ranks
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.batching import TrainingBatch, extend
from breadbox_learner.training.rewards import RewardScale
from breadbox_policies import Evaluation, PolicyModule

EPSILON = 1e-8
AMP_DTYPES = {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class UpdateStatistics:
    """Means over the gradient steps of one update, on this rank."""

    policy_loss: float
    value_loss: float
    entropy: float
    kl: float
    """Divergence of the trained from the proximal policy, in nats."""
    reference_kl: float
    clip_fraction: float
    """Share of steps without a gradient because of the clip."""
    staleness_weight: float
    """Mean importance weight of proximal to acting policy; 1 for fresh data."""
    gradient_norm: float
    explained_variance: float
    """Share of the targets' variance that the value explained before the update."""
    learning_rate: float
    clip: float
    entropy_coefficient: float
    gradient_steps: int
    skipped_steps: int
    """Number of gradient steps left out because the gradient was not finite."""


@dataclass(slots=True)
class _Prepared:
    """A batch, and values that are constant during an update; tensors [B, T - burn_in_steps]."""

    batch: TrainingBatch
    proximal_log_prob: Tensor
    old_value: Tensor
    advantage: Tensor
    target: Tensor
    weight: Tensor
    reference_log_prob: Tensor | None


class Evaluator(nn.Module):
    """A policy's `evaluate` as a `forward`, which data-parallel modules call.

    The first *burn_in_steps* only make the state that the others begin with, without a gradient
    (stored state and burn-in of R2D2, Kapturowski et al. 2019).
    """

    def __init__(self, policy: PolicyModule, burn_in_steps: int = 0) -> None:
        super().__init__()
        self.policy = policy
        self._burn_in = burn_in_steps

    def forward(self, obs: Tree, action: Tree, state: Tree, first: Tensor) -> tuple[Tensor, ...]:
        """Return log-probability, entropy and value, float32[B, T - burn_in_steps] each."""
        if self._burn_in:
            steps = obs, action, first
            early, late = (
                [map_tree(lambda leaf, part=part: leaf[:, part], tree) for tree in steps]
                for part in (slice(0, self._burn_in), slice(self._burn_in, None))
            )
            with torch.no_grad():
                state = self.policy.evaluate(early[0], early[1], state, early[2]).state
            obs, action, first = late
        evaluation: Evaluation = self.policy.evaluate(obs, action, state, first)
        return evaluation.log_prob.float(), evaluation.entropy.float(), evaluation.value.float()


def check_burn_in(policy: PolicyModule, steps: int) -> None:
    """Raise InvalidRequestError if there are *steps* for a state that the policy does not have."""
    if steps and policy.initial_state(1) is None:
        raise InvalidRequestError("burn_in_steps", "is for a policy with memory, such as 'lstm'")


class PpoUpdater:
    """Train a policy in place; seed, rank and number determine minibatches. Not thread-safe."""

    def __init__(
        self,
        policy: PolicyModule,
        config: PpoConfig,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        reference: PolicyModule | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if config.kl_coefficient and reference is None:
            raise ValueError("kl_coefficient needs a reference policy")
        check_burn_in(policy, config.burn_in_steps)
        self.policy = policy
        self.config = config
        self.device = torch.device(device)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr.start, eps=1e-5)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "float16")
        self._seed = seed
        self._order = torch.Generator()
        self._ranks: Ranks = ranks or Ranks()
        self._evaluator = self._ranks.shared(Evaluator(policy, config.burn_in_steps), self.device)
        self._reference_evaluator = (
            None if reference is None else Evaluator(reference, config.burn_in_steps).eval()
        )
        self.rewards = RewardScale(config.discount, config.reward_clip, self._ranks)

    def update(
        self,
        batch: TrainingBatch,
        *,
        number: int = 0,
        environment_steps: int = 0,
        train_policy: bool = True,
    ) -> UpdateStatistics:
        """Train on at least one fragment, as many on all ranks.

        Schedules go by `number`, of earlier updates, and `environment_steps`, equal on all ranks.
        """
        self._set_out(number, environment_steps)
        batch = batch.to(self.device)
        self.policy.eval()
        prepared = self._prepare(self.rewards.scaled(batch) if self._normalizes(batch) else batch)
        self.policy.train()
        parts = max(1, round(len(batch) / self.config.minibatch_fragments))
        if batch.in_state is None and self.policy.initial_state(1) is None:
            prepared = _as_single_steps(prepared)
        losses: list[dict[str, float]] = []
        norms: list[float] = []
        for _ in range(self.config.epochs):
            epoch: list[dict[str, float]] = []
            for rows in self._minibatches(len(prepared.batch), parts):
                norms.append(self._gradient_step(prepared, rows, epoch, train_policy=train_policy))
            losses += epoch
            if self._drifted([each["kl"] for each in epoch]):
                break
        self._update_statistics(batch)
        taken = [norm for norm in norms if math.isfinite(norm)]
        return UpdateStatistics(
            **{name: sum(each[name] for each in losses) / len(losses) for name in losses[0]},
            gradient_norm=sum(taken) / len(losses),
            explained_variance=_explained_variance(prepared.old_value, prepared.target),
            staleness_weight=float(prepared.weight.mean()),
            learning_rate=self._learning_rate,
            clip=self._clip,
            entropy_coefficient=self._entropy_coefficient,
            gradient_steps=len(taken),
            skipped_steps=len(norms) - len(taken),
        )

    def _update_statistics(self, batch: TrainingBatch) -> None:
        """Have the policy count a batch: its own, or, of several ranks, that of the first."""
        hook = getattr(self.policy, "update_statistics", None)  # Older policies have none.
        if hook is None:
            return
        is_main = self._ranks.membership.is_main
        if is_main:
            with torch.no_grad():
                hook(batch)
        if self._ranks.membership.world_size > 1:
            buffers = {name: each.cpu() for name, each in self.policy.named_buffers()}
            given = load(self._ranks.from_main(save(buffers) if is_main else b""))
            for name, buffer in self.policy.named_buffers():
                buffer.copy_(given[name])

    def _set_out(self, number: int, steps: int) -> None:
        entropy = (self._seed, self._ranks.membership.rank, number)
        seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
        self._order.manual_seed(int(seed >> np.uint64(1)))
        config = self.config
        self._learning_rate, self._clip, self._entropy_coefficient = (
            each.at(number, steps) for each in (config.lr, config.clip, config.entropy_coefficient)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate

    @torch.no_grad()
    def _prepare(self, batch: TrainingBatch) -> _Prepared:
        """Compute values and log-probabilities under the proximal policy, then advantages."""
        burn_in = self.config.burn_in_steps
        if burn_in >= batch.reward.shape[1]:
            length = batch.reward.shape[1]
            raise InvalidRequestError(
                "burn_in_steps", f"leaves none of a fragment's {length} steps"
            )
        passes = [self._values_of(batch, rows) for rows in self._slices(len(batch))]
        value, log_prob, next_value, final = (
            torch.cat(parts) for parts in zip(*passes, strict=True)
        )
        config = self.config
        ratio = _staleness_ratio(batch, log_prob)
        correction, bound = None, config.staleness_weight_max
        if config.advantages == "vtrace":
            bound = config.vtrace_rho_max
            correction = VTrace(ratio.cpu().numpy(), rho_max=bound, c_max=config.vtrace_c_max)
        advantage, target = estimate_advantages_torch(
            value=value,
            reward=batch.reward,
            terminated=batch.terminated,
            truncated=batch.truncated,
            next_value=next_value,
            final_value=final,
            successor=find_successors(
                batch.worker_ids,
                batch.fragment_indices,
                discontinuities=batch.discontinuities,
                session_ids=batch.session_ids,
            ),
            discount=config.discount,
            gae_lambda=config.gae_lambda,
            correction=correction,
        )
        reference = None
        if self._reference_evaluator is not None:
            every = torch.arange(len(batch))
            judged = [
                self._evaluate(batch, every[rows], self._reference_evaluator)
                for rows in self._slices(len(batch))
            ]
            reference = torch.cat([log_prob for log_prob, _, _ in judged])
        return _Prepared(
            batch=batch,
            proximal_log_prob=log_prob[:, burn_in:],
            old_value=value[:, burn_in:],
            advantage=self._normalized(advantage[:, burn_in:], "batch"),
            target=target[:, burn_in:],
            weight=(ratio.clamp(max=bound) if bound > 0 else torch.ones_like(ratio))[:, burn_in:],
            reference_log_prob=reference,
        )

    def _values_of(self, batch: TrainingBatch, rows: slice) -> tuple[Tensor, ...]:
        """Return value, log-prob [R, T], value of next_obs [R] and of final observations [R, T]."""
        sequence = extend(batch, rows)
        state = self._state_of(batch, rows)
        with self._autocast():
            log_prob, _, value = Evaluator(self.policy)(
                sequence.obs, sequence.action, state, sequence.first
            )
        row_count = len(sequence.next_position)
        row = torch.arange(row_count, device=self.device)
        step = torch.from_numpy(sequence.step_position).to(self.device)
        final = torch.full(step.shape, torch.nan, device=self.device)
        start = rows.start or 0
        here = (batch.final_row >= start) & (batch.final_row < start + row_count)
        final_row, final_step = batch.final_row[here] - start, batch.final_step[here]
        final[final_row, final_step] = value[final_row, sequence.final_position]
        return (
            value[row[:, None], step],
            log_prob[row[:, None], step],
            value[row, torch.from_numpy(sequence.next_position).to(self.device)],
            final,
        )

    def _normalizes(self, batch: TrainingBatch) -> bool:
        """Tasks of continuous control have returns of any size; others mostly count wins."""
        chosen = self.config.normalize_rewards
        if chosen is None:
            return any(action.is_floating_point() for _, action in leaves(batch.action))
        return chosen

    def _normalized(self, advantage: Tensor, part: str) -> Tensor:
        """Scale to mean 0 and deviation 1 over all ranks, if this *part* is to be normalised.

        A single step has no deviation, and keeps its advantage.
        """
        if part != self.config.advantage_normalization:
            return advantage
        wide = advantage.double()
        count = torch.tensor(float(wide.numel()), dtype=torch.float64, device=wide.device)
        total, squares, number = self._ranks.sum(
            torch.stack([wide.sum(), (wide * wide).sum(), count])
        )
        if number <= 1:
            return advantage
        mean: Tensor = total / number
        deviation = (squares / number - mean * mean).clamp(min=0.0).sqrt()
        normalized: Tensor = ((wide - mean) / (deviation + EPSILON)).float()
        return normalized

    def _gradient_step(
        self,
        prepared: _Prepared,
        rows: Tensor,
        losses: list[dict[str, float]],
        *,
        train_policy: bool,
    ) -> float:
        """Make one gradient step on some rows; return the gradient's norm, perhaps not finite."""
        index = rows.to(self.device)
        advantage = self._normalized(prepared.advantage[index], "minibatch")
        prepared = replace(prepared, advantage=prepared.advantage.index_copy(0, index, advantage))
        self.optimizer.zero_grad(set_to_none=True)
        parts = rows.tensor_split(min(self.config.accumulation_count, len(rows)))
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)
            # Ranks exchange gradients once per step, with the last part.
            with nullcontext() if is_last else self._ranks.without_exchange(self._evaluator):
                loss, parts_of_loss = self._loss(prepared, part, train_policy=train_policy)
                losses.append(parts_of_loss)
                scaled: Tensor = self.scaler.scale(loss * (len(part) / len(rows)))
                scaled.backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        limit = self.config.gradient_norm_max or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.policy.parameters(), limit))
        # With float16 the scaler itself skips the step and lowers its scale.
        if math.isfinite(norm) or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    def _loss(
        self, prepared: _Prepared, rows: Tensor, *, train_policy: bool
    ) -> tuple[Tensor, dict[str, float]]:
        config = self.config
        index = rows.to(self.device)
        log_prob, entropy, value = self._evaluate(prepared.batch, rows, self._evaluator)
        target = prepared.target[index]
        error = self._value_error(value, target)
        if config.value_clip > 0:
            old = prepared.old_value[index]
            near = old + (value - old).clamp(-config.value_clip, config.value_clip)
            error = torch.maximum(error, self._value_error(near, target))
        value_loss = 0.5 * error.mean()
        log_ratio = log_prob - prepared.proximal_log_prob[index]
        ratio = log_ratio.exp()
        advantage, weight = prepared.advantage[index], prepared.weight[index]
        clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
        policy_loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).mean()
        loss = config.value_coefficient * value_loss
        # Multiplied, not left out: data-parallel modules need every parameter in the graph.
        on = 1.0 if train_policy else 0.0
        loss = loss + on * (policy_loss - self._entropy_coefficient * entropy.mean())
        reference_kl = torch.zeros((), device=value.device)
        if prepared.reference_log_prob is not None:
            reference_kl = _divergence(log_prob, prepared.reference_log_prob[index])
            loss = loss + on * config.kl_coefficient * reference_kl
        with torch.no_grad():
            return loss, {
                "policy_loss": float(policy_loss),
                "value_loss": float(value_loss),
                "entropy": float(entropy.mean()),
                "kl": float((ratio - 1 - log_ratio).mean()),
                "reference_kl": float(reference_kl),
                "clip_fraction": float(((ratio - 1).abs() > self._clip).float().mean()),
            }

    def _value_error(self, value: Tensor, target: Tensor) -> Tensor:
        """Return the squared error of each step; with "huber", a line beyond huber_delta."""
        if self.config.value_loss == "mse":
            return (value - target) ** 2
        delta = self.config.huber_delta
        return 2 * nn.functional.huber_loss(value, target, reduction="none", delta=delta)

    def _evaluate(
        self, batch: TrainingBatch, rows: Tensor, evaluator: nn.Module
    ) -> tuple[Tensor, ...]:
        index = rows.to(self.device)
        state = self._state_of(batch, index)
        with self._autocast():
            result: tuple[Tensor, ...] = evaluator(
                map_tree(lambda leaf: leaf[index], batch.obs),
                map_tree(lambda leaf: leaf[index], batch.action),
                state,
                batch.first[index],
            )
        return result

    def _state_of(self, batch: TrainingBatch, rows: Tensor | slice) -> Tree:
        """Return recurrent states of some rows, initial ones if none were stored."""
        if batch.in_state is None:
            return self.policy.initial_state(len(batch.reward[rows]))
        return map_tree(lambda leaf: leaf[rows], batch.in_state)

    def _autocast(self) -> torch.autocast:
        dtype = AMP_DTYPES[self.config.amp]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _slices(self, row_count: int) -> list[slice]:
        size = self.config.minibatch_fragments
        return [slice(start, min(start + size, row_count)) for start in range(0, row_count, size)]

    def _minibatches(self, row_count: int, parts: int) -> Iterator[Tensor]:
        """Yield rows in random order, in even parts: a tiny last part would be a noisy step."""
        order = torch.randperm(row_count, generator=self._order)
        yield from order.tensor_split(parts)

    def _drifted(self, kls: list[float]) -> bool:
        """Return True if the policy moved further than `target_kl` allows, over all ranks."""
        if self.config.target_kl <= 0:
            return False
        numbers = torch.tensor([sum(kls), float(len(kls))], dtype=torch.float64)
        total, count = self._ranks.sum(numbers.to(self.device)).tolist()
        return bool(total / max(count, 1.0) > 1.5 * self.config.target_kl)


def _as_single_steps(prepared: _Prepared) -> _Prepared:
    """Return views in which each step is a row of its own, [B * T, 1, ...]."""

    def split(of: object, *names: str) -> dict[str, Any]:
        return {
            name: map_tree(lambda leaf: leaf.flatten(0, 1).unsqueeze(1), getattr(of, name))
            for name in names
        }

    batch = replace(prepared.batch, **split(prepared.batch, "obs", "action", "reward", "first"))
    names = ("proximal_log_prob", "old_value", "advantage", "target", "weight")
    return replace(prepared, batch=batch, **split(prepared, *names, "reference_log_prob"))


def _staleness_ratio(batch: TrainingBatch, proximal_log_prob: Tensor) -> Tensor:
    """Return the ratio of proximal to acting policy, [B, T], or 1 if the latter is unknown."""
    if batch.log_prob is None:
        return torch.ones_like(proximal_log_prob)
    return (proximal_log_prob - batch.log_prob).clamp(max=20.0).exp()


def _divergence(log_prob: Tensor, other: Tensor) -> Tensor:
    """Estimate the KL divergence of the policy from another one; never negative."""
    log_ratio = other - log_prob
    return (log_ratio.exp() - 1 - log_ratio).mean()


def _explained_variance(value: Tensor, target: Tensor) -> float:
    variance = float(target.var(correction=0))
    return 1.0 - float((target - value).var(correction=0)) / variance if variance > 0 else 0.0
