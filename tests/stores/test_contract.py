"""The contract suite, on every store there is."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from breadbox.stores import open_custodian, open_store
from support.fake_store import FakeCustodian, FakePayloads, FakeStore
from support.redis_server import RedisServer
from support.store_contract import PIECE_BYTES, Faces, StoreContract


class TestFakeStore(StoreContract):
    @pytest.fixture
    def faces(self) -> Faces:
        payloads = FakePayloads()
        return Faces(FakeStore(payloads), lambda: FakeCustodian(payloads))


class TestFileStore(StoreContract):
    @pytest.fixture
    def faces(self, tmp_path: Path) -> Faces:
        url = f"file://{tmp_path}/a store"
        return Faces(open_store(url), lambda: open_custodian(url))


async def redis_faces(url: str) -> AsyncIterator[Faces]:
    faces = Faces(open_store(url, piece_size_bytes=PIECE_BYTES), lambda: open_custodian(url))
    yield faces
    faces.store.close()
    for custodian in faces.custodians:
        await custodian.close()


@pytest.mark.integration
class TestRedisOnUnixSocket(StoreContract):
    @pytest.fixture
    async def faces(self, redis_url: str) -> AsyncIterator[Faces]:
        async for faces in redis_faces(redis_url):
            yield faces


@pytest.mark.integration
class TestRedisOnTcp(StoreContract):
    @pytest.fixture
    async def faces(self, redis_server: RedisServer, redis_url: str) -> AsyncIterator[Faces]:
        del redis_url  # Only emptied.
        async for faces in redis_faces(redis_server.tcp_url):
            yield faces


@pytest.mark.integration
class TestRedisOverTls(StoreContract):
    @pytest.fixture
    async def faces(
        self, redis_server: RedisServer, redis_url: str, tls_proxy_address: tuple[str, int, str]
    ) -> AsyncIterator[Faces]:
        del redis_url  # Only emptied.
        host, port, authority = tls_proxy_address
        url = f"rediss://:{redis_server.password}@{host}:{port}/0?ssl_ca_certs={authority}"
        async for faces in redis_faces(url):
            yield faces
