"""Squashed and state-dependent normal distributions, beside torch.distributions and integrals."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import AffineTransform, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from breadbox.model.errors import InvalidRequestError
from breadbox.writing.clipping import clipped
from breadbox_policies import make_policy
from breadbox_policies.actions import ActionHead, _log_ndtr, make_action_head

BOX = spaces.Box(np.array([-2, 0, 100], np.float32), np.array([2, 1, 300], np.float32))
SIZE = 3
SEED = 11


def head_of(space: Any = BOX, **options: bool) -> ActionHead:
    head = make_action_head(space, "", **options)
    for parameter in head.parameters():
        with torch.no_grad():
            parameter.copy_(torch.linspace(-1.5, 0.2, len(parameter)))
    return head


def inputs_of(head: ActionHead, rows: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return scale * torch.randn(rows, head.input_count, generator=generator)


def normal_of(head: Any, inputs: torch.Tensor) -> Normal:
    """The distribution before a tanh, in units of the box, in float64."""
    inputs = inputs.double()
    if head.input_count == SIZE:
        return Normal(inputs, head.log_std.double().exp())
    return Normal(inputs[..., :SIZE], (inputs[..., SIZE:] - 0.5).clamp(-5, 2).exp())


def told_of(head: Any, inputs: torch.Tensor, squash: bool) -> Any:
    low, high = (torch.from_numpy(each).double() for each in (BOX.low, BOX.high))
    to_box = AffineTransform((low + high) / 2, (high - low) / 2)
    transforms: list[Any] = [TanhTransform(), to_box] if squash else [to_box]
    return Independent(TransformedDistribution(normal_of(head, inputs), transforms), 1)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_the_log_prob_is_that_of_torchs_transformed_distribution(
    squash: bool, state_dependent_std: bool
) -> None:
    head = head_of(squash=squash, state_dependent_std=state_dependent_std)
    inputs = inputs_of(head, 500)
    with torch.no_grad():
        action, log_prob = head.choose(inputs, torch.Generator().manual_seed(SEED))
    told = told_of(head, inputs, squash)
    middle, half = (BOX.low + BOX.high) / 2, (BOX.high - BOX.low) / 2
    unit = ((action.numpy() - middle) / half).__abs__()
    inside = (
        torch.from_numpy((unit < 0.999).all(1)) if squash else torch.ones(500, dtype=torch.bool)
    )
    assert int(inside.sum()) > 400, f"seed {SEED}"
    wanted = told.log_prob(action.double())[inside].float()
    torch.testing.assert_close(wanted, log_prob[inside], atol=2e-3, rtol=1e-4)
    assert torch.equal(log_prob, head.judge(inputs, action).log_prob) or not squash
    torch.testing.assert_close(log_prob, head.judge(inputs, action).log_prob, atol=1e-3, rtol=1e-4)


def test_squashed_probabilities_sum_to_one_with_the_saturated_ends() -> None:
    """The integral of the density over the box, one number, wide and far-off distributions too."""
    space = spaces.Box(-3, 5, (1,), np.float32)
    head: Any = head_of(space, squash=True)
    spans = ((-3, -2.99, 20_001), (-2.99, 4.99, 80_001), (4.99, 5, 20_001))  # Steep at the ends.
    grid = torch.cat([torch.linspace(*span, dtype=torch.float64) for span in spans])
    for mean in (0.0, 0.7, -2.0, 6.0):
        for log_std in (-1.5, 0.0, 1.5):
            with torch.no_grad():
                head.log_std.fill_(log_std)
                judged = head.judge(torch.full((len(grid), 1), mean), grid.float()[:, None])
            total = torch.trapezoid(judged.log_prob.double().exp(), grid).item()
            assert total == pytest.approx(1.0, abs=3e-3), (mean, log_std)


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_the_entropy_of_a_squashed_normal_is_its_integral(state_dependent_std: bool) -> None:
    head = head_of(squash=True, state_dependent_std=state_dependent_std)
    inputs = inputs_of(head, 20)
    normal = normal_of(head, inputs)
    steps = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    unit = normal.mean[..., None] + normal.stddev[..., None] * steps
    weight = (-0.5 * steps**2).exp() / np.sqrt(2 * np.pi)
    # log(1 - tanh(u)^2) = -2 log cosh(u)
    slope = -2 * (unit.abs() + torch.log1p((-2 * unit.abs()).exp()) - np.log(2))
    half = torch.from_numpy((BOX.high - BOX.low) / 2).double()
    wanted = normal.entropy() + half.log() + torch.trapezoid(slope * weight, steps)
    got = head.judge(inputs, torch.from_numpy(BOX.low).expand(20, SIZE)).entropy
    torch.testing.assert_close(wanted.sum(-1).float(), got, atol=5e-3, rtol=1e-3)


def by_hand(at: float, mean: float, log_std: float) -> float:
    """Log-density of tanh(u) at a share of the way to an end of 2, in float64."""
    std, edge = math.exp(log_std), math.atanh(0.999)
    if abs(at) < 0.999:
        noise = (math.atanh(at) - mean) / std
        told = -(noise**2) / 2 - log_std - math.log(2 * math.pi) / 2
        return told - math.log(2) - math.log(1 - at**2)
    beyond = math.erfc((edge - math.copysign(mean, mean * at)) / std / math.sqrt(2)) / 2
    return math.log(beyond) - math.log(2 * 0.001)


@pytest.mark.parametrize("at", [-1.0, -0.9995, -0.5, 0.3, 0.9989, 0.9991, 1.0])
def test_gradients_are_finite_differences_also_at_the_ends(at: float) -> None:
    head = make_action_head(spaces.Box(-2, 2, (1,)), squash=True, state_dependent_std=True)
    step = 1e-5
    for mean, raw in ((0.2, 0.1), (-1.5, 0.6), (3.0, -0.2), (5.0, 1.0)):
        inputs = torch.tensor([[mean, raw]], requires_grad=True)
        log_prob = head.judge(inputs, torch.tensor([[2 * at]])).log_prob
        log_prob.sum().backward()
        assert inputs.grad is not None
        log_std = raw - 0.5
        wanted = by_hand(at, mean, log_std)
        slopes = [
            (by_hand(at, mean + step, log_std) - by_hand(at, mean - step, log_std)) / (2 * step),
            (by_hand(at, mean, log_std + step) - by_hand(at, mean, log_std - step)) / (2 * step),
        ]
        assert wanted == pytest.approx(log_prob.item(), rel=1e-3, abs=1e-3), (mean, raw)
        assert slopes == pytest.approx(inputs.grad[0].tolist(), rel=2e-3, abs=1e-3), (mean, raw)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_saturated_actions_are_finite_within_the_box_and_judged_as_they_were_acted(
    scale: float, state_dependent_std: bool
) -> None:
    head = head_of(squash=True, state_dependent_std=state_dependent_std)
    inputs = inputs_of(head, 300, scale).requires_grad_()
    for action, log_prob in (
        head.choose(inputs, torch.Generator().manual_seed(SEED)),
        head.choose(inputs, None, greedy=True),
    ):
        taken = action.detach().numpy()
        # What is executed is what is recorded: nothing is clipped.
        assert np.array_equal(taken, clipped(BOX, taken)), f"seed {SEED}"
        judged = head.judge(inputs, action.detach())
        assert torch.equal(log_prob, judged.log_prob)
        loss = judged.log_prob.sum() + judged.entropy.sum()
        (gradient,) = torch.autograd.grad(loss, inputs)
        for each in (log_prob, judged.entropy, gradient):
            assert [] == each[~each.isfinite()].tolist()


def test_the_tail_of_the_normal_distribution_has_its_gradient_however_far() -> None:
    """The derivative of log P(normal < x) is about -x far below 0; torch's is 0.4 at -1e8."""
    points = [-1e8, -1e4, -300.0, -30.0, -10.5, -9.5, -3.0, 0.0, 3.0, 50.0]
    x = torch.tensor(points, requires_grad=True)
    value = _log_ndtr(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    for at, got, rise in zip(points, value.tolist(), slope.tolist(), strict=True):
        if at > -30:
            told = math.log(math.erfc(-at / math.sqrt(2)) / 2)
        else:
            told = -(at**2) / 2 - np.log(-at) - np.log(2 * np.pi) / 2
        assert got == pytest.approx(told, rel=1e-4, abs=1e-6), at
        # The density over the probability.
        assert rise == pytest.approx(
            np.exp(-(at**2) / 2 - np.log(2 * np.pi) / 2 - told), rel=2e-3, abs=1e-9
        ) or rise == pytest.approx(-at, rel=2e-3), at


def test_a_box_of_float64_is_not_left_by_rounding() -> None:
    """0.1 is no float32: the nearest one is outside."""
    space = spaces.Box(np.array([-0.1, 1e6]), np.array([0.1, 1e6 + 0.1]), dtype=np.float64)
    head = make_action_head(space, squash=True)
    for sign in (-50.0, 50.0):
        action = head.choose(torch.full((1, 2), sign), None, greedy=True)[0].detach().numpy()
        assert (space.low <= action).all()
        assert (action <= space.high).all()


def test_the_deviation_follows_the_observation_within_its_range() -> None:
    head = make_action_head(spaces.Box(-1, 1, (1,)), state_dependent_std=True)
    assert ([], 2) == (list(head.state_dict()), head.input_count)
    for raw, log_std in ((0.0, -0.5), (1.0, 0.5), (9.0, 2.0), (-99.0, -5.0)):
        judged = head.judge(torch.tensor([[0.3, raw]]), torch.tensor([[0.3]]))
        wanted = Normal(0.3, np.exp(log_std))
        assert judged.log_prob.item() == pytest.approx(wanted.log_prob(torch.tensor(0.3)).item())
        assert judged.entropy.item() == pytest.approx(wanted.entropy().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["mlp", "lstm", "random"])
def test_policies_take_the_options_for_boxes_among_other_parts(name: str) -> None:
    torch.manual_seed(SEED)
    action_space = spaces.Dict({"go": spaces.Discrete(3), "turn": BOX})
    policy = make_policy(
        name, spaces.Box(-1, 1, (5,)), action_space, squash=True, state_dependent_std=True
    )
    first = torch.ones(6, dtype=torch.bool)
    acted = policy.act(torch.rand(6, 5), policy.initial_state(6), first)
    assert BOX.contains(acted.action["turn"][0].detach().numpy())
    assert bool(acted.log_prob.isfinite().all())


@pytest.mark.parametrize(
    ("space", "options", "problem"),
    [
        (spaces.Discrete(3), {"squash": True}, "squash is true or false, and for boxes"),
        (spaces.Discrete(3), {"state_dependent_std": True}, "state_dependent_std is true or false"),
        (BOX, {"squash": "no"}, "squash is true or false"),
        (spaces.Box(-np.inf, 1, (2,)), {"squash": True}, "squash needs boxes between two ends"),
        (spaces.Box(0, 9, (2,), np.int64), {"squash": True}, "has no action head for Box"),
    ],
)
def test_an_option_that_does_not_fit_the_actions_is_refused(
    space: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        make_policy("mlp", spaces.Box(-1, 1, (5,)), space, **options)
