"""A buffer's chunks in the order of arrival, as a client reads them, without a server."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from breadbox.errors import PayloadMissingError
from breadbox.fragment import Fragment
from breadbox.types import FragmentMetadata, FragmentReference, PayloadReference


@dataclass(frozen=True)
class FakeRead:
    fragments: tuple[FragmentReference, ...]
    lease_id: str | None
    cursor: int
    skipped_chunk_count: int
    session_id: str


@dataclass
class FakeFeed:
    """One fragment makes a chunk. Calls fail with `errors`, the first first, if there are any."""

    session_id: str = "s"
    chunks: list[tuple[int, Fragment]] = field(default_factory=list)
    next_chunk_id: int = 0
    leases: set[str] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Ids of payloads that are gone."""
    error_call: str = "read"
    read_count: int = 0
    may_load: threading.Event = field(default_factory=threading.Event)
    """Loads wait for it."""

    def __post_init__(self) -> None:
        self.may_load.set()
        self._changed = threading.Condition()

    def append(self, *fragments: Fragment) -> None:
        with self._changed:
            for fragment in fragments:
                self.chunks.append((self.next_chunk_id, fragment))
                self.next_chunk_id += 1
            self._changed.notify_all()

    def evict(self, count: int) -> None:
        with self._changed:
            del self.chunks[:count]

    def start_session(self, session_id: str) -> None:
        with self._changed:
            self.session_id = session_id
            self.chunks.clear()
            self._changed.notify_all()

    def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float = 0.0,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        buffer: str | None = None,
    ) -> FakeRead:
        self._fail("read")
        after = -1 if after_chunk_id is None else after_chunk_id
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    bool(self.errors)
                    or self.next_chunk_id - 1 > after
                    or known_session_id not in (None, self.session_id)
                ),
                max_wait_s,
            )
            self.read_count += 1
            found = [chunk for chunk in self.chunks if chunk[0] > after][:chunk_count_max]
            cursor = found[-1][0] if found else self.next_chunk_id - 1
            lease_id = f"lease-{self.read_count}" if found else None
            if lease_id is not None:
                self.leases.add(lease_id)
            skipped = 0 if after_chunk_id is None else cursor - after - len(found)
            fragments = tuple(_reference(chunk_id, each) for chunk_id, each in found)
            return FakeRead(fragments, lease_id, cursor, skipped, self.session_id)

    def load_fragments(
        self, references: Sequence[FragmentReference], *, columns: Sequence[str] | None = None
    ) -> list[Fragment]:
        self.may_load.wait()
        self._fail("load")
        for reference in references:
            if reference.metadata.payload.payload_id in self.lost:
                raise PayloadMissingError(reference.metadata.payload.payload_id)
        with self._changed:
            every = dict(self.chunks)
            return [every[reference.chunk_id] for reference in references]

    def release_lease(self, lease_id: str, *, buffer: str | None = None) -> None:
        with self._changed:
            self.leases.remove(lease_id)

    def _fail(self, call: str) -> None:
        with self._changed:
            if self.errors and self.error_call == call:
                raise self.errors.pop(0)


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
    return FragmentReference(metadata, chunk_id=chunk_id, staleness=0, use_count=0)
