# Code: breadbox/aio/service.py, made by scripts/gen_blocking.py. Docstrings: written here.

"""The calls of the protocol, one method each, for callers that do by hand what `Client` does."""

from collections.abc import Sequence
from typing import Any, TypeVar

from breadbox.model import types
from breadbox.model.types import ReleaseMode
from breadbox.operations import calls, members, operations
from breadbox.transport.interpreter import Interpreter

T = TypeVar("T")


class Service:
    """The calls of the protocol, as `Client.service`: no payloads, leases or loops around them.

    ```python
    print(client.service.get_store_config().inline_size_bytes_max)
    ```

    Each call blocks, retries and raises as the methods of `Client` do.

    Raises (every method): As `Client`.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        """Use `Client.service` instead."""
        self._interpreter = interpreter
        self._context = interpreter.context

    def _buffer(self, buffer: str | None) -> str:
        return buffer or self._context.options.buffer

    def _invoke(self, call: calls.Call[T]) -> T:
        return self._interpreter.run(operations.invoke(self._context, call))

    def publish_model(
        self,
        session_id: str,
        model_version: int,
        weights: types.PayloadReference | None = None,
        *,
        buffer: str | None = None,
    ) -> types.PublishReply:
        """Publish a version, with weights that are written already; `publish` writes them, too.

        ```python
        reply = client.service.publish_model(session.session_id, model_version=1)
        print(reply.evicted_chunk_count)
        ```

        Without `weights`, a reference, the version has none. Publishing the current version again
        changes nothing, so a retry is safe. Returns the version, and how many chunks became stale
        by it and were evicted.

        Raises:
            SessionEndedError: The session is not current.
            VersionRegressedError: The version is lower than the current one.
            PayloadMissingError: The store does not have the weights.
        """
        call = calls.publish_model(self._buffer(buffer), session_id, model_version, weights)
        return self._invoke(call)

    def append_fragments(
        self, fragments: Sequence[types.FragmentMetadata], *, buffer: str | None = None
    ) -> types.AppendReply:
        """Announce up to 4096 fragments with written payloads; `append_many` also writes them.

        ```python
        (payload,) = client.store.write_many([[memoryview(packed)]])  # As docs/payload-format.md.
        metadata = breadbox.FragmentMetadata("w1", 0, session.session_id, 0, 0, payload, 5)
        print(client.service.append_fragments([metadata]).results[0].outcome)
        ```

        Does not wait for room: results BUFFER_FULL and BYTES_FULL ask the caller to retry. Returns
        one result per fragment, in order, with session and version.

        Raises:
            LimitExceededError: The session has as many workers as the buffer allows.
        """
        return self._invoke(calls.append_fragments(self._buffer(buffer), fragments))

    def fetch_fragments(
        self,
        fragment_count: int,
        max_wait_s: float | None = 0.0,
        *,
        rank: int = 0,
        world_size: int = 1,
        request_id: str | None = None,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> types.LeaseGrant:
        """Fetch fragments under a lease that the caller renews and releases.

        ```python
        grant = client.service.fetch_fragments(fragment_count=2, max_wait_s=30)
        batch = client.load_batch(grant.fragments)
        client.service.release_lease(grant.lease_id)
        ```

        Args, blocking and Raises: as `Client.fetch`. Returns the lease, and the fragments of this
        rank in draw order.
        """
        request = calls.FetchRequest(
            fragment_count=fragment_count,
            max_wait_s=max_wait_s,
            rank=rank,
            world_size=world_size,
            request_id=request_id,
            lease_s=lease_s,
        )
        return self._interpreter.run(operations.fetch(self._context, self._buffer(buffer), request))

    def get_prepared_fragments(
        self, request_id: str, *, buffer: str | None = None
    ) -> tuple[types.FragmentReference, ...]:
        """Return the fragments granted to a request for all ranks, rank 0 first. Takes no lease.

        ```python
        grant = client.service.fetch_fragments(2, world_size=2, request_id="update-1")
        references = client.service.get_prepared_fragments("update-1")
        ```

        `BufferState.latest_request_id` names the latest request.

        Raises:
            RequestNotFoundError: Nothing was granted to it yet, or all its leases have ended.
        """
        return self._invoke(calls.get_prepared_fragments(self._buffer(buffer), request_id))

    def read_fragments(
        self,
        after_chunk_id: int | None = None,
        *,
        chunk_count_max: int = 64,
        max_wait_s: float = 0.0,
        lease_s: float | None = None,
        known_session_id: str | None = None,
        subscription: str | None = None,
        is_look: bool = False,
        buffer: str | None = None,
    ) -> types.FragmentRead:
        """Read the chunks after a cursor, in order of arrival, without using them; see `tail`.

        ```python
        read = client.service.read_fragments(chunk_count_max=8, max_wait_s=30)
        fragments = client.load_fragments(read.fragments)
        if read.lease_id is not None:
            client.service.release_lease(read.lease_id)
        ```

        The payloads stay readable until the lease of the read is released or expires. If all of
        them are small, and 4 MiB at most, they come inline, and the read has no lease. Waits at
        most `max_wait_s` for a chunk, and ends early if chunks were skipped or the session is
        another. A read without fragments found no chunk.

        Args:
            after_chunk_id: The `cursor` of the read before, or None to begin with the oldest chunk
                that is held. A chunk id that the buffer has not reached yet counts as None.
            chunk_count_max: Most chunks to return, 1 to 4096; large chunks come in smaller numbers.
            max_wait_s: Seconds to wait for a chunk; 0: do not wait.
            lease_s: Seconds until the lease expires, or None for the buffer's `lease_s`.
            known_session_id: The `session_id` of the read before, or None to ignore changes. If
                another session is current, the wait ends and all its chunks that are held are read.
            subscription: Subscription to read the unacknowledged chunks of, retained ones included,
                or None for a cursor that the caller keeps. With `after_chunk_id`, begins there.
            is_look: True to not count the read as a use: `BufferState.idle_s` then keeps growing,
                also during the wait. For monitors; reads with a viewer's token never count.
            buffer: The buffer's name, or None for the client's buffer.

        Raises:
            BackpressureError: Too many readers wait already.
            SubscriptionNotFoundError: There is no such subscription.
        """
        request = calls.ReadRequest(
            after_chunk_id=after_chunk_id,
            chunk_count_max=chunk_count_max,
            max_wait_s=max_wait_s,
            lease_s=lease_s,
            known_session_id=known_session_id,
            subscription=subscription,
            is_look=is_look,
        )
        return self._interpreter.run(operations.read(self._context, self._buffer(buffer), request))

    def load_weights(self, reference: types.PayloadReference) -> dict[str, Any]:
        """Read the published weights of a reference: numpy array by name. Actors call `load_model`.

        ```python
        state = client.watch_model(max_wait_s=30)
        weights = client.service.load_weights(state.weights)
        ```

        Raises:
            PayloadMissingError: The weights are gone: the server keeps those of the latest two
                versions.
        """
        return self._interpreter.run(operations.load_weights(self._context, reference))

    def renew_lease(
        self, lease_id: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> float:
        """Renew a lease, and return the seconds until it expires.

        ```python
        expires_in_s = client.service.renew_lease(grant.lease_id, lease_s=60)
        ```

        The lease then lasts `lease_s` seconds from now, or its granted time if None.

        Raises:
            LeaseExpiredError: The lease is unknown, or has expired.
        """
        return self._invoke(calls.renew_lease(self._buffer(buffer), lease_id, lease_s))

    def release_lease(
        self,
        lease_id: str,
        mode: ReleaseMode = ReleaseMode.CONSUMED,
        *,
        buffer: str | None = None,
        unreadable: Sequence[str] = (),
    ) -> None:
        """End a lease. Idempotent.

        ```python
        client.service.release_lease(grant.lease_id, breadbox.ReleaseMode.RETURNED)
        ```

        `mode` CONSUMED counts its uses, RETURNED gives them back. `unreadable` has ids of payloads
        that are in the store but cannot be read: the server quarantines one that readers have named
        `--poison-after` times. `buffer` is the one it was fetched from.

        Raises:
            LeaseExpiredError: The lease is unknown, or has expired.
        """
        self._invoke(calls.release_lease(self._buffer(buffer), lease_id, mode, unreadable))

    def take_tickets(
        self,
        count: int,
        max_wait_s: float | None = 60.0,
        *,
        request_id: str | None = None,
        lease_s: float = 600.0,
        buffer: str | None = None,
    ) -> types.TicketGrant:
        """Take tickets of groups, and return their names; see `Client.tickets`.

        ```python
        grant = client.service.take_tickets(2, buffer="paced")
        ```

        A repeated `request_id` gets the same tickets; None makes one. Nothing renews the tickets:
        call `renew_ticket`.
        """
        return self._interpreter.run(
            operations.take_tickets(
                self._context, self._buffer(buffer), count, max_wait_s, lease_s, request_id
            )
        )

    def claim_members(
        self,
        lacking: str,
        count: int = 1,
        max_wait_s: float | None = 60.0,
        *,
        lease_s: float | None = None,
        buffer: str | None = None,
    ) -> types.LeaseGrant:
        """Claim members that lack a part; see `Client.claim`.

        ```python
        grant = client.service.claim_members("reward", 8, buffer="verified")
        ```

        Nothing renews the claim: call `renew_lease`.
        """
        return self._interpreter.run(
            members.claim(self._context, self._buffer(buffer), lacking, count, max_wait_s, lease_s)
        )

    def renew_ticket(
        self, group: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> types.TicketRenewal:
        """Renew a ticket; return its new life, and the current version.

        ```python
        renewal = client.service.renew_ticket(ticket.group, lease_s=60, buffer="paced")
        ```

        The ticket then lasts `lease_s` seconds from now, or as long as when taken if None.

        Raises:
            TicketNotFoundError: The ticket is unknown, or has ended.
        """
        return self._invoke(calls.renew_ticket(self._buffer(buffer), group, lease_s))

    def give_back_ticket(
        self, group: str, member: int | None = None, *, buffer: str | None = None
    ) -> None:
        """Give a group back, or one member of it; see `Ticket.give_back`. Idempotent.

        ```python
        client.service.give_back_ticket(ticket.group, member=1, buffer="paced")
        ```
        """
        self._invoke(calls.give_back_ticket(self._buffer(buffer), group, member))

    def get_store_config(self) -> types.StoreConfig:
        """Return the settings of the payload store. The URL may hold a password: never log it.

        ```python
        print(client.service.get_store_config().inline_size_bytes_max)
        ```
        """
        return self._invoke(calls.get_store_config())
