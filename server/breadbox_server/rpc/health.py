"""The standard health service, `grpc.health.v1`; a watcher that reads nothing holds up no other."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from breadbox_server.limits import WATCHES_MAX, WATCHES_OF_CONNECTION_MAX
from breadbox_server.rpc.traffic import own_name

Context = grpc.aio.ServicerContext[Any, Any]
Status = health_pb2.HealthCheckResponse
REASON_KEY: Final = "breadbox-reason"
"""Trailing metadata of an answer of NOT_SERVING: why, for people."""
WARM_KEY: Final = "breadbox-warm"
"""The same of one that stands by: "true" where it could lead at once."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no types
    """Health of a server's services (empty name: the server), all alike; not serving at first."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._status: int = Status.NOT_SERVING
        self._has_ended = False
        self._reason: Callable[[], str] = str
        """Says why a server does not serve; empty: no more than that."""
        self._is_warm: Callable[[], bool] = bool
        self._changed: set[asyncio.Future[None]] = set()
        self._watch_count = 0
        self._watches_of: Counter[str] = Counter()
        """By connection."""

    def serve(self) -> None:
        """Say SERVING from now on, unless the server has ended."""
        if not self._has_ended:
            self._reason = str
            self._tell(Status.SERVING)

    def stand_by(self, reason: Callable[[], str], is_warm: Callable[[], bool]) -> None:
        """Report NOT_SERVING and why (it is not to be restarted), and whether it could lead."""
        if not self._has_ended:
            self._reason, self._is_warm = reason, is_warm
            self._tell(Status.NOT_SERVING)

    def end(self) -> None:
        """Say NOT_SERVING from now on, for good, and end the watches. Idempotent."""
        self._has_ended = True
        self._tell(Status.NOT_SERVING)

    def _tell(self, status: int) -> None:
        self._status = status
        for future in self._changed:
            if not future.done():
                future.set_result(None)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Say how a service is now; one that is not known is NOT_FOUND."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        if self._status == Status.NOT_SERVING and (reason := self._reason()):
            warm = str(self._is_warm()).lower()
            context.set_trailing_metadata(((REASON_KEY, reason), (WARM_KEY, warm)))
        return Status(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Say how a service is, now and when it changes, until the server ends."""
        peer = context.peer()
        if self._watches_of[peer] >= WATCHES_OF_CONNECTION_MAX and own_name(peer):
            await self._refuse(context, f"{WATCHES_OF_CONNECTION_MAX} watch on this connection")
        if self._watch_count >= WATCHES_MAX:
            await self._refuse(context, f"{WATCHES_MAX} watch")
        self._watch_count += 1
        self._watches_of[peer] += 1
        try:
            await self._watch(request.service in self._services, context)
        finally:
            self._watch_count -= 1
            self._watches_of[peer] -= 1
            if not self._watches_of[peer]:
                del self._watches_of[peer]

    async def _refuse(self, context: Context, why: str) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{why} already; use Check")

    async def _watch(self, is_known: bool, context: Context) -> None:
        reported = None
        while True:
            status = self._status if is_known else Status.SERVICE_UNKNOWN
            if status != reported:
                reported = status
                await context.write(Status(status=status))
            elif self._has_ended:
                return
            else:
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.add(future)
        try:
            await future
        finally:
            self._changed.discard(future)
