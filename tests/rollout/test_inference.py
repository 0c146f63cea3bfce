"""Batched inference on the CPU, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError
from breadbox_policies import make_policy
from breadbox_policies.networks import MlpPolicy
from breadbox_rollout.acting.inference import (
    Inference,
    PolicyOutputError,
    _in_types,
    check_device,
    state_arrays,
)

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
CPU = torch.device("cpu")


def inference_of(
    name: str = "lstm", *, bfloat16: bool = False, seed: int = 0, greedy: bool = False
) -> Inference:
    torch.manual_seed(0)
    policy = make_policy(name, VECTOR, spaces.Discrete(4))
    return Inference(policy, CPU, bfloat16=bfloat16, seed=seed, greedy=greedy)


OBS = np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3)
FIRST = np.zeros(6, np.bool_)


def test_the_same_seed_chooses_the_same_actions_and_another_seed_others() -> None:
    one, same, other = (
        inference_of(seed=seed).act(OBS, [inference_of().initial_state] * 6, FIRST).action
        for seed in (1, 1, 2)
    )
    assert one.tolist() == same.tolist()
    assert one.tolist() != other.tolist()


def test_an_environment_gets_the_same_answer_in_any_batch() -> None:
    together = inference_of()
    state = together.initial_state
    before = together.act(OBS, [state] * 6, FIRST)
    after = together.act(OBS, before.states, FIRST)
    alone = inference_of()
    for row in range(6):
        single = alone.act(OBS[row : row + 1], [before.states[row]], FIRST[:1])
        np.testing.assert_allclose(after.value[row], single.value[0], atol=1e-6)


def test_a_greedy_one_takes_the_likeliest_actions_and_carries_states() -> None:
    inference = inference_of(greedy=True)
    policy = inference.policy
    with torch.no_grad():
        policy.actor.weight.mul_(100)  # type: ignore[operator]
    states, chosen = [inference.initial_state] * 6, []
    for _ in range(4):
        decision = inference.act(OBS, states, FIRST)
        states = decision.states
        chosen.append(decision.action.tolist())
    # Every action judged at every step; [action, row, step].
    obs = torch.from_numpy(OBS)[:, None].expand(6, 4, 3)
    first = torch.zeros(6, 4, dtype=torch.bool)
    with torch.no_grad():
        judged = torch.stack(
            [
                policy.evaluate(
                    obs, torch.full((6, 4), action), policy.initial_state(6), first
                ).log_prob
                for action in range(4)
            ]
        )
    assert judged.argmax(0).T.tolist() == chosen


def test_a_policy_that_cannot_act_greedily_is_refused_only_where_it_shall() -> None:
    class Old(MlpPolicy):
        def act(self, obs, state, first, *, generator=None):  # type: ignore[no-untyped-def, override]
            return super().act(obs, state, first, generator=generator)

    policy = Old(VECTOR, spaces.Discrete(4))
    assert (6,) == Inference(policy, CPU).act(OBS, [None] * 6, FIRST).action.shape
    with pytest.raises(InvalidRequestError, match=r"greedy needs .* Old\.act takes no argument"):
        Inference(policy, CPU, greedy=True)


def test_a_policy_without_memory_needs_no_states() -> None:
    decision = inference_of("mlp").act(OBS, [None] * 6, FIRST)
    assert [None] * 6 == decision.states
    assert not inference_of("mlp").is_recurrent


@pytest.mark.parametrize("state", [(), {}, [], ((), {"a": None})])
def test_a_state_without_tensors_is_refused_with_the_remedy(state: object) -> None:
    """Its batch size cannot be told; the first of no parts was an IndexError."""
    policy = make_policy("mlp", VECTOR, spaces.Discrete(4))
    policy.initial_state = lambda batch_size: state  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match="return None for a policy without memory"):
        Inference(policy, CPU)


def test_bfloat16_computes_coarsely_and_answers_in_float32() -> None:
    exact = inference_of()
    coarse = inference_of(bfloat16=True)
    states = [exact.initial_state] * 6
    wanted, got = exact.act(OBS, states, FIRST), coarse.act(OBS, states, FIRST)
    np.testing.assert_allclose(wanted.value, got.value, atol=0.05)
    assert {np.dtype(np.float32)} == {got.value.dtype, got.log_prob.dtype}
    assert np.float32 == state_arrays(got.states[0])[0].dtype


def test_output_that_is_not_finite_is_refused() -> None:
    inference = inference_of("mlp")
    with torch.no_grad():
        inference.policy.critic[4].bias.fill_(np.nan)  # type: ignore[index]
    with pytest.raises(PolicyOutputError, match="have diverged"):
        inference.act(OBS, [None] * 6, FIRST)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert CPU == check_device("cpu")
    with pytest.raises(InvalidRequestError, match="is not a device of torch"):
        check_device("toaster")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequestError, match="finds no CUDA device"):
            check_device("cuda")


@pytest.mark.parametrize("of", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
def test_actions_beyond_an_integer_space_are_its_ends_and_never_wrapped(
    of: type, dtype: type
) -> None:
    drawn: NDArray[Any] = np.array([[-300, -5, 0, 100, 300]], of)
    bounds = np.iinfo(dtype)
    wanted = [min(max(each, bounds.min), bounds.max) for each in (-300, -5, 0, 100, 300)]
    (found,) = _in_types((drawn,), (np.zeros((1, 5), dtype),))
    assert (wanted, dtype) == (found[0].tolist(), found.dtype)


def test_a_float_beyond_int64_is_its_end() -> None:
    found = _in_types(np.array([1e30, -1e30], np.float64), np.zeros(2, np.int64))
    assert found[0] > 2**62
    assert found[1] == -(2**63)
