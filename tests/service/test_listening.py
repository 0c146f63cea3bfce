"""Addresses that a server listens on."""

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from breadbox_server.base.errors import StartError
from breadbox_server.rpc.listening import bind
from breadbox_server.settings import Settings

ALONE_S = 0.3
"""For which the first of two waits for the second to come in between."""


class SlowServer:
    """Takes a unix socket as gRPC does: whoever had the path before loses it. But slowly."""

    def __init__(self, began: threading.Event, other_ended: threading.Event) -> None:
        self._began = began
        self._other_ended = other_ended
        self.listener = socket.socket(socket.AF_UNIX)

    def add_insecure_port(self, address: str) -> int:
        self._began.set()
        self._other_ended.wait(ALONE_S)
        path = Path(address.removeprefix("unix:"))
        path.unlink(missing_ok=True)
        self.listener.bind(str(path))
        self.listener.listen()
        return 1


def test_of_two_servers_that_take_a_socket_in_one_moment_one_refuses(tmp_path: Path) -> None:
    settings = Settings(listen=f"unix:{tmp_path}/socket", store=f"file://{tmp_path}/store")
    began, ended = threading.Event(), threading.Event()
    first, second = SlowServer(began, ended), SlowServer(began, ended)
    refused: list[StartError] = []

    def start_second() -> None:
        with suppress(TimeoutError):
            try:
                bind(second, settings, None)  # type: ignore[arg-type]
            except StartError as error:
                refused.append(error)
            finally:
                ended.set()

    with first.listener, second.listener:
        thread = threading.Thread(target=start_second)

        def start_once_the_first_began() -> None:
            began.wait()
            thread.start()

        starting = threading.Thread(target=start_once_the_first_began)
        starting.start()
        bind(first, settings, None)  # type: ignore[arg-type]
        starting.join()
        thread.join()
    [error] = refused
    assert "is in use by another server" in str(error)


def test_a_socket_that_a_killed_server_left_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    settings = Settings(listen=f"unix:{path}", store=f"file://{tmp_path}/store")
    done = threading.Event()
    done.set()
    server = SlowServer(threading.Event(), done)
    with server.listener:
        assert bind(server, settings, None) == f"unix:{path}"  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["unix:{}/no/folder/socket"])
def test_a_socket_in_no_folder_is_refused_with_the_reason(tmp_path: Path, address: str) -> None:
    class Refusing:
        def add_insecure_port(self, address: str) -> int:
            raise RuntimeError("Failed to bind")

    settings = Settings(listen=address.format(tmp_path), store=f"file://{tmp_path}/store")
    with pytest.raises(StartError, match="is its folder there and writable"):
        bind(Refusing(), settings, None)  # type: ignore[arg-type]
