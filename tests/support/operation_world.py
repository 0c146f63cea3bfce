"""Runs the client's operations without network, time or threads."""

import random
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any

from breadbox.model.errors import ReplayBufferError
from breadbox.model.options import ClientOptions
from breadbox.operations.calls import Call
from breadbox.operations.operations import (
    Concurrently,
    Context,
    Effect,
    Invoke,
    Operation,
    RunBlocking,
    Sleep,
    StoreSlot,
)
from breadbox.shared.outages import Outages
from breadbox.stores.base import PayloadStore
from support.clock import ManualClock


class OperationWorld:
    """A scripted server, a manual clock, and an interpreter that joins them to an operation.

    An answer is what the call would decode to, an error to throw, or a function of the call.
    """

    def __init__(
        self, options: ClientOptions | None = None, store: PayloadStore | None = None
    ) -> None:
        self.clock = ManualClock()
        self.context = Context(
            address="test",
            options=options or ClientOptions(),
            now=self.clock,
            rng=random.Random(0),
            new_id=self._new_id,
            outages=Outages(self.clock),
            slot=StoreSlot(store),
        )
        self.sent: list[tuple[Call[Any], float]] = []
        """Calls with their time limit, in order."""
        self._script: dict[str, deque[Any]] = defaultdict(deque)
        self._ids = 0

    def _new_id(self) -> str:
        self._ids += 1
        return f"id-{self._ids}"

    def will(self, method: str, *answers: Any) -> None:
        """Append answers to the script of a method."""
        self._script[method].extend(answers)

    def requests(self, method: str) -> list[Any]:
        """What was sent for a method."""
        return [call.request for call, _ in self.sent if call.method == method]

    def run(self, operation: Operation[Any]) -> Any:
        """Interpret an operation to its end; it answers what `will` was told, whatever that is."""
        try:
            effect = next(operation)
            while True:
                try:
                    result = self._perform(effect)
                except ReplayBufferError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            answer = stop.value
            return answer

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Invoke(call=call, timeout_s=timeout_s):
                self.sent.append((call, timeout_s))
                answer = self._script[call.method].popleft()
                if callable(answer):
                    answer = answer(call)
                if isinstance(answer, Exception):
                    raise answer
                return answer
            case Sleep(duration_s=duration_s):
                return self.clock.sleep(duration_s)
            case RunBlocking(function=function, deadline=deadline):
                return function(deadline)
            case Concurrently(invoke=invoke, blocking=blocking):
                # The function first: what is in it must not depend on the answer.
                with suppress(ReplayBufferError):
                    self._perform(blocking)
                return self._perform(invoke)
