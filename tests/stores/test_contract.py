"""The contract suite, on every store there is."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from breadbox.model.options import ClientOptions
from breadbox.model.types import PayloadReference
from breadbox.stores import groups, open_custodian, open_store
from breadbox.stores.gateway import GatewayStore
from breadbox.testing import start_server
from breadbox.wire.route import Route
from support.eventually import eventually_sync
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


class TestGroupFiles(StoreContract):
    """The store of a directory in memory, with all payloads in shared files."""

    @pytest.fixture
    def faces(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faces]:
        monkeypatch.setattr(groups, "GROUP_COUNT_MIN", 1)
        monkeypatch.setattr(groups, "GROUPED_SIZE_BYTES_MAX", groups.GROUP_BYTES_MAX)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            url = f"file://{folder}/a store"
            custodian = open_custodian(url)
            yield Faces(open_store(url), lambda: open_custodian(url), [custodian])


class Prompt(GatewayStore):
    """Comes back from a deletion once the server is done with it, as other stores do."""

    def __init__(self, address: str, url: str) -> None:
        super().__init__(Route(address), ClientOptions())
        self._url = url

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        super().delete_many(references)
        ids = {each.payload_id for each in references}
        folder = Path(self._url.removeprefix("file://")) / "unannounced"
        eventually_sync(lambda: not ids & set(os.listdir(folder)), "the deletion")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address of a server, and the URL of its store, which nobody else writes to."""
    url = f"file://{tmp_path_factory.mktemp('store')}"
    with start_server(store=url, options=["--gateway", "--journal", "none"]) as server:
        yield server.address, url


@pytest.mark.integration
class TestGateway(StoreContract):
    """Of a directory, whose custodian looks at it beside the server."""

    @pytest.fixture
    async def faces(self, gateway: tuple[str, str]) -> AsyncIterator[Faces]:
        address, url = gateway
        faces = Faces(Prompt(address, url), lambda: open_custodian(url))
        kept = [each async for each in faces.custodian.confirmed()]
        await faces.custodian.delete_ids(kept)
        await faces.custodian.forget_other_journals()
        yield faces
        faces.store.close()


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
