"""The rollout worker on a CUDA device."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.acting.inference import Inference, check_device, state_arrays
from support.rollout_service import FakeService
from support.rollout_worker import running_worker
from support.scripted_env import (
    ACTION_SPACE,
    OBSERVATION_SPACE,
    check_fragment,
    check_sequence,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"
)

IMAGE = spaces.Box(0, 255, (84, 84), np.uint8)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_recurrent_policy_acts_on_cuda_as_it_does_on_the_cpu(bfloat16: bool) -> None:
    torch.manual_seed(0)
    policies = [make_policy("conv_lstm", IMAGE, spaces.Discrete(6)) for _ in range(2)]
    policies[1].load_state_dict(policies[0].state_dict())
    here = Inference(policies[0], torch.device("cpu"))
    there = Inference(policies[1], check_device("cuda"), bfloat16=bfloat16)
    obs = np.random.default_rng(0).integers(0, 256, (5, 84, 84), np.uint8)
    first = np.array([True, False, False, False, True])
    ours = here.act(obs, [here.initial_state] * 5, first)
    theirs = there.act(obs, [there.initial_state] * 5, first)
    tolerance = 5e-2 if bfloat16 else 1e-3
    np.testing.assert_allclose(ours.value, theirs.value, atol=tolerance)
    for mine, other in zip(ours.states, theirs.states, strict=True):
        for part, copy in zip(state_arrays(mine), state_arrays(other), strict=True):
            np.testing.assert_allclose(part, copy, atol=tolerance)
    assert "cuda" == there.policy.actor.weight.device.type
    assert (np.dtype(np.int64), np.dtype(np.float32)) == (
        theirs.action.dtype,
        theirs.log_prob.dtype,
    )


def test_weights_are_adopted_on_cuda_while_environments_run() -> None:
    service = FakeService()
    published = {}
    with running_worker(service, ".....t...c", policy="lstm", device="cuda") as rollout:
        for version in range(5):
            torch.manual_seed(version)
            published[version] = make_policy("lstm", OBSERVATION_SPACE, ACTION_SPACE)
            service.publish("s", version, policy_weights(published[version]))
            rollout.wait_for_fragments(len(service.fragments) + 10)
    assert "cuda" == rollout.device_type
    for fragments in rollout.by_worker().values():
        check_sequence(fragments)
    for fragment in service.fragments:
        check_fragment(fragment)
        if fragment.model_version is not None:
            continue
        with torch.no_grad():
            judged = published[fragment.model_version_min].evaluate(
                {key: torch.from_numpy(value[None]) for key, value in fragment.obs.items()},
                torch.from_numpy(fragment.action[None]),
                tuple(torch.from_numpy(part[None]) for part in fragment.in_state),
                torch.from_numpy(fragment.first[None]),
            )
        assert fragment.log_prob is not None
        np.testing.assert_allclose(judged.log_prob[0].numpy(), fragment.log_prob, atol=1e-3)
    assert len({fragment.model_version_min for fragment in service.fragments}) >= 3


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint16, np.uint32, np.int64])
def test_choices_of_every_dtype_are_drawn_within_their_space_and_judged(dtype: type) -> None:
    start: NDArray[Any] = np.array([0, 5, 200], dtype)
    space = spaces.MultiDiscrete(np.array([2, 3, 50], dtype), dtype=dtype, start=start)
    policy = make_policy("mlp", spaces.Box(-1, 1, (3,)), space).to("cuda")
    first = torch.ones(64, dtype=torch.bool, device="cuda")
    action = policy.act(torch.zeros(64, 3, device="cuda"), None, first).action
    assert all(space.contains(each.astype(dtype)) for each in action.cpu().numpy())
    obs = torch.zeros(64, 1, 3, device="cuda")
    judged = policy.evaluate(obs, action[:, None], None, first[:, None])
    assert torch.isfinite(judged.log_prob).all()
