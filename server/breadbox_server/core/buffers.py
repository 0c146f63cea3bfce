"""The entry to the core: several named buffers behind one set of inputs, events and timers.

The driver feeds inputs and the time, drains events, and arms one timer:

    answer = buffers.apply(input, now=now)
    for event in buffers.take_events(): ...
    arm(buffers.next_timer())            # then: buffers.handle_timer(now=now)

Invariants, on top of those of `breadbox_server.core.buffer`:

S1  An input changes the buffer that it names and no other. Buffers share the list of events, the
    generator that seeds their draws, the clock, and the rule that a payload has one owner.
S2  Everything due at or before `now` in a buffer has been done before an input of that `now` to it
    is judged, so it does not matter how late the driver's timer fires.
S3  An input that raises has changed nothing (B14); what its `now` made due has happened all the
    same, and its events are there to be taken.
S4  Equal inputs at equal times to sets of equal seed give equal answers and equal events.
"""

import random
from collections.abc import Callable
from typing import Any, overload

from breadbox_server.core import inputs
from breadbox_server.core.buffer import ReplayBuffer
from breadbox_server.core.config import BufferConfig
from breadbox_server.core.description import AppendCredit, BufferDescription
from breadbox_server.core.errors import (
    BufferExistsError,
    BufferNotFoundError,
    BuffersFullError,
    DrainingError,
)
from breadbox_server.core.events import Event
from breadbox_server.core.ids import BufferName, CallerId, PayloadId, RequestId
from breadbox_server.core.inputs import (
    Appended,
    Fragment,
    GrantedFragment,
    ModelState,
    Published,
)
from breadbox_server.core.validation import check_buffer_name

DEFAULT_BUFFER = BufferName("default")


class BufferSet:
    """Named replay buffers as one synchronous, deterministic state machine.

    Not thread-safe, and no method blocks. `now` is in seconds on a clock that never goes back;
    only differences matter. Whoever restores a set from a journal continues that journal's clock.

    Args:
        rng: Source of every random choice; used to seed the buffers' own draws, one seed each.
        default_config: Limits of the buffer `default`, which exists from the start.
        buffers_max: Buffers held at a time; the next `CreateBuffer` gets BUFFERS_FULL.
    """

    def __init__(
        self, rng: random.Random, default_config: BufferConfig, buffers_max: int = 64
    ) -> None:
        self._rng = rng
        self._buffers_max = buffers_max
        self._buffers: dict[BufferName, ReplayBuffer] = {}
        self._events: list[Event] = []
        self._draining = False
        self._caller_count = 0
        self._create(inputs.CreateBuffer(DEFAULT_BUFFER, default_config))

    @overload
    def apply(self, input: inputs.StartSession, *, now: float) -> ModelState: ...
    @overload
    def apply(self, input: inputs.PublishModel, *, now: float) -> Published: ...
    @overload
    def apply(self, input: inputs.AppendFragment, *, now: float) -> Appended: ...
    @overload
    def apply(self, input: inputs.Fetch, *, now: float) -> CallerId: ...
    @overload
    def apply(self, input: inputs.RenewLease, *, now: float) -> float: ...
    @overload
    def apply(self, input: inputs.DropPayloads, *, now: float) -> int: ...
    @overload
    def apply(
        self,
        input: inputs.EndSession
        | inputs.CancelFetch
        | inputs.ReleaseLease
        | inputs.UndeliveredGrant
        | inputs.CreateBuffer
        | inputs.UpdateBuffer
        | inputs.DeleteBuffer,
        *,
        now: float,
    ) -> None: ...
    def apply(self, input: inputs.Input, *, now: float) -> object:
        """Carry out one input to its end and give its answer.

        What is due by `now` is done first (S2). The answer's type is told by the input's
        docstring; everything else that came of it is in `take_events()`.

        Args:
            input: Any of `breadbox_server.core.inputs.Input`.
            now: Never less than in an earlier call.

        Raises:
            InvalidArgumentError: A name, id, index, version, size or limit is malformed or out of
                range; a version was never published; a payload id is in use already.
            BufferNotFoundError: No buffer has this name.
            BufferExistsError: CreateBuffer of a name that has other limits.
            BuffersFullError: CreateBuffer beyond `buffers_max`.
            SessionNotCurrentError: StartSession of a session that has ended, or PublishModel of
                one that is not current.
            VersionRegressedError: PublishModel of a version lower than the current one.
            WorkersFullError: AppendFragment of a new worker when `workers_max` are remembered.
            FetchExceedsCapacityError: Fetch of more than the buffer can ever hold.
            WaitersFullError: Fetch that would have to wait when `waiters_max` wait already.
            RequestMismatchError: Fetch repeats a request_id with another size.
            LeaseNotFoundError: RenewLease or ReleaseLease of a lease that is unknown or expired;
                Fetch of a request_id whose lease has ended.
            DrainingError: Fetch or AppendFragment after `drain`.
        """
        if isinstance(input, inputs.CreateBuffer):
            self._create(input)
            return None
        buffer = self._find(input.buffer)
        buffer.handle_timer(now=now)
        if isinstance(input, inputs.DeleteBuffer):
            self._delete(buffer, input)
            return None
        if self._draining and isinstance(input, inputs.Fetch | inputs.AppendFragment):
            raise DrainingError
        answer: object = _HANDLERS[type(input)](buffer, input, now=now)
        return answer

    def take_events(self) -> list[Event]:
        """Hand over what happened since the last call, in order; empty when nothing did."""
        events, self._events[:] = self._events[:], []
        return events

    def next_timer(self) -> float | None:
        """Give the instant at which `handle_timer` has something to do; None: never, as of now.

        Right after `handle_timer(now)` it is None or later than `now`.
        """
        timers = [buffer.next_timer() for buffer in self._buffers.values()]
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, *, now: float) -> None:
        """Do everything that was due at or before `now`, in each buffer.

        Expired leases are ended first, so that chunks they held back can satisfy waiters whose
        deadline is this same instant; then open chunks of silent workers are discarded; then
        waiters whose deadline has passed are told so. Cheap, and a no-op, when nothing is due.
        """
        for buffer in self._buffers.values():
            buffer.handle_timer(now=now)

    def drain(self, *, now: float) -> None:
        """Refuse all waiters with DRAINING, and from now on every Fetch and AppendFragment.

        Everything else still works, so that learners can release what they hold. Repeating it is
        a no-op; there is no way back.
        """
        self._draining = True
        for buffer in self._buffers.values():
            buffer.handle_timer(now=now)
            buffer.refuse_waiters(DrainingError())

    def names(self) -> tuple[BufferName, ...]:
        """List the buffers, sorted by name."""
        return tuple(sorted(self._buffers))

    def describe(self, buffer: BufferName, *, now: float) -> BufferDescription:
        """Show limits, gauges and counters of a buffer, after what is due by `now` (S2).

        Raises:
            BufferNotFoundError: No buffer has this name.
        """
        found = self._find(buffer)
        found.handle_timer(now=now)
        return found.describe()

    def model(self, buffer: BufferName) -> ModelState:
        """Give the current session, version and weights.

        Raises:
            BufferNotFoundError: No buffer has this name.
        """
        return self._find(buffer).model

    def prepared(self, buffer: BufferName, request_id: RequestId) -> tuple[GrantedFragment, ...]:
        """List what was granted to a request, rank 0's share first; takes no lease (B12).

        Raises:
            BufferNotFoundError: No buffer has this name.
            RequestNotFoundError: The request is unknown, still waits, or all its leases ended.
        """
        return self._find(buffer).prepared(request_id)

    def refers_to(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Tell whether a fragment, a lease or weights of the buffer refer to a payload.

        False for a buffer that does not exist.
        """
        found = self._buffers.get(buffer)
        return found is not None and found.refers_to(payload_id)

    def append_credit(self, buffer: BufferName) -> AppendCredit:
        """Say how many fragments and bytes producers may send without being told to wait.

        Raises:
            BufferNotFoundError: No buffer has this name.
        """
        return self._find(buffer).append_credit()

    def judge(self, buffer: BufferName, fragment: Fragment, *, now: float) -> Appended | None:
        """Say how `AppendFragment` would be answered at `now`, after what is due by then (S2).

        Changes nothing else. For the driver, which confirms a payload in the store only if its
        fragment has a chance. Looks at one fragment: an earlier one of the same batch may still
        change the outcome.

        Returns:
            None when the fragment would be admitted, else its answer.

        Raises:
            DomainError: Whatever `apply` would raise for it.
        """
        if self._draining:
            raise DrainingError
        found = self._find(buffer)
        found.handle_timer(now=now)
        return found.judge(fragment)

    def check_invariants(self) -> None:
        """Assert every invariant of every buffer; O(everything held), for tests and `doctor`.

        Raises:
            AssertionError: The core has a bug; the message names the invariant.
        """
        for buffer in self._buffers.values():
            buffer.check_invariants()

    def _find(self, name: BufferName) -> ReplayBuffer:
        buffer = self._buffers.get(name)
        if buffer is None:
            raise BufferNotFoundError(name)
        return buffer

    def _create(self, input: inputs.CreateBuffer) -> None:
        check_buffer_name("buffer", input.buffer)
        existing = self._buffers.get(input.buffer)
        if existing is not None:
            if existing.config != input.config:
                raise BufferExistsError(input.buffer)
            return
        if len(self._buffers) >= self._buffers_max:
            raise BuffersFullError(self._buffers_max)
        self._buffers[input.buffer] = ReplayBuffer(
            input.buffer,
            input.config,
            draw_seed=self._rng.getrandbits(64),
            events=self._events,
            next_caller_id=self._next_caller_id,
            is_payload_taken=self._is_payload_taken,
        )

    def _delete(self, buffer: ReplayBuffer, input: inputs.DeleteBuffer) -> None:
        buffer.close(BufferNotFoundError(input.buffer))
        del self._buffers[input.buffer]

    def _is_payload_taken(self, payload_id: PayloadId) -> bool:
        return any(buffer.refers_to(payload_id) for buffer in self._buffers.values())

    def _next_caller_id(self) -> CallerId:
        self._caller_count += 1
        return CallerId(self._caller_count)


_HANDLERS: dict[type, Callable[..., Any]] = {
    inputs.StartSession: ReplayBuffer.start_session,
    inputs.EndSession: ReplayBuffer.end_session,
    inputs.PublishModel: ReplayBuffer.publish,
    inputs.AppendFragment: ReplayBuffer.append,
    inputs.Fetch: ReplayBuffer.fetch,
    inputs.CancelFetch: ReplayBuffer.cancel_fetch,
    inputs.RenewLease: ReplayBuffer.renew_lease,
    inputs.ReleaseLease: ReplayBuffer.release_lease,
    inputs.UndeliveredGrant: ReplayBuffer.undo_grant,
    inputs.DropPayloads: ReplayBuffer.drop_payloads,
    inputs.UpdateBuffer: ReplayBuffer.update,
}
