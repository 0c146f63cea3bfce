"""The clients of a chaos run, each a process of its own: `python -m chaos.actors KIND ...`.

They end on SIGTERM after what they are doing, and are killed with SIGKILL at any moment. What a
fragment holds follows from its identity, so that whoever reads it can tell whether it is right.

A call that passed its deadline is made again, as often as it takes: whoever is silent for a while
ends nobody. `--rolls-back` says that the books may go back to an earlier state in this run.
"""

import argparse
import itertools
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import breadbox
from breadbox.mirror import Prioritised, ReplayMirror, StepBatch
from breadbox.model.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LeaseExpiredError,
    PayloadMissingError,
    ReplayBufferError,
    SessionEndedError,
    SubscriptionNotFoundError,
    VersionRegressedError,
    WaitElapsedError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.types import ReleaseMode
from chaos import tickets
from chaos.groups import GROUP_SIZE, PREFIX, Generator, Member, told
from chaos.ledger import Ledger

STEPS = 4
CODECS = ("raw", "zstd")
"""Of a payload that goes to the store itself, and of one that rides along with the call."""
SESSION = "chaos"
FRAGMENTS_PER_CHUNK = 2
KINDS = ("producer", "learner", "rank", "reader", "subscriber", "watcher", "mirror", "publisher")
PRODUCERS = 3
DEADLINE_S = 8.0
"""Of one call: longer than most silences of a run, and shorter than some."""
CATCH_UP_S = 30.0
BATCH_SIZE = 32
LATE_BATCHES = 256
"""Draws whose priorities come after so many others, at most."""


class Stop:
    """Set by SIGTERM."""

    def __init__(self) -> None:
        self.is_set = False
        signal.signal(signal.SIGTERM, self._set)

    def _set(self, number: int, frame: object) -> None:
        self.is_set = True


T = TypeVar("T")


def patiently(ledger: Ledger, call: Callable[[], T]) -> T:
    """Make a call, again when its deadline passed; it is one that may be repeated."""
    ledger.asking()
    while True:
        try:
            return call()
        except DeadlineExceededError:
            ledger.live()


def contents(worker_id: str, fragment_index: int, width: int) -> np.ndarray:
    """Observations of a fragment, which nobody else has: float32[STEPS, width].

    They compress well, so that it is the codec that says whether a payload is small.
    """
    seed = f"{worker_id}/{fragment_index}".encode()
    numbers = np.random.default_rng(list(seed)).integers(2, size=(STEPS, width))
    return numbers.astype(np.float32)


def next_observation(worker_id: str, fragment_index: int, width: int) -> np.ndarray:
    """What a fragment leads to: float32[width].

    For a worker that is where the next one begins; no member of a group leads to another.
    """
    follows = GROUP_SIZE if worker_id.startswith((PREFIX, tickets.PREFIX)) else 1
    after: np.ndarray = contents(worker_id, fragment_index + follows, width)[0]
    return after


def make_fragment(worker_id: str, fragment_index: int, version: int, width: int) -> Fragment:
    flags = np.zeros(STEPS, np.bool_)
    return Fragment(
        worker_id=worker_id,
        fragment_index=fragment_index,
        session_id=SESSION,
        model_version_min=version,
        model_version_max=version,
        obs=contents(worker_id, fragment_index, width),
        action=np.zeros(STEPS, np.int64),
        reward=np.arange(STEPS, dtype=np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
        episode_id=np.zeros(STEPS, np.int64),
        next_obs=next_observation(worker_id, fragment_index, width),
        extras={
            "worker": np.full(STEPS, worker_id, "U24"),
            "index": np.full(STEPS, fragment_index, np.int64),
        },
    )


def in_order(name: str, rng: random.Random) -> Callable[[int], list[Member]]:
    """Make what names the next fragments of a worker that never existed before."""
    indices = itertools.count()

    def following(version: int) -> list[Member]:
        return [(name, next(indices), version) for _ in range(rng.randint(1, 6))]

    return following


def patient_holder(
    client: breadbox.Client, ledger: Ledger, rng: random.Random, shared: Path
) -> Callable[[int], list[Member]]:
    """Make what names the next members of groups with tickets, whatever a call meets."""
    holder = tickets.Holder(client, ledger, rng, shared)
    return lambda version: patiently(ledger, lambda: holder.next_members(version))


def produce(
    client: breadbox.Client,
    ledger: Ledger,
    following: Callable[[int], list[Member]],
    rng: random.Random,
    *,
    width: int,
    rolls_back: bool,
) -> None:
    """Append what comes next, which may be nothing."""
    stop = Stop()
    while not stop.is_set:
        model = patiently(ledger, lambda: client.watch_model(None, max_wait_s=0))
        version = model.model_version if model is not None and model.model_version else 0
        members = following(version)
        fragments = [make_fragment(*member, width) for member in members]
        identities = [(name, index) for name, index, _ in members]
        ledger.note("appending", fragments=identities)
        try:
            results = patiently(
                ledger, partial(client.append_many, fragments, codecs=rng.choice(CODECS))
            )
        except InvalidRequestError as error:
            # A version that the server had published, and in an older life has not yet.
            if not rolls_back:
                raise
            ledger.note("refused", error=str(error))
            results = []
        for (name, index), result in zip(identities, results, strict=False):
            ledger.note(
                "appended",
                worker=name,
                index=index,
                outcome=result.outcome.value,
                first=result.first_outcome.value,
            )
        time.sleep(rng.uniform(0.0, 0.05))


def note_grant(ledger: Ledger, lease: breadbox.types.Lease, grant_of: str) -> None:
    ledger.note(
        "granted",
        lease=lease.lease_id,
        request=grant_of,
        fragments=[
            [
                reference.chunk_id,
                reference.staleness_when_granted,
                reference.use_count,
                reference.metadata.worker_id,
                reference.metadata.fragment_index,
                reference.metadata.model_version_min,
                reference.metadata.session_id,
                reference.metadata.payload.payload_id,
            ]
            for reference in lease.references
        ],
    )


def work_on(lease: breadbox.types.Lease, ledger: Ledger, rng: random.Random) -> None:
    """Read everything, see that it is right, and release it."""
    mode = ReleaseMode.RETURNED if rng.random() < 0.1 else ReleaseMode.CONSUMED
    try:
        for reference, fragment in zip(lease.references, lease.fragments(), strict=True):
            metadata = reference.metadata
            width = fragment.obs.shape[-1]
            wanted = contents(metadata.worker_id, metadata.fragment_index, width)
            if not np.array_equal(wanted, fragment.obs):
                ledger.note("wrong", lease=lease.lease_id, chunk=reference.chunk_id)
    except PayloadMissingError as error:
        ledger.note("missing", lease=lease.lease_id, payload=error.payload_id)
        mode = ReleaseMode.RETURNED
    try:
        patiently(ledger, lambda: lease.release(mode))
    except LeaseExpiredError:
        ledger.note("expired", lease=lease.lease_id)
        return
    ledger.note("released", lease=lease.lease_id, mode=mode.value)


def learn(
    client: breadbox.Client, ledger: Ledger, name: str, rng: random.Random, per_chunk: int
) -> None:
    """Fetch and release, alone."""
    stop = Stop()
    count = 0
    while not stop.is_set:
        fetch = partial(
            client.fetch,
            fragment_count=per_chunk * rng.randint(1, 4),
            max_wait_s=2.0,
            request_id=f"{name}-{count}",
        )
        count += 1
        try:
            lease = patiently(ledger, fetch)
        except (WaitElapsedError, LeaseExpiredError):
            continue
        note_grant(ledger, lease, fetch.keywords["request_id"])
        work_on(lease, ledger, rng)


def learn_as_rank(
    client: breadbox.Client,
    ledger: Ledger,
    rng: random.Random,
    *,
    rank: int,
    first: int,
    per_chunk: int,
) -> None:
    """Fetch and release as one of two ranks that agree on their requests by counting."""
    stop = Stop()
    number = first
    while not stop.is_set:
        ledger.note("rank", number=number)
        fetch = partial(
            client.fetch,
            fragment_count=per_chunk * 4,
            max_wait_s=2.0,
            request_id=f"ranks-{number}",
            rank=rank,
            world_size=2,
        )
        try:
            lease = patiently(ledger, fetch)
        except WaitElapsedError:
            continue
        except LeaseExpiredError:
            number += 1
            continue
        note_grant(ledger, lease, f"ranks-{number}")
        work_on(lease, ledger, rng)
        number += 1


def follow(
    client: breadbox.Client, ledger: Ledger, name: str, rng: random.Random, *, subscribes: bool
) -> None:
    """Read everything as it comes: by a cursor of its own, or by a subscription that retains.

    The cursor dies with its reader; the subscription goes on with the next one.
    """
    stop = Stop()
    subscription = name.partition(".")[0] if subscribes else None
    cursor, session = None, None
    while not stop.is_set:
        try:
            if subscription is not None:
                patiently(
                    ledger,
                    partial(client.create_subscription, subscription, retaining=True),
                )
            reads = client.tail(
                None if subscribes else cursor,
                known_session_id=None if subscribes else session,
                subscription=subscription,
                chunk_count_max=rng.randint(1, 8),
                max_wait_s=1.0,
            )
            is_first = True
            ledger.asking()
            for read in reads:
                note_read(ledger, read, subscription, begins=is_first and cursor is None)
                cursor, session, is_first = read.cursor, read.session_id, False
                if stop.is_set:
                    break
                ledger.asking()
        except (DeadlineExceededError, SubscriptionNotFoundError):
            ledger.live()


def note_read(
    ledger: Ledger, read: breadbox.types.LoadedRead, subscription: str | None, *, begins: bool
) -> None:
    """Note what was read, and see that it is right."""
    fragments = []
    for reference, fragment in zip(read.references, read.fragments, strict=True):
        it = reference.metadata
        fragments.append([reference.chunk_id, it.worker_id, it.fragment_index])
        width = fragment.obs.shape[-1]
        if not np.array_equal(contents(it.worker_id, it.fragment_index, width), fragment.obs):
            ledger.note("wrong", chunk=reference.chunk_id)
    ledger.note(
        "read",
        subscription=subscription,
        begins=begins,
        cursor=read.cursor,
        skipped=read.skipped_chunk_count,
        fragments=fragments,
    )


def watch_ends(client: breadbox.Client, ledger: Ledger) -> None:
    """Wait for the ends of groups, from the first one on."""
    stop = Stop()
    after = 0
    while not stop.is_set:
        ends = patiently(ledger, partial(client.group_ends, after, max_wait_s=1.0))
        ledger.note("ends", after=after, ends=[told(each) for each in ends])
        after = ends[-1].number if ends else after
        state = patiently(ledger, client.get_buffer).state
        ledger.note("watched", tickets=state.ticket_count, open=state.open_chunk_count)


def learn_from_mirror(
    client: breadbox.Client, ledger: Ledger, rng: random.Random, capacity: int
) -> None:
    """Sample by priority, and give priorities, many of them to steps that are long gone.

    What a step's priority is follows from its observation, so that one that was given to another
    step can be told.
    """
    stop = Stop()
    with ReplayMirror(client, capacity_steps=capacity, seed=rng.getrandbits(32)) as mirror:
        noted = -1
        late: deque[StepBatch] = deque(maxlen=LATE_BATCHES)
        while not stop.is_set:
            ledger.asking()
            noted = note_mirrored(ledger, mirror, noted)
            try:
                mirror.wait_until(1, timeout_s=1.0)
            except WaitElapsedError:
                continue
            try:
                batch = mirror.sample(BATCH_SIZE, prioritised=Prioritised())
            except InvalidRequestError:
                if len(mirror):
                    raise
                continue  # The buffer was set back since: the mirror begins anew, empty.
            found = mirror.priorities(batch.handle)
            if not is_right(batch):
                ledger.note("wrong", handles=batch.handle.tolist())
            is_given = np.isnan(found) | (found == 1.0) | (found == priorities_of(batch))
            if not is_given.all():
                ledger.note("wrong", handles=batch.handle[~is_given].tolist(), priorities="others'")
            late.append(batch)
            old = rng.choice(late)
            mirror.update_priorities(old.handle, priorities_of(old))
            kept = mirror.holds(old.handle)
            try:
                again = mirror.steps(old.handle[kept])
            except InvalidRequestError:
                continue  # The oldest have gone since.
            if not np.array_equal(old.obs[kept], again.obs):
                ledger.note("wrong", handles=old.handle[kept].tolist(), steps="others")
            time.sleep(rng.uniform(0.0, 0.02))
        # Producers are done: what comes now is what there is.
        patiently(ledger, partial(mirror.catch_up, CATCH_UP_S))
        noted = note_mirrored(ledger, mirror, noted)
        if mirror.step_count:  # Else all that there was became stale before it came.
            ledger.note("held", **content_of(mirror.at(range(mirror.step_count))))


def priorities_of(steps: StepBatch) -> np.ndarray:
    """What their learner gives them: below 1, which a step has that was given none."""
    given: np.ndarray = 0.1 + 0.8 * steps.obs[:, 0].astype(np.float64)
    return given


def is_right(steps: StepBatch) -> bool:
    """Whether each step is what its writer wrote, and leads to what followed."""
    width = steps.obs.shape[-1]
    rows = zip(
        *(steps.extras["worker"].tolist(), steps.extras["index"].tolist(), steps.reward.tolist()),
        *(steps.obs, steps.next_obs),
        strict=True,
    )
    for worker, index, step, obs, next_obs in rows:
        here, after = contents(worker, index, width), int(step) + 1
        there = here[after] if after < STEPS else next_observation(worker, index, width)
        if not (np.array_equal(here[after - 1], obs) and np.array_equal(there, next_obs)):
            return False
    return True


def content_of(steps: StepBatch) -> dict[str, Any]:
    """The fragments that steps are of: handle of the first step, worker and index."""
    firsts = (steps.handle - steps.reward.astype(np.int64)).tolist()
    workers, indices = steps.extras["worker"].tolist(), steps.extras["index"].tolist()
    fragments = sorted(set(zip(firsts, workers, indices, strict=True)))
    return {"fragments": [list(each) for each in fragments], "step_count": len(steps)}


def note_mirrored(ledger: Ledger, mirror: ReplayMirror, noted: int) -> int:
    """Note the steps after the one that was noted last; gives the last one's handle."""
    handles = mirror.handles()
    has_let_go = mirror.inserted_step_count > len(handles)
    fresh = handles[handles > noted]
    if not len(fresh):
        return noted
    try:
        steps = mirror.steps(fresh)
    except InvalidRequestError:
        return noted  # The oldest have gone since.
    ledger.note(
        "mirrored",
        skipped=mirror.skipped_chunk_count,
        has_gap=has_let_go and bool(handles[0] > noted),
        late=mirror.late_update_count,
        **content_of(steps),
    )
    return int(fresh[-1])


def publish(client: breadbox.Client, ledger: Ledger, name: str, rng: random.Random) -> None:
    """Keep the session going, and publish versions, some with weights."""
    stop = Stop()
    patiently(ledger, lambda: client.start_session(SESSION))
    while not stop.is_set:
        model = patiently(ledger, lambda: client.watch_model(None, max_wait_s=0))
        version = (model.model_version or 0) + 1 if model is not None else 0
        try:
            if rng.random() < 0.5:
                weights = {"w": np.full(100, version, np.float32)}
                patiently(ledger, partial(client.publish, SESSION, version, weights))
            else:
                patiently(ledger, partial(client.service.publish_model, SESSION, version))
            ledger.note("published", version=version)
        except VersionRegressedError:
            continue
        except SessionEndedError:
            return
        for _ in range(20):
            if not stop.is_set:
                time.sleep(rng.uniform(0.02, 0.06))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--server", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--capacity", type=int, default=0, help="steps that a mirror keeps")
    parser.add_argument("--width", type=int, default=64, help="numbers in an observation")
    parser.add_argument("--rolls-back", action="store_true")
    parser.add_argument("--number", type=int, default=0, help="of a producer, among all")
    parser.add_argument("--groups", action="store_true", help="members of groups, in any order")
    parser.add_argument("--tickets", action="store_true", help="producers take tickets for them")
    options = parser.parse_args()
    ledger = Ledger(options.folder / f"{options.name}.ledger")
    rng = random.Random(options.seed)
    per_chunk = GROUP_SIZE if options.groups else FRAGMENTS_PER_CHUNK
    with breadbox.connect(options.server, reconnect_s=60.0, deadline_s=DEADLINE_S) as client:
        try:
            match options.kind:
                case "producer":
                    following = in_order(options.name, rng)
                    if options.groups:
                        following = Generator(options.number, PRODUCERS, rng).next_members
                    if options.tickets:
                        shared = options.folder / "shared"
                        following = patient_holder(client, ledger, rng, shared)
                    produce(
                        *(client, ledger, following, rng),
                        width=options.width,
                        rolls_back=options.rolls_back,
                    )
                case "learner":
                    learn(client, ledger, options.name, rng, per_chunk)
                case "rank":
                    learn_as_rank(
                        *(client, ledger, rng),
                        rank=options.rank,
                        first=options.first,
                        per_chunk=per_chunk,
                    )
                case "reader" | "subscriber":
                    subscribes = options.kind == "subscriber"
                    follow(client, ledger, options.name, rng, subscribes=subscribes)
                case "watcher":
                    watch_ends(client, ledger)
                case "mirror":
                    learn_from_mirror(client, ledger, rng, options.capacity)
                case "publisher":
                    publish(client, ledger, options.name, rng)
        except ReplayBufferError as error:
            ledger.note("failed", error=f"{type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
