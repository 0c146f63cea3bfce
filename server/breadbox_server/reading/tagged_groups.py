"""Counts of delivered and dropped groups, by a number of their members (`tag`) and by length.

In memory, bounded, and not journalled. A group counts once it is delivered, or dropped unused.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter
from typing import Final

from breadbox.v1 import buffer_pb2
from breadbox_server.core.model.events import Event, StepsEnd, StepsEnded
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.limits import TAGS_MAX
from breadbox_server.metrics.episodes import OTHER

LENGTHS: Final = (0, 256, 1024, 4096, 16_384, 65_536)
"""Where the intervals of lengths begin; the length of a group is that of its longest member."""
_GROUP: Final = attrgetter("worker_id")

_Rows = dict[tuple[str, int], Counter[StepsEnd]]


class TaggedGroups:
    """The counts of each buffer."""

    def __init__(self, tag_of: Callable[[BufferName], str]) -> None:
        """Count by the number that `tag_of` names, or not at all where it returns nothing."""
        self._tag_of = tag_of
        self._of: dict[BufferName, tuple[str, _Rows]] = {}

    def note(self, events: Iterable[Event]) -> None:
        """Count the groups of fragments that came to an end."""
        for event in events:
            if type(event) is StepsEnded and (name := self._tag_of(event.buffer)):
                rows = self._rows(event.buffer, name)
                for _, members in groupby(event.fragments, _GROUP):
                    counts = rows.setdefault(_kind(rows, name, list(members)), Counter())
                    if event.end is StepsEnd.RETURNED:
                        counts[StepsEnd.TRAINED] -= 1
                    else:
                        counts[event.end] += 1

    def messages(self, buffer: BufferName) -> list[buffer_pb2.TaggedGroups]:
        """Return the counts of a buffer, by tag and length."""
        return [
            buffer_pb2.TaggedGroups(
                tag=tag,
                length_min=length_min,
                delivered_count=counts[StepsEnd.TRAINED],
                dropped_count=counts[StepsEnd.EVICTED],
            )
            for (tag, length_min), counts in sorted(
                self._rows(buffer, self._tag_of(buffer)).items()
            )
        ]

    def forget(self, buffer: BufferName) -> None:
        """Let go of a deleted buffer."""
        self._of.pop(buffer, None)

    def _rows(self, buffer: BufferName, name: str) -> _Rows:
        """Return the rows of a buffer, new ones if they are by another number from now on."""
        if not name:
            self._of.pop(buffer, None)
            return {}
        if buffer not in self._of or self._of[buffer][0] != name:
            self._of[buffer] = name, {}
        return self._of[buffer][1]


def _kind(rows: _Rows, name: str, members: list[Fragment]) -> tuple[str, int]:
    """Return the tag of a group, or `OTHER` beyond `TAGS_MAX`, and where its length begins."""
    length = max([each.step_count for each in members])
    tag = str(json.loads(members[0].numbers or "{}").get(name, ""))
    tag = tag if tag.isprintable() else repr(tag)
    tags = {known for known, _ in rows} - {OTHER}
    if tag not in tags and len(tags) >= TAGS_MAX:
        tag = OTHER
    return tag, LENGTHS[bisect_right(LENGTHS, length) - 1]
