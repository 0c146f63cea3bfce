"""Run operations in background threads that mostly sleep, such as renewals of leases."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from breadbox.model.errors import ReplayBufferError
from breadbox.operations.operations import Effect, Operation, Sleep

END_S = 0.3
"""Seconds for which `BackgroundTask.end` waits for an operation that is running."""
AT_ONCE_MAX = 16
"""Most operations that run at a time, each for at most a few seconds."""


class BackgroundTask:
    """An operation that runs in a background thread until it returns, or `end` is called."""

    def __init__(self, runner: "BackgroundRunner", operation: Operation[None]) -> None:
        self._runner = runner
        self._operation = operation
        self._turn = threading.Lock()
        self.has_ended = False

    def end(self) -> None:
        """End the operation. If it is running, wait for it, for at most `END_S`."""
        self.has_ended = True
        self._runner.forget(self)
        if self._turn.acquire(timeout=END_S):
            self._operation.close()
            self._turn.release()

    def go_on(self, perform: Callable[[Effect], Any]) -> float | None:
        """Run the operation until it sleeps; return the seconds, or None if it has returned."""
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


class BackgroundRunner:
    """Run operations in the background, in daemon threads that the first one starts. Thread-safe.

    One thread waits until an operation is due, and starts another to wait before it runs that one,
    so that a slow server delays no other. At most `AT_ONCE_MAX` run at a time.
    """

    def __init__(
        self, perform: Callable[[Effect], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._perform = perform
        self._clock = clock
        self._wake = threading.Condition()
        self._due_at: dict[BackgroundTask, float] = {}
        self._wakes_at = -math.inf
        """Time at which the waiting thread wakes by itself; an operation due earlier wakes it."""
        self._threads: set[threading.Thread] = set()
        self._is_watched = False
        self._closed = False

    def start(self, operation: Operation[None]) -> BackgroundTask:
        """Run an operation in this thread until it sleeps, and then in the background."""
        task = BackgroundTask(self, operation)
        duration_s = task.go_on(self._perform)
        with self._wake:
            self._add(task, duration_s)
            self._watch()
        return task

    def forget(self, task: BackgroundTask) -> None:
        """Drop a task: its operation does not run again."""
        with self._wake:
            self._due_at.pop(task, None)

    def close(self) -> None:
        """End sleeping operations. Idempotent; waits for the threads."""
        with self._wake:
            self._closed = True
            self._due_at.clear()
            self._wake.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    def _add(self, task: BackgroundTask, duration_s: float | None) -> None:
        """Note the sleep of an operation, unless it has returned; the lock is held."""
        if duration_s is None or self._closed or task.has_ended:
            return
        due_at = self._due_at[task] = self._clock() + duration_s
        if due_at < self._wakes_at:
            self._wake.notify()

    def _watch(self) -> None:
        """Start a thread to wait for the next operation, unless too many are busy."""
        if self._due_at and not self._is_watched and len(self._threads) < AT_ONCE_MAX:
            thread = threading.Thread(target=self._run, name="breadbox-background", daemon=True)
            thread.start()
            self._threads.add(thread)
            self._is_watched = True

    def _run(self) -> None:
        try:
            while (task := self._next_due()) is not None:
                duration_s = task.go_on(self._perform)
                with self._wake:
                    self._add(task, duration_s)
                    if self._is_watched:
                        return
                    self._is_watched = True
        finally:
            with self._wake:
                self._threads.discard(threading.current_thread())

    def _next_due(self) -> BackgroundTask | None:
        with self._wake:
            while not self._closed:
                task = min(self._due_at, key=self._due_at.__getitem__, default=None)
                wait_s = math.inf if task is None else self._due_at[task] - self._clock()
                if task is not None and wait_s <= 0:
                    del self._due_at[task]
                    self._is_watched = False
                    self._watch()
                    return task
                del task  # So that this thread does not keep it alive while it waits.
                self._wakes_at = self._clock() + wait_s
                self._wake.wait(None if wait_s == math.inf else wait_s)
                self._wakes_at = -math.inf
            return None
