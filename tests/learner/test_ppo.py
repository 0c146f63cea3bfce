"""PPO against environments stepped in the same process: does it learn, and is each term right."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.batching import TrainingBatch, extend
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_policies import PolicyModule, make_policy
from support.collating import collate
from support.local_rollout import LocalRollout
from support.tiers import long_but


def make_cartpole(steps_max: int = 500) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=steps_max)


def cartpole_policy(name: str = "mlp", seed: int = 0) -> PolicyModule:
    torch.manual_seed(seed)
    env = make_cartpole()
    return make_policy(name, env.observation_space, env.action_space)


def updater(policy: PolicyModule, seed: int = 0, **config: Any) -> PpoUpdater:
    reference = config.pop("reference", None)
    return PpoUpdater(
        policy,
        PpoConfig(**config),
        seed=seed,
        reference=reference,
    )


@pytest.fixture
def rollout() -> Iterator[LocalRollout]:
    made = LocalRollout(make_cartpole, env_count=8, steps_per_fragment=32, seed=7)
    yield made
    made.close()


def weights_of(policy: PolicyModule) -> list[float]:
    return torch.cat([p.detach().flatten() for p in policy.parameters()]).tolist()


def returns_of(fragments: list[Fragment]) -> list[float]:
    ended = np.concatenate([fragment.extras["episode_return"] for fragment in fragments])
    return [float(value) for value in ended if not np.isnan(value)]


@pytest.mark.parametrize("advantages", ["gae", "vtrace"])
@pytest.mark.parametrize("seed", long_but(1, [0, 1]))
def test_it_learns_cartpole(seed: int, advantages: str) -> None:
    """From about 20 at random to over 100 within 25,000 steps."""
    policy = cartpole_policy(seed=seed)
    trainer = updater(policy, seed, advantages=advantages)
    rollout = LocalRollout(make_cartpole, env_count=16, steps_per_fragment=32, seed=1000 * seed)
    returns: list[float] = []
    for _ in range(12):
        fragments = rollout.collect(policy, 4)
        returns += returns_of(fragments)
        trainer.update(collate(fragments))
    rollout.close()
    assert np.mean(returns[-60:]) > 100.0, f"seed {seed}"


def test_training_is_the_same_under_the_same_seed(rollout: LocalRollout) -> None:
    policy = cartpole_policy()
    batch = collate(rollout.collect(policy, 2))
    trained = []
    for _ in range(2):
        policy = cartpole_policy()
        updater(policy, seed=3).update(batch)
        trained.append(weights_of(policy))
    assert trained[0] == trained[1]


def test_accumulation_gives_the_gradient_of_the_whole_minibatch(rollout: LocalRollout) -> None:
    policy = cartpole_policy()
    batch = collate(rollout.collect(policy, 2))
    trained = []
    for parts in (1, 3):
        policy = cartpole_policy()
        updater(policy, epochs=1, accumulation_count=parts).update(batch)
        trained.append(weights_of(policy))
    np.testing.assert_allclose(trained[0], trained[1], atol=1e-5)


def cut(batch: TrainingBatch, parts: int) -> TrainingBatch:
    """The same steps in fragments of a part of the length."""
    length = batch.reward.shape[1] // parts

    def split(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.reshape(-1, length, *leaf.shape[2:])

    following = torch.cat([batch.obs[:, length::length], batch.next_obs[:, None]], dim=1)
    fields = ("obs", "action", "reward", "terminated", "truncated", "first", "episode_id")
    rows, steps = batch.final_row, batch.final_step
    columns: dict[str, Any] = {name: split(getattr(batch, name)) for name in (*fields, "log_prob")}
    return replace(
        batch,
        **columns,
        next_obs=following.flatten(0, 1),
        final_row=rows * parts + steps // length,
        final_step=steps % length,
        worker_ids=[each for each in batch.worker_ids for _ in range(parts)],
        fragment_indices=[
            each * parts + part for each in batch.fragment_indices for part in range(parts)
        ],
        session_ids=[each for each in batch.session_ids for _ in range(parts)],
        discontinuities=[
            each and not part for each in batch.discontinuities for part in range(parts)
        ],
    )


def test_without_memory_training_does_not_depend_on_where_fragments_are_cut(
    rollout: LocalRollout,
) -> None:
    """The order of single steps is that of the seed; so many in a minibatch, of any fragment."""
    whole = collate(rollout.collect(cartpole_policy(seed=1), 2))
    trained = []
    for parts in (1, 4, 32):
        policy = cartpole_policy()
        updater(policy, minibatch_fragments=4 * parts, clip=10.0).update(cut(whole, parts))
        trained.append(weights_of(policy))
    np.testing.assert_allclose(trained[0], trained[1], atol=1e-4)
    np.testing.assert_allclose(trained[0], trained[2], atol=1e-4)


class Watched(PpoUpdater):
    """Notes the shape, the steps and the gradient of each minibatch, and trains on none."""

    def __init__(self, policy: PolicyModule, **config: Any) -> None:
        super().__init__(policy, PpoConfig(**config), seed=5)
        self.seen: list[tuple[tuple[int, ...], set[tuple[float, ...]]]] = []
        self.gradient: list[float] = []

    def _gradient_step(
        self, prepared: Any, rows: torch.Tensor, *rest: Any, **options: Any
    ) -> float:
        obs = prepared.batch.obs[rows]
        self.seen.append(
            (tuple(obs.shape[:2]), {tuple(each) for each in obs.flatten(0, 1).tolist()})
        )
        self.optimizer.step = lambda *_: None  # type: ignore[method-assign]
        norm = super()._gradient_step(prepared, rows, *rest, **options)
        self.gradient = torch.cat(
            [parameter.grad.flatten() for parameter in self.policy.parameters()]
        ).tolist()
        return norm


@pytest.mark.parametrize(("name", "shape"), [("mlp", (128, 1)), ("lstm", (4, 32))])
def test_a_minibatch_has_single_steps_of_all_fragments_unless_the_policy_has_memory(
    rollout: LocalRollout, name: str, shape: tuple[int, int]
) -> None:
    policy = cartpole_policy(name)
    batch = collate(rollout.collect(policy, 2))
    watched = Watched(policy, minibatch_fragments=4, epochs=2)
    watched.update(batch)
    assert [shape] * 8 == [each for each, _ in watched.seen]
    fragments = [{tuple(step) for step in row.tolist()} for row in batch.obs]
    every = set().union(*fragments)
    for epoch in (watched.seen[:4], watched.seen[4:]):
        # Each step once in each pass.
        assert every == set().union(*(steps for _, steps in epoch))
    touched = [sum(bool(each & steps) for each in fragments) for _, steps in watched.seen]
    assert (set(touched) == {4}) == (name == "lstm")
    assert (min(touched) > 12) == (name == "mlp")


def test_a_minibatch_of_the_whole_batch_has_the_gradient_of_whole_fragments(
    rollout: LocalRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = cartpole_policy()
    batch = collate(rollout.collect(policy, 2))
    by_steps = Watched(policy, minibatch_fragments=16, epochs=1)
    by_steps.update(batch)
    monkeypatch.setattr("breadbox_learner.training.ppo._as_single_steps", lambda prepared: prepared)
    by_fragments = Watched(policy, minibatch_fragments=16, epochs=1)
    by_fragments.update(batch)
    assert [(512, 1), (16, 32)] == [it.seen[0][0] for it in (by_steps, by_fragments)]
    assert max(map(abs, by_steps.gradient)) > 0
    np.testing.assert_allclose(by_fragments.gradient, by_steps.gradient, atol=1e-6)


def test_value_warmup_leaves_the_actor_alone(rollout: LocalRollout) -> None:
    policy = cartpole_policy()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    updater(policy).update(collate(rollout.collect(policy, 1)), train_policy=False)
    changed = {
        name.split(".")[0]
        for name, parameter in policy.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert {"critic"} == changed


def test_fresh_data_has_weight_one_and_stale_data_is_weighted_within_its_bound(
    rollout: LocalRollout,
) -> None:
    policy = cartpole_policy()
    batch = collate(rollout.collect(policy, 1))
    assert updater(policy, epochs=1).update(batch).staleness_weight == pytest.approx(1.0, abs=1e-5)
    assert batch.log_prob is not None
    # As if the acting policy had found these actions far less likely than the learner does now.
    batch.log_prob = batch.log_prob - 5.0
    assert updater(policy, epochs=1).update(batch).staleness_weight == pytest.approx(2.0)
    assert updater(policy, epochs=1, staleness_weight_max=0).update(batch).staleness_weight == 1.0


def test_v_trace_bounds_targets_and_gradient_alike(rollout: LocalRollout) -> None:
    """A policy that is judged with one bound and trained with another is judged as another one."""
    batch = collate(rollout.collect(cartpole_policy(), 1))
    assert batch.log_prob is not None
    batch.log_prob = batch.log_prob - 5.0
    for rho_max in (1.0, 3.0):
        trainer = updater(cartpole_policy(), epochs=1, advantages="vtrace", vtrace_rho_max=rho_max)
        assert trainer.update(batch).staleness_weight == pytest.approx(rho_max)


def test_v_trace_of_fresh_data_trains_as_plain_ppo_does(rollout: LocalRollout) -> None:
    batch = collate(rollout.collect(cartpole_policy(), 2))
    trained = []
    for advantages in ("gae", "vtrace"):
        policy = cartpole_policy()
        updater(policy, advantages=advantages).update(batch)
        trained.append(weights_of(policy))
    np.testing.assert_allclose(trained[0], trained[1], atol=1e-4)


def test_v_trace_corrects_targets_only_where_the_acting_policy_differed(
    rollout: LocalRollout,
) -> None:
    """A value that moves towards what unlikely actions led to moves less."""
    batch = collate(rollout.collect(cartpole_policy(), 2))
    assert batch.log_prob is not None
    losses = []
    for staleness in (0.0, 3.0):
        # As if the acting policy had found these actions far likelier than the learner does now.
        stale = replace(batch, log_prob=batch.log_prob + staleness)
        for advantages in ("gae", "vtrace"):
            trainer = updater(cartpole_policy(), epochs=1, gae_lambda=1.0, advantages=advantages)
            losses.append(trainer.update(stale).value_loss)
    fresh_gae, fresh_vtrace, stale_gae, stale_vtrace = losses
    assert fresh_gae == pytest.approx(fresh_vtrace, rel=1e-4)
    assert fresh_gae == pytest.approx(stale_gae, rel=1e-4)
    assert stale_vtrace < 0.1 * stale_gae


def test_the_reference_policy_holds_the_trained_one_back(rollout: LocalRollout) -> None:
    batch = collate(rollout.collect(cartpole_policy(), 4))
    moved = []
    for coefficient in (1e-9, 10.0):
        policy, reference = cartpole_policy(), cartpole_policy()
        statistics = updater(
            policy, kl_coefficient=coefficient, reference=reference, epochs=10
        ).update(batch)
        moved.append(statistics.reference_kl)
        assert weights_of(reference) == weights_of(cartpole_policy())
    assert moved[1] < 0.5 * moved[0]


def test_target_kl_ends_the_passes_early(rollout: LocalRollout) -> None:
    policy = cartpole_policy()
    batch = collate(rollout.collect(policy, 4))
    held = updater(policy, epochs=20, target_kl=1e-6, minibatch_fragments=16)
    assert held.update(batch).gradient_steps == 2  # One pass over 32 fragments.


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(rollout: LocalRollout) -> None:
    policy = cartpole_policy()
    batch = collate(rollout.collect(policy, 1))
    before = weights_of(policy)
    batch.reward[0, 0] = torch.inf
    statistics = updater(policy, epochs=1, minibatch_fragments=8).update(batch)
    assert (0, 1) == (statistics.gradient_steps, statistics.skipped_steps)
    assert before == weights_of(policy)


def test_bfloat16_trains(rollout: LocalRollout) -> None:
    policy = cartpole_policy()
    statistics = updater(policy, amp="bfloat16").update(collate(rollout.collect(policy, 1)))
    assert statistics.skipped_steps == 0
    assert statistics.gradient_steps > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"discount": 1.1},
        {"gae_lambda": -0.1},
        {"epochs": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"amp": "int8"},
        {"kl_coefficient": 0.1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequestError, ValueError), match=next(iter(wrong))):
        updater(cartpole_policy(), **wrong)


def test_the_extended_sequence_gives_each_value_with_its_own_memory() -> None:
    """One pass equals stepping through each episode by hand, final observations included."""
    policy = cartpole_policy("lstm")
    rollout = LocalRollout(
        lambda: make_cartpole(steps_max=5), env_count=3, steps_per_fragment=12, seed=1
    )
    rollout.collect(policy, 1)  # so that the next fragments start within an episode
    fragments = rollout.collect(policy, 1)
    rollout.close()
    batch = collate(fragments)
    assert len(batch.final_row) >= 6
    got = values_by_step(policy, batch)
    wanted = values_by_hand(policy, fragments)
    assert wanted.keys() == got.keys()
    for key, value in wanted.items():
        assert got[key] == pytest.approx(value, abs=1e-5), key


@torch.no_grad()
def values_by_step(policy: PolicyModule, batch: TrainingBatch) -> dict[Any, float]:
    values: dict[Any, float] = {}
    for rows in (slice(0, 2), slice(2, 3)):  # in pieces, as the updater does it
        sequence = extend(batch, rows)
        state = tuple(leaf[rows] for leaf in batch.in_state)
        value = policy.evaluate(sequence.obs, sequence.action, state, sequence.first).value
        for row in range(len(value)):
            for step, position in enumerate(sequence.step_position[row]):
                values[rows.start + row, step] = float(value[row, position])
            values[rows.start + row, "next"] = float(value[row, sequence.next_position[row]])
        here = np.flatnonzero((batch.final_row >= rows.start) & (batch.final_row < rows.stop))
        for number, position in zip(here, sequence.final_position, strict=True):
            row = int(batch.final_row[number])
            key = (row, "final", int(batch.final_step[number]))
            values[key] = float(value[row - rows.start, position])
    return values


@torch.no_grad()
def values_by_hand(policy: PolicyModule, fragments: list[Fragment]) -> dict[Any, float]:
    def look(obs: Any, state: Any, first: bool) -> tuple[float, Any]:
        acted = policy.act(torch.from_numpy(obs)[None], state, torch.tensor([first]))
        return float(acted.value), acted.state

    values: dict[Any, float] = {}
    for row, fragment in enumerate(fragments):
        state = policy.merge_state([tuple(torch.from_numpy(leaf) for leaf in fragment.in_state)])
        assert fragment.final_obs_step is not None
        for step in range(fragment.step_count):
            values[row, step], state = look(fragment.obs[step], state, bool(fragment.first[step]))
            if step in fragment.final_obs_step and not fragment.terminated[step]:
                known = list(fragment.final_obs_step).index(step)
                values[row, "final", step], _ = look(fragment.final_obs[known], state, False)
        values[row, "next"], _ = look(fragment.next_obs, state, bool(fragment.ended[-1]))
    return values
