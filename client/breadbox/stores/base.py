"""What a payload store must do, as its clients and as the server see it.

`PayloadStore` moves bytes for writers and readers, from threads. `PayloadCustodian` confirms,
deletes and counts for the server, on its loop. A payload is *unannounced* once written (it
expires), and *confirmed* once the server has admitted its fragment (it stays until deleted).
"""

import copy
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple, Protocol, Self

from breadbox.model.errors import (
    ClosedError,
    PayloadCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from breadbox.model.types import PayloadReference
from breadbox.stores.deadline import Deadline
from breadbox.stores.keys import is_sound

PRELUDE_BYTES = 48
"""First bytes of every payload; from them a receiver knows how long the payload's head is."""


class Segment(NamedTuple):
    """A byte range of a payload and the writable memory that receives it."""

    offset_bytes: int
    """First byte wanted, counted from the start of the payload."""
    destination: memoryview
    """Format "B", C-contiguous; as long as the range."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How full a store is. Counts of files are 0 where it has no bound on their number."""

    used_bytes: int
    """Bytes of everything in the store, also of other programs."""
    limit_bytes: int
    """Where it refuses to take more; 0: it has no limit of its own."""
    capacity_bytes_max: int
    """What buffers can be promised of it: it needs room for more than payloads. 0: no limit."""
    used_file_count: int = 0
    limit_file_count: int = 0
    """Files after which it refuses to take more."""
    capacity_file_count_max: int = 0
    """Payloads that buffers can be promised."""


class StoreTakenError(StoreUnavailableError):
    """A server of a later epoch looks after these payloads: nothing was confirmed or deleted."""

    def __init__(self) -> None:
        super().__init__("another server has taken over")


class Foreseen(NamedTuple):
    """Where the bytes of a payload go that may be like an earlier one."""

    memory: Sequence[memoryview]
    """For every byte, in order."""
    blocks: Sequence[tuple[int, int]]
    """(first byte of the payload, byte behind the last) of what has a checksum, in order."""


class UnforeseenError(Exception):
    """What came is not what a receiver foresaw: read everything again without foresight."""


class StoreSharedError(StoreError):
    """The store holds payloads of other journals: what one's own does not know may be theirs."""

    def __init__(self) -> None:
        super().__init__("the store holds payloads of other journals too")


@dataclass(slots=True)
class Custody:
    """The journal on whose behalf a custodian confirms and deletes."""

    journal: str
    epoch: int
    """Epoch of the server that writes it, which grows with each claim; 0 elsewhere."""


class Confirmation(IntEnum):
    """What a store found when it was asked to make a payload stay."""

    MISSING = 0
    """It, or a piece of it, is not there."""
    THERE = 1
    """It is there, complete, and stays."""
    OTHER_SIZE = 2
    """It has another number of bytes than its reference says, and was left to expire."""


class PayloadReceiver(Protocol):
    """Where the bytes of payloads go while a store receives them.

    For each payload `head_bytes`, `segments`, then `arrived`, from any thread, but never from two
    for one payload. After a broken connection the store may start a payload again. An exception
    raised here leaves `read_many` as it is.
    """

    @property
    def wants_whole(self) -> bool:
        """Whether nearly all bytes are wanted: then one pass costs less than picking ranges."""

    def foresee(self, position: int) -> Foreseen | None:
        """Return memory of a payload that may be like an earlier one.

        In place of `head_bytes` and `segments`; None where they are to be called.
        """

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        """Length of the head of the payload at `position` of the request, prelude included."""

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        """Return where bytes behind the head go, by offset, without overlap; `head` may be kept."""

    def arrived(self, position: int, digests: Sequence[int] | None = None) -> None:
        """Note that all memory is filled, perhaps with the XXH3-64 of each foreseen block.

        Raises UnforeseenError if what came is not what was foreseen.
        """


class PayloadStore(Protocol):
    """Where payload bytes live, as a client sees it. Thread-safe; blocking.

    All methods raise StoreUnavailableError (unreachable, or no answer in time), StoreFullError
    (nothing usable is left behind), PayloadMissingError, and PayloadCorruptError (too short).
    """

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """Write payloads, each given as buffers to join; return references. Each appears whole."""

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        """Receive payloads straight into `receiver`'s memory; unwanted bytes are not copied."""

    def at_hand(self, references: Sequence[PayloadReference]) -> list[bytes] | None:
        """Return whole payloads, unverified, or None unless all are there and cost least so."""

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """Return copy-on-write views, which outlive the payloads, or None on another host."""

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        """Delete payloads that were written but will not be announced; missing ones are fine."""

    def within(self, deadline: Deadline) -> "PayloadStore":
        """Return the same store, for calls that end at a deadline (in memory it keeps none)."""

    def close(self) -> None:
        """Close connections. Idempotent."""


class Part(NamedTuple):
    """A byte range of a payload, and the memory that it is written from or read into."""

    reference: PayloadReference
    offset_bytes: int
    """First byte, counted from the start of the payload."""
    buffers: Sequence[memoryview]
    """Joined they are the range: format "B", C-contiguous, and to be read into, writable."""


class PayloadParts(Protocol):
    """Move payloads of clients part by part, so that no gateway holds a whole one. Thread-safe."""

    def new_reference(self, size_bytes: int) -> PayloadReference:
        """Name a payload of so many bytes, of which nothing is written yet."""

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Write parts of payloads in order, from multiples of their pieces; seen once complete."""

    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        """Delete what is written of payloads, if anything is."""

    def read_parts(self, parts: Sequence[Part]) -> None:
        """Read parts of payloads."""

    def within(self, deadline: Deadline) -> "PayloadParts":
        """The same, for calls that end at a deadline; see PayloadStore."""

    def close(self) -> None:
        """Close connections. Idempotent."""


class PayloadCustodian(Protocol):
    """Where payload bytes live, as the server sees it. On one event loop.

    All methods raise StoreUnavailableError. Those that confirm and delete raise StoreTakenError if
    the journal has come with a later epoch, compared in the same step: replaced servers write
    nothing.
    """

    async def take(self, custody: Custody) -> None:
        """Confirm and delete on behalf of this, and record it; the epoch is read for each call."""

    async def journals(self) -> set[str]:
        """Return the identities of the journals that are recorded here."""

    async def forget_other_journals(self) -> None:
        """Take what is confirmed here for payloads of this custody's journal alone."""

    async def ping(self) -> None:
        """Find out whether the store answers."""

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        """Make payloads of the right size stay. Idempotent; one round trip."""

    async def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        """Write payloads that stay, under fresh ids. One round trip. On failure some may stay."""

    async def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        """Return small payloads, or b"" for one that is missing or cut. One round trip."""

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        """Delete payloads; missing ones are fine. One round trip."""

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        """Return whether each payload is completely there."""

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        """Return those of very many payloads that are not there; sizes may go unchecked."""

    def confirmed(self) -> AsyncIterator[str]:
        """Yield the id of every confirmed payload, in no order, for sweeping and fsck."""

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        """Delete payloads by id; StoreSharedError, perhaps midway, if it has other journals."""

    async def sweep_unannounced(self) -> int:
        """Delete unannounced payloads past their time, if the store does not; return how many."""

    async def usage(self) -> StoreUsage:
        """Return how full the store is; of several nodes, the sums."""

    async def incarnation(self) -> str:
        """Return an identity that changes when the store is restarted, replaced or promoted."""

    async def concerns(self) -> tuple[str, ...]:
        """Return settings under which the store may lose payloads, each with the remedy."""

    async def close(self) -> None:
        """Close connections. Idempotent."""


_log = logging.getLogger(__name__)


def check_sound(references: Iterable[PayloadReference]) -> None:
    """See that references, which may come from the network, are within all bounds."""
    for reference in references:
        if not is_sound(reference):
            raise PayloadCorruptError(f"a payload reference is out of bounds: {reference}")


@contextmanager
def largest_noted(payloads: Sequence[Sequence[memoryview]]) -> Iterator[None]:
    """Note in a StoreFullError of the block how large the largest payload is."""
    try:
        yield
    except StoreFullError as error:
        error.payload_bytes = max(sum(map(len, buffers)) for buffers in payloads)
        raise


class AbstractStore:
    """A store that is open until it is closed, and whose calls have a deadline."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        """Seconds of silence that end a call, unless `within` says otherwise."""
        self._deadline: Deadline | None = None
        self._closed = threading.Event()

    def within(self, deadline: Deadline) -> Self:
        view = copy.copy(self)
        view._deadline = deadline  # noqa: SLF001 - another of this class
        return view

    def at_hand(self, references: Sequence[PayloadReference]) -> list[bytes] | None:
        del references
        return None

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        del references
        return None

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._close()

    def _close(self) -> None:
        """Close connections; called once."""

    def _begin(self) -> Deadline:
        if self._closed.is_set():
            raise ClosedError("the payload store is closed")
        return self._deadline or Deadline(self._silence_s)


class PartsStore(AbstractStore, PayloadStore, PayloadParts):
    """A store that moves payloads, and parts of them; it writes a whole one as a part."""

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """On failure nothing of the call is left behind, or it expires."""
        bounded = self.within(self._begin())
        references = [self.new_reference(sum(map(len, buffers))) for buffers in payloads]
        try:
            with largest_noted(payloads):
                bounded.write_parts([Part(*each) for each in zip(references, repeat(0), payloads)])
        except BaseException as error:
            # A store that was silent would be so for the deletion's deadline as well.
            if not (isinstance(error, StoreUnavailableError) and error.was_silent):
                self._leave_nothing(bounded, references)
            raise
        return references

    @staticmethod
    def _leave_nothing(parts: PayloadParts, references: Sequence[PayloadReference]) -> None:
        try:
            parts.discard_parts(references)
        except StoreError as error:
            _log.debug("a failed write is left to its expiry: %s", error)
