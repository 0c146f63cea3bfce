"""What a place for a journal must do. Two faces, as of a payload store.

`JournalArchive` blocks, and is used where blocking is fine: at the start, and in the compactor's
process. `JournalWriter` is used on the server's loop.

Record n is turn n. The archive holds one snapshot and every turn after it, without a gap; older
turns may still be there and are of no use.
"""

from collections.abc import Iterator
from typing import Final, Protocol

BEGINNING: Final = 1
"""Sequence of the first snapshot, before which there was nothing; the first turn is the next."""


class JournalError(Exception):
    """Base of what goes wrong with a journal."""


class JournalUnavailableError(JournalError):
    """The journal cannot be reached, or has no room; the same call may succeed later."""


class JournalFullError(JournalUnavailableError):
    """The file system that the journal is on has no room."""


class JournalLostError(JournalError):
    """What was written before is not there any more: it must be begun again with a snapshot."""


class JournalTakenError(JournalError):
    """Another server has begun to write this journal; this one must stop."""


class JournalDamagedError(JournalError):
    """The journal has a gap, or cannot be read; says what to do."""


class JournalArchive(Protocol):
    """A journal as whoever reads it back sees it. Blocking; for one thread.

    Raises (all methods):
        JournalUnavailableError: It cannot be reached.
    """

    @property
    def shown(self) -> str:
        """Where it is, for people: without credentials."""

    def is_begun(self) -> bool:
        """Whether there is a snapshot to start from."""

    def begin(self, data: bytes) -> None:
        """Write the first snapshot, whose sequence is `BEGINNING`."""

    def read_snapshot(self) -> tuple[int, bytes]:
        """The newest snapshot and its sequence.

        Raises:
            JournalDamagedError: There is none, although there are turns.
        """

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        """Turns after a sequence, in order.

        Raises:
            JournalDamagedError: One is missing between two others, or right after `after`.
        """

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        """Replace the snapshot by this one, whole or not at all, unless it is an older one."""

    def read_note(self, name: str) -> str:
        """What was noted under a name beside the journal; empty when nothing was."""

    def write_note(self, name: str, text: str) -> None:
        """Note something under a name."""

    def close(self) -> None:
        """Close files or connections. Idempotent."""


class JournalWriter(Protocol):
    """A journal as the server that writes it sees it. On one event loop; one call at a time."""

    def has_room(self) -> bool:
        """Whether more may be taken in; False: only what makes room again should be written."""

    async def append(self, sequence: int, data: bytes) -> None:
        """Return once a turn is durable. Repeating the last append is a no-op.

        Raises:
            JournalUnavailableError: It is not known whether the turn was written; try again.
            JournalLostError: Earlier turns are gone.
            JournalTakenError: Another server writes this journal.
        """

    async def begin_again(self, sequence: int, snapshot: bytes) -> None:
        """Begin a journal that was lost: a snapshot of `sequence`, and no turns.

        Raises:
            JournalUnavailableError: It cannot be reached; try again.
            JournalTakenError: Another server writes this journal.
        """

    async def trim(self, up_to: int) -> bool:
        """Delete some of the turns that a snapshot has made superfluous, a small portion.

        Returns:
            Whether there may be more to delete.

        Raises:
            JournalUnavailableError: It cannot be reached.
        """

    async def close(self) -> None:
        """Close files or connections. Idempotent."""
