"""The process of a mirror: `python -m breadbox.mirror.sharing.host LIFE MEMORY`.

LIFE and MEMORY are descriptors: a socket, open as long as its owner lives, over which configuration
comes and log lines go, and the memory to fill. Other processes send requests:

attach   return the shape of the memory and its descriptor; the connection stays open
target   return the point that stands for all that the buffer holds now
why      return what keeps steps from coming
failure  return the error that ended the reader
clear    remove all steps
"""

import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from breadbox.client import connect
from breadbox.mirror.following import MirrorReader, Selection
from breadbox.mirror.sharing.process import (
    MESSAGE_BYTES_MAX,
    check_same_user,
    decode,
    encode,
    place_of,
)
from breadbox.mirror.sharing.shared_memory import Publisher, SharedMemory
from breadbox.mirror.storage.step_storage import FilledStepStorage
from breadbox.model.errors import PermissionDeniedError, ReplayBufferError
from breadbox.model.options import Tls, calling_as
from breadbox.shared.child_processes import end_with_parent

BIND_ATTEMPTS: Final = 100
BIND_RETRY_S: Final = 0.05
"""Most attempts to bind the address, and seconds between two of them."""


class _ToOwner(logging.Handler):
    def __init__(self, life: socket.socket) -> None:
        super().__init__()
        self._life = life

    def emit(self, record: logging.LogRecord) -> None:
        line = {"log": record.name, "level": record.levelno, "text": record.getMessage()[:20_000]}
        with suppress(OSError):  # The owner is gone or slow: drop the line.
            self._life.send(encode(line), socket.MSG_DONTWAIT)


class Host:
    """Fill the memory (a descriptor), and answer the processes that read it."""

    def __init__(self, config: dict[str, Any], memory: int) -> None:
        self._shape = {
            "capacity_steps": config["capacity_steps"],
            "frame_stack": config["frame_stack"],
        }
        self._descriptor = memory
        self._attached: set[socket.socket] = set()
        shared = SharedMemory(memory)
        self._held = FilledStepStorage(config["capacity_steps"], config["frame_stack"], shared)
        options = dict(config["options"])
        options["tls"] = options["tls"] and Tls(**options["tls"])
        with calling_as(config["process"]):
            client = connect(config["server"], **options)
        selection = Selection(*config["selection"])
        self._reader = MirrorReader(
            self._held, self._held.extend, client, selection, own_client=client
        )
        if "begun_count" in config:
            self._reader.go_on_from(config["begun_count"], config["skipped_chunk_count"])
        self._held.on_change = Publisher(shared, self._held, self._reader).publish
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._bind(config["address"])
        self._listener.listen(64)

    def _bind(self, address: str) -> None:
        """Bind the address, once a killed predecessor has released it."""
        for _ in range(BIND_ATTEMPTS):
            try:
                self._listener.bind(place_of(address))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(BIND_RETRY_S)
            else:
                return
        raise OSError(errno.EADDRINUSE, f"{address} is taken")

    def run(self) -> None:
        """Follow and answer until the owner has closed the mirror, or has ended."""
        self._reader.start()
        threading.Thread(target=self._accept, name="mirror-accept", daemon=True).start()
        with self._reader.waiting():  # So that it keeps states of the buffer for `why`.
            life_ended.wait()
        for connection in list(self._attached):
            with suppress(OSError):
                connection.send(encode({"goodbye": True}), socket.MSG_DONTWAIT)
        self._reader.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            try:
                check_same_user(connection)
                while request := connection.recv(MESSAGE_BYTES_MAX):
                    self._answer(connection, json.loads(request)["ask"])
            except PermissionDeniedError as error:
                connection.send(encode(error))
            finally:
                self._attached.discard(connection)

    def _answer(self, connection: socket.socket, asked: str) -> None:
        if asked == "attach":
            self._attached.add(connection)
            socket.send_fds(connection, [encode(self._shape)], [self._descriptor])
            return
        answer: Any = None
        try:
            if asked == "target":
                answer = self._reader.target()
            elif asked == "why":
                answer = self._reader.why_nothing_comes()
            elif asked == "failure":
                answer = self._reader.failure
            elif asked == "clear":
                self._held.clear()
        except ReplayBufferError as error:
            answer = error
        connection.send(encode(answer))


def _watch(life: socket.socket) -> None:
    with suppress(OSError):
        while life.recv(MESSAGE_BYTES_MAX):
            pass
    life_ended.set()


life_ended = threading.Event()
"""Set when the owner has closed the mirror, or has ended."""


def main() -> int:
    """Serve with the descriptors named in the arguments."""
    # The owner decides when to end; Ctrl-C in its terminal must not end the memory first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: life_ended.set())
    end_with_parent()
    life, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    request = life.recv(MESSAGE_BYTES_MAX)
    if not request:
        return 0
    config = decode(request)
    root = logging.getLogger()
    root.addHandler(_ToOwner(life))
    root.setLevel(config["log_level"])
    host = Host(config, memory)
    threading.Thread(target=_watch, args=(life,), daemon=True).start()
    host.run()
    return 0


if __name__ == "__main__":
    status = main()
    # Threads may be in the middle of an answer; do not wait for them.
    os._exit(status)
