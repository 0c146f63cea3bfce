"""What is measured of everybody: the same fragments, and the same steps of a user with them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One thing that users do.

    Of `kind` "append": a group of fragments goes in, and the call returns when the peer says that
    they are in. "stream": fragments go one by one to a writer that sends in the background, and the
    peer has said of all that they are in at the end. "batch": a group comes out, stacked into one
    array per field, and is then gone from the peer. "crowd": producers append one at a time, all at
    once, from several processes; "streams": they have such writers.
    """

    what: str
    """What a user does."""
    kind: Literal["append", "stream", "batch", "crowd", "streams"]
    workload: str
    group: int = 1
    """Fragments of one call, or of one batch."""
    unit: Literal["fragments/s", "GB/s"] = "fragments/s"
    in_readme: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.what}, `{self.workload}`"


CROWD_PROCESSES = 4
CROWD_THREADS = 16
"""In each of the processes, with a connection of its own where the peer has such."""

_CROWD = f"{CROWD_PROCESSES * CROWD_THREADS} producers"
ROWS = (
    Row("a producer sends one fragment at a time", "append", "vector"),
    Row("a producer sends groups of 256", "append", "vector", 256, in_readme=False),
    Row("a producer hands one at a time to a writer in the background", "stream", "vector", 256),
    Row("a learner takes a batch of 32", "batch", "vector", 32),
    Row(f"{_CROWD} send one fragment at a time", "crowd", "vector"),
    Row(f"{_CROWD} hand one at a time to such writers", "streams", "vector", in_readme=False),
    Row("a producer sends groups of 32", "append", "atari", 32, "GB/s"),
    Row("a learner takes a batch of 32", "batch", "atari", 32, "GB/s"),
    Row("a producer sends groups of 4", "append", "vpt", 4, "GB/s"),
    Row("a learner takes a batch of 4", "batch", "vpt", 4, "GB/s"),
)
