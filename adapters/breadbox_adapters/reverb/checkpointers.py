"""Choose where a server keeps its tables: Reverb's `reverb.platform.checkpointers_lib`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DefaultCheckpointer:
    """A folder; a server that is restarted on it has the tables as they were."""

    path: str
    group: str = ""
