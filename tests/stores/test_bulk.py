"""Payloads received and digested by one call: each is whole, or is left to be read alone."""

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from breadbox.stores import bulk
from breadbox.stores.bulk import File, Question, new_digests, read_files, receive
from breadbox.stores.deadline import Deadline
from breadbox.stores.redis.wire import Wire
from support.compiler import needs_compiler

pytestmark = needs_compiler

NONE = new_digests([])
GONE = "/nonexistent/payload"


def memory_of(size_bytes: int) -> list[memoryview]:
    """Memory in several parts, one of them empty."""
    memory = memoryview(bytearray(size_bytes))
    return [memory[: size_bytes // 3], memory[:0], memory[size_bytes // 3 :]]


def joined(memory: Sequence[memoryview]) -> bytes:
    return b"".join(memory)


def file_of(path: Path | str, size_bytes: int) -> File:
    """A file to read, of which each part with bytes is a block."""
    cut = size_bytes // 3
    blocks = [(start, end) for start, end in ((0, cut), (cut, size_bytes)) if start < end]
    return File((GONE, GONE, str(path)), memory_of(size_bytes), blocks)


def digests_of(file: File) -> list[int]:
    body = joined(file.memory)
    return [xxhash.xxh3_64_intdigest(body[start:end]) for start, end in file.blocks]


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends, of which the first waits for 50 ms at most, in a mode that does not block."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 50_000))
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_the_library_is_compiled_here() -> None:
    """Elsewhere all that follows is done step by step, and a learner's loop stops its loads."""
    assert bulk.is_compiled


def body_of(number: int) -> bytes:
    return number.to_bytes(2, "little") * (5 + 700 * number)


@pytest.mark.parametrize("count", [0, 1, 65])
def test_files_are_read_into_their_memory_and_digested(tmp_path: Path, count: int) -> None:
    files = []
    for number in range(count):
        path = tmp_path / str(number)
        path.write_bytes(body_of(number))
        files.append(file_of(path, len(body_of(number))))
    found = read_files(files)
    bodies = [joined(file.memory) for file in files]
    assert [body_of(number) for number in range(count)] == bodies
    assert [digests_of(file) for file in files] == found


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_any_cut_are_digested(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket], seed: int
) -> None:
    rng = random.Random(seed)
    ours, theirs = connection
    body = rng.randbytes(rng.choice([1, 1000, 3_000_000]))
    whole = memoryview(bytearray(len(body)))

    def cut() -> list[tuple[int, int]]:
        places = sorted(rng.randint(0, len(body)) for _ in range(rng.randint(0, 200)))
        return [*zip([0, *places], [*places, len(body)], strict=True)]

    blocks = [each for each in cut() if each[0] < each[1] and rng.random() < 0.7]
    digests = [xxhash.xxh3_64_intdigest(body[start:end]) for start, end in blocks]
    (tmp_path / "payload").write_bytes(body)
    paths = (GONE, str(tmp_path / "payload"), GONE)
    assert [digests] == read_files([File(paths, [whole[a:b] for a, b in cut()], blocks)])
    assert body == bytes(whole)

    whole[:] = bytes(len(body))
    pairs = cut()
    values = [[whole[a : (a + b) // 2], whole[(a + b) // 2 : b]] for a, b in pairs]
    frames = [memoryview(bytearray(rng.randint(0, 9))) for _ in range(len(values) + 1)]
    sent = [rng.randbytes(len(frame)) for frame in frames]
    stream = sent[0]
    for (a, b), frame in zip(pairs, sent[1:], strict=True):
        stream += body[a:b] + frame
    sender = threading.Thread(target=theirs.sendall, args=(stream,))
    sender.start()
    done, found = 0, new_digests(blocks)
    while done < len(stream):
        done = receive(ours.fileno(), frames, values, blocks, done, [], found)
    sender.join()
    assert body == bytes(whole)
    assert sent == [bytes(frame) for frame in frames]
    assert digests == [*found]


def test_questions_are_sent_when_enough_was_answered(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    values = [memory_of(30)]
    frames = [memoryview(b"")] * 2
    questions = [Question(0, b"first"), Question(10, b"second"), Question(30, b"last")]
    done = receive(ours.fileno(), frames, values, [], 0, questions, NONE)
    assert (0, b"first") == (done, theirs.recv(100))
    theirs.sendall(b"a" * 20)
    done = receive(ours.fileno(), frames, values, [], 0, questions[1:], NONE)
    assert (20, b"second") == (done, theirs.recv(100))
    theirs.sendall(b"b" * 20)
    done = receive(ours.fileno(), frames, values, [], 20, questions[2:], NONE)
    assert (30, b"last") == (done, theirs.recv(100))
    assert b"a" * 20 + b"b" * 10 == joined(values[0])
    assert b"b" * 10 == ours.recv(100)
    assert not os.get_blocking(ours.fileno())


def test_nothing_is_waited_for_that_was_not_asked_for(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 20, 0))
    values = [memory_of(30)]

    def answer() -> None:
        for size_bytes in (10, 20):
            assert theirs.recv(8) == b"question"
            theirs.sendall(b"a" * size_bytes)

    answering = threading.Thread(target=answer)
    answering.start()
    questions = [Question(0, b"question"), Question(10, b"question")]
    began = time.monotonic()
    done = receive(ours.fileno(), [memoryview(b"")] * 2, values, [], 0, questions, NONE)
    answering.join()
    assert done == 30
    assert time.monotonic() - began < 10


@contextmanager
def dripping(theirs: socket.socket, stream: bytes, step_bytes: int) -> Iterator[None]:
    """Send a little of a stream 50 times a second until the block ends."""
    ends = threading.Event()

    def drip() -> None:
        for at in range(0, len(stream), step_bytes):
            theirs.sendall(stream[at : at + step_bytes])
            if ends.wait(0.02):
                return

    sending = threading.Thread(target=drip)
    sending.start()
    try:
        yield
    finally:
        ends.set()
        sending.join()


def test_bytes_that_drip_are_received_by_short_calls_with_the_same_digests(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    body = random.Random(7).randbytes(10_000)
    values, blocks = [memory_of(len(body))], [(0, 3333), (3333, 3333), (3333, 10_000)]
    found, done, calls, longest_s = new_digests(blocks), 0, 0, 0.0
    with dripping(theirs, body, 200):
        while done < len(body):
            began = time.monotonic()
            done = receive(ours.fileno(), [memoryview(b"")] * 2, values, blocks, done, [], found)
            longest_s = max(longest_s, time.monotonic() - began)
            calls += 1
    assert body == joined(values[0])
    assert [xxhash.xxh3_64_intdigest(body[start:end]) for start, end in blocks] == [*found]
    assert calls > 3
    assert longest_s < 5


def test_digests_of_earlier_calls_are_not_made_again(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    values, blocks, found = [memory_of(20)], [(0, 10), (10, 20)], new_digests([(0, 10), (10, 20)])
    theirs.sendall(b"a" * 10)
    done = receive(ours.fileno(), [memoryview(b"")] * 2, values, blocks, 0, [], found)
    assert (10, xxhash.xxh3_64_intdigest(b"a" * 10)) == (done, found[0])
    found[0] = 1
    theirs.sendall(b"b" * 10)
    receive(ours.fileno(), [memoryview(b"")] * 2, values, blocks, done, [], found)
    assert [1, xxhash.xxh3_64_intdigest(b"b" * 10)] == [*found]


class InterruptedByTestError(Exception):
    """What the signal's handler raises, as Python does for Ctrl-C."""


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_signal_ends_a_load_from_a_connection_that_drips(
    connection: tuple[socket.socket, socket.socket], is_compiled: bool
) -> None:
    ours, theirs = connection

    def interrupt(*_: object) -> None:
        raise InterruptedByTestError

    wire = Wire(SimpleNamespace(_sock=ours), Deadline(60.0))
    value = memoryview(bytearray(100_000))

    def load() -> None:
        if is_compiled:
            wire.receive_values([[value]], [], [])
        else:
            assert wire.bulk_length() == len(value)
            wire.receive_into(value)

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with (
            dripping(theirs, b"$100000\r\n" + bytes(100_000), 100),
            pytest.raises(InterruptedByTestError),
        ):
            load()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - began < 10, "all of it takes 20 s"


def test_many_files_are_read_by_short_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as take longer than one call: 20,000 files of 3 blocks."""
    (tmp_path / "whole").write_bytes(b"w" * 4096)
    calls: list[int] = []
    library = bulk._library  # noqa: SLF001 - counted

    def read(first: int, *arguments: object) -> int:
        calls.append(first)
        return int(library.read_files(first, *arguments))

    counting = SimpleNamespace(read_files=read)
    monkeypatch.setattr(bulk, "_library", counting)
    one = file_of(tmp_path / "whole", 4096)
    found = read_files([one] * 60_000)
    assert [digests_of(one)] * 60_000 == found
    assert [0] == calls[:1]
    assert sorted(set(calls)) == calls
    assert len(calls) > 1


def test_an_end_of_the_connection_is_an_error(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connection
    frames = [memoryview(b"")] * 2
    theirs.sendall(b"x" * 10)
    theirs.close()
    with pytest.raises(ConnectionResetError):
        receive(ours.fileno(), frames, [memory_of(30)], [], 0, [], NONE)
    with pytest.raises(BrokenPipeError):
        receive(ours.fileno(), frames, [memory_of(30)], [], 0, [Question(0, b"question")], NONE)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: None, id="gone"),
        pytest.param(lambda path: path.write_bytes(b"x" * 99), id="shorter"),
        pytest.param(lambda path: path.write_bytes(b"x" * 101), id="longer"),
        pytest.param(lambda path: path.mkdir(), id="directory"),
        pytest.param(lambda path: os.mkfifo(path), id="pipe"),
        pytest.param(lambda path: path.symlink_to("whole"), id="link"),
    ],
)
def test_a_file_that_is_not_as_expected_is_left_and_those_before_it_come(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "whole").write_bytes(b"w" * 100)
    make(tmp_path / "odd")
    files = [file_of(tmp_path / name, 100) for name in ("whole", "whole", "odd")]
    found = read_files(files)
    assert [*map(digests_of, files[:2]), None] == found
    assert [b"w" * 100] * 2 == [joined(file.memory) for file in files[:2]]


def test_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"w" * 100)
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        read_files([file_of(tmp_path / name, size) for name, size in (("whole", 100), ("gone", 9))])
        read_files([file_of(tmp_path / "whole", 99)])
    assert before == len(os.listdir("/dev/fd"))
