"""Those who only want to be served, each a process of its own: `python -m hostile.honest KIND ...`.

They write down what they were told and how long each call took, and end on SIGTERM.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import breadbox
from breadbox.model.errors import ReplayBufferError, WaitElapsedError
from chaos.actors import SESSION, Stop, make_fragment
from chaos.ledger import Ledger

PAUSE_S = 0.01
WIDTH = 64
WAIT_S = 0.5

T = TypeVar("T")


def timed(ledger: Ledger, what: str, call: Callable[[], T]) -> T:
    """Make a call, and write down how long it took."""
    ledger.asking()
    started = time.perf_counter()
    answer = call()
    ledger.note("call", what=what, took_s=time.perf_counter() - started)
    return answer


def produce(client: breadbox.Client, ledger: Ledger, name: str) -> None:
    """Append one fragment after the other."""
    stop = Stop()
    index = 0
    while not stop.is_set:
        fragment = make_fragment(name, index, 0, WIDTH)
        result = timed(ledger, "append", partial(client.append, fragment))
        ledger.note("appended", worker=name, index=index, outcome=result.outcome.value)
        timed(ledger, "look", client.get_buffer)
        index += 1
        time.sleep(PAUSE_S)


def learn(client: breadbox.Client, ledger: Ledger) -> None:
    """Fetch, read and release one fragment after the other."""
    stop = Stop()
    while not stop.is_set:
        timed(ledger, "look", client.get_buffer)
        try:
            lease = client.fetch(fragment_count=1, max_wait_s=WAIT_S)
        except WaitElapsedError:
            continue
        for reference, fragment in zip(lease.references, lease.fragments(), strict=True):
            metadata = reference.metadata
            assert (metadata.worker_id, metadata.fragment_index) == (
                fragment.worker_id,
                fragment.fragment_index,
            )
            ledger.note("granted", worker=metadata.worker_id, index=metadata.fragment_index)
        timed(ledger, "release", lease.release)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("producer", "learner", "onlooker"))
    parser.add_argument("--server", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    ledger = Ledger(options.folder / f"{options.name}.ledger")
    with breadbox.connect(options.server, token=os.environ.get("BREADBOX_TOKEN")) as client:
        try:
            if options.kind != "producer":
                client.start_session(SESSION)
            if options.kind == "learner":
                learn(client, ledger)
            else:
                produce(client, ledger, options.name)
        except ReplayBufferError as error:
            ledger.note("failed", error=f"{type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
