"""`Prefetcher`: produce items in a thread, ahead of their use."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Self, TypeVar

from breadbox.transport.prefetch import prefetched

Item = TypeVar("Item")


class Prefetcher(Iterator[Item]):
    """Iterate over `source` in a thread, `depth` items ahead; on exit the thread ends."""

    def __init__(self, source: Iterable[Item], *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        items, self._end = iter(source), object()
        self._ahead = prefetched(
            itertools.repeat(self._end), partial(next, items), at_once=1, depth=depth, in_order=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Item:
        item: Any = next(self._ahead)
        if item is self._end:
            self.close()
            raise StopIteration
        found: Item = item
        return found

    def close(self) -> None:
        """End the thread after its item; items not taken are dropped."""
        self._ahead.close()
