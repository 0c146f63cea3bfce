"""What a console reads is deleted in time, also while it reads, or does not go on."""

import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import breadbox
from breadbox.model.errors import PayloadMissingError
from breadbox.model.types import BufferConfig, FragmentReference, FullPolicy
from breadbox_console.watch import READ_LEASE_S
from support.console import console, film, played
from support.eventually import eventually_sync
from support.server_process import ServerProcess

# Finds the console among the processes by its command line.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("cold_starts"),
]

EPISODES = 8


@contextmanager
def looking(url: str) -> Iterator[None]:
    """Open all episodes, again and again, inside the block: each time all fragments are read."""
    is_over = threading.Event()

    def look(start: int) -> None:
        for at in itertools.count(start):
            if is_over.is_set():
                return
            with suppress(OSError):
                get(f"{url}api/buffers/small/episodes/{at % EPISODES + 1}")

    threads = [threading.Thread(target=look, args=(start,)) for start in range(4)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()


def get(url: str) -> str:
    """Return what is at a URL."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read(), "utf-8")


def read_lease_count(server: ServerProcess) -> int:
    """Return the read leases that live now."""
    (line,) = re.findall(r"^breadbox_read_leases (\S+)$", get(server.metrics_url), re.MULTILINE)
    return int(float(line))


def stop_in_a_read(process: psutil.Process, server: ServerProcess) -> None:
    """Suspend a console while it has a lease."""

    def is_reading() -> bool:
        process.suspend()
        if read_lease_count(server):
            return True
        process.resume()
        return False

    eventually_sync(is_reading, "a console that is stopped in a read")


def is_missing(client: breadbox.Client, references: Sequence[FragmentReference]) -> bool:
    """Return True if the payload of each fragment is deleted."""
    for each in references:
        try:
            client.load_fragments([each], columns=["reward"])
        except PayloadMissingError:
            continue
        return False
    return True


@pytest.mark.parametrize("is_stopped", [False, True], ids=["reading", "stopped"])
def test_chunks_that_a_console_reads_are_deleted_within_its_lease(
    is_stopped: bool, tmp_path: Path
) -> None:
    arguments = ("--store", f"file://{tmp_path}/store", "--metrics-listen", "127.0.0.1:0")
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
        console(server.address, tmp_path / "console.log") as url,
    ):
        limits = BufferConfig(capacity_chunks=EPISODES, full_policy=FullPolicy.EVICT)
        client.create_buffer("small", limits)
        client.start_session("run", buffer="small")
        (process,) = [each for each in psutil.Process().children() if "console" in each.cmdline()]
        obs = film(width=320, height=240)
        for at in range(EPISODES):
            client.append(played(at, obs=obs, episode_id=at), buffer="small")
        read = client.service.read_fragments(buffer="small")
        assert read.lease_id is not None
        client.service.release_lease(read.lease_id, buffer="small")

        def is_seen() -> bool:
            with suppress(OSError):
                return bool(EPISODES == json.loads(get(f"{url}api/buffers/small/episodes"))["all"])
            return False

        eventually_sync(is_seen, "all episodes in the list")
        with looking(url):
            try:
                if is_stopped:
                    stop_in_a_read(process, server)
                for at in range(EPISODES, 2 * EPISODES):
                    client.append(played(at, obs=obs, episode_id=at), buffer="small")
                evicted_at = time.monotonic()
                eventually_sync(lambda: is_missing(client, read.fragments), "deletions")
                took_s = time.monotonic() - evicted_at
            finally:
                process.resume()
        assert took_s < READ_LEASE_S + 1.0, f"{took_s:.2f} s"
