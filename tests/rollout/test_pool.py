"""Real environment processes under supervision."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.environments.failures import FailureKind
from breadbox_rollout.processes.pool import (
    EnvironmentStartError,
    EnvProcesses,
    Event,
    GroupFailed,
    GroupReady,
    PoolOptions,
)
from support import scripted_env
from support.eventually import eventually_sync

LIMIT_S = 60.0


def without_line(error: Exception) -> str:
    """What an error says, but for the number of a line of the scripted environment."""
    said, _, line = str(error).rpartition(":")
    assert line.isdecimal(), error
    return said


@contextmanager
def pool_of(script: str, count: int = 1, **options: Any) -> Iterator[EnvProcesses]:
    spec = EnvSpec(name="support.scripted_env:make", options={"script": script})
    pool = EnvProcesses(spec, PoolOptions(env_count=count, **options))
    try:
        yield pool
    finally:
        pool.close()


def next_event(pool: EnvProcesses) -> Event:
    """The next single event; more at once would be a mistake of the test."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        events = pool.poll(1.0)
        if events:
            assert 1 == len(events), events
            return events[0]
    raise AssertionError("nothing happened")


def poll_forever(pool: EnvProcesses) -> None:
    while True:
        pool.poll(1.0)


def children() -> set[int]:
    """Ids of the processes that this one started."""
    return {process.pid for process in psutil.Process().children()}


def is_running(process_id: int) -> bool:
    """Whether a process exists and has not ended; nobody may have waited for it yet."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X")


def step(pool: EnvProcesses, action: int = 0) -> Event:
    pool.arrays(0).action[0] = action
    pool.step(0)
    return next_event(pool)


def failure(pool: EnvProcesses) -> GroupFailed:
    event = step(pool)
    assert isinstance(event, GroupFailed)
    return event


def test_a_process_starts_tells_its_spaces_and_steps() -> None:
    with pool_of("..t") as pool:
        assert GroupReady(0, None) == next_event(pool)
        assert (4, 1) == (pool.parts[0].action_space.n, pool.live_env_count)  # type: ignore[attr-defined]
        assert [True] == pool.arrays(0).first.tolist()
        assert GroupReady(0, None) == step(pool, action=2)
        assert (0.2, 1) == (pool.arrays(0).reward[0], pool.arrays(0).obs["clock"][0, 1])


def test_a_failure_inside_is_a_note_and_the_process_lives_on() -> None:
    with pool_of("!.") as pool:
        next_event(pool)
        event = step(pool)
        assert isinstance(event, GroupReady)
        assert event.notes is not None
        assert ["step_raised"] == [entry["kind"] for entry in event.notes["failures"]]
        assert GroupReady(0, None) == step(pool)
        assert 0 == pool.restart_count


def test_a_process_that_is_killed_is_noticed_and_started_again() -> None:
    """The ancestor kept both ends of the pipe, so it never saw the end."""
    with pool_of(".x") as pool:
        next_event(pool)
        step(pool)
        event = failure(pool)
        assert (FailureKind.DIED, "killed by SIGKILL", False) == (
            event.kind,
            event.detail,
            event.final,
        )
        assert 1 == pool.arrays(0).answer_count[0]
        assert 0 == pool.live_env_count
        assert GroupReady(0, None) == next_event(pool)
        assert 0 == pool.arrays(0).answer_count[0]
        assert 1 == pool.restart_count


def test_a_step_that_hangs_is_killed_after_its_limit() -> None:
    """The ancestor had no limit on a step."""
    with pool_of(".h", step_s_max=0.5) as pool:
        next_event(pool)
        step(pool)
        assert FailureKind.STEP_HUNG is failure(pool).kind


def test_a_reset_that_hangs_has_a_limit_of_its_own_and_keeps_the_last_answer() -> None:
    """Reward and end of the finished episode are still there."""
    with pool_of(".R", step_s_max=60.0, reset_s_max=0.5) as pool:
        next_event(pool)
        step(pool)
        assert FailureKind.RESET_HUNG is failure(pool).kind
        arrays = pool.arrays(0)
        assert (2, True, 1.0) == (arrays.answer_count[0], arrays.terminated[0], arrays.reward[0])


def test_a_process_that_takes_too_much_memory_is_replaced() -> None:
    with pool_of("m", memory_bytes_max=400 * 2**20) as pool:
        next_event(pool)
        event: Event = GroupReady(0, None)
        while isinstance(event, GroupReady):
            event = step(pool)
        assert FailureKind.MEMORY_LIMIT is event.kind


def test_an_environment_that_never_starts_ends_the_pool_with_its_reason() -> None:
    pool = EnvProcesses(EnvSpec(name="support.scripted_env:make_broken"), PoolOptions(env_count=2))
    with pool, pytest.raises(EnvironmentStartError) as caught:
        poll_forever(pool)
    problem = "no environment starts; build_raised: RuntimeError('no such device')"
    assert f"{problem} at {scripted_env.__file__}" == without_line(caught.value)


def drive(pool: EnvProcesses, seen: list[Event]) -> None:
    """Step whatever is ready until the pool gives up; *seen* gets what happened until then."""
    while len(seen) < 10_000:
        for event in pool.poll(1.0):
            seen.append(event)
            if isinstance(event, GroupReady):
                pool.arrays(event.group).action[:] = 0
                pool.step(event.group)


@pytest.mark.parametrize("per_process", [1, 2])
def test_environments_that_never_answer_a_step_end_the_pool_after_a_known_number_of_attempts(
    per_process: int,
) -> None:
    """It lived for ever, with 27,000 log lines in 15 s."""
    seen: list[Event] = []
    with (
        pool_of("!", count=2, envs_per_process=per_process) as pool,
        pytest.raises(EnvironmentStartError) as caught,
    ):
        drive(pool, seen)
    problem = "no environment answers a step; fruitless: RuntimeError('no step today')"
    assert f"{problem} at {scripted_env.__file__}" == without_line(caught.value)
    attempts = [event.notes for event in seen if event.notes is not None]
    assert 29 <= len(attempts) <= 60


def test_an_environment_that_answered_before_it_failed_for_good_is_started_again() -> None:
    with pool_of("." + "!" * 40) as pool:
        kinds: list[FailureKind] = []
        while len(kinds) < 4:
            for event in pool.poll(1.0):
                if isinstance(event, GroupFailed):
                    kinds.append(event.kind)
                else:
                    pool.arrays(0).action[0] = 0
                    pool.step(0)
    # A new process begins the script anew: each answers one step.
    assert [FailureKind.FRUITLESS] * 4 == kinds


def test_restarts_have_a_limit_and_the_last_one_ends_the_pool() -> None:
    with pool_of("x", restarts_max=1) as pool:
        next_event(pool)
        assert False is failure(pool).final
        next_event(pool)
        with pytest.raises(EnvironmentStartError, match="failed more than 1 times"):
            step(pool)


def test_an_idle_process_that_dies_is_an_event_too() -> None:
    others = children()
    with pool_of(".") as pool:
        next_event(pool)
        (process_id,) = children() - others
        os.kill(process_id, signal.SIGKILL)
        event = next_event(pool)
        assert isinstance(event, GroupFailed)
        assert FailureKind.DIED is event.kind


def test_closing_leaves_no_process_behind_even_one_that_hangs() -> None:
    others = children()
    with pool_of("h") as pool:
        next_event(pool)
        pool.arrays(0).action[0] = 0
        pool.step(0)
        (process_id,) = children() - others
        pool.close(grace_s=0.2)
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_processes_die_with_the_thread_that_started_them() -> None:
    """Nothing may stay behind when the worker is killed, even if it hangs in a step."""
    pool = EnvProcesses(
        EnvSpec(name="support.scripted_env:make", options={"script": "h"}), PoolOptions(env_count=1)
    )

    def start_and_end() -> None:
        next_event(pool)
        pool.arrays(0).action[0] = 0
        pool.step(0)

    thread = threading.Thread(target=start_and_end)
    thread.start()
    thread.join(LIMIT_S)
    event = next_event(pool)
    pool.close()
    assert isinstance(event, GroupFailed)
    assert "killed by SIGKILL" == event.detail


def test_what_an_environment_started_ends_with_its_process_however_that_ends(
    tmp_path: Path,
) -> None:
    id_file = tmp_path / "helper"
    options = {"script": "x", "id_file": str(id_file)}
    spec = EnvSpec(name="support.scripted_env:make_with_helper", options=options)
    with EnvProcesses(spec, PoolOptions(env_count=1)) as pool:
        next_event(pool)
        first = int(id_file.read_text())
        assert FailureKind.DIED is failure(pool).kind
        eventually_sync(lambda: not is_running(first), "the first helper ends")
        next_event(pool)
        second = int(id_file.read_text())
    assert second != first
    eventually_sync(lambda: not is_running(second), "the second helper ends")


def test_a_process_that_ends_before_it_is_told_what_to_do_is_a_failure_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class EndsAtOnce(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(["true"], **options)
            self.wait()

    with pool_of(".") as pool:
        monkeypatch.setattr(subprocess, "Popen", EndsAtOnce)
        event = next_event(pool)
    assert isinstance(event, GroupFailed)
    assert (FailureKind.DIED, "ended with exit status 0") == (event.kind, event.detail)


def test_several_environments_share_a_process() -> None:
    with pool_of(".....t", count=5, envs_per_process=2) as pool:
        assert [range(0, 2), range(2, 4), range(4, 5)] == pool.groups
        ready: set[int] = set()
        while len(ready) < 3:
            ready |= {event.group for event in pool.poll(1.0)}
        assert {0, 1, 2} == ready
        assert 5 == pool.live_env_count
        assert (2, 1) == (len(pool.arrays(1).first), len(pool.arrays(2).first))
