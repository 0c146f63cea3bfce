"""How much longer an operation takes among four times as many things."""

import sys
import time
from collections.abc import Callable
from math import inf

import pytest

GROWTH_MAX = 9.0
"""Times as long as for a quarter: 4 where each takes the same, and 16 with a look at all others."""

ROUNDS_MAX = 3
"""Other work of the machine may make one seem to grow."""

marked = pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer takes most of the time")
"""For tests that compare processor time."""


def check(
    prepare: Callable[[int], Callable[[], object]], count: int, growth_max: float = GROWTH_MAX
) -> None:
    """Fail if what *prepare* makes of a number of things takes each longer beside more of them.

    `growth_max` is less where it does the same beside however many.
    """

    def taken_s(things: int) -> float:
        act = prepare(things)
        began_at = time.process_time()
        act()
        return time.process_time() - began_at

    few_s = all_s = inf
    for _ in range(ROUNDS_MAX):
        few_s = min(few_s, *(taken_s(count // 4) for _ in range(3)))
        all_s = min(all_s, *(taken_s(count) for _ in range(3)))
        if all_s < few_s * growth_max:
            return
    pytest.fail(f"{few_s * 1e3:.1f} ms among {count // 4}, {all_s * 1e3:.1f} ms among {count}")
