"""A buffer's chunks in the order of arrival, as a client reads them, without a server."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from breadbox.model.errors import SubscriptionNotFoundError
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    BufferConfig,
    BufferDescription,
    BufferState,
    FragmentMetadata,
    FragmentRead,
    FragmentReference,
    PayloadReference,
)
from breadbox.operations.cursor_reads import LoadedRead


@dataclass
class FakeFeed:
    """One fragment makes a chunk. Calls fail with `errors`, the first first, if there are any."""

    session_id: str = "s"
    chunks: list[tuple[int, Fragment]] = field(default_factory=list)
    next_chunk_id: int = 0
    errors: list[Exception] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    lease_numbers: Iterator[int] = field(default_factory=itertools.count)
    may_read: threading.Event = field(default_factory=threading.Event)
    """Reads wait for it."""
    config: BufferConfig = field(default_factory=lambda: BufferConfig.preset("off-policy"))
    counters: dict[str, int] = field(default_factory=dict)
    lease_count: int = 0
    """Of those who fetch."""
    look_count: int = 0
    outage: str = ""
    reader_count: int = 0
    """Reads that wait for it."""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self.may_read.set()

    @property
    def service(self) -> "FakeFeed":
        """Itself: it has the calls of a client and of its service."""
        return self

    def append(self, *fragments: Fragment) -> None:
        with self._changed:
            for fragment in fragments:
                self.chunks.append((self.next_chunk_id, fragment))
                self.next_chunk_id += 1
            self._changed.notify_all()

    def start_session(self, session_id: str) -> None:
        with self._changed:
            self.session_id = session_id
            self.chunks.clear()
            self._changed.notify_all()

    def tail(
        self,
        after_chunk_id: int | None = None,
        *,
        max_wait_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        is_acknowledging: bool = True,
        columns: Sequence[str] | None = None,
        is_mapped: bool = False,
        buffer: str | None = None,
    ) -> Iterator[LoadedRead]:
        after, known = -1 if after_chunk_id is None else after_chunk_id, known_session_id
        while True:
            self.reader_count += 1
            self.may_read.wait()
            self.reader_count -= 1
            with self._changed:
                if self.errors:
                    raise self.errors.pop(0)

                if not self._changed.wait_for(partial(self._is_news, after, known), max_wait_s):
                    return
                if self.errors:
                    continue
                after = self._known(after)
                found = [chunk for chunk in self.chunks if chunk[0] > after][:64]
                cursor = found[-1][0] if found else self.next_chunk_id - 1
                read = LoadedRead(
                    fragments=tuple(fragment for _, fragment in found),
                    references=tuple(_reference(*each) for each in found),
                    cursor=cursor,
                    skipped_chunk_count=cursor - after - len(found),
                    session_id=self.session_id,
                    model_version=0,
                )
                after, known = cursor, self.session_id
            yield read

    def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        subscription: str | None = None,
        buffer: str | None = None,
    ) -> FragmentRead:
        after = -1 if after_chunk_id is None else after_chunk_id
        with self._changed:
            found = [chunk for chunk in self.chunks if chunk[0] > after][:chunk_count_max]
            lease_id = f"lease-{next(self.lease_numbers)}" if found else None
            if lease_id is not None:
                self.leases.add(lease_id)
            return FragmentRead(
                fragments=tuple(_reference(*each) for each in found),
                lease_id=lease_id,
                remaining_s=60.0,
                cursor=found[-1][0] if found else self.next_chunk_id - 1,
                skipped_chunk_count=0,
                session_id=self.session_id,
                model_version=0,
            )

    def release_lease(self, lease_id: str, *, buffer: str | None = None) -> None:
        self.leases.remove(lease_id)

    def acknowledge_chunks(
        self, subscription: str, chunk_id: int, *, buffer: str | None = None
    ) -> None:
        raise SubscriptionNotFoundError(subscription)

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        if self.errors:
            raise self.errors.pop(0)
        described = BufferDescription(
            name=name or "default",
            config=self.config,
            session_id=self.session_id,
            model_version=0,
            state=BufferState(
                chunk_count=len(self.chunks),
                lease_count=self.lease_count,
                counters=dict(self.counters),
            ),
        )
        self.look_count += 1
        return described

    def _known(self, after: int) -> int:
        """After a chunk that there has not been yet, all is read."""
        return after if after < self.next_chunk_id else -1

    def _is_news(self, after: int, known: str | None) -> bool:
        is_another = known is not None and known != self.session_id
        return bool(self.errors) or self.next_chunk_id - 1 > self._known(after) or is_another


def _reference(chunk_id: int, fragment: Fragment) -> FragmentReference:
    metadata = FragmentMetadata(
        worker_id=fragment.worker_id,
        fragment_index=fragment.fragment_index,
        session_id=fragment.session_id,
        model_version_min=0,
        model_version_max=0,
        payload=PayloadReference(f"{chunk_id:032x}", 1),
        step_count=fragment.step_count,
    )
    return FragmentReference(metadata, chunk_id=chunk_id, staleness_when_granted=0, use_count=0)
