"""Many trainings, each with a buffer, one after another; and what is left of those killed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import breadbox
from breadbox.cli.main import cli
from breadbox_adapters.run_replay import RunReplay
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.server_process import ServerProcess
from support.token_files import write_tokens

HOWS = ("named", "killed")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    store = f"file://{tmp_path}/store"
    with ServerProcess("--store", store, log=tmp_path / "server.log") as running:
        yield running


def train(server: ServerProcess, run: str | None) -> RunReplay:
    """What a training does that uses an adapter's replay buffer, in few steps."""
    replay = RunReplay(server=server.address, run=run, capacity_steps=100, prefix="sb3")
    one = np.zeros((1, 2), np.float32)
    replay.add(one, one[:, 0], [1.0], one, [False], [False])
    replay.make_ready()
    assert 1 == len(replay.mirror)
    return replay


def be_killed(replay: RunReplay) -> None:
    """Let go of everything as the system does for a process that is killed: nothing is deleted."""
    replay._end.detach()  # noqa: SLF001 - what else would run at this process's end
    replay.mirror.close()
    replay.client.close()


@pytest.mark.parametrize(
    ("how", "runs"),
    [("killed", 12), *(pytest.param(how, 100, marks=pytest.mark.long) for how in HOWS)],
)
def test_trainings_in_a_row_work_whose_buffers_stay(
    server: ServerProcess, how: str, runs: int
) -> None:
    """A hundred, of a sweep."""
    for number in range(runs):
        replay = train(server, f"trial-{number}" if how == "named" else None)
        if how == "named":
            replay.close()
        else:
            be_killed(replay)
    with breadbox.connect(server.address) as client:
        assert runs < len(client.list_buffers())


def test_trainings_without_a_name_that_end_leave_no_buffer(server: ServerProcess) -> None:
    for _ in range(10):
        train(server, None).close()
    with breadbox.connect(server.address) as client:
        assert ["default"] == [each.name for each in client.list_buffers()]


def test_buffers_that_nobody_uses_are_deleted_by_prefix_and_those_in_use_stay(
    server: ServerProcess,
) -> None:
    def deleted(*arguments: str) -> list[str]:
        command = ["buffers", "delete", *arguments, "--json", "--server", server.address]
        done = CliRunner().invoke(cli, [*command, "--yes"])
        assert 0 == done.exit_code, done.output
        names: list[str] = json.loads(done.stdout)["deleted"]
        return names

    with breadbox.connect(server.address) as client:
        client.create_buffer("other")
        be_killed(train(server, None))
        (left,) = {each.name for each in client.list_buffers()} - {"default", "other"}
        assert [] == deleted("--prefix", "sb3-", "--idle-s", "3600")
        running = train(server, None)
        eventually_sync(lambda: client.get_buffer(left).state.idle_s > 2.0, "an idle buffer")
        assert client.get_buffer(running.buffer).state.idle_s < 1.0
        assert [left] == deleted("--prefix", "sb3-", "--idle-s", "2")
        running.close()
        assert {"default", "other"} == {each.name for each in client.list_buffers()}


def test_a_buffer_is_in_use_while_a_call_waits_or_a_lease_is_alive(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.create_buffer("b")
        client.start_session("s", buffer="b")
        client.append(vector_fragment(0), buffer="b")
        eventually_sync(lambda: client.get_buffer("b").state.idle_s > 1.0, "an idle buffer")
        with client.fetch(fragment_count=1, max_wait_s=5, buffer="b"):
            assert 0 == client.get_buffer("b").state.idle_s
        assert client.get_buffer("b").state.idle_s < 1.0


def test_a_buffer_that_is_only_looked_at_is_idle(tmp_path: Path) -> None:
    admin, viewer = write_tokens(tmp_path / "tokens", "admin boss", "viewer page")
    arguments = ("--store", f"file://{tmp_path}/store", "--tokens", str(tmp_path / "tokens"))
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address, token=admin) as client,
        breadbox.connect(server.address, token=viewer) as page,
        ThreadPoolExecutor() as waiting,
    ):
        for name in ("read", "monitored", "viewed"):
            client.create_buffer(name)
            client.start_session("s", buffer=name)
            client.append(vector_fragment(0), buffer=name)
        reads = [
            waiting.submit(read, 0, max_wait_s=60, buffer=name)
            for name, read in (
                ("read", client.service.read_fragments),
                ("monitored", partial(client.service.read_fragments, is_look=True)),
                ("viewed", page.service.read_fragments),
            )
        ]
        eventually_sync(lambda: page.get_buffer("monitored").state.idle_s > 1.0, "an idle buffer")
        eventually_sync(lambda: page.get_buffer("viewed").state.idle_s > 1.0, "an idle buffer")
        assert 0 == client.get_buffer("read").state.idle_s
        for name in ("read", "monitored", "viewed"):
            client.append(vector_fragment(1), buffer=name)
        assert [1, 1, 1] == [each.result().cursor for each in reads]


def test_the_limit_names_its_option_and_how_to_make_room(tmp_path: Path) -> None:
    arguments = ("--store", f"file://{tmp_path}/store", "--buffers-max", "2")
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.create_buffer("b")
        with pytest.raises(breadbox.errors.LimitExceededError, match="--buffers-max") as caught:
            client.create_buffer("c")
    assert "breadbox buffers delete --prefix" in str(caught.value)
