# Code: breadbox/aio/loader.py, made by scripts/gen_blocking.py. Docstrings: written here.

"""Load granted fragments in the background, so that batches are ready when the learner needs them.

`breadbox.reading.loading` has the invariants.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

from breadbox.model.types import FragmentReference
from breadbox.reading.devices import SideStream
from breadbox.reading.loading import LOAD_ERRORS, LoaderOptions, Planned
from breadbox.transport.prefetch import prefetched

Loaded = TypeVar("Loaded")


class FragmentLoader(Planned[Loaded]):
    """Load lists of references as batches, ahead of their use.

    ```python
    from breadbox.loader import FragmentLoader

    with client.fetch(fragment_count=32, max_wait_s=30) as lease:
        loader = FragmentLoader(client.load_batch)
        for batch in loader.batches(lease.references, batch_size=8): ...
    ```

    A loader may be iterated any number of times, also concurrently: iterations share only the load
    function.

    Args:
        load: Loads some references as one batch, in their order; called from several threads.
        options: Options, or None for the defaults of `LoaderOptions`.
        side_stream: The CUDA stream on which `load` makes batches, or None. Copies then overlap
            with the caller's computation, and a returned batch is ready for use on the caller's
            current stream.
        model_version: Returns the version that trains on the next batch, of the batches' session;
            called as each is handed out. Needed with `max_staleness_at_use`, for which `load` must
            return a `Batch`. With it alone the loader only counts `staleness_at_use`.

    Raises:
        InvalidRequestError: `max_staleness_at_use` is set without `model_version`.
    """

    def __init__(
        self,
        load: Callable[[Sequence[FragmentReference]], Loaded],
        options: LoaderOptions | None = None,
        *,
        side_stream: SideStream | None = None,
        model_version: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(options, knows_version=model_version is not None)
        self._load = load
        self._model_version = model_version
        self._side_stream = side_stream

    def batches(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> Generator[Loaded, None, None]:
        """Load *references* in batches of *batch_size*; the last may be shorter.

        ```python
        for batch in loader.batches(lease.references, batch_size=2):
            print(batch.reward.mean())
        ```

        Each iteration blocks until the next batch is loaded. The lease of the references must not
        expire before the iteration ends. An error ends the iteration.

        Raises:
            InvalidRequestError: `batch_size` is below 1.
            PayloadMissingError, PayloadCorruptError: A load failed after the last retry, and
                `on_failure` is "raise".
            StoreUnavailableError: The store was unreachable for `reconnect_s`.
        """
        return self.batches_of(self._plan.jobs(references, batch_size))

    def batches_of(
        self, jobs: Sequence[Sequence[FragmentReference]]
    ) -> Generator[Loaded, None, None]:
        """Load each list of references as one batch, in their order; see `batches`.

        ```python
        for batch in loader.batches_of([lease.references[:3], lease.references[3:]]):
            print(batch.reward.mean())
        ```

        Raises:
            ReplayBufferError: See `batches`.
        """
        options = self._plan.options
        loaded = prefetched(
            jobs,
            self._load_job,
            at_once=options.threads,
            depth=self._plan.depth,
            in_order=options.order != "completed",
        )
        return self._handed_out(loaded)

    def _handed_out(
        self, groups: Generator[list[Loaded], None, None]
    ) -> Generator[Loaded, None, None]:
        """Yield the batches of the lists, without keeping a reference to any."""
        with closing(groups):
            for group in groups:
                if group and self._side_stream is not None:
                    self._side_stream.hand_over(group[0])
                if group and self._model_version is not None:
                    group[:] = self._plan.fresh(group[0], self._model_version())
                while group:
                    yield group.pop()

    def _load_job(self, job: Sequence[FragmentReference]) -> list[Loaded]:
        """Load one batch as the plan asks."""
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
