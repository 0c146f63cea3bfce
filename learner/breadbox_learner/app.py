"""Builds a learner from its settings and runs it."""

from collections.abc import Callable
from pathlib import Path

import torch
import yaml

import breadbox
from breadbox.errors import InvalidRequestError
from breadbox.policies import PolicyModule, make_policy
from breadbox_learner.ppo import PpoUpdater
from breadbox_learner.progress import (
    JsonLines,
    Progress,
    Sink,
    TensorBoard,
    WeightsAndBiases,
    wandb_installed,
)
from breadbox_learner.publisher import Publisher
from breadbox_learner.returns import EpisodeReturns
from breadbox_learner.settings import LearnSettings
from breadbox_learner.source import LeaseSource
from breadbox_learner.spaces import spaces_of
from breadbox_learner.trainer import Outcome, Trainer, TrainerState


def build_policy(settings: LearnSettings) -> PolicyModule:
    """Make the policy, with weights drawn under the settings' seed.

    Raises:
        InvalidRequestError: Environment, policy or device does not fit.
    """
    spaces = spaces_of(settings.env, settings.env_options)
    torch.manual_seed(settings.seed)
    policy = make_policy(
        settings.policy, spaces.observation, spaces.action, **settings.policy_options
    )
    try:
        return policy.to(settings.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequestError("device", f"{settings.device!r}: {reason}") from error


def dry_run_text(settings: LearnSettings) -> str:
    """Build everything that needs no server, and tell the settings as YAML.

    Raises:
        InvalidRequestError: Something does not fit.
    """
    policy = build_policy(settings)
    _require_wandb(settings)
    shown = settings.model_dump(mode="json", exclude={"token"})
    count = sum(parameter.numel() for parameter in policy.parameters())
    return f"{yaml.safe_dump(shown, sort_keys=False)}# policy with {count} parameters: fits"


def run(settings: LearnSettings, stopped: Callable[[], bool]) -> Outcome:
    """Train until there is a reason to end.

    Args:
        settings: What to do.
        stopped: Asked at least once a second; true ends the run in good order.

    Raises:
        ReplayBufferError: Something does not fit, or the server went away for good.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    policy = build_policy(settings)
    folder = settings.folder()
    folder.mkdir(parents=True, exist_ok=True)
    updater = PpoUpdater(
        policy,
        settings.ppo,
        device=settings.device,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    with breadbox.connect(
        settings.server, buffer=settings.buffer, token=settings.token or None
    ) as client:
        publisher = Publisher(client)
        publisher.start(policy)
        source = LeaseSource(client, fragment_count=settings.fragments_per_batch)
        try:
            with Progress(_sinks(settings, folder, publisher.session_id)) as progress:
                return Trainer(
                    settings,
                    policy=policy,
                    updater=updater,
                    source=source,
                    publisher=publisher,
                    progress=progress,
                    returns=EpisodeReturns(),
                    state=TrainerState(),
                    stopped=stopped,
                ).run()
        finally:
            source.close()
            publisher.end()


def _sinks(settings: LearnSettings, folder: Path, session_id: str) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(folder / "progress.jsonl")]
    if settings.tensorboard:
        sinks.append(TensorBoard(folder))
    if settings.wandb_project:
        _require_wandb(settings)
        config = settings.model_dump(mode="json", exclude={"token"})
        sinks.append(WeightsAndBiases(settings.wandb_project, session_id, config))
    return sinks


def _require_wandb(settings: LearnSettings) -> None:
    if settings.wandb_project and not wandb_installed():
        raise InvalidRequestError("wandb_project", "needs the package wandb: pip install wandb")
