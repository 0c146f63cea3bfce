"""A real Redis Cluster on the loopback: three primaries, a replica each if asked for.

Built with the cluster's own commands, so that slots can be moved and nodes killed while it runs.
"""

import contextlib
import itertools
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from support.eventually import eventually_sync
from support.redis_server import redis_binary

SLOTS = 16_384
PRIMARIES = 3
BUS_OFFSET = 10_000
"""A node's bus port lies this far above its port."""
NODE_TIMEOUT_MS = 1500
PORTS = range(21_000, 22_600)
STRETCH = 100
READY_S = 30.0


def _port_stretch() -> Iterator[int]:
    """Ports of this process's own, round and round; it holds the first of its stretch open.

    What a test killed has to stay dead: none of its ports may be another process's next one.
    """
    for first in PORTS[::STRETCH]:
        try:
            held = socket.create_server(("127.0.0.1", first))
        except OSError:
            continue
        with held:
            yield from itertools.cycle(range(first + 1, first + STRETCH))
    raise AssertionError("no free stretch of ports")


_stretch = _port_stretch()


def _free_port_pair() -> int:
    """A port that is free together with its bus port, below the range of outgoing connections."""
    for port in itertools.islice(_stretch, STRETCH):
        try:
            with (
                socket.create_server(("127.0.0.1", port)),
                socket.create_server(("127.0.0.1", port + BUS_OFFSET)),
            ):
                return port
        except OSError:
            continue
    raise AssertionError("no free pair of ports")


class Node:
    """One process of the cluster."""

    def __init__(self, directory: Path, binary: str, *options: str) -> None:
        self.port = _free_port_pair()
        directory.mkdir()
        self._command = [
            *(binary, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(directory), "--save", "", "--appendonly", "no"),
            *("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
            *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
            *("--loglevel", "warning", *options),
        ]
        self.client = redis.Redis(port=self.port, decode_responses=True)
        self.start()
        self.node_id: str = self.call("MYID")

    def start(self, *options: str) -> None:
        """Start it, again after `stop`, with more options, and wait until it answers."""
        self._process = subprocess.Popen(
            [*self._command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually_sync(self._answers, f"node {self.port}", within_s=READY_S)

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self._process.terminate()
        self._process.wait(timeout=10)

    def call(self, *arguments: str | int) -> Any:
        """Run a CLUSTER command on this node."""
        return self.client.execute_command(f"CLUSTER {arguments[0]}", *arguments[1:])

    def info(self) -> dict[str, str]:
        """What the node thinks of the cluster."""
        text: Any = self.call("INFO")
        if isinstance(text, dict):
            return text
        return dict(line.split(":", 1) for line in text.split() if ":" in line)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill it as a crash would, and wait."""
        self._process.kill()
        self._process.wait(timeout=10)

    def close(self) -> None:
        """End it. Idempotent."""
        self.client.close()
        self.kill()

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"node {self.port} ended at once"
        try:
            return bool(self.client.ping())
        except redis.AuthenticationError:
            return True  # It has users of its own.
        except redis.RedisError:
            return False


class RedisCluster:
    """A cluster of three primaries. A context manager.

    Args:
        has_replicas: Give each primary a replica that takes over when it dies.
        sync: When each node's append-only file is synced, always or everysec; None: it has none.
        binary: Of another release; None: that of `redis_binary`.
    """

    def __init__(
        self, *, has_replicas: bool = False, sync: str | None = None, binary: str | None = None
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="redis-cluster-"))
        self._has_replicas = has_replicas
        self._binary = binary or redis_binary()
        durable = ("--appendonly", "yes", "--appendfsync")
        self._options = () if sync is None else (*durable, sync)
        self.primaries: list[Node] = []
        self.replicas: list[Node] = []

    @property
    def url(self) -> str:
        """Store URL; names one node, which tells of the others."""
        return f"redis+cluster://127.0.0.1:{self.primaries[0].port}"

    @property
    def nodes(self) -> list[Node]:
        """All of them."""
        return [*self.primaries, *self.replicas]

    def __enter__(self) -> "RedisCluster":
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self) -> None:
        for number in range(PRIMARIES):
            self.primaries.append(self._node(f"primary-{number}"))
        for number in range(PRIMARIES if self._has_replicas else 0):
            self.replicas.append(self._node(f"replica-{number}"))
        share = -(-SLOTS // PRIMARIES)
        for number, node in enumerate(self.primaries):
            node.call("SET-CONFIG-EPOCH", number + 1)
            node.call("ADDSLOTS", *range(number * share, min(SLOTS, (number + 1) * share)))
        for node in self.nodes[1:]:
            node.call("MEET", "127.0.0.1", self.nodes[0].port)
        everybody = str(len(self.nodes))
        for node in self.nodes:
            eventually_sync(
                lambda node=node: (  # type: ignore[misc]
                    node.info()["cluster_known_nodes"] == everybody
                    and node.info()["cluster_state"] == "ok"
                ),
                "the nodes to know each other",
                within_s=READY_S,
            )
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            eventually_sync(
                lambda primary=primary, replica=replica: self._replicates(primary, replica),  # type: ignore[misc]
                "replication",
                within_s=READY_S,
            )

    def _node(self, name: str) -> Node:
        return Node(self._directory / name, self._binary, *self._options)

    def _replicates(self, primary: Node, replica: Node) -> bool:
        link: Any = replica.client.info("replication")
        if link["role"] == "slave":
            return bool(link["master_link_status"] == "up")
        # Refused until it has heard of the primary; once it follows, asking again would begin anew.
        with contextlib.suppress(redis.ResponseError):
            replica.call("REPLICATE", primary.node_id)
        return False

    def _end(self) -> None:
        for node in self.nodes:
            node.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def move_slots(self, slots: range) -> None:
        """Move slots of the first primary to the second, keys and all, as an operator would."""
        source, target = self.primaries[0], self.primaries[1]
        for slot in slots:
            target.call("SETSLOT", slot, "IMPORTING", source.node_id)
            source.call("SETSLOT", slot, "MIGRATING", target.node_id)
            for keys in self._keys_of(source, slot):
                source.client.execute_command(
                    "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys
                )
            for node in (target, source, self.primaries[2]):
                node.call("SETSLOT", slot, "NODE", target.node_id)

    def _keys_of(self, node: Node, slot: int) -> Iterator[list[str]]:
        while keys := node.call("GETKEYSINSLOT", slot, 100):
            yield keys

    def keys_by_primary(self) -> list[int]:
        """Keys that each primary holds."""
        return [int(node.client.dbsize()) for node in self.primaries]

    def kill_primary(self) -> None:
        """Kill the first primary, and return once its replica has taken over everywhere."""
        heir = self.replicas[0]
        self.primaries[0].kill()
        eventually_sync(
            lambda: heir.client.info("replication")["role"] == "master",
            "the replica to take over",
            within_s=READY_S,
        )
        eventually_sync(
            lambda: all(node.info()["cluster_state"] == "ok" for node in self.nodes[1:]),
            "all nodes to know it",
            within_s=READY_S,
        )
