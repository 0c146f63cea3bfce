"""Policies: what acting says of an action, evaluating it later says again."""

import math
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import map_tree
from breadbox_policies import (
    PolicyModule,
    WeightsMismatchError,
    make_policy,
    policy_weights,
    set_policy_weights,
)
from breadbox_policies.actions import make_action_head
from breadbox_policies.encoders import VectorFlattener

IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
VECTOR = spaces.Box(-1, 1, (5,), np.float32)
OBSERVATIONS: dict[str, gymnasium.Space[Any]] = {
    "mlp": spaces.Dict({"vector": VECTOR, "mode": spaces.Discrete(3)}),
    "lstm": VECTOR,
    "conv_lstm": spaces.Dict({"image": IMAGE, "vector": VECTOR}),
    "random": VECTOR,
}
ACTIONS: list[gymnasium.Space[Any]] = [
    spaces.Discrete(4, start=1),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiBinary(3),
    spaces.Box(-2, 2, (2,), np.float32),
    spaces.Dict({"buttons": spaces.Discrete(7), "camera": spaces.Box(-1, 1, (2,), np.float32)}),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict({"turn": spaces.Box(0, 9, (1,), np.float32)})]),
]


def draw(space: gymnasium.Space[Any], count: int) -> Any:
    """A tree of tensors [count, ...] of samples of the space."""
    space.seed(3)
    if isinstance(space, spaces.Dict):
        return {key: draw(part, count) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(draw(part, count) for part in space)
    return torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(count)]))


def stack_steps(trees: list[Any]) -> Any:
    if isinstance(trees[0], dict):
        return {key: stack_steps([tree[key] for tree in trees]) for key in trees[0]}
    if isinstance(trees[0], tuple):
        return tuple(stack_steps(list(parts)) for parts in zip(*trees, strict=True))
    return torch.stack(trees, 1)


def policy_of(name: str, action_space: gymnasium.Space[Any]) -> PolicyModule:
    torch.manual_seed(0)
    return make_policy(name, OBSERVATIONS[name], action_space)


@pytest.mark.parametrize("name", list(OBSERVATIONS))
@pytest.mark.parametrize("action_space", ACTIONS, ids=lambda space: type(space).__name__)
def test_evaluation_repeats_the_log_prob_and_value_of_acting_across_an_episode_border(
    name: str, action_space: gymnasium.Space[Any]
) -> None:
    policy = policy_of(name, action_space)
    generator = torch.Generator().manual_seed(1)
    state = in_state = policy.initial_state(2)
    first = torch.tensor([[True, False, False, False], [False, False, True, False]])
    results, seen = [], []
    with torch.no_grad():
        for step in range(4):
            obs = draw(OBSERVATIONS[name], 2)
            results.append(policy.act(obs, state, first[:, step], generator=generator))
            state = results[-1].state
            seen.append(obs)
        judged = policy.evaluate(
            stack_steps(seen), stack_steps([r.action for r in results]), in_state, first
        )
    torch.testing.assert_close(torch.stack([r.log_prob for r in results], 1), judged.log_prob)
    torch.testing.assert_close(torch.stack([r.value for r in results], 1), judged.value)
    assert (2, 4) == tuple(judged.entropy.shape)


@pytest.mark.parametrize("name", ["lstm", "conv_lstm"])
def test_a_first_step_forgets_whatever_state_it_was_given(name: str) -> None:
    policy = policy_of(name, ACTIONS[0])
    obs = draw(OBSERVATIONS[name], 3)
    dirty = tuple(torch.full_like(part, 7.0) for part in policy.initial_state(3))
    first = torch.ones(3, dtype=torch.bool)
    with torch.no_grad():
        clean_value = policy.act(obs, policy.initial_state(3), first).value
        assert torch.equal(clean_value, policy.act(obs, dirty, first).value)
        assert not torch.equal(clean_value, policy.act(obs, dirty, ~first).value)


def test_split_undoes_merge() -> None:
    policy = policy_of("lstm", ACTIONS[0])
    singles = [(torch.full((128,), float(i)), torch.full((128,), float(-i))) for i in range(3)]
    parts = policy.split_state(policy.merge_state(singles))
    assert all(
        torch.equal(wanted, got)
        for single, part in zip(singles, parts, strict=True)
        for wanted, got in zip(single, part, strict=True)
    )


def test_parts_of_a_state_are_merged_by_their_keys_and_kept_in_the_first_ones_order() -> None:
    policy = policy_of("lstm", ACTIONS[0])
    one = {"z": torch.tensor([1.0]), "a": [torch.tensor([2.0]), None]}
    other = {"a": [torch.tensor([4.0]), None], "z": torch.tensor([3.0])}
    merged = policy.merge_state([one, other])

    assert ["z", "a"] == list(merged)
    assert [[1.0], [3.0]] == merged["z"].tolist()
    assert [[2.0], [4.0]] == merged["a"][0].tolist()
    assert [one, {**one, **other}] == policy.split_state(merged)
    assert None is policy.merge_state([None, None])


def test_a_fresh_policy_is_near_uniform_and_the_same_seed_draws_the_same_actions() -> None:
    policy = policy_of("mlp", spaces.Discrete(4))
    obs, first = draw(OBSERVATIONS["mlp"], 64), torch.zeros(64, dtype=torch.bool)
    draws = [
        policy.act(obs, None, first, generator=torch.Generator().manual_seed(5)) for _ in range(2)
    ]
    assert torch.equal(draws[0].action, draws[1].action)
    assert float((draws[0].log_prob.detach().exp() - 0.25).abs().max()) < 0.05


def test_choices_are_drawn_as_often_as_they_are_likely() -> None:
    head = make_action_head(spaces.Discrete(3))
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(20_000, 3)
    action, log_prob = head.choose(logits, torch.Generator().manual_seed(2))
    shares = torch.bincount(action, minlength=3) / len(action)
    torch.testing.assert_close(torch.tensor([0.5, 0.3, 0.2]), shares, atol=0.02, rtol=0.0)
    torch.testing.assert_close(logits[0][action], log_prob)


@pytest.mark.parametrize(
    ("shape", "layout_ok"),
    [((84, 84), True), ((4, 84, 84), True), ((9, 9, 1), True), ((5,), False)],
)
def test_conv_lstm_takes_any_image_layout_and_refuses_what_is_no_image(
    shape: tuple[int, ...], layout_ok: bool
) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    if not layout_ok:
        with pytest.raises(InvalidRequestError, match="no uint8 image"):
            make_policy("conv_lstm", space, spaces.Discrete(2))
        return
    policy = make_policy("conv_lstm", space, spaces.Discrete(2))
    result = policy.act(draw(space, 2), policy.initial_state(2), torch.ones(2, dtype=torch.bool))
    assert (2,) == tuple(result.action.shape)


def test_weights_travel_as_arrays_and_make_two_policies_equal() -> None:
    one = policy_of("conv_lstm", ACTIONS[4])
    torch.manual_seed(9)
    two = make_policy("conv_lstm", OBSERVATIONS["conv_lstm"], ACTIONS[4])
    set_policy_weights(two, policy_weights(one))
    assert all(
        torch.equal(one.state_dict()[name], two.state_dict()[name]) for name in one.state_dict()
    )


def test_weights_that_do_not_fit_are_named_and_change_nothing() -> None:
    """The ancestor loaded what fitted and labelled it as the new version."""
    policy = policy_of("mlp", ACTIONS[0])
    before = policy_weights(policy)
    weights = {name: array + 1 for name, array in before.items()}
    weights["actor.0.weight"] = np.zeros((2, 2), np.float32)
    weights["surplus"] = np.zeros(1, np.float32)
    del weights["critic.0.bias"]
    with pytest.raises(WeightsMismatchError) as caught:
        set_policy_weights(policy, weights)
    assert ["critic.0.bias"] == caught.value.missing
    assert ["surplus"] == caught.value.unexpected
    assert "actor.0.weight (wanted (64, 8), got (2, 2))" in str(caught.value)
    assert all(np.array_equal(before[k], v) for k, v in policy_weights(policy).items())
    set_policy_weights(policy, weights, strict=False)
    assert np.array_equal(before["critic.4.bias"] + 1, policy_weights(policy)["critic.4.bias"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nonesuch", "is not one of auto, mlp, lstm, conv_lstm, random, nor module"),
        ("no_such_module:thing", "cannot be loaded"),
        ("math:nothing", "cannot be loaded"),
    ],
)
def test_an_unknown_policy_is_refused_by_name(name: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        make_policy(name, VECTOR, spaces.Discrete(2))


def test_an_unknown_option_and_an_unknown_space_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="policy_options"):
        make_policy("mlp", VECTOR, spaces.Discrete(2), depth=3)
    with pytest.raises(InvalidRequestError, match="has no action head for Text"):
        make_policy("mlp", VECTOR, spaces.Text(3))


ATARI = spaces.Box(0, 255, (210, 160, 3), np.uint8)
NESTED = spaces.Dict({"view": spaces.Dict({"left": IMAGE}), "vector": VECTOR})


@pytest.mark.parametrize(
    ("name", "space", "where"),
    [
        ("mlp", ATARI, "holds an image, Box"),
        ("mlp", spaces.Box(0, 255, (4, 84, 84), np.uint8), "holds an image, Box"),
        ("mlp", spaces.Box(0, 255, (84, 84), np.uint8), "holds an image, Box"),
        ("mlp", OBSERVATIONS["conv_lstm"], "holds an image at image, "),
        ("lstm", NESTED, "holds an image at view.left, "),
        ("mlp", spaces.Box(0, 1, (64, 64, 3)), "holds an image, Box.*as uint8, from 0 to 255"),
        ("lstm", spaces.Box(0, 255, (1, 84, 84)), "holds an image, Box.*as uint8, from 0 to 255"),
    ],
)
def test_an_image_that_would_be_flattened_is_refused_with_what_takes_it(
    name: str, space: gymnasium.Space[Any], where: str
) -> None:
    """A vector of 100,800 numbers learns nothing, and nobody was told."""
    with pytest.raises(InvalidRequestError, match=where) as refused:
        make_policy(name, space, spaces.Discrete(2))
    assert "use the policy 'conv_lstm'" in str(refused.value)


def test_a_small_board_or_a_matrix_of_measurements_is_a_vector() -> None:
    make_policy("mlp", spaces.Box(0, 2, (6, 7), np.uint8), spaces.Discrete(7))
    make_policy("mlp", spaces.Box(-np.inf, np.inf, (16, 20)), spaces.Discrete(7))


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (VECTOR, "MlpPolicy"),
        (OBSERVATIONS["mlp"], "MlpPolicy"),
        (ATARI, "ConvLstmPolicy"),
        (OBSERVATIONS["conv_lstm"], "ConvLstmPolicy"),
    ],
)
def test_the_automatic_policy_fits_what_is_seen(space: gymnasium.Space[Any], expected: str) -> None:
    policy = make_policy("auto", space, spaces.Discrete(2))
    assert expected == type(policy).__name__
    policy.act(
        draw(space, 2), policy.initial_state(2), torch.ones(2, dtype=torch.bool)
    )  # and takes it


def likeliest(space: gymnasium.Space[Any], inputs: list[float]) -> Any:
    """The mode of a space's distribution for one row of a network's outputs, naively."""
    if isinstance(space, spaces.Discrete):
        return int(space.start) + inputs.index(max(inputs))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        counts = (
            space.nvec.reshape(-1).tolist()
            if isinstance(space, spaces.MultiDiscrete)
            else [2] * int(np.prod(space.shape))
        )
        chosen, start = [], 0
        for count in counts:
            part = inputs[start : start + count]
            chosen.append(part.index(max(part)))
            start += count
        return np.array(chosen).reshape(space.shape).tolist()
    if isinstance(space, spaces.Box):
        half = (space.high - space.low) / 2
        unit = np.array(inputs, np.float32).reshape(space.shape)
        return (space.low + half + half * unit if space.is_bounded() else unit).tolist()
    assert isinstance(space, spaces.Dict | spaces.Tuple)
    acted, start = {}, 0
    for key, part_space in space.items() if isinstance(space, spaces.Dict) else enumerate(space):
        width = make_action_head(part_space).input_count
        acted[key] = likeliest(part_space, inputs[start : start + width])
        start += width
    return acted if isinstance(space, spaces.Dict) else tuple(acted.values())


def tree_leaves(tree: Any) -> list[torch.Tensor]:
    if not isinstance(tree, dict | tuple):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in tree_leaves(part)]


def row_of(action: Any, row: int) -> Any:
    if isinstance(action, dict):
        return {key: row_of(part, row) for key, part in action.items()}
    if isinstance(action, tuple):
        return tuple(row_of(part, row) for part in action)
    return action[row].tolist()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(7),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([3, 2, 5]),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
        spaces.MultiBinary(6),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-1, 1, (4,)),
        spaces.Box(-1, 1, (2, 3)),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(-1, 3, (2,)),
        spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 3, (2,))]),
        spaces.Dict({"b": spaces.Discrete(4), "a": spaces.Box(-1, 1, (2,))}),
    ],
    ids=str,
)
def test_the_mode_is_what_a_naive_search_finds(space: gymnasium.Space[Any]) -> None:
    head = make_action_head(space)
    # Distinct numbers, far beyond the bounds of boxes: nothing clips them here.
    inputs = torch.randn(64, head.input_count, generator=torch.Generator().manual_seed(3)) * 3
    action, log_prob = head.choose(inputs, None, greedy=True)
    assert [likeliest(space, row) for row in inputs.tolist()] == [
        row_of(action, row) for row in range(64)
    ]
    torch.testing.assert_close(head.judge(inputs, action).log_prob, log_prob)
    sampled, _ = head.choose(inputs, torch.Generator().manual_seed(4))
    for sample, mode in zip(tree_leaves(sampled), tree_leaves(action), strict=True):
        assert (sample.dtype, sample.shape) == (mode.dtype, mode.shape)
    # Nothing is likelier than the mode.
    samples = torch.stack(
        [head.choose(inputs, torch.Generator().manual_seed(seed))[1] for seed in range(50)]
    )
    assert bool((samples <= log_prob + 1e-5).all())


def test_a_box_is_explored_as_widely_as_it_is() -> None:
    """A deviation of 0.6 in a box from 0 to 255 would be no exploration, and 0 is its end."""
    space = spaces.Box(np.array([0, -1], np.float32), np.array([255, 1], np.float32))
    head = make_action_head(space)
    inputs = torch.zeros(20_000, 2)
    action, log_prob = head.choose(inputs, torch.Generator().manual_seed(1))
    torch.testing.assert_close(action.mean(0), torch.tensor([127.5, 0.0]), atol=2.0, rtol=0.0)
    shares = action.std(0) / torch.tensor([127.5, 1.0])
    torch.testing.assert_close(shares, torch.full((2,), math.exp(-0.5)), atol=0.02, rtol=0.0)
    told = torch.distributions.Normal(
        torch.tensor([127.5, 0.0]), math.exp(-0.5) * torch.tensor([127.5, 1.0])
    )
    torch.testing.assert_close(log_prob, told.log_prob(action).sum(-1))
    judged = head.judge(inputs, action)
    torch.testing.assert_close(judged.log_prob, log_prob)
    torch.testing.assert_close(judged.entropy[0], told.entropy().sum())


def test_a_number_without_bounds_or_between_equal_ones_is_taken_as_it_is() -> None:
    widest = float(np.finfo(np.float32).max)
    low, high = np.array([[-np.inf, 0, 2, -widest], [np.inf, np.inf, 2, widest]], np.float32)
    action, _ = make_action_head(spaces.Box(low, high)).choose(
        torch.full((1, 4), 0.5), None, greedy=True
    )
    assert [[0.5] * 4] == action.tolist()


def test_the_scale_of_a_box_is_no_weight() -> None:
    assert ["log_std"] == list(make_action_head(spaces.Box(0, 9, (2,))).state_dict())


@pytest.mark.parametrize("name", list(OBSERVATIONS))
@pytest.mark.parametrize("action_space", ACTIONS, ids=lambda space: type(space).__name__)
def test_a_greedy_policy_needs_no_randomness_and_agrees_with_its_evaluation(
    name: str, action_space: gymnasium.Space[Any]
) -> None:
    policy = policy_of(name, action_space)
    obs, first = draw(OBSERVATIONS[name], 3), torch.ones(3, dtype=torch.bool)
    before = torch.get_rng_state()
    with torch.no_grad():
        acted = policy.act(obs, policy.initial_state(3), first, greedy=True)
        again = policy.act(obs, policy.initial_state(3), first, greedy=True)
        judged = policy.evaluate(
            stack_steps([obs]), stack_steps([acted.action]), policy.initial_state(3), first[:, None]
        )
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(tree_leaves(acted.action), tree_leaves(again.action), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(acted.log_prob[:, None], judged.log_prob)


def test_a_greedy_recurrent_policy_carries_its_state() -> None:
    """The same choices step by step as over the whole sequence at once."""
    policy = policy_of("lstm", spaces.Discrete(5))
    with torch.no_grad():
        policy.actor.weight.mul_(500)  # type: ignore[operator]
    seen = list(draw(OBSERVATIONS["lstm"], 24).reshape(12, 2, -1))
    first = torch.zeros(2, 12, dtype=torch.bool)
    first[:, 0] = first[1, 7] = True
    state = policy.initial_state(2)
    chosen, forgetful = [], []
    with torch.no_grad():
        for step, obs in enumerate(seen):
            acted = policy.act(obs, state, first[:, step], greedy=True)
            state = acted.state
            chosen.append(acted.action)
            blank = policy.initial_state(2)
            forgetful.append(policy.act(obs, blank, first[:, step], greedy=True).action)
        # Every action judged at every step: the naive way to the likeliest one.
        judged = torch.stack(
            [
                policy.evaluate(
                    stack_steps(seen), torch.full((2, 12), action), policy.initial_state(2), first
                ).log_prob
                for action in range(5)
            ]
        )
    assert torch.equal(judged.argmax(0), torch.stack(chosen, 1))
    assert not torch.equal(torch.stack(forgetful, 1), torch.stack(chosen, 1))


PARTS: list[tuple[str, gymnasium.Space[Any]]] = [
    ("turn", spaces.Box(-2, 2, (2,), np.float32)),
    ("image", IMAGE),
    ("mode", spaces.Discrete(3)),
    ("aim", spaces.Box(-2, 2, (2,), np.float32)),
    ("other", IMAGE),
]


@pytest.mark.parametrize("name", ["mlp", "lstm", "conv_lstm"])
def test_weights_mean_the_same_for_spaces_in_any_order_of_keys(name: str) -> None:
    """Two workers, or a worker and a learner, may list the keys of one space differently."""
    has_images = name == "conv_lstm"
    parts = [(key, part) for key, part in PARTS if has_images or part is not IMAGE]
    choices = [("b", spaces.Discrete(3)), ("a", spaces.Discrete(4)), ("c", spaces.Discrete(2))]
    first = make_policy(name, spaces.Dict(parts), spaces.Dict(choices))
    other = make_policy(name, spaces.Dict(parts[::-1]), spaces.Dict(choices[::-1]))
    set_policy_weights(other, policy_weights(first))
    obs = draw(spaces.Dict(parts), 4)
    begun = torch.ones(4, dtype=torch.bool)
    with torch.no_grad():
        acted = first.act(obs, first.initial_state(4), begun, greedy=True)
        again = other.act(dict(reversed(obs.items())), other.initial_state(4), begun, greedy=True)
    assert torch.equal(acted.value, again.value)
    assert {key: each.tolist() for key, each in acted.action.items()} == {
        key: each.tolist() for key, each in again.action.items()
    }


@pytest.mark.parametrize("name", ["mlp", "lstm", "conv_lstm"])
def test_only_numbers_of_an_observation_are_normalized(name: str) -> None:
    """Choices stay one-hot, images are scaled as ever."""
    space = spaces.Dict({"mode": spaces.Discrete(3), "vector": VECTOR})
    if name != "mlp":
        space["image"] = IMAGE
    torch.manual_seed(0)
    policy = make_policy(name, space, ACTIONS[0], normalize_observations=True)
    batch = SimpleNamespace(
        obs={key: stack_steps([part] * 4) for key, part in draw(space, 8).items()}
    )
    policy.update_statistics(batch)
    (flattener,) = (each for each in policy.modules() if isinstance(each, VectorFlattener))
    with torch.no_grad():
        flat = flattener(batch.obs).reshape(-1, 8)
    choices, numbers = flat[:, :3], flat[:, 3:]
    assert {0.0, 1.0} == set(choices.unique().tolist())
    torch.testing.assert_close(torch.zeros(5), numbers.mean(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.ones(5), numbers.std(0, correction=0), atol=1e-4, rtol=0)
    state = policy.initial_state(8)
    first = torch.ones((8, 4), dtype=torch.bool)
    action = torch.ones((8, 4), dtype=torch.int64)
    with torch.no_grad():
        judged = policy.evaluate(batch.obs, action, state, first)
        acted = policy.act(map_tree(lambda leaf: leaf[:, 0], batch.obs), state, first[:, 0])
    torch.testing.assert_close(acted.value, judged.value[:, 0])


def test_numbers_that_are_not_finite_or_do_not_vary_leave_the_statistics_usable() -> None:
    torch.manual_seed(0)
    policy = make_policy("mlp", VECTOR, ACTIONS[0], normalize_observations=True)
    obs = torch.full((2, 3, 5), 7.0)
    obs[0, 0, 0], obs[1, 2, 4] = torch.nan, torch.inf
    policy.update_statistics(SimpleNamespace(obs=obs))
    named = policy_weights(policy)
    assert 4.0 == named["_flattener._normalizer.count"]
    np.testing.assert_array_equal(np.full(5, 7.0), named["_flattener._normalizer.mean"])
    first = torch.ones(2, dtype=torch.bool)
    with torch.no_grad():
        assert policy.act(torch.full((2, 5), 7.5), None, first).value.isfinite().all()


def test_weights_of_a_policy_without_statistics_are_refused_by_name() -> None:
    plain, normalized = (
        make_policy("mlp", VECTOR, ACTIONS[0], normalize_observations=on) for on in (False, True)
    )
    with pytest.raises(WeightsMismatchError, match=r"missing: _flattener\._normalizer\.count"):
        set_policy_weights(normalized, policy_weights(plain))
    assert all("_normalizer" not in name for name in policy_weights(plain))
