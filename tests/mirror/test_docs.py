"""The page on the mirror, run from its first block to its last."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.mirror import ReplayMirror, StepMemory
from mirror.goals import goal_fragments
from support.documents import BLOCKS
from support.fragments import vector_fragment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PAGE = "docs/mirror.md"


@pytest.fixture(scope="module")
def client() -> Iterator[breadbox.Client]:
    with breadbox.local_server() as client:
        client.start_session("s")
        client.append_many([vector_fragment(index, step_count=16) for index in range(16)])
        yield client


def run(name: str, client: breadbox.Client, **names: Any) -> dict[str, Any]:
    place = f"{PAGE}#{name}"
    code = BLOCKS[place].code.replace("localhost:50051", client.address)
    exec(compile(code, place, "exec"), names)  # The document is ours.
    return names


@pytest.fixture(scope="module")
def mirror(client: breadbox.Client) -> Iterator[ReplayMirror]:
    names = run("sample", client)
    assert 256 == len(names["batch"])
    assert (256,) == tuple(names["target"].shape)
    with names["mirror"] as made:
        made.wait_until(256, timeout_s=60)
        yield made


def test_steps_are_sampled(mirror: ReplayMirror) -> None:
    assert 256 == len(mirror)


class Walk:
    """An environment of an episode of 30 steps, whose observations count them, and a policy."""

    def __init__(self) -> None:
        self.loaded: list[dict[str, Any]] = []
        self.time = 0

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return np.full(2, self.time, np.float32), 1.0, self.time == 30, False, {}

    def load(self, weights: dict[str, Any]) -> None:
        self.loaded.append(weights)

    def act(self, obs: Any) -> int:
        return 1


def test_actors_play_with_published_weights_and_say_so() -> None:
    with breadbox.local_server(schema="ragged", uses_max=100, staleness_max=100) as server:
        for version in (1, 2):  # As after a crash: the version goes on.
            published = run("publish", server, weights={"w": np.full(3, version)})
            with published["learner"]:
                assert ("cart-1", version) == (
                    published["session"].session_id,
                    published["version"],
                )
        walk = Walk()
        actor = run("actor", server, env=walk, policy=walk)
        (loaded,) = walk.loaded
        assert [2, 2, 2] == loaded["w"].tolist()
        assert (2, 10_000) == (actor["writer"].model_version, actor["writer"].counts.sent)
        with ReplayMirror(server, capacity_steps=20_000) as mirror:
            mirror.wait_until(10_000, timeout_s=60)
            steps = mirror.at(range(10_000))
        assert {2} == set(steps.model_version.tolist())
        ended = steps.next_obs[steps.terminated]
        assert (333, {30.0}) == (len(ended), set(ended[:, 0].tolist()))


def test_the_loop_ends(client: breadbox.Client, mirror: ReplayMirror) -> None:
    appended = [vector_fragment(16 + index, step_count=16) for index in range(4)]
    # The bound counts from the first batch on: these arrive while it waits.
    feeding = breadbox.Appender(client)
    load, mirror_batches = mirror.batches, []

    def batches(*args: Any, **options: Any) -> Any:
        drawn = load(*args, **options)
        mirror_batches.append(drawn)
        for fragment in appended:
            feeding.append(fragment)
        return drawn

    mirror.batches = batches  # type: ignore[method-assign]
    try:
        assert 3 == run("loop", client, mirror=mirror)["updates"]
    finally:
        del mirror.batches
        mirror_batches[0].close()
        feeding.close()


def test_priorities_are_updated(client: breadbox.Client, mirror: ReplayMirror) -> None:
    names = run("priority", client, mirror=mirror)
    assert pytest.approx(1e-6) == mirror.priorities(names["batch"].handle[:1])[0]


def test_sequences_have_their_shape(client: breadbox.Client, mirror: ReplayMirror) -> None:
    learned = run("sequences", client, mirror=mirror)["learned"]
    assert not learned[:, :4].any()
    assert learned[:, 4:].any()


def test_goals_are_relabelled(client: breadbox.Client) -> None:
    goals = StepMemory(1000, seed=1)
    for fragment in goal_fragments(20):
        goals.extend(fragment)
    batch = run("goals", client, goals=goals)["batch"]
    assert {-1.0, 0.0} == set(batch.reward.tolist())


def test_frames_are_stored(client: breadbox.Client, capsys: pytest.CaptureFixture[str]) -> None:
    run("frames", client)
    assert capsys.readouterr().out.endswith(" MB\n")


def test_a_subscription_is_read_by(client: breadbox.Client) -> None:
    assert len(run("subscription", client)["kept"]) >= 200
    (shown,) = client.get_buffer().subscriptions
    assert ("dqn", True) == (shown.name, shown.retaining)


def test_a_process_of_its_own_is_shared(client: breadbox.Client) -> None:
    assert 256 == len(run("process", client)["batch"])
    with ReplayMirror(client.address, capacity_steps=100_000, process=True) as shared:
        assert 256 == len(run("attach", client, address=shared.share())["batch"])


def test_a_memory_needs_no_server(client: breadbox.Client) -> None:
    fragment = replace(vector_fragment(), reward=np.full(4, 2, np.float32))
    assert {2.0} == set(run("memory", client, fragment=fragment)["batch"].reward.tolist())
