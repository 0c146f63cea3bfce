"""TorchRL's own collectors and losses on Breadbox.

Needs its package and all that it imports, the extra `torchrl`: `make setup` installs it.
"""

import pickle  # noqa: TID251 - what collectors send a buffer by
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.model import errors
from breadbox.testing import ServerProcess, start_server
from breadbox.writing.advantages import estimate_advantages
from peers.packages import require

require("torchrl", "torchrl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler
    from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
    from torchrl.modules import MLP, EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate
    from torchrl.objectives.value import GAE

from breadbox_adapters.torchrl import BreadboxReplayBuffer  # noqa: E402
from breadbox_adapters.torchrl.buffer import _FollowedMirror  # noqa: E402
from support import growth  # noqa: E402
from support.documents import BLOCKS  # noqa: E402
from support.eventually import eventually_sync  # noqa: E402
from support.fragments import vector_fragment  # noqa: E402

pytestmark = [
    pytest.mark.timeout(120),
    # TorchRL's own, of things that its next releases change.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::UserWarning:tensordict"),
]

PYTHON = {place: block for place, block in BLOCKS.items() if block.language == "python"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server(options=("--preset", "off-policy")) as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address) as made:
        made.start_session()
        yield made


class Doubled:
    """A transform that can be pickled."""

    def __call__(self, data: TensorDict) -> TensorDict:
        data["doubled"] = 2 * data["log", "number"]
        return data


def steps(count: int, start: int = 0) -> TensorDict:
    """A run of steps that shows its numbers; every fifth ends an episode."""
    number = torch.arange(start, start + count)
    terminated = (number % 5 == 4).unsqueeze(-1)
    after = torch.where(terminated.squeeze(-1), -number, number + 1)
    return TensorDict(
        {
            "observation": number.float().unsqueeze(-1).repeat(1, 3),
            "action": number % 2,
            "log": {"number": number},
            "next": {
                "observation": after.float().unsqueeze(-1).repeat(1, 3),
                "reward": number.float().unsqueeze(-1),
                "terminated": terminated,
                "truncated": torch.zeros_like(terminated),
                "done": terminated,
            },
        },
        batch_size=[count],
    )


def test_steps_come_back_as_they_were_extended(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, batch_size=64, seed=1) as buffer:
        index = buffer.extend(steps(20))
        assert (20, 20) == (len(buffer), len(set(index.tolist())))
        sample, info = buffer.sample(return_info=True)
        assert (64,) == tuple(sample.batch_size)
        number = sample["log", "number"]
        given = steps(20)[number]
        for name in given.keys(include_nested=True, leaves_only=True):
            assert torch.equal(given[name], sample[name]), name
        assert torch.equal(index[number], sample["index"])
        assert torch.equal(sample["index"], info["index"])
        assert torch.equal(torch.ones(64), info["priority_weight"])
        assert torch.equal(steps(3)["observation"], buffer[:3]["observation"])
        assert torch.equal(steps(20)[19]["action"], buffer[-1]["action"])


@pytest.mark.parametrize("left_out", [None, "terminated", "truncated"])
def test_a_time_limit_ends_an_episode_and_is_no_terminal_state(
    client: breadbox.Client, left_out: str | None
) -> None:
    """Also where steps say it by `done` and one of the two."""
    given = steps(10)
    ended = {name: torch.zeros(10, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
    ended["truncated"][4] = ended["terminated"][9] = True
    for name, flags in ended.items():
        given["next", name] = flags
    if left_out is not None:
        del given["next", left_out]
    with BreadboxReplayBuffer(client, batch_size=100, seed=1) as buffer:
        buffer.extend(given)
        sample = buffer.sample()
    found = {
        int(number): tuple(bool(sample["next", name][row]) for name in ("terminated", "truncated"))
        for row, number in enumerate(sample["log", "number"])
    }
    assert {number: (number == 9, number == 4) for number in range(10)} == found
    done = sample["next", "terminated"] | sample["next", "truncated"]
    assert torch.equal(done, sample["next", "done"])


def test_what_extend_returns_and_samples_have_are_indexes(client: breadbox.Client) -> None:
    """Of the steps themselves, however many came before, and went."""
    with BreadboxReplayBuffer(client, batch_size=16, capacity_steps=40) as buffer:
        indexes = [buffer.extend(steps(10, start=10 * number)) for number in range(6)]
        for number, index in list(enumerate(indexes))[3:]:
            assert torch.equal(steps(10, 10 * number)["observation"], buffer[index]["observation"])
            at = int(index[4])
            assert torch.equal(steps(1, 10 * number + 4)["action"][0], buffer[at]["action"])
            pairs = index.view(2, 5)
            assert (2, 5) == tuple(buffer[pairs].batch_size)
        sample = buffer.sample()
        assert torch.equal(sample["observation"], buffer[sample["index"]]["observation"])
        assert torch.equal(steps(60)[20:23]["observation"], buffer[:3]["observation"])
        assert torch.equal(steps(60)[59]["observation"], buffer[-1]["observation"])
        is_even = torch.arange(40) % 2 == 0
        assert torch.equal(steps(60)[20::2]["observation"], buffer[is_even]["observation"])
        one = buffer.add(steps(61)[60])
        assert torch.equal(steps(61)[60]["observation"], buffer[one]["observation"])
        with pytest.raises(IndexError):
            buffer[indexes[0]]


@pytest.mark.parametrize("alpha", [None, 0.7])
def test_slices_are_laid_out_as_those_of_its_own_sampler(
    client: breadbox.Client, alpha: float | None
) -> None:
    own = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(slice_len=3, end_key=("next", "done")),
        batch_size=600,
    )
    with BreadboxReplayBuffer(client, batch_size=600, slice_len=3, seed=1, alpha=alpha) as buffer:
        for each in (own, buffer):
            each.extend(steps(23))
        theirs, mine = own.sample(), buffer.sample()
        assert theirs.batch_size == mine.batch_size
        for data in (theirs, mine):
            number = data["log", "number"].view(200, 3)
            assert torch.equal(number[:, :1] + torch.arange(3), number)
            assert (number % 5 <= torch.arange(3) + 2).all(), "an episode has five steps"
            last = data["next"].view(200, 3)
            ended = last["terminated"] | last["truncated"]
            assert torch.equal(ended, last["done"])
            assert [0, 0, 200] == ended.sum(0).view(3).tolist()
            assert torch.equal(number % 5 == 4, last["terminated"].squeeze(-1))
        starts = [set(each["log", "number"][::3].tolist()) for each in (theirs, mine)]
        assert starts[0] == starts[1]
        with pytest.raises(errors.InvalidRequestError, match="multiple of slice_len"):
            buffer.sample(5)
    with (
        BreadboxReplayBuffer(client, batch_size=12, slice_len=6) as longer,
        pytest.raises(errors.InvalidRequestError, match="too few episodes of 6 steps"),
    ):
        longer.sample(wait=True, timeout=20)


def test_samples_that_are_drawn_ahead_are_samples(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, batch_size=8, prefetch=3) as buffer:
        with pytest.raises(errors.InvalidRequestError, match="no step"):
            buffer.sample()
        buffer.extend(steps(10))
        for _ in range(20):
            sample = buffer.sample()
            assert (8,) == tuple(sample.batch_size)
            assert torch.equal(sample["observation"][:, 0], sample["log", "number"].float())
        assert (4,) == tuple(buffer.sample(4).batch_size)
        buffer.extend(steps(10, start=10))
        eventually_sync(lambda: buffer.sample()["log", "number"].max() >= 10)
    assert not [each for each in threading.enumerate() if each.name.startswith("loader")]


def test_a_pickled_buffer_is_one_of_the_same_steps(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(
        client, batch_size=32, n_step=2, transform=Doubled(), seed=3
    ) as buffer:
        buffer.extend(steps(10))
        told = pickle.dumps(buffer)
        assert len(told) < 5_000
        with pickle.loads(told) as copy:
            copy.extend(steps(5, start=10))
            sample = copy.sample()
            assert "steps_to_next_obs" in sample
            assert torch.equal(2 * sample["log", "number"], sample["doubled"])
            copy.wait_until_sampleable(15, timeout=20)
            buffer.wait_until_sampleable(15, timeout=20)


def test_steps_of_several_environments_stay_apart(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, batch_size=8, n_step=3, gamma=0.5) as buffer:
        both = torch.stack([steps(4), steps(4, start=100)])
        index = buffer.extend(both)
        assert (2, 4) == tuple(index.shape)
        buffer.extend(torch.stack([steps(4, start=4), steps(4, start=104)]))
        windows = buffer.mirror.steps(index[:, 3].numpy(), n_step=3, gamma=0.5)
        # Of each the window goes on into the next extension: 3, 4 and the end; 103, 104, the end.
        np.testing.assert_allclose([3 + 2, 103 + 52], windows.reward)
        assert [True, True] == windows.terminated.tolist()


def test_steps_that_do_not_follow_one_another_are_no_window(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, n_step=4) as buffer:
        shuffled = steps(20)[torch.tensor([0, 1, 7, 8, 2, 9])]
        index = buffer.extend(shuffled)
        batch = buffer.mirror.steps(index.numpy(), n_step=4, gamma=1.0)
        assert [0 + 1, 1, 7 + 8, 8, 2, 9] == batch.reward.tolist()
        assert torch.equal(
            shuffled["next", "observation"][:, 0],
            torch.from_numpy(buffer.mirror.steps(index.numpy()).next_obs[:, 0]),
        )


def test_n_step_samples_tell_how_many_steps_they_are(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, batch_size=50, n_step=3, gamma=0.9) as buffer:
        buffer.extend(steps(10))
        sample = buffer.sample()
        number = sample["log", "number"]
        counts = torch.minimum(torch.tensor(3), 5 - number % 5)
        assert torch.equal(counts, sample["steps_to_next_obs"].squeeze(-1))
        reward = sum(((number + k) * 0.9**k * (k < counts) for k in range(3)), torch.zeros(50))
        torch.testing.assert_close(reward.float(), sample["next", "reward"].squeeze(-1))


def test_priorities_decide_what_is_drawn_and_late_ones_are_ignored(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, batch_size=400, alpha=1.0, beta=1.0, seed=2) as buffer:
        index = buffer.extend(steps(10))
        buffer.update_priority(index, torch.zeros(10))
        buffer.update_priority(index[:2], torch.tensor([3.0, 1.0]))
        buffer.update_priority(torch.tensor([1 << 40]), 7.0)
        sample = buffer.sample()
        drawn = torch.bincount(sample["log", "number"], minlength=10)
        assert 400 == int(drawn[:2].sum())
        assert 240 < int(drawn[0]) < 360
        weight = sample["priority_weight"]
        assert torch.allclose(torch.tensor(1.0), weight[sample["log", "number"] == 1])
        assert torch.allclose(torch.tensor(1 / 3), weight[sample["log", "number"] == 0], atol=1e-4)
        sample["td_error"] = (sample["log", "number"] == 1).float().unsqueeze(-1)
        buffer.update_tensordict_priority(sample)
        assert {1} == set(buffer.sample()["log", "number"].tolist())
        with pytest.raises(errors.InvalidRequestError, match="td_error"):
            buffer.update_tensordict_priority(buffer.sample())


def test_a_buffer_that_is_made_again_has_its_steps_and_priorities(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, alpha=1.0) as buffer:
        index = buffer.extend(steps(10))
        buffer.update_priority(index, torch.arange(10.0))
        state = buffer.state_dict()
    with BreadboxReplayBuffer(client, batch_size=4, alpha=1.0) as again:
        again.load_state_dict(state)
        assert (10, 10) == (len(again), again.write_count)
        np.testing.assert_allclose(np.arange(10.0), again.mirror.priorities(index), atol=1e-6)
        again.empty()
        assert 0 == len(again)
        with pytest.raises(errors.SessionEndedError):
            again.load_state_dict(state)
        again.extend(steps(4))
        assert 4 == len(again)


def test_waiting_ends_with_steps_or_with_the_timeout(client: breadbox.Client) -> None:
    with BreadboxReplayBuffer(client, batch_size=4) as buffer:
        assert not buffer.can_sample()
        with pytest.raises(errors.InvalidRequestError):
            buffer.sample()
        with pytest.raises(TimeoutError):
            buffer.sample(wait=True, timeout=0.05)
        with pytest.raises(TimeoutError):
            buffer.wait_until_sampleable(timeout=0.05)
        buffer.extend(steps(4))
        assert buffer.can_sample()
        assert (4,) == tuple(next(iter(buffer)).batch_size)
        assert 1 == buffer.add(steps(5)[4]) % 2**24 + 1
        with pytest.raises(errors.InvalidRequestError, match="collectors"):
            buffer.extend(TensorDict({"observation": torch.zeros(2, 1)}, [2]))


def test_a_buffer_of_one_length_is_refused_with_the_remedy(client: breadbox.Client) -> None:
    config = breadbox.BufferConfig(schema=breadbox.SchemaPolicy.ONE)
    client.create_buffer("one-length", config)
    with pytest.raises(errors.InvalidRequestError, match="ragged"):
        BreadboxReplayBuffer(client, buffer="one-length")


def test_the_lines_of_buffer_py_run(client: breadbox.Client) -> None:
    block = PYTHON["adapters/breadbox_adapters/torchrl/buffer.py#BreadboxReplayBuffer"]
    names: dict[str, Any] = {"data": steps(300), "BreadboxReplayBuffer": BreadboxReplayBuffer}
    exec(block.code.replace("localhost:50051", client.address), names)  # It is ours.
    with names["buffer"] as buffer:
        assert (300, (256,)) == (len(buffer), tuple(names["sample"].batch_size))


def q_network(env: Any) -> QValueActor:
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64])
    return QValueActor(network, in_keys=["observation"], spec=env.action_spec)


@pytest.mark.parametrize("env_count", [1, 3])
def test_torchrls_collector_and_loss_learn_from_it(client: breadbox.Client, env_count: int) -> None:
    """Its prioritised DQN, with a buffer in place of its own."""
    torch.manual_seed(0)

    def make() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())

    env = make() if env_count == 1 else SerialEnv(env_count, make)
    actor = q_network(make())
    explore = EGreedyModule(
        make().action_spec, eps_init=1.0, eps_end=0.1, annealing_num_steps=1_000
    )
    policy = TensorDictSequential(actor, explore)
    collector = Collector(env, policy, frames_per_batch=150, total_frames=1_500)
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.99)
    update_target = SoftUpdate(loss, tau=0.02)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
    with BreadboxReplayBuffer(
        client, batch_size=64, alpha=0.6, beta=0.4, n_step=3, gamma=0.99, seed=0
    ) as buffer:
        errors_seen = []
        for data in collector:
            buffer.extend(data)
            for _ in range(15):
                sample = buffer.sample()
                optimizer.zero_grad()
                loss(sample)["loss"].backward()
                optimizer.step()
                update_target.step()
                buffer.update_tensordict_priority(sample)
            explore.step(data.numel())
            errors_seen.append(float(sample["td_error"].mean()))
        assert 1_500 == len(buffer) == buffer.write_count
    collector.shutdown()
    # It has learned that steps are worth something: 1 each, for as long as the pole stands.
    with torch.no_grad():
        upright = actor(TensorDict({"observation": torch.zeros(1, 4)}, [1]))
    assert float(upright["chosen_action_value"]) > 3


def test_the_lines_of_adapters_md_learn(client: breadbox.Client) -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    actor = q_network(env)
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    collector = Collector(env, actor, frames_per_batch=100, total_frames=200)
    block = PYTHON["docs/adapters.md#torchrl"]
    names: dict[str, Any] = {"collector": collector, "loss": loss}
    exec(block.code.replace("localhost:50051", client.address), names)  # It is ours.
    with names["buffer"] as buffer:
        assert 200 == len(buffer)
        assert (64,) == tuple(names["sample"].batch_size)
    collector.shutdown()


def test_a_collector_fills_it_by_itself(client: breadbox.Client) -> None:
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    with BreadboxReplayBuffer(client, batch_size=16) as buffer:
        collector = Collector(
            env, None, frames_per_batch=50, total_frames=150, replay_buffer=buffer
        )
        for nothing in collector:
            assert nothing is None
        assert 150 == len(buffer)
        collector.shutdown()


def test_torchrls_advantages_of_its_sequences_are_ours(client: breadbox.Client) -> None:
    """Terminal states are worth nothing."""
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 1)
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["state_value"])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=module, shifted=False, average_gae=False)
    with BreadboxReplayBuffer(client) as buffer:
        buffer.extend(steps(12))
        data = buffer[:]
    with torch.no_grad():
        theirs = gae(data[None].clone())["advantage"].squeeze(-1)
        values = network(data["observation"]).squeeze(-1).numpy()[None]
        following = network(data["next", "observation"]).squeeze(-1).numpy()[None]
    ours = estimate_advantages(
        value=values,
        next_value=following[:, -1],
        reward=data["next", "reward"].squeeze(-1).numpy()[None],
        terminated=data["next", "terminated"].squeeze(-1).numpy()[None],
        truncated=np.zeros((1, 12), np.bool_),
        successor=np.full(1, -1),
        final_value=np.full((1, 12), np.nan, np.float32),
        discount=0.9,
        gae_lambda=0.8,
    )
    np.testing.assert_allclose(theirs.numpy(), ours.advantage, rtol=1e-4, atol=1e-4)


@growth.marked
def test_each_fragment_of_many_takes_as_long_to_wait_for_as_one_of_few(
    client: breadbox.Client,
) -> None:
    def waiting(count: int) -> Callable[[], object]:
        fragments = [vector_fragment(index, step_count=1) for index in range(count)]
        mirror = _FollowedMirror(client, capacity_steps=count)
        mirror.close()  # They come by the test alone, after one another.
        mirror.follow(fragments)
        keys = iter([(each.worker_id, each.fragment_index) for each in fragments])

        def wait_for(is_there: Callable[[], bool], *_: object) -> None:
            while not is_there():
                mirror._arrivals[next(keys)] = 1  # noqa: SLF001 - as `extend` does

        mirror.wait_for = wait_for  # type: ignore[method-assign,assignment]
        return lambda: mirror.handles_of(fragments, 1.0)

    growth.check(waiting, 4096)
