"""`breadbox rollout` and `breadbox generate`."""

from breadbox.cli.base import import_from_here
from breadbox.cli.command import command
from breadbox_rollout.settings import GenerateSettings, RolloutSettings


@command(RolloutSettings, reads_variable=True)
def rollout(settings: RolloutSettings) -> None:
    """Run a rollout worker: step environments with the current model and send fragments.

    It may be started before server and learner: it waits for both, and logs that. SIGTERM and
    Ctrl-C deliver finished fragments, then end; a second signal ends immediately.
    """
    import_from_here()
    # Torch and Gymnasium are imported only when there is something to run.
    from breadbox_rollout.app import run

    run(settings)


@command(GenerateSettings, reads_variable=True)
def generate(settings: GenerateSettings) -> None:
    """Play whole episodes and write them to files, with a line each in manifest.jsonl.

    Ctrl-C ends early and keeps finished episodes; the exit code is then 130.
    """
    settings.configure_logs()
    import_from_here()
    from breadbox_rollout.acting.generator import generate_episodes

    generate_episodes(settings)
