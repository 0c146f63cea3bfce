# Made from breadbox/aio/client.py by scripts/gen_blocking.py; edit that, run `make blocking`.
"""The blocking client: one method per RPC, and `append`, `fetch`, `publish` that move payloads."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload
from uuid import uuid4

from numpy.typing import NDArray

from breadbox import calls, operations, types
from breadbox.batches import Batch, Stack
from breadbox.fragment import Fragment
from breadbox.interpreter import Interpreter
from breadbox.lease import Lease
from breadbox.options import ClientOptions, Tls, check_addresses
from breadbox.outages import Outages
from breadbox.reading import LoadedRead, Tail
from breadbox.stores.base import PayloadStore
from breadbox.types import ReleaseMode

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def connect(
    address: str,
    *,
    buffer: str = "default",
    tls: Tls | None = None,
    token: str | None = None,
    deadline_s: float = 10.0,
    reconnect_s: float = 30.0,
    append_wait_s: float = 300.0,
    codecs: str | Mapping[str, str] = "raw",
    store_url: str | None = None,
) -> "Client":
    """Make a client. Returns at once: the connection is made by the first call.

    Args:
        address: "HOST:PORT", or "unix:PATH". Of servers on one journal all of them, separated by
            commas: the one that leads is called. "dns:///NAME:PORT" stands for all that the name
            has records of.
        buffer: Buffer that calls are about unless they say otherwise.
        tls: Certificates; None: not encrypted.
        token: Bearer token, sent with every call; anybody on the way can read it without TLS.
            `@FILE` stands for what the file holds.
        deadline_s: Seconds for which server or store may be silent, on top of a wait that was
            asked for; slowness is no silence: while bytes of payloads move, a call goes on.
        reconnect_s: Seconds for which a call then tries again, as it does with a server or a store
            that went away, so that work goes on over a restart. 0: not at all. So nobody who falls
            silent holds up a call for longer than `deadline_s` and `reconnect_s` together.
        append_wait_s: Seconds for which an append waits while nothing is admitted because buffer
            or store is full; then BackpressureError.
        codecs: How arrays of appended fragments are encoded: one codec ("raw", "lz4", "zstd",
            "zstd:LEVEL"), or codecs by pattern over array names, such as {"obs*": "zstd"}.
        store_url: Where payloads live, seen from here; None: where the server says.

    Raises:
        InvalidRequestError: An argument is out of its range, or a certificate cannot be read.
    """
    options = ClientOptions(
        buffer=buffer,
        tls=tls,
        token=token,
        deadline_s=deadline_s,
        reconnect_s=reconnect_s,
        append_wait_s=append_wait_s,
        codecs=codecs,
        store_url=store_url,
    )
    return _made(check_addresses(address), options)


def _made(address: str, options: ClientOptions) -> "Client":
    return Client(address, options)


class Client:
    """A connection to one server. Use it as a context manager, or call `close`.

    Thread-safe: any number of threads may call any method at a time; `close` makes calls of other
    threads fail with ClosedError. Not for use after a fork: gRPC's threads do not survive it, so
    every call in a child process raises ClosedError; connect in the child, or spawn it.

    Raises (every method):
        InvalidRequestError: An argument does not fit, or can never be met.
        UnavailableError: The server stayed out of reach, or draining, for `reconnect_s`.
        TlsError: Certificates or encryption do not fit; at once, if there never was an answer.
        DeadlineExceededError: The server was silent for `deadline_s`, and then for `reconnect_s`.
        UnauthenticatedError, PermissionDeniedError: Credentials are missing, unknown, too weak.
        NotSupportedError: The server does not know the call.
        InternalError: A bug in the server.
        ClosedError: The client was closed.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        store: PayloadStore | None = None,
    ) -> None:
        """Use `connect` instead; the collaborators are for tests."""
        self._context = operations.Context(
            address=address,
            options=options,
            now=clock,
            rng=rng or random.Random(),
            new_id=lambda: uuid4().hex,
            outages=Outages(clock),
            slot=operations.StoreSlot(store),
        )
        self._interpreter = Interpreter(self._context)

    # Life --------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Of the server."""
        return self._context.address

    @property
    def buffer(self) -> str:
        """Buffer that calls are about unless they say otherwise."""
        return self._context.options.buffer

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._interpreter.closed

    @property
    def outage(self) -> str:
        """What fails now and is tried again, for how long it has, and why; empty: nothing does."""
        return self._context.outages.words

    @property
    def store(self) -> PayloadStore:
        """The payload store, opened on first use where the server says it is.

        Raises:
            StoreUnavailableError: It cannot be reached from here.
        """
        return self._interpreter.run(operations.opened_store(self._context))

    def close(self) -> None:
        """Close connections and stop renewing leases. Idempotent. Calls under way fail."""
        self._interpreter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<breadbox.Client of {self.address}, buffer {self.buffer!r}{state}>"

    def _invoke(self, call: calls.Call[T]) -> T:
        return self._interpreter.run(operations.invoke(self._context, call))

    # Sessions and models -----------------------------------------------------------------------

    def start_session(
        self,
        session_id: str | None = None,
        *,
        model_version: int | None = None,
        buffer: str | None = None,
    ) -> types.ModelState:
        """Make a session current and end the previous one with everything of it.

        Args:
            session_id: A name that was never used, one for each run. The current one again
                changes nothing. None: a fresh one, which is in the answer.
            model_version: Version to start at, for a resumed run; None: 0.
            buffer: None: the client's.

        Raises:
            BufferNotFoundError: There is no such buffer.
            SessionEndedError: The session was current before, and ended.
        """
        return self._invoke(calls.start_session(buffer or self.buffer, session_id, model_version))

    def end_session(self, session_id: str, *, buffer: str | None = None) -> None:
        """End the session if it is current; everything of it goes, leases live on."""
        self._invoke(calls.end_session(buffer or self.buffer, session_id))

    def publish_model(
        self,
        session_id: str,
        model_version: int,
        weights: types.PayloadReference | None = None,
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        """Move the version forward, with weights that are already written, in one step.

        The current version again is a retry and changes nothing.

        Raises:
            SessionEndedError: The session is not current.
            VersionRegressedError: The version is lower than the current one.
        """
        call = calls.publish_model(buffer or self.buffer, session_id, model_version, weights)
        return self._invoke(call)

    def publish(
        self,
        session_id: str,
        model_version: int,
        weights: Mapping[str, Any],
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        """Write weights (name to array or tensor) and publish them with their version in one step.

        Raises:
            ReplayBufferError: As `publish_model`.
            BackpressureError: The store stayed full for `append_wait_s`.
        """
        return self._interpreter.run(
            operations.publish(
                self._context, buffer or self.buffer, session_id, model_version, weights
            )
        )

    def watch_model(
        self,
        known: types.ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> types.ModelState | None:
        """Wait until another session or version is current than the known one.

        Weights that are published for a version that was known without any are a change too.

        Args:
            known: What the caller has; None: nothing, so that a current session comes at once.
            max_wait_s: Seconds to wait for a change; 0: not at all.
            buffer: None: the client's.

        Returns:
            What is current, or None when that is still what the caller has.
        """
        return self._interpreter.run(
            operations.watch_model(self._context, buffer or self.buffer, known, max_wait_s)
        )

    def load_weights(self, reference: types.PayloadReference) -> dict[str, Any]:
        """Read published weights: name to numpy array.

        Raises:
            PayloadMissingError: They are of an older version than the latest two.
        """
        return self._interpreter.run(operations.load_weights(self._context, reference))

    # Fragments in ------------------------------------------------------------------------------

    def append_fragments(
        self, fragments: Sequence[types.FragmentMetadata], *, buffer: str | None = None
    ) -> types.AppendReply:
        """Announce up to 4096 fragments whose payloads are written; `append_many` does all of it.

        Returns:
            One result per fragment, in order, and what else the server said. Waiting for room is
            left to the caller.

        Raises:
            LimitExceededError: As many workers take part in the session as may.
        """
        return self._invoke(calls.append_fragments(buffer or self.buffer, fragments))

    def append(
        self,
        fragment: Fragment,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> types.AppendResult:
        """Write a fragment's payload and announce it; waits while the buffer is full.

        Returns:
            ADMITTED, DUPLICATE, STALE or WRONG_SESSION; the last two are not in the buffer.

        Raises:
            ReplayBufferError: As `append_many`.
        """
        results = self.append_many([fragment], buffer=buffer, codecs=codecs)
        return results[0]

    def append_many(
        self,
        fragments: Sequence[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> list[types.AppendResult]:
        """Write payloads and announce them; waits while the buffer is full.

        Fragments of one worker must be in order of their index. Appending again is safe: what was
        admitted answers DUPLICATE. On failure some may have been admitted, and payloads that were
        not announced expire by themselves.

        Args:
            fragments: Any number; they are written and announced in groups of bounded size.
            buffer: None: the client's.
            codecs: How arrays are encoded; None: as the client was told.

        Returns:
            One result per fragment, in order: ADMITTED, DUPLICATE, STALE or WRONG_SESSION.

        Raises:
            BackpressureError: Nothing was admitted for `append_wait_s`; `results` has what was.
            LimitExceededError: As many workers take part in the session as may.
            StoreUnavailableError: The store stayed away for `reconnect_s`.
            PayloadMissingError: The store lost what it was given, again and again for
                `reconnect_s`.
            UnsupportedArrayError: An array cannot be stored; fragments before it may be admitted.
        """
        return self._interpreter.run(
            operations.append_many(self._context, buffer or self.buffer, list(fragments), codecs)
        )

    def report_episodes(
        self, episodes: Sequence[types.EpisodeReport], *, buffer: str | None = None
    ) -> None:
        """Report 1 to 1024 finished episodes, for metrics. Sent once: never repeated by itself.

        Raises:
            BackpressureError: The token's rate is used up; nothing was counted.
        """
        self._invoke(calls.report_episodes(buffer or self.buffer, episodes))

    # Batches out -------------------------------------------------------------------------------

    def fetch_fragments(
        self,
        fragment_count: int,
        max_wait_s: float = 0.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> types.LeaseGrant:
        """Take fragments under a lease that the caller renews and releases; see `fetch`.

        Args:
            fragment_count: For all ranks together; a multiple of fragments_per_chunk * world_size.
            max_wait_s: Seconds to wait for them, in arrival order; 0: not at all.
            rank: This learner's, from 0.
            world_size: Learners that share the fetch.
            request_id: The same for all ranks, and for a repetition; None: the library makes one.
            lease_s: Seconds the lease lives; None: the buffer's own.
            buffer: None: the client's.

        Raises:
            WaitElapsedError: The wait is over; nothing was taken. Says what was missing.
            RequestMismatchError: The request_id was used with another size.
            LeaseExpiredError: The request_id was granted before, and its lease has ended.
            BackpressureError: Too many fetches wait already.
        """
        request = calls.FetchRequest(
            fragment_count=fragment_count,
            max_wait_s=max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
        )
        return self._interpreter.run(
            operations.fetch(self._context, buffer or self.buffer, request)
        )

    def fetch(
        self,
        fragment_count: int,
        max_wait_s: float = 0.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> "Lease":
        """Take fragments under a lease: a context manager that renews and releases it.

        ```python
        with client.fetch(fragment_count=32, max_wait_s=30) as lease:
            for batch in lease.batches(batch_size=8): ...
        ```

        Args and Raises: as `fetch_fragments`.
        """
        request = calls.FetchRequest(
            fragment_count=fragment_count,
            max_wait_s=max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
        )
        return self._leased(buffer or self.buffer, request)

    def _leased(self, buffer: str, request: calls.FetchRequest) -> Lease:
        grant = self._interpreter.run(operations.fetch(self._context, buffer, request))
        return Lease(self._interpreter, buffer, grant)

    def get_prepared_fragments(
        self, request_id: str, *, buffer: str | None = None
    ) -> tuple[types.FragmentReference, ...]:
        """Read what a granted request got for all ranks, rank 0 first. Takes no lease.

        Args:
            request_id: As given to the fetch; `BufferState.latest_request_id` has the latest.
            buffer: None: the client's.

        Raises:
            RequestNotFoundError: It got nothing yet, or all its leases have ended.
        """
        return self._invoke(calls.get_prepared_fragments(buffer or self.buffer, request_id))

    def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float = 0.0,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        buffer: str | None = None,
    ) -> types.FragmentRead:
        """Read what came after a cursor, in order of arrival, using nothing up; see `tail`.

        The payloads stay readable until the lease that comes with them is released or expires.
        Load them with `load_fragments`, then call `release_lease`. Where all of them are small they
        ride along with the read, which has no lease then.

        Args:
            after_chunk_id: The `cursor` of the read before; None: from the oldest chunk that is
                held. So is read, too, after a chunk that there has not been yet.
            chunk_count_max: Chunks at most, 1 to 4096; fewer come where they are large.
            max_wait_s: Seconds to wait for a chunk; 0: not at all.
            lease_s: Seconds the lease lives; None: the buffer's own.
            known_session_id: The `session_id` of the read before. Another one that is current ends
                the wait, and all that is held of it is read. None: this is not looked at.
            subscription: Read what it has not acknowledged, with what it retains; with
                `after_chunk_id` from there on. None: the cursor is the caller's alone.
            buffer: None: the client's.

        Returns:
            What came; without fragments when nothing did.

        Raises:
            BackpressureError: Too many readers wait already.
            BufferNotFoundError: There is no such buffer.
            SubscriptionNotFoundError: There is no such subscription.
        """
        request = calls.ReadRequest(
            after_chunk_id=after_chunk_id,
            chunk_count_max=chunk_count_max,
            max_wait_s=max_wait_s,
            lease_s=lease_s,
            known_session_id=known_session_id,
            subscription=subscription,
        )
        return self._interpreter.run(operations.read(self._context, buffer or self.buffer, request))

    def tail(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float | None = None,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        is_acknowledging: bool = True,
        columns: Sequence[str] | None = None,
        is_mapped: bool = False,
        buffer: str | None = None,
    ) -> Iterator[LoadedRead]:
        """Follow a buffer: load what it holds and then what comes, using nothing up.

        ```python
        for read in client.tail():
            for fragment in read.fragments: ...
        ```

        Goes on over restarts of server and store for as long as any call does (`reconnect_s`), and
        over sessions, of which each read names its own. What left the buffer before it was read is
        counted in the next read, so that nothing is missed unknowingly.

        Args:
            after_chunk_id: The `cursor` of an earlier read; None: from the oldest that is held.
            chunk_count_max: Chunks at most of one read, 1 to 4096; fewer come where they are large.
            max_wait_s: Seconds to wait for what comes next, after which the iteration ends; None:
                it does not end.
            lease_s: Seconds in which a read has to be loaded; None: the buffer's lease.
            known_session_id: The `session_id` of that earlier read; None: none is known.
            subscription: Go on where it stands. A read is acknowledged when the next one is asked
                for, so that whoever dies over it meets it again. None: no cursor is kept.
            is_acknowledging: False: nothing is acknowledged but by `acknowledge_chunks`, as where
                reads are asked for before the ones before them are done with.
            columns: Paths of the arrays wanted, such as "reward" or "obs.image"; None: all.
            is_mapped: As of `load_fragments`.
            buffer: None: the client's.

        Raises:
            ReplayBufferError: As `read_fragments`, and as `load_fragments` but for payloads that
                are gone or cannot be read: their chunks are counted as skipped.
        """
        tail = Tail(
            self._context,
            buffer or self.buffer,
            calls.ReadRequest(
                after_chunk_id=after_chunk_id,
                chunk_count_max=chunk_count_max,
                lease_s=lease_s,
                known_session_id=known_session_id,
                subscription=subscription,
            ),
            is_acknowledging=is_acknowledging,
            max_wait_s=max_wait_s,
            columns=columns,
            is_mapped=is_mapped,
        )
        while (read := self._interpreter.run(tail.next())) is not None:
            yield read

    def create_subscription(
        self,
        name: str,
        *,
        retaining: bool = False,
        after_chunk_id: int | None = None,
        buffer: str | None = None,
    ) -> types.Subscription:
        """Have the server keep a cursor under a name, which moves by `acknowledge_chunks` alone.

        One of the same name and kind is left as it is, wherever it stands.

        Args:
            name: 1 to 128 bytes of printable text without path separators.
            retaining: Whether payloads of chunks that are used up or stale are kept until it has
                passed them, as long as the buffer has room. At capacity such chunks go first where
                the buffer evicts, and producers wait where it blocks.
            after_chunk_id: Begin behind this chunk; None: with the oldest that is held.
            buffer: None: the client's.

        Raises:
            SubscriptionExistsError: One of the name is of the other kind.
            LimitExceededError: The buffer has as many as may be.
        """
        call = calls.create_subscription(
            buffer or self.buffer, name, retaining=retaining, after_chunk_id=after_chunk_id
        )
        return self._invoke(call)

    def acknowledge_chunks(
        self, subscription: str, chunk_id: int, *, buffer: str | None = None
    ) -> None:
        """Say that chunks up to one are done with; one that is said already changes nothing.

        Args:
            subscription: Whose.
            chunk_id: The `cursor` of a read.
            buffer: None: the client's.

        Raises:
            SubscriptionNotFoundError: There is no such subscription.
        """
        call = calls.acknowledge_chunks(buffer or self.buffer, subscription, chunk_id)
        self._invoke(call)

    def delete_subscription(self, name: str, *, buffer: str | None = None) -> None:
        """Delete a named cursor; what was retained for it alone goes.

        Raises:
            SubscriptionNotFoundError: There is no such subscription.
        """
        self._interpreter.run(
            operations.delete_subscription(self._context, buffer or self.buffer, name)
        )

    def load_fragments(
        self,
        references: Sequence[types.FragmentReference],
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        is_mapped: bool = False,
    ) -> list[Fragment]:
        """Load the payloads of granted fragments, in order.

        Args:
            references: Of a lease that is alive.
            columns: Paths of the arrays wanted, such as "reward" or "obs.image"; None: all.
            steps: Half-open range [start, stop) of the steps wanted; None: all.
            is_mapped: Where the store is a directory of this host and all is read, return views of
                its own memory instead of copies, which costs about half the time. A fragment takes
                the store's memory until it is let go, also after its lease; nobody else sees what
                is written into it.

        Raises:
            PayloadMissingError: A payload is gone.
            PayloadCorruptError: A payload fails its checksum.
            StoreUnavailableError: The store stayed away for `reconnect_s`.
        """
        return self._interpreter.run(
            operations.load_fragments(
                self._context, references, columns, steps, is_mapped=is_mapped
            )
        )

    def describe_arrays(
        self, references: Sequence[types.FragmentReference]
    ) -> list[dict[str, types.ArrayType]]:
        """Read what arrays granted fragments have, in order, and none of the arrays.

        Args:
            references: Of a lease that is alive.

        Returns:
            For each fragment, type and shape of each array by its path; `str` of one is such as
            "<f4[16, 3]".

        Raises:
            ReplayBufferError: As `load_fragments`.
        """
        return self._interpreter.run(operations.describe_arrays(self._context, references))

    @overload
    def load_batch(
        self,
        references: Sequence[types.FragmentReference],
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> "Batch[NDArray[Any]]": ...

    @overload
    def load_batch(
        self,
        references: Sequence[types.FragmentReference],
        *,
        device: types.Device,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> "Batch[torch.Tensor]": ...

    def load_batch(
        self,
        references: Sequence[types.FragmentReference],
        *,
        device: types.Device | None = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> Batch:
        """Load the payloads of granted fragments into one stacked batch [B, T, ...].

        Args:
            references: Of a lease that is alive; at least one.
            device: None for numpy arrays, else where torch tensors are wanted: "cpu", "cuda".
            columns: Paths of the arrays wanted, such as "reward" or "obs.image"; None: all.
            into: An earlier batch, or its `stacked`, whose host memory is used again where it fits;
                nothing of it on the CPU may be in use any more.

        Raises:
            TreeMismatchError: The fragments differ in structure, shape or type.
            ReplayBufferError: As `load_fragments`.
        """
        return self._interpreter.run(
            operations.read_batch(self._context, references, device, columns, into=into)
        )

    def renew_lease(
        self, lease_id: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> float:
        """Let a lease live for another `lease_s` seconds (None: as granted) from now.

        Returns:
            Seconds it has left.

        Raises:
            LeaseExpiredError: It is unknown, or has expired.
        """
        return self._invoke(calls.renew_lease(buffer or self.buffer, lease_id, lease_s))

    def release_lease(
        self,
        lease_id: str,
        mode: ReleaseMode = ReleaseMode.CONSUMED,
        *,
        buffer: str | None = None,
        unreadable: Sequence[str] = (),
    ) -> None:
        """End a lease; doing so twice is the same as once.

        Args:
            lease_id: Which.
            mode: Whether its uses count.
            buffer: Where it was fetched; None: the client's own buffer.
            unreadable: Ids of its payloads that are there and cannot be read. The server
                quarantines what readers name so often as its `--poison-after` says.

        Raises:
            LeaseExpiredError: It is unknown, or has expired.
        """
        self._invoke(calls.release_lease(buffer or self.buffer, lease_id, mode, unreadable))

    def update_priorities(
        self,
        priorities: Mapping[int, float],
        *,
        delete: Iterable[int] = (),
        buffer: str | None = None,
    ) -> types.PrioritiesReply:
        """Set priorities of chunks, by which samplers and removers of the buffer may choose.

        Ids of chunks are never used again in a buffer, so that a late update meets no other chunk:
        one that is not held any more is counted. Of more than 2048 at a time several calls are
        made, of which some may have been carried out if one fails; repeating all is safe.

        Args:
            priorities: By `FragmentReference.chunk_id`, from 0 to 1e30.
            delete: Ids of chunks to evict. What a lease keeps readable stays so.
            buffer: None: the client's.
        """
        return self._interpreter.run(
            operations.update_priorities(
                self._context, buffer or self.buffer, priorities, list(delete)
            )
        )

    # Operating ---------------------------------------------------------------------------------

    def create_buffer(
        self, name: str, config: types.BufferConfig | None = None
    ) -> types.BufferDescription:
        """Create a buffer; one of the same name and limits is left as it is.

        Raises:
            BufferExistsError: The name is taken by a buffer with other limits.
            LimitExceededError: The server holds as many buffers as it may.
        """
        return self._invoke(calls.create_buffer(name, config or types.BufferConfig()))

    def update_buffer(
        self,
        name: str,
        config: types.BufferConfig | None = None,
        *,
        reset: Iterable[str] = (),
    ) -> types.BufferDescription:
        """Change the limits that are not None; what no longer fits is evicted at once.

        Args:
            name: Of the buffer.
            config: New limits; None, here or of one limit: it stays as it is.
            reset: Names of limits that get the server's default again, such as "uses_max".

        Raises:
            BufferNotFoundError: There is no such buffer.
            InvalidRequestError: A limit is out of range, or `reset` names none.
        """
        return self._invoke(calls.update_buffer(name, config or types.BufferConfig(), reset))

    def delete_buffer(self, name: str) -> None:
        """Delete a buffer with everything in it; fetches that wait for it fail.

        Raises:
            BufferNotFoundError: There is no such buffer.
        """
        self._interpreter.run(operations.delete_buffer(self._context, name))

    def list_buffers(self) -> tuple[types.BufferDescription, ...]:
        """Describe all buffers, by name."""
        return self._interpreter.run(operations.list_buffers(self._context))

    def get_buffer(self, name: str | None = None) -> types.BufferDescription:
        """Describe one buffer (None: the client's), with its gauges and counters.

        Raises:
            BufferNotFoundError: There is no such buffer.
        """
        return self._invoke(calls.get_buffer(name or self.buffer))

    def get_store_config(self) -> types.StoreConfig:
        """Ask where payloads live. The URL may hold credentials: never log it."""
        return self._invoke(calls.get_store_config())
