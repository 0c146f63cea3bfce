"""Rows about payload bytes: append and load, on Redis and on shared memory."""

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

import breadbox
from bench.bare import BareSocket, PickleClient
from bench.measure import Contender, Figure, rates
from bench.processes import breadbox_server, memory_directory, redis_server
from bench.workloads import SESSION_ID, WORKLOADS, numbered, payload_bytes
from breadbox.model.types import FragmentReference
from breadbox.payload import encode_fragment, read_fragments
from breadbox.reading.batches import Batch, load_batch
from breadbox.stores import open_store
from breadbox.stores.keys import piece_key
from breadbox.stores.redis.store import PIECE_SIZE_BYTES_DEFAULT
from breadbox.wire.conversion import METADATA, announcement

GROUP = {"vpt": 4, "atari": 32}
"""Fragments per append call, and per batch."""

_GB = 1e9
_HELD_BYTES = 512 * 1024 * 1024


def payload_rows(*, rounds: int) -> Iterator[Figure]:
    """Measure append and load of the large workloads."""
    for workload in ("vpt", "atari"):
        with (
            redis_server() as path,
            breadbox_server(
                f"unix://{path}", "--capacity-bytes", str(_HELD_BYTES), "--uses-max", "1000000"
            ) as server,
            breadbox.connect(server.address) as client,
        ):
            client.start_session(SESSION_ID)
            yield _append_row(workload, client, path, rounds=rounds)
            with client.fetch(fragment_count=GROUP[workload], max_wait_s=10) as lease:
                load = _load_row(workload, client, list(lease.references), path, rounds=rounds)
        yield load
        yield from _file_rows(workload, load.value, rounds=rounds)


def _append_row(workload: str, client: breadbox.Client, path: Path, *, rounds: int) -> Figure:
    """Payload and bookkeeping acknowledged, in groups as an appender sends them.

    All contenders keep the same bytes in Redis, and delete their oldest group after each round, as
    the server does: what Redis pays for memory is then the same for all.
    """
    fragment = WORKLOADS[workload]()
    group = GROUP[workload]
    moved = group * payload_bytes(fragment) / _GB
    successive = numbered(fragment, "bench")
    bare, pickled = BareSocket(path), PickleClient(path)
    pieces = cut(b"".join(encode_fragment(fragment))) * group
    window = max(1, int(_HELD_BYTES / _GB / moved))
    keys: deque[list[bytes]] = deque()
    names: deque[list[str]] = deque()

    def fresh_keys() -> None:
        prefix = secrets.token_hex(16)
        keys.append([piece_key(prefix, number) for number in range(len(pieces))])

    def fresh_names() -> None:
        names.append([f"pickled:{secrets.token_hex(16)}" for _ in range(group)])

    def append_pickled() -> None:
        for name in names[-1]:
            pickled.append(name, fragment)

    def drop_keys() -> None:
        if len(keys) > window:
            bare.unlink(keys.popleft())

    def drop_names() -> None:
        if len(names) > window:
            pickled.delete(names.popleft())

    got = rates(
        {
            "ours": Contender(lambda: _append(client, list(islice(successive, group))), moved),
            "limit": Contender(
                lambda: bare.set_pieces(keys[-1], pieces),
                moved,
                before=fresh_keys,
                after=drop_keys,
            ),
            "pickle": Contender(append_pickled, moved, before=fresh_names, after=drop_names),
        },
        rounds=rounds,
        warm_up_rounds=window + 2,
    )
    bare.unlink([key for each in keys for key in each])
    pickled.delete([name for each in names for name in each])
    bare.close()
    pickled.close()
    return Figure(
        name="append, payload and bookkeeping acknowledged",
        workload=workload,
        value=got["ours"],
        unit="GB/s",
        limit=got["limit"],
        limit_is="bare socket loop",
        reach=0.8,
        peers={"redis-py with pickle": got["pickle"]},
    )


def _append(client: breadbox.Client, fragments: Sequence[breadbox.Fragment]) -> None:
    results = client.append_many(fragments)
    if any(result.outcome is not breadbox.AdmissionOutcome.ADMITTED for result in results):
        raise RuntimeError(f"not admitted: {results}")


def _load_row(
    workload: str,
    client: breadbox.Client,
    references: Sequence[FragmentReference],
    path: Path,
    *,
    rounds: int,
) -> Figure:
    fragment = WORKLOADS[workload]()
    sizes = [reference.metadata.payload.size_bytes for reference in references]
    moved = sum(sizes) / _GB
    into: list[Batch] = []
    bare, pickled = BareSocket(path), PickleClient(path)
    names = [f"pickled:{number}" for number in range(len(references))]
    for name in names:
        pickled.append(name, fragment)
    memory = np.empty((len(references), max(sizes)), np.uint8)
    keys, destinations = [], []
    for row, reference in enumerate(references):
        view = memory[row].data[: sizes[row]]
        for number, piece in enumerate(cut(view)):
            keys.append(piece_key(reference.metadata.payload.payload_id, number))
            destinations.append(piece)

    def load() -> None:
        into[:] = [load_batch(client.store, references, into=into[0] if into else None)]

    got = rates(
        {
            "ours": Contender(load, moved),
            "limit": Contender(lambda: bare.get_pieces(keys, destinations), moved),
            "pickle": Contender(lambda: _drop(pickled.load(names)), moved),
        },
        rounds=rounds,
    )
    bare.close()
    pickled.close()
    return Figure(
        name="load into a stacked batch",
        workload=workload,
        value=got["ours"],
        unit="GB/s",
        limit=got["limit"],
        limit_is="bare socket loop",
        reach=0.8,
        peers={"redis-py with pickle": got["pickle"]},
    )


def _file_rows(workload: str, redis_rate: float, *, rounds: int) -> Iterator[Figure]:
    """The same on shared memory, compared with the Redis figure."""
    fragment = WORKLOADS[workload]()
    group = GROUP[workload]
    into: list[Batch] = []
    with memory_directory() as directory:
        store = open_store(f"file://{directory}")
        buffers = [encode_fragment(fragment)] * group
        payloads = store.write_many(buffers)
        references = [
            FragmentReference(METADATA.read(announcement(fragment, payload)), 0, 0, 1)
            for payload in payloads
        ]
        moved = sum(payload.size_bytes for payload in payloads) / _GB

        def load() -> None:
            into[:] = [load_batch(store, references, into=into[0] if into else None)]

        def map_all() -> None:
            _drop(read_fragments(store, references, is_mapped=True))

        got = rates(
            {"load": Contender(load, moved), "map": Contender(map_all, moved)}, rounds=rounds
        )
        store.close()
    yield Figure(
        name="load into a stacked batch, file:// on shared memory",
        workload=workload,
        value=got["load"],
        unit="GB/s",
        limit=redis_rate,
        limit_is="the same from Redis",
        reach=2.0,
    )
    yield Figure(
        name="map and verify without a copy, file:// on shared memory",
        workload=workload,
        value=got["map"],
        unit="GB/s",
        limit=redis_rate,
        limit_is="load from Redis",
    )


def cut(payload: bytes | memoryview) -> list[memoryview]:
    """Cut a payload as the store does."""
    view = memoryview(payload)
    size = PIECE_SIZE_BYTES_DEFAULT
    return [view[start : start + size] for start in range(0, len(view), size)]


def _drop(value: object) -> None:
    """Use a value, and let it go within the measured time: freeing is part of the price."""
    del value
