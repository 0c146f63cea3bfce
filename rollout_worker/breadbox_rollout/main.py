"""`breadbox rollout`; `breadbox generate` is re-exported."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

import breadbox
from breadbox import heartbeat
from breadbox.cli import logs
from breadbox.cli.modules import import_from_here
from breadbox.cli.settings import JsonObject, SizeBytes
from breadbox.cli.signals import stop_on_signals
from breadbox.errors import (
    InvalidRequestError,
    NotSupportedError,
    PermissionDeniedError,
    ReplayBufferError,
    TlsError,
    UnauthenticatedError,
)
from breadbox.metrics import metrics_served
from breadbox.payload.codecs import parse_codec
from breadbox.types import FragmentMetadata, PayloadReference
from breadbox_policies import PolicyModule
from breadbox_rollout.agents import AgentsEntry, agents_entries
from breadbox_rollout.command import (
    OneLineCommand,
    config_option,
    option,
)
from breadbox_rollout.environments import (
    VECTORIZE_MODES,
    EnvSpec,
    check_environment,
    check_frames,
    envs_per_process,
    with_frames,
)
from breadbox_rollout.episodes import EpisodeReporter
from breadbox_rollout.generate import generate
from breadbox_rollout.inference import Inference, check_device
from breadbox_rollout.manifest import Recordings
from breadbox_rollout.media import MEDIA
from breadbox_rollout.metrics import WorkerCollector
from breadbox_rollout.models import ModelWatcher
from breadbox_rollout.opponents import Opponents
from breadbox_rollout.player import Player, PlayerOptions, Seated
from breadbox_rollout.policy_options import (
    check_policy_name,
    environment_options,
    policy_factory,
    read_weights,
)
from breadbox_rollout.pool import EnvProcesses, PoolOptions
from breadbox_rollout.recording import RecordingOptions
from breadbox_rollout.sender import Sender
from breadbox_rollout.settings import (
    RolloutSettings,
    check_worker_name,
    default_worker_name,
    mixed_seed,
)
from breadbox_rollout.worker import RolloutWorker, WorkerOptions

__all__ = ["generate", "rollout"]

logger = logging.getLogger(__name__)

_APPEND_WAIT_S = 5.0
"""After this long in front of a full buffer the sender looks again whether it is still wanted."""

_SWITCH_INTERVAL_S = 0.0005


def _worker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Declare what is said of the service and of this worker's part in it."""
    positive = click.IntRange(min=1)
    for decorate in reversed(
        (
            option("--server", default="127.0.0.1:50051", help="HOST:PORT, or unix:PATH."),
            option("--buffer", default="default", help="Buffer to fill."),
            option("--token", help="Bearer token, or @FILE that holds it."),
            option("--tls-ca", type=click.Path(path_type=Path), help="PEM; turns TLS on."),
            option("--tls-cert", type=click.Path(path_type=Path), help="PEM, of this worker."),
            option("--tls-key", type=click.Path(path_type=Path), help="PEM, of this worker."),
            option("--store-url",
                   help="Where payloads are, seen from here; default: where the server says."),
            option("--codec", default="raw",
                   help="How arrays are encoded: raw, lz4, zstd, zstd:LEVEL, h264, auto."),
            option("--metrics-listen", default="",
                   help="HOST:PORT of metrics for Prometheus; nothing serves none."),
            option("--num-envs", type=positive, default=8, help="Environments."),
            option("--envs-per-process", type=positive,
                   help="Default: 1, more for Gymnasium's own tiny environments, all of them for "
                        "a vector environment."),
            option("--vectorize", type=click.Choice(VECTORIZE_MODES),
                   help="Make vector environments of a Gymnasium id, as gymnasium.make_vec does."),
            option("--fragment-steps", type=positive, default=32, help="Steps of a fragment."),
            option("--batch-envs", type=positive,
                   help="Environments of a full inference batch. Default: half or all of them, "
                        "whichever turns out to be faster."),
            option("--batch-wait-s", type=click.FloatRange(min=0.0), default=0.02,
                   help="Longest a ready environment waits for others to join its batch."),
            option("--weights", type=click.Choice(["strict", "matching"]), default="strict",
                   help="Published weights must fit exactly, or where they match by name."),
            option("--agents", type=JsonObject(), default="{}",
                   help="Policies of an environment's agents, by pattern of their names: "
                        '{"red_*": {"buffer": "red", "policy": "mlp"}, "*": {"learn": false}}. '
                        "Default: all share one."),
            option("--weights-kept", type=positive, default=10,
                   help='Versions that opponents ("learn": false) are drawn from.'),
            option("--task", default="default", help="Label of episodes that name none."),
            option("--discount", type=click.FloatRange(0.0, 1.0), default=0.99,
                   help="Of the discounted returns that are reported."),
            option("--worker-name", default=default_worker_name,
                   help="Begins worker ids; unique per start. Default: host and a random number."),
            option("--queue-fragments", type=positive,
                   help="Fragments that may wait to be sent; beyond, environments wait. More of "
                        "them are staler. Default: two for each environment."),
            option("--queue-bytes", type=SizeBytes(), default="512MiB", help="Bytes of them."),
            option("--rebuild-interval-s", type=click.FloatRange(min=0.0), default=0.0,
                   help="Make environments anew after this long, between episodes; 0: never."),
            option("--restarts-max", type=click.IntRange(min=0),
                   help="Restarts of one environment process. Default: any number."),
            option("--episode-steps-max", type=positive, help="Truncate longer episodes."),
            option("--record-dir", type=click.Path(path_type=Path, file_okay=False),
                   help="Write chosen episodes to files in this folder."),
            option("--record-every", type=positive, default=100,
                   help="Which: every so many-th of an environment, the first included."),
            option("--record-envs", type=positive, default=1, help="Of so many environments."),
            option("--record-media", type=click.Choice(MEDIA), default="h264", help="Frames."),
            option("--record-crf", type=click.IntRange(0, 51), default=23,
                   help="Quality of H.264; 0: lossless, 51: worst."),
            option("--steps-max", type=positive, help="End after so many steps."),
            option("--log-interval-s", type=click.FloatRange(min=0.1), default=10.0,
                   help="Seconds between lines that say how fast it goes."),
            option("--drain-s", type=click.FloatRange(min=0.0), default=10.0,
                   help="Time to deliver what is finished when told to end."),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


@click.command(cls=OneLineCommand)
@_worker_options
@environment_options
@config_option()
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything but the server, print what would be used, end.",
)
def rollout(dry_run: bool, log_level: str, log_format: str, **values: Any) -> None:
    """Run a rollout worker: step environments with the current model and send fragments.

    It may be started before server and learner: it waits for both and says so. SIGTERM and Ctrl-C
    deliver what is finished, then end; a second signal ends at once.
    """
    settings = RolloutSettings(**values)
    import_from_here()
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
    if dry_run:
        for client in clients:
            client.close()
        click.echo(settings.as_yaml(), nl=False)
        return
    logs.configure(log_level, log_format)
    for buffer in {entry.buffer: None for entry in entries}:
        check_service(settings, buffer)
    torch.set_num_threads(settings.torch_threads)
    run_worker(clients, entries, settings, spec, device)


def check_service(settings: RolloutSettings, buffer: str) -> None:
    """Ask the server once, before anything is started, whether this worker may append.

    What may come yet (the server, the buffer) is said and waited for; it takes 10 s at most.

    Raises:
        TlsError, UnauthenticatedError, PermissionDeniedError, NotSupportedError: What waiting does
            not mend.
    """
    with _connect(settings, buffer, reconnect_s=0.0) as client:
        try:
            client.get_buffer()
            client.append_fragments([_nothing_of(f"{settings.worker_name}-0")])
        except (TlsError, UnauthenticatedError, PermissionDeniedError, NotSupportedError):
            raise
        except InvalidRequestError:
            return  # Refused for its content: the call itself is allowed, and under this name.
        except ReplayBufferError as error:
            logger.warning("waiting for the server: %s", error)


def _nothing_of(worker_id: str) -> FragmentMetadata:
    """A fragment that no server admits, but that tells whether the token is for this worker."""
    return FragmentMetadata(
        worker_id=worker_id,
        fragment_index=0,
        session_id="",
        model_version_min=0,
        model_version_max=0,
        payload=PayloadReference("", 0),
        step_count=0,
    )


def _connect(settings: RolloutSettings, buffer: str, **options: Any) -> "breadbox.Client":
    tls = None
    if settings.tls_ca or settings.tls_cert or settings.tls_key:
        tls = breadbox.Tls(settings.tls_ca, settings.tls_cert, settings.tls_key)
    return breadbox.connect(
        settings.server,
        buffer=buffer,
        tls=tls,
        token=settings.token,
        append_wait_s=_APPEND_WAIT_S,
        store_url=settings.store_url,
        codecs=settings.codec,
        **options,
    )


class _Chain:
    """What belongs to one entry: its client, the threads on it, and the player that they serve."""

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
        # Agents of another entry do not draw the same actions.
        seed = mixed_seed(settings.worker_seed, entry.pattern)

        def make_inference(policy: PolicyModule) -> Inference:
            return Inference(policy, device, bfloat16=settings.bfloat16, seed=seed)

        self.player: Seated
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
        self._sender = Sender(
            client,
            lambda: watcher.latest,
            fragments_max=settings.queue_fragments_max,
            bytes_max=settings.queue_bytes,
        )
        self._reporter = EpisodeReporter(client)
        self.player = Player(
            make_policy,
            make_inference,
            watcher,
            self._sender,
            self._reporter,
            _player_options(settings),
        )

    def start(self) -> None:
        self._watcher.start()
        if self._reporter is not None:
            self._reporter.start()

    def close(self, drain_s: float) -> None:
        for thread in (self._sender, self._reporter):
            if thread is not None:
                thread.close(drain_s)
        self._client.close()
        self._watcher.close()


def run_worker(
    clients: "Sequence[breadbox.Client]",
    entries: Sequence[AgentsEntry],
    settings: RolloutSettings,
    spec: EnvSpec,
    device: torch.device,
) -> None:
    """Build a worker around *clients*, one for each entry, and run it until a signal comes.

    Closes the clients.

    Raises:
        EnvironmentStartError: No environment starts or ever answers a step, or none is left.
        InvalidRequestError: A learner's policy is another one.
    """
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
        _loop_options(settings),
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
        for chain in chains:
            chain.close(settings.drain_s)
        counts = worker.counts()
        logger.info(
            "ended after %d steps; fragments %s, failures %s",
            counts.step_count,
            counts.fragments,
            counts.failures,
        )


def share_interpreter() -> None:
    """Let the loop have the interpreter back soon after environments have answered.

    While the sender packs small fragments it gives the interpreter up only when asked, after
    Python's switch interval of 5 ms; environments are idle that long. With 0.5 ms a CartPole worker
    steps 1.2 to 1.4 times as fast beside its sender.
    """
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


def _player_options(settings: RolloutSettings) -> PlayerOptions:
    return PlayerOptions(
        fragment_steps=settings.fragment_steps,
        worker_prefix=settings.worker_name,
        task=settings.task,
        discount=settings.discount,
        strict_weights=settings.weights == "strict",
    )


def _loop_options(settings: RolloutSettings) -> WorkerOptions:
    return WorkerOptions(
        batch_env_count=settings.batch_envs,
        batch_wait_s_max=settings.batch_wait_s,
        log_interval_s=settings.log_interval_s,
        steps_max=settings.steps_max,
    )
