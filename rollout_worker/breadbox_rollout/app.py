"""Run `breadbox rollout`."""

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import click
import torch

import breadbox
from breadbox.cli.signals import stop_on_signals
from breadbox.model.errors import PERMANENT, InvalidRequestError, ReplayBufferError, TlsError
from breadbox.model.types import FragmentMetadata, PayloadReference
from breadbox.payload.codecs import parse_codec
from breadbox.transport import heartbeat
from breadbox.writing.pacing import Pacer
from breadbox.writing.reporting import EpisodeReporter
from breadbox_policies import PolicyModule, compute_repeatably
from breadbox_rollout.acting.agents import (
    AgentsEntry,
    agents_entries,
    check_policy_name,
    policy_factory,
    read_weights,
)
from breadbox_rollout.acting.inference import Inference, check_device
from breadbox_rollout.acting.opponents import Opponents
from breadbox_rollout.acting.player import Participant, Player
from breadbox_rollout.environments.environments import (
    EnvSpec,
    check_environment,
    check_frames,
    envs_per_process,
    with_frames,
)
from breadbox_rollout.metrics import WorkerCollector, metrics_served
from breadbox_rollout.processes.pool import EnvProcesses, PoolOptions
from breadbox_rollout.recording.recording import RecordingOptions, Recordings
from breadbox_rollout.sending.models import ModelWatcher
from breadbox_rollout.sending.sender import Sender
from breadbox_rollout.settings import RolloutSettings, check_worker_name, mixed_seed
from breadbox_rollout.worker import RolloutWorker

logger = logging.getLogger(__name__)

_APPEND_WAIT_S = 5.0
"""Seconds an append waits at a full buffer; then the sender checks if the fragment is stale."""
_SWITCH_INTERVAL_S = 0.0005


def run(settings: RolloutSettings) -> None:
    """Run a worker until a signal, or only check for a dry run; raise permanent errors."""
    if settings.deterministic:
        settings.check_deterministic()
    spec = EnvSpec(name=settings.env, options=settings.env_options, vectorize=settings.vectorize)
    check_environment(spec)
    if settings.record_dir is not None and settings.record_media != "none":
        check_frames(spec)
    device = check_device(settings.device)
    check_policy_name(settings.policy)
    entries = agents_entries(
        settings.agents,
        buffer=settings.buffer,
        policy=settings.policy,
        policy_options=settings.policy_options,
    )
    check_worker_name(settings.worker_name)
    parse_codec(settings.codec)
    clients = [_connect(settings, entry.buffer) for entry in entries]
    if settings.dry_run:
        for client in clients:
            client.close()
        check_spaces(settings, spec, entries)
        click.echo(settings.as_yaml(), nl=False)
        return
    settings.configure_logs()
    for buffer in {entry.buffer: None for entry in entries}:
        check_service(settings, buffer)
    torch.set_num_threads(settings.torch_threads)
    if settings.deterministic:
        compute_repeatably()
    run_worker(clients, entries, settings, spec, device)


def check_spaces(settings: RolloutSettings, spec: EnvSpec, entries: Sequence[AgentsEntry]) -> None:
    """Make an environment in a process, in 3 attempts of `--build-s` each, and the policies."""
    options = replace(_pool_options(settings, spec, entries), env_count=1, envs_per_process=1)
    with EnvProcesses(spec, options) as pool:
        while not pool.parts:
            pool.poll(0.2)
        for entry, part in zip(entries, pool.parts, strict=True):
            make_policy = policy_factory(entry.policy, dict(entry.policy_options), settings.seed)
            make_policy(part.observation_space, part.action_space)


def check_service(settings: RolloutSettings, buffer: str) -> None:
    """Ask the server, for 10 s at most, if this worker may append; log why it has to wait."""
    with _connect(settings, buffer, reconnect_s=0.0) as client:
        try:
            client.get_buffer()
            # No server admits this fragment; its refusal shows if the token allows the call.
            client.service.append_fragments(
                [
                    FragmentMetadata(
                        worker_id=f"{settings.worker_name}-0",
                        fragment_index=0,
                        session_id="",
                        model_version_min=0,
                        model_version_max=0,
                        payload=PayloadReference("", 0),
                        step_count=0,
                    )
                ]
            )
        except (TlsError, *PERMANENT):
            raise
        except InvalidRequestError:
            return  # Refused for its content, so the token and the worker's name are allowed.
        except ReplayBufferError as error:
            logger.warning("waiting for the server: %s", error)


def _connect(settings: RolloutSettings, buffer: str, **options: Any) -> "breadbox.Client":
    return settings.connect(
        buffer=buffer, append_wait_s=_APPEND_WAIT_S, codecs=settings.codec, **options
    )


class _Chain:
    """One entry's client, player, and the threads that serve them."""

    def __init__(
        self,
        client: "breadbox.Client",
        entry: AgentsEntry,
        settings: RolloutSettings,
        device: torch.device,
    ) -> None:
        self._client = client
        self._watcher = watcher = ModelWatcher(client)
        self._sender: Sender | None = None
        self._reporter: EpisodeReporter | None = None
        make_policy = policy_factory(entry.policy, dict(entry.policy_options), settings.seed)
        # Agents of another entry draw other actions.
        seed = mixed_seed(settings.worker_seed, entry.pattern)

        def make_inference(policy: PolicyModule) -> Inference:
            return Inference(policy, device, bfloat16=settings.bfloat16, seed=seed)

        self.player: Participant
        if not entry.learn:
            self.player = Opponents(
                make_policy,
                make_inference,
                watcher,
                kept_max=settings.weights_kept,
                pinned=[read_weights(path) for path in entry.weights_files],
                seed=seed,
            )
            return
        self._reporter = reporter = EpisodeReporter(
            client, steps=lambda: [each.ended() for each in self.player.steps()]
        )
        self._sender = Sender(
            client,
            lambda: watcher.latest,
            fragments_max=settings.queue_fragments_max,
            bytes_max=settings.queue_bytes,
            gave_up=lambda: reporter.close(0.0),
            pacer=Pacer(client) if settings.pace else None,
        )
        self.player = Player(
            make_policy,
            make_inference,
            watcher,
            self._sender,
            self._reporter,
            settings,
            entry.policy_options if settings.declare_origin else None,
        )

    def start(self) -> None:
        self._watcher.start()
        if self._reporter is not None:
            self._reporter.start()

    def close(self, until: float) -> None:
        for thread in (self._sender, self._reporter):
            if thread is not None:
                thread.close(max(0.0, until - time.monotonic()))
        self._client.close()
        self._watcher.close()


def run_worker(
    clients: "Sequence[breadbox.Client]",
    entries: Sequence[AgentsEntry],
    settings: RolloutSettings,
    spec: EnvSpec,
    device: torch.device,
) -> None:
    """Run a worker on *clients*, one for each entry, until a signal; close the clients."""
    chains = [
        _Chain(client, entry, settings, device)
        for client, entry in zip(clients, entries, strict=True)
    ]
    recordings = None if settings.record_dir is None else _recordings(settings)
    pool = EnvProcesses(
        with_frames(spec) if recordings and settings.record_media != "none" else spec,
        _pool_options(settings, spec, entries),
        recording=asdict(recordings.options) if recordings else None,
    )
    worker = RolloutWorker(
        pool,
        [chain.player for chain in chains],
        settings,
        recordings=recordings,
        heartbeat=heartbeat.from_environment(),
    )
    logger.info(
        "seed %d, worker %s (--seed and --worker-name repeat its random choices), server %s",
        settings.seed,
        settings.worker_name,
        clients[0].address,
    )
    share_interpreter()
    stack = ExitStack()
    try:
        if settings.metrics_listen:
            collector = WorkerCollector(worker.counts)
            address = stack.enter_context(metrics_served(settings.metrics_listen, collector))
            logger.info("metrics on http://%s/metrics", address)
        for chain in chains:
            chain.start()
        with stack, stop_on_signals(lambda _: worker.stop()):
            worker.run()
    finally:
        until = time.monotonic() + settings.drain_s
        for chain in chains:
            chain.close(until)
        counts = worker.counts()
        logger.info(
            "ended after %d steps: %s; fragments %s, failures %s",
            counts.step_count,
            counts.steps,
            counts.fragments,
            counts.failures,
        )


def share_interpreter() -> None:
    """Let the loop run more often while the sender packs: CartPole is 1.2 to 1.4 times as fast."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _pool_options(
    settings: RolloutSettings, spec: EnvSpec, entries: Sequence[AgentsEntry]
) -> PoolOptions:
    return PoolOptions(
        env_count=settings.num_envs,
        envs_per_process=settings.envs_per_process or envs_per_process(spec, settings.num_envs),
        seed=settings.worker_seed,
        build_s_max=settings.build_s,
        reset_s_max=settings.reset_s,
        step_s_max=settings.step_s,
        restarts_max=settings.restarts_max,
        rebuild_interval_s=settings.rebuild_interval_s,
        memory_bytes_max=settings.memory_limit,
        episode_steps_max=settings.episode_steps_max,
        agents=tuple(entry.pattern for entry in entries),
    )


def _recordings(settings: RolloutSettings) -> Recordings:
    assert settings.record_dir is not None
    settings.record_dir.mkdir(parents=True, exist_ok=True)
    options = RecordingOptions(
        folder=str(settings.record_dir.absolute()),
        every=settings.record_every,
        env_count=settings.record_envs,
        overlay=True,
        media=settings.record_media,
        crf=settings.record_crf,
        partial_prefix=settings.worker_name,
    )
    return Recordings(options, {"env": settings.env, "worker": settings.worker_name})
