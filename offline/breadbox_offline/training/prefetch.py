"""`Prefetcher`: makes items ahead of time, in a thread, in order, a bounded number of them."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item], Iterator[Item]):
    """Iterate over `source` in a thread, `depth` items ahead; on exit, after its item, it ends."""

    def __init__(self, source: Iterable[Item], *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._source = source
        self._depth = depth
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_finished = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_finished or self._is_closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration

    def close(self) -> None:
        """Stop working ahead and wait for the thread; items not taken are dropped."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001 - the consumer raises it again
            self._error = error
        finally:
            with self._changed:
                self._is_finished = True
                self._changed.notify_all()

    def _put(self, item: Item) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self._is_closed)
            if self._is_closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True
