"""Which chunks a grant gets: one module per sampler, all behind `interface.Sampler`.

A new sampler is one new module and one new line in `SAMPLERS`.
"""

from breadbox_server.core.errors import InvalidArgumentError
from breadbox_server.core.samplers.freshest_first import FreshestFirstSampler
from breadbox_server.core.samplers.interface import Candidate, Sampler
from breadbox_server.core.samplers.oldest_first import OldestFirstSampler
from breadbox_server.core.samplers.uniform import UniformSampler

__all__ = ["SAMPLERS", "Candidate", "Sampler", "make_sampler"]

SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": UniformSampler,
    "oldest_first": OldestFirstSampler,
    "freshest_first": FreshestFirstSampler,
}


def make_sampler(name: str) -> Sampler:
    """Make an empty sampler of a name.

    Raises:
        InvalidArgumentError: No sampler has this name.
    """
    sampler_class = SAMPLERS.get(name)
    if sampler_class is None:
        raise InvalidArgumentError("sampler", f"must be one of {', '.join(SAMPLERS)}")
    return sampler_class()
