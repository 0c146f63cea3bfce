# Made from breadbox/aio/lease.py by scripts/gen_blocking.py; edit that, run `make blocking`.
"""Leases: a granted batch whose payloads stay readable while it is worked on."""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from numpy.typing import NDArray

from breadbox import operations
from breadbox.ahead import run_ahead
from breadbox.batches import Batch
from breadbox.errors import ClosedError, ReplayBufferError
from breadbox.fragment import Fragment
from breadbox.interpreter import Interpreter, Kept
from breadbox.leasing import UNREADABLE_ERRORS, Granted
from breadbox.loader import FragmentLoader
from breadbox.loading import LoaderKeywords, LoaderOptions
from breadbox.side_stream import side_stream_for
from breadbox.types import Device, FragmentReference, LeaseGrant, ReleaseMode

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class Lease(Granted):
    """A granted batch. Use it as a context manager: it is renewed while open.

    A clean exit consumes it (the use counts); an exception returns it (the use is given back) and
    goes on its way. Where that says that a payload cannot be read, the exit reads each by itself,
    and tells the server which ones, so that they are not served for ever. Without `with`,
    nothing renews it: call `renew` and `release` yourself.

    Not thread-safe but for `released` and `expired`: one thread at a time works on a lease.
    """

    def __init__(self, interpreter: Interpreter, buffer: str, grant: LeaseGrant) -> None:
        """Made by `Client.fetch`."""
        super().__init__(interpreter.context, buffer, grant)
        self._interpreter = interpreter
        self._renewal: Kept | None = None

    def fragments(
        self,
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
    ) -> Iterator[Fragment]:
        """Load the granted fragments, in draw order, a few at a time and a few ahead.

        Args:
            columns: Paths of the arrays wanted, such as "reward" or "obs.image"; None: all.
            steps: Half-open range [start, stop) of the steps wanted; None: all.

        Raises:
            LeaseExpiredError: The lease is known to have expired.
            PayloadMissingError: A payload is gone, which happens only after the lease.
            StoreUnavailableError: The store stayed away for `reconnect_s`.
        """

        def read(references: Sequence[FragmentReference]) -> list[Fragment]:
            self._check_open()
            return self._interpreter.run(
                operations.load_fragments(self._context, references, columns, steps)
            )

        loading = run_ahead(self._groups(), read, at_once=1, depth=1, in_order=True)
        with closing(loading) as loaded:
            for fragments in loaded:
                yield from fragments

    @overload
    def batches(
        self,
        batch_size: int,
        *,
        device: None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> "Generator[Batch[NDArray[Any]], None, None]": ...

    @overload
    def batches(
        self,
        batch_size: int,
        *,
        device: Device,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> "Generator[Batch[torch.Tensor], None, None]": ...

    def batches(
        self,
        batch_size: int,
        *,
        device: Device | None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> Generator[Batch, None, None]:
        """Load the granted fragments as stacked batches [batch_size, T, ...], ahead of their use.

        Args:
            batch_size: Fragments per batch, at least 1; the last batch may be shorter.
            device: None for numpy arrays, else where torch tensors are wanted, such as "cuda".
            columns: Paths of the arrays wanted, such as "reward" or "obs.image"; None: all.
            **options: How to load, such as `prefetch_batches` or `order`; see
                `breadbox.LoaderOptions`. In draw order and two batches ahead by default.

        Raises:
            ReplayBufferError: As `fragments`.
            InvalidRequestError: `batch_size` or an option is out of its range.
        """
        side_stream = side_stream_for(device)

        def load(references: Sequence[FragmentReference]) -> Batch:
            self._check_open()
            return self._interpreter.run(
                operations.read_batch(
                    self._context, references, device, columns, within=side_stream
                )
            )

        loader = FragmentLoader(load, LoaderOptions(**options), side_stream=side_stream)
        return loader.batches(self.references, batch_size)

    def renew(self, lease_s: float | None = None) -> float:
        """Let the lease live for another `lease_s` seconds (None: as granted) from now.

        Returns:
            Seconds it has left.

        Raises:
            LeaseExpiredError: It has expired already.
        """
        return self._interpreter.run(self._renewed(lease_s))

    def unreadable(self) -> list[str]:
        """Read each payload by itself, and name those that are there and cannot be read.

        So a batch that failed tells whose fault it was; `release` says so to the server, which
        quarantines what readers name so often as its `--poison-after` says. Nothing is kept of what
        is read. Ends early where the store does not answer.
        """
        return self._interpreter.run(self._examined())

    def release(self, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
        """End the lease. Idempotent: a second call does nothing, whatever its mode.

        The server is told what `unreadable()` found, if it was called, and what was refused.

        Raises:
            LeaseExpiredError: It expired before; the server may serve its chunks again.
        """
        self._end(mode, None)

    def _end(self, mode: ReleaseMode, is_left_by: BaseException | None) -> None:
        if self.released:
            return
        self.released = True
        if self._renewal is not None:
            # Or it would find the lease gone, and say that it had expired.
            self._renewal.end()
        try:
            self._interpreter.run(self._ended(mode, is_left_by))
        except ReplayBufferError as problem:
            if is_left_by is None:
                raise
            # The caller's own error matters more; the lease then ends by expiry.
            _log.warning("lease %s could not be returned: %s", self.lease_id, problem)

    def __enter__(self) -> Self:
        self._renewal = self._interpreter.keep(self._renewing())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, UNREADABLE_ERRORS) and not self.released:
                with suppress(ClosedError):
                    self.unreadable()
        finally:
            mode = ReleaseMode.CONSUMED if error is None else ReleaseMode.RETURNED
            self._end(mode, error)
