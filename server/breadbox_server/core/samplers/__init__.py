"""Which chunks a grant gets: one module per sampler, all behind `interface.Sampler`.

A new sampler is one new module and one new line in `SAMPLERS`.
"""

from collections.abc import Callable

from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.samplers.by_priority import HighestPrioritySampler, LowestPrioritySampler
from breadbox_server.core.samplers.freshest_first import FreshestFirstSampler
from breadbox_server.core.samplers.interface import Candidate, Sampler
from breadbox_server.core.samplers.newest_first import NewestFirstSampler
from breadbox_server.core.samplers.oldest_first import OldestFirstSampler
from breadbox_server.core.samplers.prioritised import PrioritisedSampler
from breadbox_server.core.samplers.uniform import UniformSampler

__all__ = ["OLDEST_FIRST", "SAMPLERS", "Candidate", "Sampler", "make_remover", "make_sampler"]

OLDEST_FIRST = "oldest_first"


def _prioritised(exponent: float) -> Sampler:
    # Without a look at the exponent: 0 to the power of 0 is 1.
    return PrioritisedSampler(
        lambda chunk: chunk.priority**exponent if chunk.priority > 0.0 else 0.0
    )


SAMPLERS: dict[str, Callable[[float], Sampler]] = {
    "uniform": lambda _: UniformSampler(),
    "oldest_first": lambda _: OldestFirstSampler(),
    "newest_first": lambda _: NewestFirstSampler(),
    "freshest_first": lambda _: FreshestFirstSampler(),
    "prioritised": _prioritised,
    "highest_priority": lambda _: HighestPrioritySampler(),
    "lowest_priority": lambda _: LowestPrioritySampler(),
}


def make_sampler(name: str, priority_exponent: float = 1.0, *, field: str = "sampler") -> Sampler:
    """Make an empty sampler of a name.

    Args:
        name: One of `SAMPLERS`.
        priority_exponent: Power to which a prioritised one raises priorities.
        field: The limit that says the name, for the error.

    Raises:
        InvalidArgumentError: No sampler has this name.
    """
    make = SAMPLERS.get(name)
    if make is None:
        raise InvalidArgumentError(field, f"must be one of {', '.join(SAMPLERS)}")
    return make(priority_exponent)


def make_remover(name: str, priority_exponent: float = 1.0) -> Sampler | None:
    """Make the sampler that says which chunks leave for room, or None if the oldest leave first.

    Raises:
        InvalidArgumentError: No sampler has this name.
    """
    if name == OLDEST_FIRST:
        return None
    if name == "uniform":
        # The one notes on each chunk where it stands, and a chunk has one such note.
        return PrioritisedSampler(lambda _: 1.0)
    return make_sampler(name, priority_exponent, field="remover")
