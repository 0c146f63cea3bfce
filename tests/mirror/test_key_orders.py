"""Steps in memory by name, whatever order of keys each producer's dicts have."""

from typing import Any

import numpy as np
import pytest

from breadbox.mirror import StepMemory
from breadbox.model.errors import InvalidRequestError, TreeMismatchError
from support.key_orders import fragments, wrong_leaves


@pytest.fixture(params=[(2,), (24, 24)], ids=["in rows", "as frames"])
def memory(request: pytest.FixtureRequest) -> StepMemory:
    memory = StepMemory(1000, seed=1)
    for fragment in fragments(12, shape=request.param):
        memory.extend(fragment)
    return memory


def judged(batch: Any) -> list[str]:
    names = ("obs", "next_obs", "action", "extras")
    return [
        each
        for name in names
        for each in wrong_leaves("obs" if name == "next_obs" else name, getattr(batch, name))
    ]


def test_steps_of_fragments_in_all_orders_have_each_leaf_by_its_name(memory: StepMemory) -> None:
    every = memory.at(range(48))

    assert [] == judged(every)
    assert [*range(48)] == (every.obs["goal"]["x"].reshape(48, -1)[:, 0] - 3000).tolist()
    assert [*range(1, 49)] == (every.next_obs["right"].reshape(48, -1)[:, 0] - 2000).tolist()
    assert [] == judged(memory.sample(100))
    assert [] == judged(memory.sample(100, n_step=3))
    assert [] == [each for episode in memory.sample_episodes(9) for each in judged(episode)]


def test_sequences_of_fragments_in_all_orders_have_each_leaf_by_its_name(
    memory: StepMemory,
) -> None:
    batch = memory.sample_sequences(30, length=4)

    assert batch.mask.all()
    assert [] == judged(batch)
    assert [] == wrong_leaves("in_state", batch.in_state)


def test_dicts_of_samples_have_one_order_whatever_came_first(memory: StepMemory) -> None:
    batch = memory.sample(4)

    assert ["goal", "left", "right"] == [*batch.obs] == [*batch.action] == [*batch.next_obs]


def test_leaves_of_other_shapes_in_another_order_are_no_mismatch() -> None:
    memory = StepMemory(100)
    for fragment in fragments(6):
        fragment.obs["left"] = np.zeros((4, 5), np.uint8)
        fragment.next_obs["left"] = np.zeros(5, np.uint8)
        fragment.final_obs["left"] = np.zeros((1, 5), np.uint8)
        fragment.in_state["left"] = np.zeros(7)
        memory.extend(fragment)

    assert (24, 5) == memory.at(range(24)).obs["left"].shape
    assert (4, 7) == memory.sample_sequences(4, length=2).in_state["left"].shape


def test_a_list_and_a_tuple_of_the_same_parts_are_alike() -> None:
    memory = StepMemory(100)
    for fragment, kind in zip(fragments(2), (list, tuple), strict=True):
        for name in ("obs", "next_obs", "final_obs"):
            tree = getattr(fragment, name)
            setattr(fragment, name, kind([tree["left"], tree["right"]]))
        fragment.in_state = kind([fragment.in_state["left"]])
        memory.extend(fragment)

    batch = memory.at(range(8))
    assert ([1] * 8, [2] * 8) == tuple((leaf[:, 0] // 1000).tolist() for leaf in batch.next_obs)


@pytest.mark.parametrize("field", ["obs", "next_obs", "in_state", "action"])
def test_a_leaf_of_another_name_is_refused_with_its_path(field: str) -> None:
    memory = StepMemory(100)
    first, second = fragments(2)
    tree = getattr(second, field)
    tree["other"] = tree.pop("left")
    second.final_obs = second.final_obs_step = None
    second.terminated[:] = False
    memory.extend(first)

    with pytest.raises(TreeMismatchError, match=r"keys \[goal, left, right\], got keys"):
        memory.extend(second)


def test_a_reached_goal_takes_the_type_of_the_desired_one() -> None:
    memory = StepMemory(100, seed=2)
    for fragment in fragments(3):
        for name in ("obs", "next_obs", "final_obs"):
            tree = getattr(fragment, name)
            changed = {
                "desired_goal": tree["left"],
                "observation": tree["goal"],
                "achieved_goal": tree["right"].astype(np.float64),
            }
            setattr(fragment, name, changed)
        memory.extend(fragment)

    batch = memory.sample_goals(40, lambda achieved, desired, _: desired[:, 0])

    assert np.float32 == batch.obs["desired_goal"].dtype == batch.next_obs["desired_goal"].dtype
    assert np.float64 == batch.obs["achieved_goal"].dtype
    assert [2] * 32 + [1] * 8 == (batch.obs["desired_goal"][:, 0] // 1000).tolist()


def test_a_goal_that_would_lose_digits_is_refused() -> None:
    memory = StepMemory(100)
    for fragment in fragments(1):
        for name in ("obs", "next_obs", "final_obs"):
            tree = getattr(fragment, name)
            changed = {"desired_goal": tree["left"].astype(int), "achieved_goal": tree["right"]}
            setattr(fragment, name, changed)
        memory.extend(fragment)

    with pytest.raises(InvalidRequestError, match="'desired_goal' int64"):
        memory.sample_goals(4, lambda *_: np.zeros(4))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_a_window_says_how_many_steps_it_has_whatever_gamma_is(gamma: float) -> None:
    memory = StepMemory(100)
    for fragment in fragments(2):
        memory.extend(fragment)

    assert [3, 3, 2, 1] * 2 == memory.at(range(8), n_step=3, gamma=gamma).window_length.tolist()
    assert memory.at(range(8), gamma=gamma).window_length is None
