"""A server of one's own: there at once, gone with whoever started it, and nothing left of it."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

import click
import pytest

import breadbox
from breadbox.cli.main import load_command
from breadbox.local import ServerOptions
from breadbox.model.errors import UnavailableError
from breadbox.shared import extras
from support.eventually import eventually_sync
from support.fragments import vector_fragment

# They look for processes by their command lines, as a user would.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("cold_starts"),
]

ROOT = Path(__file__).resolve().parents[2]
NOT_OF_A_SERVER_OF_ONES_OWN = {
    *("config", "listen", "local_socket", "ready_file", "ephemeral"),
    *(
        "client_store",
        "viewer_store",
        "share_store_password",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "tokens",
    ),
    *("allow_plaintext", "allow_anonymous", "take_over", "delete_orphans"),
    *("accept_store", "standby"),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go that are not in memory: nothing may be left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def contents(folder: Path) -> list[str]:
    return os.listdir(folder)


def store_of(server: int) -> Path:
    command = Path(f"/proc/{server}/cmdline").read_text().split("\0")
    assert "serve" in command
    return Path(command[command.index("--store") + 1].removeprefix("file://"))


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children_of(process_id: int) -> list[int]:
    path = Path(f"/proc/{process_id}/task/{process_id}/children")
    return [int(word) for word in path.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_is_put_in_comes_out_and_nothing_is_left(temporary: Path) -> None:
    others = set(children_of(os.getpid()))
    with breadbox.local_server(
        uses_max=3, capacity_bytes="64MiB", sampler="oldest_first"
    ) as client:
        (server,) = set(children_of(os.getpid())) - others
        store = store_of(server)
        config = client.get_buffer().config
        client.start_session("s")
        client.append(vector_fragment())
        with client.fetch(1, max_wait_s=10.0) as lease:
            (batch,) = lease.batches(1)
        assert any(store.iterdir())
    told = (config.uses_max, config.capacity_bytes, config.sampler)
    assert (3, 64 * 2**20, "oldest_first") == told
    assert [[1.0] * 4] == batch.reward.tolist()
    assert not is_alive(server)
    assert (False, []) == (store.exists(), contents(temporary))


async def test_it_is_there_for_asyncio_too(temporary: Path) -> None:
    async with breadbox.aio.local_server(staleness_max=7) as client:
        await client.start_session("s")
        await client.append(vector_fragment())
        described = await client.get_buffer()
    assert (7, 1) == (described.config.staleness_max, described.state.fragment_count)
    assert [] == contents(temporary)


async def test_a_start_that_is_cancelled_leaves_no_server(temporary: Path) -> None:
    others = set(children_of(os.getpid()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), breadbox.aio.local_server():
            pass
    assert others == set(children_of(os.getpid()))
    assert [] == contents(temporary)


@pytest.mark.parametrize("place", ["main", "thread"])
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path, temporary: Path, place: str) -> None:
    """However it was started: from a thread that has ended since, too, without ending with that."""
    script = tmp_path / "own.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, threading
            from contextlib import ExitStack
            import breadbox

            stack = ExitStack()
            clients = []

            def start():
                clients.append(stack.enter_context(breadbox.local_server()))

            if sys.argv[1] == "thread":
                thread = threading.Thread(target=start)
                thread.start()
                thread.join()
            else:
                start()
            clients[0].start_session("s")
            print("ready", flush=True)
            sys.stdin.readline()
            print(clients[0].get_buffer().session_id, flush=True)
            sys.stdin.readline()
            """
        )
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent:
        assert "ready\n" == parent.stdout.readline()
        (server,) = children_of(parent.pid)
        store = store_of(server)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert "s\n" == parent.stdout.readline(), "the server lives on after the thread"
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
    eventually_sync(lambda: not is_alive(server), within_s=30)
    assert (False, []) == (store.exists(), contents(temporary))


def test_a_module_of_the_working_directory_is_not_mistaken_for_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breadbox_server").mkdir()
    (tmp_path / "click.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    with breadbox.local_server() as client:
        assert "default" == client.get_buffer().name


def test_settings_of_other_servers_in_the_environment_are_not_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BREADBOX_USES_MAX", "9")
    monkeypatch.setenv("BREADBOX_STORE", "redis://192.0.2.1:1/0")
    with breadbox.local_server() as client:
        assert 1 == client.get_buffer().config.uses_max


def test_an_option_that_is_out_of_its_range_is_told_with_what_the_server_said(
    temporary: Path,
) -> None:
    with pytest.raises(UnavailableError, match="--uses-max must be"):
        breadbox.local_server(uses_max=0).__enter__()
    assert [] == contents(temporary)


def test_an_unknown_option_is_told_with_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"'uses'.*uses_max"):
        breadbox.local_server(uses=1).__enter__()  # type: ignore[call-arg]


def test_without_the_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        extras, "find_spec", lambda name: None if name == "grpc_health" else object()
    )
    with pytest.raises(ModuleNotFoundError, match=r"'grpc_health'.*pip install .*\[server\]"):
        breadbox.local_server().__enter__()


def test_its_options_are_those_of_serve() -> None:
    """What serve can do is left out only where it makes no sense for a server of one's own."""
    serve = load_command("serve")
    flags = {
        max(parameter.opts, key=len).removeprefix("--").replace("-", "_")
        for parameter in serve.params
        if isinstance(parameter, click.Option)
    }
    assert flags - {"help"} - NOT_OF_A_SERVER_OF_ONES_OWN == set(ServerOptions.__annotations__)


def test_the_fixtures_give_each_test_a_buffer_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent(
            """
            import pytest

            SEEN = []

            @pytest.mark.parametrize("number", [1, 2])
            def test_mine(breadbox_client, breadbox_server, number):
                assert "" == breadbox_client.get_buffer().session_id
                breadbox_client.start_session("s")
                assert breadbox_client.address == breadbox_server.address
                assert breadbox_client.buffer not in SEEN
                SEEN.append(breadbox_client.buffer)

            def test_nothing_is_left(breadbox_client):
                names = {each.name for each in breadbox_client.list_buffers()}
                assert {"default", breadbox_client.buffer} == names
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "breadbox.testing", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (0, True) == (done.returncode, "3 passed" in done.stdout), done.stdout + done.stderr


def test_pytest_finds_the_fixtures_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"breadbox.testing": "breadbox.testing"} == project["entry-points"]["pytest11"]


def test_it_takes_a_preset_and_what_is_given_besides() -> None:
    with breadbox.local_server(preset="off-policy", uses_max=7) as client:
        config = client.get_buffer().config
    assert (2**40, 7, breadbox.SchemaPolicy.RAGGED) == (
        config.staleness_max,
        config.uses_max,
        config.schema,
    )
