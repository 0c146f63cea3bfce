"""Both clients behind one face."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import breadbox
from breadbox import aio
from breadbox.model.options import ClientOptions


@dataclass
class Caller:
    """Either client; what blocks runs in a thread."""

    client: Any

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        owner = self.client.service if hasattr(self.client.service, method) else self.client
        function = getattr(owner, method)
        if isinstance(self.client, aio.Client):
            return await function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    async def __aenter__(self) -> "Caller":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.call("close")


KINDS = ("blocking", "asyncio")


def make_caller(
    kind: str, address: str, *, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Caller:
    """A client of the kind, with the same jitter in every run."""
    settings = ClientOptions(**options)
    rng = random.Random(0)
    if kind == "blocking":
        return Caller(breadbox.Client(address, settings, rng=rng, clock=clock))
    return Caller(aio.Client(address, settings, rng=rng, clock=clock))
