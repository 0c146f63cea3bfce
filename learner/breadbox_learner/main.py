"""`breadbox learn`: train the reference PPO on a buffer."""

import click

from breadbox.cli.base import import_from_here
from breadbox.cli.command import command
from breadbox.cli.signals import stop_on_signals
from breadbox.model.errors import InvalidRequestError
from breadbox_learner.runs import RunFolder, wandb_installed
from breadbox_learner.settings import LearnSettings, membership_from_environment


def check(settings: LearnSettings) -> None:
    """Check settings without torch, since its import takes seconds."""
    membership = membership_from_environment()
    if membership.is_main:
        RunFolder.check(settings)
    if settings.fragments_per_batch % membership.world_size:
        raise InvalidRequestError(
            "fragments_per_batch",
            f"must divide by the number of ranks, got {settings.fragments_per_batch} "
            f"for {membership.world_size}",
        )
    if settings.deterministic:
        if membership.world_size > 1:
            raise InvalidRequestError("deterministic", "needs a single process, not several ranks")
        settings.check_fixed(
            "deterministic",
            prefetch_batches=(0, "a batch that is fetched ahead is of an older version"),
            publish_every=(1, "the worker waits for a version after each batch"),
            value_warmup_updates=(0, "the worker waits for a version after each batch"),
            resume=(False, "no checkpoint has the environments: start anew, or go on without it"),
        )
    if settings.wandb_project and not wandb_installed():
        raise InvalidRequestError("wandb_project", "needs the package wandb: pip install wandb")


@command(LearnSettings, reads_variable=True)
def learn(settings: LearnSettings) -> None:
    """Train a policy with PPO on the fragments of rollout workers.

    Starts a session, publishes weights, and trains until the target return, a limit, or a signal;
    then ends the session.
    """
    check(settings)
    import_from_here()
    # Torch and gRPC are imported only when there is something to run.
    from breadbox.transport.heartbeat import from_environment
    from breadbox_learner.app import dry_run_text, run

    if settings.dry_run:
        click.echo(dry_run_text(settings))
        return
    settings.configure_logs()
    heartbeat = from_environment()
    with stop_on_signals() as stopped:

        def turn() -> bool:
            heartbeat.beat()
            return stopped.is_set()

        outcome = run(settings, turn, stopped)
    click.echo(f"ended: {outcome.value}")
