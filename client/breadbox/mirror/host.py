"""The process of a mirror: `python -m breadbox.mirror.host LIFE MEMORY`.

Started with descriptors of a socket, which is to live as long as its owner, and of the memory that
it fills. Over the socket comes first what it shall follow; back go lines of the log. Others of the
host reach it at an address:

    attach   answered with what the memory is like, and its descriptor; stays open
    aim      what the buffer holds now
    why      what keeps steps from coming
    failure  what ended the following
    clear    forget all steps

It ends when the socket does, and when its owner has ended.
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

from breadbox.children import end_with_parent
from breadbox.client import connect
from breadbox.errors import PermissionDeniedError, ReplayBufferError
from breadbox.mirror.following import Follower
from breadbox.mirror.holdings import FilledHoldings
from breadbox.mirror.messages import (
    MESSAGE_BYTES_MAX,
    decode,
    encode,
    place_of,
    require_same_user,
)
from breadbox.mirror.shared_memory import Publisher, SharedMemory
from breadbox.options import Tls

BIND_ATTEMPTS: Final = 100
BIND_RETRY_S: Final = 0.05
"""Times that the address is asked for, and seconds between two of them."""


class _ToOwner(logging.Handler):
    """Hands lines of the log to the owner, whose log has its own ways."""

    def __init__(self, life: socket.socket) -> None:
        super().__init__()
        self._life = life

    def emit(self, record: logging.LogRecord) -> None:
        line = {"log": record.name, "level": record.levelno, "text": record.getMessage()[:20_000]}
        with suppress(OSError):  # Nobody listens, or not fast enough: the work goes on.
            self._life.send(encode(line), socket.MSG_DONTWAIT)


class Host:
    """Fills the memory, and answers those who read it.

    Args:
        config: What to follow; see `process.py`.
        memory: Descriptor of the memory.
    """

    def __init__(self, config: dict[str, Any], memory: int) -> None:
        self._shape = {
            "capacity_steps": config["capacity_steps"],
            "frame_stack": config["frame_stack"],
        }
        self._descriptor = memory
        self._attached: set[socket.socket] = set()
        shared = SharedMemory(memory)
        self._held = FilledHoldings(config["capacity_steps"], config["frame_stack"], shared)
        options = dict(config["options"])
        options["tls"] = options["tls"] and Tls(**options["tls"])
        client = connect(config["server"], **options)
        self._follower = Follower(
            self._held,
            self._held.extend,
            client,
            buffer=config["buffer"],
            subscription=config["subscription"],
            columns=config["columns"],
            own_client=client,
        )
        if "begun_count" in config:
            self._follower.go_on_from(config["begun_count"], config["skipped_chunk_count"])
        self._held.on_change = Publisher(shared, self._held, self._follower).publish
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._bind(config["address"])
        self._listener.listen(64)

    def _bind(self, address: str) -> None:
        """Take the address, once one that was killed has let go of it."""
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

    def start(self) -> None:
        """Follow and answer, in threads."""
        self._follower.start()
        threading.Thread(target=self._accept, name="mirror-accept", daemon=True).start()

    def run(self) -> None:
        """Stay until the socket ends; meanwhile it is always known why steps do not come."""
        with self._follower.waiting():
            life_ended.wait()

    def close(self) -> None:
        """End the following; who has attached is told that it is no accident."""
        for connection in list(self._attached):
            with suppress(OSError):
                connection.send(encode({"goodbye": True}), socket.MSG_DONTWAIT)
        self._follower.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            try:
                require_same_user(connection)
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
        try:
            answer = self._answer_to(asked)
        except ReplayBufferError as error:
            answer = error
        connection.send(encode(answer))

    def _answer_to(self, asked: str) -> Any:
        if asked == "aim":
            return self._follower.aim()
        if asked == "why":
            return self._follower.why_nothing_comes()
        if asked == "failure":
            return self._follower.failure
        assert asked == "clear"
        self._held.clear()
        return None


def _watch(life: socket.socket) -> None:
    with suppress(OSError):
        while life.recv(MESSAGE_BYTES_MAX):
            pass
    life_ended.set()


life_ended = threading.Event()
"""The owner has closed the mirror, or has ended."""


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
    host.start()
    threading.Thread(target=_watch, args=(life,), daemon=True).start()
    host.run()
    host.close()
    return 0


if __name__ == "__main__":
    status = main()
    # Threads that answer may be in the middle of something; nobody waits for it.
    os._exit(status)
