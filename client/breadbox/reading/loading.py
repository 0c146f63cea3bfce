"""Plan the loading of granted fragments: the batches, and what follows a failed load.

Invariants:
    L1  Every reference is delivered exactly once, or reported as skipped, or lost to an error that
        is raised; with `drop_last`, those of a short last batch are not delivered.
    L2  At most `prefetch_batches` batches are loaded or loading beside the one handed out.
    L3  What one iteration started never shows up in another; leaving it early, by break, error or
        `close()`, cancels what has not begun and waits for what has.

`breadbox.loader` carries plans out in threads (loading releases the interpreter lock).
`breadbox.aio.loader` does in tasks, and does not wait for loads that have begun when it is left.
"""

import itertools
import logging
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypedDict, TypeVar, get_args

from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadFormatError,
    PayloadMissingError,
)
from breadbox.model.types import FragmentReference

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
    """True to leave out a last batch that is shorter than the others."""
    retries: int = 2
    """Further attempts at a load that failed, 0 to 100. They do not count for an unreachable store,
    which the client waits for, for `reconnect_s`."""
    on_failure: OnFailure = "raise"

    def __post_init__(self) -> None:
        ranges = {"threads": (1, 256), "prefetch_batches": (0, 1024), "retries": (0, 100)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidRequestError(
                    name, f"must be from {least} to {most}, got {getattr(self, name)}"
                )
        for name, choices in {"order": LoadOrder, "on_failure": OnFailure}.items():
            if getattr(self, name) not in get_args(choices):
                raise InvalidRequestError(
                    name, f"must be one of {get_args(choices)}, got {getattr(self, name)!r}"
                )


Asking = Generator[Sequence[FragmentReference], Loaded, Result]
"""Generator that yields references to load as one batch, and is sent the batch or the error."""


class LoadPlan(Generic[Loaded]):
    """The batches to load, and the decisions after a failed load."""

    def __init__(self, options: LoaderOptions) -> None:
        self.options = options
        self.skipped: list[FragmentReference] = []
        """References that could not be loaded, over the plan's life; with "skip" only."""

    def jobs(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> list[Sequence[FragmentReference]]:
        """Return the references of each batch, in the order of loading."""
        if batch_size < 1:
            raise InvalidRequestError("batch_size", f"must be at least 1, got {batch_size}")
        order, seed = self.options.order, self.options.seed
        if order == "shuffled" or (order == "completed" and seed is not None):
            references = list(references)
            random.Random(seed).shuffle(references)
        jobs = [references[i : i + batch_size] for i in range(0, len(references), batch_size)]
        if self.options.drop_last and jobs and len(jobs[-1]) < batch_size:
            jobs.pop()
        return jobs

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
