"""An environment that does everything wrong, for as long as it takes to see all of it.

`BREADBOX_HOSTILE_S=300 make test ARGS=tests/rollout/test_hostile.py` runs for five minutes.
"""

import os
import sys
import time

import pytest

from breadbox.model.types import EpisodeEnd
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.environments.failures import FailureKind
from support.eventually import eventually_sync
from support.rollout_service import FakeService
from support.rollout_worker import running_worker
from support.scripted_env import check_fragment, check_sequence

DURATION_S = float(os.environ.get("BREADBOX_HOSTILE_S", "5"))
SEED = int(os.environ.get("BREADBOX_HOSTILE_SEED", "11"))
LIMIT_S = 200.0
EXPECTED_KINDS = {
    kind.value
    for kind in FailureKind
    if kind
    not in (
        FailureKind.BUILD_HUNG,
        FailureKind.CLOSE_RAISED,
        FailureKind.FRUITLESS,
        FailureKind.NO_FRAMES,
        FailureKind.RECORDING_FAILED,
    )
}


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_S + DURATION_S + 60.0)
def test_a_hostile_environment_is_survived_counted_and_never_believed() -> None:
    service = FakeService(staleness_max=100)
    service.publish("s", 0)
    before = descriptor_count()
    spec = EnvSpec(name="support.scripted_env:make_hostile")
    began_at = time.monotonic()
    with running_worker(
        service,
        "",
        spec=spec,
        env_count=6,
        envs_per_process=2,
        seed=SEED,
        step_s_max=2.0,
        reset_s_max=2.0,
        memory_bytes_max=400 * 2**20,
        policy="lstm",
    ) as rollout:
        failures = rollout.worker.stats.failures

        def saw_everything() -> bool:
            assert not rollout.errors, rollout.errors
            long_enough = time.monotonic() - began_at >= DURATION_S
            return long_enough and set(failures) >= EXPECTED_KINDS and len(service.fragments) >= 50

        try:
            eventually_sync(saw_everything, "all of it", within_s=LIMIT_S + DURATION_S)
        finally:
            sys.stdout.write(f"seed {SEED}, failures {dict(failures)}\n")
    assert descriptor_count() <= before
    fragments = rollout.by_worker()
    for sequence in fragments.values():
        check_sequence(sequence)
        for fragment in sequence:
            check_fragment(fragment)
    aborted = sum(report.end is EpisodeEnd.ABORTED for report in service.reports)
    assert aborted > 0
    assert {"admitted", "undelivered"} >= {
        k for k, n in rollout.player.sender.counts().items() if n
    }
