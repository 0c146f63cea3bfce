# Code: breadbox/aio/lease.py, made by scripts/gen_blocking.py. Docstrings: written here.

"""Leases: a granted batch stays readable while the learner works on it. Tickets of groups."""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from breadbox.loader import FragmentLoader
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
from breadbox.transport.interpreter import BackgroundTask, Interpreter
from breadbox.transport.prefetch import prefetched

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class _Renewed(Held):
    _interpreter: Interpreter
    _renewal: BackgroundTask | None = None

    def _end_once(self, ending: Operation[None], is_left_by: BaseException | None) -> None:
        if self.released:
            return
        self.released = True
        if self._renewal is not None:
            # Otherwise it would find it gone, and log that it had expired.
            self._renewal.end()
        try:
            self._interpreter.run(ending)
        except ReplayBufferError as problem:
            if is_left_by is None:
                raise
            # The caller's own error matters more; it then ends by expiry.
            _log.warning("%s could not be returned: %s", self._name, problem)

    def __enter__(self) -> Self:
        self._renewal = self._interpreter.run_in_background(self._renewing())
        return self


class Lease(_Renewed, Granted):
    """A granted batch. Use it as a context manager: it is renewed while open.

    ```python
    with client.fetch(fragment_count=32, max_wait_s=30) as lease:
        for fragment in lease.fragments(columns=["reward"]):
            print(fragment.reward.mean())
    ```

    A clean exit consumes the lease: the use counts. An exception returns it: the use is given back,
    and the exception propagates. If the exception says that a payload cannot be read, the exit
    reads each payload by itself and reports the unreadable ones to the server, so that they are not
    served again and again. Without `with`, nothing renews it: call `renew` and `release` yourself.

    Only one thread at a time may use a lease, except for `released` and `expired`.

    Methods that call the server also raise the errors of every method of `Client`.
    """

    def staleness(self, model_version: int | None = None) -> NDArray[np.int64]:
        """Return int64[N]: the versions that each granted fragment is behind, in draw order.

        ```python
        oldest = lease.staleness().max()
        ```

        The buffer's `staleness_max` holds at the grant. What the learner publishes from then until
        its update makes the fragments staler; this is their staleness at any time, of a released
        lease as well.

        Args:
            model_version: The version to compare with, without a call, or None to ask the server
                for the current one.

        Raises:
            SessionEndedError: With None: the lease's session is not the current one.
        """
        if model_version is None:
            model_version = self._interpreter.run(self._version())
        return stalenesses(self.references, model_version)

    def fragments(
        self, *, columns: Sequence[str] | None = None, steps: tuple[int, int] | None = None
    ) -> Generator[Fragment, None, None]:
        """Load the granted fragments, in draw order, a few at a time and a few ahead.

        ```python
        rewards = [fragment.reward.sum() for fragment in lease.fragments(columns=["reward"])]
        ```

        Each iteration blocks until the next fragments are loaded. `columns` and `steps` are those
        of `Client.load_fragments`. For a buffer of sequences there is `sequences`.

        Raises:
            LeaseExpiredError: A renewal found that the lease has expired.
            ClosedError: The lease was released.
            ReplayBufferError: See `Client.load_fragments`; no payload is deleted during the lease.
        """
        self._is_read = True

        def read(references: Sequence[FragmentReference]) -> list[Fragment]:
            self._check_open()
            return self._interpreter.run(
                operations.load_fragments(self._context, references, columns, steps)
            )

        loading = prefetched(self._groups(), read, at_once=1, depth=1, in_order=True)
        with closing(loading) as loaded:
            for fragments in loaded:
                yield from fragments

    def sequences(self, *, columns: Sequence[str] | None = None) -> Iterator[TokenSequence]:
        """Load the granted sequences, in draw order, a few at a time and a few ahead.

        ```python
        for sequence in lease.sequences(columns=["tokens.ids"]):
            print(sequence.group, sequence.member, sequence.numbers, sequence.tokens["ids"].shape)
        ```

        Each iteration blocks until the next sequences are loaded. `columns` are paths such as
        "tokens.ids" or "context", or None for all; arrays of other paths are left out.

        Raises:
            InvalidRequestError: The buffer has fragments of steps, or no sequence has a column.
            ReplayBufferError: See `fragments`.
        """
        with closing(self.fragments(columns=columns)) as loaded:
            for each in loaded:
                yield checked_sequence(each)

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

        ```python
        for batch in lease.batches(batch_size=2, prefetch_batches=4):
            print(batch.reward.mean())
        ```

        Each iteration blocks until the next batch is loaded.

        Args:
            batch_size: Fragments per batch, at least 1; the last batch may be shorter. Of groups,
                any batch may be: a group that fits into a batch is not divided.
            device: Device of torch tensors, such as "cuda", or None for numpy arrays.
            columns: Paths of the arrays to load, such as "reward" or "obs.image", or None for all.
            **options: Fields of `breadbox.types.LoaderOptions`, such as `prefetch_batches` or
                `order`. By default batches come in draw order, and two are loaded ahead. With
                `max_staleness_at_use` each batch asks the server for the current version, and goes
                without the fragments that are too stale by then; `left_out` has them. If nothing
                was handed out, a clean exit returns the lease in place of consuming it, unless its
                fragments were too stale at the grant already.

        Raises:
            ReplayBufferError: See `fragments`.
            InvalidRequestError: `batch_size` or an option is out of its range.
            SessionEndedError: With `max_staleness_at_use`: the lease's session is not the current
                one.
        """
        side_stream = side_stream_for(device)

        def load(references: Sequence[FragmentReference]) -> Batch:
            self._check_open()
            return self._interpreter.run(
                operations.read_batch(
                    self._context, references, device, columns, within=side_stream
                )
            )

        def version() -> int:
            return self._interpreter.run(self._version())

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
    ) -> Generator[PackedBatch, None, None]:
        """Load the granted sequences packed one behind the other, as flash-attention takes them.

        ```python
        for batch in lease.packed(max_tokens=16_384, columns=["ids", "log_prob"]):
            print(batch.tokens["ids"].shape, batch.cu_seqlens, batch.max_seqlen)
        ```

        Each iteration blocks until the next micro-batch is loaded; two are loaded ahead.

        Args:
            max_tokens: Most tokens of a micro-batch, or None for one batch of all sequences.
                Micro-batches have about the same number of tokens each. All ranks of a fetch that
                ask for the same `max_tokens` get the same number of micro-batches. The last ones of
                a rank are empty if it has fewer sequences than another rank needs micro-batches.
            device: Device of torch tensors, such as "cuda", or None for numpy arrays.
            columns: Tokens and contexts to load, by name ("ids") or path ("tokens.ids",
                "context"), or None for all.

        Raises:
            InvalidRequestError: A sequence of any rank has more than `max_tokens` tokens, before
                anything is loaded; or a column is in no sequence.
            TreeMismatchError: Sequences differ in their columns, or in types of these.
            ReplayBufferError: See `fragments`.
        """
        return self._sequences(PackedBatch, max_tokens, device, columns)

    def padded(
        self,
        max_tokens: int | None = None,
        device: Device | None = None,
        columns: Sequence[str] | None = None,
    ) -> Generator[PaddedBatch, None, None]:
        """Load the granted sequences each in a row of its own, padded with zeros at the end.

        ```python
        for batch in lease.padded(max_tokens=16_384):
            print(batch.tokens["ids"].shape, batch.mask.sum())
        ```

        Otherwise as `packed`. Padding counts in `max_tokens`: sequences of about the same length
        share a micro-batch.

        Raises:
            ReplayBufferError: See `packed`.
        """
        return self._sequences(PaddedBatch, max_tokens, device, columns)

    def _sequences(
        self,
        kind: type[BatchT],
        max_tokens: int | None,
        device: Device | None,
        columns: Sequence[str] | None,
    ) -> Generator[BatchT, None, None]:
        side_stream = side_stream_for(device)

        def load(references: Sequence[FragmentReference]) -> BatchT:
            read = self._read_sequences(kind, references, device, columns, side_stream)
            return self._interpreter.run(read)

        jobs = self._micro_batches(max_tokens, is_padded=kind is PaddedBatch)
        self._is_read = True
        return FragmentLoader(load, side_stream=side_stream).batches_of(jobs)

    def renew(self, lease_s: float | None = None) -> float:
        """Renew the lease, and return the seconds until it expires.

        ```python
        expires_in_s = lease.renew(60)
        ```

        It then lasts `lease_s` seconds from now, or its granted time if None.

        Raises:
            LeaseExpiredError: It has expired already.
            ClosedError: It was released.
        """
        return self._interpreter.run(self._renewed(lease_s))

    def unreadable(self) -> list[str]:
        """Read each payload by itself, and return the ids of those that cannot be read.

        ```python
        if lease.unreadable():
            lease.release(breadbox.ReleaseMode.RETURNED)
        ```

        `release` reports the ids to the server, which quarantines a payload that readers have
        reported `--poison-after` times. Blocks while all payloads are read. Raises nothing, but
        ends early if the store does not answer. Missing payloads are not among them.
        """
        return self._interpreter.run(self._examined())

    def release(self, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
        """End the lease. Idempotent: a second call does nothing, whatever its mode.

        ```python
        lease.release(breadbox.ReleaseMode.RETURNED)
        ```

        `mode` CONSUMED counts the uses, RETURNED gives them back; so does CONSUMED where `batches`
        left out everything. Reports to the server the payloads that `unreadable()` found and
        `refuse()` named.

        Raises:
            LeaseExpiredError: It expired before; the server may serve its chunks again.
        """
        self._end_once(self._ended(mode, None), None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, UNREADABLE_ERRORS) and not self.released:
                with suppress(ClosedError):
                    self.unreadable()
        finally:
            mode = ReleaseMode.CONSUMED if error is None else ReleaseMode.RETURNED
            self._end_once(self._ended(mode, error), error)


class Ticket(_Renewed, HeldTicket):
    """The right to fill one group, which the server has named. Use it as a context manager.

    ```python
    for ticket in client.tickets(4, max_wait_s=60, buffer="paced"):
        with ticket:
            print(ticket.group, ticket.model_version)
            ticket.give_back()  # Nothing was generated for it.
    ```

    It is renewed while open, and ends with its group. A clean exit stops renewing it; other
    processes may still append members. An exception gives it back. If it expires before the first
    member, the group ends as `lost`; with members, the group stays open without a ticket.
    """

    def give_back(self, member: int | None = None) -> None:
        """Say that the rest of the group, or one member of it, will not come.

        ```python
        ticket.give_back(member=1)
        ```

        Without a member, the group ends immediately: as `partial` if at least `group_min` members
        are there, else as `given_back`. With one, it waits for the others as long as it can still
        have `group_min` members, else it ends as `given_back`. If it has ended, nothing changes.

        Args:
            member: Number of the member that will not come, or None for all that lack.

        Raises:
            TicketNotFoundError: The ticket has expired.
        """
        ending = self._given_back(member, None)
        if member is None:
            self._end_once(ending, None)
        else:
            self._interpreter.run(ending)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._end_once(self._given_back(None, error), error)
        elif self._renewal is not None:
            self._renewal.end()
