"""A Redis Cluster of one to three primaries on the loopback, gone at the end."""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from bench.processes import redis_binary

_SLOTS = 16_384
_BUS_OFFSET = 10_000
"""A node's bus port lies this far above its port."""
_PORTS = range(22_600, 24_000)
"""Below the range of outgoing connections."""
_START_S = 30.0
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cluster:
    """Primaries that share the slots evenly."""

    ports: tuple[int, ...]
    pids: tuple[int, ...]

    @property
    def url(self) -> str:
        """Store URL that names every node."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def node_of(self, key: bytes) -> int:
        """Number of the node that has a key."""
        return int(key_slot(key)) * len(self.ports) // _SLOTS


@contextlib.contextmanager
def redis_cluster(node_count: int, *, link_bytes_per_s: float = 0.0) -> Iterator[Cluster]:
    """A cluster without persistence or replicas.

    Args:
        node_count: Primaries.
        link_bytes_per_s: What each node can send; 0: what the machine can.
    """
    directory = Path(tempfile.mkdtemp(prefix="breadbox-bench-"))
    processes: list[subprocess.Popen[bytes]] = []
    clients: list[Any] = []
    try:
        ports = _free_ports(2 * node_count)
        ports, outer = ports[:node_count], ports[node_count:]
        if not link_bytes_per_s:
            outer = ports
        for port, announced in zip(ports, outer, strict=True):
            processes.append(_start(port, announced, directory / str(port)))
            clients.append(redis.Redis(port=port, decode_responses=True))
        for number, client in enumerate(clients):
            _until(client.ping)
            slots = [slot for slot in range(_SLOTS) if slot * node_count // _SLOTS == number]
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            client.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
        for client in clients:
            _until(lambda client=client: _is_whole(client, node_count))
        pids = tuple(process.pid for process in processes)
        if link_bytes_per_s:
            for port, announced in zip(ports, outer, strict=True):
                processes.append(_link(announced, port, link_bytes_per_s))
                _until(lambda port=announced: _answers(port))
        yield Cluster(tuple(outer), pids)
    finally:
        for client in clients:
            client.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=_START_S)
        shutil.rmtree(directory, ignore_errors=True)


def _link(port: int, target: int, bytes_per_s: float) -> subprocess.Popen[bytes]:
    arguments = [str(port), str(target), str(bytes_per_s)]
    return subprocess.Popen([sys.executable, "-m", "bench.link", *arguments], cwd=_ROOT)


def _answers(port: int) -> bool:
    with redis.Redis(port=port) as client:
        return bool(client.ping())


def _start(port: int, announced: int, directory: Path) -> subprocess.Popen[bytes]:
    directory.mkdir()
    return subprocess.Popen(
        [
            *(redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
            *("--dir", str(directory), "--cluster-enabled", "yes", "--loglevel", "warning"),
            *("--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", str(announced)),
            *("--cluster-announce-bus-port", str(port + _BUS_OFFSET)),
        ],
        stdout=subprocess.DEVNULL,
    )


def _free_ports(count: int) -> list[int]:
    free: list[int] = []
    for port in _PORTS:
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for each in (port, port + _BUS_OFFSET):
                held.enter_context(socket.create_server(("127.0.0.1", each)))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"no {count} free pairs of ports from {_PORTS[0]} on")


def _is_whole(client: Any, node_count: int) -> bool:
    text: Any = client.execute_command("CLUSTER INFO")
    known = text if isinstance(text, dict) else dict(line.split(":") for line in text.split())
    return (known["cluster_state"], known["cluster_known_nodes"]) == ("ok", str(node_count))


def _until(is_so: Any) -> None:
    give_up_at = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(redis.RedisError):
            if is_so():
                return
        if time.monotonic() > give_up_at:
            raise RuntimeError("the Redis Cluster did not come up")
        time.sleep(0.02)
