"""Masks of actions: what is forbidden has no probability, when acting and when judging."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical

from breadbox.model.errors import InvalidRequestError
from breadbox_policies import make_policy, policy_weights
from breadbox_policies.actions import make_action_head
from support.masked_env import ACTIONS, COUNTS, Masked, is_allowed

SEED = 5


def rows_of(kind: str, count: int) -> dict[str, torch.Tensor]:
    """Observations of so many steps, without those after an episode's last one."""
    env = Masked(kind)
    seen: list[Any] = []
    obs, _ = env.reset(seed=SEED)
    while len(seen) < count:
        seen.append(obs)
        obs, _, over, _, _ = env.step(env.action_space.sample())
        if over:
            obs, _ = env.reset()
    return {key: torch.from_numpy(np.stack([each[key] for each in seen])) for key in seen[0]}


def policy_of(kind: str, name: str = "mlp") -> Any:
    torch.manual_seed(SEED)
    return make_policy(name, Masked(kind).observation_space, ACTIONS[kind], action_mask="legal")


def action_row(action: Any, row: int) -> Any:
    if isinstance(action, dict):
        return {key: part[row].numpy() for key, part in action.items()}
    return action[row].numpy()


@pytest.mark.parametrize("name", ["mlp", "lstm", "random"])
@pytest.mark.parametrize("kind", list(ACTIONS))
@pytest.mark.parametrize("greedy", [False, True])
def test_no_action_is_chosen_that_the_mask_forbids(kind: str, name: str, greedy: bool) -> None:
    policy, obs = policy_of(kind, name), rows_of(kind, 600)
    first = torch.ones(600, dtype=torch.bool)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        acted = policy.act(
            obs, policy.initial_state(600), first, generator=generator, greedy=greedy
        )
        steps = {key: each[:, None] for key, each in obs.items()}
        action = (
            {key: each[:, None] for key, each in acted.action.items()}
            if isinstance(acted.action, dict)
            else acted.action[:, None]
        )
        judged = policy.evaluate(steps, action, policy.initial_state(600), first[:, None])
    wrong = [
        row
        for row in range(600)
        if not is_allowed(kind, obs["legal"][row], action_row(acted.action, row))
    ]
    assert [] == wrong, f"seed {SEED}"
    torch.testing.assert_close(acted.log_prob, judged.log_prob[:, 0], atol=1e-5, rtol=1e-5)
    assert bool(judged.entropy.isfinite().all())


def test_log_prob_and_entropy_are_those_of_the_allowed_choices_alone() -> None:
    """As torch's distribution over the logits that are left, part by part."""
    policy, obs = policy_of("multi"), rows_of("multi", 50)
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(50, 9, generator=generator)
    assert policy.mask is not None
    masked = policy.mask(inputs, obs)
    action = make_action_head(ACTIONS["multi"]).choose(masked, generator)[0]
    judged = policy.head.judge(masked, action)
    for row in range(50):
        log_prob = entropy = start = 0.0
        for part, count in enumerate(COUNTS["multi"]):
            span = slice(int(start), int(start) + count)
            left = obs["legal"][row, span].nonzero()[:, 0]
            choice = Categorical(logits=inputs[row, span][left])
            place = left.tolist().index(int(action[row, part]))
            log_prob += float(choice.log_prob(torch.tensor(place)))
            entropy += float(choice.entropy())
            start += count
        assert (log_prob, entropy) == pytest.approx(
            (float(judged.log_prob[row]), float(judged.entropy[row])), abs=1e-5
        )


def test_a_single_allowed_action_is_certain_and_has_no_gradient() -> None:
    policy = policy_of("discrete")
    obs = {"legal": torch.tensor([[[0, 0, 1, 0, 0]]]), "seen": torch.rand(1, 1, 3)}
    judged = policy.evaluate(obs, torch.tensor([[4]]), None, torch.ones(1, 1, dtype=torch.bool))
    assert (0.0, 0.0) == (judged.log_prob.item(), judged.entropy.item())
    (judged.log_prob + judged.entropy).sum().backward()
    gradients = [each.grad for each in policy.actor.parameters()]
    assert all(each is not None and not each.any() for each in gradients)


def test_a_recorded_action_that_is_forbidden_leaves_every_number_finite() -> None:
    policy = policy_of("multi")
    obs = {key: each[None] for key, each in rows_of("multi", 40).items()}
    obs["legal"][:] = 0
    obs["legal"][..., [0, 3, 5]] = 1
    forbidden = torch.tensor([1, 1, 2]).expand(1, 40, 3)
    judged = policy.evaluate(obs, forbidden, None, torch.ones(1, 40, dtype=torch.bool))
    ratio = (judged.log_prob - judged.log_prob.detach()).exp()
    assert [1.0] * 40 == ratio[0].tolist()
    (ratio.sum() + judged.entropy.sum()).backward()
    assert all(
        each.grad is None or bool(each.grad.isfinite().all()) for each in policy.parameters()
    )


def test_a_clock_of_zero_does_not_let_a_forbidden_choice_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0 / 0 is no number, which is the largest one to argmax."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, **_: self.zero_())
    logits = torch.tensor([[-1e30, 0.0, -1e30]])
    assert [1] == make_action_head(spaces.Discrete(3)).choose(logits, None)[0].tolist()


def test_a_mask_that_allows_nothing_is_refused_where_the_action_counts() -> None:
    policy, obs = policy_of("multi"), rows_of("multi", 4)
    first = torch.ones(4, dtype=torch.bool)
    obs["legal"][2, 3:5] = 0
    with pytest.raises(
        InvalidRequestError, match=r"action_mask 'legal' allows nothing for part 1 .* row 2 of 4"
    ):
        policy.act(obs, None, first)
    acts = torch.tensor([True, True, False, True])
    assert bool(policy.act(obs, None, first, acts=acts).log_prob.isfinite().all())
    # A last observation, whose value is asked for, has no action.
    steps = {key: each[:, None] for key, each in obs.items()}
    action = torch.zeros(4, 1, 3, dtype=torch.long)
    assert bool(policy.evaluate(steps, action, None, first[:, None]).value.isfinite().all())


def test_networks_do_not_see_the_mask_and_weights_do_not_have_it() -> None:
    policy = policy_of("discrete")
    plain = make_policy("mlp", spaces.Dict({"seen": spaces.Box(-1, 1, (3,))}), ACTIONS["discrete"])
    assert {name: each.shape for name, each in policy_weights(plain).items()} == {
        name: each.shape for name, each in policy_weights(policy).items()
    }


SEEN = spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize(
    ("observations", "actions", "problem"),
    [
        (SEEN, spaces.Discrete(3), "'legal' is no key of the observations"),
        (spaces.Dict(seen=SEEN), spaces.Discrete(3), "'legal' is no key of the observations"),
        (spaces.Dict(legal=spaces.MultiBinary(3)), spaces.Discrete(3), "all that there is"),
        (
            spaces.Dict(legal=spaces.MultiBinary(4), seen=SEEN),
            spaces.MultiDiscrete([2, 3]),
            "'legal' needs 5 entries, one for each choice",
        ),
        (
            spaces.Dict(legal=spaces.MultiBinary(2), seen=SEEN),
            spaces.Box(-1, 1, (2,)),
            "needs an action space with choices",
        ),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(observations: Any, actions: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        make_policy("mlp", observations, actions, action_mask="legal")
