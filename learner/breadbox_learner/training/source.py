"""Fetch batches of a buffer under leases, for a learner."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar
from uuid import uuid4

from breadbox import Client
from breadbox.model.errors import (
    LeaseExpiredError,
    PayloadMissingError,
    ReplayBufferError,
    SessionEndedError,
    TreeMismatchError,
    UnsupportedArrayError,
    WaitElapsedError,
)
from breadbox.model.types import FragmentReference, ReleaseMode
from breadbox.operations.leasing import UNREADABLE_ERRORS
from breadbox.reading.batches import Batch, Stack, take_rows
from breadbox.reading.devices import side_stream_for
from breadbox.reading.loading import LOAD_ERRORS, fresh_rows
from breadbox.transport.prefetch import prefetched
from breadbox.types import Lease
from breadbox_learner.training.batching import TrainingBatch, training_batch
from breadbox_learner.training.fitting import Fitting, Misfit
from breadbox_policies import NotRepeatableError

_log = logging.getLogger(__name__)

Item = TypeVar("Item")

_FAULTS_OF_FRAGMENTS = (*LOAD_ERRORS, TreeMismatchError, UnsupportedArrayError)
"""Errors of a batch that may load without some of its fragments."""
FAILED_LOADS_MAX = 3
"""Most batches in a row that may fail to load; the next one ends the run."""
SAY_WAITING_S = 10.0
"""Seconds between two log lines about a wait."""


@dataclass(slots=True)
class FetchedBatch:
    """A batch, and how it was fetched."""

    batch: TrainingBatch
    versions: list[int]
    """Model version of each fragment's oldest step."""
    staleness: list[int]
    """Staleness of each fragment in versions, at the grant."""
    use_count: list[int]
    """Deliveries of each fragment's chunk, including this one."""
    load_s: float
    """Seconds from the grant to the stacked batch."""
    waiting_reason: str
    """The server's last reason for a wait, or empty if it granted immediately."""
    release: Callable[[bool], None]
    """Function to call once: with True if trained on, False to return the use; frees the memory."""
    misfit_count: int = 0
    """Fragments left out since the batch before because they did not fit."""
    loaded: Batch | None = None
    """The batch as it was loaded, which shares the memory of `batch`."""


class UnusableShareError(ReplayBufferError):
    """No fragment of this rank's share can be trained on, so no rank trains; call `next` again."""

    def __init__(self, misfit_count: int) -> None:
        super().__init__(
            f"nothing of this rank's share can be trained on: {misfit_count} fragments do not fit, "
            "and the others are staler than max_staleness_at_use"
        )
        self.misfit_count = misfit_count


@dataclass(frozen=True, slots=True)
class Share:
    """This process's part of each batch (B12)."""

    rank: int = 0
    world_size: int = 1
    run_nonce: str = ""
    """Random text equal on all ranks, new for each start; or empty for a single process."""


@dataclass(eq=False)
class LeaseSource:
    """Fetch batches under leases; equal request ids share draws among ranks."""

    client: Client
    fragment_count: int
    """Fragments of a batch, for all ranks together."""
    share: Share = Share()
    prefetch_batches: int = 0
    """Batches fetched and loaded ahead, in a thread."""
    max_staleness_at_use: int | None = None
    """Versions that a fragment may be behind when `next` returns it, or None for any."""
    model_version: Callable[[], int] = lambda: 0
    """Returns the version that trains on the next batch."""
    device: str = "cpu"
    """Device of the batch; CUDA copies are pinned, on a stream beside the training."""
    session_id: str = ""
    """Session of the fragments, or empty for any."""
    fitting: Fitting = field(default_factory=Fitting)
    """Check of fragments; misfits are left out, and a rank's share is filled up."""
    while_waiting: Callable[[], None] = lambda: None
    """Called in the fetching thread after each wait without a batch."""
    is_repeatable: bool = False
    """True to take fragments in the order of workers, and only as one worker makes them in turns
    with this learner: whole batches of the newest version."""
    wait_slice_s: float = 1.0
    """Longest single wait; `stopped` is called in between."""
    clock: Callable[[], float] = time.monotonic
    """Returns monotonic seconds; rank 0 logs a wait every 10 of them."""

    def __post_init__(self) -> None:
        self._side_stream = side_stream_for(self.device)
        self._spare: list[Stack] = []
        """Memory of released batches, which later loads reuse."""
        self._misfits_reported = 0
        self._failed_loads = 0
        """Failed loads in a row."""
        self._left_out_count = 0
        self._repeatable_count = 0
        """Batches that were checked to be repeatable."""
        self._nonce = self.share.run_nonce or uuid4().hex
        self._closing = threading.Event()
        self._stopped: Callable[[], bool] = self._closing.is_set
        self._open: set[Lease] = set()
        self._open_lock = threading.Lock()
        self._batches = prefetched(
            count(), self._fetch, at_once=1, depth=self.prefetch_batches, in_order=True
        )

    def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
        """Wait for a batch, or None if `stopped()`; UnusableShareError if it has none."""
        self._stopped = stopped
        misfit_count = 0
        while True:
            fetched = next(self._batches, None)
            if isinstance(fetched, UnusableShareError):
                raise fetched
            if fetched is None:
                return None
            misfit_count += fetched.misfit_count
            if self._side_stream is not None:
                self._side_stream.hand_over(fetched.batch.tensors)
            if self.is_repeatable:
                self._check_repeatable(fetched)
            if (fresh := self._fresh(fetched)) is not None:
                return replace(fresh, misfit_count=misfit_count)
            if self.share.world_size > 1:
                raise UnusableShareError(misfit_count)

    def take_left_out_count(self) -> int:
        """Return how many fragments were too stale at their use, since the call before."""
        count, self._left_out_count = self._left_out_count, 0
        return count

    def _check_repeatable(self, fetched: FetchedBatch) -> None:
        """Raise NotRepeatableError unless each worker goes on by equally many fragments."""
        names, indices = fetched.batch.worker_ids, fetched.batch.fragment_indices
        each = self.fragment_count // len(set(names))
        start = self._repeatable_count * each
        self._repeatable_count += 1
        wanted = [(name, start + n) for name in sorted(set(names)) for n in range(each)]
        version = self.model_version()
        if list(zip(names, indices, strict=True)) == wanted and {version} == {*fetched.versions}:
            return
        fetched.release(False)
        raise NotRepeatableError(
            f"batch {self._repeatable_count} is not what one worker makes with version {version}: "
            f"wanted {each} fragments of each from {start} on. Start learner and one `breadbox "
            f"rollout --deterministic --fragments-per-batch {self.fragment_count}` anew, on a "
            "buffer with uses_max 1"
        )

    def _fresh(self, fetched: FetchedBatch) -> FetchedBatch | None:
        """Return the part that is fresh enough to train on, or None, and then end the lease."""
        limit, loaded, version = self.max_staleness_at_use, fetched.loaded, self.model_version()
        if limit is None or loaded is None or version - min(fetched.versions) <= limit:
            return fetched
        staleness = [version - each for each in fetched.versions]
        rows = fresh_rows(loaded.references, staleness, limit)
        kept = {_id_of(loaded.references[row]) for row in rows}
        self._left_out_count += len({_id_of(each) for each in loaded.references} - kept)
        if not rows:
            # A return of what was too stale at its grant would have it granted again.
            fetched.release(min(fetched.staleness) > limit)
            return None
        if self._side_stream is not None:
            self._side_stream.hand_over(loaded)
        rows = list(self._as_many(rows, len(loaded)))
        lists: dict[str, Any] = {
            name: [getattr(fetched, name)[row] for row in rows]
            for name in ("versions", "staleness", "use_count")
        }
        part = take_rows(loaded, rows)
        return replace(fetched, batch=training_batch(part), loaded=part, **lists)

    def close(self) -> None:
        """Return leases that were not yielded; blocks for at most a wait slice. Idempotent."""
        self._closing.set()
        self._batches.close()
        for lease in list(self._open):
            self._release(lease, ReleaseMode.RETURNED)

    def _fetch(self, number: int) -> FetchedBatch | UnusableShareError | None:
        """Wait for batch *number*, or None if stopped; return errors: raising ends iterators."""
        for attempt in count():
            lease, reason = self._granted(f"{self._nonce}-{number}-{attempt}")
            if lease is None:
                return None
            try:
                fetched = self._load(lease, reason)
                self._failed_loads = 0
                if fetched is not None:
                    return fetched
            except _FAULTS_OF_FRAGMENTS as error:
                if self._failed_loads >= FAILED_LOADS_MAX:
                    raise
                self._failed_loads += 1
                _log.warning("a batch could not be loaded and is left out: %s", error)
            # Consumed: a returned batch would be served, and fail, again.
            self._release(lease, ReleaseMode.CONSUMED)
            if self.share.world_size > 1:
                # Other ranks have shares of this draw, so this rank cannot make another.
                return UnusableShareError(self._new_misfits())
        raise AssertionError("unreachable")

    def _granted(self, request_id: str) -> tuple[Lease | None, str]:
        """Wait for a lease; return it with the server's last reason for the wait."""
        reason = ""
        said, say_at = "", self.clock() + SAY_WAITING_S
        while not (self._closing.is_set() or self._stopped()):
            try:
                lease = self.client.fetch(
                    self.fragment_count,
                    self.wait_slice_s,
                    rank=self.share.rank,
                    world_size=self.share.world_size,
                    request_id=request_id,
                )
            except WaitElapsedError as elapsed:
                reason = elapsed.reason
                if self.share.rank == 0 and reason != said and self.clock() >= say_at:
                    said, say_at = reason, self.clock() + SAY_WAITING_S
                    _log.info("waiting for workers to fill a batch: %s", reason)
                self.while_waiting()
                continue
            lease.__enter__()  # From here on it is renewed.
            with self._open_lock:
                self._open.add(lease)
            # The server grants from the session that is current at that moment.
            if self.session_id and lease.grant.session_id != self.session_id:
                raise SessionEndedError(self.session_id, lease.grant.session_id)
            return lease, reason
        return None, reason

    def _load(self, lease: Lease, reason: str) -> FetchedBatch | None:
        granted_at = time.monotonic()
        references: Sequence[FragmentReference] = lease.references
        # A share with a partial group has fewer fragments, and is filled up as well.
        share_count = max(len(references), self.fragment_count // self.share.world_size)
        if self.is_repeatable:
            references = sorted(
                references, key=lambda it: (it.metadata.worker_id, it.metadata.fragment_index)
            )
        while True:
            try:
                loaded = self._stacked(self._as_many(references, share_count))
            except _FAULTS_OF_FRAGMENTS as error:
                kept = self._without_faulty(lease, references, error)
            else:
                with self._side_stream or nullcontext():
                    kept = self._usable(lease, loaded)
                if len(kept) == len(loaded.references):
                    break
                if loaded.stacked is not None:
                    self._spare.append(loaded.stacked)
            if not kept:
                return None
            references = kept
        references = loaded.references
        with self._side_stream or nullcontext():
            batch = training_batch(loaded)

        def release(trained: bool) -> None:
            if loaded.stacked is not None:
                self._spare.append(loaded.stacked)
            self._release(lease, ReleaseMode.CONSUMED if trained else ReleaseMode.RETURNED)

        return FetchedBatch(
            batch=batch,
            loaded=loaded,
            versions=[reference.metadata.model_version_min for reference in references],
            staleness=[
                reference.staleness_at(lease.grant.model_version) for reference in references
            ],
            use_count=[reference.use_count for reference in references],
            load_s=time.monotonic() - granted_at,
            waiting_reason=reason,
            release=release,
            misfit_count=self._new_misfits(),
        )

    def _new_misfits(self) -> int:
        count = self.fitting.misfit_count - self._misfits_reported
        self._misfits_reported += count
        return count

    def _without_faulty(
        self, lease: Lease, references: Sequence[FragmentReference], error: ReplayBufferError
    ) -> list[FragmentReference]:
        """Leave out and report fragments that cannot be loaded; re-raise if there is none."""
        if isinstance(error, PayloadMissingError):
            # The server checks the store itself.
            kept = self._without(references, {error.payload_id}, error)
        elif isinstance(error, UNREADABLE_ERRORS):
            kept = self._without(references, set(lease.unreadable()), error)
        else:
            try:
                described = self.client.describe_arrays(references)
            except LOAD_ERRORS as unreadable:
                return self._without_faulty(lease, references, unreadable)
            pairs = zip(references, described, strict=True)
            lease.refuse([_id_of(each) for each, arrays in pairs if self.fitting.misfit(arrays)])
            kept = self.fitting.kept(references, described)
            if len(kept) == len(references):
                # Equal arrays may be in different trees: a list is not a dict.
                kept = self._without(references, self._of_the_fewer(references), error)
        if len(kept) == len(references) or (not kept and isinstance(error, PayloadMissingError)):
            raise error
        return kept

    def _without(
        self,
        references: Sequence[FragmentReference],
        payload_ids: set[str],
        error: ReplayBufferError,
    ) -> list[FragmentReference]:
        kept: list[FragmentReference] = []
        for reference in references:
            if _id_of(reference) in payload_ids:
                misfit = Misfit("its payload", "one that can be read", str(error))
                self.fitting.leave_out(reference, misfit)
            else:
                kept.append(reference)
        return kept

    def _of_the_fewer(self, references: Sequence[FragmentReference]) -> set[str]:
        """Return the payloads that do not stack with the first, or the others if fewer."""
        apart = {_id_of(each) for each in references if not self._stack(references[0], each)}
        together = {_id_of(each) for each in references} - apart
        return min(apart, together, key=len)

    def _stack(self, *references: FragmentReference) -> bool:
        try:
            self.client.load_batch(references, device="cpu", into=None)
        except _FAULTS_OF_FRAGMENTS:
            return False
        return True

    def _usable(self, lease: Lease, loaded: Batch) -> list[FragmentReference]:
        """Leave out rows that cannot be trained on; report them to the server as unreadable."""
        references = loaded.references
        misfit = self.fitting.batch_misfit(loaded)
        if misfit is None:
            faulty = self.fitting.faulty(loaded)
        else:
            # A single fragment may be the cause, for example by its final observations.
            described = self.client.describe_arrays(references)
            misfits = [self.fitting.misfit(arrays) for arrays in described]
            faulty = {row: each for row, each in enumerate(misfits) if each is not None}
            faulty = faulty or dict.fromkeys(range(len(references)), misfit)
        if not faulty:
            return list(references)
        for row, why in faulty.items():
            self.fitting.leave_out(references[row], why)
        lease.refuse([_id_of(references[row]) for row in faulty])
        return [each for row, each in enumerate(references) if row not in faulty]

    def _stacked(self, references: Sequence[FragmentReference]) -> Batch:
        into = self._spare.pop() if self._spare else None
        try:
            with self._side_stream or nullcontext():
                return self.client.load_batch(references, device=self.device, into=into)
        except _FAULTS_OF_FRAGMENTS:
            if into is not None:
                self._spare.append(into)
            raise

    def _as_many(self, kept: Sequence[Item], wanted_count: int) -> Sequence[Item]:
        """Repeat fragments up to a whole share, so that ranks make steps of the same size."""
        if self.share.world_size == 1:
            return kept
        return [kept[position % len(kept)] for position in range(wanted_count)]

    def _release(self, lease: Lease, mode: ReleaseMode) -> None:
        """End a lease; if it has expired, its chunks may be used again, and the run continues."""
        with self._open_lock:
            self._open.discard(lease)
        try:
            lease.release(mode)
        except LeaseExpiredError as error:
            _log.warning("%s; its chunks may be served again", error)
        except ReplayBufferError as error:
            if mode is ReleaseMode.CONSUMED:
                raise
            _log.warning("a lease could not be given back and will expire: %s", error)


def _id_of(reference: FragmentReference) -> str:
    return reference.metadata.payload.payload_id
