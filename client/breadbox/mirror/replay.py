"""A memory that fills itself from a buffer."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

from breadbox.client import Client, connect
from breadbox.errors import (
    ClosedError,
    DeadlineExceededError,
    LeaseExpiredError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)
from breadbox.fragment import Fragment
from breadbox.loader import FragmentLoader
from breadbox.loading import LoaderOptions
from breadbox.mirror.memory import StepMemory
from breadbox.outages import OutageLog
from breadbox.types import FragmentReference

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Seconds that a read waits for what comes next; also how long `close` may wait for one."""
RETRY_S: Final = 1.0
"""Between two attempts while server or store are away."""
CATCH_UP_CHUNKS: Final = 4096
"""Chunks that are passed by at a time in looking for the newest one."""
CATCH_UP_READS: Final = 64
"""Times that this is done at most."""
GROUP_COUNT: Final = 32
"""Fragments that are loaded together."""
THREADS: Final = 2
"""Groups that are loaded at a time."""

_OUTAGES = (DeadlineExceededError, StoreUnavailableError, UnavailableError)


class Read(Protocol):
    """What came after a cursor."""

    @property
    def fragments(self) -> tuple[FragmentReference, ...]:
        """In order of arrival."""

    @property
    def lease_id(self) -> str | None:
        """None: nothing came."""

    @property
    def cursor(self) -> int:
        """The next one."""

    @property
    def skipped_chunk_count(self) -> int:
        """Chunks that left before they were read."""

    @property
    def session_id(self) -> str:
        """Empty: none is current."""


class ReadClient(Protocol):
    """What a mirror needs of a client."""

    def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float = 0.0,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        buffer: str | None = None,
    ) -> Read:
        """Read what came after a cursor, counting no use."""

    def load_fragments(
        self, references: Sequence[FragmentReference], *, columns: Sequence[str] | None = None
    ) -> list[Fragment]:
        """Load payloads."""

    def release_lease(self, lease_id: str, *, buffer: str | None = None) -> None:
        """End a read's lease."""


class ReplayMirror(StepMemory):
    """The latest steps of a buffer, kept up to date by a thread; sampled as one's own memory is.

    What it holds follows from the buffer alone: a learner that is killed and started again has the
    same steps, but for those that left the buffer meanwhile. A new session empties it. While server
    or store are away it goes on with what it has. An error that does not pass by itself, such as
    credentials that are refused, ends the thread, and the next call that draws or waits raises it.

    Use it as a context manager, or call `close`.

    Args:
        client: Of a server, or its address, HOST:PORT, to which a client is made; one that is given
            stays open, and is used from the thread.
        buffer: None: the client's.
        capacity_steps: As `seed` and `frame_stack`, of `StepMemory`.
        seed: Of all draws.
        frame_stack: Which observations are stacks of frames.
        columns: Paths of the arrays to keep, such as "obs.image"; None: all.
        connection: Further arguments of `breadbox.connect`, such as `token`, for an address.

    Raises:
        InvalidRequestError: An argument is out of its range.
    """

    def __init__(
        self,
        client: ReadClient | str,
        *,
        buffer: str | None = None,
        capacity_steps: int = 1_000_000,
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
        columns: Sequence[str] | None = None,
        **connection: Any,
    ) -> None:
        super().__init__(capacity_steps, seed=seed, frame_stack=frame_stack)
        self.skipped_chunk_count = 0
        """Chunks that left the buffer before they were read."""
        self.unreadable_fragment_count = 0
        """Fragments whose payloads were gone, or could not be read."""
        self.session_id = ""
        """Of the steps; empty before the first read, and where no session is current."""
        self._own: Client | None = None
        if isinstance(client, str):
            self._own = connect(client, buffer=buffer or "default", **connection)
        self._client: ReadClient = self._own or client  # type: ignore[assignment]
        self._buffer = buffer
        self._kept_columns = columns
        self._closing = threading.Event()
        self._behind_since: float | None = time.monotonic()
        """When it last held all there was; None: it does, as far as it knows."""
        self._asked_at = self._behind_since
        self._cursor: int | None = None
        """Chunks up to this one are here, or are gone; None: nothing was read yet."""
        self._taken: tuple[int, int] = (-1, -1)
        """Chunk and index of the fragment that was taken in last."""
        self._loader: FragmentLoader[list[Fragment]] = FragmentLoader(
            self._load,
            LoaderOptions(threads=THREADS, prefetch_batches=2 * THREADS, on_failure="skip"),
        )
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    @property
    def lag_s(self) -> float:
        """Seconds for which it has been behind the buffer; 0 while it keeps up."""
        now, behind_since = time.monotonic(), self._behind_since
        # A read that is not answered in its time says that nobody knows how far behind this is.
        return (
            max(0.0, now - self._asked_at - POLL_S) if behind_since is None else now - behind_since
        )

    def catch_up(self, timeout_s: float | None = None) -> None:
        """Wait until all is here that the buffer held at this moment.

        So who has appended, and was answered, finds here what it appended.

        Raises:
            WaitElapsedError: It took longer than `timeout_s`.
            ReplayBufferError: What ended the mirroring; or that the server cannot be asked.
        """
        newest = -1 if self._cursor is None else self._cursor
        for _ in range(CATCH_UP_READS):  # Where producers are as fast as this it would not end.
            read = self._client.read_fragments(
                newest, chunk_count_max=CATCH_UP_CHUNKS, buffer=self._buffer
            )
            newest = read.cursor
            if read.lease_id is None:
                break
            self._release(read.lease_id)
        self._wait_for(
            lambda: self._cursor is not None and self._cursor >= newest, "all steps", timeout_s
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """End the thread; takes up to a second. Idempotent. What it holds can still be sampled."""
        self._closing.set()
        if self._own is not None:
            self._own.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, references: Sequence[FragmentReference]) -> list[Fragment]:
        return self._client.load_fragments(references, columns=self._kept_columns)

    def _run(self) -> None:
        outages = OutageLog(_log, "reading the buffer")
        has_read = False
        while not self._closing.is_set():
            try:
                cursor = self._read(self._cursor)
                with self._changed:
                    self._cursor = cursor
                    self._changed.notify_all()
                has_read = True
                outages.succeeded()
            except Exception as error:
                if self._closing.is_set() and isinstance(error, ClosedError):
                    return
                self._behind_since = self._behind_since or self._asked_at
                if has_read and isinstance(error, _OUTAGES):
                    outages.failed(error)
                    self._closing.wait(RETRY_S)
                    continue
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                if not isinstance(error, ReplayBufferError):
                    raise
                return

    def _read(self, cursor: int | None) -> int:
        """Take in what came after the cursor; returns the next one."""
        self._asked_at = time.monotonic()
        read = self._client.read_fragments(
            cursor,
            # The first says what there is, even if that is nothing.
            max_wait_s=0.0 if cursor is None else POLL_S,
            known_session_id=self.session_id or None,
            buffer=self._buffer,
        )
        if read.session_id != self.session_id:
            self.clear()
            self.session_id = read.session_id
        if read.fragments:
            self._behind_since = self._behind_since or time.monotonic()
        try:
            self._take_in(read.fragments)
        finally:
            if read.lease_id is not None:
                self._release(read.lease_id)
        self.skipped_chunk_count += read.skipped_chunk_count
        self._behind_since = None
        return read.cursor

    def _take_in(self, references: Sequence[FragmentReference]) -> None:
        """Load fragments and keep their steps; those of a read that was broken off, once."""
        left = [each for each in references if _place(each) > self._taken]
        wanted = iter(left)
        for fragments in self._loader.batches(left, GROUP_COUNT):
            for fragment in fragments:
                reference = _reference_of(fragment, wanted)
                self.extend(fragment, reference.chunk_id)
                self._taken = _place(reference)
        self.unreadable_fragment_count += len(self._loader.skipped)
        self._loader.skipped.clear()

    def _release(self, lease_id: str) -> None:
        try:
            self._client.release_lease(lease_id, buffer=self._buffer)
        except LeaseExpiredError:
            _log.info("a read took longer than its lease")
        except _OUTAGES:
            _log.info("the lease of a read will expire by itself")


def _place(reference: FragmentReference) -> tuple[int, int]:
    """Where a fragment stands in the order of arrival: one chunk is of one worker."""
    return reference.chunk_id, reference.metadata.fragment_index


def _reference_of(fragment: Fragment, references: Iterator[FragmentReference]) -> FragmentReference:
    """The reference to a loaded fragment; *references* are passed by up to that."""
    who = (fragment.worker_id, fragment.fragment_index)
    return next(
        each
        for each in references
        if who == (each.metadata.worker_id, each.metadata.fragment_index)
    )
