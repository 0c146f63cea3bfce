"""A mirror in a process of its own, over a real server: the same draws, and what deaths mean."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

import breadbox
from breadbox.mirror import Prioritised, ReplayMirror
from breadbox.mirror.sharing import process as process_module
from breadbox.mirror.sharing.process import OwnedSource
from breadbox.model.errors import (
    BufferNotFoundError,
    ClosedError,
    InvalidRequestError,
    PermissionDeniedError,
    WaitElapsedError,
)
from breadbox.shared.child_processes import child_environment
from mirror.fake_feed import FakeFeed
from mirror.goals import goal_fragments
from mirror.told_steps import DEPTH, STEPS, told_fragment
from support.eventually import eventually_sync
from support.fragments import vector_fragment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

WAIT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[breadbox.Client]:
    with breadbox.local_server(preset="off-policy") as client:
        yield client


@pytest.fixture
def client(server: breadbox.Client, request: pytest.FixtureRequest) -> Iterator[breadbox.Client]:
    """Of a buffer of the test's own."""
    name = f"b{abs(hash(request.node.name))}"
    server.create_buffer(name, breadbox.BufferConfig.preset("off-policy"))
    with breadbox.connect(server.address, buffer=name) as client:
        client.start_session("s")
        yield client


def mirrored(client: breadbox.Client, **options: Any) -> ReplayMirror:
    options = {"capacity_steps": 1000, "seed": 3, "process": True, **options}
    return ReplayMirror(client.address, buffer=client.buffer, **options)


def process_of(mirror: ReplayMirror) -> "subprocess.Popen[bytes]":
    source = mirror._source  # noqa: SLF001 - it is nobody else's to see
    assert isinstance(source, OwnedSource)
    return source.process


def is_running(process_id: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, 0)
        return True
    return False


def flat(batch: Any) -> list[Any]:
    batches = batch if isinstance(batch, list) else [batch]
    return [
        leaf.tolist()
        for each in batches
        for leaf in (each.handle, each.obs, each.next_obs, each.reward, each.weight)
    ]


DRAWS: dict[str, Callable[[ReplayMirror], Any]] = {
    "steps": lambda mirror: mirror.sample(64),
    "windows": lambda mirror: mirror.sample(64, n_step=3),
    "by priority": lambda mirror: mirror.sample(64, prioritised=Prioritised(0.7, 0.5)),
    "sequences": lambda mirror: mirror.sample_sequences(16, length=20, burn_in=3),
    "sequences by priority": lambda mirror: mirror.sample_sequences(
        16, length=20, prioritised=True
    ),
    "episodes": lambda mirror: mirror.sample_episodes(8),
    "positions": lambda mirror: mirror.at(range(mirror.step_count)),
}


@pytest.mark.parametrize("has_frames", [False, True])
def test_draws_are_those_of_a_thread(client: breadbox.Client, *, has_frames: bool) -> None:
    """From the beginning, after steps have gone, and after priorities were updated."""
    options = {"frame_stack": {"obs": 0}} if has_frames else {}
    with mirrored(client, **options) as ours, mirrored(client, process=False, **options) as theirs:
        for start, stop in ((0, 30), (30, 130)):
            client.append_many(
                [told_fragment(index, has_frames=has_frames) for index in range(start, stop)]
            )
            for mirror in (ours, theirs):
                mirror.catch_up(WAIT_S)
            for name, draw in DRAWS.items():
                a, b = draw(ours), draw(theirs)
                assert flat(a) == flat(b), name
                if name == "by priority":
                    for mirror in (ours, theirs):
                        mirror.update_priorities(a.handle, 1.0 + a.handle % 7)
        assert ours.handles().tolist() == theirs.handles().tolist()
        assert ours.priorities(a.handle).tolist() == theirs.priorities(a.handle).tolist()
        assert (1000, 130 * STEPS) == (ours.step_count, ours.inserted_step_count)
        assert theirs.size_bytes == ours.size_bytes
        assert DEPTH == 4
        assert (0, "s") == (ours.skipped_chunk_count, ours.session_id)
        eventually_sync(lambda: ours.lag_s == 0.0, "it keeps up")


def test_goals_are_those_of_a_thread(client: breadbox.Client) -> None:
    client.append_many(list(goal_fragments(6)))
    with mirrored(client) as ours, mirrored(client, process=False) as theirs:
        found = []
        for mirror in (ours, theirs):
            mirror.catch_up(WAIT_S)
            batch = mirror.sample_goals(32, lambda achieved, *_: achieved[:, 0])
            found.append([batch.handle.tolist(), batch.obs["desired_goal"].tolist()])
        assert found[0] == found[1]


ATTACH = """
import sys
from breadbox.model.errors import ClosedError
from breadbox.mirror import ReplayMirror
with ReplayMirror.attach(sys.stdin.readline().strip(), seed=5) as mirror:
    mirror.wait_until(160, timeout_s=60)
    batch = mirror.sample(64)
    mirror.update_priorities(batch.handle, batch.reward + 8)
    print(batch.handle.tolist(), int(max(mirror.priorities(batch.handle))), flush=True)
    sys.stdin.readline()
    try:
        mirror.wait_until(1_000, timeout_s=60)
    except ClosedError as error:
        print(error, flush=True)
"""


def test_other_processes_draw_from_the_same_memory(client: breadbox.Client) -> None:
    """Priorities are of each process alone; all are told when the owner closes the mirror."""
    client.append_many([told_fragment(index, has_frames=False) for index in range(10)])
    with contextlib.ExitStack() as stack:
        mirror = stack.enter_context(mirrored(client, seed=5))
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ATTACH],
                    env=child_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        mirror.wait_until(160, timeout_s=WAIT_S)
        expected = mirror.sample(64).handle.tolist()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(mirror.share() + "\n")
            rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout is not None
            assert f"{expected} 9\n" == rank.stdout.readline()
        assert [1.0] == np.unique(mirror.priorities(expected)).tolist()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        mirror.close()
        for rank in ranks:
            assert rank.stdout is not None
            assert "has closed it" in rank.stdout.readline()
        assert 64 == len(mirror.sample(64))


def test_a_mirrors_process_uses_the_session_in_the_name_of_its_owner(
    client: breadbox.Client,
) -> None:
    client.append_many([vector_fragment(index) for index in range(4)])
    with mirrored(client) as mirror:
        mirror.wait_until(16, timeout_s=WAIT_S)
        assert "" == client.get_buffer().state.session_users


def test_a_session_that_ends_and_a_clear_empty_it_for_all(client: breadbox.Client) -> None:
    client.append_many([vector_fragment(index) for index in range(4)])
    with mirrored(client) as mirror, ReplayMirror.attach(mirror.share()) as attached:
        for each in (mirror, attached):
            each.wait_until(16, timeout_s=WAIT_S)
        client.start_session("next")
        for each in (mirror, attached):
            eventually_sync(lambda each=each: each.session_id == "next", within_s=WAIT_S)  # type: ignore[misc]
            assert 0 == each.step_count
        client.append_many([vector_fragment(index, session_id="next") for index in range(2)])
        attached.catch_up(WAIT_S)
        assert [0] * 4 + [1] * 4 == attached.at(range(8)).obs[:, 0].astype(int).tolist()
        attached.clear()
        assert (0, 0) == (len(mirror), len(attached))


def test_a_process_that_is_killed_is_started_again_and_draws_go_on(
    client: breadbox.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same steps under the same handles, for who has attached, too."""
    client.append_many([told_fragment(index, has_frames=False) for index in range(20)])
    with mirrored(client) as mirror, ReplayMirror.attach(mirror.share()) as attached:
        for each in (mirror, attached):
            each.wait_until(20 * STEPS, timeout_s=WAIT_S)
        handles = mirror.handles().tolist()
        killed = process_of(mirror)
        killed.kill()
        eventually_sync(lambda: process_of(mirror) is not killed, "it is noticed")
        client.append(told_fragment(20, has_frames=False))
        for each in (mirror, attached):
            assert len(each.sample(32)) == 32
            each.wait_until(21 * STEPS, timeout_s=WAIT_S)
            assert handles == each.handles().tolist()[: len(handles)]
            batch = each.sample(64)
            assert (batch.obs[:, -1] == batch.action).all()
    told = [each for each in caplog.messages if "process ended" in each]
    assert ["the mirror's process ended by SIGKILL"] == [each[:37] for each in told]


def test_a_process_that_dies_again_and_again_is_an_error(
    client: breadbox.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "DEATHS_MAX", 0)
    client.append(vector_fragment(0))
    with mirrored(client) as mirror:
        mirror.wait_until(4, timeout_s=WAIT_S)
        process_of(mirror).kill()
        with pytest.raises(ClosedError, match=r"ended by SIGKILL: .*capacity_steps"):
            mirror.wait_until(8, timeout_s=WAIT_S)


OWNER = """
import signal, sys, time
from breadbox.mirror import ReplayMirror
mirror = ReplayMirror(sys.argv[1], buffer=sys.argv[2], process=True)
mirror.wait_until(4, timeout_s=60)
print(mirror._source.process.pid, mirror.share(), flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_owner_is_killed(client: breadbox.Client) -> None:
    client.append(vector_fragment(0))
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, client.address, client.buffer],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        process_id, address = owner.stdout.readline().split()
        with ReplayMirror.attach(address) as attached:
            assert 4 == len(attached)
            owner.send_signal(signal.SIGKILL)
            eventually_sync(lambda: not is_running(int(process_id)), "its process ends")
            with pytest.raises(ClosedError, match="has ended"):
                attached.wait_until(5, timeout_s=WAIT_S)
    assert not {each for each in set(os.listdir("/dev/shm")) - before if "mirror" in each}
    with pytest.raises(ClosedError, match="no mirror is at this address"):
        process_module._connected(address, 0.0)  # noqa: SLF001 - without its wait


def test_ctrl_c_in_the_terminal_is_the_owners_to_heed(client: breadbox.Client) -> None:
    with mirrored(client) as mirror:
        client.append(vector_fragment(0))
        mirror.wait_until(4, timeout_s=WAIT_S)
        process_of(mirror).send_signal(signal.SIGINT)
        client.append(vector_fragment(1))
        mirror.wait_until(8, timeout_s=WAIT_S)
        process = process_of(mirror)
    assert 0 == process.returncode


def test_closing_ends_the_process_and_keeps_the_steps(client: breadbox.Client) -> None:
    client.append(vector_fragment(0))
    mirror = mirrored(client)
    mirror.wait_until(4, timeout_s=WAIT_S)
    mirror.close()
    mirror.close()
    assert mirror.closed
    assert 0 == process_of(mirror).returncode
    assert 4 == len(mirror.sample(4))
    mirror.close()


def test_errors_and_warnings_of_the_process_are_those_of_a_thread(
    server: breadbox.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ReplayMirror(server.address, buffer="nobody-made-it", process=True) as mirror,
        pytest.raises(BufferNotFoundError, match="nobody-made-it") as raised,
    ):
        mirror.wait_until(1, timeout_s=WAIT_S)
    assert "nobody-made-it" == raised.value.buffer
    server.create_buffer("on-policy", breadbox.BufferConfig(staleness_max=2))
    with ReplayMirror(server.address, buffer="on-policy", process=True) as mirror:
        eventually_sync(
            lambda: any("is for on-policy learners" in each for each in caplog.messages),
            within_s=WAIT_S,
        )
        with pytest.raises(WaitElapsedError, match="1 steps to sample wanted, 0 there; No session"):
            mirror.wait_until(1, timeout_s=2.0)


def test_a_fork_of_the_owner_is_told_to_attach(client: breadbox.Client) -> None:
    client.append(vector_fragment(0))
    with mirrored(client) as mirror:
        mirror.wait_until(4, timeout_s=WAIT_S)
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            told = b"nothing"
            try:
                mirror.sample(1)
            except ClosedError as error:
                told = str(error).encode()
            finally:
                os.write(send, told)
                os._exit(0)
        assert b"attach in this process" in os.read(receive, 1000)
        os.waitpid(child, 0)
        os.close(receive)
        os.close(send)
        assert 4 == len(mirror.sample(4))


def test_batches_wait_for_what_the_process_takes_in(client: breadbox.Client) -> None:
    client.append(vector_fragment(0))
    with mirrored(client) as mirror:
        mirror.wait_until(4, timeout_s=WAIT_S)
        batches = mirror.batches(8, samples_per_insert=2.0)
        taken: list[int] = []
        thread = threading.Thread(target=lambda: taken.append(len(next(batches))))
        thread.start()
        client.append(vector_fragment(1))
        thread.join(WAIT_S)
        assert [8] == taken
        batches.close()


def test_what_cannot_be_shared_is_refused(client: breadbox.Client) -> None:
    with pytest.raises(InvalidRequestError, match="needs the address of a server"):
        ReplayMirror(cast("Any", FakeFeed()), process=True)
    with (
        mirrored(client, process=False) as mirror,
        pytest.raises(InvalidRequestError, match="process must be True"),
    ):
        mirror.share()
    with pytest.raises(InvalidRequestError, match="not returned by share"):
        ReplayMirror.attach("localhost:50051")
    with mirrored(client) as mirror, pytest.raises(InvalidRequestError, match="cannot be added"):
        mirror.extend(vector_fragment(0))


def test_another_users_process_is_refused(
    client: breadbox.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirrored(client) as mirror:
        mirror.wait_until(0, timeout_s=WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(PermissionDeniedError, match=r"of user .*, this one of 12345"):
                ReplayMirror.attach(mirror.share())


def test_a_client_lends_its_address_and_credentials(client: breadbox.Client) -> None:
    client.append(vector_fragment(0))
    with ReplayMirror(client, process=True, capacity_steps=100) as mirror:
        mirror.wait_until(4, timeout_s=WAIT_S)
    assert not client.closed
