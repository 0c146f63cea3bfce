"""Name connections, and leave a Redis that answers that it is not the one to ask.

Another Redis may have its name by now.
Redis keeps the connections of clients when it becomes a replica, so each of a pool would go on to
refuse writes, or to read what is old. After one such answer, all of a pool connect anew before
their next use, which resolves the name again.
"""

from contextlib import suppress
from typing import Any, Final

import redis

from breadbox.stores.redis.errors import is_elsewhere

_LABEL: Final = ("CLIENT", "SETNAME", "breadbox")
"""For the operators of Redis. A user, or a service, without CLIENT does without it."""


class _Doubt:
    count = 0
    """Answers of connections that were made since the previous one."""


def leaving_replicas(connection_class: Any) -> Any:
    """Return a kind of connection for one pool of redis-py's blocking client."""
    doubt = _Doubt()

    class Leaving(connection_class):  # type: ignore[misc]
        doubts = 0
        is_labelled = False

        def connect(self, *arguments: Any, **options: Any) -> Any:
            if self.doubts < doubt.count:
                self.disconnect()
                self.doubts = doubt.count
            super().connect(*arguments, **options)
            if not (self.is_labelled or self.client_name):
                self.is_labelled = True
                with suppress(redis.ResponseError):
                    self.send_command(*_LABEL, check_health=False)
                    self.read_response()

        def disconnect(self, *arguments: Any, **options: Any) -> Any:
            self.is_labelled = False
            return super().disconnect(*arguments, **options)

        def read_response(self, *arguments: Any, **options: Any) -> Any:
            try:
                return super().read_response(*arguments, **options)
            except redis.RedisError as error:
                if is_elsewhere(error) and self.doubts == doubt.count:
                    doubt.count += 1
                raise

    return Leaving


def leaving_replicas_async(connection_class: Any) -> Any:
    """Return a kind of connection for one pool of redis-py's asyncio client."""
    doubt = _Doubt()

    class Leaving(connection_class):  # type: ignore[misc]
        doubts = 0
        is_labelled = False

        async def connect(self, *arguments: Any, **options: Any) -> Any:
            if self.doubts < doubt.count:
                await self.disconnect()
                self.doubts = doubt.count
            await super().connect(*arguments, **options)
            if not (self.is_labelled or self.client_name):
                self.is_labelled = True
                with suppress(redis.ResponseError):
                    await self.send_command(*_LABEL, check_health=False)
                    await self.read_response()

        async def disconnect(self, *arguments: Any, **options: Any) -> Any:
            self.is_labelled = False
            return await super().disconnect(*arguments, **options)

        async def read_response(self, *arguments: Any, **options: Any) -> Any:
            try:
                return await super().read_response(*arguments, **options)
            except redis.RedisError as error:
                if is_elsewhere(error) and self.doubts == doubt.count:
                    doubt.count += 1
                raise

    return Leaving
