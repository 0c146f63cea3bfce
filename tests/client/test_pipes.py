"""A pipe, or a device, in place of a file that a user names is refused: it would wait for ever."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from breadbox.cli.base import Unusable
from breadbox.cli.command import read_config
from breadbox.model.errors import InvalidRequestError, StoreUrlError
from breadbox.model.options import ClientOptions, Tls
from breadbox.model.paths import read_regular
from breadbox.stores.urls import parse_store_url
from breadbox_offline.files.readers import is_readable
from breadbox_server.access.tls import TlsFiles, server_credentials
from breadbox_server.access.tokens import TokenFile
from breadbox_server.base.errors import StartError

pytestmark = pytest.mark.timeout(20)

ENDS_IN_C = """
import ctypes, os
from breadbox.cli.signals import signals_in_thread
with signals_in_thread(lambda number: os._exit(number)):
    print("ready", flush=True)
    ctypes.CDLL(None).poll(None, 0, 60_000)
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (read_regular, OSError),
        (read_config, Unusable),
        (TokenFile, StartError),
        (lambda path: server_credentials(TlsFiles(path, path), lambda: None), StartError),
        (lambda path: Tls(ca_file=path).credentials(), InvalidRequestError),
        (lambda path: ClientOptions(token=f"@{path}").metadata(), InvalidRequestError),
        (lambda path: parse_store_url(f"rediss://h:1/0?ssl_ca_certs={path}"), StoreUrlError),
    ],
)
def test_a_pipe_is_refused_wherever_a_file_is_named(
    read: Callable[[Path], object], error: type[Exception], pipe: Path
) -> None:
    with pytest.raises(error, match="pipe"):
        read(pipe)


def test_a_device_and_a_folder_are_refused_and_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert b"words" == read_regular(tmp_path / "link")
    with pytest.raises(OSError, match="device"):
        read_regular("/dev/zero")
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_a_pipe_in_a_folder_of_episodes_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    os.mkfifo(path)
    assert not is_readable(path)


def test_a_signal_is_taken_while_the_main_thread_hangs_in_a_call_of_the_system() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDS_IN_C], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready\n" == process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert int(signal.SIGTERM) == process.wait(10)
