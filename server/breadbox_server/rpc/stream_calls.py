"""Appends of a stream as calls: admitted, timed, counted and told one by one, and without tasks.

A task for each would cost as much as all that is decided about it. Only what has to wait for more
than the journal's turn, to be told a refusal, say, gets one.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import grpc

from breadbox_server.access.authorization import Gate, caller_name, calls_as, check_request
from breadbox_server.metrics.clients import ClientCensus, role_of_method
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.rpc.append_stream import ItemContext
from breadbox_server.rpc.failures import NotDoneError, answer_s, told
from breadbox_server.rpc.traffic import Call, Traffic

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


class Begun(Protocol):
    """An answer on its way."""

    done: asyncio.Future[Any]
    """Ends, well or not, when it is decided and durable."""

    def is_settled(self) -> bool:
        """Whether it may be told now that it is done; else `settle` comes first."""

    async def settle(self) -> None:
        """Return once it may."""

    def answer(self) -> Any:
        """The answer, or the error that there is instead."""

    def end(self) -> None:
        """Let go of what was asked for, whatever became of it. Idempotent."""


class Running(Protocol):
    """A call in progress, which ends when its token is taken back, or calls are held off."""

    method: str
    request: Any
    metadata: Metadata

    def refuse(self, error: Exception | None) -> None:
        """End it with an error; None: let it go on. Idempotent."""


@dataclass(frozen=True, slots=True)
class House:
    """What stands around every call."""

    gate: Gate
    traffic: Traffic
    census: ClientCensus
    metrics: Metrics
    running: set[Running]
    outage: Callable[[], Exception | None]
    """What does not answer the server, if anything."""


class ItemCalls:
    """Those of one stream.

    Args:
        method: Whose rules and counters are theirs.
        begin: Begins to answer a request.
        metadata: The stream's.
        stream: The stream's own call.
        house: Around them.
    """

    def __init__(
        self,
        method: str,
        begin: Callable[[Any, ItemContext], Begun],
        metadata: Metadata,
        stream: Call,
        house: House,
    ) -> None:
        self.method = method
        self.metadata = metadata
        self.stream = stream
        self.house = house
        self.role = role_of_method(method)
        self.begin = begin
        path = method.rpartition("/")[2]
        self._path = path
        self._seconds = house.metrics.rpc_seconds.labels(path)
        self._answered = house.metrics.rpcs.labels(path, grpc.StatusCode.OK.name)
        self._loop = asyncio.get_running_loop()
        self._running: dict[_ItemCall, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        """Of whoever runs out of time first, or of one that has been answered since."""

    def start(
        self, request: Any, context: ItemContext, deliver: Callable[[Any], None]
    ) -> "_ItemCall":
        """Begin to answer one; see `items.Begin`."""
        left_s = answer_s(context.time_remaining())
        ends_at = None if left_s is None else self._loop.time() + left_s
        call = _ItemCall(self, request, ends_at, deliver)
        self._running[call] = None
        if ends_at is not None and (self._timer is None or ends_at < self._timer.when()):
            self._arm(ends_at)
        call.begin(context)
        return call

    def over(self, call: "_ItemCall", code: grpc.StatusCode) -> None:
        """Count one that is answered."""
        del self._running[call]
        self.house.running.discard(call)
        self.house.traffic.leave(call.place)
        self._seconds.observe(perf_counter() - call.began_at)
        if code is grpc.StatusCode.OK:
            self._answered.inc()
        else:
            self.house.metrics.rpcs.labels(self._path, code.name).inc()
        if call.name is not None:
            self.house.metrics.count_token_call(call.name, code.name)

    def close(self) -> None:
        """Nothing of the stream is left."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, ends_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(ends_at, self._end_overdue)

    def _end_overdue(self) -> None:
        self._timer = None
        now = self._loop.time()
        for call in tuple(self._running):
            if call.ends_at is not None and call.ends_at <= now:
                call.fail(self.house.outage() or NotDoneError())
        left = [call.ends_at for call in self._running if call.ends_at is not None]
        if left:
            self._arm(min(left))


class _ItemCall:
    """One of them."""

    __slots__ = (
        *("began_at", "ends_at", "method", "metadata", "name", "place", "request"),
        *("_begun", "_calls", "_deliver", "_is_over", "_settling"),
    )

    def __init__(
        self,
        calls: ItemCalls,
        request: Any,
        ends_at: float | None,
        deliver: Callable[[Any], None],
    ) -> None:
        self.began_at = perf_counter()
        self.ends_at = ends_at
        self.method = calls.method
        self.metadata = calls.metadata
        self.request = request
        self.name = caller_name()
        self.place = Call(calls.stream.peer, calls.stream.task)
        self._calls = calls
        self._deliver = deliver
        self._begun: Begun | None = None
        self._settling: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self, context: ItemContext) -> None:
        """Ask for what is wanted."""
        calls, house = self._calls, self._calls.house
        if calls.role is not None:
            house.census.seen(self.place.peer, calls.role)
        try:
            house.traffic.admit(self.place, self.name or "")
            if house.gate.asks_for_tokens:
                # Again: its message may have come long after the headers of the stream.
                caller = house.gate.admit(self.method, self.metadata)
                check_request(caller, self.method, self.request)
                calls_as(caller)
            house.running.add(self)
            self._begun = calls.begin(self.request, context)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            self.fail(error)
            return
        self._begun.done.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """See `items.ItemCall`."""
        self._finish(grpc.StatusCode.CANCELLED, None)

    def refuse(self, error: Exception | None) -> None:
        """See `Running`."""
        if error is not None:
            self.fail(error)

    def _on_done(self, done: asyncio.Future[Any]) -> None:
        if self._is_over or self._begun is None:
            if not done.cancelled():
                done.exception()  # Nobody asks for it any more.
            return
        if self._begun.is_settled():
            self._tell(self._begun)
        else:
            self._settling = asyncio.get_running_loop().create_task(self._settle(self._begun))

    async def _settle(self, begun: Begun) -> None:
        try:
            await begun.settle()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            self._settling = None
            self.fail(error)
        else:
            self._settling = None
            self._tell(begun)

    def _tell(self, begun: Begun) -> None:
        try:
            answer = begun.answer()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            self.fail(error)
        else:
            self._finish(grpc.StatusCode.OK, answer)

    def fail(self, error: Exception) -> None:
        """End it with an error. Idempotent."""
        if not self._is_over:
            self._finish(*told(error, self.method))

    def _finish(self, code: grpc.StatusCode, answer: Any) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._settling is not None:
            self._settling.cancel()
        if self._begun is not None:
            self._begun.end()
        self._calls.over(self, code)
        self._deliver(answer)
