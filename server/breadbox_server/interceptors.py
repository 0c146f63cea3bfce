"""What stands around every call: errors told by the one table, calls counted and logged."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final, TypeAlias

import grpc
from grpc_status import rpc_status

from breadbox_server import status
from breadbox_server.errors import InternalError
from breadbox_server.metrics import Metrics

log = logging.getLogger(__name__)

MaybeHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Behaviour = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]

REQUEST_ID_BYTES: Final = 8


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor: nothing that a handler raises passes it untold.

    An exception without a row in `status` is our bug. The caller gets INTERNAL with a request id,
    never the exception's text; the log has both.

    Args:
        metrics: Takes count and latency of calls, by method and code.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: dict[str, MaybeHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MaybeHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MaybeHandler:
        """Wrap unary methods; the streams of health and reflection pass as they are."""
        method = handler_call_details.method
        known = self._known.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        wrapped = grpc.unary_unary_rpc_method_handler(
            self._wrap(method.rpartition("/")[2], handler.unary_unary),  # type: ignore[arg-type]
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        # Methods that exist are few; names that do not exist never get here.
        self._known[method] = wrapped
        return wrapped

    def _wrap(self, method: str, behaviour: Behaviour) -> Behaviour:
        seconds = self._metrics.rpc_seconds.labels(method)
        answered = {
            code: self._metrics.rpcs.labels(method, code.name)
            for code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
        }

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = perf_counter()
            code = grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code() or grpc.StatusCode.UNKNOWN
                raise
            except status.TELLABLE as error:
                code = status.code_of(error)
                await context.abort_with_status(rpc_status.to_status(status.to_status(error)))
            except Exception:
                code = grpc.StatusCode.INTERNAL
                told = InternalError(secrets.token_hex(REQUEST_ID_BYTES))
                log.exception("%s failed; told as request id %s", method, told.request_id)
                await context.abort_with_status(rpc_status.to_status(status.to_status(told)))
            finally:
                elapsed_s = perf_counter() - started
                seconds.observe(elapsed_s)
                counter = answered.get(code)
                if counter is None:
                    counter = self._metrics.rpcs.labels(method, code.name)
                counter.inc()
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%s %s %.1f ms", method, code.name, elapsed_s * 1e3)

        return call
