"""Environments of several agents: a row of fragments for each, with one policy or several."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from breadbox.model.fragment import Fragment
from breadbox.model.types import EpisodeEnd
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.acting.inference import Inference
from breadbox_rollout.acting.opponents import PINNED_VERSION, Opponents
from breadbox_rollout.environments.arrays import GroupArrays, create_arrays
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.processes.pool import AgentRows, EnvironmentStartError
from breadbox_rollout.sending.models import ModelWatcher
from peers.packages import install
from support.eventually import eventually_sync
from support.rollout_service import FakeService
from support.rollout_worker import Rollout, running_worker
from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE, check_fragment, check_sequence
from support.scripted_parallel import BLUE_ACTIONS


def spec_of(scripts: dict[str, str], late: list[str] | None = None) -> EnvSpec:
    return EnvSpec(
        name="support.scripted_parallel:make", options={"scripts": scripts, "late": late or []}
    )


def check_all(service: FakeService) -> None:
    by_worker: dict[str, list[Fragment]] = {}
    for fragment in service.fragments:
        by_worker.setdefault(fragment.worker_id, []).append(fragment)
    for fragments in by_worker.values():
        check_sequence(fragments)
        for fragment in fragments:
            check_fragment(fragment)


def ends_of(rollout: Rollout, worker_id: str) -> str:
    letters = []
    for fragment in rollout.by_worker()[worker_id]:
        for terminated, truncated in zip(fragment.terminated, fragment.truncated, strict=True):
            letters.append("t" if terminated else "c" if truncated else ".")
    return "".join(letters)


@pytest.mark.parametrize("per_process", [1, 2])
def test_each_agent_has_fragments_of_its_own_that_end_when_it_does(per_process: int) -> None:
    """One agent's end does not end the others, and while it waits nothing is recorded of it."""
    service = FakeService()
    service.publish("s", 0)
    scripts = {"red_0": "....t", "red_1": "..c", "red 2": ".......t"}
    named = {f"w-{env}-{agent}" for env in (0, 1) for agent in ("red_0", "red_1", "red-2")}
    with running_worker(
        service, "", spec=spec_of(scripts), envs_per_process=per_process
    ) as rollout:
        # Each environment in its own time: on a busy machine one may be far ahead.
        service.wait_until(
            lambda: all(len(rollout.by_worker().get(each, [])) >= 4 for each in named)
        )
    check_all(service)
    assert named == set(rollout.by_worker())
    assert ("....t" * 8)[:16] == ends_of(rollout, "w-0-red_0")[:16]
    assert ("..c" * 8)[:16] == ends_of(rollout, "w-0-red_1")[:16]
    assert (".......t" * 8)[:16] == ends_of(rollout, "w-1-red-2")[:16]
    assert not any(fragment.discontinuity for fragment in service.fragments)
    assert not rollout.worker.stats.failures


def test_an_agent_that_joins_later_begins_an_episode_and_one_that_vanishes_is_cut_off() -> None:
    service = FakeService()
    service.publish("s", 0)
    scripts = {"early": "......t", "late": "..v"}
    with running_worker(service, "", spec=spec_of(scripts, late=["late"])) as rollout:
        service.wait_until(lambda: len(rollout.by_worker().get("w-0-late", [])) >= 3)
        service.wait_until(lambda: len(rollout.by_worker().get("w-0-early", [])) >= 2)
    check_all(service)
    assert "..c..c..c..c" == ends_of(rollout, "w-0-late")[:12]
    assert "......t" == ends_of(rollout, "w-0-early")[:7]


def test_a_failure_aborts_those_who_play_and_not_those_who_have_ended() -> None:
    service = FakeService()
    service.publish("s", 0)
    scripts = {"short": "..t", "long": "......!"}
    with running_worker(service, "", spec=spec_of(scripts), fragment_steps=2, env_count=1):
        service.wait_until(lambda: len(service.reports) >= 8)
    check_all(service)
    ends: dict[str, set[tuple[EpisodeEnd, int]]] = {}
    for report in service.reports:
        ends.setdefault(report.worker_id, set()).add((report.end, report.step_count))
    assert {
        "w-0-short": {(EpisodeEnd.TERMINATED, 3)},
        "w-0-long": {(EpisodeEnd.ABORTED, 6)},
    } == ends


def test_an_episode_may_be_cut_off_for_all_agents() -> None:
    service = FakeService()
    service.publish("s", 0)
    with running_worker(
        service, "", spec=spec_of({"a": "...t", "b": "."}), episode_steps_max=6
    ) as rollout:
        service.wait_until(lambda: len(rollout.by_worker().get("w-0-b", [])) >= 3)
    check_all(service)
    assert ".....c.....c" == ends_of(rollout, "w-0-b")[:12]


def fresh_weights(seed: int, actions: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    return policy_weights(make_policy("mlp", OBSERVATION_SPACE, actions))


def check_log_probs(service: FakeService, weights: dict[str, Any], actions: Any) -> None:
    policy = make_policy("mlp", OBSERVATION_SPACE, actions)
    policy.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    for fragment in service.fragments:
        obs = {key: torch.from_numpy(value[None]) for key, value in fragment.obs.items()}
        with torch.no_grad():
            judged = policy.evaluate(
                obs,
                torch.from_numpy(fragment.action[None]),
                None,
                torch.from_numpy(fragment.first[None]),
            )
        assert fragment.log_prob is not None
        np.testing.assert_allclose(judged.log_prob[0].numpy(), fragment.log_prob, atol=1e-4)


def test_agents_with_policies_of_their_own_fill_buffers_of_their_own() -> None:
    """Spaces differ, and so do session, version, weights and learner."""
    red, blue = FakeService(), FakeService()
    weights = {"red": fresh_weights(1, ACTION_SPACE), "blue": fresh_weights(2, BLUE_ACTIONS)}
    scripts = {"red_0": "....t", "blue_0": "..c", "red_1": ".......t"}
    with running_worker(
        red, "", spec=spec_of(scripts), agents={"red_*": red, "*": blue}
    ) as rollout:
        red.publish("r", 5, weights["red"])
        assert 0 == rollout.worker.step_count, "nobody plays before all may"
        blue.publish("b", 9, weights["blue"])
        rollout.wait_for_fragments(20)
        blue.wait_until(lambda: len(blue.fragments) >= 10)
    for service, prefix, label in ((red, "red", ("r", 5)), (blue, "blue", ("b", 9))):
        check_all(service)
        assert {label} == {(f.session_id, f.model_version_min) for f in service.fragments}
        assert all(f.worker_id.split("-")[2].startswith(prefix) for f in service.fragments)
        assert service.reports
    check_log_probs(red, weights["red"], ACTION_SPACE)
    check_log_probs(blue, weights["blue"], BLUE_ACTIONS)


@pytest.mark.parametrize(
    ("scripts", "patterns", "problem"),
    [
        (["red_0", "blue_0"], ["*"], "'red_0' and 'blue_0' have other spaces .* with --agents"),
        (["red_0", "blue_0"], ["red_*"], "--agents names no policy for agent 'blue_0'"),
        (["red_0"], ["red_*", "green"], "names 'green', but the agents are red_0"),
        (["red 0", "red-0"], ["*"], "'red 0' and 'red-0' have the same worker id"),
    ],
)
def test_agents_that_do_not_fit_their_policies_are_refused_by_name(
    scripts: list[str], patterns: list[str], problem: str
) -> None:
    services = {pattern: FakeService() for pattern in patterns}
    with (
        running_worker(
            services[patterns[0]],
            "",
            spec=spec_of(dict.fromkeys(scripts, ".")),
            agents=services,
            env_count=1,
        ) as rollout,
        pytest.raises(EnvironmentStartError, match=problem),
    ):
        rollout.wait_for_error()


def test_agents_that_act_in_turn_are_refused_with_what_helps() -> None:
    spec = EnvSpec(name="support.scripted_parallel:make_turn_based")
    with (
        running_worker(FakeService(), "", spec=spec, env_count=1) as rollout,
        pytest.raises(EnvironmentStartError, match="aec_to_parallel"),
    ):
        rollout.wait_for_error()


def test_opponents_play_and_nothing_is_sent_of_them() -> None:
    service = FakeService()
    service.publish("s", 0, fresh_weights(0, ACTION_SPACE))
    with running_worker(
        service,
        "",
        spec=spec_of({"red_0": "....t", "red_1": "...t"}),
        agents={"red_0": service},
        opponents="red_1",
    ) as rollout:
        for version in range(1, 6):
            rollout.wait_for_fragments(len(service.fragments) + 10)
            service.publish("s", version, fresh_weights(version, ACTION_SPACE))
        rollout.wait_for_fragments(len(service.fragments) + 20)
    check_all(service)
    assert {"w-0-red_0", "w-1-red_0"} == set(rollout.by_worker())
    assert {"w-0-red_0", "w-1-red_0"} >= {report.worker_id for report in service.reports}


def leaning_weights(choice: int) -> dict[str, Any]:
    """A policy that always makes one choice."""
    weights = fresh_weights(0, ACTION_SPACE)
    (bias,) = [name for name, array in weights.items() if array.shape == (4,)]
    weights[bias] = np.where(np.arange(4) == choice, 100.0, 0.0).astype(np.float32)
    return weights


class Table:
    """Opponents at rows that a test moves."""

    def __init__(self, row_count: int, service: FakeService | None = None, **options: Any) -> None:
        self.service = service or FakeService()
        self.watcher = ModelWatcher(self.service)
        self.opponents = Opponents(
            lambda observations, actions: make_policy("mlp", observations, actions),
            lambda policy: Inference(policy, torch.device("cpu")),
            self.watcher,
            **options,
        )
        self.opponents.sit(AgentRows(OBSERVATION_SPACE, ACTION_SPACE, ("a",)), [range(row_count)])
        self.arrays, descriptor = create_arrays(OBSERVATION_SPACE, ACTION_SPACE, row_count)
        os.close(descriptor)
        self.arrays.acts[:] = True
        self.watcher.start()

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        self.service.publish("s", version, weights)
        eventually_sync(lambda: self.watcher.latest.model_version == version, within_s=30.0)
        self.opponents.take_model()

    def choices(self, *, first: bool) -> list[int]:
        arrays: GroupArrays = self.arrays
        arrays.first[:] = first
        assert [] == self.opponents.act([0], [arrays])()
        return [int(action) for action in arrays.action]

    def close(self) -> None:
        self.service.close()
        self.watcher.close()


def test_an_opponent_is_one_version_for_an_episode_and_all_that_are_kept_are_drawn() -> None:
    table = Table(64, kept_max=2, pinned=[leaning_weights(3)])
    try:
        for version in range(3):
            table.publish(version, leaning_weights(version))
        assert [PINNED_VERSION, 1, 2] == table.opponents.versions
        episode = table.choices(first=True)
        assert {1, 2, 3} == set(episode)
        for _ in range(3):
            assert episode == table.choices(first=False)
        assert episode != table.choices(first=True)
        table.service.publish("another", 0, leaning_weights(0))
        eventually_sync(lambda: table.watcher.latest.session_id == "another", within_s=30.0)
        table.opponents.take_model()
        assert [PINNED_VERSION, 0] == table.opponents.versions
    finally:
        table.close()


def test_opponents_wait_out_a_session_of_another_policy_that_was_there_before_them() -> None:
    service = FakeService()
    service.publish("left", 0, {"head.weight": np.zeros(1, np.float32)})
    table = Table(2, service, kept_max=2)
    try:
        eventually_sync(lambda: table.watcher.latest.session_id == "left", within_s=30.0)
        table.opponents.take_model()
        assert (False, []) == (table.opponents.in_session, table.opponents.versions)
        assert "another session than 'left' of buffer 'default'" == table.opponents.waits_for
        table.publish(1, leaning_weights(1))
        assert (True, [1]) == (table.opponents.in_session, table.opponents.versions)
        assert "" == table.opponents.waits_for
    finally:
        table.close()


def check_positions(service: FakeService) -> None:
    """What follows a step obeys the law of motion, also where an episode ended."""
    for fragment in service.fragments:
        following = np.concatenate([fragment.obs[1:], fragment.next_obs[None]])
        ends = np.flatnonzero(fragment.ended)
        if len(ends):
            assert fragment.final_obs_step is not None
            assert ends.tolist() == fragment.final_obs_step.tolist()
            following[ends] = fragment.final_obs
        # An agent sees its velocity (0:2) and place (2:4); it moves for 0.1 s a step.
        moved = fragment.obs[:, 2:4] + 0.1 * fragment.obs[:, 0:2]
        np.testing.assert_allclose(moved, following[:, 2:4], atol=1e-4)


@pytest.fixture(scope="module")
def mpe2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Environments of PettingZoo, for this process and those that it starts."""
    folder = tmp_path_factory.mktemp("packages")
    needed = ("mpe2==1.1.1", "pettingzoo==1.27.0", "pygame==2.6.1")
    with pytest.MonkeyPatch.context() as patch:
        for requirement in needed:
            patch.syspath_prepend(install(requirement, folder))
        yield


@pytest.mark.peers
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("mpe2")
def test_agents_of_a_pettingzoo_environment_share_a_policy() -> None:
    service = FakeService()
    service.publish("s", 0)
    spec = EnvSpec(name="mpe2.simple_spread_v3:parallel_env", options={"max_cycles": 25})
    with running_worker(service, "", spec=spec, fragment_steps=8, policy="auto") as rollout:
        rollout.wait_for_fragments(60)
    check_positions(service)
    assert {f"w-{env}-agent_{n}" for env in (0, 1) for n in range(3)} == set(rollout.by_worker())
    assert (EpisodeEnd.TRUNCATED, 25) in {(each.end, each.step_count) for each in service.reports}


@pytest.mark.peers
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("mpe2")
def test_hunters_and_prey_of_a_pettingzoo_environment_have_policies_of_their_own() -> None:
    hunters, prey = FakeService(), FakeService()
    for service in (hunters, prey):
        service.publish("s", 0)
    with running_worker(
        hunters,
        "",
        spec=EnvSpec(name="mpe2.simple_tag_v3:parallel_env"),
        fragment_steps=8,
        agents={"adversary_*": hunters, "*": prey},
    ) as rollout:
        rollout.wait_for_fragments(40)
        prey.wait_until(lambda: len(prey.fragments) >= 10)
    for service, width in ((hunters, 16), (prey, 14)):
        check_positions(service)
        assert {width} == {fragment.obs.shape[1] for fragment in service.fragments}
