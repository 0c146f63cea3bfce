"""Leases and tickets of the asyncio client; docstrings are in `breadbox.lease`."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from breadbox.aio.loader import FragmentLoader
from breadbox.model.errors import ClosedError, ReplayBufferError
from breadbox.model.fragment import Fragment, checked_sequence
from breadbox.model.fragment import Sequence as TokenSequence
from breadbox.model.types import Device, FragmentReference, ReleaseMode
from breadbox.operations import operations
from breadbox.operations.leasing import UNREADABLE_ERRORS, Granted, Held, HeldTicket
from breadbox.operations.operations import Operation
from breadbox.reading.batches import Batch, stalenesses
from breadbox.reading.devices import side_stream_for
from breadbox.reading.loading import LoaderKeywords, LoaderOptions
from breadbox.reading.packed import BatchT, PackedBatch, PaddedBatch
from breadbox.transport.aio.interpreter import BackgroundTask, Interpreter
from breadbox.transport.aio.prefetch import prefetched

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class _Renewed(Held):
    """What leases and tickets share: they are renewed in their block, and ended once."""

    _interpreter: Interpreter
    _renewal: BackgroundTask | None = None

    async def _end_once(self, ending: Operation[None], is_left_by: BaseException | None) -> None:
        if self.released:
            return
        self.released = True
        if self._renewal is not None:
            # Otherwise it would find it gone, and log that it had expired.
            await self._renewal.end()
        try:
            await self._interpreter.run(ending)
        except ReplayBufferError as problem:
            if is_left_by is None:
                raise
            # The caller's own error matters more; it then ends by expiry.
            _log.warning("%s could not be returned: %s", self._name, problem)

    async def __aenter__(self) -> Self:
        self._renewal = self._interpreter.run_in_background(self._renewing())
        return self


class Lease(_Renewed, Granted):
    """A granted batch, as `breadbox.types.Lease`: an async context manager that renews it.

    For one task at a time. A cancellation that leaves the block returns the lease. A loop over
    `fragments` or `batches` that is left early cancels its loads once the generator is closed;
    `contextlib.aclosing` does that immediately.
    """

    async def staleness(self, model_version: int | None = None) -> NDArray[np.int64]:
        if model_version is None:
            model_version = await self._interpreter.run(self._version())
        return stalenesses(self.references, model_version)

    async def fragments(
        self, *, columns: Sequence[str] | None = None, steps: tuple[int, int] | None = None
    ) -> AsyncGenerator[Fragment, None]:

        self._is_read = True

        async def read(references: Sequence[FragmentReference]) -> list[Fragment]:
            self._check_open()
            return await self._interpreter.run(
                operations.load_fragments(self._context, references, columns, steps)
            )

        loading = prefetched(self._groups(), read, at_once=1, depth=1, in_order=True)
        async with aclosing(loading) as loaded:
            async for fragments in loaded:
                for fragment in fragments:
                    yield fragment

    async def sequences(
        self, *, columns: Sequence[str] | None = None
    ) -> AsyncIterator[TokenSequence]:
        async with aclosing(self.fragments(columns=columns)) as loaded:
            async for each in loaded:
                yield checked_sequence(each)

    @overload
    def batches(
        self,
        batch_size: int,
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> "AsyncGenerator[Batch[NDArray[Any]], None]": ...

    @overload
    def batches(
        self,
        batch_size: int,
        *,
        device: Device,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> "AsyncGenerator[Batch[torch.Tensor], None]": ...

    def batches(
        self,
        batch_size: int,
        *,
        device: Device | None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> AsyncGenerator[Batch, None]:
        side_stream = side_stream_for(device)

        async def load(references: Sequence[FragmentReference]) -> Batch:
            self._check_open()
            return await self._interpreter.run(
                operations.read_batch(
                    self._context, references, device, columns, within=side_stream
                )
            )

        async def version() -> int:
            return await self._interpreter.run(self._version())

        made = LoaderOptions(**options)
        limit = made.max_staleness_at_use
        self._is_read = self._is_read or limit is None
        self._limit = max(self._limit, -1 if limit is None else limit)
        loader = FragmentLoader(
            load, made, side_stream=side_stream, model_version=None if limit is None else version
        )
        self._loaders.append(loader)
        return loader.batches(self.grant.fragments, batch_size)

    def packed(
        self,
        max_tokens: int | None = None,
        device: Device | None = None,
        columns: Sequence[str] | None = None,
    ) -> AsyncGenerator[PackedBatch, None]:
        return self._sequences(PackedBatch, max_tokens, device, columns)

    def padded(
        self,
        max_tokens: int | None = None,
        device: Device | None = None,
        columns: Sequence[str] | None = None,
    ) -> AsyncGenerator[PaddedBatch, None]:
        return self._sequences(PaddedBatch, max_tokens, device, columns)

    def _sequences(
        self,
        kind: type[BatchT],
        max_tokens: int | None,
        device: Device | None,
        columns: Sequence[str] | None,
    ) -> AsyncGenerator[BatchT, None]:
        side_stream = side_stream_for(device)

        async def load(references: Sequence[FragmentReference]) -> BatchT:
            read = self._read_sequences(kind, references, device, columns, side_stream)
            return await self._interpreter.run(read)

        jobs = self._micro_batches(max_tokens, is_padded=kind is PaddedBatch)
        self._is_read = True
        return FragmentLoader(load, side_stream=side_stream).batches_of(jobs)

    async def renew(self, lease_s: float | None = None) -> float:
        return await self._interpreter.run(self._renewed(lease_s))

    async def unreadable(self) -> list[str]:
        return await self._interpreter.run(self._examined())

    async def release(self, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
        await self._end_once(self._ended(mode, None), None)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, UNREADABLE_ERRORS) and not self.released:
                with suppress(ClosedError):
                    await self.unreadable()
        finally:
            mode = ReleaseMode.CONSUMED if error is None else ReleaseMode.RETURNED
            await self._end_once(self._ended(mode, error), error)


class Ticket(_Renewed, HeldTicket):
    """The right to fill one group, as `breadbox.types.Ticket`: an async context manager."""

    async def give_back(self, member: int | None = None) -> None:
        ending = self._given_back(member, None)
        if member is None:
            await self._end_once(ending, None)
        else:
            await self._interpreter.run(ending)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            await self._end_once(self._given_back(None, error), error)
        elif self._renewal is not None:
            await self._renewal.end()
