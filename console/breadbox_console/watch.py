"""Watch the buffers that a token may see: look once a second, and read along by cursors.

Everything is read as any client reads: descriptions, and cursor reads whose leases are released as
soon as a few small columns are loaded. Nothing is used up.
"""

import asyncio
import itertools
import json
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from breadbox import aio
from breadbox.model.errors import (
    BackpressureError,
    BufferNotFoundError,
    InvalidRequestError,
    PayloadCorruptError,
    PermissionDeniedError,
    ReplayBufferError,
    StandbyError,
    UnauthenticatedError,
    UnsupportedArrayError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.trees import field_of
from breadbox.model.types import (
    ArrayType,
    BufferDescription,
    FragmentRead,
    FragmentReference,
    ReleaseMode,
)
from breadbox_console.episodes import (
    PROBLEMS_MAX,
    Episode,
    EpisodeIndex,
    FragmentKey,
    Span,
    key_of,
)
from breadbox_console.overview import BufferHistory, describe_buffer

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
SERVERS_PERIOD_S: Final = 5.0
READ_CHUNKS: Final = 64
"""Most chunks of one read."""
HEAD_CHUNKS: Final = 16
"""Chunks of which is known how near they are to leaving: those held longest."""
READ_LEASE_S: Final = 5.0
"""A read whose release is lost holds payloads for so long at most."""
POLL_S: Final = 10.0
"""Seconds for which a read waits at the server for a chunk."""
GATHER_S: Final = 0.5
"""Seconds between two reads, so that chunks come together: each read is two calls."""
GATHER_S_MIN: Final = 0.1
"""The same where chunks leave before they are read."""
KEEP_S: Final = 600.0
"""Seconds without an open page after which a buffer does not count as listed any more."""
KEPT_BYTES: Final = 256 * 2**20
"""Most bytes of whole fragments that are kept of a listed buffer: a page listed its episodes."""
SAMPLE_BYTES: Final = 16 * 2**20
"""Most bytes of whole fragments that are kept of another buffer."""
SAMPLE_S: Final = 15.0
"""Seconds after an episode that was kept whole in which no other one is, in an unlisted buffer."""
FOLLOW_S: Final = 10.0
"""Seconds of a worker's silence after which another worker's fragments are kept."""
SCHEMAS_MAX: Final = 64
RECENT_CHUNKS: Final = 512
"""Chunks that reading may be behind; beyond, older ones are left out."""
BUFFERS_MAX: Final = 32
"""Buffers of a token that are read along; of the others only descriptions are shown."""
VECTOR_MAX: Final = 16
"""Widest vector that is read of every fragment, and drawn as lines; of wider observations one step
is read now and then."""
TEXT_CHARACTERS_MAX: Final = 256
"""Widest text that is read of every fragment; an episode with a wider tag or task has none."""
ARRAYS_MAX: Final = 256
"""Arrays of a fragment that are shown; of more, the first ones."""
PAGES_MAX: Final = 64
"""Pages that follow one token's overview; the next one ends the stream of the oldest."""
Types = Mapping[str, ArrayType]
Loaded = list[tuple[FragmentReference, Types, Fragment]]
"""Fragments of which some arrays were read, and the types of all."""
_UNREADABLE: Final = (InvalidRequestError, PayloadCorruptError, UnsupportedArrayError)
"""Errors of a fragment that the next read would meet again."""
_COLUMNS: Final = (
    *("reward", "terminated", "truncated", "first", "episode_id", "value", "log_prob"),
    *("extras.episode_return", "extras.episode_length", "extras.task", "extras.tag"),
)


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """How much a watch keeps and reads."""

    steps_max: int = 2_000_000
    keep_s: float = 4 * 3600.0
    fragments_per_s: float = 400.0


@dataclass(slots=True, eq=False)
class WatchedBuffer:
    """What is known of one buffer, and how it is read."""

    name: str
    client: aio.Client
    history: BufferHistory
    index: EpisodeIndex
    skipped_chunk_count: int = 0
    """Chunks that left before they were read, or were left out to read no faster than allowed."""
    is_listed: bool = False
    """True from the time a page lists its episodes until no page is open for `KEEP_S`."""
    chosen_worker: str = ""
    """The worker by which a page filtered last, or empty."""
    kept_worker: str = ""
    """Its fragments are kept: the chosen worker, or one that sends."""
    kept_at: float = -math.inf
    """When it last sent, by the monotonic clock."""
    kept: OrderedDict[FragmentKey, Fragment] = field(default_factory=OrderedDict)
    """Its latest fragments, whole: they can be looked at when they have left the buffer."""
    kept_bytes: int = 0
    sample: Episode | None = None
    """The latest episode that was kept whole."""
    reader: asyncio.Task[None] | None = None
    backlog: int = 0
    """Chunks after the reader's cursor, by what the buffer counted."""
    closed_count: int | None = None
    """Chunks that the buffer had counted at the last look."""
    problems: dict[str, str] = field(default_factory=dict)
    """What the console failed to do with it at the last try, by what it was."""
    logged: set[str] = field(default_factory=set)
    """Problems that were logged: each is once."""

    def loadable_share(self, episode: Episode) -> float:
        """Return the share of an episode's steps that are kept or, by what is known, held."""
        count = sum(each.stop - each.start for each in episode.spans if self._is_loadable(each))
        return min(1.0, count / max(episode.length, 1))

    def can_be_watched(self, episode: Episode) -> bool:
        """Return True if an episode was seen from its start on, and each of its steps is there."""
        is_seen = episode.is_whole and episode.end != "cut" and episode.spans
        return bool(is_seen) and all(map(self._is_loadable, episode.spans))

    def to_watch(self) -> int | None:
        """Return the number of a late episode that can be watched whole, or None."""
        latest = [*itertools.islice(reversed(self.index.ended), 64), self.sample]
        return next((each.number for each in latest if each and self.can_be_watched(each)), None)

    def _is_loadable(self, span: Span) -> bool:
        return span.fragment.key in self.kept or self.history.is_held(span.fragment)

    def keep(self, fragments: Mapping[FragmentKey, Fragment]) -> None:
        """Keep whole fragments that were not kept before; the oldest ones make room."""
        self.kept.update(fragments)
        self.kept_bytes += sum(each.size_bytes for each in fragments.values())
        while self.kept_bytes > (KEPT_BYTES if self.is_listed else SAMPLE_BYTES):
            self.kept_bytes -= self.kept.popitem(last=False)[1].size_bytes

    def worker_to_keep(self, senders: Sequence[str]) -> str:
        """Return the worker to keep, after a read with fragments of the senders."""
        now = time.monotonic()
        if self.chosen_worker:
            self.kept_worker = self.chosen_worker
        elif senders and self.kept_worker not in senders and now - self.kept_at > FOLLOW_S:
            self.kept_worker = senders[0]
        if self.kept_worker in senders:
            self.kept_at = now
        return self.kept_worker

    def note_sample(self, now: float) -> None:
        """Take an episode that was kept whole, if one ended in the read at a Unix time."""
        for each in reversed(self.index.ended):
            if each.last_seen_at < now:
                return
            if (
                each.is_whole
                and each.spans
                and all(span.fragment.key in self.kept for span in each.spans)
            ):
                self.sample = each
                return

    def note_arrivals(self, description: BufferDescription) -> None:
        """Count what arrived since the last look."""
        closed = description.state.counters.get("chunks_closed", 0)
        if self.closed_count is not None:
            self.backlog += max(0, closed - self.closed_count)
        self.closed_count = closed

    async def look_at_head(self) -> None:
        """Read which chunks are held longest."""
        try:
            async with self.reading(chunk_count_max=HEAD_CHUNKS) as read:
                self.history.head = list(read.fragments)
        except ReplayBufferError as error:
            log.debug("looking at %s: %s", self.name, error)

    @asynccontextmanager
    async def reading(
        self, after_chunk_id: int | None = None, **how: Any
    ) -> AsyncIterator[FragmentRead]:
        """Read by a cursor; the lease is released after the block, or expires if that fails."""
        how |= {"lease_s": READ_LEASE_S, "is_look": True, "buffer": self.name}
        read = await self.client.service.read_fragments(after_chunk_id, **how)
        try:
            yield read
        finally:
            try:
                if read.lease_id is not None:
                    await self.client.service.release_lease(
                        read.lease_id, mode=ReleaseMode.CONSUMED, buffer=self.name
                    )
            except ReplayBufferError as error:
                log.debug("a read's lease expires by itself: %s", error)


@dataclass(slots=True)
class Watch:
    """Everything that one token has seen.

    Attributes:
        client: A client with that token; `connect` makes one of another address.
        buffers: By name.
        problem: Why the server could not be asked at the last look, or empty.
    """

    client: aio.Client
    limits: WatchLimits
    connect: Callable[[str], aio.Client]
    buffers: dict[str, WatchedBuffer] = field(default_factory=dict)
    problem: str = ""
    is_refused: bool = False
    """True if the server refused the token at the last look."""
    server: dict[str, Any] = field(default_factory=dict)
    viewed_at: float = field(default_factory=time.monotonic)
    """When a page was last open, by the monotonic clock."""
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)
    _tasks: asyncio.TaskGroup | None = None
    _types: dict[int, Types] = field(default_factory=dict)
    """Types of the arrays of a schema, by its hash."""
    _latest: str = ""
    """The overview as of the last look, as JSON: pages share it."""
    _pages: OrderedDict[object, None] = field(default_factory=OrderedDict)
    """Pages that follow the overview, the oldest first."""

    async def run(self) -> None:
        """Look once a second until cancelled; the server may be away meanwhile."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._repeat(self._look_at_servers, SERVERS_PERIOD_S))
                await self._repeat(self._look, PERIOD_S)
        finally:
            await self.client.close()

    async def _repeat(self, step: Callable[[], Awaitable[None]], period_s: float) -> None:
        """Take a step once a period until cancelled. One that fails is logged, and shown."""
        while True:
            started_at = time.monotonic()
            try:
                await step()
            except Exception as error:
                log.exception("the console failed to look at %s", self.client.address)
                self.problem = f"the console failed: {_said(error)}"
            await asyncio.sleep(max(0.05, period_s - (time.monotonic() - started_at)))

    async def overviews(self) -> AsyncIterator[str]:
        """Yield the overview as JSON now, and again after each look or a while."""
        page = object()
        self._pages[page] = None
        if len(self._pages) > PAGES_MAX:
            self._pages.popitem(last=False)
        try:
            while page in self._pages:
                self.viewed_at = time.monotonic()
                if self._latest:
                    yield self._latest
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S), self._news:
                        await self._news.wait()
        finally:
            self._pages.pop(page, None)

    async def _look(self) -> None:
        now = time.time()
        try:
            found = {each.name: each for each in await self.client.list_buffers()}
            self.problem, self.is_refused = "", False
        except ReplayBufferError as error:
            self.problem = str(error)
            self.is_refused = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
        else:
            await self._take(found, now)
        self._latest = json.dumps(self._overview(now), allow_nan=False)
        async with self._news:
            self._news.notify_all()

    async def _take(self, found: dict[str, BufferDescription], now: float) -> None:
        for name in self.buffers.keys() - found.keys():
            gone = self.buffers.pop(name)
            if gone.reader is not None:
                gone.reader.cancel()
        for name, listed in found.items():
            watched = self.buffers.get(name)
            if watched is None:
                limits = self.limits
                watched = self.buffers[name] = WatchedBuffer(
                    *(name, self.client, BufferHistory()),
                    EpisodeIndex(steps_max=limits.steps_max, age_s_max=limits.keep_s),
                )
            try:
                await self._take_one(watched, listed, now)
                watched.problems.pop("be looked at", None)
            except Exception as error:  # noqa: BLE001 - logged, and shown
                _note(watched, "be looked at", error)

    async def _take_one(
        self, watched: WatchedBuffer, listed: BufferDescription, now: float
    ) -> None:
        description = await self._describe(watched, listed)
        watched.history.add(now, description)
        watched.note_arrivals(description)
        is_unread = watched.reader is None or watched.reader.done()
        if is_unread and len(self.buffers) <= BUFFERS_MAX and self._tasks:
            watched.reader = self._tasks.create_task(self._follow(watched))
        if int(now) % 3 == 0:
            await watched.look_at_head()

    async def _describe(
        self, watched: WatchedBuffer, listed: BufferDescription
    ) -> BufferDescription:
        """Return a buffer with its subscriptions and what happened to its chunks, if it may be."""
        try:
            if len(self.buffers) <= BUFFERS_MAX:
                after = watched.history.event_number
                return await self.client.get_buffer(
                    watched.name, events_after=after, with_workers=True
                )
        except ReplayBufferError as error:
            log.debug("describing %s: %s", watched.name, error)
        return listed

    async def _look_at_servers(self) -> None:
        try:
            config = await self.client.service.get_store_config()
            self.server["concerns"] = list(config.store_concerns)
        except ReplayBufferError as error:
            log.debug("asking for the server's configuration: %s", error)
        self.server["servers"] = await self._servers()

    async def _servers(self) -> list[str]:
        """Return of each of several addresses what is there."""
        addresses = self.client.address.split(",")
        found = []
        for address in addresses if len(addresses) > 1 else ():
            client = self.connect(address)
            try:
                await client.list_buffers()
                said = "leads"
            except StandbyError as error:
                behind = f"{error.lag_turns} turns, {error.lag_s or 0:.1f} s behind"
                said = f"stands by, {behind}" if error.lag_turns else "stands by"
            except ReplayBufferError:
                said = "does not answer"
            finally:
                await client.close()
            found.append(f"{address} {said}")
        return found

    def _overview(self, now: float) -> dict[str, Any]:
        buffers = []
        for each in self.buffers.values():
            counts = {
                "skipped": each.skipped_chunk_count,
                "episodes": len(each.index.episodes),
                "watch": each.to_watch(),
            }
            try:
                if each.history.looks:
                    shown = describe_buffer(each.history, each.index) | counts
                    json.dumps(shown, allow_nan=False)
                    buffers.append(shown)
                each.problems.pop("be shown", None)
            except Exception as error:  # noqa: BLE001 - logged, and shown
                _note(each, "be shown", error)
        order = {"bad": 0, "warn": 1, "good": 2, "idle": 3}
        buffers.sort(key=lambda each: (order[each["level"]], each["name"]))
        problems = [text for each in self.buffers.values() for text in each.problems.values()]
        concerns = [*self.server.get("concerns", ()), *problems]
        return {
            "time": now,
            "problem": self.problem,
            "server": {"address": self.client.address, **self.server, "concerns": concerns},
            "buffers": buffers,
        }

    # Reading along ------------------------------------------------------------------------------

    async def _follow(self, watched: WatchedBuffer) -> None:
        """Read along until the buffer is gone; after a failure, anew from the recent chunks."""
        while True:
            try:
                return await self._read_along(watched)
            except Exception as error:  # noqa: BLE001 - logged, and shown
                _note(watched, "be read", error)
                await asyncio.sleep(SERVERS_PERIOD_S)

    async def _read_along(self, watched: WatchedBuffer) -> None:
        """Read small columns of every chunk that arrives, no faster than allowed."""
        cursor = await self._recent_cursor(watched)
        session_id: str | None = None
        gather_s = GATHER_S
        while True:
            cursor = self._caught_up(watched, cursor)
            try:
                async with watched.reading(
                    cursor,
                    chunk_count_max=READ_CHUNKS,
                    max_wait_s=POLL_S,
                    known_session_id=session_id,
                ) as read:
                    loaded = await self._load(watched, read.fragments, _is_small)
                    sampled = random.sample(read.fragments, min(1, len(read.fragments)))
                    pictures = await self._load(watched, sampled, _is_wide, (0, 1))
                    await self._keep(watched, read.fragments)
            except (BufferNotFoundError, PermissionDeniedError, UnauthenticatedError):
                return  # The next look says so, and begins anew if the buffer comes back.
            except ReplayBufferError as error:
                slow = isinstance(error, BackpressureError)
                log.debug("reading %s: %s", watched.name, error)
                await asyncio.sleep(5.0 if slow else PERIOD_S)
                continue
            now = time.time()
            self._index(watched, loaded, pictures, now)
            watched.note_sample(now)
            watched.problems.pop("be read", None)
            watched.skipped_chunk_count += read.skipped_chunk_count
            cursor, session_id = read.cursor, read.session_id
            chunk_count = len({each.chunk_id for each in read.fragments})
            watched.backlog = max(0, watched.backlog - chunk_count - read.skipped_chunk_count)
            if read.fragments:
                gather_s = next_pause_s(gather_s, is_late=read.skipped_chunk_count > 0)
                pause_s = len(read.fragments) / self.limits.fragments_per_s
                await asyncio.sleep(max(gather_s, pause_s))

    def _index(self, watched: WatchedBuffer, loaded: Loaded, pictures: Loaded, now: float) -> None:
        """Take what was read into the index; a fragment that cannot be taken fails alone."""
        index = watched.index
        for is_picture, (reference, types, fragment) in (
            *((False, each) for each in loaded),
            *((True, each) for each in pictures),
        ):
            worker_id = reference.metadata.worker_id
            try:
                if is_picture:
                    index.note_arrays(worker_id, fragment, "obs")
                else:
                    index.add(reference, types, fragment, now)
            except Exception as error:  # noqa: BLE001 - logged, and shown
                _leave_out(watched, reference, error)

    async def _recent_cursor(self, watched: WatchedBuffer) -> int | None:
        """Return a cursor that leaves the latest `RECENT_CHUNKS` to read, or None to read all."""
        held = watched.history.looks[-1][1].state.chunk_count
        watched.backlog = min(held, RECENT_CHUNKS)
        await watched.look_at_head()
        head = watched.history.head
        # Ids ascend, so the newest chunk is at least so many after the oldest.
        return head[0].chunk_id + held - RECENT_CHUNKS if head and held > RECENT_CHUNKS else None

    def _caught_up(self, watched: WatchedBuffer, cursor: int | None) -> int | None:
        """Return the cursor, moved on where more arrives than may be read."""
        ahead = watched.backlog - RECENT_CHUNKS
        if cursor is None or ahead <= 0:
            return cursor
        watched.backlog -= ahead
        watched.skipped_chunk_count += ahead
        return cursor + ahead

    async def _load(
        self,
        watched: WatchedBuffer,
        references: Sequence[FragmentReference],
        is_read: Callable[[str, ArrayType], bool],
        steps: tuple[int, int] | None = None,
    ) -> Loaded:
        """Load those arrays that the fragments have; fragments that are gone are left out."""
        try:
            types = await self._types_of(references)
            columns = [*{path for each in types for path in each if is_read(path, each[path])}]
            if not columns:
                return []
            loaded = await self.client.load_fragments(references, columns=columns, steps=steps)
            return list(zip(references, types, loaded, strict=True))
        except Exception as error:  # noqa: BLE001 - logged, and shown
            if len(references) == 1:
                _leave_out(watched, references[0], error)
        # One of them is gone, has other arrays, or cannot be read.
        parts = references if len(references) > 1 else ()
        return [
            found for each in parts for found in await self._load(watched, [each], is_read, steps)
        ]

    async def _types_of(self, references: Sequence[FragmentReference]) -> list[Types]:
        """Return the types of each fragment's arrays; those of a declared schema are read once."""
        found = []
        for each in references:
            code = each.metadata.schema_hash
            types = self._types.get(code)
            if types is None:
                (described,) = await self.client.describe_arrays([each])
                first = {*itertools.islice(described, ARRAYS_MAX), *_COLUMNS}
                types = {path: described[path] for path in described if path in first}
            if code and len(self._types) < SCHEMAS_MAX:
                self._types[code] = types
            found.append(types)
        return found

    async def _keep(self, watched: WatchedBuffer, references: Sequence[FragmentReference]) -> None:
        """Load one worker's fragments whole: all in a listed buffer, else some episodes."""
        if time.monotonic() - self.viewed_at > KEEP_S:
            watched.is_listed, watched.chosen_worker = False, ""
        watched.keep({})
        rests_until = watched.sample.last_seen_at + SAMPLE_S if watched.sample else 0.0
        if not watched.is_listed and time.time() < rests_until:
            return
        worker = watched.worker_to_keep([each.metadata.worker_id for each in references])
        for each in references:
            key = key_of(each)
            if key.worker_id == worker and key not in watched.kept:
                try:
                    watched.keep({key: (await self.client.load_fragments([each]))[0]})
                except Exception as error:  # noqa: BLE001 - logged, and shown
                    _leave_out(watched, each, error)


def next_pause_s(pause_s: float, *, is_late: bool) -> float:
    """Return the seconds between two reads after a read that was late, or not, for some chunks."""
    return max(GATHER_S_MIN, pause_s / 2) if is_late else min(GATHER_S, 1.1 * pause_s)


def _is_small(path: str, array: ArrayType) -> bool:
    """Return True if an array is read of every fragment."""
    is_played = field_of(path) in ("obs", "action")
    is_narrow = math.prod(array.shape[1:]) <= (VECTOR_MAX if is_played else 1)
    return is_narrow and _is_text_short(array) and (is_played or path in _COLUMNS)


def _is_wide(path: str, array: ArrayType) -> bool:
    """Return True if one step of an observation is read now and then."""
    return field_of(path) == "obs" and math.prod(array.shape[1:]) > VECTOR_MAX


def _is_text_short(array: ArrayType) -> bool:
    kind, width = array.type_name[1:2], array.type_name[2:]
    return kind not in "USV" or int(width) <= TEXT_CHARACTERS_MAX


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _note(watched: WatchedBuffer, what: str, error: Exception) -> None:
    """Show that the console failed at a buffer, and log it once."""
    problem = f"Buffer {watched.name} cannot {what}: the console failed: {_said(error)}"
    if problem not in watched.logged and len(watched.logged) < PROBLEMS_MAX:
        watched.logged.add(problem)
        log.error("buffer %s cannot %s", watched.name, what, exc_info=error)
    watched.problems[what] = problem


def _leave_out(watched: WatchedBuffer, reference: FragmentReference, error: Exception) -> None:
    """Log that a fragment is left out; unless it is gone, or Redis is, show that at its worker."""
    data = reference.metadata
    is_usual = isinstance(error, ReplayBufferError) and not isinstance(error, _UNREADABLE)
    log.log(
        logging.DEBUG if is_usual else logging.WARNING,
        *("buffer %s: fragment %d of %s is left out: %s", watched.name),
        *(data.fragment_index, data.worker_id, _said(error)),
    )
    if not is_usual:
        problem = f"sent an unreadable fragment ({_said(error)})"
        watched.index.note_problem(data.worker_id, problem, time.time())
