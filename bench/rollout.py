"""What the service costs a rollout worker: the same worker, with and without it, by turns."""

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import breadbox
from bench.measure import Figure
from bench.processes import breadbox_server, memory_directory
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    AdmissionOutcome,
    AppendResult,
    BufferDescription,
    EpisodeReport,
    ModelState,
)
from breadbox.writing.reporting import EpisodeReporter
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.acting.inference import Inference
from breadbox_rollout.acting.player import Player
from breadbox_rollout.app import share_interpreter
from breadbox_rollout.environments.environments import EnvSpec, envs_per_process
from breadbox_rollout.processes.pool import EnvProcesses, PoolOptions
from breadbox_rollout.sending.models import ModelWatcher
from breadbox_rollout.sending.sender import Sender
from breadbox_rollout.settings import RolloutSettings
from breadbox_rollout.worker import RolloutWorker

_SESSION_ID = "bench"
_START_S = 120.0


@dataclass(frozen=True)
class Case:
    """A worker to measure."""

    name: str
    env: str
    policy: str
    env_count: int
    fragment_steps: int
    batch_env_count: int


PONG = Case("pong", "breadbox_rollout.atari:make", "conv_lstm", 8, 128, 4)
CARTPOLE = Case("cartpole", "CartPole-v1", "mlp", 16, 32, 16)


class Switch:
    """A connection to the service that can be cut: then fragments are thrown away unsent."""

    def __init__(self, client: breadbox.Client) -> None:
        self._client = client
        self.attached = True

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0
    ) -> ModelState | None:
        """Pass on."""
        return self._client.watch_model(known, max_wait_s=max_wait_s)

    def load_model(
        self, newer_than: ModelState | None = None
    ) -> tuple[ModelState, dict[str, Any]] | None:
        """Pass on."""
        return self._client.load_model(newer_than)

    def declare_origin(self, origin: Mapping[str, str]) -> None:
        """Pass on."""
        self._client.declare_origin(origin)

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        """Pass on, or throw away."""
        if self.attached:
            return self._client.append_many(
                fragments, buffer=buffer, codecs=codecs, answered=answered
            )
        return [AppendResult(AdmissionOutcome.ADMITTED) for _ in fragments]

    def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
        """Pass on, or throw away."""
        if self.attached:
            self._client.report_episodes(episodes)

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        """Pass on."""
        return self._client.get_buffer(name)

    def close(self) -> None:
        """Pass on."""
        self._client.close()


def rollout_rows(*, rounds: int, round_s: float = 1.0) -> Iterator[Figure]:
    """Measure steps per second of whole workers."""
    for case in (PONG, CARTPOLE):
        yield from _case_rows(case, rounds=rounds, round_s=round_s)


def _case_rows(case: Case, *, rounds: int, round_s: float) -> Iterator[Figure]:
    with (
        memory_directory() as directory,
        breadbox_server(f"file://{directory}", "--capacity-chunks", "64") as server,
        breadbox.connect(server.address) as client,
        _running(case, client) as (worker, switch),
    ):
        rates: dict[bool, list[float]] = {True: [], False: []}
        fragments_before, began_at = worker.fragment_count, time.monotonic()
        for turn in range(2 * rounds):
            # Which of the two goes first changes, so that a trend falls on both.
            attached = bool(turn % 2) ^ bool(turn // 2 % 2)
            switch.attached = attached
            rates[attached].append(_steps_per_s(worker, round_s))
        elapsed_s = time.monotonic() - began_at
        fragments_per_s = (worker.fragment_count - fragments_before) / elapsed_s
        fill = worker.stats.batch_env_count / worker.stats.batch_count
    attached_rate, detached_rate = (statistics.median(rates[key]) for key in (True, False))
    yield Figure(
        name="rollout worker: steps, service attached",
        workload=case.name,
        value=attached_rate,
        unit="steps/s",
        limit=detached_rate,
        limit_is="fragments thrown away",
        reach=0.9,
    )
    yield Figure(
        name="rollout worker: environments in a batch",
        workload=case.name,
        value=fill,
        unit="environments",
        limit=case.batch_env_count,
        limit_is="full batch",
    )
    yield Figure(
        name="rollout worker: fragments",
        workload=case.name,
        value=fragments_per_s,
        unit="fragments/s",
    )


def _steps_per_s(worker: RolloutWorker, round_s: float) -> float:
    began_at, before = time.monotonic(), worker.step_count
    time.sleep(round_s)
    return (worker.step_count - before) / (time.monotonic() - began_at)


@contextlib.contextmanager
def _running(case: Case, client: breadbox.Client) -> Iterator[tuple[RolloutWorker, Switch]]:
    """Start a worker in this process, as `breadbox rollout` does; yields once it is warm."""
    switch_interval_s = sys.getswitchinterval()
    torch.set_num_threads(1)
    share_interpreter()
    spec = EnvSpec(name=case.env)
    settings = RolloutSettings(
        env=case.env,
        policy=case.policy,
        num_envs=case.env_count,
        fragment_steps=case.fragment_steps,
        batch_envs=case.batch_env_count,
        worker_name="bench",
        log_interval_s=1e9,
    )
    switch = Switch(client)
    watcher = ModelWatcher(switch)
    sender = Sender(
        switch,
        lambda: watcher.latest,
        fragments_max=settings.queue_fragments_max,
        bytes_max=2**28,
    )
    reporter = EpisodeReporter(switch)
    per_process = envs_per_process(spec, case.env_count)
    pool = EnvProcesses(spec, PoolOptions(env_count=case.env_count, envs_per_process=per_process))
    player = Player(
        lambda observations, actions: make_policy(case.policy, observations, actions),
        lambda policy: Inference(policy, torch.device("cpu")),
        watcher,
        sender,
        reporter,
        settings,
    )
    worker = RolloutWorker(pool, [player], settings)
    thread = threading.Thread(target=worker.run)
    for part in (watcher, reporter, thread):
        part.start()
    try:
        _warm_up(case, client, worker, pool)
        yield worker, switch
    finally:
        sys.setswitchinterval(switch_interval_s)
        worker.stop()
        thread.join()
        sender.close(10.0)
        reporter.close(10.0)
        client.close()
        watcher.close()


def _warm_up(
    case: Case, client: breadbox.Client, worker: RolloutWorker, pool: EnvProcesses
) -> None:
    give_up_at = time.monotonic() + _START_S
    while not pool.parts or pool.live_env_count < case.env_count:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{case.name}: environments did not start in {_START_S:.0f} s")
        time.sleep(0.1)
    (part,) = pool.parts
    policy = make_policy(case.policy, part.observation_space, part.action_space)
    client.start_session(_SESSION_ID)
    client.publish(_SESSION_ID, 0, policy_weights(policy))
    steps_wanted = 2 * case.env_count * case.fragment_steps
    while worker.step_count < steps_wanted:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{case.name}: only {worker.step_count} steps in {_START_S:.0f} s")
        time.sleep(0.1)
