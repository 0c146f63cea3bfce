"""Memory that another process fills: what is drawn is whole, whatever is written meanwhile."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from breadbox.mirror import StepMemory
from breadbox.mirror.memory import ATTEMPTS
from breadbox.mirror.sharing.shared_memory import (
    HEAD_BYTES,
    Head,
    SharedMemory,
    SharedStepStorage,
    make_file,
)
from breadbox.model.errors import InvalidRequestError, UnavailableError
from breadbox.shared.child_processes import child_environment
from mirror.shared_writer import filled
from mirror.told_steps import STEPS, problems_of, told_fragment
from support.eventually import eventually_sync
from support.fragments import vector_fragment

TESTS = Path(__file__).parents[1]
SECONDS = 4.0


class Reader(StepMemory):
    """Draws from what another process fills."""

    def __init__(self, capacity: int, frame_stack: Mapping[str, int], descriptor: int) -> None:
        self.holdings = SharedStepStorage(capacity, frame_stack, descriptor, lambda: None)
        self._begin(self.holdings, 1)


@contextlib.contextmanager
def filling(
    capacity: int, *, has_frames: bool, seconds: float = SECONDS
) -> Iterator[tuple[Reader, "subprocess.Popen[bytes]"]]:
    descriptor = make_file()
    command = ["mirror.shared_writer", str(descriptor), str(capacity), str(has_frames)]
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + str(TESTS)
    with subprocess.Popen(
        [sys.executable, "-m", *command, str(seconds)], env=environment, pass_fds=[descriptor]
    ) as process:
        try:
            reader = Reader(capacity, {"obs": 0} if has_frames else {}, descriptor)
            reader.wait_until(1, timeout_s=60)
            yield reader, process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [64, 4096])
@pytest.mark.parametrize("has_frames", [False, True])
def test_no_draw_is_ever_torn_by_a_writer_at_full_speed(capacity: int, *, has_frames: bool) -> None:
    """In the smaller memory all steps go within milliseconds, and everything is forgotten often."""
    rng = np.random.default_rng(5)
    failures: list[str] = []
    draws = 0
    with filling(capacity, has_frames=has_frames) as (reader, _):
        while reader.holdings.session_id != "over":
            try:
                failures += problems_of(reader, rng)
                draws += 1
            except InvalidRequestError as error:
                # All was forgotten a moment ago.
                failures += (
                    [] if "no step" in str(error) or "no whole" in str(error) else [str(error)]
                )
            with reader.holdings.changed:
                reader.holdings.refresh()
        assert reader.inserted_step_count > 20 * capacity or capacity > 64
    assert [] == failures[:3]
    assert draws > 20


def test_who_draws_holds_the_writer_up_where_it_would_never_succeed() -> None:
    """A batch of many more steps than there are always has the oldest one in it."""
    with filling(64, has_frames=False) as (reader, _):
        for _ in range(20):
            with contextlib.suppress(InvalidRequestError):  # All was forgotten a moment ago.
                batch = reader.sample(20_000)
                assert (batch.obs[:, -1] == batch.action).all()


HOLDER = """
import sys
from breadbox.mirror.sharing.shared_memory import SharedStepStorage
holdings = SharedStepStorage(64, {}, int(sys.argv[1]), lambda: None)
with holdings.changed, holdings.held_up():
    print("held", flush=True)
    sys.stdin.readline()
"""


CLOSER = HOLDER.replace(
    "held_up():", "held_up():\n    __import__('os').close(__import__('os').dup(int(sys.argv[1])))"
)


@pytest.mark.parametrize("script", [HOLDER, CLOSER], ids=["held", "closed-elsewhere"])
def test_nothing_is_let_go_of_while_another_process_holds_it_up(script: str) -> None:
    """Also where that process closes another descriptor of the memory meanwhile."""
    descriptor = make_file()
    memory, is_let_go = SharedMemory(descriptor), threading.Event()

    def let_go() -> None:
        with memory.letting_go():
            is_let_go.set()

    thread = threading.Thread(target=let_go)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(descriptor)],
        env=child_environment(),
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert "held\n" == holder.stdout.readline()
        thread.start()
        was_early = is_let_go.wait(0.2)
        holder.stdin.close()
        thread.join(60)
    os.close(descriptor)
    assert (False, True) == (was_early, is_let_go.is_set())


def test_a_draw_by_force_is_copied_again_until_its_steps_are_known_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer that is stopped midway leaves an older head, of steps that it writes over."""
    memory = StepMemory(8, seed=1)
    memory.extend(vector_fragment(0))
    held = memory._held  # noqa: SLF001 - what another process may fill
    looks, torn_until, refresh = 0, 0, held.refresh

    def refreshed() -> Callable[[int], bool]:
        nonlocal looks
        looks += 1
        number, still_has = looks, refresh()
        return lambda step: number > torn_until and still_has(step)

    monkeypatch.setattr(held, "refresh", refreshed)
    torn_until = ATTEMPTS + 3
    assert 2 == len(memory.sample(2).reward)
    assert ATTEMPTS + 4 == looks
    torn_until = 10**9
    with pytest.raises(UnavailableError, match="stopped in the middle"):
        memory.sample(2)
    # Nothing is left locked.
    torn_until = 0
    memory.extend(vector_fragment(1))


def test_a_look_up_by_force_is_repeated_until_it_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = StepMemory(8, seed=1)
    memory.extend(vector_fragment(0))
    held = memory._held  # noqa: SLF001 - what another process may fill
    steady = iter([False] * (ATTEMPTS + 3))
    monkeypatch.setattr(held, "is_steady", lambda: next(steady, True))
    assert 4 == memory._look_up(lambda: held.index.high)  # noqa: SLF001
    assert [] == [*steady]


def test_a_draw_is_tried_again_once_an_episode_has_gone_although_its_own_steps_are_there() -> None:
    """What it looked up of episodes may have been written over by then."""
    descriptor = make_file()
    held, _ = filled(descriptor, 64, {})
    reader = SharedStepStorage(64, {}, os.dup(descriptor), lambda: None)
    first = held.index.episodes.first
    held.extend(told_fragment(0, has_frames=False), 0)
    for index in range(1, 1000):
        still_has, newest = reader.refresh(), reader.index.high - 1
        assert (True, True) == (still_has(newest), reader.is_steady())
        held.extend(told_fragment(index, has_frames=False), index)
        if first != held.index.episodes.first:
            break
    assert newest > held.index.floor, "the step itself is there"
    assert (False, False) == (still_has(newest), reader.is_steady())
    os.close(descriptor)


def test_priorities_of_what_was_all_forgotten_meanwhile_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptor = make_file()
    held, _ = filled(descriptor, 64, {})
    held.extend(told_fragment(0, has_frames=False), 0)
    reader = Reader(64, {}, os.dup(descriptor))
    reader.wait_until(STEPS, timeout_s=60)
    handles = reader.handles()
    refresh = reader.holdings.refresh
    looks = 0

    def refresh_then_forget() -> object:
        nonlocal looks
        looks += 1
        found = refresh()
        if looks == 1:
            held.clear()
        return found

    monkeypatch.setattr(reader.holdings, "refresh", refresh_then_forget)
    assert 0 == reader.update_priorities(handles, np.ones(len(handles)))
    assert len(handles) == reader.late_update_count > 0
    held.extend(told_fragment(1, has_frames=False), 1)
    reader.wait_until(STEPS, timeout_s=60)
    looks = 0
    assert np.isnan(reader.priorities(handles)).all()
    os.close(descriptor)


def test_what_a_killed_writer_left_can_be_drawn_from_and_holds_nobody_up() -> None:
    with filling(4096, has_frames=False, seconds=60) as (reader, process):
        reader.wait_until(10 * STEPS, timeout_s=60)
        process.kill()
        process.wait()
        begun_at = time.monotonic()
        count = len(reader)
        for _ in range(10):
            reader.sample(32)
        with reader.holdings.changed, reader.holdings.held_up():
            assert count == len(reader)
        assert time.monotonic() - begun_at < 30
        eventually_sync(lambda: count == len(reader), "nothing comes any more")


def test_nobody_can_take_the_memory_away_under_a_reader() -> None:
    descriptor = make_file()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, HEAD_BYTES // 2)
    os.close(descriptor)


def test_a_reader_cannot_write() -> None:
    with filling(64, has_frames=False) as (reader, _):
        with pytest.raises(ValueError, match="read-only"):
            reader.holdings.columns.column("reward")[0] = 7.0
        with pytest.raises(InvalidRequestError, match="another process fills"):
            reader.extend(vector_fragment(0), 0)


def seen(head: Head, session_id: str = "s") -> SharedStepStorage:
    """A memory as a reader has seen it."""
    holdings = SharedStepStorage(64, {}, make_file(), lambda: None)
    holdings.head, holdings.session_id = head, session_id
    return holdings


@pytest.mark.parametrize(
    ("head", "session_id", "is_drawn_from"),
    [
        (Head(), "", False),
        (Head(cursor=4), "s", False),
        (Head(cursor=5), "s", True),
        (Head(cursor=2), "another", True),
        (Head(cursor=2, begun_count=1), "s", True),
        (Head(has_failed=1), "", True),
    ],
    ids=["unread", "behind", "as far", "another session", "begun anew", "failed"],
)
def test_a_successor_is_drawn_from_once_it_has_as_much_or_what_there_is_instead(
    head: Head, session_id: str, *, is_drawn_from: bool
) -> None:
    """One that has failed tells why, where the old memory would be drawn from for ever."""
    successor = seen(head, session_id)
    assert is_drawn_from is seen(Head(cursor=5)).is_no_newer_than(successor)
    has_more_than_nothing = is_drawn_from or successor.progress().cursor is not None
    assert has_more_than_nothing is seen(Head()).is_no_newer_than(successor)
