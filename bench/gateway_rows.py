"""Rows about the gateway: the same clients, through the server and straight to Redis."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import breadbox
from bench.measure import Contender, Figure, percentile, rates
from bench.payload_rows import GROUP
from bench.processes import Server, breadbox_server, redis_server
from bench.workloads import SESSION_ID, WORKLOADS, numbered, payload_bytes
from breadbox.reading.batches import Batch, load_batch

_GROUP = {**GROUP, "vector": 256}
_UNITS = {"vpt": ("GB", 1e-9), "atari": ("GB", 1e-9), "vector": ("1,000 fragments", 1e-3)}
"""What amounts are told in, and how many of that a byte, or a fragment, is."""
_HELD_BYTES = 256 * 1024 * 1024
_STRAIGHT, _THROUGH = "straight to Redis", "through the gateway"


def gateway_rows(*, rounds: int) -> Iterator[Figure]:
    """Measure append and load both ways, what they cost the server, and whom they hold up."""
    for workload in ("vpt", "atari", "vector"):
        with (
            redis_server() as path,
            breadbox_server(
                *(f"unix://{path}", "--gateway", "--capacity-bytes", str(_HELD_BYTES)),
                *("--uses-max", "1000000"),
            ) as server,
            breadbox.connect(server.address, store_url=f"unix://{path}") as straight,
            breadbox.connect(server.address) as through,
        ):
            straight.start_session(SESSION_ID)
            clients = {_STRAIGHT: straight, _THROUGH: through}
            yield _row("append", workload, server, _appends(workload, clients), rounds=rounds)
            count = _GROUP[workload]
            with straight.fetch(fragment_count=count, max_wait_s=10) as lease:
                loads = _loads(workload, clients, list(lease.references))
                yield _row("load into a stacked batch", workload, server, loads, rounds=rounds)


def _appends(
    workload: str, clients: dict[str, breadbox.Client]
) -> dict[str, tuple[Callable[[], None], float]]:
    """What each does once, and how much that is."""
    fragment, group = WORKLOADS[workload](), _GROUP[workload]
    amount = _amount(workload, group * payload_bytes(fragment))
    successive = {name: numbered(fragment, name) for name in clients}

    def append(name: str) -> None:
        results = clients[name].append_many(list(islice(successive[name], group)))
        assert {breadbox.AdmissionOutcome.ADMITTED} == {each.outcome for each in results}

    return {name: (lambda name=name: append(name), amount) for name in clients}  # type: ignore[misc]


def _amount(workload: str, size_bytes: int) -> float:
    """How much a group of a workload is, in its unit."""
    is_bytes = workload != "vector"
    return (size_bytes if is_bytes else _GROUP[workload]) * _UNITS[workload][1]


def _loads(
    workload: str,
    clients: dict[str, breadbox.Client],
    references: list[breadbox.model.types.FragmentReference],
) -> dict[str, tuple[Callable[[], None], float]]:
    amount = _amount(workload, sum(each.metadata.payload.size_bytes for each in references))
    into: dict[str, Batch | None] = dict.fromkeys(clients)

    def load(name: str) -> None:
        into[name] = load_batch(clients[name].store, references, into=into[name])

    return {name: (lambda name=name: load(name), amount) for name in clients}  # type: ignore[misc]


def _row(
    what: str,
    workload: str,
    server: Server,
    acts: dict[str, tuple[Callable[[], None], float]],
    *,
    rounds: int,
) -> Figure:
    used_s = dict.fromkeys(acts, 0.0)
    client_s = dict.fromkeys(acts, 0.0)
    done = dict.fromkeys(acts, 0)

    def counted(name: str, act: Callable[[], None]) -> None:
        server_before, client_before = server.cpu_s, time.process_time()
        act()
        used_s[name] += server.cpu_s - server_before
        client_s[name] += time.process_time() - client_before
        done[name] += 1

    got = rates(
        {
            name: Contender(lambda name=name, act=act: counted(name, act), amount)  # type: ignore[misc]
            for name, (act, amount) in acts.items()
        },
        rounds=rounds,
        warm_up_rounds=2,
    )

    unit = _UNITS[workload][0]

    def cost_ms(used: dict[str, float], name: str) -> float:
        return used[name] * 1e3 / (done[name] * acts[name][1])

    return Figure(
        name=f"{what}, {_THROUGH}",
        workload=workload,
        value=got[_THROUGH],
        unit=f"{unit}/s",
        limit=got[_STRAIGHT],
        limit_is=_STRAIGHT,
        also={
            f"server CPU ms/{unit}": cost_ms(used_s, _THROUGH),
            f"{_STRAIGHT}, server CPU ms/{unit}": cost_ms(used_s, _STRAIGHT),
            f"client CPU ms/{unit}": cost_ms(client_s, _THROUGH),
            f"{_STRAIGHT}, client CPU ms/{unit}": cost_ms(client_s, _STRAIGHT),
            "a call of others meanwhile, p99 ms": _held_up_ms(server, acts[_THROUGH][0]),
            f"{_STRAIGHT}, the same, p99 ms": _held_up_ms(server, acts[_STRAIGHT][0]),
        },
    )


def _held_up_ms(server: Server, act: Callable[[], None], seconds: float = 2.0) -> float:
    """How long a small call takes while somebody moves payloads without a pause."""
    times: list[float] = []
    is_over = threading.Event()

    def move() -> None:
        while not is_over.is_set():
            act()
            is_over.wait(1e-3)

    mover = threading.Thread(target=move)
    with breadbox.connect(server.address) as client:
        client.get_buffer()
        mover.start()
        give_up_at = time.perf_counter() + seconds
        while (start := time.perf_counter()) < give_up_at:
            client.get_buffer()
            times.append(time.perf_counter() - start)
        is_over.set()
        mover.join()
    return percentile(times, 99) * 1e3
