"""Stable-Baselines3's own algorithms on Breadbox, and its own buffers beside ours.

Needs its package and all that it imports, the extra `sb3`: `make setup` installs it.
"""

import pickle  # noqa: TID251 - what checkpoints are, and ours alone
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import breadbox
from breadbox.environment import connect_from_environment
from breadbox.model import errors
from breadbox.testing import ServerProcess, start_server
from peers.packages import require
from support.documents import BLOCKS, ROOT
from support.eventually import eventually_sync
from support.token_files import write_tokens

sb3 = require("stable_baselines3", "sb3")

import torch  # noqa: E402
from stable_baselines3 import DQN, SAC  # noqa: E402
from stable_baselines3.common.buffers import (  # noqa: E402
    DictReplayBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
)
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.policies import BasePolicy  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer  # noqa: E402

from breadbox_adapters import run_replay  # noqa: E402
from breadbox_adapters.sb3 import (  # noqa: E402
    LAG_STEPS,
    BreadboxHerReplayBuffer,
    BreadboxNStepReplayBuffer,
    BreadboxReplayBuffer,
)

pytestmark = pytest.mark.timeout(120)

BOX = spaces.Box(-10, 10, (3,), np.float32)
ACTION = spaces.Box(-2, 2, (2,), np.float32)
FRAMES = spaces.Box(0, 255, (4, 8, 8), np.uint8)
NESTED = spaces.Dict({"frame": FRAMES, "level": spaces.Discrete(5), "pose": BOX})
PENDULUM = (spaces.Box(-8, 8, (3,), np.float32), spaces.Box(-2, 2, (1,), np.float32))
SPACES = {
    "vectors": (BOX, ACTION),
    "discrete": (spaces.Discrete(7), spaces.Discrete(3)),
    "frames": (FRAMES, spaces.Discrete(4)),
    "doubles": (spaces.Box(-1, 1, (2,), np.float64), spaces.Box(-1, 1, (1,), np.float64)),
    "multi": (spaces.MultiBinary(4), spaces.MultiDiscrete([3, 2])),
    "dict": (NESTED, ACTION),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as started:
        yield started


def each_key(obs: Any) -> dict[str, Any]:
    return obs if isinstance(obs, dict) else {"": obs}


def batched(space: spaces.Space[Any], count: int) -> Any:
    """An observation of each environment."""
    if isinstance(space, spaces.Dict):
        return {key: batched(part, count) for key, part in space.items()}
    return np.stack([np.asarray(space.sample(), space.dtype) for _ in range(count)])


def walk(buffers: list[Any], obs_space: Any, action_space: Any, steps: int, env_count: int) -> None:
    """The same steps into several buffers; episodes of 5, every second one cut off.

    A step's reward is its number, by which it is found again.
    """
    obs_space.seed(0)
    action_space.seed(0)
    obs = batched(obs_space, env_count)
    for time in range(steps):
        done = time % 5 == 4
        is_limit = done and time % 10 == 9
        following = batched(obs_space, env_count)
        action = batched(action_space, env_count)
        reward = np.arange(env_count) + time * env_count
        infos = [{"TimeLimit.truncated": True} if is_limit else {} for _ in range(env_count)]
        for buffer in buffers:
            buffer.add(obs, following, action, reward, np.full(env_count, done), infos)
        obs = batched(obs_space, env_count) if done else following


def rows_by_reward(samples: Any) -> dict[float, list[np.ndarray]]:
    columns = [
        *each_key(samples.observations).values(),
        samples.actions,
        *each_key(samples.next_observations).values(),
        samples.dones,
    ]
    return {
        float(reward): [column[row].numpy() for column in columns]
        for row, reward in enumerate(samples.rewards[:, 0])
    }


def by_position(buffer: Any, count: int) -> Any:
    """The first steps, as buffers of others' own get them, which derive from these."""
    return buffer._get_samples(np.arange(count))  # noqa: SLF001


# Beside its own buffers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("handles_limits", [True, False])
def test_samples_are_those_of_its_own_buffer(
    server: ServerProcess, name: str, handles_limits: bool
) -> None:
    obs_space, action_space = SPACES[name]
    own_class = DictReplayBuffer if isinstance(obs_space, spaces.Dict) else ReplayBuffer
    arguments: dict[str, Any] = {"device": "cpu", "n_envs": 3}
    arguments["handle_timeout_termination"] = handles_limits
    own = own_class(300, obs_space, action_space, **arguments)
    ours = BreadboxReplayBuffer(300, obs_space, action_space, **arguments, server=server.address)
    walk([own, ours], obs_space, action_space, steps=40, env_count=3)
    wanted, got = own.sample(2000), ours.sample(2000)
    assert type(wanted) is type(got)
    assert got.discounts is None is wanted.discounts
    for one, other in list(zip(wanted, got, strict=True))[:5]:
        for key, column in each_key(one).items():
            mine = each_key(other)[key]
            assert (column.shape, column.dtype, column.device) == (
                mine.shape,
                mine.dtype,
                mine.device,
            )
    theirs, mine = rows_by_reward(wanted), rows_by_reward(got)
    assert {float(number) for number in range(120)} == set(theirs) == set(mine)
    for number, columns in theirs.items():
        for column, other in zip(columns, mine[number], strict=True):
            np.testing.assert_array_equal(column, other)
    ours.close()


@pytest.mark.parametrize("handles_limits", [True, False])
def test_n_step_returns_are_those_of_its_own_buffer(
    server: ServerProcess, handles_limits: bool
) -> None:
    obs_space = spaces.Box(-1e9, 1e9, (1,), np.float32)
    arguments: dict[str, Any] = {"device": "cpu", "n_steps": 3, "gamma": 0.9}
    arguments["handle_timeout_termination"] = handles_limits
    own = NStepReplayBuffer(200, obs_space, ACTION, **arguments)
    ours = BreadboxNStepReplayBuffer(200, obs_space, ACTION, **arguments, server=server.address)
    for time in range(53):
        done = time % 7 == 6
        # Now and then without a `done`, too, which ends a window all the same.
        infos = [{"TimeLimit.truncated": (done and time % 2 == 0) or time % 11 == 3}]
        # The first observation of an episode is not the last one of the episode before.
        now = np.array([[time + 0.5 * (time % 7 == 0)]])
        step = (now, np.array([[time + 1.0]]), np.zeros((1, 2)), np.array([time % 4]))
        for buffer in (own, ours):
            buffer.add(*step, np.array([done]), infos)

    def rows(buffer: Any) -> dict[float, tuple[float, ...]]:
        samples = buffer.sample(3000)
        columns = (samples.rewards, samples.dones, samples.next_observations, samples.discounts)
        assert [(3000, 1)] * 4 == [tuple(column.shape) for column in columns]
        return {
            float(start): tuple(round(float(column[row, 0]), 4) for column in columns)
            for row, start in enumerate(samples.observations[:, 0])
        }

    theirs, mine = rows(own), rows(ours)
    assert theirs == mine
    ours.close()


def test_normalisation_is_that_of_its_own_buffer(server: ServerProcess) -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0), gamma=0.9)
    env.reset()
    for _ in range(50):
        env.step(np.array([env.action_space.sample() for _ in range(2)]))
    arguments = (100, env.observation_space, env.action_space, "cpu", 2)
    own, ours = ReplayBuffer(*arguments), BreadboxReplayBuffer(*arguments, server=server.address)
    walk([own, ours], env.observation_space, env.action_space, steps=20, env_count=2)
    own_rows, rows = (rows_by_reward(each.sample(500, env=env)) for each in (own, ours))
    assert 40 == len(rows) == len(own_rows)
    for reward, columns in own_rows.items():
        for column, mine in zip(columns, rows[reward], strict=True):
            np.testing.assert_array_equal(column, mine)
    ours.close()


@pytest.mark.parametrize("name", SPACES)
def test_what_is_kept_can_be_looked_at_as_in_its_own_buffer(
    server: ServerProcess, name: str
) -> None:
    obs_space, action_space = SPACES[name]
    own_class = DictReplayBuffer if isinstance(obs_space, spaces.Dict) else ReplayBuffer
    own = own_class(200, obs_space, action_space, "cpu")
    ours = BreadboxReplayBuffer(200, obs_space, action_space, "cpu", server=server.address)
    with pytest.raises(errors.InvalidRequestError, match="no step"):
        _ = ours.rewards
    walk([own, ours], obs_space, action_space, steps=27, env_count=1)
    for column in ("observations", "next_observations"):
        for key, array in each_key(getattr(own, column)).items():
            mine = each_key(getattr(ours, column))[key]
            assert (array.dtype, array[:27].shape) == (mine.dtype, mine.shape)
            np.testing.assert_array_equal(array[:27], mine)
    for column in ("actions", "rewards", "dones", "timeouts"):
        array, mine = getattr(own, column)[:27], getattr(ours, column)
        assert (array.dtype, array.shape) == (mine.dtype, mine.shape), column
        np.testing.assert_array_equal(array, mine)
    ours.dones[-1] = True
    assert not ours.dones[-1]
    wanted, got = by_position(own, 27), by_position(ours, 27)
    for number, columns in rows_by_reward(wanted).items():
        for one, other in zip(columns, rows_by_reward(got)[number], strict=True):
            np.testing.assert_array_equal(one, other)
    ours.close()


@pytest.mark.parametrize("kind", [BreadboxReplayBuffer, BreadboxNStepReplayBuffer])
def test_steps_by_position_are_waited_for_as_those_that_are_drawn(
    server: ServerProcess, kind: type[BreadboxReplayBuffer]
) -> None:
    more: dict[str, Any] = {"gamma": 0.9} if kind is BreadboxNStepReplayBuffer else {}
    ours = kind(200, BOX, ACTION, "cpu", server=server.address, **more)
    walk([ours], BOX, ACTION, steps=9, env_count=1)
    assert (9, 3) == tuple(by_position(ours, 9).observations.shape)
    ours.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has that memory")
def test_another_process_takes_steps_in_and_a_checkpoint_knows_it(server: ServerProcess) -> None:
    ours = BreadboxReplayBuffer(
        50, BOX, BOX, "cpu", server=server.address, process=True, run="processed"
    )
    walk([ours], BOX, BOX, steps=20, env_count=1)
    assert set(map(float, range(20))) == set(rows_by_reward(ours.sample(500)))
    assert ours.replay.mirror.share()
    saved = pickle.dumps(ours)
    ours.close()
    again = pickle.loads(saved)
    assert again.replay.mirror.share()
    assert 20 == again.size()
    again.close()


@pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer")
def test_a_training_that_asks_for_less_memory_goes_on_where_it_was(server: ServerProcess) -> None:
    model = DQN(
        "MlpPolicy", "CartPole-v1", device="cpu", learning_starts=50, optimize_memory_usage=True,
        replay_buffer_class=BreadboxReplayBuffer,
        replay_buffer_kwargs={"server": server.address, "handle_timeout_termination": False},
    )  # fmt: skip
    for _ in range(2):
        model.learn(152)
    assert 304 == model.replay_buffer.size()
    model.replay_buffer.close()


def test_a_discount_is_never_guessed(server: ServerProcess) -> None:
    """The algorithm does not tell its own, and another one is learned with in silence."""
    with pytest.raises(TypeError, match="gamma"):
        BreadboxNStepReplayBuffer(50, BOX, ACTION, "cpu", server=server.address)  # type: ignore[call-arg]


def test_rewards_of_n_steps_are_normalised_one_by_one(server: ServerProcess) -> None:
    """Each is clipped before they are added."""
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=1, seed=0), clip_reward=1.5)
    env.ret_rms.var = 4.0
    arguments: dict[str, Any] = {"device": "cpu", "n_steps": 3, "gamma": 0.5}
    spaces_ = (env.observation_space, env.action_space)
    own = NStepReplayBuffer(100, *spaces_, **arguments)
    ours = BreadboxNStepReplayBuffer(100, *spaces_, **arguments, server=server.address)
    walk([own, ours], *spaces_, steps=20, env_count=1)

    def rows(buffer: Any) -> set[tuple[float, ...]]:
        samples = buffer.sample(1000, env=env)
        return {
            (*np.round(obs.numpy(), 4).tolist(), round(float(reward), 4))
            for obs, reward in zip(samples.observations, samples.rewards, strict=True)
        }

    assert rows(own) == rows(ours)
    ours.close()


def test_size_position_and_full_are_those_of_its_own_buffer(server: ServerProcess) -> None:
    own = ReplayBuffer(20, BOX, ACTION, "cpu", 2)
    ours = BreadboxReplayBuffer(20, BOX, ACTION, "cpu", 2, server=server.address)
    assert (0, 0, False, 10) == (ours.size(), ours.pos, ours.full, ours.buffer_size)
    for steps in (1, 6, 3, 5):
        walk([own, ours], BOX, ACTION, steps=steps, env_count=2)
        assert (own.size(), own.pos, own.full) == (ours.size(), ours.pos, ours.full)
    ours.close()


def test_a_whole_batch_of_steps_is_added_one_by_one(server: ServerProcess) -> None:
    ours = BreadboxReplayBuffer(50, BOX, ACTION, "cpu", server=server.address)
    count = 7
    obs = np.arange(count * 3, dtype=np.float32).reshape(count, 1, 3)
    ours.extend(
        obs,
        obs + 1,
        np.zeros((count, 1, 2), np.float32),
        np.arange(count, dtype=np.float32).reshape(count, 1),
        np.zeros((count, 1)),
        [[{}]] * count,
    )
    assert count == ours.size()
    assert set(map(float, range(count))) == set(rows_by_reward(ours.sample(200)))
    ours.close()


def test_a_reset_forgets_what_is_here(server: ServerProcess) -> None:
    ours = BreadboxReplayBuffer(50, BOX, ACTION, "cpu", server=server.address)
    walk([ours], BOX, ACTION, steps=10, env_count=1)
    ours.reset()
    assert 0 == ours.size()
    walk([ours], BOX, ACTION, steps=3, env_count=1)
    assert 3 == ours.size()
    ours.close()


@pytest.mark.parametrize("count", [1, 5, 33])
def test_the_first_sample_has_all_steps_that_were_added(server: ServerProcess, count: int) -> None:
    """As where `learning_starts` is no multiple of a fragment."""
    ours = BreadboxReplayBuffer(1000, BOX, ACTION, "cpu", server=server.address)
    walk([ours], BOX, ACTION, steps=count, env_count=1)
    assert set(map(float, range(count))) == set(rows_by_reward(ours.sample(1000)))
    ours.close()


def test_later_samples_lag_behind_by_a_bounded_number_of_steps(server: ServerProcess) -> None:
    ours = BreadboxReplayBuffer(10_000, BOX, ACTION, "cpu", server=server.address)
    infos: list[dict[str, Any]] = [{}]
    obs = np.zeros((1, 3), np.float32)
    for time in range(1500):
        ours.add(obs, obs, np.zeros((1, 2)), np.array([time]), np.array([False]), infos)
        if time % 100 == 50:
            ours.sample(8)
            assert len(ours.replay.mirror) >= time - LAG_STEPS
    ours.close()


def test_what_cannot_be_is_refused_with_its_remedy(server: ServerProcess) -> None:
    with pytest.raises(ValueError, match="observation"):
        BreadboxHerReplayBuffer(
            50, NESTED, ACTION, None, copy_info_dict=True, server=server.address
        )


# Hindsight ----------------------------------------------------------------------------------------


def bits(n_envs: int = 1) -> DummyVecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=False) for _ in range(n_envs)])


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_in_hindsight_are_ones_that_were_reached_and_rewarded(
    server: ServerProcess, strategy: str
) -> None:
    env = bits()
    spaces_ = (env.observation_space, env.action_space)
    ours = BreadboxHerReplayBuffer(
        500, *spaces_, env, "cpu", goal_selection_strategy=strategy, server=server.address
    )
    own = HerReplayBuffer(500, *spaces_, env, "cpu", goal_selection_strategy=strategy)
    obs = env.reset()
    seen = {key: value.copy() for key, value in obs.items()}
    # It may begin where it should come to.
    rewarded = env.envs[0].unwrapped.compute_reward(seen["achieved_goal"], seen["desired_goal"], {})
    ours.add(seen, seen, np.array([0]), np.atleast_1d(rewarded), np.array([False]), [{}])
    with pytest.raises(RuntimeError, match="learning_starts"):
        ours.sample(4)
    for _ in range(60):
        action = np.array([env.action_space.sample()])
        new_obs, reward, done, infos = env.step(action)
        next_obs = {key: value.copy() for key, value in new_obs.items()}
        if done[0]:
            for key, value in infos[0]["terminal_observation"].items():
                next_obs[key][0] = value
        for buffer in (ours, own):
            buffer.add(obs, next_obs, action, reward, done, infos)
        obs = {key: value.copy() for key, value in new_obs.items()}
    for buffer in (own, ours):
        samples = buffer.sample(1000)
        goals = samples.observations["desired_goal"].numpy()
        np.testing.assert_array_equal(goals, samples.next_observations["desired_goal"].numpy())
        reached = samples.next_observations["achieved_goal"].numpy()
        np.testing.assert_array_equal(
            samples.rewards[:, 0].numpy(), env.envs[0].unwrapped.compute_reward(reached, goals, {})
        )
        share = float((samples.rewards == 0).float().mean())
        assert 0.05 < share < 0.9, (strategy, share)
    ours.close()


# Runs, and what is found again --------------------------------------------------------------------

TRAINING = """
import os, sys, time
import numpy as np
from gymnasium import spaces
from breadbox_adapters.sb3 import BreadboxReplayBuffer
box = spaces.Box(-10, 10, (3,), np.float32)
buffer = BreadboxReplayBuffer(1000, box, box, "cpu", server=sys.argv[1], run=sys.argv[2])
begun = buffer.size()
for number in range(100):
    obs = np.full((1, 3), number, np.float32)
    done = np.array([number == 99])
    buffer.add(obs, obs + 1, np.zeros((1, 3)), np.array([begun + number]), done, [{}])
size = buffer.size()
print(begun, size, flush=True)
time.sleep(600)
"""


def train_until_killed(server: ServerProcess, run: str) -> tuple[int, int]:
    """Steps that a training found at its start, and those that were there when it was killed."""
    command = [sys.executable, "-c", TRAINING, server.address, run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
    begun, size = line.split()
    return int(begun), int(size)


def test_a_training_that_was_killed_finds_its_steps_again(server: ServerProcess) -> None:
    assert (0, 100) == train_until_killed(server, "killed")
    assert (100, 200) == train_until_killed(server, "killed")
    ours = BreadboxReplayBuffer(1000, BOX, BOX, "cpu", server=server.address, run="killed")
    assert set(map(float, range(200))) == set(rows_by_reward(ours.sample(5000)))
    ours.close()


def test_a_learner_that_is_started_again_publishes_behind_its_last_version(
    server: ServerProcess,
) -> None:
    policy = torch.nn.Linear(2, 2)
    for wanted in ([1, 2], [3, 4]):
        ours = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address, run="again")
        assert wanted == [ours.publish_policy(policy) for _ in range(2)]
        ours.close()


def test_two_trainings_on_one_server_have_buffers_of_their_own(server: ServerProcess) -> None:
    one, two = (BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address) for _ in range(2))
    walk([one], BOX, BOX, steps=4, env_count=1)
    walk([two], BOX, BOX, steps=6, env_count=1)
    assert (4, 6) == (one.size(), two.size())
    names = {one.replay.buffer, two.replay.buffer}
    with breadbox.connect(server.address) as client:
        assert names <= {each.name for each in client.list_buffers()}
        one.close()
        two.close()
        assert not names & {each.name for each in client.list_buffers()}


def test_a_run_does_not_end_the_session_of_another(server: ServerProcess) -> None:
    first = BreadboxReplayBuffer(
        50, BOX, BOX, "cpu", server=server.address, run="first", buffer="shared"
    )
    with pytest.raises(errors.InvalidRequestError, match=r"run='first'.*end-session shared"):
        BreadboxReplayBuffer(
            50, BOX, BOX, "cpu", server=server.address, run="second", buffer="shared"
        )
    walk([first], BOX, BOX, steps=4, env_count=1)
    assert 4 == first.size()
    joined = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address, buffer="shared")
    assert ("first", 4) == (joined.run, joined.size())
    joined.close()
    first.close()


@pytest.mark.parametrize(
    ("obs_space", "action_space", "path", "wanted", "got"),
    [
        (FRAMES, ACTION, "obs", "<f4[3]", "|u1[4, 8, 8]"),
        (NESTED, ACTION, "obs", "<f4[3]", "nothing"),
        (spaces.Box(-1, 1, (3,), np.float64), ACTION, "obs", "<f4[3]", "<f8[3]"),
        (BOX, spaces.Discrete(3), "action", "<f4[2]", "<i8[]"),
    ],
)
def test_a_run_of_other_spaces_is_refused_before_anything_is_learned(
    server: ServerProcess, obs_space: Any, action_space: Any, path: str, wanted: str, got: str
) -> None:
    first = BreadboxReplayBuffer(50, BOX, ACTION, "cpu", server=server.address, run="spaces")
    walk([first], BOX, ACTION, steps=3, env_count=1)
    first.size()  # Until they have arrived.
    before = threading.active_count()
    with pytest.raises(errors.SchemaMismatchError, match="another `run`") as caught:
        BreadboxReplayBuffer(
            50, obs_space, action_space, "cpu", server=server.address, run="spaces"
        )
    assert (path, wanted, got) == (caught.value.path, caught.value.wanted, caught.value.got)
    assert before == threading.active_count()
    first.close()


@pytest.mark.parametrize("name", SPACES)
def test_a_run_of_the_same_spaces_is_joined(server: ServerProcess, name: str) -> None:
    for found in (0, 4):
        ours = BreadboxReplayBuffer(50, *SPACES[name], "cpu", server=server.address, run=name)
        assert found == ours.size()
        walk([ours], *SPACES[name], steps=4, env_count=1)
        ours.close()


def test_a_run_says_at_its_start_where_steps_go_and_how_many_are_there(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    for found in (0, 5):
        ours = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address, run="told")
        (line,) = caplog.messages
        assert (
            f"steps go to buffer 'told' of {server.address}; found there for run 'told': {found}"
            == line
        )
        caplog.clear()
        walk([ours], BOX, BOX, steps=5, env_count=1)
        ours.close()


def test_a_run_without_a_name_says_what_it_leaves_behind_when_it_is_killed(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    ours = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address)
    (line,) = caplog.messages
    assert f"breadbox buffers delete {ours.replay.buffer}" in line
    ours.close()


def test_a_buffer_that_was_made_in_vain_is_deleted(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise errors.UnavailableError("no more sessions today")

    with breadbox.connect(server.address) as client:
        before = {each.name for each in client.list_buffers()}
        monkeypatch.setattr(breadbox.Client, "start_session", refused)
        with pytest.raises(errors.UnavailableError, match="today"):
            BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address)
        assert before == {each.name for each in client.list_buffers()}


def test_a_training_takes_an_admins_token_and_a_learner_of_others_steps_a_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, learner = write_tokens(
        tmp_path / "tokens", "admin a buffers=team-*", "learner l buffers=team-*"
    )
    options = ["--gateway", "--tokens", str(tmp_path / "tokens")]
    with start_server(options=options) as server:

        def training(run: str, token: str) -> BreadboxReplayBuffer:
            monkeypatch.setenv("BREADBOX_TOKEN", token)
            return BreadboxReplayBuffer(50, BOX, ACTION, "cpu", server=server.address, run=run)

        with pytest.raises(errors.BufferNotFoundError, match="create team-1 --preset off-policy"):
            training("team-1", learner)
        whole = training("team-1", admin)
        walk([whole], BOX, ACTION, steps=5, env_count=1)
        assert 5 == whole.size()
        learning = training("team-1", learner)
        assert set(map(float, range(5))) == set(rows_by_reward(learning.sample(200)))
        walk([learning], BOX, ACTION, steps=1, env_count=1)
        with pytest.raises(errors.PermissionDeniedError, match="AppendFragments"):
            learning.size()
        for each in (learning, whole):
            each.close()


def test_a_buffer_for_whole_fragments_is_refused_with_its_remedy(server: ServerProcess) -> None:
    ours = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address, buffer="default")
    with pytest.raises(errors.InvalidRequestError, match="update default --schema ragged"):
        walk([ours], BOX, BOX, steps=1, env_count=1)
    ours.close()


def test_a_checkpoint_finds_its_steps_again_in_another_process(
    server: ServerProcess, tmp_path: Path
) -> None:
    ours = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address)
    walk([ours], BOX, BOX, steps=7, env_count=1)
    saved = pickle.dumps(ours)
    assert len(saved) < 10_000
    ours.close()
    again = pickle.loads(saved)
    assert 7 == again.size()
    assert set(map(float, range(7))) == set(rows_by_reward(again.sample(200)))
    walk([again], BOX, BOX, steps=2, env_count=1)
    assert 9 == again.size()
    with breadbox.connect(server.address) as client:
        again.close()
        client.delete_buffer(again.replay.buffer)
    with pytest.raises(errors.BufferNotFoundError, match="steps of the checkpoint") as caught:
        pickle.loads(saved)
    assert server.address in str(caught.value)


def test_where_nothing_comes_a_sample_says_so(server: ServerProcess) -> None:
    ours = BreadboxReplayBuffer(50, BOX, BOX, "cpu", server=server.address, arrival_wait_s=0.2)
    with pytest.raises(errors.WaitElapsedError, match="1 steps to sample"):
        ours.sample(8)
    ours.close()


# What documents show ------------------------------------------------------------------------------

EXAMPLE = ROOT / "examples" / "sb3_sac_pendulum.py"


def shown(place: str, server: ServerProcess, **changes: str) -> str:
    """A block of docs/adapters.md, or of a docstring of sb3.py, made short."""
    code = BLOCKS[place].code.replace("localhost:50051", server.address)
    for number, shorter in changes.items():
        assert number.strip("n") in code
        code = code.replace(number.strip("n"), shorter)
    return code


@pytest.mark.parametrize("place", ["docs/adapters.md#sb3", "adapters/breadbox_adapters/sb3.py#1"])
def test_the_lines_of_page_and_docstring_train(server: ServerProcess, place: str) -> None:
    with breadbox.connect(server.address) as client, suppress(errors.BufferNotFoundError):
        client.delete_buffer("pendulum-1")
    names: dict[str, Any] = {}
    exec(compile(shown(place, server, n20_000="150"), place, "exec"), names)
    model = names["model"]
    assert 150 == model.replay_buffer.size()
    assert 50 == model._n_updates  # noqa: SLF001 - SB3 tells it nowhere
    model.replay_buffer.close()


def test_the_lines_with_returns_of_n_steps_train(server: ServerProcess) -> None:
    names: dict[str, Any] = {}
    place = "docs/adapters.md#sb3-n-step"
    exec(compile(shown(place, server, n20_000="140"), place, "exec"), names)
    model = names["model"]
    assert (0.98, 0.98, 3) == (model.gamma, model.replay_buffer.gamma, model.replay_buffer.n_steps)
    assert 10 == model._n_updates  # noqa: SLF001 - SB3 tells it nowhere
    seen = {round(float(each), 4) for each in model.replay_buffer.sample(500).discounts}
    assert round(0.98**3, 4) in seen
    model.replay_buffer.close()


def test_an_algorithms_own_n_steps_is_ignored_with_a_warning(server: ServerProcess) -> None:
    with pytest.warns(UserWarning, match=r"n_steps=3. is ignored"):
        model = DQN(
            "MlpPolicy",
            "CartPole-v1",
            n_steps=3,
            replay_buffer_class=BreadboxReplayBuffer,
            replay_buffer_kwargs={"server": server.address},
        )
    model.replay_buffer.close()


def test_the_lines_with_goals_in_hindsight_train(server: ServerProcess) -> None:
    names: dict[str, Any] = {}
    place = "docs/adapters.md#sb3-hindsight"
    exec(compile(shown(place, server, n20_000="140"), place, "exec"), names)
    model = names["model"]
    assert 10 == model._n_updates  # noqa: SLF001 - SB3 tells it nowhere
    model.replay_buffer.close()


def test_without_a_server_samples_are_drawn_and_adding_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sooner = partial(connect_from_environment, reconnect_s=1.0)
    monkeypatch.setattr(run_replay, "connect_from_environment", sooner)
    with start_server() as away:
        ours = BreadboxReplayBuffer(50, BOX, ACTION, "cpu", server=away.address, run="away")
        walk([ours], BOX, ACTION, steps=7, env_count=1)
        assert 7 == ours.size()
        away.kill()
        assert set(map(float, range(7))) == set(rows_by_reward(ours.sample(200)))

        told: list[str] = []

        def has_failed() -> bool:
            try:
                walk([ours], BOX, ACTION, steps=1, env_count=1)
            except errors.UnavailableError as error:
                told.append(str(error))
            return bool(told)

        eventually_sync(has_failed, within_s=60)
        assert away.address in told[0]
        ours.close()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_process_of_the_page_ends_quietly_and_soon_after_training(
    server: ServerProcess,
) -> None:
    """Nothing closes its buffer, or anything else."""
    with breadbox.connect(server.address) as client, suppress(errors.BufferNotFoundError):
        client.delete_buffer("pendulum-1")
    code = shown("docs/adapters.md#sb3", server, n20_000="150")
    command = [sys.executable, "-c", code + "\nprint('trained', flush=True)"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "trained\n" == process.stdout.readline()
        began_at = monotonic()
        # What it would wait for at most is CLOSE_WAIT_S and more, one after another.
        _, told = process.communicate(timeout=60)
        took_s = monotonic() - began_at
    assert 0 == process.returncode, told
    assert (
        f"steps go to buffer 'pendulum-1' of {server.address}; found there for run 'pendulum-1': 0"
        == told.strip()
    )
    assert took_s < run_replay.CLOSE_WAIT_S
    again = BreadboxReplayBuffer(1000, *PENDULUM, "cpu", server=server.address, run="pendulum-1")
    assert 150 == again.size()
    again.close()


def test_the_lines_of_actor_and_learner_train(server: ServerProcess) -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", shown("docs/adapters.md#sb3-actor", server, n500="100")]
    )
    try:
        place = "docs/adapters.md#sb3-learner"
        names: dict[str, Any] = {}
        code = shown(place, server, n1000="3").replace("gradient_steps=100", "gradient_steps=5")
        exec(compile(code, place, "exec"), names)
        learner = names["learner"]
        assert 15 == learner._n_updates  # noqa: SLF001 - SB3 tells it nowhere
        mirror = learner.replay_buffer.replay.mirror
        mirror.wait_until(len(mirror) + 200, timeout_s=120)
        # It acts with the last weights that were published.
        eventually_sync(lambda: 3 in mirror.sample(400).model_version, within_s=60)
        learner.replay_buffer.close()
        # Started again, it goes on behind the last version.
        exec(compile(code, place, "exec"), names)
        learner = names["learner"]
        assert 6 == learner.replay_buffer.replay.client.watch_model().model_version
    finally:
        actor.kill()
        actor.wait()
    learner.replay_buffer.close()


def test_the_actor_of_the_page_asks_its_policy_and_never_trains(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    predict = BasePolicy.predict

    def counted(*given: Any, **named: Any) -> Any:
        asked.append(given)
        return predict(*given, **named)

    monkeypatch.setattr(BasePolicy, "predict", counted)
    code = shown("docs/adapters.md#sb3-actor", server).replace("while True", "for _ in range(3)")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/adapters.md#sb3-actor", "exec"), names)
    actor = names["actor"]
    assert 1500 == actor.num_timesteps
    # One step in twenty explores; never asked would be 0, and asked by chance 750.
    assert len(asked) > 1300
    assert 0 == actor._n_updates  # noqa: SLF001 - SB3 tells it nowhere
    actor.replay_buffer.close()


LEFT_OPEN = """
import sys
import numpy as np
from gymnasium import spaces
from breadbox_adapters.sb3 import BreadboxReplayBuffer
box = spaces.Box(-10, 10, (3,), np.float32)
buffers = [
    BreadboxReplayBuffer(1000, box, box, "cpu", server=sys.argv[1], run=run)
    for run in sys.argv[2:]
]
for number in range(130):
    obs = np.full((1, 3), number, np.float32)
    for buffer in buffers:
        buffer.add(obs, obs + 1, obs, np.array([number]), np.array([False]), [{}])
        if number == 100:
            buffer.sample(5)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_closes_no_buffer_ends_quietly_and_loses_no_step(
    server: ServerProcess, count: int
) -> None:
    """As with the lines of the page, in which nobody closes anything."""
    runs = [f"open-{count}-{number}" for number in range(count)]
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, server.address, *runs],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    told = "".join(
        f"steps go to buffer {run!r} of {server.address}; found there for run {run!r}: 0\n"
        for run in runs
    )
    assert (0, told) == (done.returncode, done.stderr)
    for run in runs:
        again = BreadboxReplayBuffer(1000, BOX, BOX, "cpu", server=server.address, run=run)
        assert 130 == again.size()
        again.close()


@pytest.mark.long
@pytest.mark.timeout(580)
def test_the_example_learns_to_its_target(server: ServerProcess, tmp_path: Path) -> None:
    assert 150 > len(EXAMPLE.read_text().splitlines())
    command = [sys.executable, str(EXAMPLE), "--server", server.address, "--run", "swing"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path
    )
    assert 0 == done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    again = subprocess.run(
        [*command, "--steps", "1", "--target", "-3000"],
        capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert 0 == again.returncode, again.stderr[-3000:]
    assert "run 'swing' goes on with" in again.stdout


# Algorithms ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
def test_dqn_learns_on_a_run_and_goes_on_from_its_checkpoint(
    server: ServerProcess, tmp_path: Path
) -> None:
    env = make_vec_env("CartPole-v1", n_envs=4, seed=3)
    arguments: dict[str, Any] = {
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 20_000,
        "learning_starts": 500,
        "target_update_interval": 10,
        "train_freq": 64,
        "gradient_steps": 64,
        "exploration_fraction": 0.3,
        "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [128, 128]},
        "replay_buffer_class": BreadboxReplayBuffer,
        "replay_buffer_kwargs": {"server": server.address, "run": "cartpole"},
    }
    model = DQN("MlpPolicy", env, seed=3, device="cpu", **arguments)
    before, _ = evaluate_policy(model, env, 10, warn=False)
    model.learn(16_000)
    after, _ = evaluate_policy(model, env, 10, warn=False)
    assert after > max(100.0, 2 * before), (before, after)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "steps")
    model.replay_buffer.close()
    again = DQN.load(tmp_path / "model", env=env)
    again.replay_buffer.close()
    again.load_replay_buffer(tmp_path / "steps")
    assert 16_000 // 4 <= again.replay_buffer.size() <= 16_256 // 4
    again.learn(256, reset_num_timesteps=False)
    again.replay_buffer.close()


def test_sac_with_three_step_returns_and_normalisation_trains(server: ServerProcess) -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0))
    model = SAC(
        "MlpPolicy",
        env,
        seed=0,
        device="cpu",
        learning_starts=100,
        replay_buffer_class=BreadboxNStepReplayBuffer,
        replay_buffer_kwargs={"server": server.address, "n_steps": 3, "gamma": 0.99},
    )
    model.learn(400)
    assert 200 == model.replay_buffer.size()
    assert model._n_updates > 0  # noqa: SLF001 - SB3 tells it nowhere
    model.replay_buffer.close()


def test_hindsight_learns_to_flip_bits(server: ServerProcess, tmp_path: Path) -> None:
    env = bits()
    model = DQN(
        "MultiInputPolicy",
        env,
        seed=1,
        device="cpu",
        learning_rate=1e-3,
        learning_starts=200,
        train_freq=4,
        gradient_steps=4,
        exploration_fraction=0.5,
        target_update_interval=200,
        replay_buffer_class=BreadboxHerReplayBuffer,
        replay_buffer_kwargs={"server": server.address, "n_sampled_goal": 4},
    )
    before, _ = evaluate_policy(model, env, 20, warn=False)
    model.learn(3_000)
    after, _ = evaluate_policy(model, env, 20, warn=False)
    assert after > before + 0.5, (before, after)
    model.save_replay_buffer(tmp_path / "steps")
    size = model.replay_buffer.size()
    model.replay_buffer.close()
    model.load_replay_buffer(tmp_path / "steps")
    assert size == model.replay_buffer.size()
    model.learn(50, reset_num_timesteps=False)
    model.replay_buffer.close()


ACTOR = """
import sys
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from breadbox_adapters.sb3 import BreadboxReplayBuffer
env = make_vec_env("CartPole-v1", seed=int(sys.argv[3]))
where = dict(server=sys.argv[1], run=sys.argv[2])
model = DQN("MlpPolicy", env, device="cpu", learning_starts=0, gradient_steps=0,
            exploration_initial_eps=0.1, exploration_final_eps=0.1,
            replay_buffer_class=BreadboxReplayBuffer, replay_buffer_kwargs=where)
while True:
    version = model.replay_buffer.load_policy(model.policy)
    model.learn(200, reset_num_timesteps=False)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_dqn_trains_on_steps_of_remote_actors_alone(server: ServerProcess) -> None:
    env = make_vec_env("CartPole-v1", seed=0)
    learner = DQN(
        "MlpPolicy",
        env,
        seed=0,
        device="cpu",
        replay_buffer_class=BreadboxReplayBuffer,
        replay_buffer_kwargs={"server": server.address, "run": "remote"},
    )
    learner._setup_learn(1)  # noqa: SLF001 - as its `learn` begins
    actors = [
        subprocess.Popen([sys.executable, "-c", ACTOR, server.address, "remote", str(seed)])
        for seed in range(2)
    ]
    try:
        buffer = learner.replay_buffer
        for version in range(1, 4):
            learner.train(gradient_steps=20, batch_size=64)
            buffer.publish_policy(learner.policy, version)
        assert 60 == learner._n_updates  # noqa: SLF001 - likewise
        seen = len(buffer.replay.mirror)
        buffer.replay.mirror.wait_until(seen + 200, timeout_s=60)
        writers = set(buffer.replay.client.get_buffer().state.counters)
        assert writers
    finally:
        for actor in actors:
            actor.kill()
            actor.wait()
    other = BreadboxReplayBuffer(
        50, env.observation_space, env.action_space, server=server.address, run="remote"
    )
    twin = DQN("MlpPolicy", env, seed=9, device="cpu")
    assert 3 == other.load_policy(twin.policy, max_wait_s=10)
    for name, weights in learner.policy.state_dict().items():
        np.testing.assert_array_equal(weights.numpy(), twin.policy.state_dict()[name].numpy())
    assert other.load_policy(twin.policy) is None
    other.close()
    buffer.close()
