"""Talk to a mirror's process of this user, from its owner or an attached one, in JSON lines."""

import json
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from typing import Any, Final

from breadbox.mirror.following import Progress, Selection, Target
from breadbox.mirror.sharing.shared_memory import SharedStepStorage, make_file
from breadbox.model import errors
from breadbox.model.errors import (
    ClosedError,
    InvalidRequestError,
    PermissionDeniedError,
    ReplayBufferError,
)
from breadbox.model.options import ClientOptions, process_name
from breadbox.shared.child_processes import child_environment, owned_environment

_log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 1 << 16
_ADDRESS_PREFIX: Final = "breadbox-mirror-"
START_S: Final = 30.0
"""Seconds within which a started process must be reachable."""
RESTART_S: Final = 10.0
"""Seconds for which an attached process looks for the successor of a killed one."""
CLOSE_S: Final = 5.0
"""Seconds after which a process that does not end by itself is killed."""
DEATHS_MAX: Final = 3
"""Most restarts of a process that ends by itself, within `DEATHS_WITHIN_S`."""
DEATHS_WITHIN_S: Final = 60.0
"""Seconds over which `DEATHS_MAX` is counted."""
_RETRY_S: Final = 0.02


def place_of(address: str) -> str:
    """Return the abstract socket name of an address, which leaves no file behind."""
    return "\0" + address


def check_same_user(connection: socket.socket) -> None:
    """Raise PermissionDeniedError if the other end is another user's process."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user_id, _ = struct.unpack("3i", data)
    if user_id != os.geteuid():
        raise PermissionDeniedError(
            f"the process at the other end is of user {user_id}, this one of {os.geteuid()}: a "
            "mirror is shared among processes of one user"
        )


def encode(message: Any) -> bytes:
    """Encode plain data, or an error, as a message."""
    if isinstance(message, BaseException):
        message = {"error": _described(message)}
    return json.dumps(message, default=os.fspath).encode()


def decode(data: bytes) -> Any:
    """Decode a message, or raise the error that it is."""
    message = json.loads(data)
    if isinstance(message, dict) and "error" in message:
        raise _remade(message["error"])
    return message


def _described(error: BaseException) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in vars(error).items()
        if value is None or isinstance(value, str | int | float)
    }
    return {"kind": type(error).__name__, "text": str(error)[:10_000], "fields": plain}


def _remade(described: dict[str, Any]) -> ReplayBufferError:
    kind = getattr(errors, described["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, ReplayBufferError)):
        return ReplayBufferError(f"{described['kind']}: {described['text']}")
    error = kind.__new__(kind)
    error.args = (described["text"],)
    vars(error).update(described["fields"])
    return error


def _connected(address: str, within_s: float) -> socket.socket:
    over_at = time.monotonic() + within_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(place_of(address))
            check_same_user(connection)
        except ConnectionRefusedError as error:
            connection.close()
            if time.monotonic() >= over_at:
                raise ClosedError(
                    "no mirror is at this address: the process that made it has closed it or "
                    "ended, or is in another container or on another host"
                ) from error
            time.sleep(_RETRY_S)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


class ProcessSource:
    """The state of a mirror's process, as `MirrorReader` has it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.held: SharedStepStorage
        self._failure: BaseException | None = None
        self._closing = threading.Event()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the process, or None."""
        if self._failure is None and self.held.head.has_failed:
            try:
                self._ask("failure")
            except ReplayBufferError as error:
                self._failure = error
        return self._failure

    def progress(self) -> Progress:
        """Return how far it has come."""
        with self.held.changed:
            self.held.refresh()
            return self.held.progress()

    def target(self) -> Target:
        """Return the point that stands for all that the buffer holds now."""
        return Target(*self._ask("target"))

    def why_nothing_comes(self) -> str:
        """Return what keeps steps from coming, or empty if nothing known does."""
        try:
            return str(self._ask("why"))
        except ReplayBufferError as error:
            return str(error)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context without effect: the process always keeps states of the buffer."""
        return nullcontext()

    def clear(self) -> None:
        """Remove all steps, for every process that reads them."""
        self._ask("clear")

    def _ask(self, what: str) -> Any:
        with _connected(self.address, START_S) as connection:
            data = b""
            with suppress(ConnectionError):  # A killed process resets its open connections.
                connection.send(encode({"ask": what}))
                data = connection.recv(MESSAGE_BYTES_MAX)
        if not data:
            raise ClosedError("the mirror's process ended meanwhile")
        return decode(data)

    def _lose(self, error: ReplayBufferError) -> None:
        with self.held.changed:
            self._failure = error
            self.held.changed.notify_all()

    def _look_at_once_filled(self, descriptor: int) -> None:
        """Switch to another memory once it has as many steps, or what replaced them."""
        there = SharedStepStorage(0, {}, os.dup(descriptor), self.clear)
        while not self._closing.is_set():
            there.peek()
            with self.held.changed:
                if self.held.is_no_newer_than(there):
                    self.held.look_at(descriptor)
                    return
            self._closing.wait(_RETRY_S)
        os.close(descriptor)

    def close(self) -> None:
        """End the source. Idempotent."""


class AttachedSource(ProcessSource):
    """A mirror's process that another process owns."""

    def __init__(self, address: str) -> None:
        if not (isinstance(address, str) and address.startswith(_ADDRESS_PREFIX)):
            raise InvalidRequestError("address", f"was not returned by share(): {address!r}")
        super().__init__(address)
        self._life, shape, descriptor = self._attached(START_S)
        self.held = SharedStepStorage(
            shape["capacity_steps"], shape["frame_stack"], descriptor, self.clear
        )
        threading.Thread(target=self._watch, name="mirror-watch", daemon=True).start()

    def _attached(self, within_s: float) -> tuple[socket.socket, dict[str, Any], int]:
        give_up_at = time.monotonic() + within_s
        while True:
            life = _connected(self.address, max(0.0, give_up_at - time.monotonic()))
            data, descriptors = b"", list[int]()
            # A killed process resets connections in its queue; its owner starts another one.
            with suppress(ConnectionError):
                life.send(encode({"ask": "attach"}))
                data, descriptors, _, _ = socket.recv_fds(life, MESSAGE_BYTES_MAX, 1)
            if data:
                return life, decode(data), descriptors[0]
            life.close()
            if time.monotonic() > give_up_at:
                raise ClosedError("the mirror's process ended meanwhile")
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Let go of the process, which continues. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            with suppress(OSError):
                self._life.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        try:
            while not self._has_said_goodbye() and not self._closing.is_set():
                # It was killed; its owner starts another one at the same address.
                self._life, _, descriptor = self._attached(RESTART_S)
                self._look_at_once_filled(descriptor)
        except ReplayBufferError as error:
            self._lose(error)
            return
        if not self._closing.is_set():
            self._lose(ClosedError("the process that made the mirror has closed it, or has ended"))

    def _has_said_goodbye(self) -> bool:
        with self._life, suppress(OSError):
            return bool(self._life.recv(MESSAGE_BYTES_MAX))
        return False


class OwnedSource(ProcessSource):
    """A mirror's process that this one starts and replaces; old steps serve until refilled."""

    def __init__(
        self,
        server: str,
        options: ClientOptions,
        selection: Selection,
        capacity_steps: int,
        frame_stack: Mapping[str, int],
    ) -> None:
        super().__init__(_ADDRESS_PREFIX + secrets.token_hex(16))
        self._config = {
            "address": self.address,
            "server": server,
            "options": asdict(options),
            "process": process_name(),
            "selection": selection,
            "capacity_steps": capacity_steps,
            "frame_stack": dict(frame_stack),
            "log_level": logging.getLogger("breadbox").getEffectiveLevel(),
        }
        descriptor = make_file()
        self.held = SharedStepStorage(capacity_steps, frame_stack, descriptor, self.clear)
        self._life, self.process = self._started(descriptor)
        self._watcher = threading.Thread(target=self._watch, name="mirror-watch", daemon=True)
        self._watcher.start()

    def _started(
        self, descriptor: int, **more: Any
    ) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "breadbox.mirror.sharing.host"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(descriptor)],
                stdin=subprocess.DEVNULL,
                env=owned_environment(child_environment()),
                pass_fds=[theirs.fileno(), descriptor],
            )
        ours.send(encode(self._config | more))
        return ours, process

    def close(self) -> None:
        """End the process. Idempotent; takes up to a second."""
        with self.held.changed:
            if self._closing.is_set():
                return
            self._closing.set()
            with suppress(OSError):
                self._life.shutdown(socket.SHUT_RDWR)
        self._watcher.join()

    def _watch(self) -> None:
        """Log the process's messages; replace it unless it ended on purpose."""
        deaths: list[float] = []
        while True:
            ending = self._log_until_end()
            now = time.monotonic()
            deaths = [*(each for each in deaths if now - each < DEATHS_WITHIN_S), now]
            with self.held.changed:
                if self._closing.is_set():
                    return
                if len(deaths) > DEATHS_MAX:
                    self._lose(
                        ClosedError(
                            f"the mirror's process ended {ending}, the last of {len(deaths)}"
                        )
                    )
                    return
                head = self.held.head
                descriptor = make_file()
                self._life, self.process = self._started(
                    descriptor,
                    begun_count=head.begun_count,
                    skipped_chunk_count=head.skipped_chunk_count,
                )
            _log.warning(
                "the mirror's process ended %s; another one reads the buffer anew, and until it "
                "has as much, draws use the earlier steps",
                ending,
            )
            threading.Thread(
                target=self._look_at_once_filled, args=(descriptor,), daemon=True
            ).start()

    def _log_until_end(self) -> str:
        with self._life, suppress(OSError):
            while data := self._life.recv(MESSAGE_BYTES_MAX):
                line = decode(data)
                logging.getLogger(line["log"]).log(line["level"], "%s", line["text"])
        try:
            status = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        return _ending(status)


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "by SIGKILL: the system may have had no memory for capacity_steps"
    if status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}; its last words are in this process's standard error"
