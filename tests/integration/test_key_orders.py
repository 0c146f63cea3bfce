"""Every reader and adapter gives each array by its name, whatever order of keys producers have.

Environments build the dict of `reset` otherwise than that of `step`, and two workers of one buffer
each in their own order: no reader may mix up what has the same shape, nor refuse what has another.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.local import ServerProcess, start_server
from breadbox.mirror import ReplayMirror
from breadbox.model.errors import UnsupportedArrayError
from breadbox_offline.service import read_buffer
from support.key_orders import ORDERS, made, wrong_leaves

STEPS = 6
"""Of an episode; each order has one."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server(options=("--preset", "off-policy")) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address) as client:
        yield client


def filled(client: breadbox.Client, name: str, workers: int, **config: Any) -> None:
    """A buffer in which each worker's episodes are in all orders, other ones in every step."""
    client.create_buffer(name, breadbox.BufferConfig.preset("off-policy", **config))
    client.start_session("s", buffer=name)
    for worker in range(workers):
        options: dict[str, Any] = {"buffer": name, "steps_per_fragment": 3, "flush_s": 60.0}
        with breadbox.StepWriter(client, worker_id=f"w{worker}", **options) as writer:
            for episode in range(len(ORDERS)):
                at = STEPS * episode
                for t in range(at, at + STEPS):
                    turns = [
                        ORDERS[(worker + episode + t + turn) % len(ORDERS)] for turn in range(4)
                    ]
                    writer.add(
                        made("obs", [t], turns[0]),
                        made("action", [t], turns[1]),
                        [t],
                        made("obs", [t + 1], turns[2]),
                        [t == at + STEPS - 1],
                        [False],
                        extras=made("extras", [t], turns[3]),
                    )


def judged(of: Any, *names: str) -> list[str]:
    return [
        each
        for name in names
        for each in wrong_leaves("obs" if name.endswith("_obs") else name, getattr(of, name))
    ]


def test_a_fetch_has_each_array_by_its_name(client: breadbox.Client) -> None:
    filled(client, "fetch", 2, fragments_per_chunk=1)

    with client.fetch(24, max_wait_s=20, buffer="fetch") as lease:
        for batch in lease.batches(batch_size=24):
            assert [] == judged(batch, "obs", "next_obs", "final_obs", "action", "extras")
            assert 12 == len(batch.final_obs["left"])


@pytest.mark.parametrize("process", [False, True])
def test_a_mirror_has_each_array_by_its_name(client: breadbox.Client, process: bool) -> None:
    name = f"mirror-{process}"
    filled(client, name, 2)

    with ReplayMirror(client, buffer=name, capacity_steps=1000, seed=1, process=process) as mirror:
        mirror.catch_up(30)
        batch = mirror.at(range(mirror.step_count))
        assert 2 * STEPS * len(ORDERS) == len(batch)
        assert [] == judged(batch, "obs", "next_obs", "action", "extras")
        assert (batch.obs["left"][:, 0] - 1000).tolist() == batch.reward.tolist()
        assert (batch.next_obs["left"][:, 0] - 1001).tolist() == batch.reward.tolist()
        assert [] == judged(mirror.sample(64, n_step=3), "obs", "next_obs")


def test_exported_episodes_have_each_array_by_its_name(client: breadbox.Client) -> None:
    filled(client, "export", 2)

    episodes = list(read_buffer(client, "export"))
    assert 2 * len(ORDERS) == len(episodes)
    for episode in episodes:
        assert [] == wrong_leaves("obs", episode.observations)
        assert [] == wrong_leaves("action", episode.actions)


def add_to_adapter(buffer: Any, steps: int) -> None:
    for t in range(steps):
        seen, led_to = (
            {name: made("obs", [at], order)[name] for name in order if name != "goal"}
            for at, order in ((t, ORDERS[t % 6]), (t + 1, ORDERS[(t + 3) % 6]))
        )
        is_over = np.array([t % 5 == 4])
        buffer.add(seen, led_to, np.zeros((1, 1)), np.array([float(t)]), is_over, [{}])


@pytest.mark.parametrize("library", ["sb3", "cleanrl"])
def test_buffers_of_spaces_have_each_array_by_its_name(server: ServerProcess, library: str) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    if library == "sb3":
        pytest.importorskip("stable_baselines3", reason="the extra sb3 is not installed")
        from breadbox_adapters.sb3 import BreadboxReplayBuffer as Buffer
    else:
        from breadbox_adapters.cleanrl import ReplayBuffer as Buffer  # type: ignore[assignment]

    part = spaces.Box(-1e6, 1e6, (2,))
    observation = spaces.Dict([("right", part), ("left", part)])
    action = spaces.Box(-1, 1, (1,))
    options: dict[str, Any] = {"server": server.address, "handle_timeout_termination": False}
    buffer = Buffer(1000, observation, action, "cpu", **options)
    try:
        add_to_adapter(buffer, 40)
        assert 40 == buffer.size()
        masked = np.ma.masked_array(np.zeros((1, 2), np.float32), True)
        obs = {"left": masked, "right": masked}
        with pytest.raises(UnsupportedArrayError, match="mask apart"):
            buffer.add(obs, obs, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
        batch = buffer.sample(200)
        for tree, ahead in ((batch.observations, 0), (batch.next_observations, 1)):
            at = batch.rewards[:, 0] + ahead
            assert (1000 + at).tolist() == tree["left"][:, 0].tolist()
            assert (2000 + at).tolist() == tree["right"][:, 1].tolist()
    finally:
        buffer.close()


@pytest.mark.parametrize("gamma", [1.0, 0.0, 0.99])
def test_torchrls_samples_have_each_array_by_its_name_and_count_their_steps(
    client: breadbox.Client, gamma: float
) -> None:
    pytest.importorskip("torchrl", reason="the extra torchrl is not installed")
    import torch
    from tensordict import TensorDict

    from breadbox_adapters.torchrl import BreadboxReplayBuffer

    name = f"torchrl-{gamma}"
    client.create_buffer(name, breadbox.BufferConfig.preset("off-policy"))
    client.start_session("s", buffer=name)
    with BreadboxReplayBuffer(
        client, buffer=name, capacity_steps=100, batch_size=64, n_step=3, gamma=gamma
    ) as buffer:
        for start in range(0, 12, 3):
            order = ORDERS[start % 6] if start else ("right", "left", "goal")
            seen, led_to = (
                {
                    key: torch.from_numpy(
                        made("obs", np.arange(start, start + 3) + ahead, order)[key]
                    )
                    for key in each
                    if key != "goal"
                }
                for ahead, each in ((0, order), (1, order[::-1]))
            )
            flags = torch.zeros(3, 1, dtype=torch.bool)
            outcome = {"reward": torch.arange(start, start + 3.0)[:, None], "done": flags}
            content = {**seen, "action": torch.zeros(3, 1), "next": {**led_to, **outcome}}
            buffer.extend(TensorDict(content, batch_size=[3]))
        data = buffer.sample()
        at = data["left"][:, 0] - 1000
        count = data["steps_to_next_obs"][:, 0]
        assert (2000 + at).tolist() == data["right"][:, 1].tolist()
        assert (1000 + at + count).tolist() == data["next", "left"][:, 0].tolist()
        assert (2000 + at + count).tolist() == data["next", "right"][:, 0].tolist()
        assert torch.minimum(torch.tensor(3), 12 - at).tolist() == count.tolist()
