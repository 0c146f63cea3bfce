"""A primary, a replica, and a Sentinel that promotes the replica when the primary dies."""

import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import redis

from support.eventually import eventually_sync
from support.redis_server import RedisServer, free_port, redis_binary

_NAME = "main"
_FAILOVER_S = 30.0


class WatchedRedis:
    """Three processes. A context manager."""

    def __init__(self) -> None:
        self.primary = RedisServer(with_tcp=True)
        self.replica = RedisServer(with_tcp=True)
        self._sentinel_port = free_port()
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="sentinel-"))
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Store URL."""
        return f"redis+sentinel://127.0.0.1:{self._sentinel_port}/{_NAME}"

    @property
    def pids(self) -> list[int]:
        """Of the three processes."""
        assert self._sentinel is not None
        return [self.primary.pid, self.replica.pid, self._sentinel.pid]

    def wait_until_replicated(self) -> None:
        """Return once the replica has all that the primary has acknowledged so far."""
        with self.primary.client() as client:
            # WAIT counts the writes of its own connection, so one is made on it.
            client.set("replicated-so-far", "1")
            assert 1 == client.wait(1, 10_000), "the replica does not follow"

    def kill_primary(self) -> None:
        """Kill it, and return once the replica is in its place, for Sentinel too."""
        self.primary.kill()

        def is_promoted() -> bool:
            with self.replica.client() as client:
                return self._said_port() == self.replica.port and client.role()[0] == b"master"

        eventually_sync(is_promoted, "a failover", within_s=_FAILOVER_S)

    def __enter__(self) -> "WatchedRedis":
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.enter_context(self.primary)
            stack.enter_context(self.replica)
            with self.replica.client() as client:
                client.replicaof("127.0.0.1", self.primary.port)
            stack.callback(self._stop_sentinel)
            self._start_sentinel()
            eventually_sync(self._is_watched, "Sentinel knowing the replica", within_s=_FAILOVER_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start_sentinel(self) -> None:
        config = self._directory / "sentinel.conf"  # Sentinel writes to it.
        config.write_text(
            f"port {self._sentinel_port}\n"
            "bind 127.0.0.1\n"
            f"dir {self._directory}\n"
            f"sentinel monitor {_NAME} 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {_NAME} 500\n"
            f"sentinel failover-timeout {_NAME} 5000\n"
        )
        self._sentinel = subprocess.Popen(
            [redis_binary(), str(config), "--sentinel"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _stop_sentinel(self) -> None:
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait(timeout=10)

    def _is_watched(self) -> bool:
        with self.replica.client() as client:
            is_following = client.info("replication").get("master_link_status") == "up"
        return is_following and self._ask("SENTINEL", "REPLICAS", _NAME) not in (None, [])

    def _said_port(self) -> int:
        said = self._ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _NAME)
        return int(said[1]) if said else 0

    def _ask(self, *command: str) -> list[bytes] | None:
        assert self._sentinel is not None
        assert self._sentinel.poll() is None, "the Sentinel ended"
        with redis.Redis(port=self._sentinel_port) as client:
            # As it comes: parsed, some replies would be other things in other versions.
            client.response_callbacks.clear()
            try:
                answer: list[bytes] | None = client.execute_command(*command)
            except redis.RedisError:
                return None
            return answer
