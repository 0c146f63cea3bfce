"""Leases: a granted batch whose payloads stay readable while it is worked on."""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack, overload

from numpy.typing import NDArray

from breadbox import calls, errors
from breadbox.batches import Batch, Stack
from breadbox.fragment import Fragment
from breadbox.loader import FragmentLoader, LoaderKeywords, LoaderOptions, run_ahead
from breadbox.summaries import html_table
from breadbox.types import Device, FragmentReference, LeaseGrant, ReleaseMode

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

FRAGMENTS_PER_READ = 8
"""Fragments that `fragments()` loads, and holds, at a time."""
WARN_EVERY_S = 30.0
RENEW_AT = 1 / 3
"""A lease is renewed when this part of it has passed: two renewals may fail before it expires."""
RENEWAL_END_S = 0.3
"""How long a release waits for a renewal that is under way."""
RENEWALS_MAX = 16
"""Renewals under way at a time, each for at most a few seconds."""
DUE_COUNT_MIN = 64
"""Renewals to come among which it is not worth looking for leases that were released."""
UNREADABLE_ERRORS = (errors.PayloadCorruptError, errors.PayloadFormatError)
"""A payload is there, and nobody will ever read it."""


SendOnce = Callable[[calls.Call[Any]], Any]
"""Sends a call, without retries."""


class LeaseClient(Protocol):
    """What a lease needs of the client that fetched it."""

    def renew_lease(
        self, lease_id: str, *, lease_s: float | None = None, buffer: str | None = None
    ) -> float:
        """Let it live on."""

    def release_lease(
        self,
        lease_id: str,
        mode: ReleaseMode = ...,
        *,
        buffer: str | None = None,
        unreadable: Sequence[str] = (),
    ) -> None:
        """End it."""

    def read_fragments(
        self,
        references: Sequence[FragmentReference],
        *,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
    ) -> list[Fragment]:
        """Read payloads."""

    def load_batch(
        self,
        references: Sequence[FragmentReference],
        *,
        device: Any = None,
        columns: Sequence[str] | None = None,
        into: Batch | Stack | None = None,
    ) -> Batch:
        """Read payloads into a stacked batch."""


class LeaseKeeper:
    """Renews open leases from daemon threads, started with the first lease. Thread-safe.

    One thread waits for the next lease to be due. Before it renews that one it leaves another in
    its place, so that a server that is slow to answer holds up no other lease; at most
    `RENEWALS_MAX` renewals are under way.

    A renewal that fails because the server is away is tried again soon; one that fails because
    the lease is gone marks the lease as expired and stops.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wake = threading.Condition()
        self._due: list[tuple[float, int, Lease]] = []
        self._full_at = DUE_COUNT_MIN
        self._serial = 0
        self._threads: set[threading.Thread] = set()
        self._is_watched = False
        """Whether a thread waits for the next lease to be due, or is about to."""
        self._closed = False

    def keep(self, lease: "Lease", remaining_s: float) -> None:
        """Renew `lease` in time until it is released."""
        with self._wake:
            if self._closed:
                return
            self._push(lease, remaining_s * RENEW_AT)
            self._watch()

    def close(self) -> None:
        """Stop renewing; open leases expire by themselves. Idempotent; waits for the threads."""
        with self._wake:
            self._closed = True
            self._due.clear()
            self._wake.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    def _push(self, lease: "Lease", delay_s: float) -> None:
        if len(self._due) >= self._full_at:
            # With them go the references to their fragments, long before a renewal would be due.
            self._due = [entry for entry in self._due if not entry[2].released]
            heapq.heapify(self._due)
            self._full_at = max(DUE_COUNT_MIN, 2 * len(self._due))
        self._serial += 1
        heapq.heappush(self._due, (self._clock() + delay_s, self._serial, lease))
        self._wake.notify()

    def _watch(self) -> None:
        """See to it that a thread waits for what is due, unless so many renew already."""
        if self._due and not self._is_watched and len(self._threads) < RENEWALS_MAX:
            thread = threading.Thread(target=self._run, name="breadbox-leases", daemon=True)
            thread.start()
            self._threads.add(thread)
            self._is_watched = True

    def _run(self) -> None:
        try:
            lease = self._next_due()
            while lease is not None:
                delay_s = lease.renew_quietly()
                with self._wake:
                    if delay_s is not None and not self._closed:
                        self._push(lease, delay_s)
                    if self._is_watched:
                        return
                    self._is_watched = True
                lease = self._next_due()
        finally:
            with self._wake:
                self._threads.discard(threading.current_thread())

    def _next_due(self) -> "Lease | None":
        """Wait for the next lease to renew; None when the keeper is closed."""
        with self._wake:
            while not self._closed:
                while self._due and self._due[0][2].released:
                    heapq.heappop(self._due)
                if not self._due:
                    self._wake.wait()
                    continue
                wait_s = self._due[0][0] - self._clock()
                if wait_s <= 0:
                    lease = heapq.heappop(self._due)[2]
                    self._is_watched = False
                    self._watch()
                    return lease
                self._wake.wait(wait_s)
            return None


class RenewalFailures:
    """Says that a lease cannot be renewed at once, and then every `WARN_EVERY_S`.

    Renewals are tried every second, for as long as a server is away.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at = float("-inf")

    def tell(self, lease_id: str, error: Exception) -> None:
        """Note one that failed."""
        if (now := self._clock()) >= self._next_at:
            self._next_at = now + WARN_EVERY_S
            _log.warning("lease %s could not be renewed: %s", lease_id, error)

    def end(self) -> None:
        """Note one that succeeded: the next failure is news."""
        self._next_at = float("-inf")


class Lease:
    """A granted batch. Use it as a context manager: it is renewed in the background while open.

    A clean exit consumes it (the use counts); an exception returns it (the use is given back) and
    goes on its way. Where that says that a payload cannot be read, the exit reads each by itself,
    and tells the server which ones, so that they are not served for ever. Without `with`, nothing
    renews it: call `renew` and `release` yourself.

    Not thread-safe but for `released` and `expired`: one thread at a time works on a lease.
    """

    def __init__(
        self,
        client: LeaseClient,
        buffer: str,
        grant: LeaseGrant,
        *,
        keeper: LeaseKeeper,
        once: SendOnce,
    ) -> None:
        """Made by `Client.fetch`.

        Args:
            client: Who fetched it, and reads for it.
            buffer: Where it was fetched.
            grant: What the server granted.
            keeper: Renews it while it is open.
            once: Sends a call once, without retries, so that an exit by exception stays quick.
        """
        self._client = client
        self._buffer = buffer
        self._keeper = keeper
        self._failures = RenewalFailures()
        self._once = once
        self._renewing = threading.Lock()
        self._unreadable: list[str] = []
        """Payloads that `unreadable` found, or that were refused."""
        self.grant = grant
        """What the server granted."""
        self.released = False
        """Whether `release` was called; it is renewed no more."""
        self.expired = False
        """Whether a renewal found it gone: payloads may be deleted, chunks served again."""

    @property
    def lease_id(self) -> str:
        """The server's name for it."""
        return self.grant.lease_id

    @property
    def request_id(self) -> str:
        """Name of the fetch; other ranks ask with the same."""
        return self.grant.request_id

    @property
    def references(self) -> tuple[FragmentReference, ...]:
        """The granted fragments, in draw order; those of one chunk stand together."""
        return self.grant.fragments

    def __len__(self) -> int:
        return len(self.grant.fragments)

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
            return self._client.read_fragments(references, columns=columns, steps=steps)

        groups = [
            self.references[start : start + FRAGMENTS_PER_READ]
            for start in range(0, len(self), FRAGMENTS_PER_READ)
        ]
        with closing(run_ahead(groups, read, threads=1, depth=1, in_order=True)) as loaded:
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
                `breadbox.loader.LoaderOptions`. In draw order and two batches ahead by default.

        Raises:
            ReplayBufferError: As `fragments`.
            InvalidRequestError: `batch_size` or an option is out of its range.
        """

        def load(references: Sequence[FragmentReference]) -> Batch:
            self._check_open()
            return self._client.load_batch(references, device=device, columns=columns)

        loader = FragmentLoader(load, LoaderOptions(**options), device=device)
        return loader.batches(self.references, batch_size)

    def renew(self, lease_s: float | None = None) -> float:
        """Let the lease live for another `lease_s` seconds (None: as granted) from now.

        Returns:
            Seconds it has left.

        Raises:
            LeaseExpiredError: It has expired already.
        """
        self._check_open()
        try:
            return self._client.renew_lease(self.lease_id, lease_s=lease_s, buffer=self._buffer)
        except errors.LeaseExpiredError:
            self.expired = True
            raise

    def unreadable(self) -> list[str]:
        """Read each payload by itself, and name those that are there and cannot be read.

        So a batch that failed tells whose fault it was; `release` says so to the server, which
        quarantines what readers name so often as its `--poison-after` says. Nothing is kept of what
        is read. Ends early where the store does not answer.
        """
        found: list[str] = []
        for reference in self.references:
            try:
                self._client.read_fragments([reference])
            except UNREADABLE_ERRORS:
                found.append(reference.metadata.payload.payload_id)
            except errors.PayloadMissingError:
                continue  # The server asks the store itself.
            except errors.ReplayBufferError as error:
                _log.warning("lease %s was not read to its end: %s", self.lease_id, error)
                break
        self.refuse(found)
        return found

    def refuse(self, payload_ids: Iterable[str]) -> None:
        """Name payloads that can be read and not be used, as of an action that does not exist.

        `release` says so to the server, which treats them like those that cannot be read.
        """
        self._unreadable += [each for each in payload_ids if each not in self._unreadable]

    def release(self, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
        """End the lease. Idempotent: a second call does nothing, whatever its mode.

        The server is told what `unreadable()` found, if it was called, and what was refused.

        Raises:
            LeaseExpiredError: It expired before; the server may serve its chunks again.
        """
        if self.released:
            return
        self.released = True
        # So that no renewal is under way when the release is sent; one that hangs is left alone.
        has_ended = self._renewing.acquire(timeout=RENEWAL_END_S)
        try:
            self._client.release_lease(
                self.lease_id, mode, buffer=self._buffer, unreadable=self._unreadable
            )
        finally:
            if has_ended:
                self._renewing.release()

    def renew_quietly(self) -> float | None:
        """Renew for the keeper; returns seconds until the next renewal, None when it is over."""
        with self._renewing:
            if self.released:
                return None
            try:
                remaining_s: float = self._once(
                    calls.renew_lease(self._buffer, self.lease_id, None)
                )
            except errors.ReplayBufferError as error:
                if self.released:
                    return None  # It was released meanwhile; that is no loss.
                return self._not_renewed(error)
            self._failures.end()
            return remaining_s * RENEW_AT

    def _not_renewed(self, error: errors.ReplayBufferError) -> float | None:
        """Note a failed renewal; seconds until the next one, None when it is over."""
        if isinstance(error, errors.LeaseExpiredError | errors.ClosedError):
            self.expired = isinstance(error, errors.LeaseExpiredError)
            _log.warning("lease %s is not renewed any more: %s", self.lease_id, error)
            return None
        self._failures.tell(self.lease_id, error)
        return 1.0

    def _check_open(self) -> None:
        if self.released:
            raise errors.ClosedError(f"lease {self.lease_id} was released")
        if self.expired:
            raise errors.LeaseExpiredError(self.lease_id)

    def __enter__(self) -> Self:
        self._keeper.keep(self, self.grant.remaining_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.release(ReleaseMode.CONSUMED)
            return
        if self.released:
            return
        if isinstance(error, UNREADABLE_ERRORS):
            self.unreadable()
        self.released = True
        mode = ReleaseMode.RETURNED
        call = calls.release_lease(self._buffer, self.lease_id, mode, self._unreadable)
        try:
            self._once(call)
        except errors.ReplayBufferError as problem:
            # The caller's own error matters more; the lease then ends by expiry.
            _log.warning("lease %s could not be returned: %s", self.lease_id, problem)

    def __repr__(self) -> str:
        return f"Lease({self.lease_id!r}, {len(self)} fragments, {lease_state(self)})"

    def _repr_html_(self) -> str:
        """Show the fragments as a table, in notebooks."""
        return lease_html(self)


class Granted(Protocol):
    """What both kinds of lease are."""

    grant: LeaseGrant
    released: bool
    expired: bool


def lease_state(lease: Granted) -> str:
    """Whether it can still be read from."""
    return "released" if lease.released else "expired" if lease.expired else "open"


def lease_html(lease: Granted) -> str:
    """Render a lease as a table of its fragments."""
    grant = lease.grant
    heads = ("worker", "index", "versions", "steps", "bytes", "staleness", "use")
    rows = (
        (
            each.metadata.worker_id,
            each.metadata.fragment_index,
            f"{each.metadata.model_version_min} to {each.metadata.model_version_max}",
            each.metadata.step_count,
            each.metadata.payload.size_bytes,
            each.staleness,
            each.use_count,
        )
        for each in grant.fragments
    )
    title = (
        f"Lease: {len(grant.fragments)} fragments of session {grant.session_id!r} "
        f"at version {grant.model_version}, {lease_state(lease)}"
    )
    return html_table(title, heads, rows)
