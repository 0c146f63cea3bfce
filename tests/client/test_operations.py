"""What the client does, step by step: retries, long waits, appends; without network or time."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breadbox import payload, stores
from breadbox.model import errors
from breadbox.model.fragment import Fragment
from breadbox.model.options import WAIT_S_MAX_PER_CALL, ClientOptions
from breadbox.model.presets import STORE_FULL_ADVICE
from breadbox.model.types import (
    AdmissionOutcome,
    AppendReply,
    AppendResult,
    BufferConfig,
    BufferDescription,
    BufferState,
    FragmentReference,
    GroupEnd,
    GroupEndReason,
    LeaseGrant,
    MembersRead,
    ModelState,
    PayloadReference,
    StoreConfig,
)
from breadbox.operations import calls, members, operations
from breadbox.operations.retry import RetryPolicy
from breadbox.operations.sharing import TogetherError
from breadbox.stores.base import PayloadStore
from breadbox.wire.route import Route
from support.announced import metadata_of
from support.fragments import large_fragment, vector_fragment
from support.operation_world import OperationWorld

AWAY = errors.UnavailableError("away")
ADMITTED = AppendResult(AdmissionOutcome.ADMITTED)
STALE = AppendResult(AdmissionOutcome.STALE)
WRONG_SESSION = AppendResult(AdmissionOutcome.WRONG_SESSION)
DUPLICATE = AppendResult(AdmissionOutcome.DUPLICATE, AdmissionOutcome.ADMITTED)
FULL = AppendResult(AdmissionOutcome.BUFFER_FULL)
BYTES_FULL = AppendResult(AdmissionOutcome.BYTES_FULL)
MISSING = AppendResult(AdmissionOutcome.PAYLOAD_MISSING)


def grant(request_id: str = "id-1") -> LeaseGrant:
    return LeaseGrant("lease", 60.0, (), "s", 0, request_id)


def fetch_request(max_wait_s: float, request_id: str | None = None) -> calls.FetchRequest:
    return calls.FetchRequest(fragment_count=4, max_wait_s=max_wait_s, request_id=request_id)


def max_wait_s(request: Any) -> float:
    return float(request.max_wait.ToTimedelta().total_seconds())


# Calls ------------------------------------------------------------------------------------------


def test_a_call_is_sent_again_while_the_server_is_away() -> None:
    world = OperationWorld()
    world.will("ListBuffers", AWAY, AWAY, ())
    assert () == world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 3 == len(world.sent)


def answered(error: errors.UnavailableError) -> errors.UnavailableError:
    error.is_answer = True
    return error


CAUSE = answered(errors.UnavailableError("its journal does not answer"))
STANDS_BY = answered(errors.StandbyError("stands by"))


@pytest.mark.parametrize(
    ("outages", "told"),
    [
        ([CAUSE, AWAY], CAUSE),
        ([AWAY, CAUSE], CAUSE),
        ([STANDS_BY, AWAY], STANDS_BY),
        ([CAUSE, STANDS_BY], CAUSE),
        ([AWAY, AWAY], AWAY),
    ],
)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_outage_of_several_servers_is_told_by_the_one_that_knows_its_cause(
    outages: list[errors.UnavailableError], told: errors.UnavailableError, count: int
) -> None:
    world = OperationWorld()
    world.context.route = Route("a:1,b:1")
    policy = replace(world.context.policy, places=2, attempts_max=count)
    world.will("ListBuffers", *list(itertools.islice(itertools.cycle(outages), count)))
    with pytest.raises(errors.UnavailableError) as caught:
        world.run(_listed(world.context, policy))
    assert told is caught.value


def test_a_cause_of_an_earlier_round_is_not_told() -> None:
    world = OperationWorld()
    world.context.route = Route("a:1,b:1")
    policy = replace(world.context.policy, places=2, attempts_max=4)
    world.will("ListBuffers", CAUSE, AWAY, AWAY, AWAY)
    with pytest.raises(errors.UnavailableError) as caught:
        world.run(_listed(world.context, policy))
    assert AWAY is caught.value


def _listed(context: operations.Context, policy: RetryPolicy) -> operations.Operation[Any]:
    return operations.repeat(context, lambda _: calls.list_buffers(), policy)


def test_all_pages_of_the_buffers_are_one_list() -> None:
    world = OperationWorld()
    world.will("ListBuffers", (("a", "b"), "b"), AWAY, ((), "c"), (("d",), ""))
    assert ("a", "b", "d") == world.run(operations.list_buffers(world.context))
    assert ["", "b", "b", "c"] == [request.page_token for request in world.requests("ListBuffers")]


def test_a_server_without_an_end_of_pages_is_an_error() -> None:
    world = OperationWorld()
    world.will("ListBuffers", *[((), "more")] * 2000)
    with pytest.raises(errors.InternalError, match="1000 pages"):
        world.run(operations.list_buffers(world.context))


def test_a_server_that_stays_away_ends_the_call_after_reconnect_s() -> None:
    world = OperationWorld(ClientOptions(reconnect_s=5.0))
    world.will("ListBuffers", *[AWAY] * 1000)
    with pytest.raises(errors.UnavailableError) as caught:
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 5.0 == world.clock.now
    assert "gave up after" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("name", "is empty"),
        errors.InternalError("bug"),
        errors.LimitExceededError("too many"),
    ],
)
def test_what_cannot_pass_is_raised_at_once(error: errors.ReplayBufferError) -> None:
    world = OperationWorld()
    world.will("ListBuffers", error)
    with pytest.raises(type(error)):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 1 == len(world.sent)


def silent(world: OperationWorld) -> Callable[[Any], errors.DeadlineExceededError]:
    """A server that lets the call's whole time pass."""

    def answer(call: Any) -> errors.DeadlineExceededError:
        world.clock.advance(world.sent[-1][1])
        return errors.DeadlineExceededError("late")

    return answer


@pytest.mark.parametrize("reconnect_s", [0.0, 3.0, 25.0])
def test_a_server_that_is_silent_ends_the_call_after_deadline_and_reconnect_s(
    reconnect_s: float,
) -> None:
    world = OperationWorld(ClientOptions(deadline_s=7.0, reconnect_s=reconnect_s))
    world.will("ListBuffers", *[silent(world)] * 1000)
    with pytest.raises(errors.DeadlineExceededError):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 7.0 <= world.clock.now <= 7.0 + reconnect_s
    assert world.clock.now > 7.0 + 0.9 * reconnect_s - 0.1


def test_a_server_that_goes_and_then_is_silent_ends_the_call_in_the_same_time() -> None:
    world = OperationWorld(ClientOptions(deadline_s=7.0, reconnect_s=5.0))
    world.will("ListBuffers", AWAY, AWAY, *[silent(world)] * 1000)
    with pytest.raises(errors.DeadlineExceededError):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert world.clock.now <= 12.0


def test_a_wait_in_silence_ends_deadline_and_reconnect_s_after_it() -> None:
    world = OperationWorld(ClientOptions(deadline_s=7.0, reconnect_s=5.0))
    world.will("FetchFragments", *[silent(world)] * 1000)
    with pytest.raises(errors.DeadlineExceededError):
        world.run(operations.fetch(world.context, "b", fetch_request(20.0)))
    assert 30.0 < world.clock.now <= 32.0


def test_an_append_that_passed_its_deadline_is_sent_again_and_counted_once(
    store: "RecordingStore",
) -> None:
    """Its identity is judged once: the repetition tells what became of the first."""
    world = OperationWorld(store=store)
    world.will("AppendFragments", silent(world), reply(DUPLICATE))
    assert [DUPLICATE] == append(world)
    assert 2 == len(world.requests("AppendFragments"))
    assert [] == store.deleted


def test_an_append_that_was_sent_together_has_all_its_retries_when_it_is_sent_alone(
    store: "RecordingStore",
) -> None:
    """Another address is tried once, even if nothing is retried; what was sent may have arrived."""
    world = OperationWorld(ClientOptions(reconnect_s=0.0), store=store)
    world.context = replace(world.context, address="a:1,b:1")
    world.will("AppendFragments", TogetherError(), AWAY, reply(DUPLICATE))
    assert [DUPLICATE] == append(world)
    assert [] == store.deleted
    world.will("AppendFragments", TogetherError(), reply(DUPLICATE))
    assert [DUPLICATE] == append(world)
    assert [] == store.deleted


def test_an_answer_that_asks_to_wait_ends_an_outage() -> None:
    """Hours of a full buffer leave all of reconnect_s for a server that then goes away."""
    world = OperationWorld(ClientOptions(reconnect_s=30.0, append_wait_s=1000.0))
    wait = errors.BackpressureError("full", 20.0)
    world.will("AppendFragments", *[wait] * 10, *[AWAY] * 5, reply(ADMITTED))
    call = calls.append_fragments("b", [])
    budget = world.context.append_policy
    answer, _ = world.run(operations.repeat(world.context, lambda _: call, budget))
    assert reply(ADMITTED) == answer


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_server_that_is_away_is_told_of_at_once_twice_a_minute_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    world = OperationWorld(ClientOptions(reconnect_s=1000.0))
    began_at = world.clock.now

    def until_it_is_back(_: calls.Call[Any]) -> Any:
        if world.clock.now - began_at < 65.0:
            world.will("ListBuffers", until_it_is_back)
            return AWAY
        return ()

    world.will("ListBuffers", until_it_is_back)
    world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 20 < len(world.sent)
    lines = told(caplog)
    assert ("WARNING", "calling ListBuffers failed, trying again: away") == lines[0]
    assert ["WARNING"] * 3 + ["WARNING"] == [level for level, _ in lines]
    assert [True] * 2 == [
        line.startswith("calling ListBuffers has failed for ") for _, line in lines[1:3]
    ]
    assert lines[3][1].startswith("calling ListBuffers works again after 6")


def test_an_outage_that_outlasts_a_call_is_told_of_once_by_the_calls_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    world = OperationWorld(ClientOptions(reconnect_s=5.0))
    for _ in range(5):
        world.will("ListBuffers", *[AWAY] * 1000)
        with pytest.raises(errors.UnavailableError):
            world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 25.0 == world.clock.now
    assert [("WARNING", "calling ListBuffers failed, trying again: away")] == told(caplog)


def test_a_client_that_is_closed_in_an_outage_does_not_say_that_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    world = OperationWorld()
    world.will("ListBuffers", AWAY, errors.ClosedError("ListBuffers: the client was closed"))
    with pytest.raises(errors.ClosedError):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert [("WARNING", "calling ListBuffers failed, trying again: away")] == told(caplog)
    assert not world.context.has_answered


def test_a_call_that_is_refused_or_not_repeated_leaves_the_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = OperationWorld(ClientOptions(reconnect_s=0.0))
    for error in (errors.InvalidRequestError("name", "is empty"), AWAY):
        world.will("ListBuffers", error)
        with pytest.raises(type(error)):
            world.run(operations.invoke(world.context, calls.list_buffers()))
    assert [] == told(caplog)


MISFIT = errors.TlsError("its certificate is of no authority that this client trusts")


def test_certificates_that_never_fitted_are_told_at_once() -> None:
    world = OperationWorld()
    world.will("ListBuffers", MISFIT)
    with pytest.raises(errors.TlsError):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 1 == len(world.sent)
    assert 0.0 == world.clock.now


@pytest.mark.parametrize("first_answer", [(), errors.BufferNotFoundError("b")])
def test_a_certificate_that_no_longer_fits_may_be_renewed_meanwhile(first_answer: Any) -> None:
    """A server that refuses has answered, too."""
    world = OperationWorld()
    world.will("ListBuffers", first_answer, MISFIT, MISFIT, ())
    with suppress(errors.BufferNotFoundError):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert () == world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 4 == len(world.sent)


def test_a_server_that_was_only_ever_away_has_not_answered() -> None:
    world = OperationWorld()
    world.will("ListBuffers", AWAY, MISFIT)
    with pytest.raises(errors.TlsError):
        world.run(operations.invoke(world.context, calls.list_buffers()))
    assert 2 == len(world.sent)


def test_a_report_of_episodes_is_never_sent_twice() -> None:
    """Its sums would count twice if only the reply was lost."""
    world = OperationWorld()
    world.will("ReportEpisodes", AWAY)
    with pytest.raises(errors.UnavailableError):
        world.run(operations.invoke(world.context, calls.report_episodes("b", [])))
    assert 1 == len(world.sent)


def test_a_buffer_that_is_gone_when_its_deletion_is_repeated_was_deleted() -> None:
    world = OperationWorld()
    world.will("DeleteBuffer", AWAY, errors.BufferNotFoundError("b"))
    world.run(operations.delete_buffer(world.context, "b"))


def test_deleting_a_buffer_that_never_was_is_an_error() -> None:
    world = OperationWorld()
    world.will("DeleteBuffer", errors.BufferNotFoundError("b"))
    with pytest.raises(errors.BufferNotFoundError):
        world.run(operations.delete_buffer(world.context, "b"))


# Fetch ------------------------------------------------------------------------------------------


def test_the_deadline_of_a_fetch_is_later_than_its_wait() -> None:
    world = OperationWorld(ClientOptions(deadline_s=7.0))
    world.will("FetchFragments", grant())
    world.run(operations.fetch(world.context, "b", fetch_request(20.0)))
    (sent,) = world.sent
    assert 20.0 == max_wait_s(sent[0].request)
    assert 27.0 == sent[1]


def waited(world: OperationWorld, duration_s: float) -> Callable[[Any], str]:
    def answer(call: Any) -> str:
        world.clock.advance(duration_s)
        return "have 0 chunks, need 4"

    return answer


def test_a_long_wait_is_cut_into_calls_under_one_request_id() -> None:
    world = OperationWorld()
    world.will(
        "FetchFragments",
        waited(world, WAIT_S_MAX_PER_CALL),
        waited(world, WAIT_S_MAX_PER_CALL),
        grant(),
    )
    total_s = 2 * WAIT_S_MAX_PER_CALL + 20.0
    world.run(operations.fetch(world.context, "b", fetch_request(total_s)))
    requests = world.requests("FetchFragments")
    assert ["id-1"] * 3 == [request.request_id for request in requests]
    assert [WAIT_S_MAX_PER_CALL, WAIT_S_MAX_PER_CALL, 20.0] == [max_wait_s(r) for r in requests]


def test_a_fetch_rides_through_a_restart_under_its_request_id_and_keeps_its_end() -> None:
    world = OperationWorld()

    def dies_after_50_s(call: Any) -> Exception:
        world.clock.advance(50.0)
        return AWAY

    world.will("FetchFragments", dies_after_50_s, AWAY, grant())
    world.run(operations.fetch(world.context, "b", fetch_request(100.0)))
    requests = world.requests("FetchFragments")
    assert ["id-1"] * 3 == [request.request_id for request in requests]
    assert 100.0 == max_wait_s(requests[0])
    assert 50.0 > max_wait_s(requests[2]) > 45.0
    assert world.clock.now < 55.0


def test_the_time_to_reconnect_counts_from_the_failure_not_from_the_start_of_the_wait() -> None:
    world = OperationWorld(ClientOptions(reconnect_s=10.0))

    def dies_after_60_s(call: Any) -> Exception:
        world.clock.advance(60.0)
        return AWAY

    world.will("FetchFragments", dies_after_60_s, grant())
    world.run(operations.fetch(world.context, "b", fetch_request(100.0)))
    assert 2 == len(world.sent)


def test_an_elapsed_wait_says_what_it_waited_for() -> None:
    world = OperationWorld()
    world.will("FetchFragments", waited(world, 2.0))
    with pytest.raises(errors.WaitElapsedError, match="have 0 chunks, need 4") as caught:
        world.run(operations.fetch(world.context, "b", fetch_request(2.0)))
    assert 2.0 == caught.value.waited_s
    assert isinstance(caught.value, TimeoutError)


def test_a_fetch_that_does_not_wait_is_one_call() -> None:
    world = OperationWorld()
    world.will("FetchFragments", "have 0 chunks, need 4")
    with pytest.raises(errors.WaitElapsedError):
        world.run(operations.fetch(world.context, "b", fetch_request(0.0)))
    assert 1 == len(world.sent)


def test_a_grant_whose_lease_ended_before_it_arrived_is_asked_for_anew() -> None:
    world = OperationWorld()
    world.will("FetchFragments", AWAY, errors.LeaseExpiredError("x"), grant("id-2"))
    got = world.run(operations.fetch(world.context, "b", fetch_request(100.0)))
    assert "id-2" == got.request_id
    sent_ids = [request.request_id for request in world.requests("FetchFragments")]
    assert ["id-1", "id-1", "id-2"] == sent_ids


def test_a_fresh_request_id_that_is_refused_as_used_up_is_not_replaced_for_ever() -> None:
    world = OperationWorld()
    world.will("FetchFragments", errors.LeaseExpiredError("x"))
    with pytest.raises(errors.LeaseExpiredError):
        world.run(operations.fetch(world.context, "b", fetch_request(100.0)))
    assert 1 == len(world.sent)


def test_a_request_id_of_the_caller_is_never_replaced() -> None:
    """Other ranks ask with the same."""
    world = OperationWorld()
    world.will("FetchFragments", errors.LeaseExpiredError("x"))
    with pytest.raises(errors.LeaseExpiredError):
        world.run(operations.fetch(world.context, "b", fetch_request(100.0, "mine")))


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, "soon"])
def test_a_wait_that_is_no_span_is_refused_before_anything_is_sent(wait_s: Any) -> None:
    world = OperationWorld()
    with pytest.raises(errors.InvalidRequestError, match="max_wait_s"):
        world.run(operations.fetch(world.context, "b", fetch_request(wait_s)))
    with pytest.raises(errors.InvalidRequestError, match="max_wait_s"):
        world.run(operations.watch_model(world.context, "b", None, wait_s))
    with pytest.raises(errors.InvalidRequestError, match="max_wait_s"):
        world.run(operations.load_model(world.context, "b", None, wait_s))
    with pytest.raises(errors.InvalidRequestError, match="max_wait_s"):
        world.run(operations.group_ends(world.context, "b", 0, wait_s))
    assert [] == world.sent


# Watch ------------------------------------------------------------------------------------------


def test_a_watch_returns_what_is_new() -> None:
    world = OperationWorld()
    new = ModelState("s", 1, None)
    world.will("WatchModel", new)
    known = ModelState("s", 0, None)
    assert new == world.run(operations.watch_model(world.context, "b", known, 5.0))
    (request,) = world.requests("WatchModel")
    assert ("s", 0) == (request.known_session_id, request.known_model_version)
    assert request.HasField("known_weights")
    assert not request.known_weights


def test_a_watch_says_whether_weights_are_known() -> None:
    world = OperationWorld()
    world.will("WatchModel", ModelState("s", 1, None), ModelState("s", 1, None))
    known = ModelState("s", 0, PayloadReference("0" * 32, 1))
    for each in (known, None):
        world.run(operations.watch_model(world.context, "b", each, 5.0))
    first, second = world.requests("WatchModel")
    assert first.known_weights
    assert not second.HasField("known_weights")


def test_a_watch_in_which_nothing_changed_returns_none_after_its_wait() -> None:
    world = OperationWorld()

    def nothing_new(call: Any) -> None:
        world.clock.advance(call.wait_s)

    world.will("WatchModel", nothing_new, nothing_new)
    known = ModelState("s", 0, None)
    total_s = WAIT_S_MAX_PER_CALL + 1.0
    assert world.run(operations.watch_model(world.context, "b", known, total_s)) is None
    assert total_s == world.clock.now


def test_a_wait_for_ends_of_groups_goes_on_until_there_is_one() -> None:
    world = OperationWorld()
    end = GroupEnd(8, "g", GroupEndReason.STALE, 3)

    def nothing_ended(call: Any) -> list[GroupEnd]:
        world.clock.advance(call.wait_s)
        return []

    world.will("GroupEnds", nothing_ended, [end], nothing_ended)
    total_s = WAIT_S_MAX_PER_CALL + 1.0
    assert [end] == world.run(operations.group_ends(world.context, "b", 7, total_s))
    assert [7, 7] == [request.after_number for request in world.requests("GroupEnds")]
    assert [] == world.run(operations.group_ends(world.context, "b", 8, 1.0))


# Models -----------------------------------------------------------------------------------------


def published(store: PayloadStore, version: int, value: float) -> ModelState:
    weights = {"w": np.array([value], np.float32)}
    return ModelState("s", version, payload.write_weights(store, weights))


def superseded(version: int) -> ModelState:
    return ModelState("s", version, PayloadReference(f"{version:032x}", 64))


def test_weights_that_were_superseded_before_they_were_read_are_asked_for_again(
    store: "RecordingStore",
) -> None:
    """A learner that publishes twice between the two steps ended every actor there was."""
    world = OperationWorld(store=store)
    world.will("WatchModel", superseded(3), superseded(5), published(store, 7, 7.0))
    newest = world.run(operations.load_model(world.context, "b", superseded(1), 0.0))
    assert newest is not None
    state, weights = newest
    assert (7, 7.0) == (state.model_version, float(weights["w"][0]))
    asked = [request.known_model_version for request in world.requests("WatchModel")]
    assert [1, 1, 1] == asked
    assert 0.0 == world.clock.now, "there are others already: nothing is to be waited for"


def test_versions_without_weights_and_the_end_of_a_session_are_waited_out(
    store: "RecordingStore",
) -> None:
    world = OperationWorld(store=store)
    ended, resumed = ModelState("", None, None), ModelState("next", 95, None)
    world.will("WatchModel", ended, resumed, published(store, 96, 1.0))
    newest = world.run(operations.load_model(world.context, "b", superseded(1), 30.0))
    assert newest is not None
    assert 96 == newest[0].model_version


def test_no_weights_within_the_wait_are_none(store: "RecordingStore") -> None:
    world = OperationWorld(store=store)

    def nothing_new(call: Any) -> None:
        world.clock.advance(call.wait_s)

    world.will("WatchModel", ModelState("s", 0, None), nothing_new)
    assert None is world.run(operations.load_model(world.context, "b", None, 5.0))
    assert 5.0 == world.clock.now


def test_weights_that_the_store_lost_are_an_error_after_reconnect_s(
    store: "RecordingStore",
) -> None:
    world = OperationWorld(ClientOptions(deadline_s=7.0, reconnect_s=5.0), store=store)
    world.will("WatchModel", *[superseded(3)] * 1000)
    with pytest.raises(errors.PayloadMissingError):
        world.run(operations.load_model(world.context, "b", None, 0.0))
    assert 5.0 == world.clock.now


def test_a_learner_that_publishes_faster_than_weights_are_read_ends_the_call_in_time(
    store: "RecordingStore",
) -> None:
    world = OperationWorld(ClientOptions(deadline_s=7.0, reconnect_s=5.0), store=store)

    def another(call: Any) -> ModelState:
        world.clock.advance(1.0)
        world.will("WatchModel", another)
        return superseded(len(world.sent))

    world.will("WatchModel", another)
    with pytest.raises(errors.PayloadMissingError) as caught:
        world.run(operations.load_model(world.context, "b", None, 3.0))
    assert 3.0 + 7.0 + 5.0 == world.clock.now
    assert "publishes faster" in caught.value.__notes__[0]


# Append -----------------------------------------------------------------------------------------


class RecordingStore:
    """A store that counts what is deleted, and fails on demand before it acts."""

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self.failures: list[errors.StoreError] = []
        self.written: list[PayloadReference] = []
        self.deleted: list[PayloadReference] = []

    def write_many(self, payloads: Any) -> list[PayloadReference]:
        if self.failures:
            raise self.failures.pop(0)
        references = self._store.write_many(payloads)
        self.written += references
        return references

    def delete_many(self, references: Any) -> None:
        self.deleted += references
        self._store.delete_many(references)

    def within(self, deadline: Any) -> "RecordingStore":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordingStore]:
    opened = stores.open_store(f"file://{tmp_path}")
    yield RecordingStore(opened)
    opened.close()


def reply(*results: AppendResult, retry_delay_s: float | None = None) -> AppendReply:
    return AppendReply(results, "s", 0, retry_delay_s)


def append(world: OperationWorld, count: int = 1) -> list[AppendResult]:
    fragments = [vector_fragment(index) for index in range(count)]
    return world.run(operations.append_many(world.context, "b", fragments))


def announced(world: OperationWorld) -> list[list[int]]:
    return [
        [metadata.fragment_index for metadata in request.fragments]
        for request in world.requests("AppendFragments")
    ]


def test_an_origin_is_said_once_in_each_session_and_again_when_it_is_declared_anew(
    store: "RecordingStore",
) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", *[reply(ADMITTED)] * 5)
    for text in ("A", "B"):
        world.context.origin = operations.Origin({"wrappers": text})
        append(world)
        append(world)
    world.run(operations.append_many(world.context, "b", [vector_fragment(0, session_id="next")]))
    said = [
        [dict(schema.origin) for schema in request.schemas]
        for request in world.requests("AppendFragments")
    ]
    a, b = [{"wrappers": "A"}], [{"wrappers": "B"}]
    assert [a, [], b, [], b] == said


def test_an_origin_declared_while_an_append_is_sent_is_said_with_the_next(
    store: "RecordingStore",
) -> None:
    world = OperationWorld(store=store)
    world.context.origin = operations.Origin({"wrappers": "A"})

    def declare(call: Any) -> AppendReply:
        world.context.origin = operations.Origin({"wrappers": "B"})
        return reply(ADMITTED)

    world.will("AppendFragments", declare, reply(ADMITTED))
    append(world)
    append(world)
    said = [
        [schema.origin["wrappers"] for schema in request.schemas]
        for request in world.requests("AppendFragments")
    ]
    assert [["A"], ["B"]] == said


def test_payloads_are_written_before_they_are_announced(store: RecordingStore) -> None:
    world = OperationWorld(store=store)

    def all_written(call: Any) -> AppendReply:
        sent = [metadata.payload.payload_id for metadata in call.request.fragments]
        assert [reference.payload_id for reference in store.written] == sent
        return reply(ADMITTED, ADMITTED)

    world.will("AppendFragments", all_written)
    assert [ADMITTED, ADMITTED] == append(world, 2)
    assert [] == store.deleted


@pytest.mark.parametrize("result", [STALE, WRONG_SESSION, DUPLICATE])
def test_the_payload_of_a_refused_fragment_is_deleted(
    store: RecordingStore, result: AppendResult
) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED, result))
    assert [ADMITTED, result] == append(world, 2)
    assert [store.written[1]] == store.deleted


@pytest.mark.parametrize("result", [STALE, WRONG_SESSION, DUPLICATE])
def test_after_a_lost_reply_no_payload_is_deleted(
    store: RecordingStore, result: AppendResult
) -> None:
    """The first attempt may have been admitted with this very payload (O3)."""
    world = OperationWorld(store=store)
    world.will("AppendFragments", AWAY, reply(result))
    assert [result] == append(world)
    assert [] == store.deleted


def test_an_outcome_that_this_library_does_not_know_deletes_nothing(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    unknown = AppendResult(AdmissionOutcome.UNSPECIFIED)
    world.will("AppendFragments", reply(unknown))
    assert [unknown] == append(world)
    assert [] == store.deleted


def test_what_found_no_room_is_sent_again_after_the_delay_and_the_rest_is_not(
    store: RecordingStore,
) -> None:
    world = OperationWorld(store=store)
    world.will(
        "AppendFragments",
        reply(ADMITTED, FULL, FULL, retry_delay_s=2.0),
        reply(ADMITTED, FULL, retry_delay_s=2.0),
        reply(ADMITTED),
    )
    assert [ADMITTED] * 3 == append(world, 3)
    assert [[0, 1, 2], [1, 2], [2]] == announced(world)
    assert [True, True] == [2.0 <= slept_s <= 4.0 for slept_s in world.clock.slept_s]


def test_a_buffer_that_stays_full_raises_after_append_wait_s_with_what_was_admitted(
    store: RecordingStore,
) -> None:
    world = OperationWorld(ClientOptions(append_wait_s=5.0), store=store)
    first = reply(ADMITTED, FULL, retry_delay_s=1.0)
    world.will("AppendFragments", first, *[reply(FULL, retry_delay_s=1.0)] * 100)
    with pytest.raises(errors.BackpressureError, match="buffer 'b'") as caught:
        append(world, 2)
    assert (ADMITTED, FULL) == caught.value.results
    assert 5.0 <= world.clock.now <= 9.0
    assert [store.written[1]] == store.deleted


def test_progress_renews_the_patience_of_an_append(store: RecordingStore) -> None:
    world = OperationWorld(ClientOptions(append_wait_s=3.0), store=store)
    trickle = [
        reply(ADMITTED, *[FULL] * left, retry_delay_s=2.0 if left else None)
        for left in range(9, -1, -1)
    ]
    world.will("AppendFragments", *trickle)
    assert [ADMITTED] * 10 == append(world, 10)
    assert world.clock.now > 15.0


def test_a_lost_payload_is_written_again_once(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED, MISSING), reply(ADMITTED))
    assert [ADMITTED, ADMITTED] == append(world, 2)
    assert [[0, 1], [1]] == announced(world)
    assert 3 == len(store.written)
    assert [] == world.clock.slept_s


def test_a_store_that_loses_what_it_is_given_is_waited_for(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", *[reply(MISSING)] * 5, reply(ADMITTED))
    assert [ADMITTED] == append(world)
    assert 6 == len(store.written)
    assert 4 == len(world.clock.slept_s)


def test_payloads_lost_for_longer_than_an_outage_may_last_are_an_error(
    store: RecordingStore,
) -> None:
    world = OperationWorld(ClientOptions(reconnect_s=5.0), store=store)
    world.will("AppendFragments", *[reply(MISSING)] * 1000)
    with pytest.raises(errors.PayloadMissingError):
        append(world)
    assert 5.0 == world.clock.now


def test_what_is_lost_now_and_then_is_no_outage(store: RecordingStore) -> None:
    world = OperationWorld(ClientOptions(reconnect_s=0.0), store=store)
    world.will(
        "AppendFragments", *[reply(ADMITTED, *[MISSING] * left) for left in range(9, -1, -1)]
    )
    assert [ADMITTED] * 10 == append(world, 10)


def test_a_payload_that_expired_while_the_buffer_was_full_is_written_again_each_time(
    store: RecordingStore,
) -> None:
    world = OperationWorld(store=store)
    world.will(
        "AppendFragments",
        *[reply(MISSING), reply(FULL, retry_delay_s=1.0)] * 3,
        reply(ADMITTED),
    )
    assert [ADMITTED] == append(world)


def test_a_store_that_is_full_is_waited_for(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    store.failures = [errors.StoreFullError("maxmemory", 1.0)] * 3
    world.will("GetStoreConfig", AWAY)
    world.will("AppendFragments", reply(ADMITTED))
    assert [ADMITTED] == append(world)
    assert 3.0 <= world.clock.now <= 6.0


def refuse_for_room(world: OperationWorld, store: RecordingStore) -> None:
    world.will("AppendFragments", reply(FULL, retry_delay_s=1.0), reply(ADMITTED))


def refuse_a_payload(world: OperationWorld, store: RecordingStore) -> None:
    store.failures = [errors.StoreFullError("maxmemory", 1.0)]
    world.will("AppendFragments", reply(ADMITTED))


@pytest.mark.parametrize("refuse", [refuse_for_room, refuse_a_payload])
def test_producers_that_are_asked_to_wait_together_come_again_at_other_times(
    store: RecordingStore, refuse: Callable[[OperationWorld, RecordingStore], None]
) -> None:
    waits_s = []
    for seed in range(50):
        world = OperationWorld(store=store)
        world.context.rng.seed(seed)
        refuse(world, store)
        assert [ADMITTED] == append(world)
        waits_s.append(world.clock.now)
    assert 50 == len(set(waits_s))
    assert 1.0 <= min(waits_s) < 1.1
    assert 1.9 < max(waits_s) <= 2.0


def test_a_store_that_stays_full_is_back_pressure(store: RecordingStore) -> None:
    world = OperationWorld(ClientOptions(append_wait_s=5.0), store=store)
    store.failures = [errors.StoreFullError("maxmemory", 1.0)] * 100
    world.will("GetStoreConfig", *[AWAY] * 9)
    with pytest.raises(errors.BackpressureError, match="maxmemory"):
        append(world)
    assert 5.0 == world.clock.now


def test_a_store_without_room_is_told_of_in_its_words_after_a_second_and_reported(
    store: RecordingStore, caplog: pytest.LogCaptureFixture
) -> None:
    world = OperationWorld(ClientOptions(append_wait_s=70.0), store=store)
    store.failures = [errors.StoreFullError("No space left on device", 0.1)] * 1000
    reported_at: list[float] = []
    world.will("GetStoreConfig", *[lambda _: reported_at.append(world.clock.now)] * 20)
    with pytest.raises(errors.BackpressureError, match="No space left on device"):
        append(world)

    told = [each.getMessage() for each in caplog.records if "No space" in each.getMessage()]
    words = f"No space left on device. {STORE_FULL_ADVICE}"
    assert f"writing payloads failed, trying again: {words}" == told[0]
    assert [True] * 2 == ["writing payloads has failed for 3" in told[1], len(told) == 3]
    assert 1.0 <= reported_at[0] < 1.3
    gaps = [later - earlier for earlier, later in itertools.pairwise(reported_at)]
    assert [True] * len(gaps) == [5.0 <= gap < 5.3 for gap in gaps]
    refusals = {request.write_refusal for request in world.requests("GetStoreConfig")}
    assert {"No space left on device"} == refusals


def test_a_write_that_finds_room_within_a_second_is_not_told_of_and_a_later_one_is_over(
    store: RecordingStore, caplog: pytest.LogCaptureFixture
) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", *[reply(ADMITTED)] * 2)
    world.will("GetStoreConfig", *[errors.UnavailableError("away")] * 9)
    for count in (2, 20):
        store.failures = [errors.StoreFullError("maxmemory", 0.2)] * count
        assert [ADMITTED] == append(world)
        assert [count == 20] * 2 == [
            words in caplog.text for words in ("trying again: maxmemory", "works again after")
        ]


def test_an_append_that_the_server_lets_wait_tells_the_servers_reason(
    store: RecordingStore, caplog: pytest.LogCaptureFixture
) -> None:
    world = OperationWorld(store=store)
    full = reply(BYTES_FULL, retry_delay_s=1.0)
    world.will("AppendFragments", *[full] * 4, reply(ADMITTED))
    state = BufferState(hold="the store has no room")
    world.will("GetBuffer", BufferDescription("b", BufferConfig(), "s", 0, state))
    assert [ADMITTED] == append(world)
    told = [each.getMessage() for each in caplog.records]
    assert "appending failed, trying again: the store has no room" == told[0]
    assert told[1].startswith("appending works again after")


def test_an_append_to_a_buffer_that_is_merely_full_tells_nothing(
    store: RecordingStore, caplog: pytest.LogCaptureFixture
) -> None:
    world = OperationWorld(store=store)
    full = [reply(each, retry_delay_s=1.0) for each in (FULL, FULL, FULL, BYTES_FULL)]
    world.will("AppendFragments", *full, reply(ADMITTED))
    world.will("GetBuffer", BufferDescription("b", BufferConfig(), "s", 0, BufferState()))
    assert [ADMITTED] == append(world)
    assert [] == caplog.records


@pytest.mark.parametrize(("limit", "waits"), [(0, True), (99, False), (1_000, True)])
def test_a_payload_larger_than_the_whole_store_is_refused_with_both_sizes(
    store: RecordingStore, limit: int, waits: bool
) -> None:
    world = OperationWorld(ClientOptions(append_wait_s=5.0), store=store)
    full = errors.StoreFullError("maxmemory", 1.0)
    full.payload_bytes = 100
    store.failures = [full] * 100
    config = StoreConfig("file:///s", 600.0, 0, "0.1.0", payload_size_bytes_max=limit)
    world.will("GetStoreConfig", *[config] * 9)
    with pytest.raises(errors.ReplayBufferError) as caught:
        append(world)
    if waits:
        assert (errors.BackpressureError, 5.0) == (type(caught.value), world.clock.now)
    else:
        assert (errors.InvalidRequestError, 0.0) == (type(caught.value), world.clock.now)
        assert "has 100 bytes, but the payload store takes at most 99 in all" in str(caught.value)


def test_a_store_that_went_away_is_waited_for(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    store.failures = [errors.StoreUnavailableError("restarting")] * 3
    world.will("AppendFragments", reply(ADMITTED))
    assert [ADMITTED] == append(world)


def test_a_store_that_is_away_is_told_of_in_two_lines(
    store: RecordingStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    world = OperationWorld(store=store)
    store.failures = [errors.StoreUnavailableError("restarting")] * 9
    world.will("AppendFragments", reply(ADMITTED))
    append(world)
    (first, began), (last, ended) = told(caplog)
    assert ("WARNING", "WARNING") == (first, last)
    assert "moving payloads failed, trying again: restarting" == began
    assert ended.startswith("moving payloads works again after ")


def test_a_store_that_stays_away_is_an_error_after_reconnect_s(store: RecordingStore) -> None:
    world = OperationWorld(ClientOptions(reconnect_s=5.0), store=store)
    store.failures = [errors.StoreUnavailableError("gone")] * 1000
    with pytest.raises(errors.StoreUnavailableError):
        append(world)
    assert 5.0 == world.clock.now


def test_a_server_whose_store_is_full_is_waited_for_as_long_as_a_full_buffer(
    store: RecordingStore,
) -> None:
    world = OperationWorld(ClientOptions(reconnect_s=1.0, append_wait_s=50.0), store=store)
    full = errors.BackpressureError("the store has no room", 2.0)
    world.will("AppendFragments", *[full] * 8, reply(ADMITTED))
    assert [ADMITTED] == append(world)


def test_many_fragments_are_announced_in_groups(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "APPEND_COUNT_MAX", 3)
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(*[ADMITTED] * 3), reply(*[ADMITTED] * 3), reply(ADMITTED))
    assert [ADMITTED] * 7 == append(world, 7)
    assert [[0, 1, 2], [3, 4, 5], [6]] == announced(world)


def test_results_are_reported_by_group_while_the_next_is_judged_and_more_is_taken(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 2)
    world = OperationWorld(store=store)
    steps: list[str] = []

    def successive() -> Iterator[Fragment]:
        for index in range(9):
            steps.append(f"take {index}")
            yield vector_fragment(index)

    def judge(call: Any) -> AppendReply:
        steps.append(f"judge {len(call.request.fragments)}")
        return reply(*[ADMITTED] * len(call.request.fragments))

    def answered(results: list[AppendResult]) -> None:
        steps.append(f"answer {len(results)}")

    world.will("AppendFragments", *[judge] * 5)
    operation = operations.append_many(world.context, "b", successive(), answered=answered)
    assert [] == world.run(operation)
    assert [[0, 1], [2, 3], [4, 5], [6, 7], [8]] == announced(world)
    # Two groups after the one that is judged are taken, and the fragment that shows where they end.
    assert [
        *[f"take {index}" for index in range(7)],
        "judge 2",
        "answer 2",
        *["take 7", "take 8"],
        "judge 2",
        "answer 2",
        "judge 2",
        "answer 2",
        "judge 2",
        "judge 1",
        "answer 3",
    ] == steps


def test_results_are_reported_before_an_error_of_a_later_group(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 2)
    world = OperationWorld(ClientOptions(append_wait_s=1.0), store=store)
    full = reply(ADMITTED, FULL, retry_delay_s=1.0)
    world.will("AppendFragments", reply(ADMITTED, ADMITTED), full, *[reply(FULL)] * 3)
    reported: list[AppendResult] = []
    fragments = [vector_fragment(index) for index in range(6)]
    with pytest.raises(errors.BackpressureError) as caught:
        world.run(operations.append_many(world.context, "b", fragments, answered=reported.extend))
    assert [ADMITTED] * 2 == reported
    assert (ADMITTED, FULL) == caught.value.results


@pytest.mark.parametrize("error", [errors.InvalidRequestError("x", "wrong"), ValueError("wrong")])
@pytest.mark.parametrize("taken", [3, 5, 8])
def test_an_error_of_where_fragments_come_from_is_not_dropped(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch, error: Exception, taken: int
) -> None:
    in_groups_of(monkeypatch, 2)
    world = OperationWorld(store=store)
    reported: list[AppendResult] = []

    def successive() -> Iterator[Fragment]:
        yield from map(vector_fragment, range(taken))
        raise error

    world.will("AppendFragments", *[reply(ADMITTED, ADMITTED)] * 5)
    with pytest.raises(type(error), match="wrong"):
        world.run(
            operations.append_many(world.context, "b", successive(), answered=reported.extend)
        )
    assert len(reported) <= taken


def test_large_fragments_are_announced_in_groups_of_bounded_bytes(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = vector_fragment().size_bytes
    monkeypatch.setattr(operations, "APPEND_BYTES_MAX", 2 * size_bytes)
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED, ADMITTED), reply(ADMITTED))
    append(world, 3)
    assert [[0, 1], [2]] == announced(world)


def in_groups_of(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(operations, "APPEND_COUNT_MAX", count)


def test_a_group_is_written_while_the_one_before_is_judged(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 2)
    world = OperationWorld(store=store)
    written_at_call: list[int] = []

    def judge(call: Any) -> AppendReply:
        written_at_call.append(len(store.written))
        return reply(*[ADMITTED] * len(call.request.fragments))

    world.will("AppendFragments", judge, judge, judge)
    assert [ADMITTED] * 5 == append(world, 5)
    assert [4, 5, 5] == written_at_call


def test_a_group_whose_early_write_failed_is_written_when_its_turn_comes(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 1)
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED), reply(ADMITTED))
    original = store.write_many
    calls_made: list[int] = []

    def fails_once(payloads: Any) -> list[PayloadReference]:
        calls_made.append(len(payloads))
        if len(calls_made) == 2:
            raise errors.StoreUnavailableError("away")
        return original(payloads)

    monkeypatch.setattr(store, "write_many", fails_once)
    assert [ADMITTED] * 2 == append(world, 2)
    assert 3 == len(calls_made)


def test_a_lost_reply_does_not_write_the_next_group_twice(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 1)
    world = OperationWorld(store=store)
    world.will("AppendFragments", AWAY, reply(DUPLICATE), reply(ADMITTED))
    assert [DUPLICATE, ADMITTED] == append(world, 2)
    assert 2 == len(store.written)
    assert [] == store.deleted


def test_an_array_that_cannot_be_stored_is_an_error_after_what_came_before_it(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 1)
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED))
    bad = vector_fragment(1)
    bad.obs = np.array([object()] * bad.step_count)
    with pytest.raises(errors.UnsupportedArrayError):
        world.run(operations.append_many(world.context, "b", [vector_fragment(0), bad]))
    assert [[0]] == announced(world)


def test_a_fragment_that_cannot_be_announced_is_an_error_after_what_came_before_it(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_groups_of(monkeypatch, 1)
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED))
    bad = vector_fragment(1)
    bad.model_version_max = 2**70
    with pytest.raises(errors.InvalidRequestError, match="model_version_max"):
        world.run(operations.append_many(world.context, "b", [vector_fragment(0), bad]))
    assert [[0]] == announced(world)
    assert 2 == len(store.written)


def test_what_is_sent_again_is_announced_with_the_payload_it_has_then(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first announcement was made ahead of time."""
    in_groups_of(monkeypatch, 1)
    world = OperationWorld(store=store)
    missing = AppendResult(AdmissionOutcome.PAYLOAD_MISSING)
    world.will("AppendFragments", reply(ADMITTED), reply(missing), reply(ADMITTED))
    assert [ADMITTED] * 2 == append(world, 2)
    sent = [request.fragments[0].payload for request in world.requests("AppendFragments")]
    assert [each.payload_id for each in store.written] == [each.payload_id for each in sent]


def test_a_reply_of_the_wrong_length_is_a_bug_of_the_server(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply())
    with pytest.raises(errors.InternalError):
        append(world)


def test_appending_nothing_sends_nothing(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    assert [] == append(world, 0)
    assert [] == world.sent


# Payloads that ride along ------------------------------------------------------------------------


def riding(inline_size_bytes_max: int, url: str = "redis://nobody.invalid") -> OperationWorld:
    """A client of a server that takes such payloads along, and names a store that is not there."""
    world = OperationWorld()
    config = StoreConfig(url, 600.0, 0, "0.1.0", None, inline_size_bytes_max)
    world.will("GetStoreConfig", *[config] * 9)
    return world


def bodies(world: OperationWorld) -> list[list[bytes]]:
    return [list(request.payloads) for request in world.requests("AppendFragments")]


def test_small_payloads_ride_along_and_the_store_is_never_opened() -> None:
    world = riding(64 * 1024)
    world.will("AppendFragments", reply(ADMITTED, ADMITTED))
    assert [ADMITTED] * 2 == append(world, 2)
    (request,) = world.requests("AppendFragments")
    wanted = [b"".join(payload.encode_fragment(vector_fragment(index))) for index in range(2)]
    assert wanted == list(request.payloads)
    assert [False, False] == [each.HasField("payload") for each in request.fragments]
    assert world.context.slot.store is None


def test_what_may_ride_along_is_asked_for_once() -> None:
    world = riding(64 * 1024)
    world.will("AppendFragments", *[reply(ADMITTED)] * 3)
    for _ in range(3):
        append(world)
    assert 1 == len(world.requests("GetStoreConfig"))


def test_what_is_refused_and_rode_along_needs_no_deletion() -> None:
    world = riding(64 * 1024)
    world.will("AppendFragments", reply(STALE, DUPLICATE, WRONG_SESSION))
    assert [STALE, DUPLICATE, WRONG_SESSION] == append(world, 3)
    assert world.context.slot.store is None


def test_larger_payloads_go_to_the_store_in_the_same_call(tmp_path: Path) -> None:
    stores.open_store(f"file://{tmp_path}/a").close()
    world = riding(8 * 1024, f"file://{tmp_path}/a")
    world.will("AppendFragments", reply(ADMITTED, ADMITTED, ADMITTED))
    fragments = [vector_fragment(0), large_fragment(1), vector_fragment(2)]
    assert [ADMITTED] * 3 == world.run(operations.append_many(world.context, "b", fragments))
    (request,) = world.requests("AppendFragments")
    assert [True, False, True] == [bool(body) for body in request.payloads]
    assert [False, True, False] == [each.HasField("payload") for each in request.fragments]
    world.context.slot.close()


def test_a_call_carries_bounded_bytes_and_the_next_one_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size_bytes = len(b"".join(payload.encode_fragment(vector_fragment())))
    monkeypatch.setattr(operations, "INLINE_REQUEST_BYTES_MAX", 2 * size_bytes)
    world = riding(64 * 1024)
    world.will("AppendFragments", *[reply(ADMITTED, ADMITTED)] * 2, reply(ADMITTED))
    assert [ADMITTED] * 5 == append(world, 5)
    assert [[0, 1], [2, 3], [4]] == announced(world)
    assert [2, 2, 1] == [len(each) for each in bodies(world)]


def test_a_payload_beyond_the_bound_of_a_call_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "INLINE_REQUEST_BYTES_MAX", 1)
    world = riding(64 * 1024)
    world.will("AppendFragments", *[reply(ADMITTED)] * 2)
    assert [ADMITTED] * 2 == append(world, 2)
    assert [[0], [1]] == announced(world)


def test_groups_that_ride_along_are_made_ready_while_others_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_groups_of(monkeypatch, 2)
    world = riding(64 * 1024)
    world.will("AppendFragments", *[reply(ADMITTED, ADMITTED)] * 3)
    assert [ADMITTED] * 6 == append(world, 6)
    assert [[0, 1], [2, 3], [4, 5]] == announced(world)
    assert all(map(all, bodies(world)))


def test_what_the_server_takes_along_no_more_is_written_to_the_store(tmp_path: Path) -> None:
    """After a restart with another --inline-size-max, of which the client is told then."""
    url = f"file://{tmp_path}/a"
    stores.open_store(url).close()
    world = OperationWorld()
    much, little = (StoreConfig(url, 600.0, 0, "0.1.0", None, size) for size in (64 * 1024, 10))
    world.will("GetStoreConfig", much, little)
    world.will("AppendFragments", reply(MISSING), reply(ADMITTED), reply(ADMITTED))
    assert [ADMITTED] == append(world)
    assert [ADMITTED] == append(world)
    assert [[True], [], []] == [[bool(each) for each in call] for call in bodies(world)]
    assert [] == world.clock.slept_s
    world.context.slot.close()


def test_what_is_missing_behind_another_payload_goes_on_riding_along(tmp_path: Path) -> None:
    """The server has the fragments of a worker come again in order, and takes along what it did."""
    url = f"file://{tmp_path}/a"
    stores.open_store(url).close()
    world = riding(8 * 1024, url)
    world.will("AppendFragments", reply(MISSING, MISSING), reply(ADMITTED, ADMITTED))
    fragments = [large_fragment(0), vector_fragment(1)]
    assert [ADMITTED] * 2 == world.run(operations.append_many(world.context, "b", fragments))
    assert [[False, True]] * 2 == [[bool(each) for each in call] for call in bodies(world)]
    world.context.slot.close()


def test_a_server_that_takes_nothing_along_for_ever_is_given_up() -> None:
    world = riding(64 * 1024)
    world.will("AppendFragments", *[reply(MISSING)] * 99)
    config = StoreConfig("redis://nobody.invalid", 600.0, 0, "0.1.0", None, 64 * 1024)
    world.will("GetStoreConfig", *[config] * 99)
    with pytest.raises(errors.PayloadMissingError):
        append(world)
    assert len(world.requests("AppendFragments")) < 99


def test_a_store_that_the_client_was_given_gets_everything(store: RecordingStore) -> None:
    world = OperationWorld(store=store)
    world.will("AppendFragments", reply(ADMITTED))
    world.will("FetchFragments", grant())
    append(world)
    world.run(operations.fetch(world.context, "b", fetch_request(0.0)))
    assert 1 == len(store.written)
    assert [0] == [request.inline_bytes_max for request in world.requests("FetchFragments")]


def test_a_read_of_members_that_is_cut_off_while_it_loads_is_closed_without_an_error(
    store: RecordingStore,
) -> None:
    """As by Ctrl-C or a cancelled task: the lease then expires."""
    world = OperationWorld(store=store)
    reading = members.read_members(world.context, "b", [("g", 0)], None)
    next(reading)
    found = MembersRead([came_along(0)], (1,), "lease")
    assert isinstance(reading.send(found), operations.RunBlocking)
    reading.close()


def test_a_read_of_members_that_fails_ends_its_lease() -> None:
    world = OperationWorld()
    world.will("ReadMembers", MembersRead([], (-1,), "lease"))
    world.will("ReleaseLease", AWAY)
    with pytest.raises(errors.MemberNotFoundError):
        world.run(members.read_members(world.context, "b", [("g", 0)], None))
    assert ["lease"] == [request.lease_id for request in world.requests("ReleaseLease")]


def came_along(index: int) -> FragmentReference:
    fragment = vector_fragment(index)
    body = b"".join(payload.encode_fragment(fragment))
    metadata = metadata_of(fragment, PayloadReference(f"{index:032x}", len(body)))
    return FragmentReference(metadata, index, 0, 1, body=body)


def test_what_came_along_is_loaded_without_the_store() -> None:
    world = riding(64 * 1024)
    references = [came_along(index) for index in range(3)]
    loaded = world.run(operations.load_fragments(world.context, references, None, None))
    assert [0, 1, 2] == [each.fragment_index for each in loaded]
    batch = world.run(operations.read_batch(world.context, references, None, None))
    assert [0.0, 1.0, 2.0] == batch.obs[:, 0, 0].tolist()
    arrays = world.run(operations.describe_arrays(world.context, references))
    assert [arrays[0]] * 3 == arrays
    assert world.context.slot.store is None


def test_a_batch_does_not_keep_what_came_along() -> None:
    world = riding(64 * 1024)
    batch = world.run(operations.read_batch(world.context, [came_along(0)], None, None))
    assert [b""] == [each.body for each in batch.references]


# Store and weights ------------------------------------------------------------------------------


def test_the_store_is_opened_once_where_the_server_says(tmp_path: Path) -> None:
    world = OperationWorld()
    stores.open_store(f"file://{tmp_path}/a").close()
    world.will("GetStoreConfig", StoreConfig(f"file://{tmp_path}/a", 600.0, 0, "0.1.0"))
    first = world.run(operations.opened_store(world.context))
    assert first is world.run(operations.opened_store(world.context))
    world.context.slot.close()


def test_the_callers_own_url_of_the_store_comes_first(tmp_path: Path) -> None:
    world = OperationWorld(ClientOptions(store_url=f"file://{tmp_path}/mine"))
    stores.open_store(f"file://{tmp_path}/mine").close()
    world.will("GetStoreConfig", StoreConfig(f"file://{tmp_path}/a", 600.0, 0, "0.1.0"))
    world.run(operations.opened_store(world.context))
    assert not (tmp_path / "a").exists()
    world.context.slot.close()


def test_a_store_that_is_away_when_it_is_opened_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, store: RecordingStore
) -> None:
    """A cluster has to tell of its nodes before it can be used."""
    answers: list[Any] = [errors.StoreUnavailableError("away")] * 2 + [store]
    monkeypatch.setattr(stores, "open_store", lambda *_, **__: _raised_or_given(answers.pop(0)))
    world = OperationWorld()
    world.will("GetStoreConfig", StoreConfig("redis+cluster://a,b", 600.0, 0, "0.1.0"))

    assert store is world.run(operations.opened_store(world.context))


def _raised_or_given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def publish(world: OperationWorld) -> Any:
    return world.run(operations.publish(world.context, "b", "s", 1, {}))


@pytest.mark.parametrize(
    "error", [errors.SessionEndedError("s", "t"), errors.VersionRegressedError(2, 1)]
)
def test_weights_of_a_refused_version_are_deleted(
    store: RecordingStore, error: errors.ReplayBufferError
) -> None:
    world = OperationWorld(store=store)
    world.will("PublishModel", error)
    with pytest.raises(type(error)):
        publish(world)
    assert store.written == store.deleted


def test_weights_that_the_store_lost_are_written_again(store: RecordingStore) -> None:
    world = OperationWorld(ClientOptions(reconnect_s=5.0), store=store)
    lost = errors.PayloadMissingError("x")
    world.will("PublishModel", lost, lost, lost, "published", *[lost] * 1000)
    assert "published" == publish(world)
    with pytest.raises(errors.PayloadMissingError):
        publish(world)
