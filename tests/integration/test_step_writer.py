"""Steps of real vector environments, through a real server, and back."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

import breadbox
from breadbox.testing import ServerProcess, start_server

pytestmark = pytest.mark.integration

RAGGED = breadbox.BufferConfig(
    schema=breadbox.SchemaPolicy.RAGGED, staleness_max=2**31 - 1, uses_max=1000
)


class Countdown(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Ends after as many steps as its number says: terminated if even, else truncated."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, length: int) -> None:
        self._length = length
        self._episode = -1

    def _obs(self) -> NDArray[np.float32]:
        return np.array([self._episode, self._time], np.float32)

    def reset(self, **_: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self._episode += 1
        self._time = 0
        return self._obs(), {}

    def step(self, action: np.int64) -> Any:
        self._time += 1
        is_over, is_even = self._time == self._length, self._length % 2 == 0
        return self._obs(), float(action), is_over and is_even, is_over and not is_even, {}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server(options=["--fragments-per-chunk", "1"]) as started:
        yield started


def read_all(client: breadbox.Client) -> list[breadbox.Fragment]:
    """Everything in the buffer, in order of workers and indices."""
    count = client.get_buffer().state.fragment_count
    with client.fetch(count, max_wait_s=10) as lease:
        fragments = client.load_fragments(lease.references)
    return sorted(fragments, key=lambda each: (each.worker_id, each.fragment_index))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episodes_of_vector_environments_arrive_whole_in_either_mode(
    server: ServerProcess, mode: AutoresetMode
) -> None:
    lengths = (3, 4, 7)
    env = SyncVectorEnv([partial(Countdown, length) for length in lengths], autoreset_mode=mode)
    is_next = mode is AutoresetMode.NEXT_STEP
    actions = np.random.default_rng(0).integers(0, 5, (40, 3))
    with breadbox.connect(server.address, buffer=f"mode-{mode.value}") as client:
        client.create_buffer(client.buffer, RAGGED)
        client.start_session()
        with breadbox.StepWriter(
            client,
            worker_id="w",
            env_count=3,
            steps_per_fragment=5,
            flush_s=math.inf,
            autoreset="next_step" if is_next else "same_step",
        ) as writer:
            obs, _ = env.reset()
            for action in actions:
                next_obs, reward, terminated, truncated, infos = env.step(action)
                true_next = breadbox.true_next_obs(next_obs, infos)
                writer.add(obs, action, reward, true_next, terminated, truncated)
                obs = next_obs
        assert writer.counts.added == writer.counts.sent
        fragments = read_all(client)
    for index, length in enumerate(lengths):
        mine = [each for each in fragments if each.worker_id == f"w-{index}"]
        steps = 40 - 40 // (length + 1) if is_next else 40
        rows = np.concatenate([each.obs for each in mine])
        assert [[n // length, n % length] for n in range(steps)] == rows.astype(int).tolist()
        ended = np.concatenate([each.ended for each in mine])
        assert [n % length == length - 1 for n in range(steps)] == ended.tolist()
        terminated_all = np.concatenate([each.terminated for each in mine])
        assert (ended if length % 2 == 0 else np.zeros_like(ended)).tolist() == (
            terminated_all.tolist()
        )
        finals = [final for each in mine if each.final_obs is not None for final in each.final_obs]
        assert [[n, length] for n in range(len(finals))] == np.array(finals).astype(int).tolist()
        assert len(finals) == ended.sum()


def test_a_server_that_comes_back_with_its_journal_is_not_noticed(
    tmp_path: Any,
) -> None:
    options = ["--journal", f"file://{tmp_path / 'journal'}"]
    store = f"file://{tmp_path / 'payloads'}"
    with (
        start_server(store=store, options=options) as server,
        breadbox.connect(server.address, buffer="b") as client,
    ):
        client.create_buffer("b", RAGGED)
        session_id = client.start_session().session_id
        with breadbox.StepWriter(client, worker_id="w", steps_per_fragment=2) as writer:
            for time in range(12):
                if time == 6:
                    server.restart()
                obs = np.array([[time]], np.float32)
                writer.add(obs, np.zeros(1), [1.0], obs + 1, [False], [False])
        assert session_id == writer.session_id
        assert [*range(12)] == [int(x) for each in read_all(client) for x in each.obs[:, 0]]


def test_a_server_that_comes_back_without_a_session_is_told_of(server: ServerProcess) -> None:
    with breadbox.connect(server.address, buffer="gone") as client:
        client.create_buffer("gone", RAGGED)
        session_id = client.start_session().session_id
        writer = breadbox.StepWriter(
            client, session_id=session_id, steps_per_fragment=1, flush_s=math.inf
        )
        client.end_session(session_id)
        obs = np.zeros((1, 1), np.float32)
        writer.add(obs, np.zeros(1), [1.0], obs, [False], [False])
        writer.flush()
        with pytest.raises(breadbox.errors.SessionEndedError, match="none is"):
            writer.add(obs, np.zeros(1), [1.0], obs, [False], [False])
        writer.close()


LEFT_OPEN = """
import sys
import numpy as np
import breadbox
from breadbox.mirror import ReplayMirror

client = breadbox.connect(sys.argv[1], buffer="left-open")
writer = breadbox.StepWriter(client, flush_s=600)
mirrors = [ReplayMirror(sys.argv[1], buffer="left-open") for _ in range(2)]
one = np.zeros((1, 2), np.float32)
for number in range(5):
    writer.add(one + number, one, [0.0], one + number + 1, [False], [False])
mirrors[0].catch_up()
if len(sys.argv) > 2:
    client.close()
"""


def test_a_process_that_closes_nothing_ends_quietly_and_sends_what_waits(
    server: ServerProcess,
) -> None:
    with breadbox.connect(server.address, buffer="left-open") as client:
        client.create_buffer("left-open", RAGGED)
        client.start_session("left-open")
        command = [sys.executable, "-c", LEFT_OPEN, server.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (0, "") == (done.returncode, done.stderr)
        assert 5 == sum(each.step_count for each in read_all(client))
        # What cannot be sent any more is told.
        done = subprocess.run(
            [*command, "closed"], capture_output=True, text=True, timeout=60, check=False
        )
        assert 0 == done.returncode
        assert re.match(r"steps of \S+ may be lost, as the process exits: .*closed", done.stderr)
