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
def signals_in_thread(
    handle: Callable[[int], None], numbers: Sequence[int] = STOPPING
) -> Iterator[None]:
    """Call *handle* for each signal in a thread of its own: it comes whatever holds up this one.

    For the main thread, before there are others: those made inside get no such signal either.
    """
    ended = threading.Event()

    def take() -> None:
        while True:
            number = signal.sigwait(numbers)
            if ended.is_set():
                return
            handle(number)

    # A thread that was there before may get one all the same: without a handler that is the end.
    handlers = {each: signal.signal(each, lambda number, _: handle(number)) for each in numbers}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    thread = threading.Thread(target=take, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.pthread_kill(thread.ident or 0, numbers[0])
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
