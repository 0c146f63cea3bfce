"""How environments begin the next episode: found out, or refused where it is said wrongly."""

import logging
from enum import Enum
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from breadbox.model.errors import InvalidRequestError
from breadbox.writing.autoreset import ENDS_TO_REFUSE
from breadbox.writing.step_writer import StepWriter, true_next_obs
from support.step_client import FakeClient

STEPS = 120


class Countdown(gymnasium.Env[Any, Any]):
    """Episodes of a length; the observation is (episode, time), the reward that of the test."""

    observation_space = spaces.Box(0, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int, reward: float) -> None:
        self._length, self._reward, self._episode = length, reward, -1

    def _obs(self) -> Any:
        return np.array([self._episode, self._time], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._time = self._episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._time += 1
        is_over = self._time == self._length
        is_limit = self._length % 2 == 0
        return self._obs(), self._reward, is_over and not is_limit, is_over and is_limit, {}


LENGTHS = (3, 4, 1)


def played(
    mode: AutoresetMode, said: Any, *, reward: float = 0.0, shift: float = 0.0, **more: Any
) -> tuple[StepWriter, FakeClient]:
    """Play STEPS steps of three environments in a mode, with a writer that was told another."""
    client = FakeClient()
    envs = SyncVectorEnv([partial(Countdown, n, reward) for n in LENGTHS], autoreset_mode=mode)
    with StepWriter(client, env_count=3, worker_id="w", autoreset=said, **more) as writer:
        obs, _ = envs.reset()
        for _ in range(STEPS):
            next_obs, rewards, terminated, truncated, infos = envs.step(np.zeros(3, np.int64))
            led_to = true_next_obs(next_obs, infos)
            writer.add(obs, np.zeros(3), rewards + shift, led_to, terminated, truncated)
            obs = next_obs
            ended = terminated | truncated
            if mode is AutoresetMode.DISABLED and ended.any():
                obs, _ = envs.reset(options={"reset_mask": ended})
    return writer, client


def steps_of(client: FakeClient, index: int) -> list[list[int]]:
    mine = [each for each in client.fragments if each.worker_id == f"w-{index}"]
    return np.concatenate([each.obs for each in mine]).astype(int).tolist()


def check(client: FakeClient, mode: AutoresetMode) -> None:
    for index, length in enumerate(LENGTHS):
        is_next = mode is AutoresetMode.NEXT_STEP
        count = STEPS - STEPS // (length + 1) if is_next else STEPS
        assert [[n // length, n % length] for n in range(count)] == steps_of(client, index)
        mine = [each for each in client.fragments if each.worker_id == f"w-{index}"]
        first = np.concatenate([each.first for each in mine])
        assert [n % length == 0 for n in range(count)] == first.tolist()


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_mode_is_found_out(mode: AutoresetMode, reward: float) -> None:
    _, client = played(mode, None, reward=reward)
    check(client, mode)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_mode_is_taken_from_the_environments_own_metadata(
    mode: AutoresetMode, caplog: pytest.LogCaptureFixture
) -> None:
    said = gymnasium.make_vec(
        "CartPole-v1", num_envs=1, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    ).metadata["autoreset_mode"]
    _, client = played(mode, said, shift=-0.5, follows="flags")
    check(client, mode)
    assert [] == caplog.messages


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_next_step_that_was_said_wrongly_loses_no_step_and_is_said_once(
    mode: AutoresetMode, caplog: pytest.LogCaptureFixture
) -> None:
    writer, client = played(mode, "next_step")
    check(client, mode)
    assert 3 * STEPS == writer.counts.added
    (message,) = caplog.messages
    assert "not in the next step: autoreset='same_step' says so" in message


@pytest.mark.parametrize(("reward", "shift"), [(0.0, 0.0), (1.0, -1.0)])
def test_same_step_that_was_said_wrongly_is_refused_after_few_ends(
    reward: float, shift: float
) -> None:
    with pytest.raises(InvalidRequestError, match=r"'same_step', but after (8|9|10) ends"):
        played(AutoresetMode.NEXT_STEP, "same_step", reward=reward, shift=shift)


def test_a_mode_that_transformed_rewards_hide_is_asked_for() -> None:
    with pytest.raises(InvalidRequestError, match=r"was not given, .* the writer autoreset='next"):
        played(AutoresetMode.NEXT_STEP, None, shift=-1.0)
    _, client = played(AutoresetMode.NEXT_STEP, "next_step", shift=-1.0)
    check(client, AutoresetMode.NEXT_STEP)


def test_first_observations_in_place_of_final_ones_are_refused() -> None:
    """A loop that forgets true_next_obs."""
    envs = SyncVectorEnv([partial(Countdown, 3, 1.0)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with StepWriter(FakeClient(), env_count=2) as writer:
        obs, _ = envs.reset()

        def play() -> None:
            seen = obs
            for _ in range(STEPS):
                next_obs, *answer, _ = envs.step(np.zeros(2, np.int64))
                writer.add(seen, np.zeros(2), answer[0], next_obs, *answer[1:])
                seen = next_obs

        with pytest.raises(InvalidRequestError, match=r"use breadbox\.true_next_obs"):
            play()


def test_a_loop_that_resets_all_between_its_rollouts_keeps_the_mode() -> None:
    for said in (None, "next_step"):
        client = FakeClient()
        envs = SyncVectorEnv([partial(Countdown, n, 1.0) for n in (3, 3)])
        with StepWriter(client, env_count=2, worker_id="w", autoreset=said) as writer:
            for _ in range(5):
                obs, _ = envs.reset()
                for _ in range(11):  # Ends in an end.
                    next_obs, *answer, _ = envs.step(np.zeros(2, np.int64))
                    writer.add(obs, np.zeros(2), answer[0], next_obs, *answer[1:])
                    obs = next_obs
        assert [[n // 3, n % 3] for n in range(45)] == steps_of(client, 0)


def test_equal_observations_by_chance_are_no_resets(caplog: pytest.LogCaptureFixture) -> None:
    """Two states, and a first one at random: many episodes begin where the last one ended."""
    caplog.set_level(logging.WARNING)
    rng = np.random.default_rng(0)
    with StepWriter(FakeClient()) as writer:
        for _ in range(200):
            state = rng.integers(2)
            for time in range(4):
                after = rng.integers(2)
                ends = [time == 3], [False]
                writer.add(np.array([[state]]), np.zeros(1), [0.0], np.array([[after]]), *ends)
                state = after
    assert writer.counts.added >= 800 - ENDS_TO_REFUSE


def test_readings_that_are_never_equal_need_the_mode_of_several_environments() -> None:
    StepWriter(FakeClient(), follows="flags").close()
    with pytest.raises(InvalidRequestError, match="must be given with follows"):
        StepWriter(FakeClient(), follows="flags", env_count=2)


class Other(Enum):
    MODE = "Other"


@pytest.mark.parametrize("said", ["next", Other.MODE, ""])
def test_a_mode_that_there_is_not_is_refused(said: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be 'same_step', 'next_step' or a gymn"):
        StepWriter(FakeClient(), autoreset=said)
