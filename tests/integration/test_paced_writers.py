"""Fragments of environments under tickets, through a real server: slow ones are waited for."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.errors import InvalidRequestError
from support.eventually import eventually_sync
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PER_VERSION, STEPS = 4, 4
ONE = np.zeros((1, 2), np.float32)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--stale", "wait", "--staleness-max", "2"),
        *("--groups-per-version", str(PER_VERSION), "--lead-versions", "2"),
        log=tmp_path / "log",
    ) as started:
        yield started


def add(writer: breadbox.StepWriter) -> None:
    writer.add(ONE, np.zeros(1), [0.0], ONE, [False], [False])


def produce(
    address: str, name: str, ended: threading.Event, may_step: threading.Semaphore | None = None
) -> None:
    """Fill fragments as fast as tickets come, or a step each time that it may."""
    with (
        breadbox.connect(address) as client,
        breadbox.StepWriter(client, worker_id=name, steps_per_fragment=STEPS, pace=True) as writer,
    ):
        while not ended.is_set():
            if may_step is not None:
                may_step.acquire()
            writer.model_version = client.watch_model().model_version or 0
            add(writer)


def test_a_fetch_waits_for_the_environment_that_steps_slowly(server: ServerProcess) -> None:
    """The slow one steps only when a fetch has waited for half a second."""
    ended, may_step = threading.Event(), threading.Semaphore(1)
    trained, reasons = dict[str, list[int]](), list[str]()
    names = [f"fast{number}" for number in range(PER_VERSION)]
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        threads = [
            threading.Thread(target=produce, args=(server.address, name, ended)) for name in names
        ]
        threads.append(
            threading.Thread(target=produce, args=(server.address, "slow", ended, may_step))
        )
        threads[-1].start()
        eventually_sync(lambda: client.get_buffer().state.ticket_count == 1)
        for thread in threads[:-1]:
            thread.start()
        version = 0
        while len(trained.get("slow-0", [])) < 2:
            try:
                lease = client.fetch(PER_VERSION, max_wait_s=0.5)
            except breadbox.WaitElapsedError as error:
                reasons.append(str(error))
                may_step.release()
                continue
            with lease:
                for each in lease.references:
                    staleness = trained.setdefault(each.metadata.worker_id, [])
                    staleness.append(each.staleness_when_granted)
            version += 1
            client.publish("s", version, {"w": np.zeros(1)})
        counters = client.get_buffer().state.counters
        ended.set()
        may_step.release()
        # What waits for a ticket goes on once there is another session.
        client.start_session("t")
        for thread in threads:
            thread.join(60)
    assert {"slow-0", *(f"{name}-0" for name in names)} == set(trained)
    assert any("the chunk of ticket" in each and "begun at" in each for each in reasons)
    assert 2 >= max(max(each) for each in trained.values())
    assert (0, 0) == (counters["fragments_stale"], counters["chunks_evicted_stale"])


def test_tickets_are_given_back_with_their_fragments_and_at_the_end(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        with breadbox.StepWriter(client, steps_per_fragment=STEPS, pace=True) as writer:
            for _ in range(2 * STEPS + 1):
                add(writer)
            writer.flush(max_wait_s=30)
            eventually_sync(lambda: client.get_buffer().state.ticket_count == 1)
            assert 2 == client.get_buffer().state.chunk_count
        state = client.get_buffer().state
        assert (0, 3) == (state.ticket_count, state.counters["tickets_ended_given_back"])


HOLD = """
import sys
import numpy as np
import breadbox

one = np.zeros((1, 2), np.float32)
with breadbox.connect(sys.argv[1]) as client, breadbox.StepWriter(client, pace=True) as writer:
    writer.add(one, np.zeros(1), [0.0], one, [False], [False])
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_producer_that_is_killed_is_waited_for_until_its_lease_is_over(
    server: ServerProcess,
) -> None:
    shorter = "import breadbox.writing.pacing\nbreadbox.writing.pacing.LEASE_S = 2.0\n"
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        arguments = [sys.executable, "-c", shorter + HOLD, server.address]
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            assert "held\n" == holder.stdout.readline()
            holder.kill()
        client.publish("s", 2, {"w": np.zeros(1)})
        with breadbox.StepWriter(client, steps_per_fragment=STEPS, worker_id="w") as writer:
            writer.model_version = 2
            for _ in range(PER_VERSION * STEPS):
                add(writer)
        with client.fetch(PER_VERSION, max_wait_s=30) as lease:
            assert {"w-0"} == {each.metadata.worker_id for each in lease.references}
        counters = client.get_buffer().state.counters
        assert 1 == counters["tickets_ended_expired"]


@pytest.mark.parametrize("limits", [{}, {"fragments_per_chunk": 2, "groups_per_version": 4}])
def test_a_buffer_that_gives_no_tickets_for_single_fragments_is_refused(
    server: ServerProcess, limits: dict[str, Any]
) -> None:
    with breadbox.connect(server.address) as client:
        config = breadbox.BufferConfig(stale=breadbox.StalePolicy.EVICT, lead_versions=0, **limits)
        if not limits:
            config = breadbox.BufferConfig(
                stale=breadbox.StalePolicy.EVICT, lead_versions=0, groups_per_version=0
            )
        client.create_buffer("other", config)
        client.start_session("s", buffer="other")
        with pytest.raises(InvalidRequestError, match="groups_per_version"):
            breadbox.StepWriter(client, buffer="other", pace=True)
