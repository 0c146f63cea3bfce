"""How far a mean may be off."""

import math
import statistics
from collections.abc import Sequence

STUDENT_T_95 = {
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14,
    19: 2.09, 29: 2.05,
}  # fmt: skip
"""Half the width of the middle 95% of Student's t, by degrees of freedom."""


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and half the width of its 95% interval; None of less than two values."""
    if not values:
        return {"mean": None, "half_width": None}
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "half_width": None}
    # The next smaller table entry: a wider interval, never a narrower one.
    freedom = max(each for each in STUDENT_T_95 if each <= len(values) - 1)
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "half_width": STUDENT_T_95[freedom] * spread}
