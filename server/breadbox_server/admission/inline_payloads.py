"""Small payloads that came lately, in memory, so that who gets them soon costs the store no trip.

A copy: the store has them all, and what is not here is read there. A store that dies may lose what
it took last and had not written out; what of it is here is written again.
"""

from collections import OrderedDict
from collections.abc import Iterable

from breadbox_server.core.model.ids import PayloadId


class RecentPayloads:
    """The latest payloads that rode along, by id, until they are forgotten or room is needed.

    Args:
        bytes_max: Bytes of payloads kept; beyond, those go that came first.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bodies: OrderedDict[PayloadId, bytes] = OrderedDict()
        self.size_bytes = 0

    def add(self, payload_id: PayloadId, body: bytes) -> None:
        """Keep a payload, under an id that is not here yet."""
        self._bodies[payload_id] = body
        self.size_bytes += len(body)
        while self.size_bytes > self._bytes_max:
            self.size_bytes -= len(self._bodies.popitem(last=False)[1])

    def get(self, payload_id: PayloadId) -> bytes:
        """The payload; empty where it is not here."""
        return self._bodies.get(payload_id, b"")

    def forget(self, payload_ids: Iterable[PayloadId]) -> None:
        """Let go of payloads; those that are not here are fine."""
        if self._bodies:
            for payload_id in payload_ids:
                self.size_bytes -= len(self._bodies.pop(payload_id, b""))
