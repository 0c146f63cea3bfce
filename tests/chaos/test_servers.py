"""Servers that a run ends, of which some have ended by themselves."""

import signal
from pathlib import Path

import pytest

from chaos.servers import Servers
from support.eventually import eventually_sync
from support.server_process import ServerProcess

pytestmark = pytest.mark.integration


def test_a_server_that_has_ended_by_itself_leaves_no_pipe_open(tmp_path: Path) -> None:
    """Else a later test is told of it, when its memory is collected."""
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log")
    server.start()
    assert server._process is not None  # noqa: SLF001 - whose pipe it is
    said = server._process.stdout  # noqa: SLF001
    assert said is not None
    server.signal(signal.SIGTERM)
    eventually_sync(lambda: server.poll() == 0, "the server ending")
    Servers([server], []).kill()
    assert said.closed
    server.end()
