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

pytestmark = pytest.mark.integration

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


def test_a_memory_needs_no_server(client: breadbox.Client) -> None:
    fragment = replace(vector_fragment(), reward=np.full(4, 2, np.float32))
    assert {2.0} == set(run("memory", client, fragment=fragment)["batch"].reward.tolist())
