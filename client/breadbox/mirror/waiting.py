"""Why a mirror waits, from what its buffer was like while it did. Pure."""

from collections.abc import Sequence

from breadbox.diagnosis import diagnose_arrivals
from breadbox.presets import OFF_POLICY_ADVICE
from breadbox.types import BufferDescription

_AT_ONCE = ("OUTAGE", "HOLD", "NO_SESSION")
"""Causes that one look tells."""
_REMEDIES = {
    "STALE": OFF_POLICY_ADVICE,
    "PRODUCERS_WAIT": "A mirror uses nothing up: let the buffer evict (full_policy), or have "
    "somebody fetch.",
}
"""What a mirror's owner can do, where that is not what helps one who fetches."""
_WATCHED = ("NOTHING_ARRIVES", "WRONG_SESSION", *_REMEDIES)
"""Causes that it takes two looks to tell."""


def why_nothing_comes(looks: Sequence[tuple[float, BufferDescription]]) -> str:
    """What keeps steps from a mirror, and what to do about it; empty: nothing that is known.

    Args:
        looks: What the buffer was like, and when in seconds, the oldest first; one at least.
    """
    (begun_at, before), (ended_at, after) = looks[0], looks[-1]
    watched_s = ended_at - begun_at
    # It takes what comes, without a lease that a fetch would wait for.
    told = diagnose_arrivals(before, after, watched_s or 1.0)
    if told.cause not in (*_AT_ONCE, *(_WATCHED if watched_s > 0 else ())):
        return ""
    advice = _REMEDIES.get(told.cause) or " ".join(told.advice[:1])
    return f"{told.headline} {advice}"
