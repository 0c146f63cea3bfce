"""Which of a learner's processes this is. Without torch, so that it can be asked first."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from breadbox.model.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Membership:
    """This process among its peers."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process talks for all: session, versions, checkpoints, records."""
        return self.rank == 0


def membership_from_environment(environment: Mapping[str, str] = os.environ) -> Membership:
    """Read RANK and WORLD_SIZE as torchrun sets them; without them the process is alone.

    Raises:
        InvalidRequestError: They are no numbers, or contradict each other.
    """
    try:
        membership = Membership(
            int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        )
    except ValueError as error:
        raise InvalidRequestError(
            "RANK and WORLD_SIZE", f"must be whole numbers: {error}"
        ) from error
    if not 0 <= membership.rank < membership.world_size:
        raise InvalidRequestError(
            "RANK",
            f"must be from 0 to WORLD_SIZE - 1, got {membership.rank} of {membership.world_size}",
        )
    return membership
