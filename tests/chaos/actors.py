"""The clients of a chaos run, each a process of its own: `python -m chaos.actors KIND ...`.

They end on SIGTERM after what they are doing, and are killed with SIGKILL at any moment. What a
fragment holds follows from its identity, so that whoever reads it can tell whether it is right.

A call that passed its deadline is made again, as often as it takes: whoever is silent for a while
ends nobody. `--rolls-back` says that the books may go back to an earlier state in this run.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

import breadbox
from breadbox.errors import (
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
from breadbox.fragment import Fragment
from breadbox.types import ReleaseMode
from chaos.ledger import Ledger

STEPS = 4
SESSION = "chaos"
FRAGMENTS_PER_CHUNK = 2
KINDS = ("producer", "learner", "rank", "reader", "subscriber", "publisher")
DEADLINE_S = 8.0
"""Of one call: longer than most silences of a run, and shorter than some."""


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
    """Observations of a fragment, which nobody else has: float32[STEPS, width]."""
    seed = f"{worker_id}/{fragment_index}".encode()
    return np.random.default_rng(list(seed)).random((STEPS, width), dtype=np.float32)


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
        reward=np.ones(STEPS, np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
        episode_id=np.zeros(STEPS, np.int64),
        next_obs=np.zeros(width, np.float32),
    )


def produce(
    client: breadbox.Client,
    ledger: Ledger,
    name: str,
    rng: random.Random,
    *,
    width: int,
    rolls_back: bool,
) -> None:
    """Append fragments of a worker that never existed before."""
    stop = Stop()
    index = 0
    while not stop.is_set:
        model = patiently(ledger, lambda: client.watch_model(None, max_wait_s=0))
        version = model.model_version if model is not None and model.model_version else 0
        count = rng.randint(1, 6)
        fragments = [make_fragment(name, index + k, version, width) for k in range(count)]
        try:
            results = patiently(ledger, partial(client.append_many, fragments))
        except InvalidRequestError as error:
            # A version that the server had published, and in an older life has not yet.
            if not rolls_back:
                raise
            ledger.note("refused", error=str(error))
            results = []
        for k, result in enumerate(results):
            ledger.note(
                "appended",
                worker=name,
                index=index + k,
                outcome=result.outcome.value,
                first=result.first_outcome.value,
            )
        index += count
        time.sleep(rng.uniform(0.0, 0.05))


def note_grant(ledger: Ledger, lease: breadbox.Lease, grant_of: str) -> None:
    ledger.note(
        "granted",
        lease=lease.lease_id,
        request=grant_of,
        fragments=[
            [
                reference.chunk_id,
                reference.staleness,
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


def work_on(lease: breadbox.Lease, ledger: Ledger, rng: random.Random) -> None:
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


def learn(client: breadbox.Client, ledger: Ledger, name: str, rng: random.Random) -> None:
    """Fetch and release, alone."""
    stop = Stop()
    count = 0
    while not stop.is_set:
        fetch = partial(
            client.fetch,
            fragment_count=FRAGMENTS_PER_CHUNK * rng.randint(1, 4),
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
    client: breadbox.Client, ledger: Ledger, name: str, rng: random.Random, rank: int, first: int
) -> None:
    """Fetch and release as one of two ranks that agree on their requests by counting."""
    stop = Stop()
    number = first
    while not stop.is_set:
        ledger.note("rank", number=number)
        fetch = partial(
            client.fetch,
            fragment_count=FRAGMENTS_PER_CHUNK * 4,
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
    ledger: Ledger, read: breadbox.LoadedRead, subscription: str | None, *, begins: bool
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
                patiently(ledger, partial(client.publish_model, SESSION, version))
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
    parser.add_argument("--width", type=int, default=64, help="numbers in an observation")
    parser.add_argument("--rolls-back", action="store_true")
    options = parser.parse_args()
    ledger = Ledger(options.folder / f"{options.name}.ledger")
    rng = random.Random(options.seed)
    with breadbox.connect(options.server, reconnect_s=60.0, deadline_s=DEADLINE_S) as client:
        try:
            match options.kind:
                case "producer":
                    produce(
                        *(client, ledger, options.name, rng),
                        width=options.width,
                        rolls_back=options.rolls_back,
                    )
                case "learner":
                    learn(client, ledger, options.name, rng)
                case "rank":
                    learn_as_rank(client, ledger, options.name, rng, options.rank, options.first)
                case "reader" | "subscriber":
                    subscribes = options.kind == "subscriber"
                    follow(client, ledger, options.name, rng, subscribes=subscribes)
                case "publisher":
                    publish(client, ledger, options.name, rng)
        except ReplayBufferError as error:
            ledger.note("failed", error=f"{type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
