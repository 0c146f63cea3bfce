"""The entry to the core: several named buffers behind one set of inputs, events and timers.

    answer = buffers.apply(input, now=now)
    for event in buffers.take_events(): ...
    arm(buffers.next_timer())            # then: buffers.handle_timer(now=now)

S1  An input changes only the buffer that it names. Buffers share the list of events, the generator
    that seeds their draws, the clock, and the rule that a payload has one owner.
S2  What is due in a buffer is done before an input of that `now` is judged: timers may fire late.
S3  An input that raises has changed nothing (B14); what its `now` made due has happened.
S4  Equal inputs at equal times to sets of equal seed give equal answers and equal events.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import cast

from breadbox_server.core import snapshot
from breadbox_server.core.buffer import ReplayBuffer
from breadbox_server.core.lacking import MemberKey
from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.entries import BufferCreated, Entry, FragmentTaken, ReplayError
from breadbox_server.core.model.events import Event
from breadbox_server.core.model.ids import BufferName, CallerId, PayloadId, SessionId
from breadbox_server.core.model.inputs import Answer, Fragment
from breadbox_server.core.model.validation import check_buffer_name
from breadbox_server.core.rules import granting, waiting
from breadbox_server.core.samplers import make_remover, make_sampler
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.core.state.buffer_state import BufferState, Shared

DEFAULT_BUFFER = BufferName("default")
REFUSED_AT_END = (
    inputs.Fetch | inputs.TakeTickets | inputs.AppendFragments | inputs.Offer | inputs.Settle
)
DRAW_SEED_BITS = 63
"""A seed fits a signed 64-bit integer, wherever a journal puts it."""


class BufferSet:
    """Named replay buffers as one synchronous, deterministic state machine.

    Not thread-safe, and no method blocks. `now` is in seconds on a clock that never goes back, also
    over a restore; only differences matter. `default_config` is of the buffer `default`. Without
    `is_recording` no entries are kept.
    """

    def __init__(
        self,
        rng: random.Random,
        default_config: BufferConfig,
        buffers_max: int = 64,
        *,
        is_recording: bool = False,
    ) -> None:
        self._begin(rng, buffers_max, is_recording)
        self._create(inputs.CreateBuffer(DEFAULT_BUFFER, default_config), now=0.0)

    def _begin(self, rng: random.Random, buffers_max: int, is_recording: bool) -> None:
        self._rng = rng
        self.buffers_max = buffers_max
        """Buffers held at a time."""
        self._buffers: dict[BufferName, ReplayBuffer] = {}
        self._shared = Shared(is_recording=is_recording)
        self.is_draining = False
        """Whether fetches and fragments are refused: the server ends."""

    def apply(self, input: inputs.Input[Answer], *, now: float) -> Answer:
        """Do what is due by `now` (S2), carry out one input to its end, and return its answer.

        DomainError: refused, and nothing changed.
        """
        if isinstance(input, inputs.CreateBuffer):
            self._create(input, now=now)
            return cast(Answer, None)
        buffer = self[input.buffer]
        if isinstance(input, inputs.DeleteBuffer):
            self._delete(input, now=now)
            return cast(Answer, None)
        if self.is_draining and isinstance(input, REFUSED_AT_END):
            raise errors.DrainingError
        return buffer.apply(input, now=now)

    def take_events(self) -> list[Event]:
        """Hand over what happened since the last call, in order; empty when nothing did."""
        events = self._shared.events[:]
        self._shared.events.clear()
        return events

    def next_timer(self) -> float | None:
        """Return when `handle_timer` has something to do, or None; later than its last `now`."""
        timers = [buffer.next_timer() for buffer in self._buffers.values()]
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, *, now: float) -> None:
        """Do everything due at or before `now`, in each buffer; cheap if nothing is.

        Leases expire first, since their chunks may satisfy waiters due at the same instant.
        """
        for buffer in self._buffers.values():
            buffer.handle_timer(now=now)

    def drain(self, *, now: float) -> None:
        """Refuse all waiters, and from now on every fetch and fragment, with DRAINING.

        The rest still works, so that learners can release. Idempotent; there is no way back.
        """
        self.is_draining = True
        for buffer in self._buffers.values():
            buffer.handle_timer(now=now)
            buffer.refuse_all(errors.DrainingError())

    def names(self) -> tuple[BufferName, ...]:
        """List the buffers, sorted by name."""
        return tuple(sorted(self._buffers))

    def __contains__(self, name: BufferName) -> bool:
        """Return True if there is a buffer of this name."""
        return name in self._buffers

    def __getitem__(self, name: BufferName) -> ReplayBuffer:
        """Return a buffer to look at, as the last input left it; inputs go to `apply`."""
        buffer = self._buffers.get(name)
        if buffer is None:
            raise errors.BufferNotFoundError(name)
        return buffer

    def describe(self, buffer: BufferName, *, now: float) -> BufferDescription:
        """Show limits, gauges and counters of a buffer, after what is due by `now` (S2)."""
        found = self[buffer]
        found.handle_timer(now=now)
        return found.describe(now=now)

    def refers_to(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Return whether a buffer, if it exists, refers to a payload."""
        state = self._shared.states.get(buffer)
        return state is not None and payload_id in state.payloads.owners

    def refers_elsewhere(self, buffer: BufferName | None, payload_id: PayloadId) -> bool:
        """Return whether another buffer than this one, or any, refers to a payload."""
        return any(
            name != buffer and payload_id in state.payloads.owners
            for name, state in self._shared.states.items()
        )

    def has_weights(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Return whether a payload is one of the latest two weights of a buffer, if it exists."""
        state = self._shared.states.get(buffer)
        kept = () if state is None else state.model.weights.values()
        return payload_id in [weights.payload_id for weights in kept]

    def has_ended(self, buffer: BufferName, session_id: SessionId) -> bool:
        """Return whether a session of a buffer, if it exists, is remembered to have ended."""
        state = self._shared.states.get(buffer)
        return state is not None and session_id in state.model.ended_sessions

    def closed_count(self, buffer: BufferName) -> int:
        """Count the chunks ever closed; 0 for a buffer that does not exist."""
        state = self._shared.states.get(buffer)
        return 0 if state is None else state.holdings.closed_count

    def collects_groups(self, buffer: BufferName) -> bool:
        """Return whether a buffer, if it exists, takes members of groups."""
        state = self._shared.states.get(buffer)
        return state is not None and state.assembly.in_any_order

    def end_claim(self, buffer: BufferName, keys: Iterable[MemberKey]) -> None:
        """Let other claims get members that were claimed, as far as they are still there."""
        if buffer in self._buffers:
            self._buffers[buffer].end_claim(keys)

    def has_more_to_claim(self, buffer: BufferName) -> bool:
        """Return whether claims that wait may get an answer, since it was last asked."""
        return buffer not in self._buffers or self._buffers[buffer].has_more_to_claim()

    def tag(self, buffer: BufferName) -> str:
        """Return the number by which a buffer's groups are counted, or empty if by none."""
        state = self._shared.states.get(buffer)
        return "" if state is None else state.config.tag

    def group_end_count(self, buffer: BufferName) -> int:
        """Count the ends of groups ever noted; 0 for a buffer that does not exist."""
        state = self._shared.states.get(buffer)
        return 0 if state is None else state.assembly.ended_count

    def fragments(self) -> Iterator[Fragment]:
        """Go lazily through the fragments of all buffers; not to be held over an input."""
        for buffer in self._buffers.values():
            yield from buffer.fragments()

    def call_up(self, *, now: float) -> Iterator[CallerId]:
        """Call up, one by one, the appends that there is room for at `now` (B31).

        Each is to be offered before the next one is asked for.
        """
        for name, buffer in list(self._buffers.items()):
            buffer.handle_timer(now=now)
            yield from waiting.call_up(self._shared.states[name])

    def take_entries(self) -> list[tuple[float, Entry]]:
        """Return new decisions, each with its time; no effect may leave before they are durable."""
        entries, self._shared.entries = self._shared.entries, []
        return entries

    def replay(self, entries: Iterable[tuple[float, Entry]]) -> None:
        """Apply the entries after a snapshot, each at its time.

        For a set fresh from `restore`; call `handle_timer` of the present afterwards. Of the
        replayed past's events only `PayloadsDisposable` matters. After a ReplayError the set is
        useless.
        """
        is_recording, self._shared.is_recording = self._shared.is_recording, False
        now = 0.0
        entry: Entry | None = None
        try:
            for (name, kind), group in groupby(
                entries, lambda each: (each[1].buffer, type(each[1]))
            ):
                if kind is FragmentTaken:
                    run = cast(list[tuple[float, FragmentTaken]], list(group))
                    now, entry = run[0]
                    self[name].replay_run(run)
                    continue
                for now, entry in group:
                    self._replay(entry, now=now)
        except (errors.DomainError, ReplayError) as error:
            raise ReplayError(f"{type(entry).__name__} at {now} does not fit: {error}") from error
        finally:
            self._shared.is_recording = is_recording

    def _replay(self, entry: Entry, *, now: float) -> None:
        if isinstance(entry, BufferCreated):
            if entry.buffer in self._buffers:
                raise errors.BufferExistsError(entry.buffer)
            self._carry_out_creation(entry)
            return
        if isinstance(entry, inputs.DeleteBuffer):
            self._delete(entry, now=now)
        else:
            self[entry.buffer].replay(entry, now=now)

    def snapshot(self) -> tuple[BufferSnapshot, ...]:
        """Return all that outlives the process; equal states give equal snapshots; O(held)."""
        return tuple([snapshot.take(state) for _, state in sorted(self._shared.states.items())])

    @classmethod
    def restore(
        cls,
        taken: Iterable[BufferSnapshot],
        rng: random.Random,
        buffers_max: int = 64,
        *,
        is_recording: bool = False,
    ) -> "BufferSet":
        """Build a set from a snapshot; an empty one has no buffer, to replay from the start.

        `now` must go on from the clock of the snapshot's instants. `rng` seeds new buffers' draws
        and must differ from that of any other set of the same state: lease ids follow from it, and
        a grant of a lost journal must not pass for one of now. Buffers over `buffers_max` are kept.
        """
        buffers = cls.__new__(cls)
        buffers._begin(rng, buffers_max, is_recording)  # noqa: SLF001 - made here
        shared = buffers._shared  # noqa: SLF001 - made here
        shared.lease_salt = rng.getrandbits(granting.LEASE_ID_BITS)
        try:
            for each in taken:
                buffers._add(snapshot.restore(each, shared))  # noqa: SLF001 - made here
        except errors.DomainError as error:
            raise ReplayError(f"the snapshot cannot be: {error}") from error
        return buffers

    def check_invariants(self) -> None:
        """Assert every invariant of every buffer; O(everything held), for tests and `doctor`."""
        for buffer in self._buffers.values():
            buffer.check_invariants()

    def _create(self, input: inputs.CreateBuffer, *, now: float) -> None:
        check_buffer_name("buffer", input.buffer)
        existing = self._buffers.get(input.buffer)
        if existing is not None:
            if existing.config != input.config:
                raise errors.BufferExistsError(input.buffer)
            return
        if len(self._buffers) >= self.buffers_max:
            raise errors.BuffersFullError(self.buffers_max)
        make_sampler(input.config.sampler)
        make_remover(input.config.remover)
        created = BufferCreated(input.buffer, input.config, self._rng.getrandbits(DRAW_SEED_BITS))
        self._carry_out_creation(created)
        self._shared.record(created, now)

    def _carry_out_creation(self, created: BufferCreated) -> None:
        self._add(
            BufferState(
                created.buffer, created.config, draw_seed=created.draw_seed, shared=self._shared
            )
        )

    def _add(self, state: BufferState) -> None:
        self._shared.states[state.name] = state
        self._buffers[state.name] = ReplayBuffer(state)

    def _delete(self, input: inputs.DeleteBuffer, *, now: float) -> None:
        buffer = self[input.buffer]
        buffer.handle_timer(now=now)
        buffer.close(errors.BufferNotFoundError(input.buffer))
        del self._buffers[input.buffer]
        del self._shared.states[input.buffer]
        self._shared.record(input, now)
