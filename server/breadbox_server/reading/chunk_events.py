"""What happened to chunks lately, for callers that look: in memory, bounded, in no journal."""

import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from breadbox_server.core.model.events import ChunksEvicted, Event, FetchGranted, LeaseEnded
from breadbox_server.core.model.ids import BufferName
from breadbox_server.limits import CHUNK_EVENT_IDS_MAX, CHUNK_EVENTS_MAX

_NOTED: Final = frozenset({ChunksEvicted, LeaseEnded, FetchGranted})


class ChunkEvent(NamedTuple):
    """Something that happened to chunks of a buffer at one moment."""

    number: int
    at: float
    """Time of the server's clock."""
    kind: str
    chunk_ids: "array[int]"
    values: "array[int]"
    """One for each chunk: uses when evicted, else staleness. Empty if its session had ended."""


class ChunkEvents:
    """The latest events of the chunks of each buffer."""

    def __init__(self) -> None:
        # A later server's numbers are higher: there are fewer events than microseconds.
        self._number = time.time_ns() // 1000
        self._of: dict[BufferName, deque[ChunkEvent]] = {}
        self._id_counts: dict[BufferName, int] = {}

    def note(self, events: Iterable[Event], now: float) -> None:
        """Remember what happened in one step; what is alike becomes one event."""
        alike: dict[tuple[BufferName, str, bool], tuple[array[int], array[int]]] = {}
        for event in events:
            chunk_ids: Iterable[int]
            values: Iterable[int] = ()
            # Most are of appends.
            if type(event) not in _NOTED:
                continue
            if type(event) is ChunksEvicted:
                kind, chunk_ids, values = (
                    f"evicted_{event.reason.value}",
                    event.chunk_ids,
                    event.use_counts,
                )
            elif type(event) is LeaseEnded:
                kind, chunk_ids, values = event.end.value, event.chunk_ids, event.staleness
            elif isinstance(event, FetchGranted) and event.first_delivery:
                behind = {each.chunk_id: each.staleness for each in event.fragments}
                kind, chunk_ids, values = "granted", behind.keys(), behind.values()
            else:
                continue
            found = alike.setdefault((event.buffer, kind, bool(values)), (array("q"), array("q")))
            found[0].extend(chunk_ids)
            found[1].extend(values)
        for (buffer, kind, _), (chunk_ids, values) in alike.items():
            self._number += 1
            kept = self._of.setdefault(buffer, deque())
            kept.append(ChunkEvent(self._number, now, kind, chunk_ids, values))
            id_count = self._id_counts.get(buffer, 0) + len(chunk_ids)
            while len(kept) > CHUNK_EVENTS_MAX or (
                id_count > CHUNK_EVENT_IDS_MAX and len(kept) > 1
            ):
                id_count -= len(kept.popleft().chunk_ids)
            self._id_counts[buffer] = id_count

    def after(self, buffer: BufferName, number: int) -> Sequence[ChunkEvent]:
        """Return the events of a buffer after the one of this number."""
        return [each for each in self._of.get(buffer, ()) if each.number > number]

    def forget(self, buffer: BufferName) -> None:
        """Let go of a deleted buffer."""
        self._of.pop(buffer, None)
        self._id_counts.pop(buffer, None)
