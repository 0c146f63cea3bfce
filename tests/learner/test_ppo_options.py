"""Losses and normalisation of PPO by its options, beside the formulas by hand."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from breadbox.model.errors import InvalidRequestError
from breadbox_learner.ranks import Ranks
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.batching import TrainingBatch
from breadbox_learner.training.ppo import Evaluator, PpoUpdater
from breadbox_policies import PolicyModule, make_policy
from support.collating import collate
from support.local_rollout import LocalRollout


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def cartpole_policy(name: str = "mlp", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    env = make_cartpole()
    return make_policy(name, env.observation_space, env.action_space)


def weights_of(policy: PolicyModule) -> list[float]:
    return torch.cat([each.detach().flatten() for each in policy.parameters()]).tolist()


@pytest.fixture
def batch() -> TrainingBatch:
    made = LocalRollout(make_cartpole, env_count=4, steps_per_fragment=16, seed=7)
    fragments = made.collect(cartpole_policy(), 2)
    made.close()
    return collate(fragments)


class Still(PpoUpdater):
    """Notes the gradient and the advantages of each minibatch, and changes no weight."""

    def __init__(self, policy: PolicyModule, ranks: Ranks | None = None, **config: Any) -> None:
        options = PpoConfig(**{"gradient_norm_max": 0, **config})
        super().__init__(policy, options, seed=5, ranks=ranks)
        self.gradients: list[torch.Tensor] = []
        self.advantages: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []

    def _gradient_step(self, prepared: Any, rows: Any, *rest: Any, **options: Any) -> float:
        self.optimizer.step = lambda *_: None  # type: ignore[method-assign]
        self.rows.append(rows)
        norm = super()._gradient_step(prepared, rows, *rest, **options)
        parameters = self.policy.parameters()
        self.gradients.append(torch.cat([each.grad.flatten() for each in parameters]))
        return norm

    def _loss(self, prepared: Any, rows: Any, **options: Any) -> Any:
        self.advantages.append(prepared.advantage[rows].flatten())
        return super()._loss(prepared, rows, **options)


def plain_advantages(batch: TrainingBatch, value: torch.Tensor, after: torch.Tensor) -> Any:
    """lambda 0 and discount 0.99 without time limits: the temporal difference of each step."""
    following = torch.cat([value[:, 1:], after[:, None]], 1)
    return batch.reward + 0.99 * ~batch.terminated * following - value


def test_a_policy_is_judged_in_the_mode_of_acting_and_trained_in_that_of_training(
    batch: TrainingBatch,
) -> None:
    policy = cartpole_policy()
    evaluate, modes = policy.evaluate, []

    def noted(*arguments: Any) -> Any:
        modes.append(policy.training)
        return evaluate(*arguments)

    policy.evaluate = noted
    PpoUpdater(policy, PpoConfig(epochs=1, minibatch_fragments=4)).update(batch)
    assert [False] * 2 + [True] * 2 == modes


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize(("loss", "delta"), [("mse", 1.0), ("huber", 0.5), ("huber", 3.0)])
def test_the_value_loss_and_its_gradient_are_those_of_the_formula(
    batch: TrainingBatch, loss: str, delta: float, clip: float
) -> None:
    """Huber: e^2 / 2 up to delta, delta * (|e| - delta / 2) beyond; the worse one if clipped."""
    policy = cartpole_policy(seed=2)
    options: dict[str, Any] = {"value_loss": loss, "huber_delta": delta, "value_clip": clip}
    still = Still(policy, epochs=1, minibatch_fragments=8, gae_lambda=0.0, **options)
    batch.reward *= torch.linspace(0, 6, batch.reward.numel()).reshape(batch.reward.shape)
    with torch.no_grad():
        old = policy.evaluate(batch.obs, batch.action, None, batch.first).value
        after = policy.evaluate(
            batch.next_obs[:, None], batch.action[:, -1:], None, batch.first[:, -1:]
        ).value[:, 0]
        target = plain_advantages(batch, old, after) + old
    statistics = still.update(batch, train_policy=False)

    def error_of(value: torch.Tensor) -> torch.Tensor:
        error = (value - target).abs()
        if loss == "mse":
            return error * error / 2
        return torch.where(error <= delta, error * error / 2, delta * (error - delta / 2))

    policy.zero_grad()
    value = policy.evaluate(batch.obs, batch.action, None, batch.first).value
    wanted = error_of(value)
    if clip:
        wanted = torch.maximum(wanted, error_of(old + (value - old).clamp(-clip, clip)))
    wanted = wanted.mean()
    (0.5 * wanted).backward()
    gradient = torch.cat(
        [
            torch.zeros(each.numel()) if each.grad is None else each.grad.flatten()
            for each in policy.parameters()
        ]
    )
    assert wanted.item() == pytest.approx(statistics.value_loss, rel=1e-5)
    torch.testing.assert_close(gradient, still.gradients[0], atol=1e-6, rtol=1e-4)


def test_huber_with_a_delta_beyond_every_error_is_the_squared_error(batch: TrainingBatch) -> None:
    trained = []
    choices: list[dict[str, Any]] = [{}, {"value_loss": "huber", "huber_delta": 1e6}]
    for options in choices:
        policy = cartpole_policy()
        PpoUpdater(policy, PpoConfig(**options), seed=1).update(batch)
        trained.append(weights_of(policy))
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 3])
def test_advantages_of_a_minibatch_have_mean_0_and_deviation_1_in_it(
    batch: TrainingBatch, parts: int
) -> None:
    options: dict[str, Any] = {"minibatch_fragments": 2, "epochs": 2, "accumulation_count": parts}
    by = {
        how: Still(cartpole_policy(), advantage_normalization=how, **options)
        for how in ("batch", "minibatch", "off")
    }
    for still in by.values():
        still.update(batch)
    wholes = {
        how: [torch.cat(still.advantages[n : n + parts]) for n in range(0, 8 * parts, parts)]
        for how, still in by.items()
    }
    raw = torch.cat(wholes["off"][:4]).double()
    for off, per_batch, per_minibatch in zip(
        wholes["off"], wholes["batch"], wholes["minibatch"], strict=True
    ):
        wide = off.double()
        for got, of in ((per_batch, raw), (per_minibatch, wide)):
            wanted = (wide - of.mean()) / of.std(correction=0)
            torch.testing.assert_close(wanted.float(), got, atol=1e-5, rtol=1e-5)
    # One after another from the same advantages, not from those that a minibatch left.
    assert len(wholes["minibatch"]) == 8


def test_parts_of_a_minibatch_are_normalised_together(batch: TrainingBatch) -> None:
    gradients = []
    for parts in (1, 4):
        still = Still(
            cartpole_policy(),
            epochs=1,
            accumulation_count=parts,
            advantage_normalization="minibatch",
        )
        still.update(batch)
        gradients.append(still.gradients[0])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def equal_rewards(batch: TrainingBatch) -> TrainingBatch:
    nothing = torch.zeros_like(batch.terminated)
    return replace(
        batch,
        reward=torch.full_like(batch.reward, 3.0),
        terminated=nothing,
        truncated=nothing,
        final_row=batch.final_row[:0],
        final_step=batch.final_step[:0],
        final_obs=None,
    )


@pytest.mark.parametrize("how", ["batch", "minibatch"])
def test_equal_advantages_have_no_gradient_and_none_is_infinite(
    batch: TrainingBatch, how: str
) -> None:
    policy = cartpole_policy()
    with torch.no_grad():
        policy.critic[-1].weight.zero_()
    still = Still(policy, gae_lambda=0.0, advantage_normalization=how, epochs=1)
    statistics = still.update(equal_rewards(batch))
    assert 0 == statistics.skipped_steps
    assert [0.0] * 128 == torch.cat(still.advantages).tolist()


def test_a_minibatch_of_a_single_step_keeps_its_advantage(batch: TrainingBatch) -> None:
    """Its deviation is none; scaled, nothing would ever be learned from it."""
    single = replace(
        batch,
        **{
            name: getattr(batch, name)[:2, :1]
            for name in ("obs", "action", "reward", "terminated", "truncated", "first",
                         "episode_id", "log_prob")
        },
        next_obs=batch.obs[:2, 1],
        final_row=batch.final_row[:0], final_step=batch.final_step[:0], final_obs=None,
        worker_ids=["a", "b"], fragment_indices=[0, 0], session_ids=["s", "s"],
        discontinuities=[False, False],
    )  # fmt: skip
    raw, scaled = (
        Still(cartpole_policy(), epochs=1, minibatch_fragments=1, advantage_normalization=how)
        for how in ("off", "minibatch")
    )
    for still in (raw, scaled):
        assert 2 == still.update(single).gradient_steps
    assert raw.advantages == scaled.advantages
    assert all(float(each) for each in raw.advantages)


def test_ranks_normalise_a_minibatch_over_all_of_them(batch: TrainingBatch) -> None:
    """As if the other rank had the same steps with advantages that are 2 higher."""

    class Two(Ranks):
        def sum(self, numbers: torch.Tensor) -> torch.Tensor:
            if len(numbers) != 3:
                return 2 * numbers
            total, squares, count = numbers
            return torch.stack(
                [2 * total + 2 * count, 2 * squares + 4 * total + 4 * count, 2 * count]
            )

    options: dict[str, Any] = {"epochs": 1, "minibatch_fragments": 4}
    off = Still(cartpole_policy(), advantage_normalization="off", **options)
    both = Still(cartpole_policy(), Two(), advantage_normalization="minibatch", **options)
    off.update(batch)
    both.update(batch)
    for own, got in zip(off.advantages, both.advantages, strict=True):
        every = torch.cat([own, own + 2]).double()
        wanted = (own.double() - every.mean()) / every.std(correction=0)
        torch.testing.assert_close(wanted.float(), got, atol=1e-5, rtol=1e-5)


def test_the_policys_gradient_is_that_of_the_formula_with_the_scheduled_clip(
    batch: TrainingBatch,
) -> None:
    """At the second of four updates: a clip of 0.15, an entropy coefficient of 0.75."""
    policy = cartpole_policy(seed=3)
    still = Still(
        policy, epochs=1, minibatch_fragments=8, value_coefficient=0, staleness_weight_max=0,
        advantage_normalization="off", gae_lambda=0.0, clip="0.2:0@4updates",
        entropy_coefficient="1:0@4updates",
    )  # fmt: skip
    with torch.no_grad():
        seen = policy.evaluate(batch.obs, batch.action, None, batch.first)
        after = policy.evaluate(
            batch.next_obs[:, None], batch.action[:, -1:], None, batch.first[:, -1:]
        )
        advantage = plain_advantages(batch, seen.value, after.value[:, 0])
    statistics = still.update(batch, number=1)
    assert (0.15, 0.75) == pytest.approx((statistics.clip, statistics.entropy_coefficient))
    policy.zero_grad()
    choice = Categorical(logits=policy.actor(batch.obs))
    ratio = (choice.log_prob(batch.action) - seen.log_prob).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.85, 1.15) * advantage)
    (-gain.mean() - 0.75 * choice.entropy().mean()).backward()
    wanted = torch.cat(
        [
            torch.zeros(each.numel()) if each.grad is None else each.grad.flatten()
            for each in policy.parameters()
        ]
    )
    torch.testing.assert_close(wanted, still.gradients[0], atol=1e-6, rtol=1e-4)


def recurrent_batch(seed: int = 7) -> TrainingBatch:
    made = LocalRollout(make_cartpole, env_count=4, steps_per_fragment=16, seed=seed)
    policy = cartpole_policy("lstm")
    made.collect(policy, 1)
    fragments = made.collect(policy, 2)
    made.close()
    return collate(fragments)


@torch.no_grad()
def by_hand(policy: PolicyModule, batch: TrainingBatch, start: int) -> torch.Tensor:
    """Log-probs from a step on, after a state that was stepped there from the stored one."""
    state = batch.in_state
    for step in range(start):
        state = policy.act(batch.obs[:, step], state, batch.first[:, step], greedy=True).state
    evaluation = policy.evaluate(
        batch.obs[:, start:], batch.action[:, start:], state, batch.first[:, start:]
    )
    return evaluation.log_prob


def test_a_burn_in_makes_the_state_by_the_current_weights_and_has_no_loss() -> None:
    """The state at step 5 is what acting from the stored one gives, episode borders included."""
    batch = recurrent_batch()
    assert bool(batch.first[:, 1:5].any())
    policy = cartpole_policy("lstm", seed=4)
    with torch.no_grad():
        state_before = Evaluator(policy)(batch.obs, batch.action, batch.in_state, batch.first)
        renewed = Evaluator(policy, 5)(batch.obs, batch.action, batch.in_state, batch.first)
    torch.testing.assert_close(by_hand(policy, batch, 5), renewed[0], atol=1e-5, rtol=1e-5)
    # The same as in one pass: what is left out are the losses of the first steps.
    for whole, rest in zip(state_before, renewed, strict=True):
        torch.testing.assert_close(whole[:, 5:], rest, atol=1e-5, rtol=1e-5)


def test_no_gradient_goes_into_the_burn_in_and_none_comes_from_its_steps() -> None:
    batch = recurrent_batch()
    options: dict[str, Any] = {
        "epochs": 1, "minibatch_fragments": 8, "value_coefficient": 0, "gae_lambda": 0.0,
        "advantage_normalization": "off", "entropy_coefficient": 0, "staleness_weight_max": 0,
    }  # fmt: skip
    policy = cartpole_policy("lstm", seed=4)
    still = Still(policy, burn_in_steps=5, **options)
    statistics = still.update(batch)
    assert [8 * 11] == [len(each) for each in still.advantages]
    assert 0.0 == pytest.approx(statistics.kl, abs=1e-6)
    state = batch.in_state
    with torch.no_grad():
        value = policy.evaluate(batch.obs, batch.action, state, batch.first).value
        early = policy.evaluate(batch.obs[:, :5], batch.action[:, :5], state, batch.first[:, :5])
    policy.zero_grad()
    late = policy.evaluate(batch.obs[:, 5:], batch.action[:, 5:], early.state, batch.first[:, 5:])
    ended = batch.terminated | batch.truncated
    following = torch.cat([value[:, 1:], value[:, -1:]], 1)
    advantage = batch.reward + 0.99 * ~ended * following - value
    ratio = (late.log_prob - late.log_prob.detach()).exp()
    # The last step bootstraps from next_obs: the updater's own number is taken there.
    used = still.advantages[0].reshape(8, 11)[still.rows[0].argsort()]
    torch.testing.assert_close(advantage[:, 5:-1], used[:, :-1], atol=1e-4, rtol=1e-4)
    (-(ratio * used).mean()).backward()
    wanted = torch.cat(
        [
            torch.zeros(each.numel()) if each.grad is None else each.grad.flatten()
            for each in policy.parameters()
        ]
    )
    torch.testing.assert_close(wanted, still.gradients[0], atol=1e-6, rtol=1e-3)


def test_each_later_step_keeps_its_own_weight_value_and_target_beside_a_burn_in() -> None:
    batch, policy = recurrent_batch(), cartpole_policy("lstm", seed=9)
    updaters = [
        PpoUpdater(policy, PpoConfig(burn_in_steps=steps, staleness_weight_max=2.0))
        for steps in (0, 5)
    ]
    whole, rest = (each._prepare(batch) for each in updaters)  # noqa: SLF001 - what it trains on
    assert float(whole.weight.std()) > 0, "the weights of the steps differ"
    for name in ("weight", "old_value", "target", "proximal_log_prob"):
        torch.testing.assert_close(getattr(whole, name)[:, 5:], getattr(rest, name))


def test_a_burn_in_brings_a_state_of_older_weights_nearer_to_the_current_ones() -> None:
    """Beside the state that the current weights would have left at the start of the episode."""
    policy = cartpole_policy("lstm", seed=4)
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(1, 40, 4, generator=generator)
    action = torch.zeros(1, 40, dtype=torch.long)
    first = torch.zeros(1, 40, dtype=torch.bool)
    first[:, 0] = True
    stale = cartpole_policy("lstm", seed=9)
    with torch.no_grad():
        true, old = (
            each.evaluate(obs[:, :20], action[:, :20], each.initial_state(1), first[:, :20]).state
            for each in (policy, stale)
        )
        rest = obs[:, 20:], action[:, 20:]
        wanted = Evaluator(policy)(*rest, true, first[:, 20:])[2][:, 10:]
        plain = Evaluator(policy)(*rest, old, first[:, 20:])[2]
        renewed = Evaluator(policy, 10)(*rest, old, first[:, 20:])[2]
    assert float((renewed - wanted).abs().max()) < 0.1 * float((plain[:, 0] - wanted[:, 0]).abs())


@pytest.mark.parametrize("steps", [16, 17])
def test_a_burn_in_that_leaves_no_step_is_refused(steps: int) -> None:
    updater = PpoUpdater(cartpole_policy("lstm"), PpoConfig(burn_in_steps=steps))
    with pytest.raises(InvalidRequestError, match="leaves none of a fragment's 16 steps"):
        updater.update(recurrent_batch())


def test_a_reference_policy_gets_its_own_burnt_in_states() -> None:
    batch = recurrent_batch()
    policy = cartpole_policy("lstm", seed=4)
    config = PpoConfig(burn_in_steps=4, kl_coefficient=0.1, epochs=1, minibatch_fragments=8)
    updater = PpoUpdater(policy, config, reference=cartpole_policy("lstm", seed=4))
    assert 0.0 == pytest.approx(updater.update(batch).reference_kl, abs=1e-6)
