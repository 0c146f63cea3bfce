"""The clients of a row, each a process of its own: `python -m crossings.actors KIND ...`.

They do what lines on their standard input say, one after the other, write what they were told into
a ledger, and end on SIGTERM or with the input. Where the server is comes from the environment.
"""

import argparse
import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import breadbox
from breadbox import aio
from breadbox.environment import connect_from_environment
from breadbox.model.errors import LeaseExpiredError, WaitElapsedError
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, ReleaseMode
from chaos.ledger import Ledger
from crossings.ledger import Items, first_number, items_of

T = TypeVar("T")

STEPS = 4
BATCH = 4
"""Fragments of one append."""
FRAME = (4, 84, 84)
STEPS_KEPT = 1_000_000
"""By the adapter of a replay buffer: the default of many trainings."""
SUBSCRIPTION = "archive"
IS_IN = (AdmissionOutcome.ADMITTED, AdmissionOutcome.DUPLICATE)
WAIT_S = 60.0
"""For a batch: longer than anybody may take."""


# What is written ----------------------------------------------------------------------------------


def observations(items: Items, width: int) -> np.ndarray:
    """Of steps with these numbers: float32[T, width]; the width may be any."""
    return (np.array(items)[:, None] * 31 + np.arange(width)).astype(np.float32) % 251


class Maker:
    """Makes fragments whose steps are numbered, as different as the server's schema allows."""

    def __init__(
        self, arguments: argparse.Namespace, take_ticket: Callable[[], breadbox.types.Ticket]
    ) -> None:
        self._arguments = arguments
        self._take_ticket = take_ticket
        self._group = ""
        self._next = first_number(arguments.team, arguments.life)
        self.index = 0

    def items(self, count: int = STEPS) -> Items:
        """The next numbers."""
        self._next += count
        return tuple(range(self._next - count, self._next))

    def fragment(self, version: int) -> Fragment:
        """The next one."""
        schema, index = self._arguments.schema, self.index
        self.index += 1
        items = self.items(STEPS if schema == "one" else 2 + index % 4)
        is_odd = schema == "any" and index % 2 == 1
        width = self._arguments.width + (index % 3 if schema == "any" else 0)
        flags = np.zeros(len(items), np.bool_)
        worker, number = self._arguments.name, index
        per_chunk = self._arguments.per_chunk
        if per_chunk > 1:  # Members of a group, the last one first.
            number = per_chunk - 1 - index % per_chunk
            if number == per_chunk - 1:
                named = f"{worker}.{index // per_chunk}"
                self._group = self._take_ticket().group if self._arguments.tickets else named
            worker = self._group
        return Fragment(
            worker_id=worker,
            fragment_index=number,
            session_id=self._arguments.buffer,
            model_version_min=version,
            model_version_max=version,
            obs=observations(items, width),
            action=np.zeros(len(items), np.int64),
            reward=np.array(items, np.float32),
            terminated=flags,
            truncated=flags,
            first=flags,
            episode_id=np.zeros(len(items), np.int64),
            next_obs=observations(items[-1:], width)[0],
            extras={"odd": np.ones(len(items))} if is_odd else {},
        )


def is_right(fragment: Fragment) -> bool:
    """Whether a fragment holds what its producer wrote, whichever that was."""
    obs = fragment.obs
    if not isinstance(obs, np.ndarray):
        return is_right_sample(fragment)
    items = items_of(fragment)
    if obs.dtype == np.uint8:
        return all((frame == number % 251).all() for frame, number in zip(obs, items, strict=True))
    return np.array_equal(observations(items, obs.shape[-1]), obs)


# Producers ----------------------------------------------------------------------------------------


class Producer:
    """Appends by the blocking client, some fragments at a time."""

    def __init__(self, arguments: argparse.Namespace, ledger: Ledger, stack: ExitStack) -> None:
        self.arguments = arguments
        self.ledger = ledger
        self.stack = stack
        self.maker = Maker(arguments, self.take_ticket)
        self.open()

    def open(self) -> None:
        """Connect."""
        self.client = self.stack.enter_context(connect_from_environment())

    def take_ticket(self) -> breadbox.types.Ticket:
        """Take one, as long as an outage lasts."""
        return self.client.tickets(1, max_wait_s=WAIT_S)[0]

    def produce(self, count: int, version: int) -> None:
        """Append so many fragments, and return once all are answered."""
        while count > 0:
            fragments = [self.maker.fragment(version) for _ in range(min(count, BATCH))]
            count -= len(fragments)
            self.appending([items_of(each) for each in fragments], version)
            self.append(fragments)

    def append(self, fragments: list[Fragment]) -> None:
        """Append, and write down what became of each."""
        results = self.client.append_many(fragments)
        for fragment, result in zip(fragments, results, strict=True):
            self.answered(items_of(fragment), result)

    def appending(self, fragments: list[Items], version: int) -> None:
        """Write down that these are on their way."""
        self.ledger.note("appending", fragments=fragments, version=version)

    def answered(self, items: Items, result: breadbox.types.AppendResult) -> None:
        """Write down what became of one."""
        if result.outcome in IS_IN and AdmissionOutcome.STALE is not result.first_outcome:
            self.ledger.note("appended", fragments=[items])
        else:
            self.ledger.note("wrong", what=f"{items} was answered {result}")


class AsyncProducer(Producer):
    """By the asyncio client."""

    def open(self) -> None:
        """Begin a loop in a thread of its own, so that orders can be waited for here."""
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        with connect_from_environment() as twin:
            options = twin._context.options  # noqa: SLF001 - what the environment says, read once

        async def make() -> aio.Client:
            return aio.Client(twin.address, options)

        self._async = self._run(make())
        self.stack.callback(lambda: self._run(self._async.close()))

    def take_ticket(self) -> Any:
        """Take one, as long as an outage lasts."""
        return self._run(self._async.tickets(1, max_wait_s=WAIT_S))[0]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def append(self, fragments: list[Fragment]) -> None:
        """Append, and write down what became of each."""
        results = self._run(self._async.append_many(fragments))
        for fragment, result in zip(fragments, results, strict=True):
            self.answered(items_of(fragment), result)


class AppenderProducer(Producer):
    """By an `Appender`, in the background."""

    def open(self) -> None:
        """Connect."""
        super().open()
        self._appender = self.stack.enter_context(breadbox.Appender(self.client))

    def produce(self, count: int, version: int) -> None:
        """Append so many fragments, and return once all are answered."""
        fragments = [self.maker.fragment(version) for _ in range(count)]
        items = [items_of(each) for each in fragments]
        self.appending(items, version)
        before = self._appender.counts.admitted
        for each in fragments:
            self._appender.append(each)
        self._appender.flush()
        if self._appender.counts.admitted - before == count:
            self.ledger.note("appended", fragments=items)
        else:
            self.ledger.note("wrong", what=f"of {count} fragments: {self._appender.counts}")


class StepProducer(Producer):
    """By a `StepWriter`, step by step; fragments of one length, as nothing is flushed early."""

    def open(self) -> None:
        """Connect."""
        super().open()
        made = breadbox.StepWriter(
            self.client,
            worker_id=self.arguments.name,
            steps_per_fragment=STEPS,
            flush_s=float("inf"),
            session_id=self.arguments.buffer,
        )
        self._writer = self.stack.enter_context(made)

    def produce(self, count: int, version: int) -> None:
        """Add as many steps as fill so many fragments, and return once all are answered."""
        fragments = [self.maker.items() for _ in range(count)]
        self.appending(fragments, version)
        self._writer.model_version = version
        before = self._writer.counts.fragments.admitted
        for items in fragments:
            for number in items:
                obs, after = (
                    observations((each,), self.arguments.width) for each in (number, number + 1)
                )
                self._writer.add(obs, np.zeros(1, np.int64), [number], after, [False], [False])
        self._writer.flush()
        if self._writer.counts.fragments.admitted - before == count:
            self.ledger.note("appended", fragments=fragments)
        else:
            self.ledger.note("wrong", what=f"of {count} fragments: {self._writer.counts}")


def sample_of(items: Items, worker: str, fid: int) -> Any:
    """A fragment as MineStudio's workers make them, with values that vary as its own store takes.

    A text that is None at first, a dict that gains a key, a number that gains a digit.
    """
    from breadbox_adapters.minestudio import SampleFragment

    number = items[0]
    count = len(items)
    told: dict[str, Any] = {"slot": 7 + fid, "goal": None if fid % 3 == 0 else "log " * (fid % 5)}
    if fid % 2:
        told["seen"] = "creeper"
    return SampleFragment(
        obs={"image": np.full((count, 8, 8, 3), number % 251, np.uint8), "info": [told] * count},
        action={"camera": np.full((count, 1), number % 121, np.int64)},
        next_done=np.zeros(count, np.bool_),
        reward=np.array(items, np.float32),
        first=np.zeros(count, np.bool_),
        in_state=[np.full((1, 4, 3), number, np.float32)],
        worker_uuid=worker,
        fid_in_worker=fid,
        next_obs={"image": np.zeros((8, 8, 3), np.uint8), "info": told},
        episode_uuids=["one"] * count,
    )


def is_right_sample(fragment: Fragment) -> bool:
    """Whether MineStudio gets the very fragment back that it gave."""
    from breadbox_adapters.minestudio.conversion import from_fragment

    sample = from_fragment(fragment)
    wanted = sample_of(items_of(fragment), sample.worker_uuid, sample.fid_in_worker)
    try:
        np.testing.assert_equal(vars(sample), vars(wanted))
    except AssertionError:
        return False
    return True


class MineStudioProducer(Producer):
    """By MineStudio's interface to its replay buffer."""

    def open(self) -> None:
        """Connect."""
        from breadbox_adapters.minestudio import ReplayBufferInterface

        self._interface = self.stack.enter_context(ReplayBufferInterface())

    def produce(self, count: int, version: int) -> None:
        """Add so many fragments, one after the other."""
        from breadbox_adapters.minestudio import FragmentMetadata

        name = self.arguments.name
        for _ in range(count):
            items, fid = self.maker.items(), self.maker.index
            self.maker.index += 1
            self.appending([items], version)
            metadata = FragmentMetadata(version, self.arguments.buffer, name, fid)
            self._interface.add_fragment(sample_of(items, name, fid), metadata)
            if self._interface.dropped_count:
                self.ledger.note("wrong", what=f"{items} was dropped")
                return
            self.ledger.note("appended", fragments=[items])


class CleanRLProducer(Producer):
    """By CleanRL's replay buffer, with frames, of the size that its scripts have."""

    def open(self) -> None:
        """Enter the run, and look at what it has."""
        import gymnasium

        from breadbox_adapters.cleanrl import ReplayBuffer

        self._buffer = ReplayBuffer(
            STEPS_KEPT,
            gymnasium.spaces.Box(0, 255, FRAME, np.uint8),
            gymnasium.spaces.Discrete(2),
            "cpu",
            handle_timeout_termination=False,
            run=self.arguments.buffer,
        )
        self.stack.callback(self._buffer.close)
        self._note_mirrored()

    def produce(self, count: int, version: int) -> None:
        """Add as many steps as would fill so many fragments, and learn from them."""
        items = self.maker.items(count * STEPS)
        self.appending([(each,) for each in items], version)
        for number in items:
            frame, after = (
                np.full((1, *FRAME), each % 251, np.uint8) for each in (number, number + 1)
            )
            self._buffer.add(frame, after, np.zeros(1), np.array([number]), np.zeros(1), [{}])
        self._buffer.replay.catch_up()
        self.ledger.note("appended", fragments=[(each,) for each in items])
        batch = self._buffer.sample(32)
        seen = batch.observations.float().mean((1, 2, 3)) - batch.rewards[:, 0] % 251
        if bool(seen.abs().max() > 0):
            self.ledger.note("wrong", what="a sample has the frames of other steps")
        self._note_mirrored()

    def _note_mirrored(self) -> None:
        mirror = self._buffer.replay.mirror
        mirror.catch_up(WAIT_S)
        rewards = mirror.at(range(mirror.step_count)).reward if mirror.step_count else ()
        self.ledger.note("mirrored", fragments=[(int(each),) for each in rewards])


PRODUCERS: dict[str, type[Producer]] = {
    "blocking": Producer,
    "asyncio": AsyncProducer,
    "appender": AppenderProducer,
    "step-writer": StepProducer,
    "minestudio": MineStudioProducer,
    "cleanrl": CleanRLProducer,
}


# Learners -----------------------------------------------------------------------------------------


def fetch(
    client: breadbox.Client, ledger: Ledger, count: int, wait_s: float
) -> breadbox.types.Lease:
    """Take fragments, and see that they are right and fresh."""
    state = client.watch_model(None)
    known = state.model_version or 0 if state else 0
    lease = client.fetch(fragment_count=count, max_wait_s=wait_s)
    fragments = list(lease.fragments())
    staleness_max = client.get_buffer().config.staleness_max or 0
    for each in fragments:
        if not is_right(each):
            ledger.note("wrong", what=f"{items_of(each)} does not hold what was written")
        if each.model_version_min < known - staleness_max:
            ledger.note("wrong", what=f"{items_of(each)} is stale at version {known}")
    ledger.note("granted", lease=lease.lease_id, fragments=[items_of(each) for each in fragments])
    return lease


def consume(
    client: breadbox.Client,
    ledger: Ledger,
    count: int,
    wait_s: float = WAIT_S,
    *,
    per_chunk: int = 1,
) -> int:
    """Use so many fragments, or as many as there are; gives their number."""
    used = 0
    while used < count:
        try:
            lease = fetch(client, ledger, min(BATCH, count - used), wait_s)
        except WaitElapsedError:
            try:
                lease = fetch(client, ledger, per_chunk, 0.0)
            except WaitElapsedError:
                return used
        ledger.note("releasing", lease=lease.lease_id)
        try:
            lease.release(ReleaseMode.CONSUMED)
        except LeaseExpiredError:
            ledger.note("expired", lease=lease.lease_id)
            continue
        ledger.note("released", lease=lease.lease_id)
        used += len(lease.references)
    return used


class Learner:
    """Uses fragments, or holds some until it is killed."""

    def __init__(self, arguments: argparse.Namespace, ledger: Ledger, stack: ExitStack) -> None:
        self._session = arguments.buffer
        self._per_chunk = arguments.per_chunk
        self._ledger = ledger
        self._client = stack.enter_context(connect_from_environment())
        self._lease: breadbox.types.Lease | None = None

    def hold(self, count: int) -> None:
        """Take fragments, and keep them."""
        self._lease = fetch(self._client, self._ledger, count, WAIT_S).__enter__()

    def consume(self, count: int) -> None:
        """Use so many fragments."""
        consume(self._client, self._ledger, count, per_chunk=self._per_chunk)

    def resume(self, version: int) -> None:
        """Go on with the session at a version that is the next one, with weights for it."""
        self._client.start_session(self._session, model_version=version)
        self._client.publish(self._session, version, weights_of(version))


def weights_of(version: int) -> dict[str, np.ndarray]:
    """Weights of a version, too many to ride along."""
    return {"w": np.full(4096, version, np.float32)}


class Subscriber:
    """Follows the buffer by a retaining subscription, from its first order on, until it is told to
    end."""

    def __init__(self, arguments: argparse.Namespace, ledger: Ledger, stack: ExitStack) -> None:
        self._ledger = ledger
        self._client = stack.enter_context(connect_from_environment())
        self._client.create_subscription(SUBSCRIPTION, retaining=True)
        self._has_ended = threading.Event()
        thread = threading.Thread(target=self._follow)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._has_ended.set)

    def _follow(self) -> None:
        while not self._has_ended.is_set():
            for read in self._client.tail(subscription=SUBSCRIPTION, max_wait_s=0.5):
                wrong = [items_of(each) for each in read.fragments if not is_right(each)]
                if wrong:
                    self._ledger.note("wrong", what=f"{wrong} do not hold what was written")
                self._ledger.note(
                    "read",
                    fragments=[items_of(each) for each in read.fragments],
                    skipped=read.skipped_chunk_count,
                )


# A process ----------------------------------------------------------------------------------------


def orders() -> Iterator[dict[str, Any]]:
    """What is to be done, until the input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def run(arguments: argparse.Namespace, ledger: Ledger) -> None:
    """Do what is ordered, and write down what was done."""
    make: Callable[..., Any]
    if arguments.kind in PRODUCERS:
        make = PRODUCERS[arguments.kind]
    else:
        make = {"learner": Learner, "subscriber": Subscriber}[arguments.kind]
    with ExitStack() as stack:
        actor = make(arguments, ledger, stack)
        ledger.note("began")
        try:
            for order in orders():
                getattr(actor, order.pop("do"))(**order)
                ledger.note("done")
        except Exception as error:
            # At once: what is left open may take long to end.
            ledger.note("wrong", what=f"ended by {type(error).__name__}: {error}")
            raise


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=(*PRODUCERS, "learner", "subscriber"))
    parser.add_argument("--name", required=True)
    parser.add_argument("--buffer", required=True)
    parser.add_argument("--schema", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--per-chunk", type=int, required=True)
    parser.add_argument("--tickets", type=int, required=True)
    parser.add_argument("--team", type=int, required=True)
    parser.add_argument("--life", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ledger = Ledger(arguments.folder / f"{arguments.name}.ledger")
    run(arguments, ledger)
    return 0


if __name__ == "__main__":
    sys.exit(main())
