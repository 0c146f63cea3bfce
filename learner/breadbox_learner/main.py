"""`breadbox learn`: train the reference PPO on a buffer."""

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from breadbox.cli import logs
from breadbox.cli.modules import import_from_here
from breadbox.cli.signals import stop_on_signals
from breadbox_learner.options import setting_options
from breadbox_learner.settings import LearnSettings, SettingsError, read_settings

WRONG_INPUT = 2


@click.command()
@click.option(
    "--config",
    envvar="BREADBOX_CONFIG",
    show_envvar=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with any of these settings, by name; flags and environment win over it.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check everything but the server, print the settings, and end."
)
@setting_options(LearnSettings)
@logs.log_options
@click.pass_context
def learn(
    context: click.Context,
    /,
    config: Path | None,
    dry_run: bool,
    log_level: str,
    log_format: str,
    **values: Any,
) -> None:
    """Train a policy with PPO on what rollout workers put into a buffer.

    Starts a session, publishes weights, and trains until the target return, a limit, or a signal;
    then ends the session.
    """
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    overrides = {
        name: value for name, value in values.items() if context.get_parameter_source(name) in given
    }
    # Torch and gRPC are imported only when there is something to run.
    from breadbox.errors import ReplayBufferError
    from breadbox.heartbeat import from_environment

    try:
        settings = read_settings(config, overrides)
        import_from_here()
        from breadbox_learner.app import dry_run_text, run

        if dry_run:
            click.echo(dry_run_text(settings))
            return
        logs.configure(log_level, log_format)
        heartbeat = from_environment()
        with stop_on_signals() as stopped:

            def turn() -> bool:
                heartbeat.beat()
                return stopped.is_set()

            outcome = run(settings, turn)
    except (SettingsError, ReplayBufferError) as error:
        click.echo(f"breadbox learn: {error}", err=True)
        sys.exit(WRONG_INPUT)
    click.echo(f"ended: {outcome.value}")


if __name__ == "__main__":
    learn()
