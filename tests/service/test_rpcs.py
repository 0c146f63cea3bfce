"""Every method of the service, called over a real channel."""

import math
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import breadbox
from breadbox.v1 import buffer_pb2, fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.app import SERVICE_NAME
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import CreateBuffer
from breadbox_server.limits import TASKS_MAX
from support.eventually import eventually
from support.served import CALL_S, Served, reason_of, served, span

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED


async def test_a_started_session_is_current() -> None:
    async with served() as it:
        reply = await it.stub.StartSession(
            pb.StartSessionRequest(session_id="run", model_version=5), timeout=CALL_S
        )
        buffer = await it.buffer()
    assert ("run", 5) == (reply.session_id, reply.model_version)
    assert ("run", 5) == (buffer.session_id, buffer.model_version)


async def test_ending_the_session_empties_the_buffer() -> None:
    async with served() as it:
        await it.start()
        await it.fill(3)
        await it.stub.EndSession(pb.EndSessionRequest(session_id="run"), timeout=CALL_S)
        buffer = await it.buffer()
        await eventually(lambda: len(it.custodian.deleted) == 3)
    assert "" == buffer.session_id
    assert not buffer.HasField("model_version")
    assert 0 == buffer.state.chunk_count


async def test_publishing_evicts_what_became_stale() -> None:
    async with served(BufferConfig(staleness_max=0)) as it:
        await it.start()
        await it.fill(2)
        reply = await it.stub.PublishModel(
            pb.PublishModelRequest(session_id="run", model_version=1), timeout=CALL_S
        )
    assert (1, 2) == (reply.model_version, reply.evicted_chunk_count)


async def test_published_weights_are_confirmed_and_told_to_watchers() -> None:
    async with served() as it:
        await it.start()
        weights = it.custodian.write(size_bytes=5000)
        reference = fragment_pb2.PayloadReference(
            payload_id=weights.payload_id, size_bytes=weights.size_bytes
        )
        await it.stub.PublishModel(
            pb.PublishModelRequest(session_id="run", model_version=1, weights=reference),
            timeout=CALL_S,
        )
        seen = await it.stub.WatchModel(pb.WatchModelRequest(), timeout=CALL_S)
    assert weights.payload_id in it.custodian.kept
    assert seen.changed
    assert reference == seen.weights


async def test_weights_that_the_store_lacks_are_refused() -> None:
    async with served() as it:
        await it.start()
        reference = fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.PublishModel(
                pb.PublishModelRequest(session_id="run", model_version=1, weights=reference),
                timeout=CALL_S,
            )
        buffer = await it.buffer()
    assert "PAYLOAD_MISSING" == reason_of(caught.value)
    assert 0 == buffer.model_version


async def test_weights_of_a_refused_version_are_deleted_after_a_while() -> None:
    async with served(unannounced_s=100.0) as it:
        await it.start(model_version=5)
        weights = it.custodian.write()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.PublishModel(
                pb.PublishModelRequest(
                    session_id="run",
                    model_version=4,
                    weights=fragment_pb2.PayloadReference(
                        payload_id=weights.payload_id, size_bytes=1
                    ),
                ),
                timeout=CALL_S,
            )
        assert weights.payload_id in it.custodian.kept
        it.clock.advance(101.0)
        await eventually(lambda: weights.payload_id in it.custodian.deleted)
    assert "VERSION_REGRESSED" == reason_of(caught.value)


async def test_a_watcher_returns_when_the_version_changes() -> None:
    async with served() as it:
        await it.start()
        watching = it.stub.WatchModel(
            pb.WatchModelRequest(known_session_id="run", known_model_version=0, max_wait=span(60)),
            timeout=CALL_S,
        )
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        await it.stub.PublishModel(
            pb.PublishModelRequest(session_id="run", model_version=1), timeout=CALL_S
        )
        reply = await watching
        assert 0 == it.server.driver.reading.watcher_count
    assert (True, "run", 1) == (reply.changed, reply.session_id, reply.model_version)


async def test_a_watcher_returns_unchanged_when_its_wait_elapses() -> None:
    async with served() as it:
        await it.start()
        watching = it.stub.WatchModel(
            pb.WatchModelRequest(known_session_id="run", known_model_version=0, max_wait=span(10)),
            timeout=CALL_S,
        )
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        it.clock.advance(10.0)
        reply = await watching
    assert (False, "run", 0) == (reply.changed, reply.session_id, reply.model_version)


async def publish_weights(it: Served, version: int) -> fragment_pb2.PayloadReference:
    weights = it.custodian.write()
    reference = fragment_pb2.PayloadReference(
        payload_id=weights.payload_id, size_bytes=weights.size_bytes
    )
    await it.stub.PublishModel(
        pb.PublishModelRequest(session_id="run", model_version=version, weights=reference),
        timeout=CALL_S,
    )
    return reference


def watch_of_version_0(**fields: Any) -> pb.WatchModelRequest:
    return pb.WatchModelRequest(
        known_session_id="run", known_model_version=0, max_wait=span(10), **fields
    )


async def test_a_watcher_that_knows_of_no_weights_is_told_when_some_come_for_its_version() -> None:
    async with served() as it:
        await it.start()
        watching = it.stub.WatchModel(watch_of_version_0(known_weights=False), timeout=CALL_S)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        reference = await publish_weights(it, version=0)
        woken = await watching
        late = await it.stub.WatchModel(watch_of_version_0(known_weights=False), timeout=CALL_S)
    assert [(True, 0, reference)] * 2 == [
        (reply.changed, reply.model_version, reply.weights) for reply in (woken, late)
    ]


@pytest.mark.parametrize("fields", [{}, {"known_weights": True}])
async def test_a_watcher_that_did_not_ask_about_weights_waits_on_when_some_come(
    fields: dict[str, object],
) -> None:
    async with served() as it:
        await it.start()
        watching = it.stub.WatchModel(watch_of_version_0(**fields), timeout=CALL_S)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        await publish_weights(it, version=0)
        it.clock.advance(9.0)
        await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)
        assert 1 == it.server.driver.reading.watcher_count
        it.clock.advance(1.0)
        assert not (await watching).changed


async def test_appended_fragments_are_admitted_and_their_payloads_confirmed() -> None:
    async with served() as it:
        await it.start()
        fragments = [it.metadata(0), it.metadata(1)]
        reply = await it.append(*fragments)
        buffer = await it.buffer()
    assert [ADMITTED, ADMITTED] == [result.outcome for result in reply.results]
    assert {fragment.payload.payload_id for fragment in fragments} == it.custodian.kept
    assert [2] == it.custodian.confirm_trips
    assert ("run", 0) == (reply.session_id, reply.model_version)
    assert not reply.HasField("retry_delay")
    assert (2, 200) == (buffer.state.chunk_count, buffer.state.payload_bytes)


async def test_a_repeated_append_tells_the_first_outcome_and_changes_nothing() -> None:
    async with served() as it:
        await it.start()
        fragment = it.metadata(0)
        await it.append(fragment)
        (result,) = (await it.append(fragment)).results
        buffer = await it.buffer()
    assert fragment_pb2.ADMISSION_OUTCOME_DUPLICATE == result.outcome
    assert ADMITTED == result.first_outcome
    assert 1 == buffer.state.chunk_count
    assert [1] == it.custodian.confirm_trips


async def test_a_fetch_takes_fragments_under_a_lease() -> None:
    async with served() as it:
        await it.start()
        await it.fill(4)
        reply = await it.fetch(2)
        buffer = await it.buffer()
    assert "grant" == reply.WhichOneof("result")
    assert 2 == len(reply.grant.fragments)
    assert 60 == reply.grant.lease.remaining_duration.seconds
    assert ("run", 0) == (reply.grant.session_id, reply.grant.model_version)
    assert 1 == buffer.state.lease_count


async def test_a_fetch_that_cannot_be_met_elapses_with_a_reason() -> None:
    async with served() as it:
        await it.start()
        reply = await it.fetch(2)
    assert "wait_elapsed" == reply.WhichOneof("result")
    assert reply.wait_elapsed.waiting_reason


async def test_a_waiting_fetch_is_met_by_the_append_it_waits_for() -> None:
    async with served() as it:
        await it.start()
        fetching = it.fetch(2, wait_s=60)
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        await it.fill(2)
        reply = await fetching
        assert 0 == it.server.driver.core.waiting_count
    assert "grant" == reply.WhichOneof("result")


async def test_a_waiting_fetch_elapses_when_its_time_is_over() -> None:
    async with served() as it:
        await it.start()
        fetching = it.fetch(2, wait_s=10)
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        it.clock.advance(10.0)
        reply = await fetching
    assert "wait_elapsed" == reply.WhichOneof("result")


async def test_a_call_waits_no_longer_than_its_own_deadline_allows() -> None:
    async with served() as it:
        await it.start()
        fetching = it.stub.FetchFragments(
            pb.FetchFragmentsRequest(request_id="r", fragment_count=1, max_wait=span(200)),
            timeout=10.0,
        )
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        it.clock.advance(9.9)
        reply = await fetching
    assert "wait_elapsed" == reply.WhichOneof("result")


async def test_a_repeated_fetch_gets_the_same_grant() -> None:
    async with served() as it:
        await it.start()
        await it.fill(8)
        first = await it.fetch(4, request_id="same")
        again = await it.fetch(4, request_id="same")
    assert first.grant.lease.lease_id == again.grant.lease.lease_id
    assert first.grant.fragments == again.grant.fragments


async def test_ranks_get_disjoint_shares_of_one_prepared_list() -> None:
    async with served() as it:
        await it.start()
        await it.fill(8)
        first = it.fetch(4, request_id="both", rank=0, world_size=2)
        second = it.fetch(4, request_id="both", rank=1, world_size=2)
        shares = [*(await first).grant.fragments, *(await second).grant.fragments]
        prepared = await it.stub.GetPreparedFragments(
            pb.GetPreparedFragmentsRequest(request_id="both"), timeout=CALL_S
        )
    assert 4 == len({reference.chunk_id for reference in shares})
    assert shares == list(prepared.fragments)


async def test_a_lease_is_renewed_from_now() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        grant = (await it.fetch(1)).grant
        it.clock.advance(50.0)
        reply = await it.stub.RenewLease(
            pb.RenewLeaseRequest(lease_id=grant.lease.lease_id, lease_duration=span(30)),
            timeout=CALL_S,
        )
        it.clock.advance(29.0)
        buffer = await it.buffer()
    assert 30 == reply.lease.remaining_duration.seconds
    assert 1 == buffer.state.lease_count


async def test_an_expired_lease_gives_its_chunk_back() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        await it.fetch(1)
        it.clock.advance(61.0)
        buffer = await it.buffer()
    assert (0, 1) == (buffer.state.lease_count, buffer.state.chunk_count)


async def test_a_consumed_lease_has_its_payloads_deleted() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        grant = (await it.fetch(1)).grant
        payload_id = grant.fragments[0].metadata.payload.payload_id
        await it.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(lease_id=grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED),
            timeout=CALL_S,
        )
        await eventually(lambda: payload_id in it.custodian.deleted)
        buffer = await it.buffer()
    assert (0, 0) == (buffer.state.lease_count, buffer.state.payload_bytes)


async def test_a_returned_lease_gives_the_use_back() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        grant = (await it.fetch(1, request_id="one")).grant
        await it.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(lease_id=grant.lease.lease_id, mode=pb.RELEASE_MODE_RETURNED),
            timeout=CALL_S,
        )
        again = (await it.fetch(1, request_id="two")).grant
    assert 1 == again.fragments[0].use_count
    assert [] == it.custodian.deleted


def release(
    lease_ids: list[str], mode: pb.ReleaseMode = pb.RELEASE_MODE_CONSUMED
) -> pb.ReleaseLeaseRequest:
    first, *further = lease_ids
    return pb.ReleaseLeaseRequest(lease_id=first, mode=mode, further_lease_ids=further)


async def leases(it: Served, count: int) -> list[str]:
    """Leases of one fragment each."""
    await it.start()
    await it.fill(count)
    return [
        (await it.fetch(1, request_id=f"r{index}")).grant.lease.lease_id for index in range(count)
    ]


async def test_leases_that_are_released_together_all_end() -> None:
    async with served() as it:
        lease_ids = await leases(it, 3)
        answer = await it.stub.ReleaseLease(release(lease_ids[:2]), timeout=CALL_S)
        assert answer.ended_count == 2
        assert (await it.buffer()).state.lease_count == 1
        answer = await it.stub.ReleaseLease(release(lease_ids), timeout=CALL_S)
        assert answer.ended_count == 3  # Those that were released stay so.
        await eventually(lambda: len(it.custodian.deleted) == 3)


async def test_leases_that_are_returned_together_all_give_their_uses_back() -> None:
    async with served() as it:
        lease_ids = await leases(it, 3)
        await it.stub.ReleaseLease(release(lease_ids, pb.RELEASE_MODE_RETURNED), timeout=CALL_S)
        again = (await it.fetch(3, request_id="again")).grant
    assert [each.use_count for each in again.fragments] == [1, 1, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_after_a_lease_that_is_not_there_all_may_be_released_again(place: int) -> None:
    async with served() as it:
        lease_ids = await leases(it, 2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await it.stub.ReleaseLease(
                release([*lease_ids[:place], "none", *lease_ids[place:]]), timeout=CALL_S
            )
        assert reason_of(raised.value) == "LEASE_NOT_FOUND"
        assert (await it.buffer()).state.lease_count == 2 - place
        for each in lease_ids:
            await it.stub.ReleaseLease(release([each]), timeout=CALL_S)
        assert (await it.buffer()).state.lease_count == 0


async def test_so_many_leases_are_released_together() -> None:
    async with served() as it:
        lease_ids = await leases(it, 1)
        assert (
            await it.stub.ReleaseLease(release(lease_ids * 65), timeout=CALL_S)
        ).ended_count == 65
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await it.stub.ReleaseLease(release(lease_ids * 66), timeout=CALL_S)
        assert reason_of(raised.value) == "ARGUMENT_INVALID"


async def test_buffers_are_created_changed_listed_and_deleted() -> None:
    async with served(BufferConfig(uses_max=3)) as it:
        created = await it.stub.CreateBuffer(
            pb.CreateBufferRequest(
                name="second",
                config=buffer_pb2.BufferConfig(
                    fragments_per_chunk=2, full_policy=buffer_pb2.FULL_POLICY_BLOCK
                ),
            ),
            timeout=CALL_S,
        )
        updated = await it.stub.UpdateBuffer(
            pb.UpdateBufferRequest(name="second", config=buffer_pb2.BufferConfig(staleness_max=9)),
            timeout=CALL_S,
        )
        listed = await it.stub.ListBuffers(pb.ListBuffersRequest(), timeout=CALL_S)
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="second"), timeout=CALL_S)
        left = await it.stub.ListBuffers(pb.ListBuffersRequest(), timeout=CALL_S)
    assert (2, 3) == (created.buffer.config.fragments_per_chunk, created.buffer.config.uses_max)
    config = updated.buffer.config
    assert (2, 9) == (config.fragments_per_chunk, config.staleness_max)
    assert buffer_pb2.FULL_POLICY_BLOCK == config.full_policy
    assert ["default", "second"] == [buffer.name for buffer in listed.buffers]
    assert ["default"] == [buffer.name for buffer in left.buffers]


async def updated(it: Served, *paths: str, **limits: Any) -> buffer_pb2.BufferConfig:
    """What a buffer of uses_max=7 has after an update with a mask of these paths."""
    await it.stub.CreateBuffer(
        pb.CreateBufferRequest(
            name="b",
            config=buffer_pb2.BufferConfig(
                uses_max=7,
                staleness_max=9,
                lease_duration=span(5),
                full_policy=buffer_pb2.FULL_POLICY_BLOCK,
                sampler=buffer_pb2.Sampler(freshest_first={}),
            ),
        ),
        timeout=CALL_S,
    )
    request = pb.UpdateBufferRequest(name="b", config=buffer_pb2.BufferConfig(**limits))
    request.update_mask.paths.extend(paths)
    return (await it.stub.UpdateBuffer(request, timeout=CALL_S)).buffer.config


async def test_a_limit_in_the_mask_without_a_value_is_the_servers_default_again() -> None:
    async with served(BufferConfig(uses_max=3)) as it:
        config = await updated(it, "uses_max", "lease_duration", "full_policy", "sampler")
    assert (3, 60) == (config.uses_max, config.lease_duration.seconds)
    assert buffer_pb2.FULL_POLICY_EVICT == config.full_policy
    assert "uniform" == config.sampler.WhichOneof("sampler")
    assert 9 == config.staleness_max


async def test_a_limit_outside_the_mask_stays_whatever_its_value() -> None:
    async with served(BufferConfig(uses_max=3)) as it:
        config = await updated(it, "staleness_max", uses_max=8, staleness_max=4)
    assert (7, 4) == (config.uses_max, config.staleness_max)


async def test_a_mask_of_everything_leaves_what_was_given_and_defaults() -> None:
    async with served(BufferConfig(uses_max=3)) as it:
        config = await updated(it, "*", staleness_max=4)
    assert (3, 4, 60) == (config.uses_max, config.staleness_max, config.lease_duration.seconds)


async def test_a_mask_that_is_there_and_empty_changes_nothing() -> None:
    async with served(BufferConfig(uses_max=3)) as it:
        await updated(it, "uses_max", uses_max=7)
        request = pb.UpdateBufferRequest(name="b", config=buffer_pb2.BufferConfig(uses_max=8))
        request.update_mask.SetInParent()
        reply = await it.stub.UpdateBuffer(request, timeout=CALL_S)
    assert 7 == reply.buffer.config.uses_max


@pytest.mark.parametrize("path", ["", "clever", "lease_s", "limiter.minimum_chunks", "*"])
async def test_a_mask_that_names_no_limit_is_refused(path: str) -> None:
    async with served() as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await updated(it, "uses_max", path)
    assert "ARGUMENT_INVALID" == reason_of(caught.value)
    assert "update_mask" in str(caught.value.details())


async def page(it: Served, **fields: Any) -> tuple[list[str], str]:
    reply = await it.stub.ListBuffers(pb.ListBuffersRequest(**fields), timeout=CALL_S)
    return [buffer.name for buffer in reply.buffers], reply.next_page_token


async def test_buffers_are_listed_page_by_page_though_some_come_and_go() -> None:
    async with served() as it:
        for name in ("a", "b", "c", "e"):
            await it.stub.CreateBuffer(pb.CreateBufferRequest(name=name), timeout=CALL_S)
        first, token = await page(it, page_size=2)
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="b"), timeout=CALL_S)
        await it.stub.CreateBuffer(pb.CreateBufferRequest(name="d"), timeout=CALL_S)
        second, token = await page(it, page_size=2, page_token=token)
        third, end = await page(it, page_size=2, page_token=token)
        assert (["a", "c", "d", "default", "e"], "") == await page(it)
        assert (["a", "c", "d", "default", "e"], "") == await page(it, page_size=5)
    assert [["a", "b"], ["c", "d"], ["default", "e"]] == [first, second, third]
    assert "" == end


async def test_a_page_has_at_most_a_hundred_buffers_unless_more_are_asked_for() -> None:
    async with served(buffers_max=1100) as it:
        for number in range(1001):
            await it.server.driver.core.call(
                CreateBuffer(BufferName(f"b{number:04}"), BufferConfig())
            )
        sizes = [len((await page(it, page_size=size))[0]) for size in (0, 999, 2**31 - 1)]
    assert [100, 999, 1000] == sizes


async def test_deleting_a_buffer_wakes_those_who_wait_and_watch() -> None:
    async with served() as it:
        await it.stub.CreateBuffer(pb.CreateBufferRequest(name="gone"), timeout=CALL_S)
        fetching = it.fetch(1, buffer="gone", wait_s=60)
        watching = it.stub.WatchModel(
            pb.WatchModelRequest(buffer="gone", max_wait=span(60)), timeout=CALL_S
        )
        driver = it.server.driver
        await eventually(
            lambda: (driver.core.waiting_count, driver.reading.watcher_count) == (1, 1)
        )
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="gone"), timeout=CALL_S)
        for call in (fetching, watching):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert "BUFFER_NOT_FOUND" == reason_of(caught.value)


async def test_the_store_is_told_to_clients() -> None:
    async with served(unannounced_s=120.0, piece_size_bytes=2**20) as it:
        reply = await it.stub.GetStoreConfig(pb.GetStoreConfigRequest(), timeout=CALL_S)
    assert "redis://:secret@fake.invalid:6379/0" == reply.store_url
    assert (120, 2**20) == (reply.unannounced_duration.seconds, reply.piece_size_bytes)
    assert (breadbox.__version__, 0) == (reply.server_version, reply.journal_epoch), (
        "there is no journal"
    )


async def test_reported_episodes_are_counted() -> None:
    async with served() as it:
        episode = pb.EpisodeReport(
            worker_id="w", return_sum=-1.5, step_count=7, end=pb.EPISODE_END_TRUNCATED
        )
        await it.stub.ReportEpisodes(
            pb.ReportEpisodesRequest(episodes=[episode, episode]), timeout=CALL_S
        )
        registry = it.server.metrics.registry
    labels = {"task": "default"}
    assert 2 == registry.get_sample_value("breadbox_episodes_total", {**labels, "end": "truncated"})
    assert -3.0 == registry.get_sample_value("breadbox_episode_return_sum", labels)
    assert 14 == registry.get_sample_value("breadbox_episode_steps_sum", labels)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e308, -1e17])
@pytest.mark.parametrize("field", ["return_sum", "discounted_return_sum"])
async def test_a_return_that_would_spoil_the_sum_of_all_is_refused(
    field: str, value: float
) -> None:
    async with served() as it:
        good = pb.EpisodeReport(worker_id="w", return_sum=1.0, end=pb.EPISODE_END_TRUNCATED)
        bad = pb.EpisodeReport(worker_id="w", end=pb.EPISODE_END_TRUNCATED)
        setattr(bad, field, value)
        for report in ([good], [good, bad], [bad], [good]):
            call = it.stub.ReportEpisodes(pb.ReportEpisodesRequest(episodes=report), timeout=CALL_S)
            expected = grpc.StatusCode.INVALID_ARGUMENT if bad in report else grpc.StatusCode.OK
            assert expected is await call.code()
        registry = it.server.metrics.registry
    labels = {"task": "default"}

    assert 2.0 == registry.get_sample_value("breadbox_episode_return_sum", labels)


async def test_a_report_of_thousands_of_tasks_counts_all_and_looks_for_room_no_oftener() -> None:
    async with served() as it:
        episodes = [
            pb.EpisodeReport(
                worker_id=f"w{number}",
                task=f"t{number}",
                step_count=1,
                end=pb.EPISODE_END_TRUNCATED,
            )
            for number in range(1000)
        ]
        await it.stub.ReportEpisodes(pb.ReportEpisodesRequest(episodes=episodes), timeout=CALL_S)
        registry = it.server.metrics.registry
    counts = [
        registry.get_sample_value("breadbox_episode_steps_count", {"task": task})
        for task in ("t0", f"t{TASKS_MAX - 1}", f"t{TASKS_MAX}", "other")
    ]
    assert [1, 1, None, 1000 - TASKS_MAX] == counts


async def test_a_worker_that_invents_tasks_does_not_use_up_the_room_of_others() -> None:
    async with served() as it:

        async def report(worker_id: str, task: str) -> None:
            episode = pb.EpisodeReport(
                worker_id=worker_id, task=task, return_sum=1.0, end=pb.EPISODE_END_TERMINATED
            )
            await it.stub.ReportEpisodes(
                pb.ReportEpisodesRequest(episodes=[episode]), timeout=CALL_S
            )

        def episodes(task: str) -> float | None:
            labels = {"task": task, "end": "terminated"}
            return it.server.metrics.registry.get_sample_value("breadbox_episodes_total", labels)

        for index in range(TASKS_MAX + 6):
            await report("hostile", f"invented-{index}")
        for worker_id in ("honest-0", "honest-1"):
            await report(worker_id, "pole")
        await report("honest-1", "maze")
        seen = [episodes(task) for task in ("pole", "maze", "other", "invented-0", "invented-2")]
        returns = [
            it.server.metrics.registry.get_sample_value(
                "breadbox_episode_return_count", {"task": task}
            )
            for task in ("pole", "invented-1")
        ]

    assert [2.0, 1.0, 6.0, None, 1.0] == seen
    assert [2.0, None] == returns


async def test_a_full_blocking_buffer_says_how_long_to_wait() -> None:
    config = BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK, retry_delay_s=0.5)
    async with served(config) as it:
        await it.start()
        reply = await it.append(*(it.metadata(index) for index in range(3)))
    full = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL
    assert [ADMITTED, full, full] == [result.outcome for result in reply.results]
    assert 500_000_000 == reply.retry_delay.nanos


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
async def test_health_says_serving(name: str) -> None:
    async with served() as it:
        stub = health_pb2_grpc.HealthStub(it.channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_S)
    assert health_pb2.HealthCheckResponse.SERVING == reply.status


@pytest.mark.parametrize("has_reflection", [True, False])
async def test_reflection_lists_the_service_unless_it_is_off(has_reflection: bool) -> None:
    async with served(has_reflection=has_reflection) as it:
        stub = reflection_pb2_grpc.ServerReflectionStub(it.channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=CALL_S
        )
        try:
            names = [
                service.name
                async for reply in call
                for service in reply.list_services_response.service
            ]
        except grpc.aio.AioRpcError as error:
            names = [error.code().name]
    assert (SERVICE_NAME in names) is has_reflection
