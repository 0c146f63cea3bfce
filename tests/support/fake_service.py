"""A scripted ReplayBufferService on a real channel, for tests of the client."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from breadbox.v1 import replay_buffer_service_pb2 as pb

SERVICE_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["ReplayBufferService"]
Answer = Callable[[Any, grpc.ServicerContext], Message | None]
"""None: the call ends well, without a message."""


@dataclass(frozen=True)
class Received:
    """One call as it arrived."""

    method: str
    request: Any
    time_remaining_s: float
    metadata: dict[str, str | bytes]


class FakeService:
    """Answers each method from a script; when it has run out, with an empty response."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.arrived = threading.Semaphore(0)
        """Released once per call that arrived."""
        self._script: dict[str, deque[Answer]] = defaultdict(deque)
        self._lock = threading.Lock()

    def will(self, method: str, *answers: Message | Answer) -> None:
        """Append answers to the script of a method."""
        for answer in answers:
            self._script[method].append(
                _constant(answer) if isinstance(answer, Message) else answer
            )

    def requests(self, method: str) -> list[Any]:
        """What arrived for a method, in order."""
        return [call.request for call in self.received if call.method == method]

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> Message | None:
        """Record a call and answer it."""
        with self._lock:
            script = self._script[method]
            answer = script.popleft() if script else _constant(_empty(method))
            self.received.append(
                Received(
                    method,
                    request,
                    context.time_remaining() or float("inf"),
                    dict(context.invocation_metadata()),
                )
            )
        self.arrived.release()
        return answer(request, context)


def _constant(message: Message) -> Answer:
    return lambda request, context: message


def _empty(method: str) -> Message:
    response: Message = getattr(pb, f"{method}Response")()
    return response


def refuse(
    code: grpc.StatusCode,
    reason: str = "",
    *,
    text: str = "refused",
    retry_delay_s: float | None = None,
    **metadata: str,
) -> Answer:
    """An answer that is an error, with details when a reason is given."""

    def abort(request: Any, context: grpc.ServicerContext) -> Message:
        if not reason and retry_delay_s is None:
            context.abort(code, text)
        status = status_pb2.Status(code=getattr(code_pb2, code.name), message=text)
        if reason:
            info = error_details_pb2.ErrorInfo(domain="breadbox", reason=reason, metadata=metadata)
            status.details.add().Pack(info)
        if retry_delay_s is not None:
            delay = Duration()
            delay.FromNanoseconds(round(retry_delay_s * 1e9))
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort raises")

    return abort


class Gate:
    """An answer that waits until the test opens it, or its caller goes away."""

    def __init__(self, answer: Message | Answer) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.caller_left = threading.Event()
        self._answer = _constant(answer) if isinstance(answer, Message) else answer

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Message | None:
        def left() -> None:
            self.caller_left.set()
            self.open.set()

        context.add_callback(left)
        self.entered.set()
        assert self.open.wait(30)
        return self._answer(request, context)


def _handler(fake: FakeService, method: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    """In a form in which an answer may lack its message, as a proxy's may."""

    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Message]:
        message = fake.answer(method.name, request, context)
        if message is not None:
            yield message

    return grpc.unary_stream_rpc_method_handler(
        answer,
        request_deserializer=getattr(pb, method.input_type.name).FromString,
        response_serializer=getattr(pb, method.output_type.name).SerializeToString,
    )


@contextmanager
def serving(fake: FakeService, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve the fake on a free port; yields HOST:PORT."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        handlers = {each.name: _handler(fake, each) for each in SERVICE_DESCRIPTOR.methods}
        generic = grpc.method_handlers_generic_handler(SERVICE_DESCRIPTOR.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))
        port = server.add_insecure_port(address)
        server.start()
        try:
            yield f"{address.rpartition(':')[0]}:{port}"
        finally:
            server.stop(grace=0).wait()
