"""Renew, examine and end leases, and tickets, as operations for both clients."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from breadbox.model import errors
from breadbox.model.checks import check_whole
from breadbox.model.summaries import html_table
from breadbox.model.types import (
    Device,
    FragmentReference,
    LeaseGrant,
    ReleaseMode,
    TicketGrant,
    TicketRenewal,
)
from breadbox.operations import calls, operations
from breadbox.operations.operations import Context, Operation, Sleep
from breadbox.reading.loading import Planned
from breadbox.reading.packed import BatchT, NumbersByName, load_sequences, numbers_of
from breadbox.reading.parts import named
from breadbox.reading.splitting import micro_batches
from breadbox.shared.outages import OutageLog
from breadbox.shared.process_bound import ProcessBound

_log = logging.getLogger(__name__)

FRAGMENTS_PER_READ = 8
"""Number of fragments that `fragments()` loads, and holds, at a time."""
RENEW_AT = 1 / 3
"""Part of a lease after which it is renewed: two renewals may fail before it expires."""
RENEW_AGAIN_S = 1.0
"""Seconds after which a failed renewal is retried."""
UNREADABLE_ERRORS = (errors.PayloadCorruptError, errors.PayloadFormatError)
"""Errors that say that a payload is there, and unreadable for good."""
_GONE = errors.LeaseExpiredError | errors.TicketNotFoundError


class Held(ProcessBound):
    """A lease or a ticket, which the server ends by itself unless it is renewed."""

    def __init__(
        self, interpreter: Any, name: str, renewal: calls.Call[Any], remaining_s: float
    ) -> None:
        self._interpreter = interpreter
        self._context: Context = interpreter.context
        self._name = name
        self._renewal_call = renewal
        self.remaining_s = remaining_s
        """Seconds that it had when it was given."""
        self.released = False
        """True once it was released or given back."""
        self.expired = False
        """True if a renewal found that it has ended."""

    def _renewing(self) -> Operation[None]:
        """Renew it in time until it is released or gone; retry soon if the server is away."""
        # Most leases are released before the first renewal.
        yield Sleep(self.remaining_s * RENEW_AT)
        outage = OutageLog(_log, f"renewing {self._name}", now=self._context.now)
        while True:
            try:
                renewed = yield from operations.invoke_once(self._context, self._renewal_call)
            except errors.ReplayBufferError as error:
                if self.released:
                    return  # Released meanwhile, so nothing is lost.
                if isinstance(error, _GONE | errors.ClosedError):
                    self.expired = isinstance(error, _GONE)
                    if not isinstance(error, errors.TicketNotFoundError):  # Ended with its group.
                        _log.warning("%s is not renewed any more: %s", self._name, error)
                    return
                outage.failed(error)
                delay_s = RENEW_AGAIN_S
            else:
                outage.succeeded()
                remaining_s = renewed.remaining_s if isinstance(renewed, TicketRenewal) else renewed
                delay_s = remaining_s * RENEW_AT
            yield Sleep(delay_s)


class HeldTicket(Held):
    """A ticket: its state, and its operations."""

    _kind = "ticket"
    _remedy = "take tickets in each process, or hand on the names of their groups"

    def __init__(self, interpreter: Any, buffer: str, group: str, grant: TicketGrant) -> None:
        """Use `Client.tickets` instead."""
        renewal = calls.renew_ticket(buffer, group, None)
        super().__init__(interpreter, f"the ticket of group {group}", renewal, grant.remaining_s)
        self._buffer = buffer
        self._grant = grant
        self._newest = self._context.newest(buffer, grant.session_id)
        self.group = group
        """The group's name, which the server made: `worker_id` of its members."""

    @property
    def session_id(self) -> str:
        """The session in which it was given."""
        return self._grant.session_id

    @property
    def model_version(self) -> int:
        """The version that was current when it was given."""
        return self._grant.model_version

    @property
    def late(self) -> bool:
        """True if the ticket has ended, or a group begun at its version would be too stale by now.

        Then stop generating, and give it back. No call is made: session and version are the newest
        that an append, a renewal or `watch_model` of this client has returned.
        """
        is_over = self._context.latest_session(self._buffer) != self.session_id
        if self.released or self.expired or is_over:
            return True
        bound = self._grant.staleness_max
        return bound is not None and self._newest.version - self.model_version > bound

    def __repr__(self) -> str:
        state = "given back" if self.released else "ended" if self.expired else "open"
        return f"Ticket({self.group!r}, version {self.model_version}, {state})"

    def _given_back(self, member: int | None, is_left_by: object) -> Operation[None]:
        call = calls.give_back_ticket(self._buffer, self.group, member)
        send = operations.invoke if is_left_by is None else operations.invoke_once
        yield from send(self._context, call)


class Granted(Held):
    """A granted batch: its state, and its operations."""

    _kind = "lease"
    _remedy = "fetch in each process"

    def __init__(self, interpreter: Any, buffer: str, grant: LeaseGrant) -> None:
        """Use `Client.fetch` instead."""
        renewal = calls.renew_lease(buffer, grant.lease_id, None)
        super().__init__(interpreter, f"lease {grant.lease_id}", renewal, grant.remaining_s)
        self._buffer = buffer
        self._unreadable: dict[str, None] = {}
        self._loaders: list[Planned[Any]] = []
        self._is_read = False
        """True once fragments were loaded without a limit on their staleness."""
        self._limit = -1
        """Largest limit on staleness with which fragments were loaded, or -1 if there was none."""
        self._positions: dict[int, int] = {}
        self._numbers: NumbersByName = {}
        """Places of the references, by their identity, once sequences are read."""
        self.grant = grant

    @property
    def lease_id(self) -> str:
        """Id of the lease."""
        return self.grant.lease_id

    @property
    def request_id(self) -> str:
        """Name of the fetch; all ranks use the same."""
        return self.grant.request_id

    @property
    def references(self) -> tuple[FragmentReference, ...]:
        """The granted fragments, in draw order; those of one chunk are adjacent."""
        return self.grant.fragments

    def __len__(self) -> int:
        return len(self.grant.fragments)

    def _version(self) -> Operation[int]:
        """Return the current version of the lease's session, or raise SessionEndedError."""
        state = yield from operations.watch_model(self._context, self._buffer, None, 0.0)
        current = "" if state is None else state.session_id
        if state is None or current != self.grant.session_id:
            raise errors.SessionEndedError(self.grant.session_id, current)
        return state.model_version or 0

    @property
    def left_out(self) -> list[FragmentReference]:
        """References that `batches` left out with `max_staleness_at_use`, in order."""
        return [each for loader in self._loaders for each in loader.left_out]

    def _has_aged(self) -> bool:
        """Return True if fragments were left out alone for what happened since the grant.

        Those that were too stale at the grant are not returned: they would be granted again.
        """
        is_used = self._is_read or any([loader.staleness_at_use for loader in self._loaders])
        return not is_used and any(
            each.staleness_when_granted <= self._limit for each in self.left_out
        )

    def refuse(self, payload_ids: Iterable[str]) -> None:
        """Name payloads that are readable but unusable; `release` reports them. Raises nothing.

        ```python
        lease.refuse([reference.metadata.payload.payload_id for reference in lease.references])
        ```
        """
        self._unreadable.update(dict.fromkeys(payload_ids))

    def __repr__(self) -> str:
        return f"Lease({self.lease_id!r}, {len(self)} fragments, {self._state()})"

    def _repr_html_(self) -> str:
        heads = ("worker", "index", "versions", "steps", "bytes", "staleness", "use")
        rows = (
            (
                each.metadata.worker_id,
                each.metadata.fragment_index,
                f"{each.metadata.model_version_min} to {each.metadata.model_version_max}",
                each.metadata.step_count,
                each.metadata.payload.size_bytes,
                each.staleness,
                each.use_count,
            )
            for each in self.references
        )
        title = (
            f"Lease: {len(self)} fragments of session {self.grant.session_id!r} "
            f"at version {self.grant.model_version}, {self._state()}"
        )
        return html_table(title, heads, rows)

    def _state(self) -> str:
        return "released" if self.released else "expired" if self.expired else "open"

    def _check_open(self) -> None:
        if self.released:
            raise errors.ClosedError(f"lease {self.lease_id} was released")
        if self.expired:
            raise errors.LeaseExpiredError(self.lease_id)

    def _groups(self) -> list[Sequence[FragmentReference]]:
        starts = range(0, len(self), FRAGMENTS_PER_READ)
        return [self.references[start : start + FRAGMENTS_PER_READ] for start in starts]

    def _micro_batches(
        self, tokens_max: int | None, *, is_padded: bool
    ) -> list[list[FragmentReference]]:
        """Split the sequences, as all ranks do; refuse one above *tokens_max*, of any rank."""
        self._positions = {id(each): place for place, each in enumerate(self.references)}
        self._numbers = numbers_of(self.references)
        if tokens_max is None:
            return [list(self.references)]
        check_whole("max_tokens", tokens_max, 1)
        lengths = tuple([each.metadata.step_count for each in self.references])
        shares = self.grant.step_counts or (lengths,)
        longest = max(map(max, shares))
        if longest > tokens_max:
            owners = [
                named(each)
                for each, length in zip(self.references, lengths, strict=True)
                if length == longest
            ] or [f"a sequence of rank {list(map(max, shares)).index(longest)}"]
            raise errors.InvalidRequestError(
                "max_tokens", f"is {tokens_max}, and {owners[0]} has {longest} tokens"
            )
        parts = micro_batches(lengths, shares, tokens_max, is_padded=is_padded)
        return [[self.references[position] for position in part] for part in parts]

    def _read_sequences(
        self,
        kind: type[BatchT],
        references: Sequence[FragmentReference],
        device: Device | None,
        columns: Sequence[str] | None,
        within: AbstractContextManager[None] | None,
    ) -> Operation[BatchT]:
        self._check_open()
        positions = [self._positions[id(each)] for each in references]
        load = partial(
            load_sequences,
            kind,
            positions=positions,
            device=device,
            columns=columns,
            numbers=self._numbers,
        )
        read = operations.read_loaded(
            self._context, references or self.references[:1], load, within=within
        )
        return (yield from read)

    def _renewed(self, lease_s: float | None) -> Operation[float]:
        self._check_open()
        call = calls.renew_lease(self._buffer, self.lease_id, lease_s)
        try:
            return (yield from operations.invoke(self._context, call))
        except errors.LeaseExpiredError:
            self.expired = True
            raise

    def _examined(self) -> Operation[list[str]]:
        """Read each payload by itself; return the ids of those that cannot be read."""
        found: list[str] = []
        for reference in self.references:
            try:
                yield from operations.load_fragments(self._context, [reference], None, None)
            except UNREADABLE_ERRORS:
                found.append(reference.metadata.payload.payload_id)
            except errors.PayloadMissingError:
                continue  # The server finds missing payloads in the store itself.
            except errors.ReplayBufferError as error:
                _log.warning("lease %s was not read to its end: %s", self.lease_id, error)
                break
        self.refuse(found)
        return found

    def _ended(self, mode: ReleaseMode, is_left_by: BaseException | None) -> Operation[None]:
        """Release it on the server; after an error in the block without retries, to be quick."""
        if mode is ReleaseMode.CONSUMED and self._has_aged():
            mode = ReleaseMode.RETURNED
        call = calls.release_lease(self._buffer, self.grant.lease_id, mode, [*self._unreadable])
        if is_left_by is None:
            is_shared = mode is ReleaseMode.CONSUMED and not self._unreadable
            yield from operations.invoke(self._context, call, is_shared=is_shared)
        else:
            yield from operations.invoke_once(self._context, call)
