"""What `breadbox generate` runs, with all that it takes."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn

from breadbox.cli.signals import stop_on_signals
from breadbox.model.errors import InvalidRequestError
from breadbox_rollout.acting.generator import EpisodeGenerator, GeneratorOptions
from breadbox_rollout.acting.inference import Inference, check_device
from breadbox_rollout.acting.policy_options import check_policy_name, policy_factory, read_weights
from breadbox_rollout.environments.environments import EnvSpec, check_environment, check_frames
from breadbox_rollout.recording.manifest import MANIFEST
from breadbox_rollout.settings import GenerateSettings

logger = logging.getLogger(__name__)


def generate_episodes(settings: GenerateSettings) -> None:
    """Play and write episodes until there are as many as wanted, or a signal comes."""
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
    played = f"{finished_count} episodes were added to {options.out / MANIFEST}"
    if finished_count < options.episode_count:
        click.echo(f"interrupted; {played}", err=True)
        raise SystemExit(130)
    click.echo(f"{played}, which has {_count_lines(options.out / MANIFEST)}")


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _weights_for_episodes(
    settings: GenerateSettings,
) -> tuple[Mapping[str, NDArray[Any]] | None, int]:
    """Return weights and version to play with; None as weights stands for fresh ones."""
    if settings.weights_file is not None:
        return read_weights(settings.weights_file), 0
    if not settings.server:
        return None, 0
    # A person waits, so a server that is away is reported immediately.
    with settings.connect(buffer=settings.buffer, reconnect_s=0.0) as client:
        published = client.load_model()
        if published is None:
            raise InvalidRequestError("server", f"{settings.server} has no published weights")
        state, weights = published
        return weights, state.model_version or 0


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
