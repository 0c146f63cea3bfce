"""What a place for a journal must do. Two faces, as of a payload store.

`JournalArchive` blocks, and is used where blocking is fine: at the start, and in the compactor's
process. `JournalWriter` is used on the server's loop.

Record n is turn n. The archive holds one snapshot and every turn after it, without a gap; older
turns may still be there and are of no use.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.storage.claims import Claim, Holder

NO_PAYLOADS: Final[Mapping[PayloadId, bytes]] = MappingProxyType({})
BEGINNING: Final = 1
"""Sequence of the first snapshot, before which there was nothing; the first turn is the next."""


class JournalError(Exception):
    """Base of what goes wrong with a journal."""


class JournalUnavailableError(JournalError):
    """The journal cannot be reached, or has no room; the same call may succeed later.

    Args:
        what: What failed, and why.
        answer: The store's own words where it refuses, because its disk is full, say; else empty.
    """

    def __init__(self, what: str, *, answer: str = "") -> None:
        super().__init__(what)
        self.answer = answer


class JournalFullError(JournalUnavailableError):
    """The file system that the journal is on has no room."""


class JournalLostError(JournalError):
    """What was written before is not there any more: it must be begun again with a snapshot."""


class JournalTakenError(JournalError):
    """Another server has begun to write this journal; this one must stop."""


class JournalHeldError(JournalError):
    """Another server writes this journal, and its heartbeat has not expired.

    Args:
        holder: The server that has the claim.
        left_s: Seconds until its last heartbeat expires, or None if the claim counts as long as
            that process lives.
    """

    def __init__(self, holder: Holder, left_s: float | None) -> None:
        super().__init__(f"another server ({holder.shown}) writes this journal")
        self.holder = holder
        self.left_s = left_s


class JournalDamagedError(JournalError):
    """The journal has a gap, or cannot be read; says what to do."""


class JournalNewerError(JournalError):
    """A newer server wrote the journal, which this one cannot read."""


class JournalArchive(Protocol):
    """A journal as its reader sees it. Blocking; for one thread, but for `send_heartbeat`.

    Raises (all methods):
        JournalUnavailableError: It cannot be reached.
    """

    @property
    def shown(self) -> str:
        """Where it is, for people: without credentials."""

    def identity(self) -> str:
        """The journal's random identity, kept over all claims; empty before the first."""

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        """Claim the right to write; every earlier holder is refused from now on.

        What is read after this is all there is: no other server can add to it.

        Args:
            holder: The server that claims.
            displaced: Token of a holder that may be displaced although its heartbeat counts.
        """

    def send_heartbeat(self) -> None:
        """Renew the heartbeat of the claim made through this, if there is one. Any thread.

        Raises:
            JournalTakenError: Another server has claimed it since.
            JournalLostError: It has come back as it was before the claim.
        """

    def is_begun(self) -> bool:
        """Whether there is anything of a journal: it is to be read back, or refused."""

    def begin(self, data: bytes) -> None:
        """Write the first snapshot, whose sequence is `BEGINNING`. Needs the claim."""

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
        """Note something under a name. Needs the claim."""

    def close(self) -> None:
        """Close files or connections. Idempotent."""


class JournalWriter(Protocol):
    """A journal as the server that writes it sees it. On one event loop; one call at a time.

    An epoch in the journal that is older than this server's, or none, is a journal that has come
    back with less than it had: it is lost, and is begun again. A newer one is another server's.
    """

    @property
    def claim(self) -> Claim:
        """Under which it writes; of a later epoch once the journal was begun again."""

    @property
    def carries_payloads(self) -> bool:
        """Whether payloads are kept in the same place, and can be written in a step with turns."""

    def has_room(self) -> bool:
        """Whether more may be taken in; False: only what makes room again should be written."""

    async def append(
        self, sequence: int, data: bytes, payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS
    ) -> bool:
        """Return once a turn is durable.

        Repeating the last append is a no-op; a turn of that sequence that another server wrote, or
        that says something else, is never taken for it.

        Args:
            sequence: Of the turn.
            data: What it says.
            payloads: To be kept, all or none of them, with the turn; only where it
                `carries_payloads`. Each in one piece, under an id that was never used.

        Returns:
            Whether there was room for the payloads. They are written all the same. After False, the
            caller should write no more of them.

        Raises:
            JournalUnavailableError: It is not known whether the turn was written; try again.
            JournalLostError: Earlier turns are gone, or are not those that this server wrote.
            JournalTakenError: Another server writes this journal.
        """

    async def renew(self, sequence: int) -> str:
        """Send a heartbeat, and check that the journal is still this server's, and whole.

        Raises:
            JournalUnavailableError: It cannot be reached.
            JournalLostError: Turns are gone.
            JournalTakenError: Another server writes this journal.
        """

    async def begin_again(self, sequence: int, snapshot: bytes, notes: Mapping[str, str]) -> None:
        """Begin a journal that was lost, in a later epoch: a snapshot of `sequence`, and no turns.

        What can still be read of the old one stays until the new one is whole, which has `notes`
        beside it: those of the old one may be gone, or be older.
        """

    async def trim(self, up_to: int) -> bool:
        """Delete some of the turns that a snapshot has made superfluous, a small portion."""

    async def close(self) -> None:
        """Give the claim up, so that the next server need not wait, and close. Idempotent."""


class Written(NamedTuple):
    """A turn as it stands in a journal that is followed."""

    sequence: int
    epoch: int
    """Epoch of the server that wrote it."""
    record: bytes
    """Empty where a journal was begun, in place of the turn that its snapshot is of."""


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """A journal as its follower sees it at one instant."""

    epoch: int
    """Epoch of the server that may write; 0 if none has claimed it yet."""
    holder: Holder | None
    """The server whose heartbeat counts, or None if there is none."""
    left_s: float
    """Seconds until the last heartbeat expires."""
    incarnation: str
    """Which start of the store that it is in has answered."""
    newest: int
    """Sequence of the newest turn; 0: there is none."""
    snapshot: int
    """Sequence of the snapshot that counts; 0: there is none."""
    turns: tuple[Written, ...]
    """Those from the one on that was asked for, in order; not all of them where there are many."""


class JournalView(JournalArchive, Protocol):
    """A journal that others can follow while one server writes it."""

    def look(self, first: int) -> JournalStatus:
        """See what there is from a turn on; changes nothing."""
