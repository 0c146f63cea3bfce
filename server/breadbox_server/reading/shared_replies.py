"""What readers are told who stand at the same place: it is the same, so it is made once.

Of a hundred who follow a buffer, all wait for the same chunk. What comes is looked for in the
core, its payloads are gathered and the reply is encoded for the first of them, and taken by all.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from breadbox_server.core.model.inputs import Payload
from breadbox_server.core.rules.reading import ChunksRead
from breadbox_server.limits import SHARED_REPLY_BYTES_MAX
from breadbox_server.reading.read_leases import ReadLease


@dataclass(slots=True, eq=False)
class Reply:
    """What a reader gets, but for its lease."""

    bodies: list[bytes]
    """Of each fragment its payload, empty where it does not ride along."""
    encoded: bytes = b""
    """The message, as far as it is the same for all; empty: nobody has encoded it yet."""

    @property
    def is_whole(self) -> bool:
        """Whether all payloads ride along, so that nothing has to stay readable for it."""
        return all(self.bodies)

    @property
    def is_shared(self) -> bool:
        """Whether it is small enough to be kept for others."""
        return sum(map(len, self.bodies)) <= SHARED_REPLY_BYTES_MAX


@dataclass(slots=True, eq=False)
class Passage:
    """What comes after a place."""

    found: ChunksRead
    payloads: list[Payload] = field(init=False)
    """Of its fragments."""
    replies: dict[int, Reply] = field(default_factory=dict)
    """By the bytes that readers let ride along; those that needed no trip to the store."""

    def __post_init__(self) -> None:
        """List the payloads."""
        self.payloads = [each.fragment.payload for each in self.found.fragments]


class Reading(NamedTuple):
    """What one reader is told."""

    found: ChunksRead
    reply: Reply
    lease: ReadLease | None
    """On the payloads; None where there are none, or all ride along."""
