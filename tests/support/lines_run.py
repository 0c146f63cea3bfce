"""How much a call does, in lines of code: the same on every machine, however busy."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, those of what it calls included.

    Of one thread; what is written in C counts as nothing.
    """
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
