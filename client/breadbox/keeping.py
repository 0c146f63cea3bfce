"""Operations that go on in the background and sleep most of the time, such as renewals of leases.

In tasks that is `breadbox.aio.interpreter`'s.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from breadbox.errors import ReplayBufferError
from breadbox.operations import Effect, Operation, Sleep

END_S = 0.3
"""How long the end of an operation waits for what it is doing."""
AT_ONCE_MAX = 16
"""Operations that do something at a time, each for at most a few seconds."""


class Kept:
    """An operation that goes on in the background until it is over, or ended."""

    def __init__(self, keeper: "Keeper", operation: Operation[None]) -> None:
        """Made by `Keeper.keep`."""
        self._keeper = keeper
        self._operation = operation
        self._turn = threading.Lock()
        self.has_ended = False
        """Whether `end` was called."""

    def end(self) -> None:
        """Let it do nothing more. What it is doing is waited for, unless that hangs."""
        self.has_ended = True
        self._keeper.forget(self)
        if self._turn.acquire(timeout=END_S):
            self._operation.close()
            self._turn.release()

    def go_on(self, perform: Callable[[Effect], Any]) -> float | None:
        """Run it until it sleeps; returns for how many seconds, None when it is over."""
        with self._turn:
            if self.has_ended:
                return None
            try:
                effect = next(self._operation)
                while not isinstance(effect, Sleep):
                    try:
                        result = perform(effect)
                    except ReplayBufferError as error:
                        effect = self._operation.throw(error)
                    else:
                        effect = self._operation.send(result)
            except StopIteration:
                return None
            return effect.duration_s


class Keeper:
    """Runs operations from daemon threads, started with the first of them. Thread-safe.

    One thread waits for the next operation to be due. Before it goes on with that one it leaves
    another in its place, so that a server that is slow to answer holds up no other operation; at
    most `AT_ONCE_MAX` do something at a time.
    """

    def __init__(
        self, perform: Callable[[Effect], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._perform = perform
        self._clock = clock
        self._wake = threading.Condition()
        self._due_at: dict[Kept, float] = {}
        """Those that sleep, and until when."""
        self._wakes_at = -math.inf
        """When the thread that waits looks again by itself; whoever is due earlier wakes it."""
        self._threads: set[threading.Thread] = set()
        self._is_watched = False
        """Whether a thread waits for the next one to be due, or is about to."""
        self._closed = False

    def keep(self, operation: Operation[None]) -> Kept:
        """Run an operation, here until it sleeps, and then in the background."""
        kept = Kept(self, operation)
        duration_s = kept.go_on(self._perform)
        with self._wake:
            self._add(kept, duration_s)
            self._watch()
        return kept

    def forget(self, kept: Kept) -> None:
        """Wake an operation no more."""
        with self._wake:
            self._due_at.pop(kept, None)

    def close(self) -> None:
        """Let operations that sleep do nothing more. Idempotent; waits for the threads."""
        with self._wake:
            self._closed = True
            self._due_at.clear()
            self._wake.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    def _add(self, kept: Kept, duration_s: float | None) -> None:
        """Let an operation sleep, unless it is over; the lock is held."""
        if duration_s is None or self._closed or kept.has_ended:
            return
        due_at = self._due_at[kept] = self._clock() + duration_s
        if due_at < self._wakes_at:
            self._wake.notify()

    def _watch(self) -> None:
        """See to it that a thread waits for what is due, unless so many are busy already."""
        if self._due_at and not self._is_watched and len(self._threads) < AT_ONCE_MAX:
            thread = threading.Thread(target=self._run, name="breadbox-keeper", daemon=True)
            thread.start()
            self._threads.add(thread)
            self._is_watched = True

    def _run(self) -> None:
        try:
            while (kept := self._next_due()) is not None:
                duration_s = kept.go_on(self._perform)
                with self._wake:
                    self._add(kept, duration_s)
                    if self._is_watched:
                        return
                    self._is_watched = True
        finally:
            with self._wake:
                self._threads.discard(threading.current_thread())

    def _next_due(self) -> Kept | None:
        """Wait for the next one to be due; None when the keeper is closed."""
        with self._wake:
            while not self._closed:
                kept = min(self._due_at, key=self._due_at.__getitem__, default=None)
                wait_s = math.inf if kept is None else self._due_at[kept] - self._clock()
                if kept is not None and wait_s <= 0:
                    del self._due_at[kept]
                    self._is_watched = False
                    self._watch()
                    return kept
                del kept  # So that it is not held meanwhile.
                self._wakes_at = self._clock() + wait_s
                self._wake.wait(None if wait_s == math.inf else wait_s)
                self._wakes_at = -math.inf
            return None
