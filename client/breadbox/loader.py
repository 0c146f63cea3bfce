# Made from breadbox/aio/loader.py by scripts/gen_blocking.py; edit that, run `make blocking`.
"""Loads granted fragments in the background: batches are there when the learner asks for them.

`breadbox.loading` says what holds.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Generic, TypeVar

from breadbox.ahead import run_ahead
from breadbox.loading import LOAD_ERRORS, LoaderOptions, LoadPlan
from breadbox.side_stream import SideStream
from breadbox.types import FragmentReference

Loaded = TypeVar("Loaded")


class FragmentLoader(Generic[Loaded]):
    """Loads lists of references as batches, ahead of their use.

    An object may be iterated any number of times, also at the same time: iterations share nothing
    but the load function.

    Args:
        load: Loads some references as one batch, in their order; called from several threads.
        options: How.
        side_stream: The CUDA stream on which `load` makes batches, so that copies overlap with what
            the caller computes; a batch that is handed out is ready for use on the caller's
            current stream. None: it does so on none.
    """

    def __init__(
        self,
        load: Callable[[Sequence[FragmentReference]], Loaded],
        options: LoaderOptions | None = None,
        *,
        side_stream: SideStream | None = None,
    ) -> None:
        self._load = load
        self._side_stream = side_stream
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
            at_once=options.threads,
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
