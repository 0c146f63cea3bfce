"""Appends: confirmed before admission, in order, in batches; what nobody owns is deleted."""

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.config import BufferConfig, FullPolicy
from breadbox_server.deletions import DeletionQueue
from breadbox_server.metrics import Metrics
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.served import CALL_S, info_of, reason_of, served

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
DUPLICATE = fragment_pb2.ADMISSION_OUTCOME_DUPLICATE
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE
MISSING = fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING
BUFFER_FULL = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL
BYTES_FULL = fragment_pb2.ADMISSION_OUTCOME_BYTES_FULL


def outcomes(reply: pb.AppendFragmentsResponse) -> list[int]:
    return [result.outcome for result in reply.results]


async def test_a_fragment_whose_payload_is_not_there_is_not_admitted():
    async with served() as it:
        await it.start()
        missing = it.metadata(0)
        it.custodian.lose_everything()
        reply = await it.append(missing, it.metadata(0, worker_id="other"))
        buffer = await it.buffer()
        counted = it.server.metrics.registry.get_sample_value(
            "breadbox_payloads_missing_total", {"buffer": "default"}
        )
    assert [MISSING, ADMITTED] == outcomes(reply)
    assert 1 == buffer.state.chunk_count
    assert 1 == counted


async def test_a_fragment_is_admitted_once_its_payload_has_been_written_again():
    async with served() as it:
        await it.start()
        missing = it.metadata(0)
        it.custodian.unannounced.clear()
        first = await it.append(missing)
        it.custodian.unannounced.add(missing.payload.payload_id)
        second = await it.append(missing)
    assert [[MISSING], [ADMITTED]] == [outcomes(first), outcomes(second)]


async def test_no_later_fragment_of_a_worker_overtakes_one_whose_payload_is_not_there():
    """Admitted first, it would make the missing one a duplicate that nobody has."""
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start()
        first, lost, last = (it.metadata(index) for index in range(3))
        it.custodian.unannounced.remove(lost.payload.payload_id)
        before = await it.append(first, lost, it.metadata(0, worker_id="other"), last)
        it.custodian.unannounced.add(lost.payload.payload_id)
        after = await it.append(lost, last)
        buffer = await it.buffer()
    assert [ADMITTED, MISSING, ADMITTED, MISSING] == outcomes(before)
    assert [ADMITTED, ADMITTED] == outcomes(after)
    assert 1 == buffer.state.chunk_count
    assert 0 == buffer.state.counters["fragments_discarded_gap"]


async def test_a_stale_fragment_is_not_confirmed():
    async with served(BufferConfig(staleness_max=0)) as it:
        await it.start(model_version=5)
        reply = await it.append(it.metadata(0, version=1), it.metadata(1, version=5))
    assert [STALE, ADMITTED] == outcomes(reply)
    assert [1] == it.custodian.confirm_trips
    assert 1 == len(it.custodian.unannounced)


async def test_fragments_after_one_that_asks_to_wait_carry_its_outcome_unconfirmed():
    config = BufferConfig(capacity_chunks=2, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(2)
        reply = await it.append(it.metadata(2), it.metadata(0, worker_id="other"))
        kept = len(it.custodian.kept)
    assert [BUFFER_FULL, BUFFER_FULL] == outcomes(reply)
    assert 2 == kept


async def test_calls_that_wait_together_share_one_trip_to_the_store():
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(it.append(it.metadata(0, worker_id="first")))]
            await it.custodian.confirming.wait()
            calls += [
                group.create_task(it.append(it.metadata(0, worker_id=f"w{number}")))
                for number in range(20)
            ]
            gauge = "breadbox_pending_appends"
            registry = it.server.metrics.registry
            await eventually(lambda: registry.get_sample_value(gauge) == 21)
            it.custodian.may_confirm.set()
        assert [[ADMITTED]] * 21 == [outcomes(call.result()) for call in calls]
        assert 0 == registry.get_sample_value(gauge)
    assert [1, 20] == it.custodian.confirm_trips


async def test_a_large_request_is_admitted_in_slices_and_in_order():
    async with served() as it:
        await it.start()
        reply = await it.append(*(it.metadata(index) for index in range(1000)))
        buffer = await it.buffer()
    assert [ADMITTED] * 1000 == outcomes(reply)
    assert 1000 == buffer.state.chunk_count
    assert max(it.custodian.confirm_trips) <= 256


async def test_a_fragment_sent_twice_in_one_request_is_admitted_once():
    async with served() as it:
        await it.start()
        first, again = it.metadata(0), it.metadata(0)
        reply = await it.append(first, again)
    assert [ADMITTED, DUPLICATE] == outcomes(reply)
    assert {first.payload.payload_id} == it.custodian.kept
    assert {again.payload.payload_id} == it.custodian.unannounced


async def test_a_payload_that_two_fragments_claim_stays_with_the_first():
    async with served(unannounced_s=100.0) as it:
        await it.start()
        payload = it.custodian.write()
        claims = [it.metadata(0, worker_id=name, payload=payload) for name in ("a", "b")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(*claims)
        it.clock.advance(200.0)
        await it.append(it.metadata(0, worker_id="c"))
        buffer = await it.buffer()
    assert "ARGUMENT_INVALID" == reason_of(caught.value)
    assert 2 == buffer.state.chunk_count
    assert payload.payload_id not in it.custodian.deleted


async def test_a_payload_confirmed_for_a_fragment_that_became_stale_is_deleted_after_a_while():
    async with served(BufferConfig(staleness_max=0), unannounced_s=100.0) as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            appending = group.create_task(it.append(it.metadata(0)))
            await it.custodian.confirming.wait()
            await it.stub.PublishModel(
                pb.PublishModelRequest(session_id="run", model_version=1), timeout=CALL_S
            )
            it.custodian.may_confirm.set()
        (payload_id,) = it.custodian.kept
        it.clock.advance(101.0)
        await eventually(lambda: payload_id in it.custodian.deleted)
    assert [STALE] == outcomes(appending.result())


async def test_a_store_that_is_down_fails_the_append_and_a_retry_succeeds():
    async with served() as it:
        await it.start()
        fragment = it.metadata(0)
        it.custodian.is_down = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(fragment)
        it.custodian.is_down = False
        reply = await it.append(fragment)
    assert "STORE_UNAVAILABLE" == reason_of(caught.value)
    assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
    assert [ADMITTED] == outcomes(reply)


async def test_a_caller_that_goes_before_its_turn_takes_its_fragments_with_it():
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.append(it.metadata(0)))
            await it.custodian.confirming.wait()
            second = group.create_task(it.append(it.metadata(0, worker_id="gone")))
            registry = it.server.metrics.registry
            gauge = "breadbox_pending_appends"
            await eventually(lambda: registry.get_sample_value(gauge) == 2)
            second.cancel()
            await eventually(lambda: registry.get_sample_value(gauge) == 1)
            it.custodian.may_confirm.set()
            await first
        buffer = await it.buffer()
    assert 1 == buffer.state.chunk_count
    assert 1 == len(it.custodian.unannounced)


async def test_a_draining_server_answers_appends_that_were_under_way():
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            appending = group.create_task(_failure_of(it.append(it.metadata(0))))
            await it.custodian.confirming.wait()
            it.server.driver.drain()
            it.custodian.may_confirm.set()
    assert "DRAINING" == appending.result()


async def test_appends_ask_to_wait_while_deletions_have_fallen_behind():
    async with served() as it:
        await it.start()
        it.server.driver.deletions._limit = 2
        await it.fill(2)
        it.custodian.is_down = True
        await it.stub.EndSession(pb.EndSessionRequest(session_id="run"), timeout=CALL_S)
        it.custodian.is_down = False
        it.server.driver.deletions._custodian = Unreachable()
        await it.start("next")
        reply = await it.append(it.metadata(0, session_id="next"))
        it.server.driver.deletions._custodian = it.custodian
    assert [BYTES_FULL] == outcomes(reply)
    assert reply.HasField("retry_delay")
    assert (0, 0) == (reply.append_credit_count, reply.append_credit_bytes)


async def test_deletions_survive_a_store_that_is_down_for_a_while(monkeypatch):
    monkeypatch.setattr("breadbox_server.deletions.RETRY_DELAY_S", 0.0)
    custodian = FakeCustodian()
    queue = DeletionQueue(custodian, metrics=Metrics(CollectorRegistry()), limit=10)
    payload = custodian.write()
    await custodian.confirm([payload])
    custodian.is_down = True
    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run())
        queue.put([payload])
        await eventually(lambda: queue._metrics.store_errors.labels("delete")._value.get() > 2)
        custodian.is_down = False
        await queue.wait_empty()
        running.cancel()
    assert [payload.payload_id] == custodian.deleted


async def test_fragments_of_unknown_buffers_are_refused_before_they_queue():
    async with served() as it:
        request = pb.AppendFragmentsRequest(buffer="nowhere", fragments=[it.metadata(0)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.AppendFragments(request, timeout=CALL_S)
    assert "BUFFER_NOT_FOUND" == reason_of(caught.value)
    assert "nowhere" == info_of(caught.value).metadata["buffer"]


class Unreachable(FakeCustodian):
    """A store that never answers a deletion."""

    async def delete(self, references):
        await asyncio.Event().wait()


async def _failure_of(call) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    return "none"
