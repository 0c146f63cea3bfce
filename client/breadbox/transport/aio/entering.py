"""Results of asyncio calls that may be entered as well as awaited."""

from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

E = TypeVar("E", bound=AbstractAsyncContextManager[Any])


class Entering(Coroutine[Any, Any, E]):
    """The pending result of a call, awaited once; `async with` awaits and enters it."""

    __slots__ = ("_coroutine", "_entered")

    def __init__(self, coroutine: Coroutine[Any, Any, E]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, E]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *raised: Any) -> Any:
        return self._coroutine.throw(*raised)

    def close(self) -> None:
        self._coroutine.close()

    async def __aenter__(self) -> E:
        self._entered = await self._coroutine
        await self._entered.__aenter__()
        return self._entered

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)
