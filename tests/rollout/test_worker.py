"""The whole worker: real environment processes and threads, a fake service."""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from breadbox.model.errors import ClosedError, InvalidRequestError
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, AppendResult, EpisodeEnd
from breadbox.transport.heartbeat import Heartbeat
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.acting.inference import PolicyOutputError
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.metrics import WorkerCollector
from breadbox_rollout.processes.pool import EnvironmentStartError
from support import learner_environments as environments
from support.eventually import eventually_sync
from support.rollout_service import FakeService
from support.rollout_worker import Rollout, running_worker
from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE, check_fragment, check_sequence

LONG_SCRIPT = ".....t......c..t....."


def check_all(rollout: Rollout) -> None:
    for fragments in rollout.by_worker().values():
        check_sequence(fragments)
        for fragment in fragments:
            check_fragment(fragment)


def fresh_weights(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    return policy_weights(make_policy("mlp", OBSERVATION_SPACE, ACTION_SPACE))


def test_nothing_is_produced_before_a_session_and_everything_after_is_right() -> None:
    """The ancestor filled the buffer for the session ""."""
    service = FakeService()
    with running_worker(service, LONG_SCRIPT) as rollout:
        assert 0 == rollout.worker.step_count
        service.publish("s", 0, fresh_weights(0))
        rollout.wait_for_fragments(40)
        eventually_sync(
            lambda: {"w-0", "w-1"} == set(rollout.by_worker()), "fragments of either worker"
        )
    check_all(rollout)
    assert {"s"} == {fragment.session_id for fragment in service.fragments}
    assert {"w-0", "w-1"} == set(rollout.by_worker())
    assert all(fragment.log_prob is not None for fragment in service.fragments)


class Beats(Heartbeat):
    """Counts the rounds of a worker's loop."""

    def __init__(self) -> None:
        super().__init__(None)
        self.count = 0

    def beat(self) -> None:
        self.count += 1


def test_a_worker_that_waits_says_why_once_and_again_after_a_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("breadbox_rollout.worker._SAY_WAITING_FIRST_S", 0.0)
    monkeypatch.setattr("breadbox_rollout.worker._SAY_WAITING_S", 0.0)
    service, beats = FakeService(), Beats()

    def told() -> int:
        return caplog.messages.count("waiting for a learner to start a session")

    with running_worker(service, LONG_SCRIPT, heartbeat=beats) as rollout:
        for count in (1, 2):
            eventually_sync(lambda: told() == count, "the reason")  # noqa: B023 - called here
            rounds = beats.count
            eventually_sync(lambda: beats.count > rounds + 5)  # noqa: B023 - called here
            assert count == told()
            fragments = len(service.fragments)
            service.publish(f"s{count}", 0, fresh_weights(0))
            rollout.wait_for_fragments(fragments + 4)
            service.end_session()


def test_a_label_is_the_version_whose_weights_chose_the_action() -> None:
    """With labels and weights apart, the recorded log-prob would be another policy's."""
    service = FakeService()
    published = {version: fresh_weights(version) for version in range(6)}
    with running_worker(service, LONG_SCRIPT) as rollout:
        for version, weights in published.items():
            service.publish("s", version, weights)
            rollout.wait_for_fragments(len(service.fragments) + 10)
    check_all(rollout)
    policies = {}
    for version, weights in published.items():
        policies[version] = make_policy("mlp", OBSERVATION_SPACE, ACTION_SPACE)
        policies[version].load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
    seen = set()
    for fragment in service.fragments:
        versions = fragment.model_version
        if versions is None:
            versions = np.full(fragment.step_count, fragment.model_version_min)
        for step, version in enumerate(versions.tolist()):
            seen.add(version)
            obs = {
                key: torch.from_numpy(fragment.obs[key][None, step : step + 1])
                for key in fragment.obs
            }
            judged = policies[version].evaluate(
                obs,
                torch.from_numpy(fragment.action[None, step : step + 1]),
                None,
                torch.zeros(1, 1, dtype=torch.bool),
            )
            assert fragment.log_prob is not None
            assert abs(float(judged.log_prob.detach()[0, 0]) - fragment.log_prob[step]) < 1e-4
    assert len(seen) >= 3


def test_a_line_of_an_interval_in_which_no_episode_ended_has_no_mean_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with running_worker(FakeService(), LONG_SCRIPT) as rollout:
        rollout.worker._log(1.0)  # noqa: SLF001 - lines come with time, whatever ended
        rollout.worker.stats.returns = [1.0, 2.0]
        rollout.worker._log(1.0)  # noqa: SLF001 - likewise
    empty, filled = [line for line in caplog.messages if "steps/s" in line][:2]
    assert "0 episodes, fragments" in empty
    assert "2 episodes with mean return 1.5, fragments" in filled


def test_in_state_is_the_memory_that_the_first_step_was_taken_with() -> None:
    """The recurrent state survives fragment borders, and episode borders reset it."""
    service = FakeService()
    torch.manual_seed(5)
    policy = make_policy("lstm", OBSERVATION_SPACE, ACTION_SPACE)
    with running_worker(service, LONG_SCRIPT, policy="lstm") as rollout:
        service.publish("s", 0, policy_weights(policy))
        rollout.wait_for_fragments(30)
    check_all(rollout)
    for fragment in service.fragments:
        state = tuple(torch.from_numpy(part[None]) for part in fragment.in_state)
        obs = {key: torch.from_numpy(value[None]) for key, value in fragment.obs.items()}
        with torch.no_grad():
            judged = policy.evaluate(
                obs,
                torch.from_numpy(fragment.action[None]),
                state,
                torch.from_numpy(fragment.first[None]),
            )
        assert fragment.log_prob is not None
        assert fragment.value is not None
        np.testing.assert_allclose(judged.log_prob[0].numpy(), fragment.log_prob, atol=1e-4)
        np.testing.assert_allclose(judged.value[0].numpy(), fragment.value, atol=1e-4)


@pytest.mark.parametrize("script", ["...t", "...c", "...!", "...x"])
def test_in_state_at_an_episodes_start_is_the_initial_state(script: str) -> None:
    """It was the last state of the episode before, for whoever trusts the field alone."""
    service = FakeService()
    torch.manual_seed(5)
    service.publish("s", 0, policy_weights(make_policy("lstm", OBSERVATION_SPACE, ACTION_SPACE)))
    with running_worker(service, script, policy="lstm", fragment_steps=2) as rollout:
        rollout.wait_for_fragments(12)
    check_all(rollout)
    starts = [fragment for fragment in service.fragments if fragment.first[0]]
    assert len(starts) >= 4
    assert all(not part.any() for fragment in starts for part in fragment.in_state)
    assert any(part.any() for fragment in service.fragments for part in fragment.in_state)


def test_a_new_session_starts_over_and_an_ended_one_stops_production() -> None:
    service = FakeService()
    with running_worker(service, LONG_SCRIPT) as rollout:
        service.publish("one", 0, fresh_weights(0))
        rollout.wait_for_fragments(10)
        service.publish("two", 0, fresh_weights(1))
        service.wait_until(
            lambda: sum(fragment.session_id == "two" for fragment in service.fragments) >= 10
        )
    for fragments in rollout.by_worker().values():
        for session_id in ("one", "two"):
            check_sequence([f for f in fragments if f.session_id == session_id])
    for fragment in service.fragments:
        check_fragment(fragment)


def test_stale_steps_are_dropped_where_they_are_and_the_next_fragment_says_so() -> None:
    """D12, D25."""
    service, weights = FakeService(staleness_max=0), fresh_weights(0)
    with running_worker(service, LONG_SCRIPT, fragment_steps=64) as rollout:
        for version in range(20):
            service.publish("s", version, weights)
            service.wait_until(lambda: bool(service.reports))
            service.reports.clear()
        rollout.wait_for_fragments(2)
    check_all(rollout)
    assert all(f.model_version_min == f.model_version_max for f in service.fragments)


def test_a_fragment_that_begins_after_dropped_steps_has_its_state() -> None:
    service = FakeService(staleness_max=0)
    weights = policy_weights(make_policy("lstm", OBSERVATION_SPACE, ACTION_SPACE))
    with running_worker(service, LONG_SCRIPT, policy="lstm", fragment_steps=8) as rollout:
        for version in range(30):
            service.publish("s" if version < 20 else "z", version, weights)
            service.wait_until(lambda: bool(service.reports))
            service.reports.clear()
        rollout.wait_for_fragments(len(service.fragments) + 4)
    assert any(fragment.discontinuity for fragment in service.fragments)
    for fragment in service.fragments:
        assert (128,) == fragment.in_state[0].shape


def test_a_full_service_slows_the_environments_and_loses_nothing() -> None:
    """The ancestor's environments hung for good."""
    service = FakeService()
    gate = threading.Event()

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        service.changed.wait_for(gate.is_set, 60.0)
        return [AppendResult(AdmissionOutcome.ADMITTED)] * len(fragments)

    service.answer = answer
    with running_worker(service, ".", queue_fragments=3) as rollout:
        service.publish("s", 0)
        service.wait_until(lambda: bool(service.append_calls))
        eventually_sync(lambda: rollout.worker.stats.blocked, "the sender is full", within_s=60.0)
        # Three fragments wait, and each environment may fill one more before it is held up.
        assert rollout.worker.step_count <= (3 + 2) * 4 + 2
        with service.changed:
            gate.set()
            service.changed.notify_all()
        rollout.wait_for_fragments(20)
    check_all(rollout)
    assert not any(fragment.discontinuity for fragment in service.fragments)


def test_what_grew_stale_while_it_waited_is_dropped_unsent_and_counted_for_prometheus() -> None:
    service = FakeService(staleness_max=1)
    gate = threading.Event()

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        service.changed.wait_for(gate.is_set, 60.0)
        return [AppendResult(AdmissionOutcome.ADMITTED)] * len(fragments)

    service.answer = answer
    with running_worker(service, ".", queue_fragments=4) as rollout:
        service.publish("s", 0)
        eventually_sync(lambda: rollout.worker.stats.blocked, "the sender is full", within_s=60.0)
        waiting = rollout.worker.counts().waiting_fragment_count
        under_way = service.append_calls[0]
        service.publish("s", 7, fresh_weights(0))
        eventually_sync(
            lambda: rollout.player.watcher.latest.model_version == 7, "news", within_s=60.0
        )
        with service.changed:
            gate.set()
            service.changed.notify_all()
        rollout.wait_for_fragments(under_way + 10)
        registry = CollectorRegistry()
        registry.register(WorkerCollector(rollout.worker.counts))
        stale = registry.get_sample_value(
            "breadbox_rollout_fragments_total", {"outcome": "stale_before_upload"}
        )
        steps = registry.get_sample_value("breadbox_rollout_steps_total")
        blocked_s = registry.get_sample_value("breadbox_rollout_blocked_seconds_total")
    assert stale is not None
    # The one that was held up at the queue's end joins those that waited.
    assert waiting - under_way <= stale <= waiting - under_way + 2
    assert steps is not None
    assert steps >= 10 * 4
    assert blocked_s is not None
    assert blocked_s > 0.0
    assert {7} == {f.model_version_min for f in service.fragments[under_way:]}


def test_a_worker_that_a_full_service_holds_up_is_seen_to_live(tmp_path: Path) -> None:
    """Else its container would be restarted for waiting, and lose what it holds."""
    service = FakeService()

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        service.changed.wait_for(lambda: service.closed, 120.0)
        raise ClosedError("the client is closed")

    service.answer = answer
    beat = tmp_path / "beat"
    with running_worker(service, ".", queue_fragments=1, heartbeat=Heartbeat(beat)) as rollout:
        service.publish("s", 0)
        eventually_sync(lambda: rollout.worker.stats.blocked, "the sender is full", within_s=60.0)
        beat.unlink()
        eventually_sync(beat.exists, "a beat while it is held up", within_s=30.0)
        assert rollout.worker.stats.blocked
        rollout.worker.stop()
        service.close()


def test_more_environments_than_a_batch_and_fewer_both_run() -> None:
    """The ancestor hung with fewer environments than a batch holds."""
    for env_count, batch in ((1, 64), (5, 2)):
        service = FakeService()
        service.publish("s", 0)
        with running_worker(
            service, LONG_SCRIPT, env_count=env_count, batch_env_count=batch
        ) as rollout:
            rollout.wait_for_fragments(20)
        check_all(rollout)


def test_episodes_are_reported_with_how_they_ended() -> None:
    service = FakeService()
    service.publish("s", 0)
    spec = EnvSpec(name="support.scripted_env:make", options={"script": "...t.c..!", "task": "dig"})
    with running_worker(service, "", spec=spec, env_count=1):
        service.wait_until(lambda: len(service.reports) >= 9)
    ends = [(report.end, report.step_count) for report in service.reports[:9]]
    assert [
        (EpisodeEnd.TERMINATED, 4),
        (EpisodeEnd.TRUNCATED, 2),
        (EpisodeEnd.ABORTED, 2),
    ] * 3 == ends
    assert {"dig"} == {report.task for report in service.reports}
    report = service.reports[1]
    assert 1.0 <= report.return_sum <= 1.6
    assert report.discounted_return_sum < report.return_sum


def test_chosen_episodes_are_recorded_while_fragments_stay_right(tmp_path: Path) -> None:
    """Every second episode of the first environment, also across failures."""
    service = FakeService()
    service.publish("s", 3, fresh_weights(0))
    manifest = tmp_path / "manifest.jsonl"

    def recorded() -> list[dict[str, Any]]:
        return [json.loads(line) for line in manifest.read_text().splitlines()]

    with running_worker(service, "....t..c.!", record_dir=tmp_path):
        eventually_sync(lambda: manifest.exists() and len(recorded()) >= 3, within_s=60.0)
    for fragment in service.fragments:
        check_fragment(fragment)
    for episode in recorded():
        assert (0, 3, "w") == (
            episode["env_index"],
            episode["model_version_min"],
            episode["worker"],
        )
        with av.open(str(tmp_path / episode["video_path"])) as container:
            frame_count = sum(1 for _ in container.decode(video=0))
        assert episode["step_count"] + 1 == frame_count
    assert [] == list(tmp_path.glob(".partial*"))


def test_an_environment_that_never_answers_ends_the_worker_with_a_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It lived for ever, with 27,000 log lines in 15 s."""
    service = FakeService()
    service.publish("s", 0)
    with (
        running_worker(service, "!") as rollout,
        pytest.raises(EnvironmentStartError, match="no environment answers a step"),
    ):
        rollout.wait_for_error()
    failures = rollout.worker.stats.failures
    assert 29 <= failures["step_raised"] <= 60
    lines = [line for line in caplog.messages if "environment failed" in line]
    assert len(lines) <= 4, lines
    assert [] == service.fragments


def test_what_an_environment_raises_deep_inside_is_shown_once_with_file_and_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = FakeService()
    service.publish("s", 0)
    spec = EnvSpec(name="support.learner_environments:runs_dry")
    with (
        running_worker(service, "", spec=spec) as rollout,
        pytest.raises(EnvironmentStartError) as caught,
    ):
        rollout.wait_for_error()
    line = 1 + Path(environments.__file__).read_text().split("\n").index(
        '        return tank["fuel"]'
    )
    where = f"KeyError('fuel') at {environments.__file__}:{line}"
    assert where in str(caught.value)
    assert f"environment failed (step_raised): {where}" in caplog.messages
    (trace,) = [vars(each)["below"] for each in caplog.records if "below" in vars(each)]
    assert trace.startswith("Traceback")
    assert "return self._burn({})" in trace
    assert 'return tank["fuel"]' in trace


def test_weights_that_diverged_end_the_worker_with_their_reason() -> None:
    """The ancestor opened a debugger and hung."""
    service = FakeService()
    weights = fresh_weights(0)
    service.publish("s", 0, {name: np.full_like(array, np.nan) for name, array in weights.items()})
    with (
        running_worker(service, ".") as rollout,
        pytest.raises(PolicyOutputError, match="diverged"),
    ):
        rollout.wait_for_error()


OTHER_WEIGHTS = {"head.weight": np.zeros(1, np.float32)}


def test_a_new_session_of_another_policy_ends_the_worker_by_name() -> None:
    """The ancestor labelled its weights as the new version."""
    service = FakeService()
    with running_worker(service, ".") as rollout:
        service.wait_until(lambda: service.watch_count > 0)
        service.publish("s", 0, OTHER_WEIGHTS)
        with pytest.raises(InvalidRequestError) as caught:
            rollout.wait_for_error()
    for words in ("session 's' of buffer 'default'", "unexpected: head.weight", "--policy"):
        assert words in str(caught.value)


def test_a_session_left_over_from_another_policy_is_waited_out_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    service = FakeService()
    service.publish("left", 7, OTHER_WEIGHTS)
    with running_worker(service, LONG_SCRIPT) as rollout:
        eventually_sync(lambda: "buffers end-session default" in caplog.text, within_s=60)
        service.publish("left", 8)  # Without weights: still that session.
        service.publish("left", 9, OTHER_WEIGHTS)
        eventually_sync(lambda: "another session than 'left'" in caplog.text, within_s=60)
        assert [] == service.fragments
        service.publish("new", 0, fresh_weights(1))
        rollout.wait_for_fragments(4)
    assert {"new"} == {fragment.session_id for fragment in service.fragments}
    (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    for words in ("session 'left' of buffer 'default'", "unexpected: head.weight", "--policy"):
        assert words in told


def test_what_was_answered_before_a_shared_process_died_is_kept() -> None:
    """The second environment kills the process after the first one has answered."""
    service = FakeService()
    service.publish("s", 0)
    with running_worker(service, "...x", envs_per_process=2, fragment_steps=2) as rollout:
        rollout.wait_for_fragments(4)
    check_all(rollout)
    # Two steps of the first environment were answered in each life of the process, one of the
    # second; an answer that got lost would leave the first with one, too.
    assert [0, 1] == rollout.by_worker()["w-0"][0].obs["clock"][:, 1].tolist()
    assert [0, 0] == rollout.by_worker()["w-1"][0].obs["clock"][:, 1].tolist()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("..!.....t", "step_raised"),
        ("..x", "died"),
        ("...h", "step_hung"),
        ("..R", "reset_hung"),
        ("....o...", "not_finite"),
        ("...k...t", "observation_mismatch"),
        ("...b...t", "build_raised"),
    ],
)
def test_a_failure_is_counted_by_kind_and_every_fragment_stays_right(
    script: str, kind: str
) -> None:
    """The ancestor died, hung, or invented a terminal state."""
    service = FakeService()
    service.publish("s", 0)
    limits: dict[str, Any] = {"step_s_max": 1.0, "reset_s_max": 1.0} if "hung" in kind else {}
    # Short fragments, for where every few steps cost the start of a process.
    with running_worker(service, script, fragment_steps=2, **limits) as rollout:
        rollout.wait_for_fragments(6)
    check_all(rollout)
    assert rollout.worker.stats.failures[kind] >= 1
    if kind == "build_raised":
        # The step that made the build necessary is not forgotten over it.
        assert rollout.worker.stats.failures["step_raised"] >= 1
    # Inside a fragment the episode is cut off; between two, the second says that steps are missing.
    broken = [f.discontinuity or f.truncated.any() for f in service.fragments]
    assert any(broken) or kind == "reset_hung"
    if "t" not in script and "R" not in script:
        assert not any(fragment.terminated.any() for fragment in service.fragments)
