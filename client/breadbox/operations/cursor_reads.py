"""Follow a buffer by a cursor, as operations for both clients: read, load, release, repeat."""

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby

from breadbox.model import errors
from breadbox.model.fragment import Fragment
from breadbox.model.options import WAIT_S_MAX_PER_CALL
from breadbox.model.types import FragmentRead, FragmentReference
from breadbox.operations import calls, operations
from breadbox.operations.operations import Context, Operation

_log = logging.getLogger(__name__)

LOST_ERRORS = (errors.PayloadMissingError, errors.PayloadCorruptError, errors.PayloadFormatError)
"""Errors that say that a payload is gone, or unreadable for good."""


@dataclass(frozen=True, slots=True)
class LoadedRead:
    """The next fragments of a buffer, loaded."""

    fragments: tuple[Fragment, ...] = field(repr=False)
    """Fragments in order of arrival."""
    references: tuple[FragmentReference, ...] = field(repr=False)
    """The server's reference of each fragment, with its `chunk_id`."""
    cursor: int
    """The chunk after which the next read begins."""
    skipped_chunk_count: int
    """Chunks up to the cursor that left the buffer before they were loaded, or cannot be read."""
    session_id: str
    """Session that was current, or empty if none was."""
    model_version: int | None


@dataclass(repr=False, eq=False)
class Tail:
    """A reader that follows a buffer; it ends after `max_wait_s` without news, or never if None."""

    context: Context
    buffer: str
    request: calls.ReadRequest
    _: KW_ONLY
    is_acknowledging: bool
    max_wait_s: float | None
    columns: Sequence[str] | None
    is_mapped: bool
    _unacknowledged: int | None = field(default=None, init=False)

    def next(self) -> Operation[LoadedRead | None]:
        """Return the next read, or None without news; a new session or a set-back is news, too."""
        yield from self._acknowledge()
        wait_s = WAIT_S_MAX_PER_CALL if self.max_wait_s is None else self.max_wait_s
        while True:
            known, after = self.request.known_session_id, self.request.after_chunk_id
            request = replace(self.request, max_wait_s=wait_s)
            read = yield from operations.read(self.context, self.buffer, request)
            self.request = replace(
                self.request, after_chunk_id=read.cursor, known_session_id=read.session_id
            )
            is_news = (
                read.fragments
                or read.skipped_chunk_count
                or read.session_id != (known or "")
                or (after is not None and read.cursor < after)
            )
            if is_news:
                loaded = yield from self._loaded(read)
                self._unacknowledged = read.cursor
                return loaded
            if self.max_wait_s is not None:
                return None

    def _acknowledge(self) -> Operation[None]:
        name, cursor = self.request.subscription, self._unacknowledged
        if self.is_acknowledging and name is not None and cursor is not None:
            call = calls.acknowledge_chunks(self.buffer, name, cursor)
            try:
                yield from operations.invoke(self.context, call)
            except errors.InvalidRequestError as error:
                if error.field != "chunk_id":
                    raise
                # The buffer does not know the chunk: its journal was set back. The subscription's
                # position says what to read next.
                _log.warning("subscription %s was set back: %s", name, error)
                self.request = replace(self.request, after_chunk_id=None)
        self._unacknowledged = None

    def _loaded(self, read: FragmentRead) -> Operation[LoadedRead]:
        references, lost_count = read.fragments, 0
        fragments: list[Fragment] = []
        if references:
            references, fragments, lost_count = yield from operations.under_lease(
                self.context, self.buffer, read.lease_id, self._load_all(references)
            )
        return LoadedRead(
            fragments=tuple(fragments),
            references=tuple([operations.without_body(each) for each in references]),
            cursor=read.cursor,
            skipped_chunk_count=read.skipped_chunk_count + lost_count,
            session_id=read.session_id,
            model_version=read.model_version,
        )

    def _load_all(
        self, references: tuple[FragmentReference, ...]
    ) -> Operation[tuple[tuple[FragmentReference, ...], list[Fragment], int]]:
        """Load a read; return what could be loaded, and how many chunks could not."""
        try:
            return references, (yield from self._load(references)), 0
        except LOST_ERRORS as error:
            _log.warning("some chunks read from buffer %s are lost: %s", self.buffer, error)
            return (yield from self._load_each(references))

    def _load_each(
        self, references: Sequence[FragmentReference]
    ) -> Operation[tuple[tuple[FragmentReference, ...], list[Fragment], int]]:
        kept: list[FragmentReference] = []
        fragments: list[Fragment] = []
        lost_count = 0
        for _, group in groupby(references, lambda each: each.chunk_id):
            chunk = list(group)
            try:
                fragments += yield from self._load(chunk)
            except LOST_ERRORS:
                lost_count += 1
            else:
                kept += chunk
        return tuple(kept), fragments, lost_count

    def _load(self, references: Sequence[FragmentReference]) -> Operation[list[Fragment]]:
        return (
            yield from operations.load_fragments(
                self.context, references, self.columns, None, is_mapped=self.is_mapped
            )
        )
