"""CleanRL's scripts, in the shape in which they use their buffers, on Breadbox.

Its package on PyPI has none of the scripts of today, and brings an older Gymnasium; so these are
loops in their shape. One of them runs with the packages that CleanRL requires; the others need no
package of others, and no network.
"""

import json
import random
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import nn

from breadbox.model.errors import InvalidRequestError
from breadbox.testing import ServerProcess, start_server
from breadbox_adapters.cleanrl import PrioritizedReplayBuffer, ReplayBuffer
from peers.packages import environment, environment_beside
from support.documents import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    torch.set_num_threads(1)
    with start_server() as started:
        yield started


def cartpoles(count: int, seed: int) -> SyncVectorEnv:
    def thunk() -> Any:
        return RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))

    envs = SyncVectorEnv([thunk] * count, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=seed)
    envs.single_action_space.seed(seed)
    return envs


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2)
    )


def real_next(next_obs: Any, truncations: Any, infos: dict[str, Any]) -> Any:
    made = next_obs.copy()
    for index, truncated in enumerate(truncations):
        if truncated:
            made[index] = infos["final_obs"][index]
    return made


@pytest.fixture(scope="module")
def beside_cleanrl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with what CleanRL's pyproject.toml requires, as of its commit fe8d8a03."""
    # Its torch is the one that is here; the numpy of its lock file has the same interface.
    folder = tmp_path_factory.mktemp("cleanrl")
    return environment_beside(
        folder, "gymnasium==0.29.1", "rich<12", "numpy<2", f"breadbox[cleanrl] @ {ROOT.as_uri()}"
    )


@pytest.mark.peers
@pytest.mark.timeout(300)
def test_a_script_runs_with_the_packages_that_cleanrl_requires(
    server: ServerProcess, beside_cleanrl: Path
) -> None:
    done = subprocess.run(
        [beside_cleanrl, Path(__file__).parent / "cleanrl" / "dqn.py", server.address],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert ("0.29.1", "1", 11) == (
        seen["gymnasium"],
        seen["numpy"].partition(".")[0],
        int(seen["rich"].partition(".")[0]),
    )
    assert 600 == seen["kept"]
    assert 0.5 < seen["done_share"] * 600 / seen["ended"] < 2
    assert [[4000, 4], [4000, 1], [4000, 4], [4000, 1], [4000, 1]] == seen["shapes"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_dqn_script_learns_with_its_buffer_exchanged(server: ServerProcess) -> None:
    seed, steps = 1, 9_000
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = cartpoles(1, seed)
    q_network, target_network = network(), network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    rb = ReplayBuffer(
        10_000,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        handle_timeout_termination=False,
        server=server.address,
        run="cleanrl-dqn",
    )
    returns: list[float] = []
    obs, _ = envs.reset(seed=seed)
    for global_step in range(steps):
        epsilon = max(0.05, 1 - global_step / (0.4 * steps))
        if random.random() < epsilon:
            actions = np.array([envs.single_action_space.sample()])
        else:
            actions = torch.argmax(q_network(torch.Tensor(obs)), dim=1).numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        if (terminations | truncations)[0]:
            returns.append(float(infos["final_info"]["episode"]["r"][0]))
        rb.add(obs, real_next(next_obs, truncations, infos), actions, rewards, terminations, infos)
        obs = next_obs
        if global_step > 500 and global_step % 4 == 0:
            data = rb.sample(64)
            with torch.no_grad():
                target_max, _ = target_network(data.next_observations).max(dim=1)
                td_target = data.rewards.flatten() + 0.99 * target_max * (1 - data.dones.flatten())
            old_val = q_network(data.observations).gather(1, data.actions).squeeze()
            loss = nn.functional.mse_loss(td_target, old_val)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if global_step % 200 == 0:
                target_network.load_state_dict(q_network.state_dict())
    first, last = float(np.mean(returns[:20])), float(np.mean(returns[-10:]))
    assert last > max(60.0, 2.5 * first), (first, last)
    assert steps == rb.size()
    rb.close()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_environments_that_reset_in_the_next_step_are_refused_and_no_others(
    server: ServerProcess, mode: AutoresetMode
) -> None:
    """The scripts pass the first observation of the next episode after a terminal state."""
    make = partial(gymnasium.make, "CartPole-v1")
    envs = SyncVectorEnv([make] * 2, autoreset_mode=mode)
    spaces_of_one = envs.single_observation_space, envs.single_action_space
    rb = ReplayBuffer(
        5000, *spaces_of_one, "cpu", 2, handle_timeout_termination=False, server=server.address
    )
    envs.single_action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    ended, refusal = 0, ""
    for _ in range(400):
        actions = np.array([envs.single_action_space.sample() for _ in range(2)])
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real = real_next(next_obs, truncations, infos)
        try:
            rb.add(obs, real, actions, 0 * rewards, terminations, infos)
        except InvalidRequestError as error:
            refusal = str(error)
            break
        ended += int(terminations.sum())
        obs = next_obs
    rb.close()
    if mode is AutoresetMode.SAME_STEP:
        assert ("", True) == (refusal, ended > 20)
    else:
        assert "autoreset_mode=AutoresetMode.SAME_STEP" in refusal
        assert 8 <= ended <= 10


@pytest.mark.parametrize(
    "place", ["docs/adapters.md#cleanrl", "adapters/breadbox_adapters/cleanrl.py#1"]
)
def test_the_lines_of_page_and_docstring_make_a_buffer(server: ServerProcess, place: str) -> None:
    """In docs/adapters.md and in cleanrl.py; a script has the names that the latter needs."""
    code = BLOCKS[place].code.replace("localhost:50051", server.address)
    names: dict[str, Any] = {
        "args": SimpleNamespace(buffer_size=100),
        "envs": cartpoles(1, 0),
        "device": "cpu",
        "run_name": "CartPole-v1__dqn__1__1700000000",
    }
    exec(compile(code, place, "exec"), names)
    rb = names["rb"]
    obs = np.zeros((1, 4), np.float32)
    rb.add(obs, obs, np.array([1]), np.array([1.0]), np.array([True]), {})
    assert (1, 4) == tuple(rb.sample(1).observations.shape)
    rb.close()


def test_samples_have_the_shapes_and_types_of_its_buffer(server: ServerProcess) -> None:
    box = spaces.Box(-1, 1, (3,), np.float32)
    rb = ReplayBuffer(100, box, spaces.Discrete(4), "cpu", n_envs=2, server=server.address)
    obs = np.zeros((2, 3), np.float32)
    for number in range(20):
        limits = np.array([number % 5 == 4, False])
        rb.add(
            obs, obs + 1, np.array([1, 3]), np.array([0.5, number]), limits,
            {"TimeLimit.truncated": limits},
        )  # fmt: skip
        obs = obs + 1
    data = rb.sample(64)
    shapes = [
        (tuple(each.shape), each.dtype)
        for each in (data.observations, data.actions, data.dones, data.rewards)
    ]
    assert [
        ((64, 3), torch.float32),
        ((64, 1), torch.int64),
        ((64, 1), torch.float32),
        ((64, 1), torch.float32),
    ] == shapes
    assert torch.equal(data.next_observations, data.observations + 1)
    assert 0 == data.dones.sum(), "they were time limits"
    assert 20 == rb.size()
    rb.close()


def test_scripts_of_continuous_actions_get_what_their_networks_take(server: ServerProcess) -> None:
    """They say by hand that doubles are to be floats, as ddpg, td3 and sac_continuous_action do."""
    obs_space = spaces.Box(-10, 10, (3,), np.float64)
    obs_space.dtype = np.float32  # type: ignore[assignment]  # A type, as the scripts write it.
    for found in (0, 12):  # The same name again finds the run, whose steps are floats.
        rb = ReplayBuffer(
            100, obs_space, spaces.Box(-2, 2, (2,)), "cpu", n_envs=2,
            handle_timeout_termination=False, server=server.address, run="continuous",
        )  # fmt: skip
        assert found == 2 * rb.size()
        obs = np.zeros((2, 3))
        for number in range(6):
            actions = np.full((2, 2), number / 4, np.float32)
            rb.add(obs, obs + 1, actions, np.ones(2), np.array([False, False]), {})
            obs = obs + 1
        data = rb.sample(32)
        assert ((32, 3), torch.float32) == (tuple(data.observations.shape), data.observations.dtype)
        assert ((32, 2), torch.float32) == (tuple(data.actions.shape), data.actions.dtype)
        assert torch.equal(data.observations, data.actions.repeat(1, 2)[:, :3] * 4)
        rb.close()


def test_what_a_time_limit_cut_off_is_no_end_and_nothing_bridges_it(server: ServerProcess) -> None:
    """Scripts hand over terminations alone: the limit shows in the observation that follows."""
    rb = PrioritizedReplayBuffer(
        100, (1,), "cpu", n_step=3, gamma=0.5, obs_dtype=np.float32, server=server.address
    )
    for episode, done in ((0, False), (100, True), (200, False)):
        for step in range(4):
            now = np.array([[episode + step]], np.float32)
            rb.add(now, np.array([step % 2]), np.array([1.0]), now + 1, [done and step == 3])
    data = rb.sample(500)
    rows = {
        int(start): (float(reward), int(after), bool(done), float(discount))
        for start, reward, after, done, discount in zip(
            data.observations[:, 0],
            data.rewards[:, 0],
            data.next_observations[:, 0],
            data.dones[:, 0],
            data.discounts[:, 0],
            strict=True,
        )
    }
    assert {
        0: (1.75, 3, False, 0.125),
        1: (1.75, 4, False, 0.125),
        2: (1.5, 4, False, 0.25),
        3: (1.0, 4, False, 0.5),
        101: (1.75, 104, True, 0.125),
        103: (1.0, 104, True, 0.5),
    } == {start: rows[start] for start in (0, 1, 2, 3, 101, 103)}
    assert 12 == len(rows)
    rb.close()


def test_priorities_choose_and_weights_make_up_for_it(server: ServerProcess) -> None:
    rb = PrioritizedReplayBuffer(
        100, (1,), "cpu", 1, 0.9, alpha=1.0, beta=1.0, obs_dtype=np.float32, server=server.address
    )
    for step in range(10):
        now = np.array([[step]], np.float32)
        rb.add(now, np.array([0]), np.array([float(step)]), now + 1, [False])
    first = rb.sample(400)
    assert set(range(10)) == set(map(int, first.rewards))
    assert torch.equal(torch.ones(400, 1), first.weights)
    by_reward = dict(zip(map(int, first.rewards), first.indices, strict=True))
    assert 10 == len(set(by_reward.values()))
    rb.update_priorities([by_reward[each] for each in range(10)], np.array([9.0] + [1.0] * 9))
    data = rb.sample(4000)
    share = float((data.rewards == 0).float().mean())
    assert 0.46 < share < 0.54, "nine of eighteen"
    assert {round(1 / 9, 3), 1.0} == {round(float(weight), 3) for weight in data.weights}
    late = rb.replay.mirror.late_update_count
    rb.update_priorities([10**15], [5.0])
    assert late + 1 == rb.replay.mirror.late_update_count
    rb.close()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_rainbow_script_learns_with_its_buffer_exchanged(server: ServerProcess) -> None:
    seed, steps, gamma, n_step = 2, 7_000, 0.99, 3
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    envs = cartpoles(1, seed)
    q_network, target_network = network(), network()
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    shape = envs.single_observation_space.shape
    assert shape is not None
    rb = PrioritizedReplayBuffer(
        10_000, shape, "cpu", n_step, gamma, 0.5, 0.4, 1e-6,
        obs_dtype=np.float32, server=server.address, run="cleanrl-rainbow",
    )  # fmt: skip
    returns: list[float] = []
    obs, _ = envs.reset(seed=seed)
    for global_step in range(steps):
        rb.beta = min(1.0, 0.4 + global_step * 0.6 / steps)
        if random.random() < max(0.05, 1 - global_step / (0.4 * steps)):
            actions = np.array([envs.single_action_space.sample()])
        else:
            actions = torch.argmax(q_network(torch.Tensor(obs)), dim=1).numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        if (terminations | truncations)[0]:
            returns.append(float(infos["final_info"]["episode"]["r"][0]))
        rb.add(obs, actions, rewards, real_next(next_obs, truncations, infos), terminations)
        obs = next_obs
        if global_step > 500 and global_step % 4 == 0:
            data = rb.sample(64)
            with torch.no_grad():
                best, _ = target_network(data.next_observations).max(dim=1, keepdim=True)
                target = data.rewards + gamma**n_step * best * (1 - data.dones.float())
            value = q_network(data.observations).gather(1, data.actions)
            loss_per_sample = nn.functional.smooth_l1_loss(value, target, reduction="none")
            loss = (loss_per_sample * data.weights).mean()
            rb.update_priorities(data.indices, loss_per_sample.detach().numpy())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if global_step % 200 == 0:
                target_network.load_state_dict(q_network.state_dict())
    first, last = float(np.mean(returns[:20])), float(np.mean(returns[-10:]))
    assert last > max(60.0, 2.5 * first), (first, last)
    rb.close()
