"""What a payload store must do, as its clients and as the server see it.

Two faces of one store. `PayloadStore` moves bytes and is used by writers and readers, from threads.
`PayloadCustodian` is the server's, on its loop, which confirms, deletes and counts with it, and
moves the bytes of small payloads that are inline in calls, but of no others.

Life of a payload: *unannounced* once written (it expires by itself), *confirmed* once the server
admitted its fragment (it stays until it is deleted).
"""

import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple, Protocol, Self

from breadbox.model.errors import (
    ClosedError,
    PayloadCorruptError,
    StoreError,
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
    filled: Callable[[int], None] | None = None
    """Called by a store, where it can, while the segment is being filled: with the number of bytes
    that are there so far, from its start, soon after they came and are in a cache. Never needed:
    `arrived` says that all is there."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How full a store is."""

    used_bytes: int
    """Bytes of everything in the store, also of other programs."""
    limit_bytes: int
    """Where it refuses to take more; 0: it has no limit of its own."""
    capacity_bytes_max: int
    """What buffers can be promised of it, since payloads are not all that it needs room for; 0: as
    much as one likes."""


class StoreTakenError(StoreUnavailableError):
    """A server of a later epoch looks after these payloads: nothing was confirmed or deleted."""

    def __init__(self) -> None:
        super().__init__("another server has taken over")


class StoreSharedError(StoreError):
    """The store holds payloads of other journals: what one's own does not know may be theirs."""

    def __init__(self) -> None:
        super().__init__("the store holds payloads of other journals too")


@dataclass(slots=True)
class Custody:
    """On whose behalf a custodian confirms and deletes."""

    journal: str
    """Identity of the journal that knows the payloads."""
    epoch: int
    """Epoch of the server that writes the journal, which grows with each claim of the journal; 0
    for a process that does not write it."""


class Confirmation(IntEnum):
    """What a store found when it was asked to make a payload stay."""

    MISSING = 0
    """It, or a piece of it, is not there."""
    THERE = 1
    """It is there, complete, and stays."""
    OTHER_SIZE = 2
    """It has another number of bytes than its reference says: nothing was done to it, so it goes on
    to expire."""


class PayloadReceiver(Protocol):
    """Says where the bytes of payloads go while a store receives them.

    For each payload, in this order: `head_bytes`, `segments`, then `arrived`; all from the thread
    that called `read_many`, or from threads of the store, but never at once for one payload. After
    a broken connection the store may start a payload again, with `head_bytes`.
    An exception raised here ends the read and leaves `read_many` as it is.
    """

    @property
    def wants_whole(self) -> bool:
        """Whether nearly all bytes are wanted: then one pass costs less than picking ranges."""

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        """Length of the head of the payload at `position` of the request, prelude included."""

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        """Where bytes behind the head go: in order of offset, without overlap.

        `head` is the receiver's to keep; it is not written again.
        """

    def arrived(self, position: int) -> None:
        """All segments of this payload are filled."""


class PayloadStore(Protocol):
    """Where payload bytes live, as a client sees it. Thread-safe; blocking.

    Raises (all methods):
        StoreUnavailableError: The store cannot be reached, or did not answer in time.
        StoreFullError: There is no room; nothing usable was left behind.
        PayloadMissingError: A payload to read is not there.
        PayloadCorruptError: A payload is shorter than its reference says.
    """

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """Write payloads, each given as the buffers that joined would be its bytes.

        Nobody sees a payload half-written. Each is unannounced: it expires after the store's
        `unannounced_s` unless the server confirms it.

        Returns:
            One reference per payload, in order, with fresh ids.
        """

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        """Receive payloads straight into the memory that `receiver` names.

        Bytes that no segment wants are not copied, and not moved where the store can help it.
        """

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """Map payloads into memory without moving a byte.

        A mapping stays readable after the payload is deleted, for as long as the view lives. What
        is written into it stays there: pages that are written to are copied first.

        Returns:
            One view per payload, in order; None where the store is not on this host.
        """

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        """Delete payloads that were written but will not be announced; missing ones are fine."""

    def within(self, deadline: Deadline) -> "PayloadStore":
        """The same store, for calls that end with StoreUnavailableError at a deadline.

        That is when no byte has moved for so long. Without it they allow the silence that the
        store was opened with. A directory knows no silence: the kernel waits for its disk.
        """

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
    """The store's interface for a gateway, which moves payloads of clients. Thread-safe.

    Bytes are moved part by part, so that nobody has to hold a whole payload.

    Raises (all methods): as PayloadStore.
    """

    def new_reference(self, size_bytes: int) -> PayloadReference:
        """Name a payload of so many bytes, of which nothing is written yet."""

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Write parts of payloads that `new_reference` has named, those of each in order.

        Each begins where the one before it ended, at a multiple of the payload's pieces. Nobody
        sees a payload before its last byte is written; it is unannounced then. Of one that is given
        up before, what was written expires, unless it is deleted.
        """

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

    Raises (all methods):
        StoreUnavailableError: The store cannot be reached, or did not answer in time.
        StoreTakenError: The same journal has come with a later epoch; only once there is a custody,
            from what confirms and deletes. It is looked at together with what is to be done, so
            that a server that was replaced can change nothing, however late its command arrives.
    """

    async def take(self, custody: Custody) -> None:
        """Confirm and delete on behalf of this from now on, and leave word of it in the store.

        The epoch is read again for each call.
        """

    async def journals(self) -> set[str]:
        """Identities of the journals that have left word here. Changes nothing."""

    async def forget_other_journals(self) -> None:
        """Take what is confirmed here for payloads of this custody's journal alone."""

    async def ping(self) -> None:
        """Find out whether the store answers."""

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        """Make payloads stay whose bytes are as many as their references say.

        Idempotent. One round trip for all of them.
        """

    async def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        """Write payloads that stay, whole, under ids that nobody has used. One round trip.

        On failure some may be there, and stay, until they are deleted.

        Raises:
            StoreFullError: There is no room.
        """

    async def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        """Read payloads that are small and not cut into pieces. One round trip for all of them.

        Returns:
            Their bytes; empty for one that is not there so, or has another size.
        """

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        """Delete payloads; missing ones are fine. One round trip for all of them."""

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        """Whether each payload is completely there."""

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        """Those of many payloads that are not there, or not completely, in no order.

        The cheapest way that the store has to look for very many; a payload of another size than
        its reference says may pass for present.
        """

    def confirmed(self) -> AsyncIterator[str]:
        """Every payload id in the store that is confirmed, in no order, for sweeping and fsck."""

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        """Delete payloads of which only the id is known.

        Raises:
            StoreSharedError: There is a custody, and others than its journal have left word here;
                some may be deleted.
        """

    async def sweep_unannounced(self) -> int:
        """Delete unannounced payloads past their time, where the store does not do it by itself.

        Returns:
            Payloads deleted.
        """

    async def usage(self) -> StoreUsage:
        """How full the store is; of several nodes, the sums."""

    async def incarnation(self) -> str:
        """Says which store this is: another answer, and it may have come back with less.

        It changes when a store is restarted, replaced, or a replica of it is promoted.
        """

    async def concerns(self) -> tuple[str, ...]:
        """Settings of the store under which it may lose payloads: what, and the remedy, each."""

    async def close(self) -> None:
        """Close connections. Idempotent."""


_log = logging.getLogger(__name__)


def check_sound(references: Iterable[PayloadReference]) -> None:
    """See that references, which may come from the network, are within all bounds."""
    for reference in references:
        if not is_sound(reference):
            raise PayloadCorruptError(f"a payload reference is out of bounds: {reference}")


class AbstractStore:
    """A store that is open until it is closed, and whose calls have a deadline.

    Args:
        silence_s: Seconds of silence that end a call, where `within` does not say otherwise.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._deadline: Deadline | None = None
        self._closed = threading.Event()

    def within(self, deadline: Deadline) -> Self:
        view = copy.copy(self)
        view._deadline = deadline  # noqa: SLF001 - another of this class
        return view

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """None: it is not on this host, as far as is known."""
        del references
        return None

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._close()

    def _close(self) -> None:
        """Close connections; called once."""

    def _begin(self) -> Deadline:
        """Begin a call; returns when it ends at the latest."""
        if self._closed.is_set():
            raise ClosedError("the payload store is closed")
        return self._deadline or Deadline(self._silence_s)


class AbstractParts(AbstractStore, ABC):
    """A store that also moves parts of payloads; whole ones are written as such."""

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """On failure nothing of the call is left behind, or it expires."""
        bounded = self.within(self._begin())
        references = [self.new_reference(sum(map(len, buffers))) for buffers in payloads]
        try:
            bounded.write_parts([Part(*each) for each in zip(references, repeat(0), payloads)])
        except BaseException:
            try:
                bounded.discard_parts(references)
            except StoreError as error:
                _log.debug("a failed write is left to its expiry: %s", error)
            raise
        return references

    @abstractmethod
    def new_reference(self, size_bytes: int) -> PayloadReference:
        """See PayloadParts."""

    @abstractmethod
    def write_parts(self, parts: Sequence[Part]) -> None:
        """See PayloadParts."""

    @abstractmethod
    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        """See PayloadParts."""

    def read_parts(self, parts: Sequence[Part]) -> None:
        """See PayloadParts."""
