"""Samples in TorchRL's hands: its containers, buffers and advantage estimation take them."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.advantages import estimate_advantages
from breadbox.fragment import Fragment
from breadbox.testing import start_server
from breadbox_learner.sampling import SampledBuffer

HOW = "which no extra installs: pip install torchrl tensordict"
tensordict = pytest.importorskip("tensordict", reason=f"needs the package tensordict, {HOW}")
torchrl_data = pytest.importorskip("torchrl.data", reason=f"needs the package torchrl, {HOW}")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STEPS = 6
DISCOUNT, GAE_LAMBDA = 0.9, 0.8


def fragment(index: int) -> Fragment:
    """Episodes end at step 1 (its goal) and step 3 (its time), with known final observations."""
    rng = np.random.default_rng(index)
    terminated = np.arange(STEPS) == 1
    truncated = np.arange(STEPS) == 3
    ended = terminated | truncated
    return Fragment(
        worker_id="w",
        fragment_index=index,
        session_id="torchrl",
        model_version_min=0,
        model_version_max=0,
        obs={"position": rng.random((STEPS, 3), np.float32)},
        action=rng.integers(0, 2, STEPS),
        reward=rng.random(STEPS, np.float32),
        terminated=terminated,
        truncated=truncated,
        first=np.concatenate([[False], ended[:-1]]),
        episode_id=np.concatenate([[0], np.cumsum(ended)[:-1]]),
        next_obs={"position": rng.random(3, np.float32)},
        final_obs_step=np.array([1, 3], np.int32),
        final_obs={"position": rng.random((2, 3), np.float32)},
        log_prob=rng.random(STEPS, np.float32),
        # A gap before each, so that no fragment goes on where another ended.
        discontinuity=True,
    )


@pytest.fixture(scope="module")
def client() -> Iterator[breadbox.Client]:
    with start_server() as server, breadbox.connect(server.address) as made:
        made.start_session("torchrl")
        yield made


@pytest.fixture
def sample(client: breadbox.Client, request: pytest.FixtureRequest) -> Any:
    """A sample of four fragments; their indexes go on from test to test."""
    buffer = SampledBuffer(client, batch_size=4)
    client.start_session("torchrl-" + request.node.name)
    some = [fragment(index) for index in range(4)]
    for each in some:
        each.session_id = "torchrl-" + request.node.name
    assert [True] * 4 == buffer.extend(some)
    return buffer.sample()


def test_a_sample_is_a_tensordict_where_the_package_is_installed(sample: Any) -> None:
    assert isinstance(sample, tensordict.TensorDict)
    assert (4, STEPS) == tuple(sample.batch_size)
    assert torch.device("cpu") == sample.device
    assert (4, STEPS, 3) == tuple(sample["next", "observation", "position"].shape)
    assert (4, STEPS, 1) == tuple(sample["next", "done"].shape)
    steps = sample.reshape(-1)
    assert (4 * STEPS,) == tuple(steps.batch_size)


def test_torchrls_own_buffer_takes_a_sample(sample: Any) -> None:
    buffer = torchrl_data.TensorDictReplayBuffer(
        storage=torchrl_data.LazyTensorStorage(100), batch_size=5
    )
    buffer.extend(sample.reshape(-1))
    assert 4 * STEPS == len(buffer)
    held = buffer[:]
    assert torch.equal(sample["next", "reward"].flatten(), held["next", "reward"].flatten())
    assert (5,) == tuple(buffer.sample().batch_size)


def test_torchrls_advantages_of_a_sample_are_ours(sample: Any) -> None:
    """Terminal states are worth nothing; a time limit goes on from its final observation."""
    nn = pytest.importorskip("tensordict.nn")
    value = pytest.importorskip("torchrl.objectives.value")
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1)
    module = nn.TensorDictModule(
        network, in_keys=[("observation", "position")], out_keys=["state_value"]
    )
    gae = value.GAE(
        gamma=DISCOUNT, lmbda=GAE_LAMBDA, value_network=module, shifted=False, average_gae=False
    )
    with torch.no_grad():
        theirs = gae(sample.clone())["advantage"].squeeze(-1)
        values = network(sample["observation", "position"]).squeeze(-1).numpy()
        following = network(sample["next", "observation", "position"]).squeeze(-1).numpy()
    truncated = sample["next", "truncated"].squeeze(-1).numpy()
    ours = estimate_advantages(
        value=values,
        next_value=following[:, -1],
        reward=sample["next", "reward"].squeeze(-1).numpy(),
        terminated=sample["next", "terminated"].squeeze(-1).numpy(),
        truncated=truncated,
        successor=np.full(4, -1),
        final_value=np.where(truncated, following, np.nan),
        discount=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
    )
    np.testing.assert_allclose(theirs.numpy(), ours.advantage, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["sample", "add", "extend", "__len__", "__iter__"])
def test_a_call_written_for_torchrls_buffer_binds_here(method: str) -> None:
    theirs = inspect.signature(getattr(torchrl_data.ReplayBuffer, method)).parameters
    ours = inspect.signature(getattr(SampledBuffer, method)).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        name for name, each in theirs.items() if each.kind in kinds and each.default is each.empty
    ]
    assert len(needed) == len([n for n, each in ours.items() if each.default is each.empty])
    if method == "sample":
        assert {"batch_size", "return_info"} <= theirs.keys() & ours.keys()
