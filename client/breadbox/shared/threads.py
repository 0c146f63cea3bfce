"""Threads for calls that may hang, as those of files do on a disk that does not answer."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

T = TypeVar("T")

IDLE_S: Final = 5.0
"""Seconds after which a thread without work ends."""


class HungError(Exception):
    """A call did not end in time; it has its thread until it does."""


class CallThreads:
    """At most `threads_max` threads of one owner. They never hold up the end of the process.

    A caller waits as long as `left_s`, asked again and again, says. A call that it left goes on if
    it has begun; else it is never made.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._thread_count = self._idle_count = 0

    async def run(self, function: Callable[[], T], left_s: Callable[[], float]) -> T:
        """Call a function, and await its end; HungError if `left_s` says 0 or less before that."""
        future = self._submit(function)
        waiting = asyncio.wrap_future(future)
        try:
            while not waiting.done() and (seconds := left_s()) > 0:
                await asyncio.wait((waiting,), timeout=min(seconds, threading.TIMEOUT_MAX))
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
            self._leave(future)
        raise HungError

    def call(self, function: Callable[[], T], left_s: Callable[[], float]) -> T:
        """Do the same, and block the calling thread."""
        future = self._submit(function)
        try:
            while not future.done() and (seconds := left_s()) > 0:
                wait((future,), min(seconds, threading.TIMEOUT_MAX))
            if future.done():
                return future.result()
        finally:
            self._leave(future)
        raise HungError

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            self._calls.append((future, function))
            if len(self._calls) > self._idle_count and self._thread_count < self._threads_max:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._thread_count += 1
            self._changed.notify()
        return future

    def _leave(self, future: Future[Any]) -> None:
        if not future.done() and future.cancel():
            with self._changed:
                self._calls = deque(each for each in self._calls if each[0] is not future)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - it is the caller's
                    future.set_exception(error)
            # Nothing here keeps memory of the caller's alive.
            del call, future, function

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle_count += 1
            self._changed.wait_for(lambda: self._calls, IDLE_S)
            self._idle_count -= 1
            if self._calls:
                return self._calls.popleft()
            self._thread_count -= 1
            return None
