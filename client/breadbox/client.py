# Code: breadbox/aio/client.py, made by scripts/gen_blocking.py. Docstrings: written here.

"""The blocking client: a method per RPC, and `append`, `fetch`, `publish` that move payloads."""

from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, overload

from numpy.typing import NDArray

from breadbox.lease import Lease, Ticket
from breadbox.model import types
from breadbox.model.errors import WaitElapsedError
from breadbox.model.fragment import Appendable, Fragment, Part
from breadbox.model.options import ClientOptions, Tls, check_addresses
from breadbox.operations import calls, members, operations
from breadbox.operations.connected import Connected
from breadbox.operations.cursor_reads import LoadedRead, Tail
from breadbox.reading.batches import Batch, Stack
from breadbox.service import Service
from breadbox.stores.base import PayloadStore
from breadbox.transport.interpreter import Interpreter

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
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
    """Return a client. Does not block: the first call makes the connection.

    Args:
        address: "HOST:PORT" or "unix:PATH". For several servers on one journal, all of them,
            separated by commas: the client calls the one that leads. "dns:///NAME:PORT" stands for
            all addresses that the name resolves to.
        buffer: The buffer of calls that name none.
        tls: Certificates, or None for an unencrypted connection.
        token: Bearer token, sent with every call, or None. Without TLS the network can read it.
            `@FILE` stands for the contents of the file.
        deadline_s: Seconds for which server or store may be silent, on top of any wait that was
            requested. A call continues while bytes of payloads move.
        reconnect_s: Seconds for which a call retries after that, and after server or store became
            unreachable, so that work continues after a restart. 0: no retry.
        append_wait_s: Seconds for which an append waits while nothing is admitted because buffer
            or store is full. After that it raises BackpressureError.
        codecs: Codecs of the arrays of appended fragments: one codec ("raw", "lz4", "zstd",
            "zstd:LEVEL"), or codecs by pattern over array names, such as {"obs*": "zstd"}.
        store_url: URL of the payload store as seen from this host, or None for the server's.

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


class Client(Connected):
    """A connection to one server. Use it as a context manager, or call `close`.

    ```python
    with breadbox.connect("localhost:50051") as client:
        print(client.append(fragment).outcome)
    ```

    `buffer` of a method names the buffer, or is None for the client's buffer.

    Blocks (every call): until the server has answered, for at most `deadline_s` and `reconnect_s`
    together, on top of the wait requested by `max_wait_s`; with `max_wait_s=0` it does not wait.

    Thread-safe: any number of threads may call any method at a time; `close` makes calls of other
    threads fail with ClosedError. Not for use in another process: gRPC's threads do not survive a
    fork, so every call in a child raises ClosedError, and so does pickling; connect in the child.

    Raises (every method):
        InvalidRequestError: An argument is malformed, or can never be satisfied.
        BufferNotFoundError: There is no such buffer.
        UnavailableError: The server was unreachable, or draining, for `reconnect_s`.
        StoreUnavailableError: The store, where it is needed, was unreachable for `reconnect_s`.
        TlsError: Certificates or encryption do not fit. Raised immediately if the server never
            answered this client before.
        DeadlineExceededError: The server was silent for `deadline_s`, and then for `reconnect_s`.
        UnauthenticatedError, PermissionDeniedError: Credentials are missing, unknown, too weak.
        NotSupportedError: The server does not know the call.
        InternalError: A bug in the server.
        ClosedError: The client was closed.
    """

    service: Service
    _interpreter: Interpreter

    def _begin(self) -> None:
        self._interpreter = Interpreter(self._context)
        self.service = Service(self._interpreter)

    # Life --------------------------------------------------------------------------------------

    @property
    def store(self) -> PayloadStore:
        """The payload store. The first use requests its URL from the server, and opens it.

        Raises:
            StoreUrlError: This host cannot use a store of that URL.
            StoreUnavailableError: The store cannot be reached from this host.
        """
        return self._interpreter.run(operations.opened_store(self._context))

    def close(self) -> None:
        """Close connections. Idempotent; calls in progress raise ClosedError, leases expire.

        ```python
        client.close()
        ```
        """
        self._interpreter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _invoke(self, call: calls.Call[T]) -> T:
        return self._interpreter.run(operations.invoke(self._context, call))

    def _run(
        self,
        operation: "Callable[Concatenate[operations.Context, str, P], operations.Operation[T]]",
        buffer: str | None,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        begun = operation(self._context, buffer or self.buffer, *arguments, **named)
        return self._interpreter.run(begun)

    # Sessions and models -----------------------------------------------------------------------

    def start_session(
        self,
        session_id: str | None = None,
        *,
        model_version: int | None = None,
        buffer: str | None = None,
        take_over: bool = False,
    ) -> types.ModelState:
        """Start a session, and end the current one with all its fragments.

        A current session that other processes use, which called as learners or producers within
        the last minute, is ended only with `take_over`. The process that started it may end it.

        ```python
        session = client.start_session("run-7")
        print(session.session_id, session.model_version)
        ```

        Returns the session that is current now, and its version.

        Args:
            session_id: A name that no session had before, one for each run, or None for a random
                one. The name of the current session changes nothing.
            model_version: Version to start at, for a resumed run, or None for 0.
            buffer: The buffer's name, or None for the client's buffer.
            take_over: True to end the current session although other processes use it.

        Raises:
            SessionEndedError: The session was current before, and ended.
            SessionInUseError: Other processes use the current session; the text names them.
        """
        return self._invoke(
            calls.start_session(
                buffer or self.buffer, session_id, model_version, take_over=take_over
            )
        )

    def end_session(self, session_id: str, *, buffer: str | None = None) -> None:
        """End a session, and drop its fragments; leases stay valid until they end.

        ```python
        client.end_session(session.session_id)
        ```

        Does nothing if the session is not current.
        """
        self._invoke(calls.end_session(buffer or self.buffer, session_id))

    def publish(
        self,
        session_id: str,
        model_version: int,
        weights: Mapping[str, Any],
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        """Write weights, array or tensor by name, then publish them with their version, atomically.

        ```python
        client.publish(session.session_id, 1, {"bias": np.zeros(8, np.float32)})
        ```

        Blocks while the weights are written, and while the store is full. Else as `publish_model`.

        Raises:
            BackpressureError: The store was full for `append_wait_s`.
        """
        return self._run(operations.publish, buffer, session_id, model_version, weights)

    def watch_model(
        self,
        known: types.ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> types.ModelState | None:
        """Wait until a session or version other than the known one is current; see `load_model`.

        ```python
        known = client.watch_model(max_wait_s=30)
        newer = client.watch_model(known)
        ```

        Weights published for a version that was known without weights count as a change too.
        Returns the current session, version and weights, or None if `known` is still current. If
        `known` is None, any current session ends the wait.
        """
        return self._run(operations.watch_model, buffer, known, max_wait_s)

    def group_ends(
        self, after: int = 0, *, max_wait_s: float = 0.0, buffer: str | None = None
    ) -> list[types.GroupEnd]:
        """Wait until groups have ended, in a buffer of groups; see docs/agents.md.

        ```python
        seen = 0
        for end in client.group_ends(seen, max_wait_s=30, buffer="paced"):
            print(end.group, end.reason.value, end.member_count)
            seen = end.number
        ```

        Returns the ends of groups of the current session after the end numbered `after`, in their
        order, at most 1024; or nothing if there is none after `max_wait_s`. The server remembers
        the ends of `workers_max` groups, over restarts too. If no group has had the number `after`,
        such as in a buffer that was made anew, all ends are returned.
        """
        return self._run(operations.group_ends, buffer, after, max_wait_s)

    def tickets(
        self,
        count: int = 1,
        max_wait_s: float | None = 60.0,
        *,
        lease_s: float = 600.0,
        buffer: str | None = None,
    ) -> list[Ticket]:
        """Wait until groups may be begun, and take up to `count` of them; see docs/agents.md.

        ```python
        for ticket in client.tickets(4, max_wait_s=60, buffer="paced"):
            with ticket:
                print(ticket.group, ticket.model_version)
                ticket.give_back()  # Nothing was generated for it.
        ```

        Blocks until one is free, for at most `max_wait_s`, and returns as many as are free then. A
        ticket is free as long as fewer groups than `(lead_versions + 1) * groups_per_version` are
        open, complete, or delivered at the current version. Requests get tickets in order of
        arrival. A ticket ends with its group, or `lease_s` seconds after the latest renewal.

        Args:
            count: Most tickets to take, 1 to 1024.
            max_wait_s: Seconds to wait for the first free ticket, or None to wait without end.
            lease_s: Seconds that a ticket lives without a renewal.
            buffer: The buffer, or None for the client's.

        Raises:
            WaitElapsedError: None was free in time; it says what the request waited for.
            InvalidRequestError: The buffer has no groups, or its `groups_per_version` is 0.
            BackpressureError: The client's token holds, or waits for, too many tickets; or too many
                requests wait.
        """
        grant = self._run(operations.take_tickets, buffer, count, max_wait_s, lease_s)
        made = buffer or self.buffer
        return [Ticket(self._interpreter, made, group, grant) for group in grant.groups]

    def attach(
        self, parts: Part | Iterable[Part], *, buffer: str | None = None, replace: bool = False
    ) -> list[types.AppendResult]:
        """Attach parts to members of open groups, or to rows; see docs/agents.md.

        ```python
        client.attach(breadbox.Part("row-1", 0, "ids", {"ids": np.arange(3)}), buffer="rows")
        client.attach(breadbox.Part("row-1", numbers={"status": "done"}), buffer="rows")
        ```

        All parts of one call are written, and announced, together. Returns the result of each, in
        order: ADMITTED, or DUPLICATE if the member has the part with the same bytes, in which case
        nothing changes, its numbers included. Numbers are merged on the server: those of one name
        are set, others stay. Blocks while the buffer is full, for at most `append_wait_s`.

        Args:
            parts: A part, or several.
            buffer: The buffer, or None for the client's.
            replace: In a buffer of rows: parts of the same name are replaced.

        Raises:
            PartConflictError: A member has a part of the same name with other bytes.
            GroupEndedError: The group of a part has ended.
            SessionEndedError: No session is current, or another one than that of a part.
            BackpressureError: There was no room in time, or there are too many groups.
            InvalidRequestError: A member would have more than 64 parts or 16 numbers. The parts
                before it may be attached, those behind it are not.

        Other errors are raised once all parts were judged: the others are attached.
        """
        return self._run(members.attach, buffer, parts, replace=replace)

    def members(
        self,
        prefix: str = "",
        *,
        keys: Sequence[tuple[str, int]] | None = None,
        buffer: str | None = None,
    ) -> list[types.MemberDescription]:
        """List the members of open groups, or rows, with their parts and numbers.

        ```python
        for row in client.members(buffer="rows"):
            print(row.group, row.member, row.parts, row.numbers)
        ```

        Returns those of groups with names that begin with `prefix`, in order of group and member,
        page by page: one that comes or goes meanwhile may be listed or not. With *keys*, groups and
        numbers of members, those alone, in that order; what is not there is left out.
        """
        return self._run(members.members, buffer, prefix, keys)

    def read_members(
        self,
        keys: Sequence[tuple[str, int]],
        parts: Sequence[str] | None = None,
        *,
        buffer: str | None = None,
    ) -> list[dict[str, Any]]:
        """Read the arrays of members of open groups, or of rows, by their keys.

        ```python
        (row,) = client.read_members([("row-1", 0)], ["ids"], buffer="rows")
        print(row["ids"])
        ```

        Returns one dict of arrays for each key, in the order of *keys*: those of all parts, or of
        the named *parts*. Of arrays of one name that of the latest part is taken. The name of a
        member's sequence is "tokens".

        Raises:
            MemberNotFoundError: There is no such member, or it lacks a part. Nothing is returned.
            PayloadMissingError: A member was dropped while it was read.
        """
        return self._run(members.read_members, buffer, keys, parts)

    def claim(
        self,
        lacking: str,
        count: int = 1,
        max_wait_s: float | None = 60.0,
        *,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> "Lease":
        """Claim members of open groups that lack a part, for a verifier; see docs/agents.md.

        ```python
        with client.claim(lacking="reward", count=8, max_wait_s=30, buffer="verified") as claim:
            for sequence in claim.sequences():
                reward = breadbox.Part(sequence.group, sequence.member, "reward", {"r": np.ones(1)})
                client.attach(reward, buffer="verified")
        ```

        Blocks until a member has its sequence and lacks the part, for at most `max_wait_s`, and
        returns as many as there are, at most `count`. No other claim gets them while the lease
        lives; leaving the block ends it, and members without the part can be claimed again. Claims
        do not survive the server. Learners do not notice them.

        Args:
            lacking: Name of the part.
            count: Most members to claim, 1 to 1024.
            max_wait_s: Seconds to wait for the first, or None to wait without end.
            lease_s: Seconds that the claim lives without a renewal, or None for the buffer's.
            buffer: The buffer, or None for the client's.

        Raises:
            WaitElapsedError: There was no such member in time.
        """
        grant = self.service.claim_members(
            lacking, count, max_wait_s, lease_s=lease_s, buffer=buffer
        )
        return self._leased(buffer or self.buffer, grant)

    def drop_members(self, keys: Iterable[tuple[str, int]], *, buffer: str | None = None) -> int:
        """Drop rows by their keys, and return how many there were; others are ignored.

        ```python
        client.drop_members([("row-1", 0)], buffer="rows")
        ```

        Raises:
            InvalidRequestError: The buffer keeps no rows.
        """
        return self._run(members.drop_members, buffer, keys)

    def load_model(
        self,
        newer_than: types.ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> tuple[types.ModelState, dict[str, Any]] | None:
        """Wait until weights other than those of `newer_than` are published, and read the newest.

        ```python
        model = None  # The session and version that this actor acts with.
        if (newer := client.load_model(model)) is not None:
            model, weights = newer
        ```

        If the learner supersedes the weights while they are read, the newer ones are read instead.
        A session or version without weights does not end the wait.

        Returns session and version, and the weights: numpy array by name. Or None if no weights are
        published, or only those of `newer_than`.

        Raises:
            PayloadMissingError: The store lost the weights, or the learner publishes faster than
                this host reads them.
        """
        return self._run(operations.load_model, buffer, newer_than, max_wait_s)

    # Writing fragments -------------------------------------------------------------------------

    def append(
        self,
        fragment: Appendable,
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> types.AppendResult:
        """Append one fragment or sequence; as `append_many`. For many there is `breadbox.Appender`.

        ```python
        print(client.append(fragment).outcome)
        ```

        Threads that append at the same time share the calls of their client, so let them share a
        client. For a call of others an append waits at most 50 ms.
        """
        results = self.append_many([fragment], buffer=buffer, codecs=codecs)
        return results[0]

    def append_many(
        self,
        fragments: Iterable[Appendable],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[types.AppendResult]], None] | None = None,
    ) -> list[types.AppendResult]:
        """Append fragments or sequences: write payloads and announce them, in bounded groups.

        ```python
        results = client.append_many([fragment])
        print([result.outcome for result in results])
        ```

        Blocks while buffer or store is full, for at most `append_wait_s` without an admission.

        With `answered`, fragments are taken while earlier ones are sent, and it is called with the
        results of each group in place of their return, in some thread.

        Fragments of one worker must be in order of their index, sequences of one group need not.
        Appending again is safe: the server answers DUPLICATE for those that it admitted. After an
        error some may have been admitted; payloads that were not announced expire by themselves.

        `codecs` of the arrays are as in `connect`, or None for the client's codecs. Returns one
        result per fragment, in order: ADMITTED or DUPLICATE; or STALE or WRONG_SESSION for
        fragments that are not in the buffer.

        Raises:
            BackpressureError: Nothing was admitted for `append_wait_s`; its `results` has the
                results so far.
            LimitExceededError: The session has as many workers as the buffer allows.
            PayloadMissingError: For `reconnect_s` the store lost each payload that was written.
            UnsupportedArrayError: An array cannot be stored. Fragments before it may be admitted.
        """
        return self._run(operations.append_many, buffer, fragments, codecs, answered)

    def report_episodes(
        self,
        episodes: Sequence[types.EpisodeReport],
        *,
        workers: Sequence[types.WorkerSteps] = (),
        buffer: str | None = None,
    ) -> None:
        """Report 1 to 1024 finished episodes, for metrics. The report is sent once, never retried.

        `workers` says where the steps of at most 256 workers went, since their start; the server
        keeps the latest report of each. With them there may be no episode.

        ```python
        end = breadbox.EpisodeEnd.TERMINATED
        report = breadbox.EpisodeReport(worker_id="w0", return_sum=9.0, discounted_return_sum=8.5,
                                        step_count=9, end=end)
        client.report_episodes([report])
        ```

        Raises:
            BackpressureError: The token's rate is used up; nothing was counted.
        """
        self._invoke(calls.report_episodes(buffer or self.buffer, episodes, workers))

    # Reading fragments -------------------------------------------------------------------------

    def fetch(
        self,
        fragment_count: int,
        max_wait_s: float | None = 60.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> "Lease":
        """Fetch fragments under a lease: a context manager that renews and releases it.

        ```python
        with client.fetch(fragment_count=32, max_wait_s=30) as lease:
            for batch in lease.batches(batch_size=8): ...
        ```

        Blocks until the buffer has the fragments, for at most `max_wait_s`, or for as long as it
        takes if that is None. Fetches are served in the order of their arrival. The lease has the
        fragments of this rank in draw order.

        Args:
            fragment_count: Fragments for all ranks together; a multiple of
                fragments_per_chunk * world_size.
            max_wait_s: Seconds to wait for fragments, a minute by default; 0: do not wait. None:
                wait for ever, until they are there.
            rank: Rank of this learner, from 0.
            world_size: Number of learners that share the fetch.
            request_id: Name of the fetch, the same for all ranks and for a retry, or None for a
                random one.
            lease_s: Seconds until the lease expires, or None for the buffer's `lease_s`.
            buffer: The buffer's name, or None for the client's buffer.

        Raises:
            WaitElapsedError: The wait is over; nothing was taken. The message names the
                missing part.
            RequestMismatchError: The request_id was used with another size.
            LeaseExpiredError: The request_id was granted before, and its lease has ended.
            BackpressureError: Too many fetches wait already.
        """
        grant = self.service.fetch_fragments(
            fragment_count,
            max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
            buffer=buffer,
        )
        return self._leased(buffer or self.buffer, grant)

    def _leased(self, buffer: str, grant: types.LeaseGrant) -> Lease:
        return Lease(self._interpreter, buffer, grant)

    @overload
    def batches(
        self,
        batch_size: int,
        max_wait_s: float | None = None,
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        buffer: str | None = None,
    ) -> "Generator[Batch[NDArray[Any]], None, None]": ...

    @overload
    def batches(
        self,
        batch_size: int,
        max_wait_s: float | None = None,
        *,
        device: types.Device,
        columns: Sequence[str] | None = None,
        buffer: str | None = None,
    ) -> "Generator[Batch[torch.Tensor], None, None]": ...

    def batches(
        self,
        batch_size: int,
        max_wait_s: float | None = None,
        *,
        device: types.Device | None = None,
        columns: Sequence[str] | None = None,
        buffer: str | None = None,
    ) -> Generator[Batch, None, None]:
        """Fetch, load and release batches of `batch_size` fragments, one after another.

        ```python
        for batch in client.batches(batch_size=4, max_wait_s=5):
            print(batch.reward.mean())
        ```

        Each iteration blocks until the buffer has the fragments; after `max_wait_s` without them
        the iteration ends, or never if that is None. A batch counts as used when the caller asks
        for the next one or leaves the loop. An error in the loop's body counts so, too: a learner
        that gives batches back, loads ahead, or divides a fetch into minibatches, uses `fetch`.
        `device` and `columns` are as of `load_batch`.

        Raises:
            ReplayBufferError: As `fetch` and `load_batch`, but for WaitElapsedError.
        """
        while True:
            try:
                lease = self.fetch(batch_size, max_wait_s, buffer=buffer)
            except WaitElapsedError:
                return
            with lease:
                batch = self.load_batch(lease.references, device=device, columns=columns)
                try:
                    yield batch
                except GeneratorExit:  # The caller has this batch: it counts as used.
                    return

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
        """Follow a buffer: load the chunks it holds and then new ones, without using them.

        ```python
        for read in client.tail():
            for fragment in read.fragments: ...
        ```

        Each step blocks until there is a chunk or another session; after `max_wait_s` the iteration
        ends, or never if that is None. It survives restarts of server and store of up to
        `reconnect_s`, and continues over sessions; each read names its session, and counts the
        chunks that left unread before it.

        `after_chunk_id`, `chunk_count_max`, `known_session_id` and `subscription` are as of
        `read_fragments`, `columns` and `is_mapped` as of `load_fragments`. A read has to be loaded
        within `lease_s`, or the buffer's if None. With a subscription, a read is acknowledged when
        the caller asks for the next one: a reader that dies while it handles a read gets it again.
        With `is_acknowledging=False` only `acknowledge_chunks` does it, such as for a reader that
        asks for reads before it has handled the earlier ones.

        Raises:
            ReplayBufferError: As `read_fragments` and `load_fragments`, but payloads that are gone
                or cannot be read raise nothing: their chunks are counted as skipped.
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
        """Create a subscription: a named cursor on the server, moved by `acknowledge_chunks` alone.

        ```python
        client.create_subscription("evaluator")
        read = client.service.read_fragments(subscription="evaluator")
        ```

        Returns the subscription and its position. An existing one of the same kind keeps its
        position.

        Args:
            name: 1 to 128 bytes of printable text without path separators.
            retaining: True to keep payloads of used up or stale chunks until the cursor has passed
                them, as long as the buffer has room. At capacity, a buffer that evicts evicts these
                chunks first; in a buffer that blocks, producers wait.
            after_chunk_id: Chunk to begin after, or None to begin with the oldest one held.
            buffer: The buffer's name, or None for the client's buffer.

        Raises:
            SubscriptionExistsError: The subscription of this name is of the other kind.
            LimitExceededError: The buffer has as many subscriptions as the server allows.
        """
        call = calls.create_subscription(
            buffer or self.buffer, name, retaining=retaining, after_chunk_id=after_chunk_id
        )
        return self._invoke(call)

    def acknowledge_chunks(
        self, subscription: str, chunk_id: int, *, buffer: str | None = None
    ) -> None:
        """Acknowledge all chunks up to one, the `cursor` of a read; again changes nothing.

        ```python
        read = client.service.read_fragments(subscription="evaluator")
        client.acknowledge_chunks("evaluator", read.cursor)
        ```

        Raises:
            SubscriptionNotFoundError: There is no such subscription.
        """
        call = calls.acknowledge_chunks(buffer or self.buffer, subscription, chunk_id)
        self._invoke(call)

    def delete_subscription(self, name: str, *, buffer: str | None = None) -> None:
        """Delete a subscription, and the chunks that are retained for it alone.

        ```python
        client.delete_subscription("evaluator")
        ```

        Raises:
            SubscriptionNotFoundError: There is no such subscription.
        """
        self._run(operations.delete_subscription, buffer, name)

    def load_fragments(
        self,
        references: Sequence[types.FragmentReference],
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        is_mapped: bool = False,
    ) -> list[Fragment]:
        """Load the payloads of granted fragments, in order; of sequences as `breadbox.Sequence`.

        ```python
        fragments = client.load_fragments(grant.fragments, columns=["reward"], steps=(0, 2))
        ```

        Args:
            references: Fragments of an open lease.
            columns: Paths of the arrays to load, such as "reward" or "obs.image", or None for all.
            steps: Half-open range [start, stop) of the steps to load, or None for all.
            is_mapped: True to return views of the store's memory instead of copies, in about half
                the time. It has an effect if the store is a directory of this host, and all columns
                and steps are loaded. A fragment keeps the store's memory in use until it is garbage
                collected, even after the lease. Writes into its arrays are private to it.

        Raises:
            PayloadMissingError: A payload is gone.
            PayloadCorruptError: A payload fails its checksum.
        """
        return self._interpreter.run(
            operations.load_fragments(
                self._context, references, columns, steps, is_mapped=is_mapped
            )
        )

    def describe_arrays(
        self, references: Sequence[types.FragmentReference]
    ) -> list[dict[str, types.ArrayType]]:
        """Read types and shapes of the arrays of granted fragments, without loading the arrays.

        ```python
        print(client.describe_arrays(grant.fragments)[0]["reward"])  # <f4[5]
        ```

        Returns for each fragment, in order, type and shape of each array by its path. Raises the
        errors of `load_fragments`.
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

        ```python
        batch = client.load_batch(grant.fragments, device="cpu")
        ```

        Without a `device` of torch tensors the arrays are numpy's. `references` and `columns` are
        as of `load_fragments`. The host memory of `into`, an earlier batch or its `stacked`, is
        reused where it fits: the caller must not use its arrays on the CPU any more.

        Raises:
            TreeMismatchError: The fragments differ in structure, shape or type.
            ReplayBufferError: As `load_fragments`.
        """
        return self._interpreter.run(
            operations.read_batch(self._context, references, device, columns, into=into)
        )

    def update_priorities(
        self,
        priorities: Mapping[int, float],
        *,
        delete: Iterable[int] = (),
        buffer: str | None = None,
    ) -> types.PrioritiesReply:
        """Set priorities of chunks, which samplers and removers of the buffer may use.

        ```python
        client.update_priorities({each.chunk_id: 2.0 for each in grant.fragments})
        ```

        A buffer never uses a chunk id twice, so a late update changes no other chunk: ids of chunks
        that are not held any more are counted. More than 2048 take several calls. If one of these
        fails, earlier ones have been carried out; repeating all is safe.

        Priorities are from 0 to 1e30. Chunks of the ids in `delete` are evicted; leases keep their
        payloads readable. Returns how many chunks were updated and deleted, and how many ids were
        unknown.
        """
        return self._run(operations.update_priorities, buffer, priorities, list(delete))

    # Operating ---------------------------------------------------------------------------------

    def create_buffer(
        self, name: str, config: types.BufferConfig | None = None
    ) -> types.BufferDescription:
        """Create a buffer; an existing one of the same name and limits is left as it is.

        ```python
        client.create_buffer("demo", breadbox.BufferConfig(uses_max=2))
        ```

        Limits that `config` leaves out are the server's defaults. Returns the buffer with all.

        Raises:
            BufferExistsError: A buffer of this name has other limits.
            LimitExceededError: The server has as many buffers as its options allow.
        """
        return self._invoke(calls.create_buffer(name, config or types.BufferConfig()))

    def update_buffer(
        self, name: str, config: types.BufferConfig | None = None, *, reset: Iterable[str] = ()
    ) -> types.BufferDescription:
        """Change limits of a buffer; chunks that no longer fit are evicted immediately.

        ```python
        config = breadbox.BufferConfig(uses_max=4)
        client.update_buffer(client.buffer, config, reset=["staleness_max"])
        ```

        A limit of `config` that is None stays as it is; one that `reset` names gets the server's
        default. Returns the buffer with all its limits.

        Raises:
            InvalidRequestError: A limit is out of range, or `reset` has a name that is no limit.
        """
        return self._invoke(calls.update_buffer(name, config or types.BufferConfig(), reset))

    def delete_buffer(self, name: str) -> None:
        """Delete a buffer with everything in it; fetches that wait for it raise an error.

        ```python
        client.create_buffer("scratch")
        client.delete_buffer("scratch")
        ```
        """
        self._interpreter.run(operations.delete_buffer(self._context, name))

    def list_buffers(self) -> tuple[types.BufferDescription, ...]:
        """Return all buffers, sorted by name, with their gauges and counters.

        ```python
        print([description.name for description in client.list_buffers()])
        ```
        """
        return self._interpreter.run(operations.list_buffers(self._context))

    def get_buffer(
        self,
        name: str | None = None,
        *,
        events_after: int | None = None,
        with_workers: bool = False,
    ) -> types.BufferDescription:
        """Return one buffer, or the client's if None, with its gauges and counters.

        ```python
        print(client.get_buffer().state.chunk_count)
        ```

        `events_after` is the number of the last `ChunkEvent` that the caller has seen, or 0: later
        ones are returned, as far as the server remembers them. None: no events. `with_workers`:
        return where the steps of each worker went, too.
        """
        return self._invoke(calls.get_buffer(name or self.buffer, events_after, with_workers))
