"""Limits of buffers for the kinds of learners that there are, by name."""

from collections.abc import Mapping
from typing import Final

UNLIMITED: Final = 2**40
"""The largest count that a limit may be."""
OFF_POLICY_ADVICE: Final = (
    "Learners that replay (DQN, SAC, a mirror) want limits under which versions and uses do not "
    "count: `breadbox serve --preset off-policy`, or `breadbox buffers update NAME --preset "
    "off-policy` while it runs."
)
"""What to do where a learner meets limits that are made for others."""

_Limits = Mapping[str, int | float | str]
_OFF_POLICY: Final[_Limits] = {
    "staleness_max": UNLIMITED,
    "uses_max": UNLIMITED,
    "capacity_chunks": 65_536,
    "schema": "ragged",
}
_EACH_ONCE: Final[_Limits] = {"staleness_max": UNLIMITED, "uses_max": 1, "full_policy": "block"}

PRESETS: Final[Mapping[str, _Limits]] = {
    "on-policy": {
        "staleness_max": 2,
        "uses_max": 1,
        "sampler": "uniform",
        "full_policy": "evict",
        "remover": "oldest_first",
    },
    "off-policy": _OFF_POLICY,
    "prioritised": {**_OFF_POLICY, "sampler": "prioritised", "priority_exponent": 0.6},
    "queue": {**_EACH_ONCE, "sampler": "oldest_first"},
    "stack": {**_EACH_ONCE, "sampler": "newest_first"},
}
"""Limits by their names, enums by their values; what one does not name keeps its default."""
