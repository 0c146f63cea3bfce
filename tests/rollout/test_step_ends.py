"""Each step that a worker acts is counted under one end, and the slow are named."""

import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from prometheus_client.parser import text_string_to_metric_families

import breadbox
from breadbox.model.types import WorkerSteps
from breadbox.shared.step_ends import left_out
from breadbox_policies import make_policy, policy_weights
from rollout.test_through_the_service import worker_process
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.server_process import ServerProcess, plain_environment
from support.token_files import write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

WAIT_S = 60.0
FRAGMENT_STEPS = 8
FAST_COUNT, SLOW_COUNT = 6, 2


def weights() -> dict[str, Any]:
    env = gymnasium.make("CartPole-v1")
    return policy_weights(make_policy("mlp", env.observation_space, env.action_space))


def learn(address: str, stop: threading.Event) -> None:
    """A learner that publishes a version for each batch of as many fragments as are fast."""
    with breadbox.connect(address) as client:
        policy, version = weights(), 1
        while not stop.is_set():
            try:
                with client.fetch(FAST_COUNT, max_wait_s=1.0):
                    version += 1
            except breadbox.WaitElapsedError:
                continue
            client.publish("s", version, policy)


@contextmanager
def learning(address: str) -> Iterator[None]:
    """A learner beside the block."""
    stop = threading.Event()
    learner = threading.Thread(target=learn, args=(address, stop))
    learner.start()
    try:
        yield
    finally:
        stop.set()
        learner.join()


def worker(name: str, env_count: int, step_s: float) -> list[str]:
    return [
        *("--env", "support.paced_env:make", "--env-options", json.dumps({"step_s": step_s})),
        *("--policy", "mlp", "--num-envs", str(env_count), "--envs-per-process", "1"),
        *("--worker-name", name, "--fragment-steps", str(FRAGMENT_STEPS), "--seed", "1"),
        *("--batch-envs", "1", "--log-interval-s", "1"),
    ]


def of(workers: Iterable[WorkerSteps], name: str) -> list[WorkerSteps]:
    return [each for each in workers if each.worker_id.startswith(name)]


def command(address: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", *arguments, "--server", address],
        capture_output=True,
        text=True,
        env=plain_environment() | {"COLUMNS": "160"},
        timeout=WAIT_S,
        check=True,
    )
    return done.stdout


def series(url: str, name: str) -> dict[str, float]:
    """The values of a metric that a server or worker serves, by its last label."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [each for family in families for each in family.samples if each.name == name]
    return {list(each.labels.values())[-1]: each.value for each in samples}


def excluded_of(url: str) -> dict[tuple[str, str], float]:
    """The number of environments that are left out, by buffer and worker, of those with any."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (each.labels["buffer"], each.labels["worker"]): each.value
        for family in families
        for each in family.samples
        if each.name == "breadbox_workers_left_out" and each.value
    }


def test_the_slow_are_named_within_half_a_minute_and_each_step_has_one_end(tmp_path: Path) -> None:
    """A slow worker made 5,623 steps, none was trained on, and nothing said so."""
    fast_log, slow_log = tmp_path / "fast.log", tmp_path / "slow.log"
    slow = [*worker("slow", SLOW_COUNT, 0.1), "--metrics-listen", "127.0.0.1:0"]
    with (
        ServerProcess(
            *("--store", f"file://{tmp_path}/store", "--metrics-listen", "127.0.0.1:0"),
            log=tmp_path / "server.log",
        ) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.publish("s", 1, weights())

        def excluded() -> list[str]:
            found = left_out(client.get_buffer(with_workers=True).workers)
            return [each.worker_id for each in found]

        with (
            learning(server.address),
            worker_process(server.address, fast_log, *worker("fast", FAST_COUNT, 0.01)),
            worker_process(server.address, slow_log, *slow),
        ):
            eventually_sync(lambda: ["slow-0", "slow-1"] == excluded(), within_s=30.0)
            explained = command(server.address, "explain", "--seconds", "0.5")
            told = f"{SLOW_COUNT} of {FAST_COUNT + SLOW_COUNT} environments are"
            assert told in explained
            assert "(slow-0, slow-1)" in explained
            assert "staleness_max is 2" in explained
            assert "LEFT OUT" in command(server.address, "stats")
            eventually_sync(
                lambda: {"slow": 2.0} == series(server.metrics_url, "breadbox_workers_left_out"),
                within_s=10.0,
            )
            eventually_sync(
                lambda: "environments are too slow" in slow_log.read_text(), within_s=30
            )
            served = re.search(r"metrics on (\S+)", slow_log.read_text())
            assert served is not None
            assert series(served[1], "breadbox_rollout_steps_by_end_total")["dropped"] > 0
            by_outcome = series(served[1], "breadbox_rollout_fragments_total")
            assert by_outcome["stale_while_filled"] >= 3
        client.end_session("s")
        workers = client.get_buffer(with_workers=True).workers
    assert "too slow" not in fast_log.read_text()
    for each in workers:
        ended = each.trained_count + each.lost_count
        unsettled = (each.filling_count, each.sending_count, each.held_count)
        assert (each.acted_count, (0, 0, 0)) == (ended, unsettled), each
    for name, log in (("fast", fast_log), ("slow", slow_log)):
        said = re.search(r"ended after (\d+) steps", log.read_text())
        assert said is not None
        assert int(said[1]) == sum(each.acted_count for each in of(workers, name))
    trained = {each.worker_id: each.trained_count / each.acted_count for each in workers}
    assert min(trained[f"fast-{index}"] for index in range(FAST_COUNT)) > 0.5


def test_a_ragged_buffer_gets_short_fragments_of_the_slow_instead_of_nothing(
    tmp_path: Path,
) -> None:
    log = tmp_path / "slow.log"
    with (
        ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.update_buffer("default", breadbox.BufferConfig(schema=breadbox.SchemaPolicy.RAGGED))
        client.start_session("s")
        client.publish("s", 1, weights())
        with (
            learning(server.address),
            worker_process(
                server.address, tmp_path / "fast.log", *worker("fast", FAST_COUNT, 0.01)
            ),
            worker_process(server.address, log, *worker("slow", SLOW_COUNT, 0.05)),
        ):
            eventually_sync(
                lambda: (
                    sum(
                        each.trained_count
                        for each in of(client.get_buffer(with_workers=True).workers, "slow")
                    )
                    >= 2 * FRAGMENT_STEPS
                ),
                within_s=60.0,
            )
    assert "too slow" not in log.read_text()


def test_a_learners_records_have_the_steps_that_workers_report_by_what_became_of_them(
    tmp_path: Path,
) -> None:
    """`environment_steps` came from the indices of fragments, and missed what was never sent."""
    run_dir = tmp_path / "run"
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    learner = [
        *("learn", "--env", "CartPole-v1", "--policy", "mlp", "--run-dir", str(run_dir)),
        *("--fragments-per-batch", str(FAST_COUNT), "--epochs", "1", "--time-limit-s", "20"),
        *("--no-tensorboard",),
    ]
    with (
        server,
        breadbox.connect(server.address) as client,
        worker_process(server.address, tmp_path / "fast.log", *worker("fast", FAST_COUNT, 0.01)),
        worker_process(server.address, tmp_path / "slow.log", *worker("slow", SLOW_COUNT, 0.1)),
    ):
        command(server.address, *learner)
        workers = client.get_buffer(with_workers=True).workers
    records = [json.loads(line) for line in (run_dir / "progress.jsonl").read_text().splitlines()]
    record = next(each for each in reversed(records) if each["steps_acted"])
    ends = ("filling", "sending", "dropped", "refused", "undelivered", "held", "trained", "evicted")
    missing = record["steps_acted"] - sum(record[f"steps_{end}"] for end in ends)
    # Trained and evicted ones are known at once, the others when the worker reports next.
    assert missing <= 0
    # Fragments of the last seconds may say more than the reports do.
    assert record["environment_steps"] >= record["steps_acted"] > 0
    assert record["steps_dropped"] > 0
    assert SLOW_COUNT == record["workers_left_out"]
    for each in of(workers, "slow"):
        assert each.trained_count < each.acted_count / 4, each


def test_the_slow_of_each_buffer_are_its_own_through_the_gateway_with_bound_tokens(
    tmp_path: Path,
) -> None:
    """Two runs on one server, whose workers have the same names, and in turn are the slow ones."""
    tokens = tmp_path / "tokens"
    admin, learner, *producers = write_tokens(
        tokens,
        *("admin o", "learner l"),
        *("producer one workers=one-* buffers=a,b", "producer two workers=two-* buffers=a,b"),
    )
    names = ("one-0", "two-0")
    with (
        ServerProcess(
            *("--store", f"file://{tmp_path}/store", "--gateway", "--tokens", str(tokens)),
            *("--metrics-listen", "127.0.0.1:0"),
            log=tmp_path / "server.log",
        ) as server,
        breadbox.connect(server.address, token=admin) as made,
        breadbox.connect(server.address, token=learner) as learning_client,
        breadbox.connect(server.address, token=producers[0], store_url="gateway:") as one,
        breadbox.connect(server.address, token=producers[1], store_url="gateway:") as two,
    ):
        for slow, buffer in enumerate("ab"):
            made.create_buffer(buffer, breadbox.BufferConfig())
            learning_client.start_session("s", buffer=buffer)
            for index, (name, client) in enumerate(zip(names, (one, two), strict=True)):
                steps: dict[str, Any] = {"acted_count": 32, "fragment_step_count": 4}
                if index == slow:
                    steps["dropped_count"] = 32
                else:
                    sent = [vector_fragment(n, worker_id=name) for n in range(8)]
                    client.append_many(sent, buffer=buffer)
                    steps["admitted_count"] = 32
                client.report_episodes(
                    [], workers=[WorkerSteps(worker_id=name, **steps)], buffer=buffer
                )
            with learning_client.fetch(8, max_wait_s=WAIT_S, buffer=buffer) as lease:
                assert 8 == len(list(lease.fragments()))
        with pytest.raises(breadbox.errors.PermissionDeniedError, match="may not use worker"):
            one.report_episodes(
                [], workers=[WorkerSteps(worker_id="two-0", acted_count=1)], buffer="a"
            )
        described = [made.get_buffer(buffer, with_workers=True).workers for buffer in "ab"]
        eventually_sync(
            lambda: {("a", "one"): 1.0, ("b", "two"): 1.0} == excluded_of(server.metrics_url),
            within_s=30.0,
        )
    assert [["one-0"], ["two-0"]] == [
        [each.worker_id for each in left_out(workers)] for workers in described
    ]
    ends = [{each.worker_id: (each.trained_count, each.lost_count) for each in workers}
            for workers in described]  # fmt: skip
    assert [
        {"one-0": (0, 32), "two-0": (32, 0)},
        {"one-0": (32, 0), "two-0": (0, 32)},
    ] == ends


def test_a_worker_reports_its_steps_through_the_gateway_with_a_token_for_its_name(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    learner, producer = write_tokens(tokens, "learner l", "producer p workers=mine-*")
    with (
        ServerProcess(
            *("--store", f"file://{tmp_path}/store", "--gateway", "--tokens", str(tokens)),
            log=tmp_path / "server.log",
        ) as server,
        breadbox.connect(server.address, token=learner) as client,
    ):
        client.start_session("s")
        client.publish("s", 1, weights())
        bound = [*worker("mine", 2, 0.0), "--token", producer, "--steps-max", "200"]
        with worker_process(
            server.address, tmp_path / "worker.log", *bound, "--store-url", "gateway:"
        ) as process:
            assert 0 == process.wait(WAIT_S)
        workers = client.get_buffer(with_workers=True).workers
    assert ["mine-0", "mine-1"] == [each.worker_id for each in workers]
    for each in workers:
        unsent = each.dropped_count + each.refused_count + each.undelivered_count
        assert each.acted_count == unsent + each.admitted_count, each
    # One environment may be ready so late that the other makes all steps.
    assert 200 <= sum([each.acted_count for each in workers])
    assert sum([each.admitted_count for each in workers]) > 0
