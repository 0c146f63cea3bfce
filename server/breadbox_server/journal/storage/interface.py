"""What a place for a journal must do, as a payload store's two faces.

`JournalArchive` blocks: for the start and the compactor. `JournalWriter` is for the loop. Record n
is turn n. The archive holds a snapshot and every turn after it; older ones may remain.
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
    """The journal is away or has no room; retry. `answer`: the store's own words, or empty."""

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
    """Another server holds the journal, for `left_s` seconds or while its process lives (None)."""

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

    Every method raises JournalUnavailableError.
    """

    @property
    def shown(self) -> str:
        """Where it is, for people: without credentials."""

    def identity(self) -> str:
        """The journal's random identity, kept over all claims; empty before the first."""

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        """Claim the right to write, before reading: earlier holders are refused from now on.

        `displaced`: token of a holder that may be displaced although its heartbeat counts.
        """

    def send_heartbeat(self) -> None:
        """Renew the claim's heartbeat, from any thread; JournalLostError: an older journal."""

    def is_begun(self) -> bool:
        """Whether there is anything of a journal: it is to be read back, or refused."""

    def begin(self, data: bytes) -> None:
        """Write the first snapshot, whose sequence is `BEGINNING`. Needs the claim."""

    def read_snapshot(self) -> tuple[int, bytes]:
        """Return the newest snapshot and its sequence; JournalDamagedError: turns without one."""

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        """Return the turns after a sequence, in order; JournalDamagedError if one is missing."""

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

    An older epoch in it, or none, is a loss: begin again. A newer one is another server's.
    """

    @property
    def claim(self) -> Claim:
        """The claim under which it writes; of a later epoch once the journal was begun again."""

    @property
    def carries_payloads(self) -> bool:
        """Whether payloads are kept in the same place, and can be written in a step with turns."""

    def has_room(self) -> bool:
        """Whether more may be taken in; False: only what makes room again should be written."""

    async def append(
        self, sequence: int, data: bytes, payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS
    ) -> bool:
        """Return once a turn is durable; False if there was no room for its payloads.

        Repeating the last append is a no-op; another turn of that sequence is never taken for it.
        `payloads` (only where it `carries_payloads`), under fresh ids, are kept all or none. After
        False they are written all the same, but the caller should write no more.

        JournalUnavailableError: unknown whether it was written; try again. JournalLostError:
        earlier turns are gone or not ours. JournalTakenError: another server writes.
        """

    async def renew(self, sequence: int) -> str:
        """Send a heartbeat, and check that the journal is whole and ours; raises as `append`."""

    async def begin_again(
        self,
        sequence: int,
        snapshot: bytes,
        notes: Mapping[str, str],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> None:
        """Begin a lost journal in a later epoch: a snapshot of `sequence`, and no turns.

        What can be read of the old one stays until the new one is whole. `notes` replace the old.
        `payloads`, as of `append`, are kept before the snapshot counts, which refers to them.
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
    left_s: float
    """Seconds until the last heartbeat expires."""
    incarnation: str
    newest: int
    """Sequence of the newest turn; 0: there is none."""
    snapshot: int
    """Sequence of the snapshot that counts; 0: there is none."""
    turns: tuple[Written, ...]
    """Those from the one on that was asked for, in order; not all of them where there are many."""


class JournalView(JournalArchive, Protocol):
    """A journal that others can follow while one server writes it."""

    def look(self, first: int) -> JournalStatus:
        """Return the journal's status, with its turns from one on; change nothing."""
