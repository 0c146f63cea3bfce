"""Limit the bytes written through the gateway and not announced yet, by caller (G5).

A caller's limit counts declared bytes, so it begins no write that it may not finish. The
total limit counts received bytes and one part more: declaring much takes nothing from others.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from breadbox.model.types import PayloadReference
from breadbox_server import limits
from breadbox_server.base.errors import GatewayFullError
from breadbox_server.core.model.ids import PayloadId


@dataclass(slots=True, eq=False)
class _Held:
    expires_at: float
    caller: str
    reference: PayloadReference
    give_up: Callable[[PayloadReference], None]
    """Ends the write, or deletes the stored payload."""
    arrived_bytes: int = 0
    counted_bytes: int = 0
    """The bytes among these that the total limit counts."""


class Unannounced:
    """Limit unannounced bytes by caller, and `limits.UNANNOUNCED_CALLERS` times that in total."""

    def __init__(self, bytes_max: int, *, keep_s: float) -> None:
        self.bytes_max = bytes_max
        self._keep_s = keep_s
        # Ordered, as below: the first of a plain one is behind the places of all that left.
        self._held: OrderedDict[PayloadId, _Held] = OrderedDict()
        """In order of expiry."""
        self._of: dict[str, dict[PayloadId, _Held]] = {}
        self._bytes: Counter[str] = Counter()
        """Declared bytes by caller."""
        self._arrived: Counter[str] = Counter()
        """Received bytes by caller."""
        self.total_bytes = 0
        """Received bytes of all callers."""

    def bytes_of(self, caller: str) -> int:
        """Return the bytes that a caller has written, or is writing."""
        return self._bytes[caller]

    def add(
        self,
        caller: str,
        references: Sequence[PayloadReference],
        now: float,
        give_up: Callable[[PayloadReference], None],
    ) -> None:
        """Count a write that begins; `give_up` is called with payloads that must make room."""
        self._forget_overdue(now)
        wanted = _written_bytes(references)
        if self._bytes[caller] + wanted > self.bytes_max:
            raise GatewayFullError(
                f"{self._bytes[caller]} bytes are written with this token and not announced; "
                f"{self.bytes_max} may be"
            )
        self._bytes[caller] += wanted
        of_caller = self._of.setdefault(caller, OrderedDict())
        for each in references:
            held = _Held(now + self._keep_s, caller, each, give_up)
            self._held[each.payload_id] = of_caller[each.payload_id] = held

    def arrive(self, payload_id: PayloadId, size_bytes: int) -> None:
        """Count bytes to be received, or raise GatewayFullError if no caller holds more."""
        held = self._held.get(payload_id)
        if held is None:
            raise GatewayFullError("others needed the room of this payload")
        arrived_bytes = held.arrived_bytes + size_bytes
        more = max(arrived_bytes, limits.PAYLOAD_BYTES_COUNTED_MIN) - held.counted_bytes
        bytes_max = self.bytes_max * limits.UNANNOUNCED_CALLERS
        while self.total_bytes + more > bytes_max:
            self._make_room(held.caller, more)
        held.arrived_bytes = arrived_bytes
        held.counted_bytes += more
        self._arrived[held.caller] += more
        self.total_bytes += more

    def keep(
        self, references: Sequence[PayloadReference], give_up: Callable[[PayloadReference], None]
    ) -> None:
        """Record that payloads are stored completely, and how to delete them from now on."""
        for each in references:
            held = self._held.get(each.payload_id)
            if held is None:
                raise GatewayFullError("others needed the room of this payload")
            held.give_up = give_up

    def of(self, caller: str, payload_id: PayloadId) -> PayloadReference | None:
        """Return a payload that this caller wrote and has not announced, or None."""
        held = self._of.get(caller, {}).get(payload_id)
        return None if held is None else held.reference

    def is_anothers(self, caller: str, payload_id: PayloadId) -> bool:
        """Return True if another caller wrote this payload and has not announced it."""
        return payload_id in self._held and self.of(caller, payload_id) is None

    def forget(self, payload_id: PayloadId) -> None:
        """Stop counting a payload, because it is announced or deleted."""
        held = self._held.pop(payload_id, None)
        if held is None:
            return
        caller = held.caller
        self._bytes[caller] -= _written_bytes([held.reference])
        self._arrived[caller] -= held.counted_bytes
        self.total_bytes -= held.counted_bytes
        del self._of[caller][payload_id]
        if not self._of[caller]:
            del self._of[caller], self._bytes[caller], self._arrived[caller]

    def _make_room(self, caller: str, more: int) -> None:
        """Discard the oldest payloads of the largest caller; raise if this caller would be that."""
        ((largest, arrived_bytes),) = self._arrived.most_common(1)
        if self._arrived[caller] + more >= arrived_bytes:
            raise GatewayFullError(f"{self.total_bytes} bytes are written and not announced")
        oldest = next(each for each in self._of[largest].values() if each.counted_bytes)
        self.forget(oldest.reference.payload_id)
        oldest.give_up(oldest.reference)

    def _forget_overdue(self, now: float) -> None:
        while self._held and next(iter(self._held.values())).expires_at <= now:
            self.forget(next(iter(self._held)))


def _written_bytes(references: Sequence[PayloadReference]) -> int:
    # A small payload costs the store more than itself.
    return sum(max(each.size_bytes, limits.PAYLOAD_BYTES_COUNTED_MIN) for each in references)
