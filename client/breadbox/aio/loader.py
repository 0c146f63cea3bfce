"""Load granted fragments ahead of their use; docstrings are in `breadbox.loader`."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from breadbox.model.types import FragmentReference
from breadbox.reading.devices import SideStream
from breadbox.reading.loading import LOAD_ERRORS, LoaderOptions, Planned
from breadbox.transport.aio.prefetch import prefetched

Loaded = TypeVar("Loaded")


class FragmentLoader(Planned[Loaded]):
    """Load lists of references as batches, ahead of their use, as `breadbox.loader` does."""

    def __init__(
        self,
        load: Callable[[Sequence[FragmentReference]], Awaitable[Loaded]],
        options: LoaderOptions | None = None,
        *,
        side_stream: SideStream | None = None,
        model_version: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        super().__init__(options, knows_version=model_version is not None)
        self._load = load
        self._model_version = model_version
        self._side_stream = side_stream

    def batches(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> AsyncGenerator[Loaded, None]:
        return self.batches_of(self._plan.jobs(references, batch_size))

    def batches_of(
        self, jobs: Sequence[Sequence[FragmentReference]]
    ) -> AsyncGenerator[Loaded, None]:
        options = self._plan.options
        loaded = prefetched(
            jobs,
            self._load_job,
            at_once=options.threads,
            depth=self._plan.depth,
            in_order=options.order != "completed",
        )
        return self._handed_out(loaded)

    async def _handed_out(
        self, groups: AsyncGenerator[list[Loaded], None]
    ) -> AsyncGenerator[Loaded, None]:
        async with aclosing(groups):
            async for group in groups:
                if group and self._side_stream is not None:
                    self._side_stream.hand_over(group[0])
                if group and self._model_version is not None:
                    group[:] = self._plan.fresh(group[0], await self._model_version())
                while group:
                    yield group.pop()

    async def _load_job(self, job: Sequence[FragmentReference]) -> list[Loaded]:
        asking = self._plan.loaded(job)
        try:
            wanted = next(asking)
            while True:
                try:
                    loaded = await self._load(wanted)
                except LOAD_ERRORS as error:
                    wanted = asking.throw(error)
                else:
                    wanted = asking.send(loaded)
        except StopIteration as stop:
            batches: list[Loaded] = stop.value
            return batches
        finally:
            asking.close()
