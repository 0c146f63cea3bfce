"""Each step that a `StepWriter` was given is reported under one end of its environment."""

import threading
from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import ClosedError, UnavailableError
from breadbox.model.types import AdmissionOutcome, AppendResult, SchemaPolicy, WorkerSteps
from breadbox.shared.step_ends import REPORTED_ENDS, ends_of, slow_advice
from breadbox.writing import step_writer
from breadbox.writing.step_writer import StepWriter
from support.eventually import eventually_sync
from support.step_client import FakeClient

STALE = AppendResult(AdmissionOutcome.STALE)
AWAY = UnavailableError("away")


def write(writer: StepWriter, count: int, env_count: int = 1, **more: Any) -> None:
    for _ in range(count):
        obs = np.full((env_count, 1), writer.counts.added, np.float32)
        zeros = np.zeros(env_count)
        writer.add(obs, zeros[:, None], zeros, obs + env_count, zeros, zeros, **more)


def ends(client: FakeClient, name: str = "w-0") -> dict[str, int]:
    """The ends in the latest report of a worker, which hold each step once."""
    steps = client.workers[name]
    assert steps.acted_count == sum(ends_of([steps], REPORTED_ENDS).values())
    return ends_of([steps], REPORTED_ENDS)


def test_each_environments_steps_are_reported_at_the_end() -> None:
    client = FakeClient()
    with StepWriter(client, worker_id="w", env_count=2, steps_per_fragment=4) as writer:
        write(writer, 10, env_count=2)
        write(writer, 1, env_count=2, acts=[True, False])
    assert ({"admitted": 11}, {"admitted": 10}) == (ends(client), ends(client, "w-1"))
    assert 4 == client.workers["w-0"].fragment_step_count


def test_steps_that_fill_no_fragment_are_undelivered_at_the_end() -> None:
    client = FakeClient(SchemaPolicy.ONE)
    with StepWriter(client, worker_id="w", steps_per_fragment=4) as writer:
        write(writer, 6)
    assert {"admitted": 4, "undelivered": 2} == ends(client)
    assert (4, 2, 0) == (writer.counts.sent, writer.counts.dropped, writer.counts.waiting)


def test_steps_of_a_session_that_ended_are_refused_or_dropped_while_their_fragment_is_filled() -> (
    None
):
    client = FakeClient(SchemaPolicy.ONE)
    with StepWriter(client, worker_id="w", steps_per_fragment=4) as writer:
        write(writer, 4)
        writer.flush()
        client.session_id = "t"
        write(writer, 7)
        writer.flush()
        write(writer, 4)
    assert {"admitted": 8, "refused": 4, "dropped": 3} == ends(client)


def test_steps_that_the_server_refuses_as_stale_are_refused() -> None:
    class Strict(FakeClient):
        def append_many(self, fragments: Any, **_: Any) -> list[AppendResult]:
            return [STALE for _ in fragments]

    client = Strict()
    with StepWriter(client, worker_id="w", steps_per_fragment=4) as writer:
        write(writer, 6)
    assert {"refused": 6} == ends(client)


def test_steps_that_were_never_sent_are_undelivered() -> None:
    client = FakeClient(SchemaPolicy.ONE)
    writer = StepWriter(client, worker_id="w", steps_per_fragment=4)
    write(writer, 4)
    writer.flush()
    client.failure = AWAY
    write(writer, 4)
    with pytest.raises(UnavailableError):
        writer.flush()
    write(writer, 3)
    with pytest.raises(UnavailableError):
        write(writer, 1)  # It fills a fragment, which nothing takes any more.
    write(writer, 2)
    with pytest.raises(UnavailableError):
        writer.close()
    assert {"admitted": 4, "undelivered": 10} == ends(client)


def test_what_is_still_being_sent_is_reported_so_and_again_when_it_has_its_end() -> None:
    client = FakeClient()
    writer = StepWriter(client, worker_id="w", steps_per_fragment=4)
    client.may_answer.clear()
    write(writer, 4)
    with pytest.raises(TimeoutError):
        writer.close(max_wait_s=0.05)
    assert {} == client.workers
    client.may_answer.set()
    writer.close()
    assert {"admitted": 4} == ends(client)


def test_a_writer_that_waits_reports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment may take minutes for a step; the others are not silent either."""
    monkeypatch.setattr(step_writer, "REPORT_S", 0.01)
    client = FakeClient(SchemaPolicy.ONE)
    with StepWriter(client, worker_id="w", steps_per_fragment=4) as writer:
        write(writer, 3)
        eventually_sync(lambda: "w-0" in client.workers and {"filling": 3} == ends(client))


def test_a_report_that_cannot_be_sent_costs_no_step() -> None:
    class Mute(FakeClient):
        asked = threading.Event()

        def report_episodes(self, *_: Any, **__: Any) -> None:
            self.asked.set()
            raise ClosedError("the client is closed")

    client = Mute()
    with StepWriter(client, worker_id="w", steps_per_fragment=4) as writer:
        write(writer, 4)
    assert client.asked.is_set()
    assert [4] == [each.step_count for each in client.fragments]


def test_the_report_says_how_many_versions_a_fragment_takes() -> None:
    """So that the remedy has numbers, as a rollout worker's has."""
    client = FakeClient()
    with StepWriter(client, worker_id="w", steps_per_fragment=9) as writer:
        for version in range(3, 12):
            writer.model_version = version
            write(writer, 1)
    steps: WorkerSteps = client.workers["w-0"]
    assert 9 / 8 == steps.steps_per_version
    assert "8.0 versions, and staleness_max is 2" in slow_advice([steps], 2)
