"""Answers that are made and not taken: whose, and how many bytes.

gRPC keeps an answer until its caller takes it, and asks nobody how much that is. One alone is
given however large it is, another one beside it only within the bounds.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from breadbox_server.limits import INLINE_REPLY_BYTES_MAX, UNTAKEN_BYTES_OF

PATIENCE_S: Final = 1.0
"""Seconds in which the largest holder may take what it has before it makes room for others."""

Key = tuple[str, str]
"""What is bounded, and which of its kind: see `UNTAKEN_BYTES_OF`."""
_ALL: Final[Key] = ("all", "")


class Held:
    """One answer that is not taken.

    Args:
        untaken: Where it counts.
        peer: Its connection; empty: it cannot be told from others.
        token: The name of the caller's; empty: it has none.
        size_bytes: Its size.
        since: When it was made.
    """

    __slots__ = ("_untaken", "keys", "peer", "since", "size_bytes")

    def __init__(
        self, untaken: "Untaken", peer: str, token: str, size_bytes: int, since: float
    ) -> None:
        self._untaken = untaken
        self.peer = peer
        self.size_bytes = size_bytes
        self.since = since
        self.keys = (_ALL, *_shares(peer, token))

    @property
    def holder(self) -> Key:
        """Whose share it is of: the token's, or else the connection's."""
        return self.keys[-1]

    def close(self) -> None:
        """It is taken, or its connection gone. Idempotent."""
        self._untaken.release(self)


class Untaken:
    """All of them. Used from the loop's thread only.

    Args:
        now: Seconds that never go back.
        hang_up: Ends a connection.
    """

    def __init__(self, now: Callable[[], float], hang_up: Callable[[str], None]) -> None:
        self._now = now
        self._hang_up = hang_up
        self._held: dict[Held, None] = {}
        """In order of time."""
        self._bytes: Counter[Key] = Counter()
        self.released_bytes = 0
        """Of all that was ever taken or given up."""

    @property
    def total_bytes(self) -> int:
        """Of all that are not taken."""
        return self._bytes[_ALL]

    def is_full(self, peer: str, token: str) -> bool:
        """Whether another large answer might not be given: to make it would be for nothing."""
        return any(
            self._bytes[key] > UNTAKEN_BYTES_OF[key[0]] - INLINE_REPLY_BYTES_MAX
            for key in _shares(peer, token)
        )

    def hold(self, peer: str, token: str, size_bytes: int) -> Held | None:
        """Count an answer that is about to leave; None: there is no room for it.

        Who holds less than others is not told so because of them: the largest holder is hung up on.
        """
        held = Held(self, peer, token, size_bytes, self._now())
        while (full := self._full_for(held)) is not None:
            if full != _ALL or not self._make_room(held):
                return None
        self._held[held] = None
        for key in held.keys:
            self._bytes[key] += size_bytes
        return held

    def release(self, held: Held) -> None:
        """Count an answer no more."""
        if held in self._held:
            del self._held[held]
            self.released_bytes += held.size_bytes
            for key in held.keys:
                self._bytes[key] -= held.size_bytes
                if not self._bytes[key]:
                    del self._bytes[key]

    def _full_for(self, held: Held) -> Key | None:
        """The bound that an answer would exceed; one alone exceeds none."""
        for key in reversed(held.keys):
            if 0 < self._bytes[key] > UNTAKEN_BYTES_OF[key[0]] - held.size_bytes:
                return key
        return None

    def _make_room(self, wanted: Held) -> bool:
        """Hang up on the largest holder, unless it is the one who wants more."""
        holders: Counter[Key] = Counter()
        oldest: dict[Key, Held] = {}
        for held in self._held:
            holders[held.holder] += held.size_bytes
            oldest.setdefault(held.holder, held)
        largest, size_bytes = holders.most_common(1)[0]
        first = oldest[largest]
        if (
            holders[wanted.holder] + wanted.size_bytes >= size_bytes
            or first.since > self._now() - PATIENCE_S
            or not first.peer
        ):
            return False
        self._hang_up(first.peer)
        for held in [held for held in self._held if held.peer == first.peer]:
            self.release(held)
        return True


def _shares(peer: str, token: str) -> tuple[Key, ...]:
    connection: tuple[Key, ...] = (("connection", peer),) if peer else ()
    return (*connection, ("token", token)) if token else connection
