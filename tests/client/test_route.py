"""Several addresses: the server that leads is called, whichever it is."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest

import breadbox
from breadbox.model import errors
from breadbox.model.options import check_addresses
from breadbox.model.types import EpisodeEnd, EpisodeReport
from breadbox.operations.retry import RetryBudget, RetryPolicy
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire.route import Route
from support.fake_service import FakeService, Gate, refuse, serving

AWAY = errors.UnavailableError("away")
STANDBY = refuse(grpc.StatusCode.UNAVAILABLE, "STANDBY", leader="process 7 on b", epoch="5")
REPORT = EpisodeReport(
    worker_id="w",
    return_sum=1.0,
    discounted_return_sum=1.0,
    step_count=1,
    end=EpisodeEnd.TERMINATED,
)
NOBODY = "127.0.0.1:1"


@pytest.fixture
def services() -> Iterator[list[tuple[FakeService, str]]]:
    with ExitStack() as stack:
        fakes = [FakeService() for _ in range(2)]
        yield [(fake, stack.enter_context(serving(fake))) for fake in fakes]


def test_a_call_that_a_standby_refuses_is_answered_by_the_other(
    services: list[tuple[FakeService, str]],
) -> None:
    (standby, first), (leader, second) = services
    standby.will("ListBuffers", STANDBY)
    with breadbox.connect(f"{first}, {second}", reconnect_s=0) as client:
        assert f"{first},{second}" == client.address
        client.list_buffers()
        client.list_buffers()
        assert "" == client.outage
    # It stays with the one that has answered.
    assert (1, 2) == (len(standby.received), len(leader.received))


async def test_the_asyncio_client_goes_on_at_the_other_too(
    services: list[tuple[FakeService, str]],
) -> None:
    (standby, first), (leader, second) = services
    standby.will("ListBuffers", STANDBY)
    async with breadbox.aio.connect(f"{first},{second}", reconnect_s=0) as client:
        await client.list_buffers()
    assert (1, 1) == (len(standby.received), len(leader.received))


def test_an_address_where_nobody_is_costs_one_attempt(
    services: list[tuple[FakeService, str]],
) -> None:
    (leader, address), _ = services
    with breadbox.connect(f"{NOBODY},{address}", reconnect_s=0) as client:
        client.list_buffers()
    assert 1 == len(leader.received)


def test_what_may_not_be_repeated_goes_on_where_a_standby_has_done_nothing(
    services: list[tuple[FakeService, str]],
) -> None:
    (standby, first), (leader, second) = services
    standby.will("ReportEpisodes", STANDBY)
    with breadbox.connect(f"{first},{second}") as client:
        client.report_episodes([REPORT])
    assert (1, 1) == (len(standby.received), len(leader.received))


def test_where_nobody_leads_the_call_ends_in_time_and_says_who_does(
    services: list[tuple[FakeService, str]],
) -> None:
    for service, _ in services:
        service.will("ListBuffers", *[STANDBY] * 100)
    addresses = ",".join(address for _, address in services)
    began_at = time.monotonic()
    with (
        breadbox.connect(addresses, deadline_s=1.0, reconnect_s=0.3) as client,
        pytest.raises(errors.StandbyError) as caught,
    ):
        client.list_buffers()
    assert time.monotonic() - began_at < 2.3
    assert ("process 7 on b", 5) == (caught.value.leader, caught.value.epoch)
    assert all(service.received for service, _ in services)
    # It has all addresses already.
    assert "no server at the client's addresses leads" in str(caught.value)
    assert "give clients" not in str(caught.value)


def test_who_has_one_address_of_a_standby_is_told_to_give_all(
    services: list[tuple[FakeService, str]],
) -> None:
    (standby, address), _ = services
    standby.will("ListBuffers", *[STANDBY] * 100)
    with (
        breadbox.connect(address, reconnect_s=0) as client,
        pytest.raises(errors.StandbyError, match="give clients the addresses of all servers"),
    ):
        client.list_buffers()


def test_one_that_lacks_its_journal_is_left_for_the_next_which_may_lead_by_now(
    services: list[tuple[FakeService, str]],
) -> None:
    (cut_off, first), (leader, second) = services
    cut_off.will("ListBuffers", refuse(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"))
    with breadbox.connect(f"{first},{second}", reconnect_s=0) as client:
        client.list_buffers()
        client.list_buffers()
    assert (1, 2) == (len(cut_off.received), len(leader.received))


def test_a_leader_that_lacks_its_payload_store_is_found_again_behind_its_standby(
    services: list[tuple[FakeService, str]],
) -> None:
    (leader, first), (standby, second) = services
    leader.will("ListBuffers", refuse(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"))
    standby.will("ListBuffers", STANDBY)
    with breadbox.connect(f"{first},{second}") as client:
        client.list_buffers()
    assert (2, 1) == (len(leader.received), len(standby.received))


def test_a_silent_server_is_left_for_the_other_within_the_time_of_the_call(
    services: list[tuple[FakeService, str]],
) -> None:
    (silent, first), (leader, second) = services
    gate = Gate(pb.ListBuffersResponse())
    silent.will("ListBuffers", gate)
    with breadbox.connect(f"{first},{second}", deadline_s=0.3, reconnect_s=5.0) as client:
        client.list_buffers()
    assert (1, 1) == (len(silent.received), len(leader.received))
    assert gate.caller_left.wait(5.0)


def test_of_many_calls_that_fail_together_one_moves_on() -> None:
    route = Route("a:1,b:1,c:1")
    for _ in range(5):
        route.failed(0, AWAY)
    assert 1 == route.place
    route.failed(1, AWAY)
    route.failed(2, AWAY)
    assert 0 == route.place


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a:1", 1),
        ("a:1,b:2,unix:/c", 3),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", 1),
        ("dns:///breadbox:50051", 1),
    ],
)
def test_addresses_are_taken_apart_but_for_those_that_grpc_reads(text: str, count: int) -> None:
    assert text == check_addresses(text)
    assert count == len(Route(text).addresses)


@pytest.mark.parametrize("text", ["a:1,", ",", "a:1,b", "a:1;b:1", "redis://a:1,b:1"])
def test_a_list_with_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="address"):
        check_addresses(text)


def test_each_address_is_tried_once_without_waiting_even_where_nothing_is_tried_again() -> None:
    policy = RetryPolicy(elapsed_s_max=0.0, places=3)
    budget = RetryBudget(policy, random.Random(0))
    assert [0.0, 0.0, None] == [budget.delay_s_after(AWAY, now=0.0) for _ in range(3)]


def test_after_a_round_of_all_addresses_it_is_waited_as_after_an_attempt_at_one() -> None:
    delays = []
    for places in (1, 2):
        budget = RetryBudget(RetryPolicy(places=places), random.Random(0))
        given = [budget.delay_s_after(AWAY, now=0.0) for _ in range(4 * places)]
        delays.append(given[places - 1 :: places])
    assert delays[0] == delays[1]
