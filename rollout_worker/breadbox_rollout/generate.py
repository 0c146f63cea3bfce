"""What `breadbox generate` runs, with all that it takes."""

import logging
from collections.abc import Mapping
from typing import Any

import click
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn

from breadbox.cli.signals import stop_on_signals
from breadbox.errors import InvalidRequestError
from breadbox_rollout.environments import EnvSpec, check_environment, check_frames
from breadbox_rollout.generator import EpisodeGenerator, GeneratorOptions
from breadbox_rollout.inference import Inference, check_device
from breadbox_rollout.manifest import MANIFEST
from breadbox_rollout.policy_options import (
    check_policy_name,
    policy_factory,
    read_weights,
)
from breadbox_rollout.settings import GenerateSettings

logger = logging.getLogger(__name__)


def generate_episodes(settings: GenerateSettings) -> None:
    """Play and write episodes until there are as many as wanted, or a signal comes.

    Raises:
        InvalidRequestError: A setting does not fit the environment, the device or the policy.
        EnvironmentStartError: No environment starts.
        SystemExit: With 130, after a signal.
    """
    spec = EnvSpec(name=settings.env, options=settings.env_options)
    check_environment(spec)
    if settings.media != "none":
        check_frames(spec)
    device = check_device(settings.device)
    check_policy_name(settings.policy)
    logger.info("seed %d (--seed repeats these episodes)", settings.seed)
    weights, version = _weights_for_episodes(settings)
    torch.set_num_threads(settings.torch_threads)
    options = GeneratorOptions(
        env=spec,
        out=settings.out,
        episode_count=settings.episodes,
        worker_count=settings.workers,
        media=settings.media,
        fps=settings.fps,
        crf=settings.crf,
        overlay=settings.overlay,
        episode_steps_max=settings.max_steps,
        restarts_max=settings.restarts_max,
        seed=settings.seed,
        task=settings.task,
        model_version=version,
        policy_name=settings.policy,
        build_s_max=settings.build_s,
        reset_s_max=settings.reset_s,
        step_s_max=settings.step_s,
        memory_bytes_max=settings.memory_limit,
        details={"greedy": settings.greedy},
    )
    episodes = EpisodeGenerator(
        options,
        make_policy=policy_factory(
            settings.policy, settings.policy_options, settings.seed, weights
        ),
        make_inference=lambda policy: Inference(
            policy,
            device,
            bfloat16=settings.bfloat16,
            seed=settings.seed,
            greedy=settings.greedy,
        ),
    )
    _watch_episodes(episodes, options, show=settings.progress)
    finished_count = episodes.finished_count
    if finished_count < options.episode_count:
        click.echo(f"interrupted; {finished_count} episodes are in {options.out}", err=True)
        raise SystemExit(130)
    click.echo(f"{finished_count} episodes are in {options.out / MANIFEST}")


def _weights_for_episodes(
    settings: GenerateSettings,
) -> tuple[Mapping[str, NDArray[Any]] | None, int]:
    """Return weights and version to play with; None: fresh weights."""
    if settings.weights_file is not None:
        return read_weights(settings.weights_file), 0
    if not settings.server:
        return None, 0
    # A person waits: a server that is away is told at once.
    with settings.connect(buffer=settings.buffer, reconnect_s=0.0) as client:
        state = client.watch_model()
        if state is None or state.weights is None:
            raise InvalidRequestError("server", f"{settings.server} has no published weights")
        return client.load_weights(state.weights), state.model_version or 0


def _watch_episodes(episodes: EpisodeGenerator, options: GeneratorOptions, *, show: bool) -> None:
    """Show episodes as they finish, until all did or a signal came."""
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
    with episodes, Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        bar = progress.add_task("episodes", total=options.episode_count, note="")
        with stop_on_signals(lambda _: episodes.stop()):
            for episode in episodes:
                note = f"return {episode['return_sum']:.1f} in {episode['step_count']} steps"
                if episodes.failures:
                    note += f", {episodes.failures.total()} failures"
                progress.update(bar, completed=episodes.finished_count, note=note)
