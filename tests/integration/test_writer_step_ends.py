"""Steps of `StepWriter`, through a real server: each has one end, and the slow are named."""

from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.shared.step_ends import ends_of, left_out
from breadbox.writing import step_writer
from rollout.test_step_ends import command, of, series
from support.eventually import eventually_sync
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

T = 4
FAST_COUNT, SLOW_COUNT = 6, 2


class Environments:
    """They count their steps, and never end."""

    def __init__(self, writer: breadbox.StepWriter, count: int) -> None:
        self.writer, self.count, self.time = writer, count, 0

    def step(self, count: int) -> None:
        zeros = np.zeros(self.count)
        for _ in range(count):
            obs = np.full((self.count, 1), self.time, np.float32)
            self.writer.add(obs, zeros, zeros, obs + 1, zeros, zeros)
            self.time += 1


def rounds(
    client: breadbox.Client, fast: Environments, slow: Environments, versions: range
) -> None:
    """For each version a fragment of each fast environment, and a step of each slow one."""
    for version in versions:
        client.publish("s", version, {"weight": np.zeros(1)})
        fast.writer.model_version = slow.writer.model_version = version
        fast.step(T)
        slow.step(1)
        fast.writer.flush()
        slow.writer.flush()
        with client.fetch(FAST_COUNT, max_wait_s=10):
            pass


def test_the_slow_are_named_and_the_sum_of_ends_is_what_each_environment_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a `StepWriter` were in no report, so that it was never named as left out."""
    monkeypatch.setattr(step_writer, "REPORT_S", 0.05)
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--metrics-listen", "127.0.0.1:0"),
        *("--fragments-per-chunk", "1", "--capacity-chunks", "12"),
        log=tmp_path / "server.log",
    )
    with server, breadbox.connect(server.address) as client:
        client.start_session("s")
        client.publish("s", 1, {"weight": np.zeros(1)})

        def workers() -> list[breadbox.types.WorkerSteps]:
            return list(client.get_buffer(with_workers=True).workers)

        def made(name: str, count: int) -> Environments:
            writer = breadbox.StepWriter(
                client, worker_id=name, env_count=count, steps_per_fragment=T
            )
            return Environments(writer, count)

        fast, slow = made("fast", FAST_COUNT), made("slow", SLOW_COUNT)
        rounds(client, fast, slow, range(2, 11))
        eventually_sync(
            lambda: ["slow-0", "slow-1"] == [each.worker_id for each in left_out(workers())]
        )
        told = f"{SLOW_COUNT} of {FAST_COUNT + SLOW_COUNT} environments are never trained on"
        assert told in command(server.address, "explain", "--seconds", "0.5")
        assert "LEFT OUT" in command(server.address, "stats")
        by_end = {"trained": 9.0 * T * FAST_COUNT, "refused": 2.0 * T * SLOW_COUNT}
        eventually_sync(
            lambda: by_end.items() <= series(server.metrics_url, "breadbox_worker_steps").items()
        )
        eventually_sync(
            lambda: {"slow": 2.0} == series(server.metrics_url, "breadbox_workers_left_out")
        )
        fast.step(5 * T + 1)  # No learner reads them: 12 chunks stay, the others are evicted.
        fast.writer.flush()
        client.start_session("t")
        fast.step(T)
        fast.writer.flush()  # Full by then, so it is refused; what came after it is dropped.
        fast.step(2)
        for writer in (fast.writer, slow.writer):
            writer.close()
        client.end_session("t")
        found = workers()
    acted = {"fast": fast.time, "slow": slow.time}
    for each in found:
        assert acted[each.worker_id.partition("-")[0]] == each.acted_count
        assert each.acted_count == sum(ends_of([each]).values()), each
    fast_ends, slow_ends = (ends_of(of(found, name)) for name in ("fast", "slow"))
    assert {"refused": 2 * T * SLOW_COUNT, "undelivered": SLOW_COUNT} == slow_ends
    assert {"trained", "evicted", "refused", "dropped", "undelivered"} == set(fast_ends)
    assert 5 * T * FAST_COUNT == fast_ends["evicted"]
