"""B5 and B6: sessions, versions, and what they make stale."""

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.errors import (
    InvalidArgumentError,
    SessionNotCurrentError,
    VersionRegressedError,
)
from breadbox_server.core.model.events import (
    ChunksEvicted,
    EvictionReason,
    ModelChanged,
    PayloadsDisposable,
)
from breadbox_server.core.model.ids import BufferName, ChunkId, ModelVersion, SessionId
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.core.state.session import ENDED_SESSIONS_MAX
from core.world import World
from support.inputs import model_state, publish_model
from support.metadata import make_fragment, make_payload


def test_staleness_at_the_limit_is_fresh_and_one_beyond_is_not() -> None:
    world = World(staleness_max=2)
    world.append("w0", 0)
    assert 0 == world.publish(2).evicted_chunk_count
    assert {2: 1} == world.seen().chunk_count_by_staleness
    assert 1 == world.publish(3).evicted_chunk_count
    assert [] == world.held()


def test_stale_chunk_behind_a_fresh_one_goes() -> None:
    world = World(staleness_max=1)
    world.publish(3)
    for index, version in enumerate((3, 2, 3)):
        world.append("w0", index, version=version)
    world.buffers.take_events()
    assert 1 == world.publish(4).evicted_chunk_count
    assert [("w0", 0, 0), ("w0", 2, 0)] == world.held()
    assert (
        ChunksEvicted(DEFAULT_BUFFER, EvictionReason.STALE, (0,), (1,))
        in world.buffers.take_events()
    )


def test_stale_fragments_of_an_open_chunk_go_and_the_fresh_rest_stays() -> None:
    world = World(fragments_per_chunk=4, staleness_max=0)
    world.publish(1)
    world.append("w0", 0, version=1)
    world.buffers.take_events()
    world.publish(2)
    assert 1 == world.count("fragments_discarded_stale")
    for index in range(1, 5):
        world.append("w0", index, version=2)
    assert [("w0", 1, 0)] == world.held()


def test_fresh_fragment_before_a_stale_one_goes_with_it() -> None:
    """What stays open must be consecutive."""
    world = World(fragments_per_chunk=4, staleness_max=1)
    world.publish(2)
    for index, version in enumerate((2, 1, 2)):
        world.append("w0", index, version=version)
    world.publish(3)
    assert 2 == world.count("fragments_discarded_stale")
    assert 1 == world.seen().open_fragment_count


def test_version_never_goes_back() -> None:
    world = World()
    world.publish(5)
    with pytest.raises(VersionRegressedError) as caught:
        world.publish(4)
    assert {"current": "5", "announced": "4"} == caught.value.metadata
    assert 5 == world.seen().model.model_version


def test_publishing_the_current_version_again_changes_nothing() -> None:
    world = World()
    weights = make_payload()
    assert world.publish(1, weights=weights).weights_taken
    world.buffers.take_events()
    snapshot = world.buffers.snapshot()
    assert world.publish(1, weights=weights).weights_taken
    assert not world.publish(1, weights=make_payload()).weights_taken
    assert not world.publish(1).weights_taken
    assert [] == world.buffers.take_events()
    assert snapshot == world.buffers.snapshot()


def test_first_weights_of_the_version_a_session_began_with_are_taken() -> None:
    world = World()
    weights = make_payload()
    assert world.publish(0, weights=weights).weights_taken
    changed = world.events(ModelChanged)
    assert [model_state("s0", 0, weights)] == [event.state for event in changed]


def test_latest_two_weights_are_kept() -> None:
    world = World()
    weights = [make_payload(100) for _ in range(4)]
    for version, payload in enumerate(weights[:3], start=1):
        world.publish(version, weights=payload)
    assert [(weights[0],)] == [event.payloads for event in world.events(PayloadsDisposable)]
    assert 200 == world.seen().weights_bytes
    world.publish(4)
    assert world.seen().model.weights is None
    assert 200 == world.seen().weights_bytes
    world.end()
    assert [(weights[1], weights[2])] == [
        event.payloads for event in world.events(PayloadsDisposable)
    ]


def test_weights_payload_in_use_is_refused_and_nothing_changes() -> None:
    world = World()
    fragment = make_fragment()
    world.offer(fragment)
    with pytest.raises(InvalidArgumentError, match=r"weights\.payload_id"):
        world.publish(1, weights=fragment.payload)
    assert 0 == world.seen().model.model_version


def test_lost_weights_are_told_no_more() -> None:
    world = World()
    weights = make_payload()
    world.publish(1, weights=weights)
    assert 0 == world.drop(weights.payload_id)
    assert world.seen().model.weights is None
    assert 0 == world.seen().weights_bytes


def test_new_session_ends_the_old_one_with_everything_of_it() -> None:
    world = World(fragments_per_chunk=2)
    world.fill(1)
    world.append("w1", 0)
    world.buffers.take_events()
    assert model_state("s1", 7) == world.start("s1", 7)
    assert (0, 0, 0) == (
        world.seen().chunk_count,
        world.seen().open_fragment_count,
        world.seen().payload_bytes,
    )
    assert 1 == world.count("chunks_evicted_session_ended")
    assert 1 == world.count("fragments_discarded_session_ended")
    assert AdmissionOutcome.WRONG_SESSION is world.append("w0", 2)


def test_starting_the_current_session_again_changes_nothing() -> None:
    world = World()
    world.publish(3)
    world.append()
    snapshot = world.buffers.snapshot()
    assert 3 == world.start("s0", 9).model_version
    assert snapshot == world.buffers.snapshot()


def test_session_that_ended_cannot_start_again() -> None:
    world = World()
    world.start("s1")
    with pytest.raises(SessionNotCurrentError) as caught:
        world.start("s0")
    assert {"session": "s0", "current": "s1"} == caught.value.metadata


def test_a_session_is_known_to_have_ended_in_its_own_buffer_alone() -> None:
    world = World()
    session_id = SessionId("s0")
    assert not world.buffers.has_ended(DEFAULT_BUFFER, session_id)
    world.end()
    assert world.buffers.has_ended(DEFAULT_BUFFER, session_id)
    assert not world.buffers.has_ended(BufferName("elsewhere"), session_id)


def test_ended_sessions_are_remembered_up_to_a_limit() -> None:
    world = World()
    for number in range(ENDED_SESSIONS_MAX + 1):
        world.start(f"t{number}")
    assert "s0" == world.start("s0").session_id


def test_ending_a_session_that_is_not_current_changes_nothing() -> None:
    world = World()
    world.append()
    world.end("other")
    assert 1 == world.seen().chunk_count


def test_without_a_session_nothing_is_taken_or_published() -> None:
    world = World(starts=False)
    assert AdmissionOutcome.WRONG_SESSION is world.append()
    with pytest.raises(SessionNotCurrentError):
        world.publish(1)
    assert model_state("", None) == world.seen().model
    assert "no session is current" == world.seen().waiting_reason


@pytest.mark.parametrize("version", [-1, 2**53 + 1, 1.0, True])
def test_versions_out_of_range_are_refused(version: int) -> None:
    world = World()
    with pytest.raises(InvalidArgumentError):
        world.publish(version)
    with pytest.raises(InvalidArgumentError):
        world.start("s1", version)


def test_publish_costs_what_it_evicts_not_what_is_held() -> None:
    """The order by version is looked at only as far as it is stale."""
    world = World(capacity_chunks=1000, staleness_max=1)
    world.publish(1)
    world.fill(500, version=1)
    table = world.buffers._buffers[DEFAULT_BUFFER]._state.holdings.table  # noqa: SLF001 - to count looks
    looked_at = []
    is_live = table._by_version._is_live  # noqa: SLF001 - likewise

    def look(entry: tuple[ModelVersion, ChunkId]) -> bool:
        looked_at.append(entry)
        return is_live(entry)

    table._by_version._is_live = look  # noqa: SLF001 - likewise
    world.buffers.apply(publish_model(2), now=world.now)
    assert len(looked_at) <= 2
