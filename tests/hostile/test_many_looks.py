"""A token that looks without end, in a process of its own, costs other tokens little."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import breadbox
from hostile.harness import TESTS, attacked_server
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.server_process import plain_environment
from support.token_files import write_tokens

pytestmark = pytest.mark.timeout(240)

LOOKS = 1600
WATCHED_S = 2.0
ROUNDS_MAX = 3
"""Other work of this machine may come and go between the two rates of a round."""
LOOK_S_MAX = 1.0
SHARE_MIN = 0.5
"""Of its quiet rate another token keeps at least this under attack."""


@contextmanager
def onlooker(address: str, method: str, token: str) -> Iterator[None]:
    # An attack has a machine of its own elsewhere: what it costs the server is looked for.
    command = ["nice", "-n", "5", sys.executable, "-m", "hostile.onlooker", address, method]
    command.append(str(LOOKS))
    environment = plain_environment() | {"BREADBOX_TOKEN": token, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=TESTS)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"looking\n"
        yield
    finally:
        process.kill()
        process.communicate()


def in_flight(metrics_url: str) -> float:
    """Calls that the server has received and not answered."""
    with urllib.request.urlopen(metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("breadbox_calls "))


class Team:
    """Appends and fetches one fragment after the other, and counts."""

    def __init__(self, client: breadbox.Client) -> None:
        self._client = client
        self._index = 0

    def rate(self) -> float:
        """Calls per second for a while."""
        began, calls = time.monotonic(), 0
        while time.monotonic() < began + WATCHED_S:
            calls += self.work()
        return calls / (time.monotonic() - began)

    def work(self) -> int:
        """Append, fetch and release; return the number of calls."""
        self._client.append(vector_fragment(self._index), buffer="team")
        self._client.fetch(1, max_wait_s=10, buffer="team").release()
        self._index += 1
        return 3


@pytest.mark.parametrize("method", ["GetBuffer", "ListBuffers", "GetStoreConfig", "WatchModel"])
def test_another_team_keeps_half_of_its_rate_beside_looks_without_end(
    tmp_path: Path, method: str
) -> None:
    lines = ("admin team buffers=team", "admin boss", "viewer page", "viewer other")
    team, boss, page, other = write_tokens(tmp_path / "tokens", *lines)
    server = attacked_server(
        *("--store", f"file://{tmp_path}/store", "--tokens", str(tmp_path / "tokens")),
        *("--metrics-listen", "127.0.0.1:0"),
        log=tmp_path / "log",
    )
    with (
        server,
        breadbox.connect(server.address, token=boss) as admin,
        breadbox.connect(server.address, token=team, deadline_s=60.0) as client,
        breadbox.connect(server.address, token=other) as honest,
    ):
        admin.create_buffer("team")
        client.start_session("s", buffer="team")
        ours = Team(client)
        ours.rate()
        for _ in range(ROUNDS_MAX):
            quiet = ours.rate()
            with onlooker(server.address, method, page):
                # Looks are answered without a pause until others work.
                eventually_sync(
                    lambda: ours.work() > 0 and in_flight(server.metrics_url) > 0.9 * LOOKS,
                    "the attack's calls in flight",
                    within_s=60.0,
                )
                attacked = ours.rate()
                began = time.monotonic()
                honest.get_buffer()
                look_s = time.monotonic() - began
            sys.stdout.write(
                f"{method}: {quiet:.0f}/s quiet, {attacked:.0f}/s attacked, a look {look_s:.3f} s"
                + "\n"
            )
            if attacked >= SHARE_MIN * quiet and look_s < LOOK_S_MAX:
                break
        assert attacked >= SHARE_MIN * quiet
        assert look_s < LOOK_S_MAX, "a look of another token does not wait behind the attack's"
