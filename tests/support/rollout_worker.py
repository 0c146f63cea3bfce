"""A whole rollout worker on a fake service, with scripted environments in real processes."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from breadbox.model.fragment import Fragment
from breadbox.transport.heartbeat import Heartbeat
from breadbox.writing.reporting import EpisodeReporter
from breadbox_policies import make_policy
from breadbox_rollout.acting.inference import Inference
from breadbox_rollout.acting.opponents import Opponents
from breadbox_rollout.acting.player import Participant, Player
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.processes.pool import EnvProcesses, PoolOptions
from breadbox_rollout.recording.recording import RecordingOptions, Recordings
from breadbox_rollout.sending.models import ModelWatcher
from breadbox_rollout.sending.sender import Sender
from breadbox_rollout.settings import RolloutSettings
from breadbox_rollout.worker import RolloutWorker
from support.rollout_service import FakeService


class Rollout:
    """The parts of a running worker."""

    def __init__(self, service: FakeService, worker: RolloutWorker, player: Player) -> None:
        self.service = service
        self.worker = worker
        self.player = player
        self.errors: list[BaseException] = []
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.errors.append(error)
        finally:
            self.ended.set()

    @property
    def device_type(self) -> str:
        """Where the policy ran."""
        assert self.player.policy is not None
        return next(self.player.policy.parameters()).device.type

    def by_worker(self) -> dict[str, list[Fragment]]:
        found: dict[str, list[Fragment]] = defaultdict(list)
        for fragment in list(self.service.fragments):
            found[fragment.worker_id].append(fragment)
        return dict(found)

    def wait_for_error(self, wait_s: float = 60.0) -> None:
        """Wait until the worker ends by itself, and raise what ended it."""
        assert self.ended.wait(wait_s), "the worker still runs"
        raise self.errors[0]

    def wait_for_fragments(self, count: int, wait_s: float = 60.0) -> None:
        self.service.wait_until(
            lambda: len(self.service.fragments) >= count or bool(self.errors), wait_s
        )
        if self.errors:
            raise self.errors[0]


@contextmanager
def running_worker(
    service: FakeService,
    script: str,
    *,
    policy: str = "mlp",
    fragment_steps: int = 4,
    batch_env_count: int = 4,
    spec: EnvSpec | None = None,
    queue_fragments: int = 64,
    device: str = "cpu",
    record_dir: Path | None = None,
    heartbeat: Heartbeat | None = None,
    agents: dict[str, FakeService] | None = None,
    opponents: str | None = None,
    fragments_per_batch: int | None = None,
    **pool_options: Any,
) -> Iterator[Rollout]:
    """Run a worker in a thread until the block ends; then nothing of it is left.

    Args:
        agents: Services by pattern of agents that have policies of their own; *service* is one.
        opponents: Pattern of agents that act with the last 3 versions of *service*.
    """
    spec = spec or EnvSpec(name="support.scripted_env:make", options={"script": script})
    settings = RolloutSettings(
        env=spec.name,
        policy=policy,
        num_envs=pool_options.get("env_count", 2),
        worker_name="w",
        device=device,
        fragment_steps=fragment_steps,
        queue_fragments=queue_fragments,
        batch_envs=None if fragments_per_batch else batch_env_count,
        batch_wait_s=0.01,
        deterministic=fragments_per_batch is not None,
        fragments_per_batch=fragments_per_batch or 1,
    )
    parts = [_Part(each, settings) for each in
             (agents or {"*": service}).values()]  # fmt: skip
    players: list[Participant] = [part.player for part in parts]
    patterns = [*(agents or {"*": service})]
    if opponents is not None:
        watcher = ModelWatcher(service)
        players.append(
            Opponents(
                lambda observations, actions: make_policy(policy, observations, actions),
                lambda made: Inference(made, torch.device(device)),
                watcher,
                kept_max=3,
            )
        )
        patterns.append(opponents)
        watcher.start()
    recordings = None
    if record_dir is not None:
        recording = RecordingOptions(folder=str(record_dir), every=2, env_count=1, overlay=True)
        recordings = Recordings(recording, {"worker": "w"})
    worker = RolloutWorker(
        EnvProcesses(
            spec,
            PoolOptions(**{"env_count": 2, "agents": tuple(patterns), **pool_options}),
            recording=asdict(recordings.options) if recordings else None,
        ),
        players,
        settings,
        recordings=recordings,
        heartbeat=heartbeat,
    )
    rollout = Rollout(service, worker, parts[0].player)
    for part in parts:
        part.start()
    thread = threading.Thread(target=rollout.run)
    thread.start()
    try:
        yield rollout
    finally:
        worker.stop()
        thread.join(60.0)
        for part in parts:
            part.close()
        if opponents is not None:
            players[-1].watcher.close()
        assert not thread.is_alive()


class _Part:
    """A player and the threads that serve it."""

    def __init__(self, service: FakeService, settings: RolloutSettings) -> None:
        self._service = service
        self._watcher = watcher = ModelWatcher(service)
        self._sender = Sender(
            service,
            lambda: watcher.latest,
            fragments_max=settings.queue_fragments_max,
            bytes_max=2**28,
        )
        self._reporter = EpisodeReporter(service)
        self.player = Player(
            lambda observations, actions: make_policy(settings.policy, observations, actions),
            lambda made: Inference(made, torch.device(settings.device)),
            watcher,
            self._sender,
            self._reporter,
            settings,
        )

    def start(self) -> None:
        self._watcher.start()
        self._reporter.start()

    def close(self) -> None:
        self._sender.close(10.0)
        self._reporter.close(10.0)
        self._service.close()
        self._watcher.close()
