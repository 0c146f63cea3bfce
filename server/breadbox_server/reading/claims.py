"""Members that verifiers have claimed, each under a read lease: when it ends, others may (B34).

In memory, as read leases are: attaching a part twice is a duplicate, so a claim that is lost costs
work, and nothing else.
"""

from breadbox_server.core.model.ids import BufferName, LeaseId, WorkerId
from breadbox_server.reading.read_leases import ReadLease

Key = tuple[WorkerId, int]


class Claims:
    """The members of each live claim."""

    def __init__(self) -> None:
        self._held: dict[BufferName, set[Key]] = {}
        self._keys_of: dict[LeaseId, frozenset[Key]] = {}

    def is_held(self, buffer: BufferName, key: Key) -> bool:
        """Return whether a member is claimed."""
        return key in self._held.get(buffer, ())

    def count(self, buffer: BufferName) -> int:
        """Return how many members of a buffer are claimed."""
        return len(self._held.get(buffer, ()))

    def add(self, lease: ReadLease, keys: frozenset[Key]) -> None:
        """Claim members, which nobody has claimed, for as long as a lease lives."""
        self._keys_of[lease.lease_id] = keys
        self._held.setdefault(lease.buffer, set()).update(keys)

    def end(self, lease: ReadLease) -> bool:
        """End the claim of a lease that has ended; return whether it had one."""
        keys = self._keys_of.pop(lease.lease_id, None)
        if keys is None:
            return False
        held = self._held[lease.buffer]
        held -= keys
        if not held:
            del self._held[lease.buffer]
        return True
