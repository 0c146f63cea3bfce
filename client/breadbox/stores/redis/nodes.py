"""Several Redis nodes at once: a thread for each, and plans made one at a time."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from breadbox.stores.common.base import PayloadReceiver, Segment

Node = TypeVar("Node")
Part = TypeVar("Part")


def on_all_nodes(parts: Mapping[Node, Part], act: Callable[[Node, Part], None]) -> None:
    """Do each node's part in a thread of its own, the first one's in this.

    Returns when all threads have ended. Threads last for one call: they would not survive a fork,
    and cost little beside a round trip.

    Raises:
        Exception: What `act` raised; where it did for several nodes, the first of them.
    """
    if not parts:
        return
    (first, *others) = parts.items()
    if not others:
        act(*first)
        return
    with ThreadPoolExecutor(len(others), thread_name_prefix="breadbox-node") as threads:
        running = [threads.submit(act, *each) for each in others]
        act(*first)
    for each in running:
        each.result()


class InTurns:
    """A `PayloadReceiver` that plans one payload at a time, while bytes arrive from many nodes.

    What a receiver finds out with the first payload, such as the shape of a batch, holds for all.
    """

    def __init__(self, receiver: PayloadReceiver) -> None:
        """Plan for `receiver`."""
        self._receiver = receiver
        self._turn = Lock()
        self.wants_whole: Any = receiver.wants_whole
        self.head_bytes = receiver.head_bytes
        self.arrived = receiver.arrived

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        """See PayloadReceiver."""
        with self._turn:
            return self._receiver.segments(position, head)
