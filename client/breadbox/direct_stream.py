"""A stream of a blocking client that has no threads between gRPC and who uses it.

gRPC itself takes what is to be sent from an iterator, in one thread, and gives what came to another
one. A message wakes each of them twice, which takes more time than all else that is done for it.
Here whoever has a message begins to send it, and gRPC's own thread, the first to learn what came,
hands that on.

This needs parts of grpcio that it does not promise to keep. Where one is missing no stream is
opened, and whoever asked for one does without.
"""

import logging
import queue
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

_log = logging.getLogger(__name__)


class NoDirectStreamsError(Exception):
    """This grpcio is not as it is known to be."""


class DirectStream:
    """One stream, and at most one message of it on its way to the wire.

    What is called from here is called by gRPC's thread, holds up every call of the channel, and
    ends the stream if it raises.

    Args:
        method: Opens a stream, as a stub has it.
        metadata: What accompanies it.
        sent: Called when a message is on the wire, or lost with the stream.
        received: Called with each message that comes, as bytes.

    Raises:
        NoDirectStreamsError: None can be opened with this grpcio.
        RuntimeError: There are no more threads to be had.
    """

    def __init__(
        self,
        method: Any,
        metadata: Any,
        *,
        sent: Callable[[], None],
        received: Callable[[bytes], None],
    ) -> None:
        self._sent = sent
        self._received = received
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.call: Any = method(self._nothing(), metadata=metadata)
        """Of gRPC; for what it promises."""
        try:
            cygrpc = import_module("grpc._cython.cygrpc")
            self._state = self.call._state  # noqa: SLF001 - see above
            self._operate = self.call._call.operate  # noqa: SLF001
            self._due, self._condition = self._state.due, self._state.condition
            self._handle = import_module("grpc._channel")._event_handler(self._state, None)  # noqa: SLF001
            self._sending = cygrpc.OperationType.send_message
            self._make_sending = cygrpc.SendMessageOperation
            self._receiving = cygrpc.OperationType.receive_message
            self._receive_operations = (cygrpc.ReceiveMessageOperation(0),)
        except (AttributeError, ImportError, TypeError) as error:
            self.call.cancel()
            self.end()
            raise NoDirectStreamsError(f"grpcio has changed: {error}") from error

    def begin(self, ended: Callable[[Any], None]) -> None:
        """Receive, until the stream ends; then `ended` is called with the call, maybe from here."""
        self.call.add_done_callback(ended)
        self._start(self._receiving, self._receive_operations, self._on_received)

    def send(self, message: bytes) -> None:
        """Begin to send, if the stream has not ended; the next one only after `sent`."""
        self._start(self._sending, (self._make_sending(message, 0),), self._on_sent)

    def end(self) -> None:
        """Send nothing more, and let gRPC's thread go that waits for that. Idempotent."""
        self._ends.put(None)

    def _nothing(self) -> Iterator[Any]:
        """What gRPC's thread sends, before it tells the server that this was all."""
        self._ends.get()
        return
        yield

    def _start(self, kind: Any, operations: tuple[Any, ...], done: Callable[[Any], bool]) -> None:
        """Start an operation as gRPC does itself, which counts those that are due."""
        with self._condition:
            if self._state.code is None:
                self._due.add(kind)
                if not self._operate(operations, done):
                    self._due.remove(kind)

    def _on_sent(self, event: Any) -> bool:
        is_over: bool = self._handle(event)
        self._guarded(self._sent)
        return is_over

    def _on_received(self, event: Any) -> bool:
        is_over: bool = self._handle(event)
        message, self._state.response = self._state.response, None
        if message is not None:
            self._guarded(self._received, message)
            self._start(self._receiving, self._receive_operations, self._on_received)
        return is_over

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001 - it would end gRPC's thread, and all calls of the channel
            _log.exception("a stream of appends failed")
            self.call.cancel()
