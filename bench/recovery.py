"""Rows about restarts: how long a server that was killed takes until it answers again."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import breadbox
from bench.measure import Figure
from bench.processes import breadbox_server, memory_directory, redis_server
from bench.workloads import SESSION_ID, numbered, vector_fragment
from breadbox.stores.redis.factory import open_redis
from breadbox_server.app import WATCHED_S_MIN
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.storage.claims import RENEW_S
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.journal.storage.redis_stream import ALIVE
from breadbox_server.maintenance.probe import probe

_BATCH = 1024
_READY_S = 2.0
_TAKEOVER_S = 1.5


@dataclass(frozen=True)
class _Restart:
    """One restart."""

    ready_s: float
    """From the launch of the process to the first answered fetch."""
    cpu_s: float
    """Processor time of the server until then."""


def takeover_rows(*, fragment_count: int, rounds: int) -> Iterator[Figure]:
    """Measure takeovers by a warm standby: from kill -9 of the leader to the first grant."""
    for is_elsewhere in (False, True):
        where = "elsewhere" if is_elsewhere else "on the same host"
        with _redis_store() as store_url:
            took = sorted(_takeovers(store_url, fragment_count, rounds, is_elsewhere=is_elsewhere))
        yield Figure(
            name=f"takeover at {fragment_count:,} fragments, the leader {where}",
            workload="vector",
            value=statistics.median(took),
            unit="s",
            reach=_TAKEOVER_S,
            is_lower_better=True,
            peers={"slowest": took[-1], "quickest": took[0]},
        )


def _takeovers(
    store_url: str, fragment_count: int, rounds: int, *, is_elsewhere: bool
) -> Iterator[float]:
    """Kill the leader again and again; gives the seconds to the first grant by the standby."""
    options = ("--standby", *_options(fragment_count))
    with ExitStack() as stack:
        leader = stack.enter_context(breadbox_server(store_url, *options))
        _wait_until(partial(_serves, leader.address))
        with breadbox.connect(leader.address) as client:
            client.start_session(SESSION_ID)
            successive = numbered(vector_fragment(), "bench")
            for start in range(0, fragment_count, _BATCH):
                client.append_many(list(islice(successive, min(_BATCH, fragment_count - start))))
        for _ in range(rounds):
            standby = stack.enter_context(breadbox_server(store_url, *options))
            _wait_until(partial(_is_current, standby.address))
            with breadbox.connect(f"{leader.address},{standby.address}") as client:
                assert len(client.service.fetch_fragments(1, max_wait_s=10.0).fragments) == 1
                # As one that has stood by for a while, at any time between two signs of life.
                time.sleep(WATCHED_S_MIN + random.uniform(0.0, RENEW_S))
                killed_at = time.perf_counter()
                if is_elsewhere:
                    # Frozen first: once its process is gone, a standby beside it sees that.
                    leader.freeze()
                    _hide_holder(store_url)
                leader.kill()
                assert len(client.service.fetch_fragments(1, max_wait_s=10.0).fragments) == 1
                yield time.perf_counter() - killed_at
                assert fragment_count == client.get_buffer().state.chunk_count
            leader = standby


def _serves(address: str) -> bool:
    return probe(address)[0] == "SERVING"


def _is_current(address: str) -> bool:
    _, reason = probe(address)
    return reason.endswith("; 0 turns and 0.0 s behind")


def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def _hide_holder(store_url: str) -> None:
    """Let nobody see that the process is gone that showed the last sign of life.

    As for a standby on another host, which waits until that sign no longer counts.
    """
    client = open_redis(store_url)
    token = client.get(ALIVE).split(b" ")[0]
    client.set(ALIVE, token + b" elsewhere", px=max(1, client.pttl(ALIVE)))
    client.close()


def recovery_rows(*, fragment_count: int, rounds: int) -> Iterator[Figure]:
    """Measure restarts with each kind of journal.

    Everything in the journal's tail is the worst case, everything in the snapshot the best; a
    server makes snapshots while it runs, so a real restart is between the two.
    """
    for journal, places in (("SQLite", _file_store), ("Redis", _redis_store)):
        with places() as store_url:
            yield _row(
                f"restart of an empty server, journal in {journal}",
                _restarts(store_url, 0, rounds),
            )
        with places() as store_url:
            _fill_and_kill(store_url, fragment_count)
            yield _row(
                f"restart at {fragment_count:,} fragments, killed right after the last append, "
                f"no snapshot yet, journal in {journal}",
                _restarts(store_url, fragment_count, rounds),
                reach=_READY_S,
            )
            _compact(store_url)
            yield _row(
                f"restart at {fragment_count:,} fragments, snapshot up to date, "
                f"journal in {journal}",
                _restarts(store_url, fragment_count, rounds),
                reach=_READY_S,
            )


@contextmanager
def _file_store() -> Iterator[str]:
    with memory_directory() as directory:
        yield f"file://{directory}/store"


@contextmanager
def _redis_store() -> Iterator[str]:
    with redis_server() as path:
        yield f"unix://{path}"


def _row(name: str, restarts: list[_Restart], reach: float | None = None) -> Figure:
    return Figure(
        name=name,
        workload="vector",
        value=statistics.median(restart.ready_s for restart in restarts),
        unit="s",
        reach=reach,
        is_lower_better=True,
        peers={
            "slowest": max(restart.ready_s for restart in restarts),
            "CPU seconds": statistics.median(restart.cpu_s for restart in restarts),
        },
    )


def _options(fragment_count: int) -> tuple[str, ...]:
    """A buffer that holds everything for ever, and a server that makes no snapshots.

    So each round finds the journal as the first did.
    """
    return (
        *("--capacity-chunks", str(max(1, fragment_count)), "--uses-max", "1000000"),
        *("--snapshot-entries", "1000000000"),
    )


def _fill_and_kill(store_url: str, fragment_count: int) -> None:
    """Append so many fragments, and kill the server right after the last is acknowledged."""
    with (
        breadbox_server(store_url, *_options(fragment_count)) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        successive = numbered(vector_fragment(), "bench")
        for start in range(0, fragment_count, _BATCH):
            batch = list(islice(successive, min(_BATCH, fragment_count - start)))
            results = client.append_many(batch)
            assert all(each.outcome is breadbox.AdmissionOutcome.ADMITTED for each in results)
        server.kill()


def _restarts(store_url: str, fragment_count: int, rounds: int) -> list[_Restart]:
    """Start the server again and again, each time killed once it has answered."""
    return [_restart(store_url, fragment_count) for _ in range(rounds)]


def _restart(store_url: str, fragment_count: int) -> _Restart:
    with ExitStack() as stack:
        started_at = time.perf_counter()
        server = stack.enter_context(breadbox_server(store_url, *_options(fragment_count)))
        client = stack.enter_context(breadbox.connect(server.address))
        _first_answer(client, fragment_count)
        ready_s = time.perf_counter() - started_at
        restart = _Restart(ready_s, server.cpu_s)
        assert fragment_count == client.get_buffer().state.chunk_count
        server.kill()
    return restart


def _first_answer(client: breadbox.Client, fragment_count: int) -> None:
    """One answered call: a fetch where there is something to fetch."""
    if fragment_count:
        assert len(client.service.fetch_fragments(1, max_wait_s=10.0).fragments) == 1
    else:
        client.get_buffer()


def _compact(store_url: str) -> None:
    """Make a snapshot of everything, as a server that has time does."""
    place = JournalPlace.choose("auto", store_url)
    assert place is not None
    archive = place.open_archive()
    try:
        compact(archive)
    finally:
        archive.close()
