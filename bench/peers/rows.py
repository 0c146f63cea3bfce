"""What is measured of everybody: the same fragments, and the same steps of a user with them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One thing that users do.

    Of `kind` "append": a group of fragments goes in, and the call returns when the peer says that
    they are in. "batch": a group comes out, stacked into one array per field, and is then gone
    from the peer. "crowd": producers append one at a time, all at once, from several processes.
    """

    what: str
    kind: Literal["append", "batch", "crowd"]
    workload: str
    group: int = 1
    """Fragments of one call, or of one batch."""
    unit: Literal["fragments/s", "GB/s"] = "fragments/s"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.what}, `{self.workload}`"


CROWD_PROCESSES = 4
CROWD_THREADS = 16
"""In each of the processes, with a connection of its own where the peer has such."""

ROWS = (
    Row("append one at a time", "append", "vector"),
    Row("append groups of 256", "append", "vector", 256),
    Row("a batch of 32, stacked and given back", "batch", "vector", 32),
    Row(f"{CROWD_PROCESSES * CROWD_THREADS} producers, one at a time", "crowd", "vector"),
    Row("append groups of 32", "append", "atari", 32, "GB/s"),
    Row("a batch of 32, stacked and given back", "batch", "atari", 32, "GB/s"),
    Row("append groups of 4", "append", "vpt", 4, "GB/s"),
    Row("a batch of 4, stacked and given back", "batch", "vpt", 4, "GB/s"),
)
