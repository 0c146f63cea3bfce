"""Describe a client's operations without performing them: no I/O, no clock, no threads.

An operation is a generator that yields *effects* (send this call, sleep, run this function that may
block). The interpreter performs each and sends the result, or throws the error, into the generator.
The blocking and the asyncio client are two interpreters of the same operations.

Invariants:
    O1  A call is repeated only if `calls.METHODS` says why that is safe, under `retry.RetryPolicy`.
    O2  A call ends at the latest `deadline_s` and `reconnect_s` after the last of these: the end of
        the wait that was asked for, an answer, a moved byte of a payload.
    O3  A writer deletes a payload only if the server certainly does not hold it: the call that was
        answered was sent once. In doubt it stays, unannounced, and expires by itself.
    O4  Certificates that do not fit are raised immediately if the server never answered before;
        afterwards they are an outage like any other.
    O5  An outage is logged from the first failed attempt on, in a few lines in all; a wait for room
        in the store after a second, with the store's words, which the server gets as well.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc

from breadbox import payload, stores
from breadbox.model import errors
from breadbox.model.fragment import Part, Sendable
from breadbox.model.options import WAIT_S_MAX_PER_CALL, ClientOptions
from breadbox.model.presets import STORE_FULL_ADVICE
from breadbox.model.types import (
    AdmissionOutcome,
    AppendReply,
    AppendResult,
    ArrayType,
    BufferDescription,
    Device,
    FragmentRead,
    FragmentReference,
    GroupEnd,
    LeaseGrant,
    ModelState,
    NewestVersion,
    PayloadReference,
    PrioritiesReply,
    PublishReply,
    ReleaseMode,
    StoreConfig,
    TicketGrant,
)
from breadbox.operations import calls
from breadbox.operations.calls import Call
from breadbox.operations.retry import (
    BACKOFF_S_MAX,
    TAKEOVER_BACKOFF_S_MAX,
    RetryBudget,
    RetryPolicy,
    is_outage,
)
from breadbox.operations.sharing import TOGETHER_S, TogetherError
from breadbox.reading.batches import Batch, Stack, load_batch
from breadbox.reading.parts import read_with_parts
from breadbox.shared.outages import Outages
from breadbox.stores.base import PayloadStore
from breadbox.stores.deadline import Deadline
from breadbox.stores.gateway import open_gateway_store
from breadbox.stores.reading import InlineStore, StoreOnUse
from breadbox.stores.urls import GATEWAY_URL
from breadbox.wire import conversion as wire
from breadbox.wire import status
from breadbox.wire.route import Route

T = TypeVar("T")


APPEND_COUNT_MAX = 256
"""Fragments announced in one call; the server accepts 4096. It is small, because writing the first
group and judging the last overlap with nothing."""
APPEND_BYTES_MAX = 64 * 2**20
"""Payload bytes written before they are announced; a larger group is cut."""
AT_ONCE_COUNT_MAX = 4
"""Most small fragments that the calling thread encodes itself, in some 20 µs each."""
SHARING_WAIT_S = 10 * TOGETHER_S
"""Shortest `append_wait_s` of an append that waits for company: a shorter one might pass in that,
before the append has a position in the queue for room."""
INLINE_REQUEST_BYTES_MAX = 768 * 2**10
"""Bytes of inline payloads in one call: with all schemas it is under the 2 MiB that the server
accepts."""
_REFUSED = frozenset(
    {
        AdmissionOutcome.DUPLICATE,
        AdmissionOutcome.STALE,
        AdmissionOutcome.WRONG_SESSION,
        AdmissionOutcome.GROUP_ENDED,
        AdmissionOutcome.PART_CONFLICT,
    }
)
PRIORITY_MAX = 1e30
"""The largest priority that the server accepts."""
INSTANT_S = 1e-3
"""Seconds left at which a wait counts as over."""
PAGES_MAX = 1000
"""Most pages of buffers that are requested; a server has one, or a few."""
SESSIONS_MAX = 1024
"""Most sessions that a client remembers to have heard of; beyond, it begins anew."""
RETRY_S = 0.25
"""Seconds before an append is retried if the server names no delay."""
ROOM_PART = 0.5
"""Part of an attempt's time for which the server may wait for room; the rest is for the answer."""
ONCE_S_MAX = 3.0
"""Deadline of a call that is not repeated."""
FULL_TOLD_S = 1.0
"""Seconds for which a write without room waits before it is logged and reported."""
FULL_TOLD_EVERY_S = 5.0
"""Seconds between two reports of it to the server, which shows one for 10 s."""
_WRITING = "writing payloads"
_APPENDING = "appending"
"""Names of the activities that a full store stops, at the client and at the server."""
_MOVING = "moving payloads"
"""Name of the activity that an outage of the store stops."""


@dataclass(frozen=True, slots=True)
class Invoke:
    """Send a call; the result is its decoded answer."""

    call: Call[Any]
    timeout_s: float
    is_shared: bool = False
    """True for a call that may go together with those of other callers."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep; the result is None."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class RunBlocking:
    """Run a function that moves payloads, and may block for that; the result is its result."""

    function: Callable[[Deadline], Any]
    """Called with the deadline, which it must keep."""
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class Concurrently:
    """Send a call, and meanwhile run a function and drop its errors; the result is the answer."""

    invoke: Invoke
    blocking: RunBlocking


Effect = Invoke | Sleep | RunBlocking | Concurrently
Operation = Generator[Effect, Any, T]


class StoreSlot:
    """The payload store of a client, once it is opened. Thread-safe."""

    def __init__(self, store: PayloadStore | None = None) -> None:
        self._lock = Lock()
        self.store = store
        """The store, or None before it is opened and after it is closed."""
        self.inline_bytes_max = calls.INLINE_REPLY_BYTES_MAX if store is None else 0
        """Most bytes of inline payloads in a reply: none if the store is the caller's."""
        self.config: StoreConfig | None = None
        """The settings that the server returned, or None before."""

    def settle(self, store: PayloadStore) -> PayloadStore:
        """Keep the first store that is passed, close a later one, and return the kept one."""
        with self._lock:
            if self.store is None:
                self.store = store
            kept = self.store
        if kept is not store:
            store.close()
        return kept

    def close(self) -> None:
        """Close the store, if there is one. Idempotent."""
        with self._lock:
            store, self.store = self.store, None
        if store is not None:
            store.close()


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What was declared of later fragments."""

    texts: Mapping[str, str] = field(default_factory=dict)
    known: set[tuple[str, str]] = field(default_factory=set)
    """Buffers and sessions in which the server knows it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Context:
    """The dependencies of operations; all are injected."""

    address: str
    """One or several addresses, as `connect` takes them."""
    options: ClientOptions
    now: Callable[[], float]
    """Monotonic clock, seconds."""
    rng: random.Random
    new_id: Callable[[], str]
    outages: Outages
    slot: StoreSlot = field(default_factory=StoreSlot)
    waits: Outages = field(init=False)
    """Waits for room: no outages, since the server answers."""
    origin: Origin = field(default_factory=Origin)
    """What the client's fragments come from; said with each schema that is declared."""
    has_answered: bool = field(default=False, init=False)
    """True once the server answered; it never becomes False again, so threads need no lock."""
    route: Route = field(init=False)
    policy: RetryPolicy = field(init=False)
    """Retry policy of most calls."""
    append_policy: RetryPolicy = field(init=False)
    """Retry policy of calls that may wait while buffer or store is full."""
    _newest: WeakValueDictionary[tuple[str, str], NewestVersion] = field(
        default_factory=WeakValueDictionary, init=False
    )
    """The newest version by buffer and session, for as long as a reference of it is there."""
    _sessions: dict[tuple[str, str], None] = field(default_factory=dict, init=False)
    """Sessions that answers have named, by buffer, so that a late answer names no new one."""
    _latest_sessions: dict[str, str] = field(default_factory=dict, init=False)
    """The session of each buffer that answers began to name last."""
    _newest_lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        self.waits = Outages(self.now)
        self.route = Route(self.address)
        places = len(self.route.addresses)
        self.policy = RetryPolicy(
            places=places,
            backoff_s_max=BACKOFF_S_MAX if places == 1 else TAKEOVER_BACKOFF_S_MAX,
            elapsed_s_max=self.options.reconnect_s,
            answer_s_max=self.options.deadline_s,
            backpressure_s_max=self.options.reconnect_s,
        )
        self.append_policy = replace(self.policy, backpressure_s_max=self.options.append_wait_s)

    def deadline(self, budget: RetryBudget | None = None) -> Deadline:
        """Return the deadline of an attempt at the store that begins now."""
        ends_at = math.inf if budget is None else budget.ends_at
        return Deadline(self.options.deadline_s, ends_at=ends_at, now=self.now)

    def heard(self, call: Call[Any], answer: Any) -> None:
        """Note the version that an answer names, for the references of its session."""
        version = getattr(answer, "model_version", None)
        if version is None:
            return
        request: Any = call.request
        session_id = getattr(answer, "session_id", "") or getattr(request, "session_id", "")
        key = (getattr(request, "buffer", "") or request.name, session_id)
        if session_id and key not in self._sessions:
            if len(self._sessions) >= SESSIONS_MAX:
                self._sessions.clear()
            self._sessions[key] = None
            self._latest_sessions[key[0]] = session_id
        newest, references = self._newest.get(key), getattr(answer, "fragments", ())
        if newest is None and references:
            newest = self.newest(*key)
        if newest is not None and newest.version < version:
            with self._newest_lock:
                newest.version = max(newest.version, version)
        for reference in references:
            reference._newest = newest  # noqa: SLF001 - the same library's

    def latest_session(self, buffer: str) -> str:
        """Return the session of a buffer that answers began to name last, or empty if none did."""
        return self._latest_sessions.get(buffer, "")

    def newest(self, buffer: str, session_id: str) -> NewestVersion:
        """Return what notes the newest version of a session that any answer names."""
        with self._newest_lock:
            return self._newest.setdefault((buffer, session_id), NewestVersion())

    def failed_call(self, place: int, error: grpc.RpcError) -> errors.ReplayBufferError:
        """Translate gRPC's error; the next call goes to another address if that helps."""
        translated = status.from_rpc_error(
            error,
            self.route.addresses[place],
            encrypted=self.options.tls is not None,
            is_one_of_many=len(self.route.addresses) > 1,
        )
        self.route.failed(place, translated)
        return translated


def repeat(
    context: Context,
    make_call: Callable[[float], Call[T]],
    policy: RetryPolicy | None = None,
    meanwhile: Callable[[Deadline], None] | None = None,
    *,
    is_shared: bool = False,
) -> Generator[Effect, Any, tuple[T, int]]:
    """Send a call until it is answered, refused, or the retry policy gives up.

    `make_call` runs for every attempt; `meanwhile` during the first, and keeps its errors itself.
    With `is_shared` the first goes together with those of other callers.
    """
    budget = RetryBudget(policy or context.policy, context.rng)
    causes: deque[errors.ReplayBufferError] = deque(maxlen=len(context.route.addresses))
    sent_before = 0
    while True:
        now = context.now()
        call = make_call(now)
        calling = f"calling {call.method}"
        invocation = Invoke(call, call.wait_s + budget.answer_s(now=now), is_shared)
        effect: Effect = invocation
        is_shared = False
        if meanwhile is not None:
            effect = Concurrently(invocation, RunBlocking(meanwhile, context.deadline()))
            meanwhile = None
        try:
            answer = yield effect
        except TogetherError:
            sent_before = 1  # No attempt of its own, but it may have arrived.
        except errors.ReplayBufferError as error:
            now = context.now()
            # A refusal is an answer too; ClosedError comes from this client, not from a server.
            was_answered = not (is_outage(error) or isinstance(error, errors.ClosedError))
            context.has_answered |= was_answered
            # A standby carries out no call, so repeating is safe.
            may_pass = (call.repeatable or isinstance(error, errors.StandbyError)) and (
                context.has_answered or not isinstance(error, errors.TlsError)
            )
            delay_s = budget.delay_s_after(error, now=now) if may_pass else None
            cause = error
            if is_outage(error):
                causes.append(error)
                cause = max(reversed(causes), key=_tells)
            if was_answered:
                context.outages.succeeded(calling)
            elif delay_s is not None and budget.attempts >= len(context.route.addresses):
                context.outages.failed(calling, cause)
            if delay_s is not None and budget.waited_for_room_s(now=now) >= FULL_TOLD_S:
                context.waits.failed(calling, error)
            if delay_s is None:
                if budget.attempts > 1:
                    cause.add_note(
                        f"gave up after {budget.attempts} attempts in "
                        f"{budget.elapsed_s(now=now):.1f} s (reconnect_s)"
                    )
                if cause is error:
                    raise
                raise cause from error
            yield Sleep(delay_s)
        else:
            context.has_answered = True
            context.outages.succeeded(calling)
            context.waits.succeeded(calling)
            context.heard(call, answer)
            return answer, sent_before + budget.attempts + 1


def _tells(error: errors.ReplayBufferError) -> int:
    """Rank an outage by how much it says: a server that knows its cause goes before silence."""
    return error.is_answer + (error.is_answer and not isinstance(error, errors.StandbyError))


def _always(call: Call[T]) -> Callable[[float], Call[T]]:
    return lambda now: call


def invoke(context: Context, call: Call[T], *, is_shared: bool = False) -> Operation[T]:
    """Send a call that does not wait; see `repeat`."""
    answer, _ = yield from repeat(context, _always(call), is_shared=is_shared)
    return answer


def invoke_once(context: Context, call: Call[T]) -> Operation[T]:
    """Send a call once: for a call that the caller repeats, or whose effect ends by itself."""
    answer: T = yield Invoke(call, min(context.options.deadline_s, ONCE_S_MAX))
    return answer


def list_buffers(context: Context) -> Operation[tuple[BufferDescription, ...]]:
    """Return all buffers, sorted by name."""
    found: list[BufferDescription] = []
    page_token = ""
    for _ in range(PAGES_MAX):
        page, page_token = yield from invoke(context, calls.list_buffers(page_token))
        found += page
        if not page_token:
            return tuple(found)
    raise errors.InternalError(f"the server lists its buffers in more than {PAGES_MAX} pages")


def delete_buffer(context: Context, name: str) -> Operation[None]:
    """Delete a buffer."""
    yield from _delete(context, calls.delete_buffer(name), errors.BufferNotFoundError)


def delete_subscription(context: Context, buffer: str, name: str) -> Operation[None]:
    """Delete a named cursor."""
    call = calls.delete_subscription(buffer, name)
    yield from _delete(context, call, errors.SubscriptionNotFoundError)


def _delete(
    context: Context, call: Call[None], gone: type[errors.ReplayBufferError]
) -> Operation[None]:
    """Delete; if a repeated attempt finds it gone, an earlier attempt has succeeded."""
    attempts = 0

    def once_more(_: float) -> Call[None]:
        nonlocal attempts
        attempts += 1
        return call

    try:
        yield from repeat(context, once_more)
    except gone:
        if attempts == 1:
            raise


def update_priorities(
    context: Context, buffer: str, priorities: Mapping[int, float], delete: Sequence[int]
) -> Operation[PrioritiesReply]:
    """Set priorities and delete chunks, in as many calls as needed; all are checked first."""
    updates = [(chunk_id, _priority(value)) for chunk_id, value in priorities.items()]
    total = PrioritiesReply(0, 0, 0)
    for start in range(0, max(len(updates), len(delete)), calls.PRIORITIES_MAX) or [0]:
        part = slice(start, start + calls.PRIORITIES_MAX)
        call = calls.update_priorities(buffer, updates[part], delete[part])
        reply = yield from invoke(context, call)
        total = PrioritiesReply(*map(sum, zip(total, reply, strict=True)))
    return total


def _priority(value: float) -> float:
    try:
        priority = float(value)
    except (TypeError, ValueError):
        priority = math.nan
    if not 0.0 <= priority <= PRIORITY_MAX:
        raise errors.InvalidRequestError(
            "priorities", f"must be numbers from 0 to {PRIORITY_MAX:g}, got {value!r:.200}"
        )
    return priority


def poll(
    context: Context,
    max_wait_s: float | None,
    call_of: Callable[[float], Call[T]],
    is_news: Callable[[T], object],
    started_at: float | None = None,
) -> Operation[T]:
    """Send calls that wait until an answer is news, or the wait is over; return the last answer.

    *call_of* makes the call that waits for some seconds; a wait of None never is over.
    """
    if max_wait_s is not None:
        wire.duration("max_wait_s", max_wait_s)
    began_at = context.now() if started_at is None else started_at
    until = began_at + (math.inf if max_wait_s is None else max_wait_s)
    while True:
        answer, _ = yield from repeat(
            context, lambda now: call_of(min(max(until - now, 0.0), WAIT_S_MAX_PER_CALL))
        )
        if is_news(answer) or until - context.now() < INSTANT_S:
            return answer


def watch_model(
    context: Context, buffer: str, known: ModelState | None, max_wait_s: float
) -> Operation[ModelState | None]:
    """Return the state once it differs from `known`, or None if the wait has elapsed."""
    return poll(
        *(context, max_wait_s, lambda wait_s: calls.watch_model(buffer, known, wait_s), bool)
    )


def group_ends(
    context: Context, buffer: str, after: int, max_wait_s: float
) -> Operation[list[GroupEnd]]:
    """Return how groups ended after an end, or nothing if the wait has elapsed."""
    return poll(
        *(context, max_wait_s, lambda wait_s: calls.group_ends(buffer, after, wait_s), bool)
    )


def take_tickets(
    context: Context,
    buffer: str,
    count: int,
    max_wait_s: float | None,
    lease_s: float,
    request_id: str | None = None,
) -> Operation[TicketGrant]:
    """Take tickets; raise WaitElapsedError if the wait is over and none was free."""
    request = request_id or context.new_id()
    return wait_for(
        context,
        "a ticket",
        max_wait_s,
        lambda wait_s: calls.take_tickets(buffer, request, count, lease_s, wait_s),
    )


def wait_for(
    context: Context,
    what: str,
    max_wait_s: float | None,
    call_of: Callable[[float], Call[T | str]],
    started_at: float | None = None,
) -> Operation[T]:
    """Poll until something is granted; raise WaitElapsedError if the wait is over without.

    The answer is the reason if nothing was.
    """
    began_at = context.now() if started_at is None else started_at
    answer = yield from poll(
        context, max_wait_s, call_of, lambda it: not isinstance(it, str), began_at
    )
    if isinstance(answer, str):
        raise errors.WaitElapsedError(context.now() - began_at, answer, what)
    return answer


def fetch(context: Context, buffer: str, request: calls.FetchRequest) -> Operation[LeaseGrant]:
    """Fetch under a lease; raise WaitElapsedError if the wait is over and nothing was taken."""
    started_at = context.now()
    request_id = request.request_id or context.new_id()
    sent_count = 0

    def next_call(wait_s: float) -> Call[LeaseGrant | str]:
        nonlocal sent_count
        sent_count += 1
        return calls.fetch_fragments(
            *(buffer, request, request_id, wait_s), context.slot.inline_bytes_max
        )

    while True:
        try:
            return (
                yield from wait_for(context, "a batch", request.max_wait_s, next_call, started_at)
            )
        except errors.LeaseExpiredError:
            # The request was granted, but the answer was lost for longer than the lease: the id is
            # used up. An id that the caller chose may be shared with other ranks, so only a random
            # one is replaced. An id that was sent once cannot be used up: raise, do not loop.
            if request.request_id is not None or sent_count == 1:
                raise
            request_id, sent_count = context.new_id(), 0


def read(context: Context, buffer: str, request: calls.ReadRequest) -> Operation[FragmentRead]:
    """Read chunks after a cursor, waiting for as long as the request says."""
    known = request.known_session_id
    return poll(
        context,
        request.max_wait_s,
        lambda wait_s: calls.read_fragments(buffer, request, wait_s, context.slot.inline_bytes_max),
        lambda found: (
            found.fragments
            or found.skipped_chunk_count
            or (known is not None and found.session_id != known)
        ),
    )


def under_lease(
    context: Context, buffer: str, lease_id: str | None, reading: Operation[T]
) -> Operation[T]:
    """Read under a lease, if there is one, and end it; if that is not answered it expires."""
    try:
        found = yield from reading
    except errors.ReplayBufferError:
        yield from _end_read(context, buffer, lease_id)
        raise
    yield from _end_read(context, buffer, lease_id)
    return found


def _end_read(context: Context, buffer: str, lease_id: str | None) -> Operation[None]:
    if lease_id is not None:
        call = calls.release_lease(buffer, lease_id, ReleaseMode.CONSUMED)
        with suppress(errors.ReplayBufferError):
            yield from invoke_once(context, call)


def opened_store(context: Context) -> Operation[PayloadStore]:
    """Return the payload store, opened on first use at the URL that the server returns."""
    if context.slot.store is not None:
        return context.slot.store
    config = yield from _store_config(context)
    return (yield from retrying_store(context, lambda deadline: _opened(context, config, deadline)))


def _store_config(context: Context, *, is_doubted: bool = False) -> Operation[StoreConfig]:
    if context.slot.config is None or is_doubted:
        context.slot.config = yield from invoke(context, calls.get_store_config())
    return context.slot.config


def _opened(context: Context, config: StoreConfig, deadline: Deadline | None) -> PayloadStore:
    if context.slot.store is not None:
        return context.slot.store
    url = context.options.store_url or config.store_url
    if url == GATEWAY_URL:
        return context.slot.settle(open_gateway_store(context.route, context.options))
    store = stores.open_store(
        url,
        unannounced_s=config.unannounced_s,
        piece_size_bytes=config.piece_size_bytes,
        deadline=deadline,
        # The server created the store, if it is on this host: anything else at this URL is another.
        must_exist=True,
    )
    return context.slot.settle(store)


def _store_on_use(context: Context) -> Operation[PayloadStore]:
    """Return the payload store, which opens, or raises, when a payload is moved."""
    if context.slot.store is not None:
        return context.slot.store
    config = yield from _store_config(context)
    return StoreOnUse(lambda deadline: _opened(context, config, deadline))


def _store_of(
    context: Context, references: Sequence[FragmentReference]
) -> Operation[tuple[PayloadStore, Sequence[FragmentReference]]]:
    store = yield from _store_on_use(context)
    bodies = {
        each.metadata.payload.payload_id: each.body
        for member in references
        for each in (member, *member.parts)
        if each.body
    }
    if not bodies:
        return store, references
    return InlineStore(bodies, store), [without_body(each) for each in references]


def retrying_store(
    context: Context,
    function: Callable[[Deadline], T],
    failed: tuple[errors.StoreUnavailableError, float] | None = None,
    *,
    is_write: bool = False,
) -> Operation[T]:
    """Run a function that moves payloads; wait while the store is unreachable or full.

    Raises StoreUnavailableError after `reconnect_s`, BackpressureError after `append_wait_s`, and
    InvalidRequestError immediately for a payload that is larger than the whole store.
    `failed` is the error and time of an earlier attempt.
    """
    outage = RetryBudget(context.policy, context.rng)
    full_since: float | None = None
    told_at = -math.inf
    if failed is not None and outage.delay_s_after(failed[0], now=failed[1]) is None:
        raise failed[0]
    while True:
        try:
            result: T = yield RunBlocking(function, context.deadline(outage))
        except errors.StoreUnavailableError as error:
            delay_s = outage.delay_s_after(error, now=context.now())
            if delay_s is None:
                raise
            context.outages.failed(_MOVING, error)
            yield Sleep(delay_s)
        except errors.StoreFullError as error:
            outage.answered()
            context.outages.succeeded(_MOVING)
            if full_since is None:
                full_since = context.now()
                yield from _check_fits(context, error)
            now = context.now()
            left_s = full_since + context.options.append_wait_s - now
            if left_s <= 0:
                raise errors.BackpressureError(error.what, error.retry_delay_s) from error
            if now - full_since >= FULL_TOLD_S and now - told_at >= FULL_TOLD_EVERY_S:
                told_at = now
                yield from _tell_full(context, error.what)
            yield Sleep(min(_spread_s(context, error.retry_delay_s), left_s))
        else:
            context.outages.succeeded(_MOVING)
            if is_write:
                context.waits.succeeded(_WRITING)
            return result


def _tell_full(context: Context, words: str) -> Operation[None]:
    """Log that a write waits for room, with the remedy; report the store's words to the server."""
    context.waits.failed(_WRITING, errors.StoreError(f"{words}. {STORE_FULL_ADVICE}"))
    try:
        yield from invoke_once(context, calls.get_store_config(words))
    except errors.ReplayBufferError:
        return  # The write is repeated whatever the server knows of it.


def _check_fits(context: Context, full: errors.StoreFullError) -> Operation[None]:
    """Raise InvalidRequestError if a payload without room is larger than the whole store."""
    if not full.payload_bytes:
        return
    config = yield from _store_config(context, is_doubted=True)
    if 0 < config.payload_size_bytes_max < full.payload_bytes:
        raise errors.InvalidRequestError(
            "payload",
            f"has {full.payload_bytes} bytes, but the payload store takes at most "
            f"{config.payload_size_bytes_max} in all; write less at a time, or give the store more "
            "room (Redis' maxmemory, a larger file system, docker run --shm-size)",
        ) from full


def _spread_s(context: Context, delay_s: float) -> float:
    """Return a delay of once to twice the hint, so that producers do not retry in step."""
    return delay_s * (1.0 + context.rng.random())


def publish(
    context: Context, buffer: str, session_id: str, model_version: int, weights: Mapping[str, Any]
) -> Operation[PublishReply]:
    """Write weights, then publish them with their version."""
    store = yield from opened_store(context)
    losses = RetryBudget(context.policy, context.rng)
    while True:
        reference = yield from retrying_store(
            context,
            lambda deadline: payload.write_weights(store.within(deadline), weights),
            is_write=True,
        )
        call = calls.publish_model(buffer, session_id, model_version, reference)
        try:
            reply, _ = yield from repeat(context, _always(call), context.append_policy)
        except errors.PayloadMissingError as error:
            yield from _wait_after_loss(context, losses, error)
        except (errors.SessionEndedError, errors.VersionRegressedError):
            yield from _discard(context, store, [reference])
            raise
        else:
            return reply


def _wait_after_loss(
    context: Context, losses: RetryBudget, error: errors.PayloadMissingError
) -> Operation[None]:
    """Wait before a lost payload is written or requested again, but not after the first loss."""
    away = errors.StoreUnavailableError(str(error))
    delay_s = losses.delay_s_after(away, now=context.now())
    if losses.attempts == 1:
        return
    if delay_s is None:
        raise error
    yield Sleep(delay_s)


def load_weights(context: Context, reference: PayloadReference) -> Operation[dict[str, Any]]:
    """Read published weights."""
    store = yield from opened_store(context)
    return (
        yield from retrying_store(
            context, lambda deadline: payload.read_weights(store.within(deadline), reference)
        )
    )


def load_model(
    context: Context, buffer: str, newer_than: ModelState | None, max_wait_s: float
) -> Operation[tuple[ModelState, dict[str, Any]] | None]:
    """Wait for weights other than the known ones and read the newest, or None if none came."""
    wire.duration("max_wait_s", max_wait_s)
    until = context.now() + max_wait_s
    give_up_at = until + context.options.deadline_s + context.options.reconnect_s
    known, missing, losses = newer_than, None, RetryBudget(context.policy, context.rng)
    while True:
        left_s = max(0.0, until - context.now())
        state = yield from watch_model(context, buffer, known, left_s)
        if state is None:
            return None
        if state.weights is None:
            known = state
            continue
        try:
            weights = yield from load_weights(context, state.weights)
        except errors.PayloadMissingError as error:
            if context.now() >= give_up_at:
                error.add_note("the learner publishes faster than this host reads weights")
                raise
            if state.weights != missing:  # Superseded: there are newer ones.
                missing, losses = state.weights, RetryBudget(context.policy, context.rng)
            yield from _wait_after_loss(context, losses, error)
        else:
            return state, weights


def without_body(reference: FragmentReference) -> FragmentReference:
    """Return the reference without its inline payload."""
    it = reference
    if not it.body and not it.parts:
        return it
    # Called once per fragment, and `replace` takes several times as long.
    bare = FragmentReference(
        it.metadata,
        it.chunk_id,
        it.staleness_when_granted,
        it.use_count,
        it.priority,
        it.probability,
        it.population,
        b"",
        tuple([without_body(each) for each in it.parts]) if it.parts else (),
    )
    bare._newest = it._newest  # noqa: SLF001 - the same library's
    return bare


def load_fragments(
    context: Context,
    references: Sequence[FragmentReference],
    columns: Sequence[str] | None,
    steps: tuple[int, int] | None,
    *,
    is_mapped: bool = False,
) -> Operation[list[Any]]:
    """Read the payloads of granted fragments or sequences, in order."""
    store, references = yield from _store_of(context, references)
    return (
        yield from retrying_store(
            context,
            lambda deadline: read_with_parts(
                store.within(deadline), references, columns, steps, is_mapped=is_mapped
            ),
        )
    )


def describe_arrays(
    context: Context, references: Sequence[FragmentReference]
) -> Operation[list[dict[str, ArrayType]]]:
    """Read types and shapes of the arrays of granted fragments, in order."""
    store, references = yield from _store_of(context, references)
    return (
        yield from retrying_store(
            context, lambda deadline: payload.describe_arrays(store.within(deadline), references)
        )
    )


def read_batch(
    context: Context,
    references: Sequence[FragmentReference],
    device: Device | None,
    columns: Sequence[str] | None,
    *,
    into: Batch | Stack | None = None,
    within: AbstractContextManager[None] | None = None,
) -> Operation[Batch]:
    """Read the payloads of granted fragments into one stacked batch, within a context."""
    load = partial(load_batch, device=device, columns=columns, into=into)
    return (yield from read_loaded(context, references, load, within=within))


def read_loaded(
    context: Context,
    references: Sequence[FragmentReference],
    load: Callable[[PayloadStore, Sequence[FragmentReference]], T],
    *,
    within: AbstractContextManager[None] | None = None,
) -> Operation[T]:
    """Read the payloads of granted fragments as *load* does, within a context."""
    store, references = yield from _store_of(context, references)

    def read(deadline: Deadline) -> T:
        with within or nullcontext():
            return load(store.within(deadline), references)

    return (yield from retrying_store(context, read))


def _discard(
    context: Context, store: PayloadStore, references: Sequence[PayloadReference]
) -> Operation[None]:
    """Delete payloads that will not be announced; if that fails they expire."""
    if not references:
        return
    try:
        yield RunBlocking(
            lambda deadline: store.within(deadline).delete_many(references), context.deadline()
        )
    except errors.StoreError:
        return


def append_many(
    context: Context,
    buffer: str,
    fragments: Iterable[Sendable],
    codecs: str | Mapping[str, str] | None = None,
    answered: Callable[[list[AppendResult]], None] | None = None,
    *,
    replaces: bool = False,
    count_max: int | None = None,
) -> Operation[list[AppendResult]]:
    """Write payloads, then announce them; wait while the buffer is full.

    With *answered*, which gets the results of each group in place of their return, fragments are
    taken while earlier ones are sent.

    Raises BackpressureError, with the results so far, if nothing was admitted for `append_wait_s`;
    PayloadMissingError if the store lost each payload before its announcement for `reconnect_s`.
    """
    store = yield from _store_on_use(context)
    fragments = iter(fragments)
    first = next(fragments, None)
    if first is not None:
        fragments = chain([first], fragments)
        if not first.session_id and not isinstance(first, Part):
            fragments = map(partial(_in_session, (yield from _session(context, buffer))), fragments)
    count_max = count_max or APPEND_COUNT_MAX
    make = partial(_Appending, context, buffer, store, codecs or context.options.codecs, replaces)
    if answered is not None:
        yield from _run_in_order(map(make, _groups(fragments, count_max)), answered)
        return []
    fragments, results = list(fragments), list[AppendResult]()
    try:
        yield from _run_in_order(map(make, _groups(fragments, count_max)), results.extend)
    except errors.BackpressureError as error:
        results += error.results
        unsent = AppendResult(AdmissionOutcome.BUFFER_FULL)
        error.results = (*results, *[unsent] * (len(fragments) - len(results)))
        raise
    return results


def _session(context: Context, buffer: str) -> Operation[str]:
    state = yield from watch_model(context, buffer, None, 0.0)
    if state is None or not state.session_id:
        raise errors.InvalidRequestError("session_id", "is empty, and the buffer has no session")
    return state.session_id


def _in_session(session_id: str, fragment: Sendable) -> Sendable:
    fragment.session_id = fragment.session_id or session_id
    return fragment


def _run_in_order(
    appendings: Iterator["_Appending"], answered: Callable[[list[AppendResult]], None]
) -> Operation[None]:
    """Run one group after the other; the next is written while the server judges one."""
    results: list[AppendResult] = []
    ahead: deque[_Appending] = deque()
    failures: list[errors.ReplayBufferError] = []

    def report() -> None:
        if results:
            answered(results[:])
            results.clear()

    def meanwhile(deadline: Deadline) -> None:
        report()  # Producers that wait for it have time now.
        try:
            ahead.extend(islice(appendings, 1))
        except errors.ReplayBufferError as error:
            failures.append(error)  # Raised once what was taken is judged.
        ahead[0].write_ahead(deadline)

    try:
        while True:
            ahead.extend(islice(appendings, max(0, 2 - len(ahead))))
            if not ahead:
                for failure in failures:
                    raise failure
                return
            halves = yield from ahead[0].write_or_halve()
            if halves:
                ahead.popleft()
                ahead.extendleft(reversed(halves))
            else:
                results += yield from ahead.popleft().run(meanwhile if ahead else None)
    finally:
        report()


def _groups(fragments: Iterable[Sendable], count_max: int) -> Iterator[Sequence[Sendable]]:
    group: list[Sendable] = []
    size_bytes = 0
    for fragment in fragments:
        fragment_bytes = fragment.size_bytes
        is_full = len(group) >= count_max or size_bytes + fragment_bytes > APPEND_BYTES_MAX
        if group and is_full:
            yield group
            group, size_bytes = [], 0
        group.append(fragment)
        size_bytes += fragment_bytes
    if group:
        yield group


class _Appending:
    """One group of fragments; while the server judges it, the client writes the next one."""

    def __init__(
        self,
        context: Context,
        buffer: str,
        store: PayloadStore,
        codecs: str | Mapping[str, str],
        replaces: bool,
        fragments: Sequence[Sendable],
    ) -> None:
        self._context = context
        self._replaces = replaces
        self._origin = context.origin
        self._buffer = buffer
        self._store = store
        self._fragments = fragments
        self._codecs = codecs
        self._written: list[payload.Written] = []
        self._call: Call[AppendReply] | None = None
        """The prepared announcement of as many fragments as fit one call, or None if it is not made
        yet, or was sent."""
        self._results = [AppendResult(AdmissionOutcome.UNSPECIFIED)] * len(fragments)
        self._failed: tuple[errors.StoreUnavailableError, float] | None = None
        self._sends_schemas = False
        self._is_first = True
        """True until it was announced."""
        self._doubtful: set[int] = set()
        """Positions announced by a call that was sent more than once (O3)."""
        self._losses: RetryBudget | None = None
        """Budget for payloads that the store lost since it last kept one, or None."""
        self._told_at = -math.inf
        self._progress_at: float | None = None
        """Time of the last admission, or of the first announcement, or None."""

    def run(self, meanwhile: Callable[[Deadline], None] | None) -> Operation[list[AppendResult]]:
        """Announce until all is judged; *meanwhile* runs while the server judges the first call."""
        pending: Sequence[int] = range(len(self._fragments))
        self._progress_at = self._context.now()
        while pending:
            count = self._count_in_a_call(pending)
            delay_s, left = yield from self._announce(pending[:count], meanwhile)
            left += pending[count:]
            meanwhile = None
            if len(left) < len(pending):
                self._progress_at = self._context.now()
            elif delay_s is not None:
                yield from self._give_up_if_late(self._progress_at, left, delay_s)
                yield from self._tell_hold(self._progress_at, left)
            if delay_s is not None:
                yield Sleep(_spread_s(self._context, delay_s))
            pending = left
        self._context.waits.succeeded(_APPENDING)
        return self._results

    def write_or_halve(self) -> Operation[list["_Appending"]]:
        """Write what is not written, or return halves to send instead, which fit a small store."""
        self._written = self._written or self._encoded_at_once()
        if not self._written and len(self._fragments) > 1 and self._failed is None:
            try:
                yield RunBlocking(self._write_now, self._context.deadline())
            except errors.StoreFullError:
                middle = len(self._fragments) // 2
                return [
                    _Appending(
                        *(self._context, self._buffer, self._store, self._codecs, self._replaces),
                        half,
                    )
                    for half in (self._fragments[:middle], self._fragments[middle:])
                ]
            except errors.StoreUnavailableError:
                pass  # `_write` below waits for the store.
        if not self._written:
            self._written = yield from self._write(range(len(self._fragments)))
        return []

    def _encoded_at_once(self) -> list[payload.Written]:
        """Encode a few small inline fragments, or return []: cheaper than handing them over."""
        config = self._context.slot.config
        if config is None or len(self._fragments) > AT_ONCE_COUNT_MAX:
            return []
        inline_size_bytes_max = config.inline_size_bytes_max
        if any(each.size_bytes > inline_size_bytes_max for each in self._fragments):
            return []
        return payload.write_and_describe(
            None, self._fragments, codecs=self._codecs, inline_size_bytes_max=inline_size_bytes_max
        )

    def _write_now(self, deadline: Deadline) -> None:
        """Write everything; keep the error of an unreachable store, with which the outage began."""
        try:
            self._written = self._write_within(deadline, self._fragments)
        except errors.StoreUnavailableError as error:
            self._failed = error, self._context.now()
            raise

    def _write(self, positions: Sequence[int]) -> Operation[list[payload.Written]]:
        fragments = [self._fragments[position] for position in positions]
        failed, self._failed = self._failed, None
        return (
            yield from retrying_store(
                *(self._context, lambda deadline: self._write_within(deadline, fragments), failed),
                is_write=True,
            )
        )

    def _write_within(
        self, deadline: Deadline, fragments: Sequence[Sendable]
    ) -> list[payload.Written]:
        config = self._context.slot.config
        return payload.write_and_describe(
            self._store.within(deadline),
            fragments,
            codecs=self._codecs,
            inline_size_bytes_max=0 if config is None else config.inline_size_bytes_max,
        )

    def write_ahead(self, deadline: Deadline) -> None:
        """Write everything, and prepare its announcement."""
        self._write_now(deadline)
        everything = range(len(self._fragments))
        self._call = self._announcement_of(everything[: self._count_in_a_call(everything)])

    def _count_in_a_call(self, pending: Sequence[int]) -> int:
        left = INLINE_REQUEST_BYTES_MAX
        for count, position in enumerate(pending):
            left -= len(self._written[position].body)
            if left < 0 and count:
                return count
        return len(pending)

    def _announcement_of(self, pending: Sequence[int]) -> Call[AppendReply]:
        options = self._context.options
        waited_s = 0.0 if self._progress_at is None else self._context.now() - self._progress_at
        left_s = max(0.0, options.append_wait_s - waited_s)
        return calls.announce_fragments(
            self._buffer,
            [self._fragments[position] for position in pending],
            [self._written[position] for position in pending],
            sends_schemas=self._sends_schemas or self._tells_origin(pending),
            origin=self._origin.texts,
            # Less than the attempt's time, so that a silent server is noticed. A wait that is cut
            # keeps its position in the queue.
            max_wait_s=min(left_s, options.deadline_s * ROOM_PART),
            replaces=self._replaces,
        )

    def _announce(
        self, pending: Sequence[int], meanwhile: Callable[[Deadline], None] | None
    ) -> Operation[tuple[float | None, list[int]]]:
        """Announce once; return the delay before the next (or None) and what is still to send."""
        call, self._call = self._call or self._announcement_of(pending), None
        context = self._context
        is_first, self._is_first = self._is_first, False
        is_shared = is_first and meanwhile is None and self._may_share(pending)
        reply, attempts = yield from repeat(
            *(context, _always(call), context.append_policy, meanwhile), is_shared=is_shared
        )
        if len(reply.results) != len(pending):
            raise errors.InternalError(
                f"the server judged {len(reply.results)} of {len(pending)} fragments"
            )
        if attempts > 1:
            self._doubtful.update(pending)
        sent_schemas = self._sends_schemas
        left, missing, refused = self._sort(pending, reply.results)
        if refused:
            yield from _discard(context, self._store, refused)
        if self._origin.texts:
            taken = [p for p in pending if self._results[p].outcome is AdmissionOutcome.ADMITTED]
            self._origin.known.update(self._places(taken))
        if missing:
            yield from self._rewrite(missing)
        if len(missing) < len(pending):
            self._losses = None
        if not left:
            return None, left
        outcomes = {self._results[position].outcome for position in left}
        waits = any(each.asks_to_wait for each in outcomes)
        # Schemas were sent, and are unknown nevertheless: another session began meanwhile.
        waits = waits or (sent_schemas and AdmissionOutcome.SCHEMA_UNKNOWN in outcomes)
        delay_s = RETRY_S if reply.retry_delay_s is None else reply.retry_delay_s
        return (delay_s if waits else None), left

    def _sort(
        self, pending: Sequence[int], results: Sequence[AppendResult]
    ) -> tuple[list[int], list[int], list[PayloadReference]]:
        """Keep results; return positions to send again, to write again, and refused payloads."""
        left: list[int] = []
        missing: list[int] = []
        refused: list[PayloadReference] = []
        for position, result in zip(pending, results, strict=True):
            self._results[position] = result
            if result.outcome is AdmissionOutcome.ADMITTED:  # The common case.
                continue
            if result.outcome.asks_to_wait:
                left.append(position)
            elif result.outcome is AdmissionOutcome.SCHEMA_UNKNOWN:
                left.append(position)
                self._sends_schemas = True
            elif result.outcome is AdmissionOutcome.PAYLOAD_MISSING:
                left.append(position)
                missing.append(position)
            elif result.outcome in _REFUSED and position not in self._doubtful:
                refused += self._stored([position])
        return left, missing, refused

    def _may_share(self, pending: Sequence[int]) -> bool:
        return (
            len(self._fragments) <= AT_ONCE_COUNT_MAX
            # Of parts those before a wrong one are attached, and DUPLICATE when sent again.
            and not isinstance(self._fragments[0], Part)
            and not self._tells_origin(pending)  # Which goes with its schema.
            and not 0 < self._context.options.append_wait_s < SHARING_WAIT_S
        )

    def _tells_origin(self, positions: Sequence[int]) -> bool:
        return bool(self._origin.texts and self._places(positions) - self._origin.known)

    def _places(self, positions: Sequence[int]) -> set[tuple[str, str]]:
        return {(self._buffer, self._fragments[each].session_id) for each in positions}

    def _rewrite(self, missing: Sequence[int]) -> Operation[None]:
        stored = self._stored(missing)
        lost = errors.PayloadMissingError(stored[0].payload_id if stored else "sent inline")
        if self._losses is None:
            self._losses = RetryBudget(self._context.policy, self._context.rng)
        yield from _wait_after_loss(self._context, self._losses, lost)
        if len(stored) < len(missing):
            # Most likely the server was restarted with a lower limit for inline payloads.
            yield from _store_config(self._context, is_doubted=True)
        rewritten = yield from self._write(missing)
        for position, written in zip(missing, rewritten, strict=True):
            self._written[position] = written

    def _stored(self, positions: Sequence[int]) -> list[PayloadReference]:
        found = [self._written[position].payload for position in positions]
        return [each for each in found if each is not None]

    def _tell_hold(self, progress_at: float, left: Sequence[int]) -> Operation[None]:
        """Log after a second, and now and then, why the server takes no bytes, if it says so."""
        now = self._context.now()
        is_due = now - max(progress_at + FULL_TOLD_S, self._told_at + FULL_TOLD_EVERY_S) >= 0
        if not is_due or self._results[left[0]].outcome is not AdmissionOutcome.BYTES_FULL:
            return
        self._told_at = now
        try:
            described = yield from invoke_once(self._context, calls.get_buffer(self._buffer))
        except errors.ReplayBufferError:
            return  # The append is repeated whatever is known of its wait.
        if described.state.hold:
            self._context.waits.failed(_APPENDING, errors.StoreError(described.state.hold))

    def _give_up_if_late(
        self, progress_at: float, left: Sequence[int], delay_s: float
    ) -> Operation[None]:
        waited_s = self._context.now() - progress_at
        if waited_s < self._context.options.append_wait_s:
            return
        sure = self._stored([p for p in left if p not in self._doubtful])
        yield from _discard(self._context, self._store, sure)
        error = errors.BackpressureError(
            f"{len(left)} fragments found no room in buffer {self._buffer!r} for {waited_s:.0f} s",
            delay_s or RETRY_S,
        )
        error.results = tuple(self._results)
        raise error
