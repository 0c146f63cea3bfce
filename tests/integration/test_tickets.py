"""Tickets through a real server: paced generators, a holder that is killed, a server that is."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import breadbox
from breadbox.errors import TicketNotFoundError
from breadbox.types import GroupEndReason
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE, PER_VERSION, VERSIONS = 4, 3, 12
ADMITTED = breadbox.AdmissionOutcome.ADMITTED


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--preset", "groups"),
        *("--fragments-per-chunk", str(SIZE), "--groups-per-version", str(PER_VERSION)),
        *("--lead-versions", "2", "--staleness-max", "8"),
        log=tmp_path / "log",
    ) as started:
        yield started


GENERATE = """
import random, sys
import breadbox
from breadbox.errors import ClosedError, SessionEndedError, WaitElapsedError
from support.fragments import vector_fragment

address, size = sys.argv[1], int(sys.argv[2])
with breadbox.connect(address) as client:
    while True:
        try:
            tickets = client.tickets(2, max_wait_s=5)
        except WaitElapsedError:
            break
        for ticket in tickets:
            with ticket:
                members = list(range(size))
                random.shuffle(members)
                for index in members:
                    member = vector_fragment(index, worker_id=ticket.group)
                    member.worker_id, member.fragment_index = ticket.group, index
                    member.model_version_min = member.model_version_max = ticket.model_version
                    result = client.append(member)
                    print(result.outcome.value, flush=True)
"""
HOLD = """
import sys
import breadbox

with breadbox.connect(sys.argv[1]) as client:
    tickets = client.tickets(3, max_wait_s=5, lease_s=float(sys.argv[2]))
    with tickets[0], tickets[1], tickets[2]:
        print(*[ticket.group for ticket in tickets], flush=True)
        sys.stdin.read()
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "PATH": "/usr/bin:/bin"},
    )


def member(group: str, index: int, version: int = 0) -> breadbox.Fragment:
    fragment = vector_fragment(index, worker_id=group)
    fragment.worker_id, fragment.fragment_index = group, index
    fragment.model_version_min = fragment.model_version_max = version
    return fragment


def test_paced_generators_ahead_of_a_slow_learner_lose_nothing(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as learner:
        learner.start_session("s")
        generators = [started(GENERATE, server.address, str(SIZE)) for _ in range(2)]
        staleness, worst_open = list[int](), 0
        for version in range(1, VERSIONS + 1):
            with learner.fetch(fragment_count=PER_VERSION * SIZE, max_wait_s=60) as lease:
                staleness += [each.staleness_when_granted for each in lease.references]
                # A slow learner: all tickets of the version are taken before it publishes.
                eventually_sync(lambda: is_all_taken(learner), within_s=30)
                state = learner.get_buffer().state
                worst_open = max(worst_open, state.chunk_count + state.open_chunk_count)
            learner.publish("s", version, {"w": vector_fragment(0).reward})
        outcomes: Counter[str] = Counter()
        for process in generators:
            said, _ = process.communicate(timeout=60)
            assert 0 == process.returncode
            outcomes.update(said.split())
        ends = learner.group_ends()
        counters = learner.get_buffer().state.counters
    assert {"admitted"} == set(outcomes), "nothing was refused"
    assert {GroupEndReason.COMPLETE} == {each.reason for each in ends}, "nothing was thrown away"
    assert (VERSIONS + 2 + 1) * PER_VERSION == len(ends)
    assert counters["tickets_given"] == counters["tickets_ended_group_ended"] == len(ends)
    assert 2 == max(staleness), "no more than the lead"
    assert worst_open <= 2 * PER_VERSION, "those granted at this version count too"


def is_all_taken(learner: breadbox.Client) -> bool:
    state = learner.get_buffer().state
    is_full = state.ticket_waiting_reason.startswith("all 9 tickets of version")
    return is_full and state.ticket_count == 0


def test_a_holder_that_is_killed_loses_its_tickets_once_after_their_lease(
    server: ServerProcess,
) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        with started(HOLD, server.address, "2") as holder:
            assert holder.stdout is not None
            groups = holder.stdout.readline().split()
            with pytest.raises(breadbox.WaitElapsedError):
                # Renewed meanwhile, for longer than their lease.
                _ = [client.tickets(9, max_wait_s=3) for _ in range(2)]
            assert [] == client.group_ends()
            assert ADMITTED is client.append(member(groups[0], 1)).outcome
            holder.kill()
        ends = client.group_ends(max_wait_s=30)
        if len(ends) == 1:
            ends += client.group_ends(ends[-1].number, max_wait_s=30)
        lost = {(group, GroupEndReason.LOST, 0) for group in groups[1:]}
        assert lost == {each[1:] for each in ends}
        client.append_many([member(groups[0], index) for index in (0, 2, 3)])
        assert groups[0] in [each.group for each in client.group_ends(ends[-1].number)]
        counters = client.get_buffer().state.counters
        assert 3 == counters["tickets_ended_expired"]
        assert 0 == counters["tickets_ended_group_ended"]
        assert 2 == len(client.tickets(9, max_wait_s=5))


def test_tickets_and_requests_go_on_over_a_server_that_is_killed(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        held = client.tickets(9, max_wait_s=5)
        assert 9 == len(held)
        late: list[str] = []

        def wait_for_one() -> None:
            with breadbox.connect(server.address) as other:
                late.extend(ticket.group for ticket in other.tickets(1, max_wait_s=60))

        waiting = threading.Thread(target=wait_for_one)
        waiting.start()
        eventually_sync(lambda: client.get_buffer().state.ticket_waiter_count == 1)
        server.kill()
        server.start()
        assert 9 == client.get_buffer().state.ticket_count
        with held[0]:
            client.append_many([member(held[0].group, index) for index in range(SIZE)])
        eventually_sync(lambda: client.get_buffer().state.ticket_waiter_count == 1)
        held[1].give_back()
        waiting.join()
        assert 1 == len(late)
        assert late[0] not in [ticket.group for ticket in held]
        held[1].give_back()
        assert [(held[0].group, GroupEndReason.COMPLETE), (held[1].group, "given_back")] == [
            (each.group, each.reason if each.member_count else each.reason.value)
            for each in client.group_ends()
        ]


def test_a_ticket_is_late_once_its_group_would_be_too_stale(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s", model_version=5)
        first, second = client.tickets(2, max_wait_s=5, lease_s=30)
        assert (5, False) == (first.model_version, first.late)
        client.service.publish_model("s", 13)
        assert not first.late, "at staleness_max"
        client.service.publish_model("s", 14)
        assert (True, True) == (first.late, second.late)
        with pytest.raises(RuntimeError), first:
            raise RuntimeError("generation failed")
        assert f"Ticket({first.group!r}, version 5, given back)" == repr(first)
        second.give_back(member=3)
        assert ["given_back"] * 2 == [each.reason.value for each in client.group_ends()]
        with pytest.raises(TicketNotFoundError, match="ticket-77"):
            client.service.give_back_ticket("ticket-77")


@pytest.mark.parametrize("told_by", ["append", "watch_model"])
def test_a_ticket_is_late_once_an_answer_names_the_next_session(
    server: ServerProcess, told_by: str
) -> None:
    with breadbox.connect(server.address) as client, breadbox.connect(server.address) as learner:
        learner.start_session("s")
        [ticket] = client.tickets(1, max_wait_s=5)
        client.append(member(ticket.group, 0))
        assert not ticket.late
        learner.start_session("t")
        assert not ticket.late, "nobody has said so"
        if told_by == "append":
            outcome = client.append(member(ticket.group, 1)).outcome
            assert breadbox.AdmissionOutcome.WRONG_SESSION is outcome
        else:
            client.watch_model(None)
        assert ticket.late
        [new] = client.tickets(1, max_wait_s=5)
        assert (False, True) == (new.late, ticket.late)


def test_why_a_request_waits_is_said_in_the_error_and_by_explain(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        client.tickets(9, max_wait_s=5)
        with pytest.raises(breadbox.WaitElapsedError, match=r"s for a ticket: all 9 tickets of"):
            client.tickets(1, max_wait_s=0.1)
