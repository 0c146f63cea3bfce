"""How much a call does, in lines of code: the same on every machine, however busy."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, those of what it calls included.

    Of one thread; what is written in C counts as nothing. Garbage is not collected meanwhile, for
    others may have callbacks for that.
    """
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    was_collecting = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if was_collecting:
            gc.enable()
    return count
