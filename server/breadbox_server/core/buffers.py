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
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import cast

from breadbox_server.core import snapshot
from breadbox_server.core.buffer import ReplayBuffer
from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.entries import BufferCreated, Entry, FragmentTaken, ReplayError
from breadbox_server.core.model.events import Event
from breadbox_server.core.model.ids import BufferName, PayloadId, SessionId
from breadbox_server.core.model.inputs import Answer, Appended, Fragment
from breadbox_server.core.model.validation import check_buffer_name
from breadbox_server.core.rules import granting
from breadbox_server.core.samplers import make_remover, make_sampler
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.core.state.buffer_state import BufferState, Shared

DEFAULT_BUFFER = BufferName("default")
DRAW_SEED_BITS = 63
"""A seed fits a signed 64-bit integer, wherever a journal puts it."""


class BufferSet:
    """Named replay buffers as one synchronous, deterministic state machine.

    Not thread-safe, and no method blocks. `now` is in seconds on a clock that never goes back;
    only differences matter. Whoever restores a set from a journal continues that journal's clock.

    Args:
        rng: Source of every random choice; used to seed the buffers' own draws, one seed each.
        default_config: Limits of the buffer `default`, which exists from the start.
        buffers_max: Buffers held at a time; the next `CreateBuffer` gets BUFFERS_FULL.
        is_recording: Whether `take_entries` is used; without it nothing is written down.
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
        self._draining = False

    # --- inputs and what comes of them -----------------------------------------------------------

    def apply(self, input: inputs.Input[Answer], *, now: float) -> Answer:
        """Carry out one input to its end and return its answer.

        What is due by `now` is done first (S2). Everything else that came of it is in
        `take_events()`.

        Args:
            input: Any of `breadbox_server.core.model.inputs`.
            now: Never less than in an earlier call.

        Raises:
            DomainError: The input is refused, and has changed nothing; see the class raised.
        """
        if isinstance(input, inputs.CreateBuffer):
            self._create(input, now=now)
            return cast(Answer, None)
        buffer = self[input.buffer]
        if isinstance(input, inputs.DeleteBuffer):
            self._delete(input, now=now)
            return cast(Answer, None)
        if self._draining and isinstance(input, inputs.Fetch | inputs.AppendFragment):
            raise errors.DrainingError
        return buffer.apply(input, now=now)

    def take_events(self) -> list[Event]:
        """Hand over what happened since the last call, in order; empty when nothing did."""
        events = self._shared.events[:]
        self._shared.events.clear()
        return events

    def next_timer(self) -> float | None:
        """Return the instant at which `handle_timer` has something to do, or None if never.

        Right after `handle_timer(now)` it is None or later than `now`.
        """
        timers = [buffer.next_timer() for buffer in self._buffers.values()]
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, *, now: float) -> None:
        """Do everything that was due at or before `now`, in each buffer; cheap if nothing is.

        Expired leases are ended first, so that chunks they held back can satisfy waiters whose
        deadline is this same instant. Then open chunks of silent workers are discarded. Then
        waiters whose deadline has passed time out.
        """
        for buffer in self._buffers.values():
            buffer.handle_timer(now=now)

    def drain(self, *, now: float) -> None:
        """Refuse all waiters with DRAINING, and from now on every Fetch and AppendFragment.

        Everything else still works, so that learners can release what they hold. Repeating it is
        a no-op; there is no way back.
        """
        self._draining = True
        for name, buffer in self._buffers.items():
            buffer.handle_timer(now=now)
            granting.refuse_all(self._shared.states[name], errors.DrainingError())

    # --- looks ---------------------------------------------------------------------------------

    def names(self) -> tuple[BufferName, ...]:
        """List the buffers, sorted by name."""
        return tuple(sorted(self._buffers))

    def __getitem__(self, name: BufferName) -> ReplayBuffer:
        """Return a buffer, for looks at it as it was left by the last input; inputs go to `apply`.

        Raises:
            BufferNotFoundError: No buffer has this name.
        """
        buffer = self._buffers.get(name)
        if buffer is None:
            raise errors.BufferNotFoundError(name)
        return buffer

    def describe(self, buffer: BufferName, *, now: float) -> BufferDescription:
        """Show limits, gauges and counters of a buffer, after what is due by `now` (S2)."""
        found = self[buffer]
        found.handle_timer(now=now)
        return found.describe()

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

    def fragments(self) -> Iterator[Fragment]:
        """Go lazily through the fragments of all buffers; not to be held over an input."""
        for buffer in self._buffers.values():
            yield from buffer.fragments()

    def judge(self, buffer: BufferName, fragment: Fragment, *, now: float) -> Appended | None:
        """Return how `AppendFragment` would be answered at `now`, or None if it would be ADMITTED.

        What is due by `now` is done (S2), and nothing else changed. For the driver, which confirms
        a payload in the store only if its fragment has a chance; `validation.check_fragment` has
        let the fragment pass. An earlier one of the same batch may still change the outcome.

        Raises:
            DomainError: Whatever `apply` would raise for it.
        """
        if self._draining:
            raise errors.DrainingError
        return self[buffer].judge(fragment, now=now)

    # --- journal -------------------------------------------------------------------------------

    def take_entries(self) -> list[tuple[float, Entry]]:
        """Hand over what was decided since the last call, in order, each with its time.

        Whoever replays them, in order, builds this state again. An answer or an event may leave the
        process once all entries taken with or before it are durable. Empty without `is_recording`.
        """
        entries, self._shared.entries = self._shared.entries, []
        return entries

    def replay(self, entries: Iterable[tuple[float, Entry]]) -> None:
        """Do once more what entries say was done, each at its time.

        To be called on a set fresh from `restore`, with the entries taken after its snapshot, in
        order; afterwards with `handle_timer(now=...)` of the present, which ends what has expired
        meanwhile. Nothing is recorded. The events are those of the replayed past: only
        `PayloadsDisposable` still matters, since the deletions may not have been carried out.

        Raises:
            ReplayError: An entry does not fit the state; the set is of no use any more.
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
        """Return everything that outlives the process, the buffers sorted by name.

        O(everything held). Equal states give equal snapshots, and a set restored from one behaves
        as this one does, but for what `breadbox_server.core.snapshot` says is not in it.
        """
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

        Instants in the snapshot are on the clock of the set that gave it, and `now` must go on
        from there: a lease that was alive then expires when its time has come on that clock.

        Args:
            taken: What `snapshot` returned.
            rng: Seeds the draws of buffers created from now on; the others keep their seeds. Must
                not be as it was for another set of the same state: ids of leases follow from it,
                and what was granted from a journal that is lost must not be taken for a grant of
                now.
            buffers_max: As for a new set; more buffers than that in the snapshot are kept.
            is_recording: As for a new set.

        Raises:
            ReplayError: The snapshot contradicts itself.
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
        """Assert every invariant of every buffer; O(everything held), for tests and `doctor`.

        Raises:
            AssertionError: The core has a bug; the message names the invariant.
        """
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
