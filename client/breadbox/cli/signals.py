"""Handle SIGTERM and Ctrl-C in long-running commands."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


def end_at_once(number: int) -> None:
    """End this process as the signal would have without a handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextmanager
def stop_on_signals(
    stop: Callable[[int], None] = lambda number: None,
    numbers: Sequence[int] = STOPPING,
    *,
    again: Callable[[int], None] = end_at_once,
) -> Iterator[threading.Event]:
    """Call *stop* on the first signal, *again* on later ones; yield the event. Main thread only."""
    came = threading.Event()

    def handle(number: int, _: object) -> None:
        is_first = not came.is_set()
        came.set()
        (stop if is_first else again)(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
