"""Redis at its worst: full, gone, slow, half-spoken. No mixed bytes, no hung caller, no secret."""

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from breadbox.model.errors import (
    PayloadCorruptError,
    PayloadMissingError,
    StoreFullError,
    StoreUnavailableError,
)
from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation, Part, PartsStore, PayloadReceiver
from breadbox.stores.deadline import Deadline
from breadbox.stores.keys import new_payload_id, piece_key
from support.redis_server import RedisServer
from support.store_contract import (
    HEAD_BYTES,
    PIECE_BYTES,
    RangeReceiver,
    in_buffers,
    payload_of,
    read_back,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture
def full_server() -> Iterator[RedisServer]:
    with RedisServer(memory_bytes_max=6_000_000) as server:
        yield server


def test_a_full_redis_asks_to_wait_and_keeps_nothing_of_the_call(full_server: RedisServer) -> None:
    store = open_store(full_server.url, piece_size_bytes=PIECE_BYTES)
    payload = payload_of(1_000_000)
    kept = store.write_many([in_buffers(payload)])
    with full_server.client() as client:
        before = client.dbsize()
        with pytest.raises(StoreFullError) as caught:
            store.write_many([in_buffers(payload)] * 30)
        assert before == client.dbsize()
    assert caught.value.retry_delay_s > 0
    assert [payload] == read_back(store, kept)
    store.write_many([in_buffers(payload)])
    store.close()


def test_unannounced_payloads_expire_and_confirmed_ones_do_not(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url, unannounced_s=321.0, piece_size_bytes=PIECE_BYTES)
    (reference,) = store.write_many([in_buffers(payload_of(3 * PIECE_BYTES))])
    with redis_server.client() as client:
        for piece in range(3):
            ttl_ms = client.pttl(piece_key(reference.payload_id, piece))
            assert 0 < ttl_ms <= 321_000
    store.close()


async def test_confirming_takes_the_expiry_from_every_piece(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url, piece_size_bytes=PIECE_BYTES)
    custodian = open_custodian(redis_server.url)
    (reference,) = store.write_many([in_buffers(payload_of(3 * PIECE_BYTES))])
    assert [Confirmation.THERE] == await custodian.confirm([reference])
    with redis_server.client() as client:
        keys = [piece_key(reference.payload_id, piece) for piece in range(3)]
        assert [-1, -1, -1] == [client.pttl(key) for key in keys]
        client.delete(keys[1])
    assert [Confirmation.MISSING] == await custodian.confirm([reference])
    with pytest.raises(PayloadMissingError):
        read_back(store, [reference])
    store.close()
    await custodian.close()


async def test_of_a_payload_whose_pieces_are_partly_gone_the_rest_goes_on_to_expire(
    redis_server: RedisServer,
) -> None:
    """Kept, the rest would belong to nobody and stay for ever."""
    store = open_store(redis_server.url, piece_size_bytes=PIECE_BYTES)
    custodian = open_custodian(redis_server.url)
    references = store.write_many(
        [in_buffers(payload_of(size)) for size in (100, 3 * PIECE_BYTES, 2 * PIECE_BYTES, 100)]
    )
    with redis_server.client() as client:
        client.delete(
            piece_key(references[1].payload_id, 2), piece_key(references[3].payload_id, 0)
        )
        assert [
            Confirmation.THERE,
            Confirmation.MISSING,
            Confirmation.THERE,
            Confirmation.MISSING,
        ] == await custodian.confirm(references)
        left = [piece_key(references[1].payload_id, piece) for piece in range(2)]
        assert all(client.pttl(key) > 0 for key in left)
        kept = [piece_key(references[2].payload_id, piece) for piece in range(2)]
        kept.append(piece_key(references[0].payload_id, 0))
        assert [-1] * 3 == [client.pttl(key) for key in kept]
    store.close()
    await custodian.close()


async def test_thousands_of_pieces_are_confirmed_in_one_call(redis_server: RedisServer) -> None:
    store, custodian = open_store(redis_server.url), open_custodian(redis_server.url)
    references = store.write_many([[memoryview(payload_of(100))] for _ in range(2500)])
    store.delete_many(references[1700:1701])
    wanted = [Confirmation(position != 1700) for position in range(2500)]
    assert wanted == await custodian.confirm(references)
    await custodian.delete(references)
    assert not any(await custodian.present(references))
    store.close()
    await custodian.close()


def test_a_piece_of_another_length_is_corrupt(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url, piece_size_bytes=PIECE_BYTES)
    (reference,) = store.write_many([in_buffers(payload_of(3 * PIECE_BYTES))])
    with redis_server.client() as client:
        client.append(piece_key(reference.payload_id, 1), b"x")
    with pytest.raises(PayloadCorruptError):
        read_back(store, [reference])
    store.close()


def test_another_type_of_value_is_an_error_of_ours(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url)
    (reference,) = store.write_many([in_buffers(payload_of(1000))])
    with redis_server.client() as client:
        key = piece_key(reference.payload_id, 0)
        client.delete(key)
        client.lpush(key, "x")
    with pytest.raises(StoreUnavailableError, match="WRONGTYPE"):
        read_back(store, [reference])
    store.close()


def test_clients_reconnect_to_a_restarted_redis() -> None:
    with RedisServer(is_durable=True) as server:
        store = open_store(server.url, piece_size_bytes=PIECE_BYTES)
        payload = payload_of(2 * PIECE_BYTES)
        references = store.write_many([in_buffers(payload)])
        server.kill()
        server.start()
        assert [payload] == read_back(store, references)
        assert [payload] == read_back(store, store.write_many([in_buffers(payload)]))
        store.close()


async def test_a_redis_that_is_gone_is_unavailable_to_both_faces(tmp_path: Path) -> None:
    url = f"unix://:secret-word@{tmp_path}/none.sock"
    store, custodian = open_store(url), open_custodian(url)
    with pytest.raises(StoreUnavailableError) as caught:
        store.write_many([in_buffers(payload_of(1000))])
    assert "secret-word" not in str(caught.value)
    with pytest.raises(StoreUnavailableError):
        read_back(store, [PayloadReference("0" * 32, 1000)])
    with pytest.raises(StoreUnavailableError):
        await custodian.ping()
    with pytest.raises(StoreUnavailableError):
        await custodian.confirm([PayloadReference("0" * 32, 1000)])
    store.close()
    await custodian.close()


async def test_wrong_credentials_are_refused_without_being_shown(redis_server: RedisServer) -> None:
    url = redis_server.url.replace("open-sesame", "secret-word")
    store, custodian = open_store(url), open_custodian(url)
    with pytest.raises(StoreUnavailableError, match="credentials") as caught:
        store.write_many([in_buffers(payload_of(1000))])
    assert "secret-word" not in str(caught.value)
    with pytest.raises(StoreUnavailableError, match="credentials"):
        await custodian.ping()
    store.close()
    await custodian.close()


async def test_an_encrypted_url_of_a_redis_without_tls_is_told_as_such() -> None:
    """Redis waits for the end of a line that the greeting does not have, and says nothing."""
    with RedisServer(with_tcp=True) as server:
        url = server.tcp_url.replace("redis:", "rediss:")
        store = open_store(url, deadline=Deadline(0.5))
        custodian = open_custodian(url, answer_s=0.5)
        with pytest.raises(StoreUnavailableError, match="begins with redis://, not rediss://"):
            store.write_many([in_buffers(payload_of(1000))])
        with pytest.raises(StoreUnavailableError, match="begins with redis://, not rediss://"):
            await custodian.ping()
        store.close()
        await custodian.close()


# A server that misbehaves on purpose, behind the real one's protocol.


class RudeRedis:
    """Answers the handshake, then hands each further connection to a script."""

    def __init__(self, path: Path, *scripts: Callable[[socket.socket], None]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._scripts = scripts
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.served = 0

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.served += 1
                script(connection)

    @contextmanager
    def running(self) -> Iterator["RudeRedis"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join(timeout=10)
            self._listener.close()


def until(connection: socket.socket, word: bytes) -> None:
    """Answer the handshake's commands until one that holds `word` arrives."""
    received = b""
    while word not in received:
        received = connection.recv(65536)
        if not received:
            return
        for command in re.findall(rb"\$\d+\r\n(PING|CLIENT|SELECT|AUTH)\r\n", received):
            connection.sendall(b"+PONG\r\n" if command == b"PING" else b"+OK\r\n")


def breaks_off(answer: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        until(connection, b"GET\r\n")
        connection.sendall(answer)

    return script


@pytest.mark.parametrize(
    "answer",
    [b"", b"$", b"$1000\r", b"$1000\r\n" + b"x" * 500, b"$1000\r\n" + b"x" * 1000, b"nonsense\r\n"],
    ids=["nothing", "half a line", "no line end", "half a value", "no value end", "nonsense"],
)
def test_a_connection_lost_in_the_middle_of_a_value_is_tried_again(
    tmp_path: Path, answer: bytes
) -> None:
    payload = payload_of(1000)

    def answers(connection: socket.socket) -> None:
        until(connection, b"GET\r\n")
        connection.sendall(b"$1000\r\n" + payload + b"\r\n")

    path = tmp_path / "rude.sock"
    with RudeRedis(path, breaks_off(answer), answers).running() as rude:
        store = open_store(f"unix://{path}")
        assert [payload] == read_back(store, [PayloadReference("0" * 32, 1000)])
        assert 2 == rude.served
        store.close()


def test_a_connection_that_is_lost_again_and_again_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "rude.sock"
    with RudeRedis(path, *[breaks_off(b"$1000\r\nxxx")] * 3).running() as rude:
        store = open_store(f"unix://{path}")
        with pytest.raises(StoreUnavailableError):
            read_back(store, [PayloadReference("0" * 32, 1000)])
        assert 3 == rude.served
        store.close()


@pytest.mark.parametrize(
    "line", [b"-LOADING Redis is loading", b"-MASTERDOWN Link is down", b"-READONLY replica"]
)
def test_a_redis_that_is_not_ready_is_unavailable(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rude.sock"
    with RudeRedis(path, *[breaks_off(line + b"\r\n")] * 3).running():
        store = open_store(f"unix://{path}")
        with pytest.raises(StoreUnavailableError) as caught:
            read_back(store, [PayloadReference("0" * 32, 1000)])
        assert line.split()[0][1:].decode() in str(caught.value)
        store.close()


def test_values_that_arrive_in_dribs_are_put_together(tmp_path: Path) -> None:
    payload = payload_of(1000)

    def dribbles(connection: socket.socket) -> None:
        until(connection, b"GET\r\n")
        for byte in b"$1000\r\n" + payload + b"\r\n":
            connection.sendall(bytes([byte]))

    path = tmp_path / "rude.sock"
    with RudeRedis(path, dribbles).running():
        store = open_store(f"unix://{path}")
        assert [payload] == read_back(store, [PayloadReference("0" * 32, 1000)])
        store.close()


def test_a_payload_started_again_is_received_anew(tmp_path: Path) -> None:
    """The receiver is asked again, so that bytes of the broken try are all overwritten."""
    payload = payload_of(2000)

    def answers(connection: socket.socket) -> None:
        until(connection, b"GET\r\n")
        connection.sendall(b"$2000\r\n" + payload + b"\r\n")

    path = tmp_path / "rude.sock"
    receiver = RangeReceiver([(HEAD_BYTES, 2000)], wants_whole=True)
    with RudeRedis(path, breaks_off(b"$2000\r\n" + b"x" * 1500), answers).running():
        store = open_store(f"unix://{path}")
        store.read_many([PayloadReference("0" * 32, 2000)], receiver)
        store.close()
    assert payload == receiver.heads[0] + bytes(receiver.received[0][0])
    assert [0] == receiver.order


def test_many_threads_share_a_store(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url, piece_size_bytes=PIECE_BYTES)
    failures: list[str] = []

    def work() -> None:
        for _ in range(10):
            payloads = [payload_of(3 * PIECE_BYTES + 1), payload_of(100)]
            references = store.write_many([in_buffers(payload) for payload in payloads])
            if payloads != read_back(store, references):
                failures.append("mixed")
            store.delete_many(references)

    threads = [threading.Thread(target=work) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [] == failures
    store.close()


@pytest.mark.parametrize("was_silent", [True, False])
def test_what_a_failed_write_left_is_deleted_unless_the_store_was_silent(was_silent: bool) -> None:
    """A deletion would wait for a silent store as long again."""
    store = _Failing(StoreUnavailableError("away", was_silent=was_silent))
    with pytest.raises(StoreUnavailableError):
        store.write_many([in_buffers(b"some"), in_buffers(b"more")])
    assert (0 if was_silent else 2) == len(store.discarded)


class _Failing(PartsStore):
    def __init__(self, failure: StoreUnavailableError) -> None:
        super().__init__(silence_s=1.0)
        self._failure = failure
        self.discarded: list[PayloadReference] = []

    def new_reference(self, size_bytes: int) -> PayloadReference:
        return PayloadReference(new_payload_id(), size_bytes, 0)

    def write_parts(self, parts: Sequence[Part]) -> None:
        raise self._failure

    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        self.discarded.extend(references)

    def read_parts(self, parts: Sequence[Part]) -> None:
        raise self._failure

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        raise self._failure

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        raise self._failure
