"""Plan the loading of granted fragments: the batches, and what follows a failed load.

Invariants:
    L1  Every reference is delivered exactly once, or reported as skipped or left out, or lost to an
        error that is raised; with `drop_last`, those of a short last batch are not delivered.
    L2  At most `prefetch_batches` batches are loaded or loading beside the one handed out.
        With `max_staleness_at_use` they are no more than that either, and no batch that is handed
        out has a staler fragment at that moment.
    L3  What one iteration started never shows up in another; leaving it early, by break, error or
        `close()`, cancels what has not begun and waits for what has.

`breadbox.loader` carries plans out in threads (loading releases the interpreter lock).
`breadbox.aio.loader` does in tasks, and does not wait for loads that have begun when it is left.
"""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypedDict, TypeVar, cast, get_args

from breadbox.model.checks import check_whole
from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadFormatError,
    PayloadMissingError,
)
from breadbox.model.types import FragmentReference
from breadbox.reading.batches import Batch, take_rows

_log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
Result = TypeVar("Result")

LOAD_ERRORS = (PayloadCorruptError, PayloadFormatError, PayloadMissingError)
"""Failures of a load that are retried, and may be skipped; not an unreachable store, which the load
has waited for, and which is no fragment's fault."""


LoadOrder = Literal["granted", "shuffled", "completed"]
"""The order in which fragments are delivered.

granted: the order of the lease. shuffled: a random order that depends on the seed alone.
completed: batches cut in granted order (or shuffled, with a seed), delivered as each is loaded.
"""

OnFailure = Literal["raise", "skip"]
"""What a loader does with fragments that could not be loaded, after the last retry.

raise: raise the error in place of the batch. skip: deliver the batch without them, and list them in
`breadbox.loader.FragmentLoader.skipped`.
"""


class LoaderKeywords(TypedDict, total=False):
    """The fields of `LoaderOptions`, as keyword arguments."""

    threads: int
    prefetch_batches: int
    order: LoadOrder
    seed: int | None
    drop_last: bool
    retries: int
    on_failure: OnFailure
    max_staleness_at_use: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options of a loader, checked on construction."""

    threads: int = 2
    """Concurrent loads, 1 to 256; more than `prefetch_batches` have nothing to do."""
    prefetch_batches: int = 2
    """Batches loaded ahead of the one the learner works on, 0 to 1024; 0 loads on request."""
    order: LoadOrder = "granted"
    seed: int | None = None
    """Seed of shuffled and completed order, or None: for shuffled order a random seed, for
    completed order no shuffling."""
    drop_last: bool = False
    """True to leave out a last batch that is shorter than the others; of groups, one that has fewer
    of them."""
    retries: int = 2
    """Further attempts at a load that failed, 0 to 100. They do not count for an unreachable store,
    which the client waits for, for `reconnect_s`."""
    on_failure: OnFailure = "raise"
    max_staleness_at_use: int | None = None
    """Largest staleness of a fragment, in versions, when its batch is handed out: at least 0, or
    None for any. Staler ones are left out, and no more batches than this are loaded ahead, since
    each may be a version staler than the one before."""

    def __post_init__(self) -> None:
        ranges = {"threads": (1, 256), "prefetch_batches": (0, 1024), "retries": (0, 100)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidRequestError(
                    name, f"must be from {least} to {most}, got {getattr(self, name)}"
                )
        limit = self.max_staleness_at_use
        if limit is not None and limit < 0:
            raise InvalidRequestError("max_staleness_at_use", f"must be at least 0, got {limit}")
        for name, choices in {"order": LoadOrder, "on_failure": OnFailure}.items():
            if getattr(self, name) not in get_args(choices):
                raise InvalidRequestError(
                    name, f"must be one of {get_args(choices)}, got {getattr(self, name)!r}"
                )


Asking = Generator[Sequence[FragmentReference], Loaded, Result]
"""Generator that yields references to load as one batch, and is sent the batch or the error."""


def units_of(references: Sequence[FragmentReference]) -> list[list[FragmentReference]]:
    """Divide references into units that loaders keep whole: groups, or single fragments."""
    units: list[list[FragmentReference]] = []
    for each in references:
        last = units[-1][-1] if units else None
        # All members of a group are discontinuities; of other chunks, at most the first fragment.
        if (
            last is not None
            and each.metadata.discontinuity
            and each.chunk_id == last.chunk_id
            and each.metadata.fragment_index > last.metadata.fragment_index
        ):
            units[-1].append(each)
        else:
            units.append([each])
    return units


def fresh_rows(
    references: Sequence[FragmentReference], staleness: Sequence[int], limit: int | None
) -> list[int]:
    """Return the rows that are no staler than a limit; the stalest member decides for its group."""
    if limit is None:
        return list(range(len(staleness)))
    groups = {unit[0].chunk_id for unit in units_of(references) if len(unit) > 1}
    chunks = [each.chunk_id for each in references]
    stale = {chunk for chunk, each in zip(chunks, staleness, strict=True) if each > limit} & groups
    return [row for row, each in enumerate(staleness) if each <= limit and chunks[row] not in stale]


def _is_short(jobs: Sequence[Sequence[FragmentReference]], batch_size: int) -> bool:
    """Whether the last batch is shorter than the others; partial groups alone do not make it so."""
    counts = [len(units_of(job)) for job in jobs]
    is_of_groups = counts[-1] < len(jobs[-1])
    return len(jobs[-1]) < batch_size and not (is_of_groups and counts[-1] >= counts[0])


class Planned(Generic[Loaded]):
    """What the loaders of both clients know of their loads."""

    def __init__(self, options: LoaderOptions | None, *, knows_version: bool) -> None:
        self._plan: LoadPlan[Loaded] = LoadPlan(options or LoaderOptions())
        if not knows_version and self._plan.options.max_staleness_at_use is not None:
            raise InvalidRequestError("model_version", "is needed with max_staleness_at_use")

    @property
    def skipped(self) -> list[FragmentReference]:
        """References that could not be loaded, over the loader's life; with "skip" only."""
        return self._plan.skipped

    @property
    def left_out(self) -> list[FragmentReference]:
        """References that were too stale at their use; with `max_staleness_at_use` only."""
        return self._plan.left_out

    @property
    def staleness_at_use(self) -> Counter[int]:
        """Number of fragments handed out, by their staleness in versions at that moment."""
        return self._plan.staleness_at_use


class LoadPlan(Generic[Loaded]):
    """The batches to load, and the decisions after a failed load."""

    def __init__(self, options: LoaderOptions) -> None:
        self.options = options
        self.skipped: list[FragmentReference] = []
        """References that could not be loaded, over the plan's life; with "skip" only."""
        self.left_out: list[FragmentReference] = []
        """References that were too stale when their batch was to be handed out."""
        self.staleness_at_use: Counter[int] = Counter()
        """Fragments handed out, by their staleness at that moment, where the version is known."""

    @property
    def depth(self) -> int:
        """Number of batches to load ahead."""
        ahead, limit = self.options.prefetch_batches, self.options.max_staleness_at_use
        return ahead if limit is None else min(ahead, limit)

    def fresh(self, loaded: Loaded, model_version: int) -> list[Loaded]:
        """Return a batch, or the part that may be used at a version, or []; count what it has."""
        batch, limit = cast(Batch, loaded), self.options.max_staleness_at_use
        staleness = batch.staleness(model_version).tolist()
        rows = fresh_rows(batch.references, staleness, limit)
        self.staleness_at_use.update([staleness[row] for row in rows])
        if len(rows) == len(staleness):
            return [loaded]
        left_out = sorted(set(range(len(staleness))) - set(rows))
        self.left_out += [batch.references[row] for row in left_out]
        return [cast(Loaded, take_rows(batch, rows))] if rows else []

    def jobs(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> list[Sequence[FragmentReference]]:
        """Return the references of each batch, in the order of loading."""
        check_whole("batch_size", batch_size, 1)
        order, seed = self.options.order, self.options.seed
        units = units_of(references)
        if order == "shuffled" or (order == "completed" and seed is not None):
            random.Random(seed).shuffle(units)
        jobs: list[list[FragmentReference]] = []
        for unit in units:
            for start in range(0, len(unit), batch_size):
                part = unit[start : start + batch_size]
                if not jobs or len(jobs[-1]) + len(part) > batch_size:
                    jobs.append([])
                jobs[-1] += part
        if self.options.drop_last and jobs and _is_short(jobs, batch_size):
            jobs.pop()
        return list(jobs)

    def loaded(self, job: Sequence[FragmentReference]) -> Asking[Loaded, list[Loaded]]:
        """Load one batch; return [] if all of it was skipped."""
        try:
            return [(yield from self._with_retries(job))]
        except LOAD_ERRORS:
            if self.options.on_failure == "raise":
                raise
        good = []
        for reference in job:
            if (yield from self._loads(reference)):
                good.append(reference)
        return [(yield from self._with_retries(good))] if good else []

    def _with_retries(self, job: Sequence[FragmentReference]) -> Asking[Loaded, Loaded]:
        for attempt in itertools.count(1):
            try:
                return (yield job)
            except LOAD_ERRORS as error:
                if attempt > self.options.retries:
                    error.add_note(f"after {attempt} attempts to load {len(job)} fragments")
                    raise
                _log.warning("attempt %d at loading a batch failed: %s", attempt, error)
        raise AssertionError("unreachable")

    def _loads(self, reference: FragmentReference) -> Asking[Loaded, bool]:
        try:
            yield from self._with_retries([reference])
        except LOAD_ERRORS as error:
            metadata = reference.metadata
            _log.warning(
                "skipped fragment %d of worker %s: %s",
                metadata.fragment_index,
                metadata.worker_id,
                error,
            )
            self.skipped.append(reference)
            return False
        return True
