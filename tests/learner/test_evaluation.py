"""Evaluation: greedy episodes beside training, by a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces

import breadbox
from breadbox.model.errors import InvalidRequestError
from breadbox.testing import start_server
from breadbox_learner.evaluation import Evaluator, evaluated
from breadbox_learner.playing import EvaluationTask, Played, episode_seed, play
from breadbox_policies import PolicyModule, check_greedy, make_policy
from breadbox_policies.networks import MlpPolicy
from breadbox_policies.protocol import ActResult
from support.echo_env import SPACES
from support.eventually import eventually_sync
from support.feeder import feeding
from support.learner_environments import Recall

MODULE = "support.learner_environments"


def task(env: str = "CartPole-v1", **changes: Any) -> EvaluationTask:
    values: dict[str, Any] = {
        "env_options": {}, "policy": "mlp", "policy_options": {}, "episodes": 3, "steps_max": 1000
    }  # fmt: skip
    return EvaluationTask(env=env, **{**values, **changes})


def policy_for(env: gymnasium.Env[Any, Any], name: str = "mlp") -> PolicyModule:
    torch.manual_seed(1)
    return make_policy(name, env.observation_space, env.action_space)


def cartpole_policy() -> PolicyModule:
    env = gymnasium.make("CartPole-v1")
    policy = policy_for(env)
    env.close()
    return policy


# Playing -----------------------------------------------------------------------------------------


def test_an_episode_is_what_a_naive_loop_over_the_largest_logit_gives() -> None:
    env = gymnasium.make("CartPole-v1")
    policy = policy_for(env)
    assert isinstance(policy, MlpPolicy)
    for number in range(3):
        obs, _ = env.reset(seed=episode_seed(number))
        total, steps, over = 0.0, 0, False
        while not over:
            with torch.no_grad():
                logits = policy.actor(torch.from_numpy(obs)[None])[0].tolist()
            obs, reward, terminated, truncated, _ = env.step(logits.index(max(logits)))
            total, steps, over = total + float(reward), steps + 1, terminated or truncated
        played = play(env, policy, seed=episode_seed(number), steps_max=1000)
        assert Played(total, steps) == played
    env.close()


def test_a_policy_with_a_memory_carries_it_through_the_episode_and_not_into_the_next() -> None:
    """The environment shows a number once, and rewards its repetition until the end."""
    env = Recall()
    policy = RecallPolicy(env.observation_space, env.action_space)
    for seed in range(4):
        assert Played(5.0, 5) == play(env, policy, seed=seed, steps_max=100)


class RecallPolicy(MlpPolicy):
    """Repeats the first number that it saw in the episode; remembers it in its state."""

    def initial_state(self, batch_size: int) -> Any:
        return torch.full((batch_size, 1), -7.0)

    def act(
        self, obs: Any, state: Any, first: Any, *, generator: Any = None, greedy: bool = False
    ) -> ActResult:
        assert greedy
        state = torch.where(first[:, None], obs[:, :1], state)
        zeros = torch.zeros(len(first))
        return ActResult(state[:, 0].long(), zeros, zeros, state)


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(3, start=2),
        spaces.MultiDiscrete([2, 5]),
        spaces.MultiBinary(4),
        spaces.Box(-0.1, 0.1, (3,), np.float32),
        spaces.Dict({"buttons": spaces.MultiBinary(2), "camera": spaces.Box(-1, 1, (2,))}),
        spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2,))]),
        *SPACES.values(),
    ],
    ids=lambda space: type(space).__name__,
)
def test_environments_get_actions_of_their_space(action_space: gymnasium.Space[Any]) -> None:
    class Checking(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict({"v": spaces.Box(-1, 1, (2,)), "k": spaces.Discrete(3)})

        def __init__(self) -> None:
            self.action_space = action_space
            self.seen: list[Any] = []

        def reset(self, **_: Any) -> Any:
            return {"v": np.ones(2), "k": 2}, {}

        def step(self, action: Any) -> Any:
            self.seen.append(action)
            return {"v": np.zeros(2), "k": 0}, 0.5, False, len(self.seen) == 4, {}

    env = Checking()
    policy = policy_for(env)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(30)  # Boxes are left far behind.
    assert Played(2.0, 4) == play(env, policy, seed=0, steps_max=100)
    assert all(action_space.contains(action) for action in env.seen), env.seen


def test_an_endless_episode_is_cut_off_and_told_from_one_that_ended() -> None:
    env = gymnasium.make("Pendulum-v1", max_episode_steps=37)
    policy = policy_for(env)
    cut = play(env, policy, seed=0, steps_max=36)
    ended = play(env, policy, seed=0, steps_max=37)
    env.close()
    assert [(36, True), (37, False)] == [(each.steps, each.is_cut_off) for each in (cut, ended)]


def test_seeds_are_distinct_the_same_in_every_process_and_none_of_trainings() -> None:
    seeds = [episode_seed(number) for number in range(1000)]
    assert 1000 == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds)
    code = "from breadbox_learner.playing import episode_seed; print(episode_seed(7))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seeds[7] == int(told.stdout)
    # Whoever trains under a small number, as people do, trains on none of them.
    assert min(seeds) > 10_000


def test_an_evaluation_is_a_mean_its_interval_and_lengths() -> None:
    answer = {"returns": [1.0, 2.0, 3.0, 4.0, 5.0], "lengths": [3, 3, 3, 3, 8], "cut_off": 1}
    found = evaluated(answer, 0.5)
    half = 2.78 * 2.5**0.5 / 5**0.5
    wanted = {
        "evaluation_return_mean": 3.0,
        "evaluation_return_low": pytest.approx(3.0 - half),
        "evaluation_return_high": pytest.approx(3.0 + half),
        "evaluation_return_min": 1.0,
        "evaluation_return_max": 5.0,
        "evaluation_length_mean": 4.0,
        "evaluation_length_min": 3,
        "evaluation_length_max": 8,
        "evaluation_episode_count": 5,
        "evaluation_cut_off_count": 1,
        "evaluation_s": 0.5,
    }
    assert wanted == found
    one = evaluated({"returns": [1.0], "lengths": [3], "cut_off": 0}, 0.5)
    assert (None, None) == (one["evaluation_return_low"], one["evaluation_return_high"])


def test_a_policy_of_ones_own_that_cannot_act_greedily_is_refused_by_name() -> None:
    class Old:
        def act(self, obs: Any, state: Any, first: Any, *, generator: Any = None) -> None: ...

    class Open(Old):
        def act(self, *_: Any, **options: Any) -> None: ...

    with pytest.raises(InvalidRequestError, match=r"evaluate_every needs .* Old\.act takes no"):
        check_greedy(Old(), "evaluate_every")  # type: ignore[arg-type]
    check_greedy(Open(), "evaluate_every")  # type: ignore[arg-type]


# The process -------------------------------------------------------------------------------------


@pytest.fixture
def make_evaluator() -> Iterator[Callable[[EvaluationTask], Evaluator]]:
    made: list[Evaluator] = []

    def make(task: EvaluationTask) -> Evaluator:
        made.append(Evaluator(task))
        return made[-1]

    yield make
    for evaluator in made:
        evaluator.close()
    assert [] == [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "breadbox_learner.playing" in child.cmdline()
    ]


def never() -> bool:
    return False


def marks(update: int) -> dict[str, float | int | str | None]:
    return {"update": update, "environment_steps": 100 * update, "model_version": update + 1}


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_the_process_plays_what_one_would_play_oneself(
    make_evaluator: Callable[[EvaluationTask], Evaluator],
) -> None:
    policy = cartpole_policy()
    env = gymnasium.make("CartPole-v1")
    naive = [play(env, policy, seed=episode_seed(n), steps_max=1000) for n in range(3)]
    env.close()
    evaluator = make_evaluator(task())
    evaluator.begin(marks(5), policy)
    (record,) = evaluator.finish(never, 120)
    assert {**marks(5), "evaluation_episode_count": 3}.items() <= record.items()
    lengths = [played.steps for played in naive]
    assert (sum(lengths) / 3, min(lengths), max(lengths)) == (
        record["evaluation_return_mean"],
        record["evaluation_length_min"],
        record["evaluation_length_max"],
    )


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_what_fails_is_told_and_the_next_one_tries_again(
    make_evaluator: Callable[[EvaluationTask], Evaluator],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    options = {"path": str(tmp_path / "fails")}
    (tmp_path / "fails").touch()
    evaluator = make_evaluator(task(f"{MODULE}:fails_while_there", env_options=options))
    evaluator.begin(marks(5), cartpole_policy())
    assert [] == evaluator.finish(never, 120)
    (told,) = caplog.messages
    assert "no evaluation of update 5, training continues: RuntimeError: it is there" == told
    (tmp_path / "fails").unlink()
    evaluator.begin(marks(10), cartpole_policy())
    (record,) = evaluator.finish(never, 120)
    assert 10 == record["update"]


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_one_that_hangs_delays_nobody_and_goes_with_the_run(
    make_evaluator: Callable[[EvaluationTask], Evaluator], caplog: pytest.LogCaptureFixture
) -> None:
    evaluator = make_evaluator(task(f"{MODULE}:hangs"))
    policy = cartpole_policy()
    for update in range(4):
        evaluator.begin(marks(update), policy)
        if not update:
            eventually_sync(lambda: evaluator._waiting is None, within_s=60)  # noqa: SLF001 - its process has begun
    assert [] == evaluator.finished()
    assert 2 == evaluator.skipped_count
    assert 1 == sum("is left out" in message for message in caplog.messages)
    assert [] == evaluator.finish(never, 0.0)


# In a run ----------------------------------------------------------------------------------------


def learn(address: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    return subprocess.run(
        [
            *(sys.executable, "-m", "breadbox.cli.main", "learn", "--server", address),
            *("--run-dir", str(folder), "--fragments-per-batch", "32", *arguments),
        ],
        capture_output=True,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )


@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.long
def test_evaluations_of_cartpole_rise_and_are_recorded_over_environment_steps(
    tmp_path: Path,
) -> None:
    with start_server() as server, feeding(server.address, steps_per_fragment=32):
        ended = learn(
            *(server.address, tmp_path, "--updates-max", "40", "--evaluate-every", "10"),
            *("--evaluate-episodes", "5", "--epochs", "4", "--lr", "0.001"),
        )
    assert 0 == ended.returncode, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    updates = {line["update"]: line for line in lines if "policy_loss" in line}
    assert list(range(1, 41)) == list(updates)
    evaluations = [line for line in lines if "evaluation_return_mean" in line]
    assert len(updates) + len(evaluations) == len(lines)
    of = [line["update"] for line in evaluations]
    # Some may be left out on a busy machine, but never the first and the last.
    assert of == sorted(of)
    assert {0, 40} <= set(of) <= {0, 10, 20, 30, 40}
    for line in evaluations:
        assert line["update"] + 1 == line["model_version"]
        assert 5 == line["evaluation_episode_count"]
        # CartPole gives a point a step.
        assert line["evaluation_return_mean"] == line["evaluation_length_mean"]
        steps = updates[line["update"]]["environment_steps"] if line["update"] else 0
        assert steps == line["environment_steps"]
    assert evaluations[-1]["evaluation_return_mean"] > 2 * evaluations[0]["evaluation_return_mean"]
    assert "evaluation of update 40: return " in ended.stderr
    assert "mean of 5 greedy episodes of" in ended.stderr

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = events.Scalars("evaluation/return_mean")
    assert [line["environment_steps"] for line in evaluations] == [each.step for each in shown]
    assert [line["evaluation_return_mean"] for line in evaluations] == pytest.approx(
        [each.value for each in shown]
    )
    assert "learner/evaluation_return_mean" not in events.Tags()["scalars"]


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_an_evaluation_that_hangs_stalls_neither_training_nor_its_end(tmp_path: Path) -> None:
    with start_server() as server, feeding(server.address) as _:
        clean = {n: v for n, v in os.environ.items() if not n.startswith("BREADBOX_")}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "breadbox.cli.main", "learn", "--server", server.address),
                *("--run-dir", str(tmp_path), "--fragments-per-batch", "16", "--no-tensorboard"),
                *("--env", f"{MODULE}:hangs", "--evaluate-every", "1"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        progress = tmp_path / "progress.jsonl"
        try:
            eventually_sync(
                lambda: progress.exists() and progress.read_text().count("\n") >= 6, within_s=90
            )
            with breadbox.connect(server.address) as client:
                assert client.get_buffer().state.lease_count <= 1
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()
    assert 0 == process.returncode, err
    assert "evaluate_every is too small for these episodes" in err
    assert "the run ends before its last evaluation does" in err
    assert "Traceback" not in err
