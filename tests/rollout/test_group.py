"""A group of environments in this process: what it writes, and what it makes of failures."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from breadbox_rollout.environments.arrays import GroupArrays, Phase, create_arrays, open_arrays
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind
from breadbox_rollout.environments.units import EnvGroup, GroupOptions, SingleUnit
from support import scripted_env
from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE, Process, ScriptedEnv


class Clock:
    """Monotonic seconds that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    Process.position = Process.episode = 0
    Process.reset_raises = Process.reset_hangs = Process.build_raises = False
    Process.hoard.clear()
    yield
    Process.hoard.clear()


def group_of(
    make: Callable[[], Any],
    count: int = 1,
    clock: Clock | None = None,
    action_space: Any = ACTION_SPACE,
    **options: Any,
) -> tuple[EnvGroup, GroupArrays]:
    arrays, descriptor = create_arrays(OBSERVATION_SPACE, action_space, count)
    os.close(descriptor)
    grouped = GroupOptions(seeds=tuple(range(count)), **options)

    def make_unit(index: int) -> SingleUnit:
        return SingleUnit(make(), index, arrays, grouped.episode_steps_max, None)

    return EnvGroup(make_unit, count, arrays, grouped, clock or Clock()), arrays


def started(script: str, count: int = 1, **options: Any) -> tuple[EnvGroup, GroupArrays]:
    group, arrays = group_of(lambda: ScriptedEnv(script), count, **options)
    group.start()
    return group, arrays


def test_a_started_group_shows_first_observations_and_no_answers() -> None:
    _, arrays = started(".", count=2)
    assert [0, 0] == arrays.obs["clock"][:, 1].tolist()
    assert [True, True] == arrays.first.tolist()
    assert ([0, 0], [1, 1]) == (arrays.answer_count.tolist(), arrays.obs_count.tolist())
    assert Phase.IDLE == arrays.phase[0]


def test_a_step_answers_with_reward_flags_and_the_next_observation() -> None:
    group, arrays = started(".")
    arrays.action[0] = 3
    notes = group.step()
    assert not notes
    assert (0.3, False, False, False) == (
        arrays.reward[0],
        arrays.terminated[0],
        arrays.truncated[0],
        arrays.first[0],
    )
    assert 1 == arrays.obs["clock"][0, 1]
    assert (1, 2) == (arrays.answer_count[0], arrays.obs_count[0])


@pytest.mark.parametrize(("letter", "flags"), [("t", (True, False)), ("c", (False, True))])
def test_an_ended_episode_shows_its_final_observation_and_the_first_of_the_next(
    letter: str, flags: tuple[bool, bool]
) -> None:
    group, arrays = started(f".{letter}")
    group.step()
    group.step()
    assert flags == (arrays.terminated[0], arrays.truncated[0])
    assert 2 == arrays.final_obs["clock"][0, 1]
    assert (0, True) == (arrays.obs["clock"][0, 1], arrays.first[0])
    assert arrays.obs["clock"][0, 0] != arrays.final_obs["clock"][0, 0]


@pytest.mark.parametrize(
    ("letter", "kind"),
    [
        ("!", "step_raised"),
        ("n", "not_finite"),
        ("o", "not_finite"),
        ("k", "observation_mismatch"),
        ("w", "observation_mismatch"),
    ],
)
def test_a_failed_step_is_no_answer_but_an_abort_followed_by_a_new_episode(
    letter: str, kind: str
) -> None:
    """The ancestor answered it with a terminal state."""
    group, arrays = started(f".{letter}.")
    group.step()
    notes = group.step()
    assert [(0, kind)] == [(failure["env"], failure["kind"]) for failure in notes.failures]
    assert (1, 1) == (arrays.answer_count[0], arrays.abort_count[0])
    assert (0, True) == (arrays.obs["clock"][0, 1], arrays.first[0])
    assert not group.step()
    assert (2, False) == (arrays.answer_count[0], arrays.first[0])


def test_a_mismatch_names_path_wanted_and_got() -> None:
    group, _ = started("w")
    assert (
        "observation.level: wanted float32[1], got float32[2]" == group.step().failures[0]["detail"]
    )


def test_a_failure_costs_its_own_environment_only() -> None:
    group, arrays = started(".!..", count=2)
    notes = group.step()
    assert [1] == [failure["env"] for failure in notes.failures]
    assert [1, 0] == arrays.answer_count.tolist()


def test_a_reset_that_raises_after_an_ended_episode_keeps_the_answer() -> None:
    """The ancestor lost the last reward."""
    group, arrays = started("..r.")
    for _ in range(2):
        group.step()
    notes = group.step()
    assert ["reset_raised"] == [failure["kind"] for failure in notes.failures]
    assert (True, 2.0, 3) == (arrays.terminated[0], arrays.reward[0], arrays.answer_count[0])
    assert (0, True, 0) == (arrays.obs["clock"][0, 1], arrays.first[0], arrays.abort_count[0])


def test_what_cannot_be_built_again_is_not_swallowed() -> None:
    group, _ = started("b")
    with pytest.raises(EnvironmentFailedError) as caught:
        group.step()
    assert FailureKind.BUILD_RAISED is caught.value.kind


def test_the_step_limit_truncates() -> None:
    group, arrays = started(".", episode_steps_max=2)
    group.step()
    assert not arrays.truncated[0]
    group.step()
    assert (False, True) == (arrays.terminated[0], arrays.truncated[0])


@pytest.mark.parametrize(("interval_s", "builds"), [(0.0, 1), (5.0, 2)])
def test_a_planned_rebuild_waits_for_the_end_of_the_episode_and_0_means_never(
    interval_s: float, builds: int
) -> None:
    """The ancestor lost the last reward, and took 0 for always."""
    made = []
    clock = Clock()

    def make() -> ScriptedEnv:
        made.append(clock.now)
        return ScriptedEnv("..t")

    group, arrays = group_of(make, clock=clock, rebuild_interval_s=interval_s)
    group.start()
    for _ in range(3):
        clock.now += 4.0
        group.step()
        assert len(made) == 1 or arrays.terminated[0]
    assert builds == len(made)
    assert (2.0, True) == (arrays.reward[0], arrays.terminated[0])


def test_the_task_of_an_episode_is_noted_when_it_begins() -> None:
    """The ancestor put it into the first observation, which then had a key more."""
    group, _ = group_of(lambda: scripted_env.make(".t", task="chop"))
    group.start()
    assert [{"env": 0, "task": "chop"}] == group.notes.tasks
    assert not group.step()
    assert [{"env": 0, "task": "chop"}] == group.step().tasks


def test_actions_are_copies_and_boxes_are_clipped() -> None:
    """The ancestor's environment changed the recorded action in place."""
    seen = []

    class Greedy(ScriptedEnv):
        action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)  # type: ignore[assignment]

        def step(self, action: Any) -> Any:
            seen.append(action.tolist())
            action[:] = 99.0
            return super().step(0)

    group, arrays = group_of(lambda: Greedy("."), action_space=Greedy.action_space)
    group.start()
    arrays.action[0] = [0.5, 7.0]
    group.step()
    assert [[0.5, 1.0]] == seen
    assert [0.5, 7.0] == arrays.action[0].tolist()


def test_seeds_are_given_once_or_to_every_episode() -> None:
    seeds: list[int | None] = []

    class Seeded(ScriptedEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed)

    for each in (False, True):
        group, _ = group_of(lambda: Seeded("t"), seed_each_episode=each)
        group.start()
        group.step()
        group.step()
    once, every = seeds[:3], seeds[3:]
    assert [0, None, None] == once
    assert 0 == every[0]
    assert None not in every
    assert 3 == len(set(every))


def test_shared_arrays_are_the_same_memory_on_both_sides() -> None:

    ours, descriptor = create_arrays(OBSERVATION_SPACE, ACTION_SPACE, 3)
    theirs = open_arrays(descriptor, OBSERVATION_SPACE, ACTION_SPACE, 3)
    os.close(descriptor)
    ours.obs["clock"][2] = [7, 8]
    theirs.action[1] = 3
    assert [7, 8] == theirs.obs["clock"][2].tolist()
    assert [0, 3, 0] == ours.action.tolist()
    assert (3, 1) == ours.obs["level"].shape
