"""Appends that go by a stream: what the library does by itself when they come one after another."""

import asyncio
import itertools
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

import breadbox
from breadbox.model.errors import (
    DeadlineExceededError,
    ReplayBufferError,
    SchemaMismatchError,
    UnauthenticatedError,
)
from breadbox.model.types import AdmissionOutcome
from breadbox.operations import streaming
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.access.authorization import Role
from support.append_streams import is_open, open_stream, open_stream_sync
from support.callers import make_caller
from support.eventually import eventually, eventually_sync
from support.fake_service import FakeService, serving
from support.fragments import vector_fragment
from support.redis_server import RedisServer, free_port
from support.server_process import ServerProcess, plain_environment
from support.tiers import long_but
from support.token_files import line_of, write_token_file

pytestmark = pytest.mark.integration

COUNT = 40
KINDS = ("blocking", "asyncio")


@pytest.fixture
def server() -> Iterator[breadbox.Client]:
    with breadbox.local_server(capacity_chunks=1000) as client:
        client.start_session("s")
        yield client


def count_of(server: breadbox.Client) -> int:
    """Chunks in the buffer; each is of one fragment."""
    return server.get_buffer().state.chunk_count


def test_one_append_after_another_goes_by_a_stream_and_is_admitted_once(
    server: breadbox.Client,
) -> None:
    with breadbox.connect(server.address) as client:
        first = open_stream_sync(client, "w")
        results = [
            client.append(vector_fragment(index, worker_id="w"))
            for index in range(first, first + COUNT)
        ]
        assert is_open(client)
    assert [AdmissionOutcome.ADMITTED] * COUNT == [each.outcome for each in results]
    assert first + COUNT == count_of(server)


def test_threads_share_a_stream_and_their_appends_leave_together(
    server: breadbox.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    takes = streaming.Bundle.takes

    def count(self: streaming.Bundle, size_bytes: int) -> bool:
        sizes.append(size_bytes)
        return takes(self, size_bytes)

    monkeypatch.setattr(streaming.Bundle, "takes", count)
    with breadbox.connect(server.address) as client:
        begun = open_stream_sync(client, "first")

        def produce(number: int) -> None:
            for index in range(COUNT):
                client.append(vector_fragment(index, worker_id=f"w{number}"))

        threads = [threading.Thread(target=produce, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert is_open(client)
    assert begun + 24 * COUNT == count_of(server)
    assert len(sizes) > 12 * COUNT, "most went by the stream"


def test_a_stream_that_was_idle_is_left_for_another(
    server: breadbox.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "IDLE_S_MAX", 0.0)
    monkeypatch.setattr(streaming, "WORTH_COUNT", 0)
    with breadbox.connect(server.address) as client:
        results = [client.append(vector_fragment(index)) for index in range(COUNT)]
    assert [AdmissionOutcome.ADMITTED] * COUNT == [each.outcome for each in results]
    assert COUNT == count_of(server)


def test_a_stream_that_is_old_is_left_for_another_without_a_failed_append(
    server: breadbox.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "AGE_S_MAX", 0.05)
    monkeypatch.setattr(streaming, "WORTH_COUNT", 0)
    until = time.monotonic() + 1.0
    with breadbox.connect(server.address, reconnect_s=0.0) as client:
        for index in range(server.get_buffer().config.capacity_chunks or 0):
            client.append(vector_fragment(index))
            if time.monotonic() > until:
                break
    assert index + 1 == count_of(server)


def test_a_refused_append_is_told_as_by_a_call(server: breadbox.Client) -> None:
    with breadbox.connect(server.address) as client:
        first = open_stream_sync(client, "w")
        with pytest.raises(SchemaMismatchError, match="step_count: 4 wanted, 9 got"):
            client.append(vector_fragment(first, worker_id="w", step_count=9))
        assert is_open(client)


def test_a_client_that_is_closed_leaves_no_thread_behind(server: breadbox.Client) -> None:
    with breadbox.connect(server.address) as client:
        open_stream_sync(client, "w")
    give_up_at = time.monotonic() + 10.0
    while any(each.name == "breadbox-appends" for each in threading.enumerate()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_tasks_share_a_stream(server: breadbox.Client) -> None:
    async def produce() -> int:
        async with breadbox.aio.connect(server.address) as client:
            begun = await open_stream(client, "first")

            async def worker(number: int) -> None:
                for index in range(COUNT):
                    await client.append(vector_fragment(index, worker_id=f"w{number}"))

            async with asyncio.TaskGroup() as group:
                for number in range(24):
                    group.create_task(worker(number))
            assert is_open(client)
            return begun

    begun = asyncio.run(produce())
    assert begun + 24 * COUNT == count_of(server)


async def test_a_task_that_is_cancelled_takes_its_append_out_of_the_line(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path / 'store'}", "--capacity-chunks", "4"),
        *("--full-policy", "block", "--metrics-listen", "127.0.0.1:0"),
        log=tmp_path / "server.log",
    )

    def waiting_count() -> float:
        with urllib.request.urlopen(server.metrics_url, timeout=20) as answer:
            found = re.search(r"^breadbox_waiting_appends (\S+)", answer.read().decode(), re.M)
        assert found
        return float(found[1])

    with server:
        async with breadbox.aio.connect(server.address, append_wait_s=60.0) as client:
            await client.start_session("s")
            for index in range(4):
                await client.append(vector_fragment(index, worker_id="w"))
            while not is_open(client):
                await client.append(vector_fragment(0, worker_id="w"))  # A duplicate.
            fragment = vector_fragment(0, worker_id="late")
            late = asyncio.get_running_loop().create_task(client.append(fragment))
            await eventually(lambda: waiting_count() == 1)
            assert is_open(client)
            late.cancel()
            await eventually(lambda: waiting_count() == 0)
            with pytest.raises(asyncio.CancelledError):
                await late


PROGRAM = """
import sys, breadbox
sys.path[:0] = [{tests!r}]
from support.append_streams import open_stream_sync
client = breadbox.connect({address!r})
open_stream_sync(client, "w")
{what}
"""


def run(server: breadbox.Client, what: str) -> "subprocess.CompletedProcess[str]":
    """Run something in a process of its own that has a stream open."""
    tests = str(Path(__file__).resolve().parents[1])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(tests=tests, address=server.address, what=what)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=plain_environment(),
    )


def test_a_process_that_closes_nothing_ends_although_a_stream_is_open(
    server: breadbox.Client,
) -> None:
    began = time.monotonic()
    ended = run(server, "")
    assert (0, "") == (ended.returncode, ended.stderr)
    assert time.monotonic() - began < 30.0


def test_a_forked_process_has_a_client_of_its_own_and_the_stream_goes_on(
    server: breadbox.Client,
) -> None:
    what = f"""
import os
from support.fragments import vector_fragment
child = os.fork()
if not child:
    try:
        client.append(vector_fragment(0, worker_id="child"))
    except breadbox.errors.ClosedError:
        os._exit(7)
    os._exit(1)
_, ended = os.waitpid(child, 0)
for index in range({COUNT}):
    client.append(vector_fragment(index, worker_id="parent"))
print(os.waitstatus_to_exitcode(ended))
client.close()
"""
    ended = run(server, what)
    assert (0, "7") == (ended.returncode, ended.stdout.strip()), ended.stderr


# Servers that end, and ways that take no streams ------------------------------------------------


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose journal and store survive it."""
    with ServerProcess(
        *("--store", f"file://{tmp_path / 'store'}", "--capacity-chunks", "100000"),
        *("--journal", f"file://{tmp_path / 'journal'}", "--drain-grace-s", "5"),
        log=tmp_path / "server.log",
    ) as server:
        yield server


@pytest.mark.parametrize("how", long_but(1, ["killed", "ended"]))
@pytest.mark.parametrize("kind", long_but(1, KINDS))
async def test_nothing_is_lost_or_doubled_when_the_server_goes_under_a_stream(
    journaled: ServerProcess, kind: str, how: str
) -> None:
    ended = False
    outcomes: dict[tuple[int, int], AdmissionOutcome] = {}
    async with make_caller(kind, journaled.address, reconnect_s=30.0) as caller:
        await caller.call("start_session", "s")
        begun = await open_stream_of(caller)

        async def produce(number: int) -> None:
            index = 0
            while not ended:
                fragment = vector_fragment(index, worker_id=f"w{number}")
                result = await caller.call("append", fragment)
                outcomes[number, index] = result.outcome
                index += 1

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(produce(number))
            for _ in range(2):
                count = len(outcomes)
                await eventually(lambda: len(outcomes) > count + 60)  # noqa: B023 - awaited here
                stop = journaled.kill if how == "killed" else journaled.stop
                took_s = await asyncio.to_thread(timed, stop)
                assert took_s < 15.0
                await asyncio.to_thread(journaled.start)
            count = len(outcomes)
            await eventually(lambda: len(outcomes) > count + 60)
            ended = True
        buffer = await caller.call("get_buffer")
    allowed = {AdmissionOutcome.ADMITTED, AdmissionOutcome.DUPLICATE}
    assert set() == set(outcomes.values()) - allowed
    assert begun + len(outcomes) == buffer.state.chunk_count


@pytest.mark.parametrize("kind", KINDS)
async def test_small_payloads_ride_along_with_appends_of_a_stream(
    tmp_path: Path, kind: str
) -> None:
    """To a client that reaches no store."""
    nobody = f"redis://127.0.0.1:{free_port()}"
    with (
        RedisServer() as redis,
        ServerProcess(
            *("--store", redis.url, "--client-store", nobody), log=tmp_path / "server.log"
        ) as server,
    ):
        async with make_caller(kind, server.address, reconnect_s=0.5) as caller:
            await caller.call("start_session", "s")
            first = await open_stream_of(caller)
            for index in range(first, first + COUNT):
                await caller.call("append", vector_fragment(index, worker_id="first"))
            assert is_open(caller.client)
            grant = await caller.call("fetch_fragments", first + COUNT, 5.0)
            loaded = await caller.call("load_fragments", grant.fragments)
    assert list(range(first + COUNT)) == sorted(each.fragment_index for each in loaded)


def timed(call: Callable[[], Any]) -> float:
    """How long something takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


async def open_stream_of(caller: Any) -> int:
    """Append until a stream is open; gives how many fragments that took."""
    for index in itertools.count():
        await caller.call("append", vector_fragment(index, worker_id="first"))
        if is_open(caller.client):
            return index + 1
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_streams_is_asked_for_one_once(kind: str) -> None:
    fake = FakeService()
    fake.will("AppendFragments", *[admit] * (2 * COUNT))
    with serving(fake) as address:
        async with make_caller(kind, address, reconnect_s=0.0) as caller:
            for _ in range(COUNT):
                await caller.call("append_fragments", [METADATA])
    assert (COUNT, 1) == (len(fake.requests("AppendFragments")), fake.stream_count)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_way_on_which_streams_are_silent_costs_no_append_anything(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy that holds back what it has until the request is whole."""
    monkeypatch.setattr(streaming, "OPEN_S_MAX", 0.2)
    fake, is_over = FakeService(), threading.Event()

    def silent(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(is_over.set)
        is_over.wait(30)
        yield from ()

    fake.stream = silent
    fake.will("AppendFragments", *[admit] * 10_000)
    until = time.monotonic() + 1.0
    with serving(fake) as address:
        async with make_caller(kind, address, reconnect_s=0.0, deadline_s=5.0) as caller:
            while time.monotonic() < until:
                await caller.call("append_fragments", [METADATA])
            assert not is_open(caller.client)
            await eventually(is_over.is_set)
    assert 1 == fake.stream_count


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_falls_silent_is_left_and_its_append_sent_again(kind: str) -> None:
    fake = FakeService()
    is_left = threading.Event()

    def swallow(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(is_left.set)
        yield pb.AppendStreamResponse(credit=pb.AppendCredit(append_count=4, size_bytes=10**6))
        is_left.wait(30)

    fake.stream = swallow
    fake.will("AppendFragments", *[admit] * 10_000)
    with serving(fake) as address:
        async with make_caller(kind, address, deadline_s=0.5, reconnect_s=5.0) as caller:
            while not is_open(caller.client):
                await caller.call("append_fragments", [METADATA])
            reply = await caller.call("append_fragments", [METADATA])
            assert not is_open(caller.client)
            await eventually(is_left.is_set)
    assert [AdmissionOutcome.ADMITTED] == [each.outcome for each in reply.results]


@pytest.mark.parametrize("kind", KINDS)
async def test_after_silence_on_a_stream_the_next_address_is_asked(kind: str) -> None:
    """As after silence of a call: a server that was stopped is not asked once more by a call."""
    silent, leader, is_over = FakeService(), FakeService(), threading.Event()

    def swallow(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield pb.AppendStreamResponse(credit=pb.AppendCredit(append_count=4, size_bytes=10**6))
        is_over.wait(30)

    silent.stream = swallow
    for fake in (silent, leader):
        fake.will("AppendFragments", *[admit] * 10_000)
    with serving(silent) as first, serving(leader) as second:
        addresses = f"{first},{second}"
        async with make_caller(kind, addresses, deadline_s=0.5, reconnect_s=5.0) as caller:
            while not is_open(caller.client):
                await caller.call("append_fragments", [METADATA])
            asked = len(silent.requests("AppendFragments"))
            await caller.call("append_fragments", [METADATA])
        is_over.set()
    assert (asked, 1) == (
        len(silent.requests("AppendFragments")),
        len(leader.requests("AppendFragments")),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_that_a_server_tells_on_a_stream_is_told_and_no_silence(kind: str) -> None:
    fake = FakeService()

    def slow(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield pb.AppendStreamResponse(credit=pb.AppendCredit(append_count=4, size_bytes=10**6))
        told = status_pb2.Status(code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0], message="slow")
        for message in requests:
            answers = [
                pb.StreamedAnswer(call_id=each.call_id, error=told.SerializeToString())
                for each in message.appends
            ]
            yield pb.AppendStreamResponse(answers=answers)

    fake.stream = slow
    fake.will("AppendFragments", *[admit] * 10_000)
    with serving(fake) as address:
        async with make_caller(kind, address, reconnect_s=0.0) as caller:
            while not is_open(caller.client):
                await caller.call("append_fragments", [METADATA])
            with pytest.raises(DeadlineExceededError, match="slow"):
                await caller.call("append_fragments", [METADATA])
            assert is_open(caller.client)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_keeps_to_what_a_server_takes_on_a_stream(kind: str) -> None:
    """At most two on their way, and the others go by calls of their own."""
    fake = FakeService()
    most, on_the_way = 0, 0
    go_on = threading.Event()

    def slow(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        nonlocal most, on_the_way
        yield pb.AppendStreamResponse(credit=pb.AppendCredit(append_count=2, size_bytes=10**6))
        for message in requests:
            on_the_way += len(message.appends)
            most = max(most, on_the_way)
            if not go_on.wait(0.05):
                continue
            on_the_way -= len(message.appends)
            yield pb.AppendStreamResponse(
                answers=[
                    pb.StreamedAnswer(call_id=each.call_id, response=admit(each.append, context))
                    for each in message.appends
                ]
            )

    fake.stream = slow
    fake.will("AppendFragments", *[admit] * 10_000)
    with serving(fake) as address:
        async with make_caller(kind, address, deadline_s=2.0, reconnect_s=10.0) as caller:
            while not is_open(caller.client):
                await caller.call("append_fragments", [METADATA])
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(caller.call("append_fragments", [METADATA]))
    assert 2 == most


LIES: dict[str, Any] = {
    "no bounds": pb.AppendStreamResponse(
        credit=pb.AppendCredit(append_count=2**62, size_bytes=2**62)
    ),
    "negative": pb.AppendStreamResponse(credit=pb.AppendCredit(append_count=-1, size_bytes=-1)),
    "strange answers": pb.AppendStreamResponse(
        credit=pb.AppendCredit(append_count=9, size_bytes=10**6),
        answers=[
            pb.StreamedAnswer(call_id=call_id, error=b"\xff" * call_id) for call_id in range(1, 400)
        ],
    ),
    "nothing": pb.AppendStreamResponse(),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_lies_on_a_stream_harms_nobody_but_its_own_appends(
    kind: str, lie: str
) -> None:
    fake = FakeService()

    def strange(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for message in itertools.chain([None], requests):
            yield LIES[lie]
            if message is not None:
                context.set_trailing_metadata((("breadbox-taken", "9" * 5000),))
                return

    fake.stream = strange
    fake.will("AppendFragments", *[admit] * 10_000)
    with serving(fake) as address:
        async with make_caller(kind, address, deadline_s=1.0, reconnect_s=2.0) as caller:
            for _ in range(COUNT):
                with suppress(ReplayBufferError):
                    await caller.call("append_fragments", [METADATA])
            fake.will("ListBuffers", pb.ListBuffersResponse())
            assert () == await caller.call("list_buffers")
    assert fake.stream_count >= 1
    assert fake.requests("AppendFragments")


METADATA = breadbox.model.types.FragmentMetadata(
    worker_id="w",
    fragment_index=0,
    session_id="s",
    model_version_min=0,
    model_version_max=0,
    payload=breadbox.model.types.PayloadReference("0" * 32, 100, 0),
    step_count=8,
)


def admit(request: Any, context: grpc.ServicerContext) -> pb.AppendFragmentsResponse:
    """Admit all of an append."""
    admitted = pb.AppendResult(outcome=fragment_pb2.ADMISSION_OUTCOME_ADMITTED)
    return pb.AppendFragmentsResponse(results=[admitted] * len(request.fragments))


def test_a_token_that_is_taken_back_ends_the_appends_of_its_stream(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = write_token_file(path)
    with ServerProcess(
        *("--store", f"file://{tmp_path / 'store'}", "--tokens", str(path)),
        log=tmp_path / "server.log",
    ) as server:
        with breadbox.connect(server.address, token=tokens[Role.ADMIN]) as admin:
            admin.start_session("s")
        with (
            breadbox.connect(server.address, token=tokens[Role.PRODUCER]) as taken,
            breadbox.connect(server.address, token=tokens[Role.ADMIN]) as kept,
        ):
            first = open_stream_sync(taken, "taken")
            open_stream_sync(kept, "kept")
            path.write_text(line_of("admin admin", tokens[Role.ADMIN]))
            eventually_sync(lambda: not is_open(taken), "the stream to be ended")
            with pytest.raises(UnauthenticatedError):
                taken.append(vector_fragment(first, worker_id="taken"))
            kept.append(vector_fragment(0, worker_id="other"))
            assert is_open(kept)
