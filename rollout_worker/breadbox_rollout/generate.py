"""`breadbox generate`."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn

import breadbox
from breadbox.cli import logs
from breadbox.cli.modules import import_from_here
from breadbox.cli.signals import stop_on_signals
from breadbox.errors import InvalidRequestError
from breadbox_rollout.command import (
    OneLineCommand,
    config_option,
    option,
)
from breadbox_rollout.environments import EnvSpec, check_environment, check_frames
from breadbox_rollout.generator import EpisodeGenerator, GeneratorOptions
from breadbox_rollout.inference import Inference, check_device
from breadbox_rollout.manifest import MANIFEST
from breadbox_rollout.media import MEDIA
from breadbox_rollout.policy_options import (
    check_policy_name,
    environment_options,
    policy_factory,
    read_weights,
)

logger = logging.getLogger(__name__)


def _generate_options(command: Callable[..., None]) -> Callable[..., None]:
    """Declare what `generate` has and `rollout` has not."""
    positive = click.IntRange(min=1)
    for decorate in reversed(
        (
            option("--out", required=True, type=click.Path(path_type=Path, file_okay=False),
                   help="Folder for the files; made if it is not there."),
            option("--episodes", type=positive, default=1, help="Episodes to finish, in all."),
            option("--workers", type=positive, default=1, help="Environments, a process each."),
            option("--media", type=click.Choice(MEDIA), default="h264", help="Kind of frames."),
            option("--fps", type=positive, default=30, help="Frames per second of the video."),
            option("--crf", type=click.IntRange(0, 51), default=0,
                   help="Quality of H.264; 0: lossless, 51: worst."),
            option("--overlay/--no-overlay", default=False, help="Write the value into frames."),
            option("--max-steps", type=positive, help="Truncate longer episodes."),
            option("--restarts-max", type=click.IntRange(min=0), default=10,
                   help="Failures of one worker; the one after that ends it."),
            option("--weights-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
                   help="Safetensors file of the policy, or a learner's checkpoint. "
                        "Default: fresh weights."),
            option("--greedy/--no-greedy", default=False,
                   help="Take the policy's likeliest actions instead of drawing them."),
            # Not from the environment: BREADBOX_SERVER is set for the other commands, and whose
            # weights play must be said.
            click.option("--server", help="Take the current model of this server instead; "
                                          "BREADBOX_SERVER is not looked at."),
            option("--buffer", default="default", help="Buffer whose model that is."),
            option("--token", help="Bearer token, or @FILE that holds it."),
            option("--tls-ca", type=click.Path(path_type=Path), help="PEM; turns TLS on."),
            option("--tls-cert", type=click.Path(path_type=Path), help="PEM, of this process."),
            option("--tls-key", type=click.Path(path_type=Path), help="PEM, of this process."),
            option("--store-url",
                   help="Where payloads are, seen from here; default: where the server says."),
            option("--task", default="default", help="Label in the manifest."),
            option("--progress/--no-progress", default=True, help="Show a progress bar."),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


@click.command(cls=OneLineCommand)
@_generate_options
@environment_options
@config_option()
def generate(**values: Any) -> None:
    """Play whole episodes and write them to files, with a line each in manifest.jsonl.

    Ctrl-C ends early and keeps what is finished; the exit code is then 130.
    """
    logs.configure(values["log_level"], values["log_format"])
    import_from_here()
    spec = EnvSpec(name=values["env"], options=values["env_options"])
    check_environment(spec)
    if values["media"] != "none":
        check_frames(spec)
    device = check_device(values["device"])
    check_policy_name(values["policy"])
    logger.info("seed %d (--seed repeats these episodes)", values["seed"])
    weights, version = _weights_for_episodes(values)
    torch.set_num_threads(values["torch_threads"])
    options = GeneratorOptions(
        env=spec,
        out=values["out"],
        episode_count=values["episodes"],
        worker_count=values["workers"],
        media=values["media"],
        fps=values["fps"],
        crf=values["crf"],
        overlay=values["overlay"],
        episode_steps_max=values["max_steps"],
        restarts_max=values["restarts_max"],
        seed=values["seed"],
        task=values["task"],
        model_version=version,
        policy_name=values["policy"],
        build_s_max=values["build_s"],
        reset_s_max=values["reset_s"],
        step_s_max=values["step_s"],
        memory_bytes_max=values["memory_limit"],
        details={"greedy": values["greedy"]},
    )
    episodes = EpisodeGenerator(
        options,
        make_policy=policy_factory(
            values["policy"], values["policy_options"], values["seed"], weights
        ),
        make_inference=lambda policy: Inference(
            policy,
            device,
            bfloat16=values["bfloat16"],
            seed=values["seed"],
            greedy=values["greedy"],
        ),
    )
    _watch_episodes(episodes, options, show=values["progress"])
    finished_count = episodes.finished_count
    if finished_count < options.episode_count:
        click.echo(f"interrupted; {finished_count} episodes are in {options.out}", err=True)
        raise SystemExit(130)
    click.echo(f"{finished_count} episodes are in {options.out / MANIFEST}")


def _weights_for_episodes(values: dict[str, Any]) -> tuple[Mapping[str, NDArray[Any]] | None, int]:
    """Return weights and version to play with; None: fresh weights."""
    if values["weights_file"] is not None:
        return read_weights(values["weights_file"]), 0
    if values["server"] is None:
        return None, 0
    files = (values["tls_ca"], values["tls_cert"], values["tls_key"])
    with breadbox.connect(
        values["server"],
        buffer=values["buffer"],
        token=values["token"],
        tls=breadbox.Tls(*files) if any(files) else None,
        store_url=values["store_url"],
        reconnect_s=0.0,  # A person waits: a server that is away is told at once.
    ) as client:
        state = client.watch_model()
        if state is None or state.weights is None:
            raise InvalidRequestError("server", f"{values['server']} has no published weights")
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
