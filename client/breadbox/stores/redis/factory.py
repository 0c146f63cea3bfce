"""Make clients of Redis and stores over them. Loaded on use, since redis-py loads slowly."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from breadbox.model.errors import StoreUrlError
from breadbox.stores.deadline import Deadline, current, in_force
from breadbox.stores.redis.errors import NoTlsError, translated_errors
from breadbox.stores.redis.failover import leaving_replicas, leaving_replicas_async
from breadbox.stores.redis.store import PIECE_SIZE_BYTES_DEFAULT, RedisStore
from breadbox.stores.urls import StoreUrl, parse_redis_url, redact

CONNECT_S_MAX: Final = 5.0
"""Longest making of a connection: an address that swallows packets is not there."""
_SOCKET_TIMEOUT_S: Final = 30.0
"""For what has no deadline: a server that reads its journal at the start."""
_HEALTH_CHECK_S: Final = 30
_CONNECTIONS_MAX: Final = 16
_CONNECT_RETRIES: Final = 3


def open_redis_store(
    parsed: StoreUrl, *, unannounced_s: float, piece_size_bytes: int, deadline: Deadline
) -> RedisStore:
    """Open a store in Redis; see `breadbox.stores.open_store`, which has checked the numbers."""
    settings: dict[str, Any] = {
        "unannounced_s": unannounced_s,
        "piece_size_bytes": piece_size_bytes or PIECE_SIZE_BYTES_DEFAULT,
        "silence_s": deadline.silence_s,
    }
    if parsed.kind == "cluster":
        return _open_cluster_store(parsed, settings, deadline)
    # Without redis-py's own retries: the caller retries, and knows for how long.
    client = _blocking_client(parsed, Retry(NoBackoff(), 0))
    pool = client.connection_pool
    return RedisStore(client, lambda _: pool, **settings)


def open_redis(url: str) -> Any:
    """Open a plain, blocking redis-py client for `url`, for what is kept beside payloads."""
    parsed = parse_redis_url(url)
    if parsed.kind == "cluster":
        with _url_errors(parsed):
            return _cluster_client(redis, parsed, dict(_OPTIONS))
    return _blocking_client(parsed, Retry(ExponentialBackoff(cap=1.0, base=0.05), _CONNECT_RETRIES))


def open_redis_async(url: str, *, answer_s: float = 5.0) -> Any:
    """Open a plain asyncio redis-py client, which may wait `answer_s` for an answer of Redis."""
    parsed = parse_redis_url(url)
    options = _OPTIONS | {
        "socket_timeout": answer_s,
        "socket_connect_timeout": min(CONNECT_S_MAX, answer_s),
    }
    with _url_errors(parsed):
        if parsed.kind == "cluster":
            return _cluster_client(redis.asyncio, parsed, options)
        options["max_connections"] = _CONNECTIONS_MAX
        # A loop that many wait for: the caller tries again what does not come back soon. Silence
        # has taken the time of an answer already.
        options["retry"] = redis.asyncio.retry.Retry(
            ExponentialBackoff(cap=0.2, base=0.02),
            _CONNECT_RETRIES,
            supported_errors=(redis.exceptions.ConnectionError,),
        )
        if parsed.kind == "sentinel":
            return _sentinel_client(redis.asyncio, parsed, options)
        client = redis.asyncio.Redis.from_url(parsed.url, **options)
        pool: Any = client.connection_pool
        if issubclass(pool.connection_class, redis.asyncio.SSLConnection):
            pool.connection_class = _explaining_tls(pool.connection_class)
        pool.connection_class = leaving_replicas_async(pool.connection_class)
        _check_known_options(pool)
        return client


@contextmanager
def _url_errors(parsed: StoreUrl) -> Iterator[None]:
    try:
        yield
    except redis.RedisError:
        raise
    except (ValueError, TypeError):
        # Without the cause: redis-py may quote the URL.
        raise StoreUrlError(
            f"store URL {redact(parsed.url)!r} has options that cannot be used"
        ) from None


_OPTIONS: Final[dict[str, Any]] = {
    "protocol": 2,
    "decode_responses": False,
    "socket_timeout": _SOCKET_TIMEOUT_S,
    "socket_connect_timeout": CONNECT_S_MAX,
    "health_check_interval": _HEALTH_CHECK_S,
}


def _blocking_client(parsed: StoreUrl, retry: Retry) -> Any:
    options = _OPTIONS | {"retry": retry}
    if parsed.kind == "sentinel":
        return _sentinel_client(redis, parsed, options)
    with _url_errors(parsed):
        pool = BoundedPool.from_url(parsed.url, **options)
        _check_known_options(pool)
        return redis.Redis.from_pool(pool)


def _check_known_options(pool: Any) -> None:
    """Make a connection object without connecting: redis-py checks options only then."""
    pool.connection_class(**pool.connection_kwargs)


def _open_cluster_store(
    parsed: StoreUrl, settings: dict[str, Any], deadline: Deadline
) -> RedisStore:
    with _url_errors(parsed), translated_errors(), in_force(deadline):
        client = _cluster_client(redis, parsed, dict(_OPTIONS))
    refreshing = threading.Lock()

    def pool_of(payload_id: str) -> redis.ConnectionPool:
        node = client.get_node_from_key(f"breadbox:{{{payload_id}}}:0")
        pool: redis.ConnectionPool = client.get_redis_connection(node).connection_pool
        return pool

    def refresh(deadline: Deadline) -> None:
        with translated_errors(), in_force(deadline):
            if not refreshing.acquire(timeout=max(0.0, deadline.left_s())):
                raise TimeoutError("another thread still asks for the nodes")
            try:
                client.nodes_manager.initialize()
            finally:
                refreshing.release()

    return RedisStore(client, pool_of, refresh=refresh, **settings)


def _cluster_client(module: Any, parsed: StoreUrl, options: dict[str, Any]) -> Any:
    if module is redis:
        options["connection_pool_class"] = BoundedPool
    others = [module.cluster.ClusterNode(host, port) for host, port in parsed.addresses[1:]]
    return module.RedisCluster.from_url(parsed.url, startup_nodes=others, **options)


def _sentinel_client(module: Any, parsed: StoreUrl, options: dict[str, Any]) -> Any:
    """Make a client of the primary, found anew through the Sentinels on each connection."""
    with _url_errors(parsed):
        address = redis.connection.parse_url(parsed.url)  # type: ignore[no-untyped-call]
        for name in ("username", "password", "db"):
            if name in address:
                options[name] = address[name]
        if parsed.url.startswith("rediss:"):
            options["ssl"] = True
        sentinel = module.sentinel.Sentinel(
            list(parsed.addresses),
            sentinel_kwargs={
                "socket_timeout": CONNECT_S_MAX,
                "socket_connect_timeout": CONNECT_S_MAX,
                "retry": type(options["retry"])(NoBackoff(), 0),
            },
        )
        client = sentinel.master_for(parsed.service_name, **options)
    if module is redis:
        for each in (client, *sentinel.sentinels):
            pool = each.connection_pool
            pool.connection_class = keeping_deadline(pool.connection_class)
    leaving = leaving_replicas if module is redis else leaving_replicas_async
    client.connection_pool.connection_class = leaving(client.connection_pool.connection_class)
    _close_together(client, sentinel.sentinels)
    return client


def _close_together(client: Any, others: Sequence[Any]) -> None:
    is_async = hasattr(client, "aclose")
    name = "aclose" if is_async else "close"
    close_client = getattr(client, name)

    def close() -> None:
        close_client()
        for other in others:
            other.close()

    async def aclose(*arguments: Any) -> None:
        await close_client(*arguments)
        for other in others:
            await other.aclose()

    setattr(client, name, aclose if is_async else close)


_SHARE: Final = 0.5
"""Part of the time left that one answer may take: another node, or Sentinel, may answer instead."""


class BoundedPool(redis.ConnectionPool):
    """A pool of connections that keep to the deadline in force."""

    def __init__(self, connection_class: Any = redis.connection.Connection, **options: Any) -> None:
        bounded = keeping_deadline(connection_class)
        super().__init__(connection_class=leaving_replicas(bounded), **options)


@cache
def keeping_deadline(connection_class: Any) -> Any:
    """Return a kind of connection that keeps to the deadline in force."""
    if getattr(connection_class, "keeps_deadlines", False):
        return connection_class

    class Bounded(connection_class):  # type: ignore[misc]
        keeps_deadlines = True

        def connect(self, *arguments: Any, **options: Any) -> Any:
            self._limit_making()
            return super().connect(*arguments, **options)

        def _connect(self, *arguments: Any, **options: Any) -> Any:
            # Again: before this the Sentinels may have been asked where to go.
            self._limit_making()
            try:
                return super()._connect(*arguments, **options)
            except (TimeoutError, redis.exceptions.TimeoutError) as error:
                if isinstance(self, redis.SSLConnection):
                    raise NoTlsError from error
                raise

        def send_packed_command(self, *arguments: Any, **options: Any) -> Any:
            self._limit_answer()
            return super().send_packed_command(*arguments, **options)

        def read_response(self, *arguments: Any, **options: Any) -> Any:
            self._limit_answer()
            return super().read_response(*arguments, **options)

        def _limit_making(self) -> None:
            if (answer_s := _answer_s()) is not None:
                self.socket_connect_timeout = min(CONNECT_S_MAX, answer_s)
                self.socket_timeout = answer_s

        def _limit_answer(self) -> None:
            held = self._sock
            if held is not None and (answer_s := _answer_s()) is not None:
                held.settimeout(answer_s)

    Bounded.__name__ = Bounded.__qualname__ = f"Bounded{connection_class.__name__}"
    return Bounded


@cache
def _explaining_tls(connection_class: Any) -> Any:

    class Explaining(connection_class):  # type: ignore[misc]
        async def connect(self) -> None:
            try:
                await super().connect()
            except (TimeoutError, redis.exceptions.TimeoutError) as error:
                raise NoTlsError from error

    return Explaining


def _answer_s() -> float | None:
    deadline = current()
    if deadline is None:
        return None
    left_s = deadline.left_s()
    if left_s <= 0:
        raise redis.exceptions.TimeoutError("the call's time is up")
    return left_s * _SHARE
