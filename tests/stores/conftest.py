"""Stores under test."""

from collections.abc import Iterator

import pytest

from support.redis_server import RedisServer
from support.tls_proxy import TlsProxy, make_certificate


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One redis-server for all tests of this directory; emptied between tests by `redis_url`."""
    with RedisServer(with_tcp=True, password="open-sesame") as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty Redis."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def tls_proxy_address(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, str]]:
    """Host, port and certificate authority of a TLS front of the Redis server."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    with TlsProxy(("127.0.0.1", redis_server.port), certificate, key) as proxy:
        yield "127.0.0.1", proxy.port, str(certificate)
