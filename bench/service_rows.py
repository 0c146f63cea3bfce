"""Rows about bookkeeping: small fragments, fetch, memory and wake-up, on a server over Redis."""

import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import breadbox
from bench.bare import BareSocket
from bench.bare_calls import BareCaller, bare_call_server
from bench.measure import Contender, Figure, percentile, rates
from bench.processes import Server, breadbox_server, redis_server
from bench.workloads import SESSION_ID, numbered, vector_fragment
from breadbox.model.types import FragmentMetadata
from breadbox.payload import encode_fragment, write_fragments
from breadbox.stores.keys import piece_key
from breadbox.wire.conversion import METADATA, announcement

_BATCH = 1024
_FETCH = 32
_SINGLE = 256


def service_rows(*, rounds: int, chunk_count: int, wake_count: int) -> Iterator[Figure]:
    """Measure what costs per fragment rather than per byte."""
    yield _vector_row(rounds=rounds)
    yield _single_row(rounds=rounds)
    yield from _fetch_rows(chunk_count=chunk_count, fetch_count=200 * rounds)
    yield from _wake_rows(wake_count=wake_count)


def _vector_row(*, rounds: int) -> Figure:
    """Payload and bookkeeping of ~2 kB fragments, appended in batches by one client."""
    fragment = vector_fragment()
    with (
        redis_server() as path,
        breadbox_server(f"unix://{path}", "--capacity-chunks", str(8 * _BATCH)) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        successive = numbered(fragment, "bench")
        bare = BareSocket(path)
        piece = memoryview(b"".join(encode_fragment(fragment)))
        keys: list[bytes] = []

        batch: list[breadbox.Fragment] = []

        def fresh_batch() -> None:
            batch[:] = islice(successive, _BATCH)

        def fresh_keys() -> None:
            keys[:] = [piece_key(secrets.token_hex(16), 0) for _ in range(_BATCH)]

        got = rates(
            {
                "ours": Contender(lambda: _append(client, batch), _BATCH, before=fresh_batch),
                "limit": Contender(
                    lambda: bare.set_pieces(keys, [piece] * _BATCH),
                    _BATCH,
                    before=fresh_keys,
                    after=lambda: bare.unlink(keys),
                ),
            },
            rounds=max(rounds, 5),
        )
        bare.close()
    return Figure(
        name=f"append in batches, payload and bookkeeping acknowledged ({len(piece)} bytes)",
        workload="vector",
        value=got["ours"],
        unit="fragments/s",
        reach=10_000.0,
        peers={"bare socket loop, payload only": got["limit"]},
    )


def _single_row(*, rounds: int) -> Figure:
    """The same fragments, one at a time by one caller, beside bare calls of a bare server."""
    fragment = vector_fragment()
    with (
        redis_server() as path,
        breadbox_server(f"unix://{path}", "--capacity-chunks", str(8 * _SINGLE)) as server,
        breadbox.connect(server.address) as client,
        bare_call_server(path) as address,
    ):
        client.start_session(SESSION_ID)
        successive = numbered(fragment, "bench")
        bare = BareCaller(address)
        data = b"".join(encode_fragment(fragment))

        def ours() -> None:
            for each in islice(successive, _SINGLE):
                client.append(each)

        def bare_ones() -> None:
            for _ in range(_SINGLE):
                bare.append(data)

        got = rates(
            {"ours": Contender(ours, _SINGLE), "limit": Contender(bare_ones, _SINGLE)},
            rounds=max(rounds, 5),
        )
        bare.close()
    return Figure(
        name=f"append one at a time, one caller ({len(data)} bytes)",
        workload="vector",
        value=got["ours"],
        unit="fragments/s",
        limit=got["limit"],
        limit_is="a bare call of a server that stores",
        reach=0.8,
    )


def _append(client: breadbox.Client, fragments: list[breadbox.Fragment]) -> None:
    results = client.append_many(fragments)
    assert all(each.outcome is breadbox.AdmissionOutcome.ADMITTED for each in results)


def _fetch_rows(*, chunk_count: int, fetch_count: int) -> Iterator[Figure]:
    """Fetch from a large buffer, and what each fragment in it costs the server.

    Between two fetches the lease is released; that is not in the figure.
    """
    fragment = vector_fragment()
    with (
        redis_server() as path,
        breadbox_server(
            f"unix://{path}", "--capacity-chunks", str(chunk_count), "--uses-max", "1000000"
        ) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        successive = numbered(fragment, "bench")
        # What the server keeps of the latest small payloads is full by then.
        _fill(client, successive, chunk_count // 2)
        before_bytes = server.resident_bytes
        _fill(client, successive, chunk_count - chunk_count // 2)
        grown_bytes = server.resident_bytes - before_bytes
        seconds = []
        for number in range(fetch_count):
            start = time.perf_counter()
            grant = client.service.fetch_fragments(_FETCH, max_wait_s=10.0)
            seconds.append(time.perf_counter() - start)
            assert len(grant.fragments) == _FETCH, number
            client.service.release_lease(grant.lease_id, breadbox.ReleaseMode.CONSUMED)
    yield Figure(
        name=f"fetch of {_FETCH} fragments from {chunk_count:,} chunks, one caller",
        workload="vector",
        value=len(seconds) / sum(seconds),
        unit="fetches/s",
        reach=500.0,
        peers={"slowest of a hundred": 1.0 / percentile(seconds, 99)},
    )
    yield Figure(
        name=f"server memory per fragment held ({chunk_count:,} held)",
        workload="vector",
        value=grown_bytes / (chunk_count - chunk_count // 2),
        unit="bytes",
        reach=1024.0,
        is_lower_better=True,
    )


def _fill(
    client: breadbox.Client, successive: Iterator[breadbox.Fragment], chunk_count: int
) -> None:
    for start in range(0, chunk_count, _BATCH):
        client.append_many(list(islice(successive, min(_BATCH, chunk_count - start))))


def _wake_rows(*, wake_count: int) -> Iterator[Figure]:
    """Milliseconds from sending the append that satisfies a waiting fetch to the fetch's return.

    The payload is written before: this is the bookkeeping alone, both calls over loopback.
    """
    with redis_server() as path, breadbox_server(f"unix://{path}") as server:
        latencies_ms = _wake_latencies_ms(server, wake_count)
    for percent, reach_ms in ((50, 3.0), (99, 15.0)):
        yield Figure(
            name=f"wake-up of a waiting fetch by an append, p{percent}",
            workload="vector",
            value=percentile(latencies_ms, percent),
            unit="ms",
            reach=reach_ms,
            is_lower_better=True,
        )


def _wake_latencies_ms(server: Server, wake_count: int) -> list[float]:
    latencies_ms = []
    with breadbox.connect(server.address) as waiting, breadbox.connect(server.address) as appending:
        appending.start_session(SESSION_ID)
        for number in range(wake_count):
            announced = _written(appending, number)
            returned_at: list[float] = []
            fetcher = threading.Thread(target=_fetch_once, args=(waiting, returned_at))
            fetcher.start()
            while not appending.get_buffer().state.waiter_count:
                time.sleep(0.001)
            sent_at = time.perf_counter()
            appending.service.append_fragments([announced])
            fetcher.join(timeout=30.0)
            latencies_ms.append((returned_at[0] - sent_at) * 1000)
    return latencies_ms


def _fetch_once(client: breadbox.Client, returned_at: list[float]) -> None:
    grant = client.service.fetch_fragments(1, max_wait_s=30.0)
    returned_at.append(time.perf_counter())
    client.service.release_lease(grant.lease_id, breadbox.ReleaseMode.CONSUMED)


def _written(client: breadbox.Client, fragment_index: int) -> FragmentMetadata:
    fragment = replace(vector_fragment(), fragment_index=fragment_index)
    (payload,) = write_fragments(client.store, [fragment])
    return METADATA.read(announcement(fragment, payload))
