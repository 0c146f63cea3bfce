"""Presets: limits of buffers by the kind of learner."""

from collections.abc import Mapping
from typing import Final, Literal

UNLIMITED: Final = 2**40
"""The largest value of a limit that counts."""
STORE_FULL_ADVICE: Final = (
    "Give the store more room, or the buffers less: --capacity-bytes of `breadbox serve`, or "
    "`breadbox buffers update`."
)
"""Advice for a payload store without room."""
OFF_POLICY_ADVICE: Final = (
    "Learners that replay (DQN, SAC, a mirror) need limits under which versions and uses do not "
    "count: `breadbox serve --preset off-policy`, or `breadbox buffers update NAME --preset "
    "off-policy` while it runs."
)
"""Advice for a replaying learner on a buffer with on-policy limits."""

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
    "groups": {
        "assembly": "groups",
        "sampler": "oldest_first",
        "uses_max": 1,
        "schema": "ragged",
        # Tickets, with groups_per_version, set the mean staleness, and the bound its tail.
        "lead_versions": 2,
        "staleness_max": 8,
    },
}
"""Limits by name, enums by value; limits that a preset leaves out keep their default."""

Preset = Literal[*PRESETS]  # type: ignore[valid-type]  # to mypy: any
"""Name of a preset."""
