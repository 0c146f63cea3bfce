"""A time limit is no terminal state, through every adapter of a library's replay buffer.

What follows a terminal state is worth nothing; what follows a time limit is worth what it is.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from breadbox.testing import ServerProcess, start_server
from breadbox_adapters.cleanrl import PrioritizedReplayBuffer, ReplayBuffer
from breadbox_adapters.run_replay import RunReplay
from breadbox_adapters.spaced_replay import SpacedReplay

pytestmark = pytest.mark.integration

BOX = spaces.Box(-1000, 1000, (1,), np.float32)
ENDS = {0: "on", 1: "terminal", 2: "limit", 3: "on", 4: "limit", 5: "terminal"}
"""How each step of an environment ends."""
DONES = [each != "on" for each in ENDS.values()]
LIMITS = [each == "limit" for each in ENDS.values()]
TERMINALS = [each == "terminal" for each in ENDS.values()]
SEEN = [float(number + 100 * sum(DONES[:number])) for number in ENDS]
"""What is observed before each step; within an episode the next is one more."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as started:
        yield started


def infos_of(is_limit: bool, *, as_mapping: bool) -> Any:
    """What libraries say of a step of two environments, the second of which never ends."""
    if as_mapping:
        return {"TimeLimit.truncated": np.array([is_limit, False])}
    return [{"TimeLimit.truncated": is_limit}, {}]


def fill(buffer: SpacedReplay, *, as_mapping: bool) -> None:
    """Add a step for each of `ENDS`."""
    for number, end in ENDS.items():
        now = np.array([[SEEN[number]], [number]], np.float32)
        done = np.array([end != "on", False])
        infos = infos_of(end == "limit", as_mapping=as_mapping)
        reward = np.array([float(number), 100.0])
        buffer.add(now, now + 1, np.array([[0.5], [0.5]]), reward, done, infos)


def of_first(buffer: SpacedReplay, column: Any) -> list[bool]:
    """A column of the first environment, in order."""
    rewards = buffer.rewards.reshape(-1)
    order = [int(np.flatnonzero(rewards == number)[0]) for number in ENDS]
    return [bool(column.reshape(-1)[place]) for place in order]


@pytest.mark.parametrize("as_mapping", [False, True], ids=["a dict each", "one dict"])
@pytest.mark.parametrize("adapter", [SpacedReplay, ReplayBuffer])
def test_a_limit_in_the_infos_makes_a_done_a_truncation(
    server: ServerProcess, adapter: type[SpacedReplay], as_mapping: bool
) -> None:
    buffer = adapter(100, BOX, BOX, "cpu", n_envs=2, server=server.address)
    fill(buffer, as_mapping=as_mapping)
    steps = buffer._kept()  # noqa: SLF001 - what is sampled, in order
    assert TERMINALS == of_first(buffer, steps.terminated)
    assert LIMITS == of_first(buffer, buffer.timeouts)
    assert DONES == of_first(buffer, buffer.dones)
    sampled = buffer._values(steps)["dones"]  # noqa: SLF001 - what libraries train with
    assert TERMINALS == of_first(buffer, sampled.numpy())
    buffer.close()


def test_a_script_that_passes_terminations_alone_has_them_taken_as_such(
    server: ServerProcess,
) -> None:
    buffer = ReplayBuffer(
        100, BOX, BOX, "cpu", n_envs=2, handle_timeout_termination=False, server=server.address
    )
    fill(buffer, as_mapping=True)
    assert DONES == of_first(buffer, buffer._kept().terminated)  # noqa: SLF001
    assert [False] * 6 == of_first(buffer, buffer.timeouts)
    buffer.close()


def test_windows_of_several_steps_go_on_from_a_limit_and_end_at_a_terminal_state(
    server: ServerProcess,
) -> None:
    buffer = PrioritizedReplayBuffer(
        100, (1,), "cpu", n_step=3, gamma=0.5, obs_dtype=np.float32, server=server.address
    )
    for start, is_terminal in ((0, False), (100, True), (200, False)):
        for step in range(2):
            now = np.array([[start + step]], np.float32)
            buffer.add(now, np.array([0]), np.array([1.0]), now + 1, [is_terminal and step == 1])
    drawn = buffer.sample(300)
    rows = {
        int(start): (float(reward), int(after), bool(done), float(discount))
        for start, reward, after, done, discount in zip(
            *(each[:, 0] for each in (drawn.observations, drawn.rewards, drawn.next_observations)),
            drawn.dones[:, 0],
            drawn.discounts[:, 0],
            strict=True,
        )
    }
    assert (1.5, 2, False, 0.25) == rows[0]
    assert (1.5, 102, True, 0.25) == rows[100]
    buffer.close()


def test_a_run_keeps_the_two_ends_apart(server: ServerProcess) -> None:
    run = RunReplay(server=server.address, capacity_steps=100)
    for number, end in ENDS.items():
        now = np.full((1, 1), SEEN[number], np.float32)
        run.add(now, now, [float(number)], now + 1, [end == "terminal"], [end == "limit"])
    run.catch_up()
    steps = run.mirror.at(range(6))
    assert list(range(6)) == steps.reward.tolist()
    assert (TERMINALS, LIMITS) == (steps.terminated.tolist(), steps.truncated.tolist())
    assert [each + 1 for each in SEEN] == steps.next_obs[:, 0].tolist()
    run.close()


def test_samples_of_stable_baselines_say_terminal_states_alone(server: ServerProcess) -> None:
    pytest.importorskip("stable_baselines3", reason="the extra sb3 is not installed")
    from breadbox_adapters.sb3 import BreadboxReplayBuffer

    buffer = BreadboxReplayBuffer(100, BOX, BOX, "cpu", n_envs=2, server=server.address)
    fill(buffer, as_mapping=False)
    sampled = buffer._get_samples(np.arange(12))  # noqa: SLF001 - by position
    assert TERMINALS == of_first(buffer, sampled.dones.numpy())
    buffer.close()


FLAGS: list[tuple[dict[str, bool], bool, bool]] = [
    ({"done": True, "terminated": True, "truncated": False}, True, False),
    ({"done": True, "terminated": False, "truncated": True}, False, True),
    ({"done": True, "terminated": True, "truncated": True}, True, True),
    ({"done": True, "terminated": False}, False, True),
    ({"done": True, "truncated": True}, False, True),
    ({"done": True}, True, False),
    ({"terminated": True}, True, False),
    ({"truncated": True}, False, True),
    ({"done": False, "terminated": False, "truncated": False}, False, False),
    ({}, False, False),
]


@pytest.mark.parametrize(("flags", "terminated", "truncated"), FLAGS, ids=str)
def test_flags_of_torchrl_are_told_apart(
    flags: dict[str, bool], terminated: bool, truncated: bool
) -> None:
    pytest.importorskip("tensordict", reason="the extra torchrl is not installed")
    from breadbox_adapters.torchrl.layout import Steps

    column = np.zeros((3, 1), np.float32)
    after = {name: np.array([[False], [False], [value]]) for name, value in flags.items()}
    steps = Steps.of(
        {
            "observation": column,
            "action": column,
            "next": {"observation": column + 1, "reward": column, **after},
        }
    )
    assert [False, False, terminated] == steps.terminated.tolist()
    assert [False, False, truncated] == steps.truncated.tolist()
