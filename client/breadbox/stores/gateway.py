"""Move payloads through the server, over a connection of its own, for clients without the store."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Final

import grpc

from breadbox.model.errors import (
    BackpressureError,
    ClosedError,
    DeadlineExceededError,
    PayloadCorruptError,
    ReplayBufferError,
    StoreFullError,
    StoreUnavailableError,
    UnavailableError,
)
from breadbox.model.options import ClientOptions, open_channel
from breadbox.model.types import PayloadReference
from breadbox.stores.base import (
    AbstractStore,
    Foreseen,
    PayloadReceiver,
    check_sound,
    largest_noted,
)
from breadbox.stores.deadline import LOOK_S, Deadline
from breadbox.stores.frames import pack, unpack_read
from breadbox.stores.keys import cut
from breadbox.stores.reading import Range, read
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox.wire.connections import Connections
from breadbox.wire.route import Route
from breadbox.wire.status import from_rpc_error

_SERVICE: Final = f"/{pb.DESCRIPTOR.services_by_name['ReplayBufferService'].full_name}/"
_MESSAGE_BYTES: Final = 512 * 1024
_PAYLOADS_MAX: Final = 4096
"""Payloads of one call that writes or discards: the server takes no more."""
_RANGES_MAX: Final = 512
"""Ranges of one call that reads: the server takes no more."""


class GatewayStore(AbstractStore):
    """A `PayloadStore` behind the server.

    Until it is announced, only this token can read a payload; then, every token that may read the
    buffer. Producers may read weights too.
    """

    def __init__(self, route: Route, options: ClientOptions) -> None:
        super().__init__(options.deadline_s)
        self._route = route
        self._options = options
        self._metadata = options.metadata()
        self._is_one_of_many = len(route.addresses) > 1
        credentials = options.credentials()
        self._lines = Connections(
            route.addresses,
            lambda address, _: _Line(address, credentials, is_one_of_many=self._is_one_of_many),
        )
        self._watch = _Watch()

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        deadline = self._begin()
        references: list[PayloadReference] = []
        with largest_noted(payloads):
            for first in range(0, len(payloads), _PAYLOADS_MAX):
                references += self._write(payloads[first : first + _PAYLOADS_MAX], deadline)
        return references

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        deadline = self._begin()
        check_sound(references)
        with self._line() as line, ExitStack() as opened:

            def ask(ranges: Sequence[Range]) -> Iterator[Any]:
                call = line.read_payloads(_request(ranges), metadata=self._metadata)
                return opened.enter_context(closing(self._watch.answers(call, deadline)))

            read(partial(_Answers, ask), list(enumerate(references)), receiver)

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        """Those that this token did not write, or has announced, stay."""
        deadline = self._begin()
        ids = [reference.payload_id for reference in references]
        for first in range(0, len(ids), _PAYLOADS_MAX):
            request = pb.DiscardPayloadsRequest(payload_ids=ids[first : first + _PAYLOADS_MAX])
            with self._line() as line:
                line.discard_payloads(request, timeout=deadline.left_s(), metadata=self._metadata)

    def _close(self) -> None:
        for line in self._lines.end():
            line.channel.close()
        self._watch.close()

    def _write(
        self, payloads: Sequence[Sequence[memoryview]], deadline: Deadline
    ) -> list[PayloadReference]:
        with self._line() as line:
            call = line.write_payloads(_messages(payloads, deadline), metadata=self._metadata)
            # The last answer has the references; the others say that bytes were stored.
            return [
                PayloadReference(each.payload_id, each.size_bytes, each.piece_size_bytes)
                for answer in self._watch.answers(call, deadline)
                for each in answer.payloads
            ]

    @contextmanager
    def _line(self) -> Iterator["_Line"]:
        """Yield the server to call, and turn gRPC's errors into a store's."""
        place = self._route.place
        line = self._lines.take(place)
        try:
            yield line
        except grpc.RpcError as error:
            if self._closed.is_set():
                raise ClosedError("the payload store is closed") from error
            encrypted = self._options.tls is not None
            translated = from_rpc_error(
                error, line.address, encrypted=encrypted, is_one_of_many=self._is_one_of_many
            )
            self._route.failed(place, translated)
            if isinstance(translated, DeadlineExceededError):
                self._lines.replace(place, line)
            raise _as_of_store(translated) from error
        except StoreUnavailableError as error:  # It was silent.
            self._route.failed(place, error)
            self._lines.replace(place, line)
            raise
        except grpc.FutureCancelledError as error:
            raise ClosedError("the payload store is closed") from error
        except ValueError as error:  # Of a closed channel.
            if not self._closed.is_set():
                raise
            raise ClosedError("the payload store is closed") from error
        finally:
            if self._lines.give_back(line):
                line.channel.close()


class _Line:
    def __init__(
        self, address: str, credentials: grpc.ChannelCredentials | None, *, is_one_of_many: bool
    ) -> None:
        self.address = address
        self.channel = open_channel(
            address, credentials, is_one_of_many=is_one_of_many, is_shared=False
        )
        self.discard_payloads = ReplayBufferServiceStub(self.channel).DiscardPayloads
        # Not the stub's: what carries payload bytes is packed here.
        self.write_payloads: Any = self.channel.stream_stream(
            _SERVICE + "WritePayloads", response_deserializer=pb.WritePayloadsResponse.FromString
        )
        self.read_payloads: Any = self.channel.unary_stream(
            _SERVICE + "ReadPayloads",
            request_serializer=pb.ReadPayloadsRequest.SerializeToString,
            response_deserializer=unpack_read,
        )


class _Answers:
    def __init__(
        self, ask: Callable[[Sequence[Range]], Iterator[Any]], ranges: Iterable[Range]
    ) -> None:
        asked = [each for each in ranges if each[2]]
        self._messages = chain.from_iterable(
            ask(asked[first : first + _RANGES_MAX]) for first in range(0, len(asked), _RANGES_MAX)
        )
        self._message = memoryview(b"")

    def receive_into(self, destination: memoryview) -> None:
        done = 0
        while done < len(destination):
            part = self._next(len(destination) - done)
            destination[done : done + len(part)] = part
            done += len(part)

    def receive_all(self, expected: Foreseen) -> None:
        """Messages come one by one."""

    def skip(self, count: int) -> None:
        """Bytes that were asked for come, wanted or not."""
        while count:
            count -= len(self._next(count))

    def _next(self, most: int) -> memoryview:
        while not self._message:
            answer = next(self._messages, None)
            if answer is None:
                raise PayloadCorruptError("the server sent fewer bytes than were asked for")
            self._message = answer
        part = self._message[:most]
        self._message = self._message[len(part) :]
        return part


class _Watch:
    """Ends calls that are silent for too long, from a thread of its own: gRPC has fixed ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[Any, Deadline] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def answers(self, call: Any, deadline: Deadline) -> Generator[Any, None, None]:
        """Yield the answers of a call; each extends the deadline."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="breadbox-gateway", daemon=True
                )
                self._thread.start()
            self._calls[call] = deadline
            self._changed.notify()
        try:
            for answer in call:
                deadline.heard(deadline.now())
                yield answer
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED and deadline.left_s() <= 0:
                raise StoreUnavailableError(
                    "the server moved no bytes of payloads in time", was_silent=True
                ) from error
            raise
        finally:
            with self._changed:
                del self._calls[call]
            call.cancel()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                for call, deadline in self._calls.items():
                    if deadline.left_s() <= 0:
                        call.cancel()
                self._changed.wait(LOOK_S if self._calls else None)


def open_gateway_store(route: Route, options: ClientOptions) -> GatewayStore:
    """Open the store behind the server at the end of a route. Connects on use."""
    return GatewayStore(route, options)


def _request(ranges: Sequence[Range]) -> pb.ReadPayloadsRequest:
    return pb.ReadPayloadsRequest(
        ranges=[
            pb.PayloadRange(
                payload=fragment_pb2.PayloadReference(
                    payload_id=reference.payload_id,
                    size_bytes=reference.size_bytes,
                    piece_size_bytes=reference.piece_size_bytes,
                ),
                offset_bytes=start,
                length_bytes=length,
            )
            for reference, start, length in ranges
        ]
    )


def _messages(payloads: Sequence[Sequence[memoryview]], deadline: Deadline) -> Iterator[bytes]:
    """Yield the messages of a call that writes; gRPC takes the next when the last one has gone."""
    sizes = pb.WritePayloadsRequest(
        size_bytes=[sum(map(len, buffers)) for buffers in payloads]
    ).SerializeToString()
    for _, buffers in cut(chain.from_iterable(payloads), _MESSAGE_BYTES):
        yield pack(buffers, sizes)
        deadline.heard(deadline.now())
        sizes = b""


def _as_of_store(error: ReplayBufferError) -> ReplayBufferError:
    if isinstance(error, BackpressureError):
        return StoreFullError(error.what, error.retry_delay_s)
    if isinstance(error, UnavailableError | DeadlineExceededError):
        return StoreUnavailableError(
            str(error), was_silent=isinstance(error, DeadlineExceededError)
        )
    return error
