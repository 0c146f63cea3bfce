"""Appends that wait for room: who came first gets it first, and everybody is told in time."""

import asyncio
from functools import partial
from typing import Any

import grpc
import pytest

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.admission.append_queue import PROGRESS_S
from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.rules.waiting import PLACE_KEPT_S
from support.eventually import eventually
from support.served import CALL_S, Served, reason_of, served, span

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE
WRONG_SESSION = fragment_pb2.ADMISSION_OUTCOME_WRONG_SESSION
BUFFER_FULL = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL
BYTES_FULL = fragment_pb2.ADMISSION_OUTCOME_BYTES_FULL

WAIT_S = 10.0
ONE = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK, lease_s=3600.0)


class Line:
    """Producers of a full buffer."""

    def __init__(self, it: Served) -> None:
        self.it = it
        self.answered: list[str] = []
        self.calls: dict[str, asyncio.Task[list[int]]] = {}

    @property
    def waiting_count(self) -> int:
        return self.it.server.driver.appends.queue.waiting_count

    def send(self, name: str, *fragments: Any, wait_s: float = WAIT_S) -> asyncio.Task[list[int]]:
        """Append, one fragment of a worker of this name unless others are given."""
        sent = fragments or (self.it.metadata(0, worker_id=name),)

        async def call() -> list[int]:
            reply = await self.it.stub.AppendFragments(
                pb.AppendFragmentsRequest(fragments=sent, max_wait=span(wait_s)), timeout=CALL_S
            )
            self.answered.append(name)
            return [result.outcome for result in reply.results]

        task = self.calls[name] = asyncio.get_running_loop().create_task(call())
        return task

    async def join(self, *names: str) -> None:
        """Let producers wait, one behind the other."""
        for name in names:
            expected = self.waiting_count + 1
            self.send(name)
            await eventually(partial(self._is_joined_by, expected))

    def _is_joined_by(self, count: int) -> bool:
        return self.waiting_count == count

    async def outcomes(self) -> list[list[int]]:
        """What all were answered."""
        return [await call for call in self.calls.values()]

    async def reasons(self) -> list[str]:
        """Why all were refused."""
        await asyncio.wait(self.calls.values())
        failures = [call.exception() for call in self.calls.values()]
        return [reason_of(each) for each in failures if isinstance(each, grpc.RpcError)]


async def test_room_goes_to_who_has_waited_longest_at_once() -> None:
    """No time passes here: nobody has to come again for it."""
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a", "b", "c")
        for number, name in enumerate("abc"):
            await it.make_room(request_id=f"r{number}")
            assert [ADMITTED] == await line.calls[name]
        gauge = it.server.metrics.registry.get_sample_value("breadbox_waiting_appends")
    assert ["a", "b", "c"] == line.answered
    assert (0, 0) == (gauge, line.waiting_count)


async def test_much_room_at_once_is_given_in_order_and_to_as_many_as_it_is_for() -> None:
    config = BufferConfig(
        capacity_chunks=5, uses_max=1, full_policy=FullPolicy.BLOCK, sampler="oldest_first"
    )
    async with served(config) as it:
        await it.start()
        await it.fill(5)
        line = Line(it)
        names = [f"p{number}" for number in range(8)]
        await line.join(*names)
        await it.make_room(5)
        await eventually(lambda: len(line.answered) == 5)
        assert 3 == line.waiting_count
        # What was admitted first is fetched first. Answers of one turn may overtake each other.
        assert names[:5] == await it.make_room(5, request_id="again")
        await line.outcomes()
        assert names[5:] == await it.make_room(3, request_id="rest")


async def test_who_comes_when_there_is_room_stands_behind_those_who_wait_for_it() -> None:
    """Also where their payloads are still being confirmed."""
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("first")
        it.custodian.confirming.clear()
        it.custodian.may_confirm.clear()
        await it.make_room()
        await it.custodian.confirming.wait()
        late = line.send("late", wait_s=0.0)
        await eventually(lambda: it.server.driver.appends.queue.pending_count == 2)
        it.custodian.may_confirm.set()
        assert [BUFFER_FULL] == await late
        assert [ADMITTED] == await line.calls["first"]


async def test_who_may_not_wait_takes_no_place_from_those_who_do() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("first", "second")
        assert [BUFFER_FULL] == await line.send("hasty", wait_s=0.0)
        await it.make_room()
        assert [ADMITTED] == await line.calls["first"]
        assert 1 == line.waiting_count


async def test_a_fragment_that_closes_no_chunk_passes_those_who_wait_for_a_place() -> None:
    config = BufferConfig(fragments_per_chunk=2, capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(3)
        line = Line(it)
        line.send("w0", it.metadata(3))
        await eventually(lambda: line.waiting_count == 1)
        assert [ADMITTED] == await line.send("other")
        assert [BUFFER_FULL] == await line.send(
            "other", it.metadata(1, worker_id="other"), wait_s=0.0
        )


async def test_who_needs_fewer_bytes_does_not_take_those_that_another_one_waits_for() -> None:
    config = BufferConfig(capacity_bytes=1000, full_policy=FullPolicy.BLOCK, uses_max=1)
    async with served(config) as it:
        await it.start()
        await it.append(it.metadata(0, payload=it.custodian.write(500)))
        line = Line(it)
        line.send("large", it.metadata(0, worker_id="large", payload=it.custodian.write(900)))
        await eventually(lambda: line.waiting_count == 1)
        assert [BYTES_FULL] == await line.send("small", wait_s=0.0)
        await it.make_room()
        assert [ADMITTED] == await line.calls["large"]


async def test_nobody_waits_for_bytes_behind_one_for_whom_nothing_makes_room() -> None:
    """All bytes are open chunks': only who closes one lets a learner have something."""
    config = BufferConfig(
        fragments_per_chunk=2, capacity_bytes=1000, full_policy=FullPolicy.BLOCK, uses_max=1
    )
    async with served(config) as it:
        await it.start()
        await it.append(
            it.metadata(0), it.metadata(0, worker_id="w1", payload=it.custodian.write(500))
        )
        line = Line(it)
        large = it.metadata(0, worker_id="large", payload=it.custodian.write(600))
        line.send("large", large)
        await eventually(lambda: line.waiting_count == 1)
        assert [ADMITTED] == await line.send("closing", it.metadata(1))
        assert 1 == line.waiting_count


async def test_a_wait_that_is_over_is_answered_and_need_not_be_repeated_later() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        request = pb.AppendFragmentsRequest(
            fragments=[it.metadata(0, worker_id="patient")], max_wait=span(WAIT_S)
        )
        call = it.stub.AppendFragments(request, timeout=CALL_S)
        driver = it.server.driver
        await eventually(lambda: driver.appends.queue.waiting_count == 1)
        await asyncio.sleep(0.3)  # What a caller without patience would wait by itself.
        it.clock.advance(WAIT_S)
        reply = await call
        assert 0 == driver.appends.queue.waiting_count
    assert [BUFFER_FULL] == [result.outcome for result in reply.results]
    assert (0, 0) == (reply.retry_delay.seconds, reply.retry_delay.nanos)


@pytest.mark.parametrize(
    ("away_s", "first"), [(PLACE_KEPT_S - 1.0, "a"), (PLACE_KEPT_S + 1.0, "b")]
)
async def test_who_comes_again_soon_finds_its_place(away_s: float, first: str) -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a")
        line.send("b", wait_s=3 * WAIT_S)
        await eventually(lambda: line.waiting_count == 2)
        it.clock.advance(WAIT_S)
        assert [BUFFER_FULL] == await line.calls["a"]
        it.clock.advance(away_s)
        await line.join("a")
        await it.make_room()
        assert [ADMITTED] == await line.calls[first]
        assert 1 == line.waiting_count


async def test_a_caller_that_goes_away_leaves_its_turn_to_the_next() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("gone", "there")
        line.calls["gone"].cancel()
        await eventually(lambda: line.waiting_count == 1)
        await it.make_room()
        assert [ADMITTED] == await line.calls["there"]
        buffer = await it.buffer()
    assert 1 == buffer.state.chunk_count


async def test_a_second_attempt_takes_the_place_of_the_first() -> None:
    """Whose caller has lost its connection, and the server has not heard of that yet."""
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        fragment = it.metadata(0, worker_id="twice")
        first = line.send("first", fragment)
        await eventually(lambda: line.waiting_count == 1)
        await line.join("behind")
        second = line.send("second", fragment)
        assert [BUFFER_FULL] == await first
        await it.make_room()
        assert [ADMITTED] == await second
        assert 1 == line.waiting_count


async def test_who_waits_hears_at_once_of_a_session_that_is_over() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a", "b", "c")
        await it.start("next")
        outcomes = await line.outcomes()
    assert [[WRONG_SESSION]] * 3 == outcomes


async def test_who_waits_behind_others_hears_at_once_that_it_is_stale() -> None:
    config = BufferConfig(
        capacity_chunks=1, staleness_max=1, full_policy=FullPolicy.BLOCK, uses_max=1
    )
    async with served(config) as it:
        await it.start(model_version=5)
        await it.append(it.metadata(0, version=5))
        line = Line(it)
        line.send("fresh", it.metadata(0, worker_id="fresh", version=5))
        await eventually(lambda: line.waiting_count == 1)
        stale = line.send("stale", it.metadata(0, worker_id="stale", version=4))
        await eventually(lambda: line.waiting_count == 2)
        await it.stub.PublishModel(
            pb.PublishModelRequest(session_id="run", model_version=6), timeout=CALL_S
        )
        assert [STALE] == await stale
        assert 1 == line.waiting_count


async def test_who_waits_is_told_that_the_server_ends() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a", "b")
        it.server.driver.drain()
        reasons = await line.reasons()
    assert ["DRAINING"] * 2 == reasons


async def test_who_waits_is_told_that_the_buffer_is_gone() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a", "b")
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="default"), timeout=CALL_S)
        reasons = await line.reasons()
    assert ["BUFFER_NOT_FOUND"] * 2 == reasons


async def test_a_larger_buffer_lets_those_in_who_wait() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a", "b")
        request = pb.UpdateBufferRequest(name="default")
        request.config.capacity_chunks = 3
        await it.stub.UpdateBuffer(request, timeout=CALL_S)
        assert [[ADMITTED]] * 2 == await line.outcomes()


async def test_who_got_some_of_its_room_lets_others_go_first_and_hears_of_it_soon() -> None:
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        line = Line(it)
        many = line.send("many", *(it.metadata(index, worker_id="many") for index in range(3)))
        await eventually(lambda: line.waiting_count == 1)
        await line.join("one")
        await it.make_room(request_id="1")
        driver = it.server.driver
        await eventually(lambda: driver.core.describe(DEFAULT_BUFFER).chunk_count == 1)
        await it.make_room(request_id="2")
        assert [ADMITTED] == await line.calls["one"]
        assert not many.done()
        it.clock.advance(PROGRESS_S)
        assert [ADMITTED, BUFFER_FULL, BUFFER_FULL] == await many


async def test_beyond_the_limit_nobody_waits() -> None:
    async with served(ONE) as it:
        it.server.driver.appends.queue._waiting_max = 2  # noqa: SLF001 - no option sets it
        await it.start()
        await it.fill(1)
        line = Line(it)
        await line.join("a", "b")
        assert [BUFFER_FULL] == await line.send("c")
        await it.make_room()
        assert [ADMITTED] == await line.calls["a"]


async def test_those_who_wait_have_no_more_fragments_than_the_server_holds_for_them() -> None:
    """Else who appends many at a time would fill its memory while a buffer is full."""
    async with served(ONE) as it:
        it.server.driver.appends.queue._fragments_max = 5  # noqa: SLF001 - no option sets it
        await it.start()
        await it.fill(1)
        line = Line(it)
        for name in ("a", "b"):
            line.send(name, *(it.metadata(index, worker_id=name) for index in range(2)))
        await eventually(lambda: line.waiting_count == 2)
        assert [BUFFER_FULL] * 2 == await line.send(
            "c", *(it.metadata(index, worker_id="c") for index in range(2))
        )
        line.calls["a"].cancel()
        await eventually(lambda: line.waiting_count == 1)
        line.send("d", *(it.metadata(index, worker_id="d") for index in range(3)))
        await eventually(lambda: line.waiting_count == 2)


async def test_those_who_wait_for_room_hold_up_nobody_whose_buffer_has_some() -> None:
    """They do not count among those that are about to be decided, of which there is a bound."""
    async with served(ONE) as it:
        await it.start()
        await it.fill(1)
        await it.stub.CreateBuffer(pb.CreateBufferRequest(name="other"), timeout=CALL_S)
        await it.stub.StartSession(
            pb.StartSessionRequest(buffer="other", session_id="run"), timeout=CALL_S
        )
        line = Line(it)
        await line.join(*(f"p{number}" for number in range(20)))
        assert 0 == it.server.driver.appends.queue.pending_count
        reply = await it.stub.AppendFragments(
            pb.AppendFragmentsRequest(buffer="other", fragments=[it.metadata(0)]), timeout=CALL_S
        )
    assert [ADMITTED] == [result.outcome for result in reply.results]


async def test_a_negative_wait_is_refused() -> None:
    async with served() as it:
        await it.start()
        request = pb.AppendFragmentsRequest(fragments=[it.metadata(0)], max_wait=span(-1.0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.AppendFragments(request, timeout=CALL_S)
    assert "ARGUMENT_INVALID" == reason_of(caught.value)
