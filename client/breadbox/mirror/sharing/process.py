"""Talk to a mirror's process, from its owner or from an attached process."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from breadbox.mirror.intake.following import Target
from breadbox.mirror.sharing.messages import (
    MESSAGE_BYTES_MAX,
    decode,
    encode,
    is_address,
    new_address,
    place_of,
    require_same_user,
)
from breadbox.mirror.sharing.shared_memory import SharedHoldings, make_file
from breadbox.model.errors import ClosedError, InvalidRequestError, ReplayBufferError
from breadbox.model.options import ClientOptions
from breadbox.shared.child_processes import child_environment, owned_environment

_log = logging.getLogger(__name__)

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


def _connected(address: str, within_s: float) -> socket.socket:
    """Connect to a mirror's process.

    Raises:
        ClosedError: There is no process at the address.
        PermissionDeniedError: The process is another user's.
    """
    over_at = time.monotonic() + within_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(place_of(address))
            require_same_user(connection)
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
    """Read the state of a mirror's process. A `Source`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.held: SharedHoldings
        self._failure: BaseException | None = None
        self._closing = threading.Event()

    @property
    def failure(self) -> BaseException | None:
        """See `Source.failure`."""
        if self._failure is None and self.held.head.has_failed:
            try:
                self._ask("failure")
            except ReplayBufferError as error:
                self._failure = error
        return self._failure

    @property
    def session_id(self) -> str:
        """See `Source.session_id`."""
        return self._now().session_id

    @property
    def skipped_chunk_count(self) -> int:
        """See `Source.skipped_chunk_count`."""
        return self._now().head.skipped_chunk_count

    @property
    def cursor(self) -> int | None:
        """See `Source.cursor`."""
        return self._now().cursor

    @property
    def begun_count(self) -> int:
        """See `Source.begun_count`."""
        return self._now().head.begun_count

    @property
    def lag_s(self) -> float:
        """See `Source.lag_s`."""
        return max(0.0, time.monotonic() - self._now().head.behind_since_ns / 1e9)

    def target(self) -> Target:
        """See `Source.target`."""
        return Target(*self._ask("target"))

    def why_nothing_comes(self) -> str:
        """See `Source.why_nothing_comes`."""
        try:
            return str(self._ask("why"))
        except ReplayBufferError as error:
            return str(error)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """See `Source.waiting`; the process always keeps states of the buffer."""
        yield

    def clear(self) -> None:
        """Remove all steps, for every process that reads them."""
        self._ask("clear")

    def _now(self) -> SharedHoldings:
        """Return the holdings as of now."""
        with self.held.changed:
            self.held.refresh()
            return self.held

    def _ask(self, what: str) -> Any:
        """Send the process a request and return its answer.

        Raises:
            ReplayBufferError: The process answers with an error, or is gone.
        """
        with _connected(self.address, START_S) as connection:
            data = b""
            with suppress(ConnectionError):  # A killed process resets its open connections.
                connection.send(encode({"ask": what}))
                data = connection.recv(MESSAGE_BYTES_MAX)
        if not data:
            raise ClosedError("the mirror's process ended meanwhile")
        return decode(data)

    def _lose(self, error: ReplayBufferError) -> None:
        """Make the next call that draws or waits raise an error."""
        with self.held.changed:
            self._failure = error
            self.held.changed.notify_all()

    def _look_at_once_filled(self, descriptor: int) -> None:
        """Switch to another memory once it has as many steps, or those that replaced them."""
        there = SharedHoldings(0, {}, os.dup(descriptor), self.clear)
        while not self._closing.is_set():
            there.peek()
            with self.held.changed:
                if self.held.is_no_newer_than(there):
                    self.held.look_at(descriptor)
                    return
            self._closing.wait(_RETRY_S)
        os.close(descriptor)

    def close(self) -> None:
        """See `Source.close`."""


class AttachedSource(ProcessSource):
    """A mirror's process that another process owns.

    Args:
        address: Address of the process, as its owner's `share` returned it.

    Raises:
        InvalidRequestError: The address is not one of `share`.
        ClosedError: There is no process at the address.
        PermissionDeniedError: The process is another user's.
    """

    def __init__(self, address: str) -> None:
        if not is_address(address):
            raise InvalidRequestError("address", f"is none that share() gave: {address!r}")
        super().__init__(address)
        self._life, shape, descriptor = self._attached(START_S)
        self.held = SharedHoldings(
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
        """See `Source.close`; the process continues."""
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
        """Wait until the process ends; return True if it ended on purpose."""
        with self._life, suppress(OSError):
            return bool(self._life.recv(MESSAGE_BYTES_MAX))
        return False


class OwnedSource(ProcessSource):
    """A mirror's process that this process starts, and that ends with it.

    A process that dies is replaced. Draws use the old memory until the new one has as much.

    Args:
        server: Address of the server.
        options: Options of the process's client.
        buffer: As the others, see `ReplayMirror`.
        subscription: Subscription to read by, or None.
        columns: Paths of the arrays to keep, or None for all.
        capacity_steps: Most steps that are kept.
        frame_stack: Observations that are stacks of frames.

    Raises:
        InvalidRequestError: The system has no anonymous shared memory.
    """

    def __init__(
        self,
        server: str,
        options: ClientOptions,
        *,
        buffer: str | None,
        subscription: str | None,
        columns: Sequence[str] | None,
        capacity_steps: int,
        frame_stack: Mapping[str, int],
    ) -> None:
        super().__init__(new_address())
        self._process_id = os.getpid()
        self._config = {
            "address": self.address,
            "server": server,
            "options": asdict(options),
            "buffer": buffer,
            "subscription": subscription,
            "columns": None if columns is None else list(columns),
            "capacity_steps": int(capacity_steps),
            "frame_stack": dict(frame_stack),
            "log_level": logging.getLogger("breadbox").getEffectiveLevel(),
        }
        descriptor = make_file()
        self.held = SharedHoldings(capacity_steps, frame_stack, descriptor, self.clear)
        self._life, self.process = self._started(descriptor)
        self._watcher = threading.Thread(target=self._watch, name="mirror-watch", daemon=True)
        self._watcher.start()

    def _started(
        self, descriptor: int, **more: Any
    ) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Start a process that fills a memory."""
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
        """See `Source.close`; takes up to a second."""
        if os.getpid() != self._process_id:
            return
        with self.held.changed:
            if self._closing.is_set():
                return
            self._closing.set()
            with suppress(OSError):
                self._life.shutdown(socket.SHUT_RDWR)
        self._watcher.join()

    def _watch(self) -> None:
        """Log the process's messages until it ends, and replace it if that was not on purpose."""
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
        """Log the process's messages until it has ended; return how it did."""
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
    """Return how a process ended, for messages."""
    if status == -signal.SIGKILL:
        return "by SIGKILL: the system may have had no memory for capacity_steps"
    if status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}; its last words are in this process's standard error"
