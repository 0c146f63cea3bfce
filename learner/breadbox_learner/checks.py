"""What can be seen to be wrong with settings before anything is imported, built or waited for."""

from breadbox.model.errors import InvalidRequestError
from breadbox_learner.ranks.membership import membership_from_environment
from breadbox_learner.runs.progress import wandb_installed
from breadbox_learner.runs.run_folder import RunFolder
from breadbox_learner.settings import LearnSettings


def check(settings: LearnSettings) -> None:
    """Refuse what can be seen to be wrong without torch, whose import takes seconds.

    Raises:
        InvalidRequestError: Shares would be unequal, a package is missing, or `run_dir` holds a run
            that nobody said what to do with.
        RunFolderError: `run_dir` cannot be looked into.
    """
    membership = membership_from_environment()
    if membership.is_main:
        RunFolder.check(settings)
    if settings.fragments_per_batch % membership.world_size:
        raise InvalidRequestError(
            "fragments_per_batch",
            f"must divide by the number of ranks, got {settings.fragments_per_batch} "
            f"for {membership.world_size}",
        )
    if settings.wandb_project and not wandb_installed():
        raise InvalidRequestError("wandb_project", "needs the package wandb: pip install wandb")
