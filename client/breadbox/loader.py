"""Loads granted fragments in the background: batches are there when the learner asks for them.

Invariants:
    L1  Every reference is delivered exactly once, or reported as skipped, or lost to an error that
        is raised; with `drop_last`, those of a short last batch are not delivered.
    L2  At most `prefetch_batches` batches are loaded or loading beside the one handed out.
    L3  What one iteration started never shows up in another; leaving it early, by break, error or
        `close()`, cancels what has not begun and waits for what has.

What is loaded, in which batches, and what is done about failures is decided by `LoadPlan`, which
loads nothing itself: `FragmentLoader` carries it out in threads, `breadbox.async_loader` in tasks.

Threads, not processes: receiving, checksums and decompression release the interpreter lock.
Where Python code of your own has to run on every fragment, use a `FragmentDataset` in a
`DataLoader` with worker processes.
"""

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar, get_args

from breadbox.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadFormatError,
    PayloadMissingError,
)
from breadbox.side_stream import side_stream_for
from breadbox.types import FragmentReference

_log = logging.getLogger(__name__)

Job = TypeVar("Job")
Loaded = TypeVar("Loaded")
Record = TypeVar("Record")
Result = TypeVar("Result")

LOAD_ERRORS = (PayloadCorruptError, PayloadFormatError, PayloadMissingError)
"""Failures of a load that are tried again, and may be skipped. A store that is away is none: the
load has waited for it, for as long as its client may, and no fragment is at fault. Anything else is
a bug or misuse."""


LoadOrder = Literal["granted", "shuffled", "completed"]
"""In which order fragments are delivered.

granted: as the lease has them. shuffled: in a random order that depends on the seed alone.
completed: batches cut in granted order (or shuffled, with a seed), delivered as each is there.
"""

OnFailure = Literal["raise", "skip"]
"""What happens to fragments that could not be loaded, after the last retry.

raise: the error is raised where the batch would have been delivered. skip: the batch is delivered
without them, and they are listed in `FragmentLoader.skipped`.
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
    """How to load.

    Raises:
        InvalidRequestError: An option is out of its range.
    """

    threads: int = 2
    """Loads at a time, 1 to 256; more than `prefetch_batches` have nothing to do."""
    prefetch_batches: int = 2
    """Batches loaded ahead of the one being worked on, 0 to 1024; 0 loads when asked."""
    order: LoadOrder = "granted"
    seed: int | None = None
    """Of shuffled order, where None means a different one each time, and of completed order."""
    drop_last: bool = False
    """Leave out a last batch that is shorter than the others."""
    retries: int = 2
    """Further attempts at a load that failed, 0 to 100. For a store that is away, the client's
    `reconnect_s` says how long to wait."""
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
"""Yields references to load as one batch; takes that batch, or has thrown in why it failed."""


class LoadPlan(Generic[Loaded]):
    """Which batches to load, and what to do when a load fails."""

    def __init__(self, options: LoaderOptions) -> None:
        self.options = options
        self.skipped: list[FragmentReference] = []
        """References that could not be loaded, over the plan's life; only with "skip"."""

    def jobs(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> list[Sequence[FragmentReference]]:
        """The references of each batch, in the order of loading.

        Raises:
            InvalidRequestError: `batch_size` is below 1.
        """
        if batch_size < 1:
            raise InvalidRequestError("batch_size", f"must be at least 1, got {batch_size}")
        ordered = _ordered(references, self.options)
        jobs = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        if self.options.drop_last and jobs and len(jobs[-1]) < batch_size:
            jobs.pop()
        return jobs

    def loaded(self, job: Sequence[FragmentReference]) -> Asking[Loaded, list[Loaded]]:
        """Load one batch; none when all of it was skipped."""
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
        """Whether a fragment can be loaded by itself; else it is noted as skipped."""
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


class FragmentLoader(Generic[Loaded]):
    """Loads lists of references as batches, ahead of their use.

    An object may be iterated any number of times, also at the same time: iterations share nothing
    but the load function.

    Args:
        load: Loads some references as one batch, in their order; called from several threads.
        options: How.
        device: Where `load` puts batches. For a CUDA device it runs on a stream of the loader's
            own, so that copies overlap with what the caller computes; a batch that is handed out
            is ready for use on the caller's current stream.
    """

    def __init__(
        self,
        load: Callable[[Sequence[FragmentReference]], Loaded],
        options: LoaderOptions | None = None,
        *,
        device: Any = None,
    ) -> None:
        self._side_stream = side_stream_for(device)
        self._load = load
        self._plan: LoadPlan[Loaded] = LoadPlan(options or LoaderOptions())

    @property
    def skipped(self) -> list[FragmentReference]:
        """References that could not be loaded, over the loader's life; only with "skip"."""
        return self._plan.skipped

    def batches(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> Generator[Loaded, None, None]:
        """Load *references* in batches of *batch_size*; the last may be shorter.

        Their lease has to live until the iteration ends.

        Raises:
            InvalidRequestError: `batch_size` is below 1.
            PayloadMissingError, PayloadCorruptError: A load failed after the last retry, unless
                told to skip. The iteration is over then.
            StoreUnavailableError: The store stayed away for `reconnect_s`. So it is then, too.
        """
        options = self._plan.options
        loaded = run_ahead(
            self._plan.jobs(references, batch_size),
            self._load_job,
            threads=options.threads,
            depth=options.prefetch_batches,
            in_order=options.order != "completed",
        )
        return self._handed_out(loaded)

    def _handed_out(
        self, groups: Generator[list[Loaded], None, None]
    ) -> Generator[Loaded, None, None]:
        """Hand out what is in the lists, and keep nothing of it."""
        with closing(groups):
            for group in groups:
                while group:
                    if self._side_stream is not None:
                        self._side_stream.hand_over(group[-1])
                    yield group.pop()

    def _load_job(self, job: Sequence[FragmentReference]) -> list[Loaded]:
        """Carry out the plan for one batch."""
        asking = self._plan.loaded(job)
        try:
            wanted = next(asking)
            while True:
                try:
                    with self._side_stream or nullcontext():
                        loaded = self._load(wanted)
                except LOAD_ERRORS as error:
                    wanted = asking.throw(error)
                else:
                    wanted = asking.send(loaded)
        except StopIteration as stop:
            batches: list[Loaded] = stop.value
            return batches
        finally:
            asking.close()


def run_ahead(
    jobs: Iterable[Job],
    run: Callable[[Job], Loaded],
    *,
    threads: int,
    depth: int,
    in_order: bool,
) -> Generator[Loaded, None, None]:
    """Run jobs in threads, ahead of whoever iterates over their results.

    Args:
        jobs: Taken one by one, from the iterating thread, no earlier than needed.
        run: Called once per job.
        threads: At most this many jobs run at a time.
        depth: At most this many results are ready or being made beside the one handed out; 0 runs
            each job when its result is asked for, in the iterating thread.
        in_order: Results in the order of jobs; else as they complete.

    Returns:
        A generator, which raises what a job raised in place of its result and is over then. Its
        `close()`, which leaving a `for` loop calls, cancels jobs that have not begun and waits for
        those that have.
    """
    if depth == 0:
        yield from map(run, jobs)
        return
    remaining = iter(jobs)
    pending: deque[Future[Loaded]] = deque()
    executor = ThreadPoolExecutor(max_workers=min(threads, depth), thread_name_prefix="loader")

    def top_up() -> None:
        for job in itertools.islice(remaining, depth - len(pending)):
            pending.append(executor.submit(run, job))

    try:
        top_up()
        while pending:
            if not in_order:
                _move_completed_to_front(pending)
            # In no variable when it is handed out, so that nothing here keeps a batch alive.
            ready = [pending.popleft()]
            wait(ready)
            top_up()
            yield ready.pop().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _move_completed_to_front(pending: deque[Future[Loaded]]) -> None:
    """Wait until one is done and put the first that is at the front."""
    wait(pending, return_when=FIRST_COMPLETED)
    position = next(i for i, future in enumerate(pending) if future.done())
    completed = pending[position]
    del pending[position]
    pending.appendleft(completed)


def _ordered(
    references: Sequence[FragmentReference], options: LoaderOptions
) -> Sequence[FragmentReference]:
    is_shuffled = options.order == "shuffled" or (
        options.order == "completed" and options.seed is not None
    )
    if not is_shuffled:
        return references
    shuffled = list(references)
    random.Random(options.seed).shuffle(shuffled)
    return shuffled


def data_iter(
    load: Callable[[Record], tuple[Any, Any]],
    records: Sequence[Record],
    batch_size: int,
    prefetch_batches: int = 2,
    *,
    threads: int = 4,
    seed: int | None = None,
) -> Iterator[dict[str, list[Any]]]:
    """Load records one by one, shuffled, and yield them in groups as they arrive.

    Args:
        load: Gives the index and the fragment of a record; called from several threads.
        records: Each is loaded exactly once.
        batch_size: Records of a group; the last may be shorter.
        prefetch_batches: Groups loaded ahead of the one being worked on.
        threads: Loads at a time.
        seed: Of the order; None: a different one each time.

    Yields:
        `{"index": [...], "fragment": [...]}` with one entry per record.
    """
    if batch_size < 1:
        raise InvalidRequestError("batch_size", f"must be at least 1, got {batch_size}")
    shuffled = list(records)
    random.Random(seed).shuffle(shuffled)
    loaded = run_ahead(
        shuffled,
        load,
        threads=threads,
        depth=(prefetch_batches + 1) * batch_size,
        in_order=False,
    )
    with closing(loaded):
        while group := list(itertools.islice(loaded, batch_size)):
            yield {
                "index": [index for index, _ in group],
                "fragment": [fragment for _, fragment in group],
            }
