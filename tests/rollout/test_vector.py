"""Vector environments: every autoreset mode makes the same fragments as plain environments do."""

from typing import Any

import numpy as np
import pytest

from breadbox.model.types import EpisodeEnd
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.processes.pool import EnvironmentStartError
from support.rollout_service import FakeService
from support.rollout_worker import Rollout, running_worker
from support.scripted_env import check_fragment, check_sequence

MODES = ["NextStep", "SameStep", "Disabled"]
SCRIPTS = ["....t..c", "..t", "t", "......c", ".........."]


def spec_of(mode: str, scripts: list[str]) -> EnvSpec:
    return EnvSpec(name="support.scripted_vector:make", options={"mode": mode, "scripts": scripts})


def check_all(rollout: Rollout) -> None:
    for fragments in rollout.by_worker().values():
        check_sequence(fragments)
        for fragment in fragments:
            check_fragment(fragment)


def ends_of(rollout: Rollout, worker_id: str, step_count: int) -> str:
    """The first steps of a worker as its script's letters."""
    fragments = rollout.by_worker()[worker_id]
    flags = [
        (bool(terminated), bool(truncated))
        for fragment in fragments
        for terminated, truncated in zip(fragment.terminated, fragment.truncated, strict=True)
    ]
    letters = {(False, False): ".", (True, False): "t", (False, True): "c"}
    return "".join(letters[each] for each in flags)[:step_count]


@pytest.mark.parametrize("mode", MODES)
def test_fragments_of_a_vector_environment_are_those_of_plain_ones(mode: str) -> None:
    """Final observation, flags, first and ids are right although only some rows are reset."""
    service = FakeService()
    service.publish("s", 0)
    with running_worker(
        service, "", spec=spec_of(mode, SCRIPTS), env_count=5, envs_per_process=5
    ) as rollout:
        rollout.wait_for_fragments(60)
        service.wait_until(lambda: len(rollout.by_worker().get("w-2", [])) >= 6)
    check_all(rollout)
    assert {f"w-{row}" for row in range(5)} == set(rollout.by_worker())
    for row, script in enumerate(SCRIPTS):
        assert (script * 24)[:24] == ends_of(rollout, f"w-{row}", 24), (mode, row)
    assert not any(fragment.discontinuity for fragment in service.fragments)
    assert not rollout.worker.stats.failures


@pytest.mark.parametrize("mode", MODES)
def test_episodes_of_a_vector_environment_are_reported_whole(mode: str) -> None:
    service = FakeService()
    service.publish("s", 0)
    with running_worker(
        service, "", spec=spec_of(mode, ["...t.c"]), env_count=2, envs_per_process=2
    ):
        service.wait_until(lambda: len(service.reports) >= 20)
    ends = [(each.end, each.step_count) for each in service.reports if each.worker_id == "w-0"]
    expected = [(EpisodeEnd.TERMINATED, 4), (EpisodeEnd.TRUNCATED, 2)] * 10
    assert expected[: len(ends)] == ends


@pytest.mark.parametrize(
    ("mode", "letter", "kind"),
    [
        *((mode, "!", "step_raised") for mode in MODES),
        ("SameStep", "n", "not_finite"),
        ("NextStep", "o", "not_finite"),
        ("Disabled", "x", "died"),
    ],
)
def test_a_failure_inside_ends_the_episodes_of_all_rows_and_every_fragment_stays_right(
    mode: str, letter: str, kind: str
) -> None:
    service = FakeService()
    service.publish("s", 0)
    scripts = ["..t....", "........." + letter]
    with running_worker(
        service, "", spec=spec_of(mode, scripts), env_count=2, envs_per_process=2, fragment_steps=2
    ) as rollout:
        rollout.wait_for_fragments(24)
        service.wait_until(lambda: any(each.end is EpisodeEnd.ABORTED for each in service.reports))
    check_all(rollout)
    assert rollout.worker.stats.failures[kind] >= 1
    assert {"w-0", "w-1"} == {
        each.worker_id for each in service.reports if each.end is EpisodeEnd.ABORTED
    }


def test_rows_that_all_ended_are_reset_without_asking_the_policy() -> None:
    """One environment inside: between two episodes of it nobody acts."""
    service = FakeService()
    service.publish("s", 0)
    with running_worker(
        service, "", spec=spec_of("NextStep", ["..t"]), env_count=1, envs_per_process=1
    ) as rollout:
        rollout.wait_for_fragments(20)
        batches, steps = rollout.worker.stats.batch_count, rollout.worker.step_count
    check_all(rollout)
    assert abs(batches - steps) <= 2


def test_several_vector_environments_share_a_worker() -> None:
    service = FakeService()
    service.publish("s", 0)
    with running_worker(
        service, "", spec=spec_of("SameStep", SCRIPTS), env_count=5, envs_per_process=2
    ) as rollout:
        rollout.wait_for_fragments(60)
        service.wait_until(lambda: len(rollout.by_worker()) == 5)
    check_all(rollout)


@pytest.mark.parametrize("mode", MODES)
def test_memory_begins_anew_with_every_episode_inside(mode: str) -> None:
    service = FakeService()
    service.publish("s", 0)
    with running_worker(
        service, "", spec=spec_of(mode, ["...t", "....."]), env_count=2, envs_per_process=2,
        policy="lstm", fragment_steps=2,
    ) as rollout:  # fmt: skip
        rollout.wait_for_fragments(30)
    check_all(rollout)
    starts = [fragment for fragment in service.fragments if fragment.first[0]]
    assert len(starts) >= 4
    assert all(not part.any() for fragment in starts for part in fragment.in_state)


@pytest.mark.parametrize(
    ("name", "limits", "problem"),
    [
        ("make_silent", {}, 'does not say how it resets: metadata\\["autoreset_mode"\\] is None'),
        ("make_fixed", {}, "has 3 environments inside, not 2: .* --envs-per-process 3"),
        ("make_wide", {}, "wanted float32\\[2, 7\\], got float32\\[2, 1\\]"),
        ("make_silent", {"episode_steps_max": 5}, "truncates its episodes itself"),
        ("make_silent", {"rebuild_interval_s": 5.0}, "never between episodes"),
    ],
)
def test_a_vector_environment_that_cannot_be_used_is_refused_by_name(
    name: str, limits: dict[str, Any], problem: str
) -> None:
    spec = EnvSpec(name=f"support.scripted_vector:{name}")
    service = FakeService()
    service.publish("s", 0)
    with (
        running_worker(service, "", spec=spec, envs_per_process=2, **limits) as rollout,
        pytest.raises(EnvironmentStartError, match=problem),
    ):
        rollout.wait_for_error()


def check_cartpole(rollout: Rollout) -> None:
    """What follows every step obeys the law of motion, also where an episode ended."""
    for fragments in rollout.by_worker().values():
        for fragment in fragments:
            following = np.concatenate([fragment.obs[1:], fragment.next_obs[None]])
            ends = np.flatnonzero(fragment.ended)
            if len(ends):
                assert fragment.final_obs_step is not None
                assert ends.tolist() == fragment.final_obs_step.tolist()
                following[ends] = fragment.final_obs
            for place in (0, 2):
                moved = fragment.obs[:, place] + 0.02 * fragment.obs[:, place + 1]
                np.testing.assert_allclose(moved, following[:, place], atol=1e-5)
            assert (fragment.reward == 1.0).all()
            later = fragment.first[1:]
            assert fragment.ended[:-1].tolist() == later.tolist()
            # Every episode starts near the middle, where Gymnasium's resets put it.
            assert (np.abs(fragment.obs[fragment.first]) <= 0.05 + 1e-6).all()


@pytest.mark.peers
@pytest.mark.timeout(300)
def test_envpool_runs_and_every_start_differs() -> None:
    # Its newest release needs packages that no test fetches; an older one resets otherwise.
    pytest.importorskip("envpool", reason="needs envpool from PyPI: pip install envpool")
    seen: list[set[bytes]] = []
    for seed in (1, 2, 1):
        service = FakeService()
        service.publish("s", 0)
        spec = EnvSpec(name="breadbox_rollout.envpool:make", options={"task_id": "CartPole-v1"})
        with running_worker(
            service, "", spec=spec, env_count=4, envs_per_process=4, policy="random", seed=seed,
            fragment_steps=16,
        ) as rollout:  # fmt: skip
            rollout.wait_for_fragments(60)
        check_cartpole(rollout)
        assert any(fragment.terminated.any() for fragment in service.fragments)
        seen.append({f.obs[0].tobytes() for f in service.fragments if f.fragment_index == 0})
    assert seen[0] == seen[2]
    assert set() == seen[0] & seen[1]


@pytest.mark.parametrize("vectorize", ["sync", "async", "vector_entry_point"])
def test_gymnasiums_own_vector_environments_run(vectorize: str) -> None:
    service = FakeService()
    service.publish("s", 0)
    spec = EnvSpec(name="CartPole-v1", vectorize=vectorize)
    with running_worker(
        service, "", spec=spec, env_count=4, envs_per_process=4, policy="random", fragment_steps=16
    ) as rollout:
        rollout.wait_for_fragments(40)
    check_cartpole(rollout)
    assert len({fragment.obs.tobytes() for fragment in service.fragments}) == len(service.fragments)
    assert any(fragment.terminated.any() for fragment in service.fragments)
