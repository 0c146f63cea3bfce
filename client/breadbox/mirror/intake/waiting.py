"""Find out why a mirror waits, from states of its buffer meanwhile. Pure."""

from collections.abc import Sequence

from breadbox.diagnosis import diagnose_arrivals
from breadbox.model.presets import OFF_POLICY_ADVICE
from breadbox.model.types import BufferDescription

_AT_ONCE = ("OUTAGE", "HOLD", "NO_SESSION")
"""Causes that one state shows."""
_REMEDIES = {
    "STALE": OFF_POLICY_ADVICE,
    "PRODUCERS_WAIT": "A mirror uses no chunks: let the buffer evict (full_policy), or let a "
    "learner fetch.",
}
"""Remedies for a mirror that differ from those for a learner that fetches."""
_WATCHED = ("NOTHING_ARRIVES", "WRONG_SESSION", *_REMEDIES)
"""Causes that only two states show."""


def why_nothing_comes(looks: Sequence[tuple[float, BufferDescription]]) -> str:
    """Return what keeps steps from a mirror, with the remedy, or empty if nothing known does.

    Args:
        looks: Times in seconds and states of the buffer, the oldest first; at least one.
    """
    (begun_at, before), (ended_at, after) = looks[0], looks[-1]
    watched_s = ended_at - begun_at
    # A mirror reads what arrives; causes that delay a fetch do not concern it.
    found = diagnose_arrivals(before, after, watched_s or 1.0)
    if found.cause not in (*_AT_ONCE, *(_WATCHED if watched_s > 0 else ())):
        return ""
    advice = _REMEDIES.get(found.cause) or " ".join(found.advice[:1])
    return f"{found.headline} {advice}"
