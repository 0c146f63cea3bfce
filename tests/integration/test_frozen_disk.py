"""A payload's disk is frozen: the server answers all that needs no disk, ends in order, goes on."""

import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import breadbox
from breadbox.model.errors import ReplayBufferError, UnavailableError, WaitElapsedError
from breadbox.model.types import FragmentMetadata
from breadbox.payload import write_fragments
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]

CALL_S = 4.0
SIZE_MIB = 300


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE_MIB * 2**20)
    try:
        run("mkfs.ext4", "-q", str(image))
        run("mount", "-o", "loop", str(image), str(folder))
        run("fsfreeze", "-f", str(folder))
        run("fsfreeze", "-u", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
        pytest.skip(f"a disk cannot be mounted and frozen here: {error}")
    try:
        yield folder
    finally:
        run("umount", "--lazy", str(folder))


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    run("fsfreeze", "-f", str(disk))
    try:
        yield
    finally:
        run("fsfreeze", "-u", str(disk))


def lag_s(server: ServerProcess) -> float:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("breadbox_loop_lag_seconds "):
                return float(line.split()[1])
    raise AssertionError("no lag is told")


def test_a_server_that_is_started_on_a_frozen_disk_names_it_and_goes_on_with_the_disk(
    disk: Path, tmp_path: Path
) -> None:
    server = ServerProcess("--store", f"file://{disk}/store", log=tmp_path / "log")
    with server:
        server.stop()
        with frozen(disk):
            starting = threading.Thread(target=server.start, args=(60.0,))
            starting.start()
            told = f"the start waits for --store file://{disk}/store, for 5 s now"
            eventually_sync(lambda: told in (tmp_path / "log").read_text())
        starting.join()
        with breadbox.connect(server.address) as client:
            assert "default" == client.get_buffer().name


@pytest.mark.parametrize("journal", ["redis", "beside the payloads"])
def test_a_server_whose_disk_is_frozen_serves_others_and_goes_on(
    journal: str, disk: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        more: tuple[str, ...] = ()
        if journal == "redis":
            more = ("--journal", stack.enter_context(RedisServer()).url)
        server = ServerProcess(
            *("--store", f"file://{disk}/store", "--fragments-per-chunk", "1", *more),
            *("--metrics-listen", "127.0.0.1:0"),
            log=tmp_path / "log",
        )
        stack.enter_context(server)
        client = stack.enter_context(
            breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=0.0)
        )
        client.start_session("s")
        (payload,) = write_fragments(client.store, [vector_fragment(0)])
        metadata = FragmentMetadata(
            worker_id="w0",
            fragment_index=0,
            session_id="s",
            model_version_min=0,
            model_version_max=0,
            payload=payload,
            step_count=4,
        )
        ends: list[BaseException | None] = []
        # A journal that is frozen, too, is an outage.
        outcomes = (WaitElapsedError, UnavailableError)[: 1 if journal == "redis" else 2]

        def announce() -> None:
            try:
                client.service.append_fragments([metadata])
            except ReplayBufferError as error:
                ends.append(error)

        with frozen(disk):
            announcing = threading.Thread(target=announce)
            announcing.start()
            until = time.monotonic() + CALL_S
            while time.monotonic() < until:
                assert "default" in [each.name for each in client.list_buffers()]
                assert lag_s(server) < 1.0
                with pytest.raises(outcomes):
                    client.fetch(1, 0.1)
            began_at = time.monotonic()
            with pytest.raises(ReplayBufferError):
                client.append(vector_fragment(1))
            assert time.monotonic() - began_at < 2 * CALL_S
            announcing.join(2 * CALL_S)
            assert 1 == len(ends)
            eventually_sync(lambda: client.get_buffer().state.outage != "", "an outage")
        with breadbox.connect(server.address, reconnect_s=60.0) as patient:
            patient.service.append_fragments([metadata])
            assert 1 == patient.get_buffer().state.chunk_count
        assert 0 == server.stop()


def test_a_server_whose_disk_is_frozen_drains_when_it_is_asked_to_end(
    disk: Path, tmp_path: Path
) -> None:
    """The kernel keeps a process for as long as a thread of it waits for such a disk."""
    server = ServerProcess("--store", f"file://{disk}/store", log=tmp_path / "log")
    with (
        server,
        breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=0.0) as client,
    ):
        client.start_session("s")
        with frozen(disk):
            with pytest.raises(ReplayBufferError):
                client.append(vector_fragment(0))
            with pytest.raises(ReplayBufferError):
                client.create_buffer("other")
            server.signal(15)
            eventually_sync(
                lambda: "rpc.leading: stopped" in server.log.read_text(), "the end of its drain"
            )
        assert 0 == server.wait()
