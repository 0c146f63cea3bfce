"""Draw items from tables, one by one or as endless streams."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from breadbox.client import Client
from breadbox.model.errors import DeadlineExceededError, InvalidRequestError, WaitElapsedError
from breadbox_adapters.reverb.items import (
    ReplaySample,
    SampleInfo,
    flatten,
    flatten_with_path,
    info_of,
    row_of,
    tree_of,
    unflatten_as,
)
from breadbox_adapters.reverb.sending import LOG_PERIOD_S, connect, current_state, known_tables

_log = logging.getLogger(__name__)


class Draws:
    """Draw items of one table, several at a time; each fetch is loaded and released before use."""

    def __init__(self, client: Client, table: str, *, at_once: int, wait_s: float) -> None:
        """Draw at most `at_once` items a fetch, waiting `wait_s` (or math.inf) for each."""
        if at_once < 1:
            raise ValueError(f"items drawn at a time must be at least 1, got {at_once}")
        self._client = client
        self._table = table
        self._at_once = at_once
        self._wait_s = wait_s
        self._latest_count = 1
        self._types: dict[tuple[str, ...], type] = {}

    def __call__(self, count: int | None) -> Iterator[tuple[SampleInfo, Any]]:
        """Draw `count` items, or without end."""
        current_state(self._client, self._table)  # A fetch of no session would wait in vain.
        # Items of one fetch that must all differ are no independent draws.
        config = self._client.get_buffer(self._table).config
        at_once = self._at_once if config.with_replacement or config.uses_max == 1 else 1
        left = math.inf if count is None else count
        while left > 0:
            # Fetch twice as many as the last time, up to `at_once`.
            items = self._draw(int(min(left, at_once, 2 * self._latest_count)))
            self._latest_count = len(items)
            left -= len(items)
            yield from items

    def _draw(self, wanted_count: int) -> list[tuple[SampleInfo, Any]]:
        while wanted_count > 1:
            try:
                return self._fetch(wanted_count, 0.0)
            except (WaitElapsedError, InvalidRequestError):
                wanted_count //= 2
        ends_at = time.monotonic() + self._wait_s
        while True:
            left_s = max(0.0, ends_at - time.monotonic())
            try:
                return self._fetch(1, min(left_s, LOG_PERIOD_S))
            except WaitElapsedError as error:
                if left_s <= LOG_PERIOD_S:
                    raise DeadlineExceededError(
                        f"no item of table {self._table!r} could be sampled within "
                        f"{self._wait_s:g} s: {error.reason}"
                    ) from error
                _log.warning("sampling table %r waits: %s", self._table, error.reason)

    def _fetch(self, count: int, max_wait_s: float) -> list[tuple[SampleInfo, Any]]:
        with (
            known_tables(self._client, self._table),
            self._client.fetch(count, max_wait_s, buffer=self._table) as lease,
        ):
            fragments = list(lease.fragments())
        return [
            (info_of(reference), tree_of(fragment, self._types))
            for reference, fragment in zip(lease.references, fragments, strict=True)
        ]


def as_timesteps(info: SampleInfo, tree: Any) -> list[ReplaySample]:
    """Return one sample for each step of a trajectory; refuse columns that differ in length."""
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in flatten(tree)}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            "cannot split a trajectory into timesteps: columns differ in length: "
            "sample it with emit_timesteps=False"
        )
    return [ReplaySample(info, row_of(tree, step)) for step in range(lengths.pop())]


class Stream:
    """Iterate over samples, drawn anew for each iterator; like `tf.data.Dataset`."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator; all arrays are numpy's anyway."""
        return iter(self)

    def take(self, count: int) -> "Stream":
        """Return a stream of the first `count`."""
        return Stream(lambda: islice(self._start(), count))

    def map(self, function: Callable[[Any], Any]) -> "Stream":
        """Return a stream of a function's values for each."""
        return Stream(lambda: map(function, self._start()))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> "Stream":
        """Stack `batch_size` samples into one, with an axis in front; the last may have fewer."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return Stream(lambda: _batches(self._start(), batch_size, drop_remainder))

    def prefetch(self, buffer_size: int) -> "Stream":
        """Return this: `max_in_flight_samples_per_worker` is the number of samples drawn ahead."""
        return self


def _batches(samples: Iterator[Any], batch_size: int, drop_remainder: bool) -> Iterator[Any]:
    while group := list(islice(samples, batch_size)):
        if len(group) < batch_size and drop_remainder:
            return
        found = [dict(flatten_with_path(sample)) for sample in group]
        if any(each.keys() != found[0].keys() for each in found):
            raise ValueError("items with other columns cannot be stacked into one batch")
        yield unflatten_as(
            group[0], [np.stack([each[path] for each in found]) for path in found[0]]
        )


class TrajectoryDataset(Stream):
    """Whole items of a table, as `ReplaySample`s with data in the structure they were written in.

    `dtypes` is another structure to return data in, with dtypes as leaves, which are checked. At
    most `max_in_flight_samples_per_worker` items are drawn at a time; those that were drawn count
    as sampled, used or not. Samples end after `max_samples`, or when no item comes for
    `rate_limiter_timeout_ms` milliseconds; below 0 they do not. `**options` are
    `breadbox.connect`'s; other arguments have no effect.
    """

    def __init__(
        self,
        server_address: str,
        table: str,
        dtypes: Any = None,
        shapes: Any = None,
        max_in_flight_samples_per_worker: int = 100,
        num_workers_per_iterator: int = -1,
        max_samples_per_stream: int = -1,
        rate_limiter_timeout_ms: int = -1,
        max_samples: int = -1,
        **options: Any,
    ) -> None:
        if max_samples == 0:
            raise ValueError("max_samples must be positive, or below 0 for no end")
        self._address = server_address
        self._table = table
        self._dtypes = dtypes
        self._at_once = max_in_flight_samples_per_worker
        self._wait_s = math.inf if rate_limiter_timeout_ms < 0 else rate_limiter_timeout_ms / 1000
        self._count = None if max_samples < 0 else max_samples
        self._options = options
        super().__init__(self._samples)

    @classmethod
    def from_table_signature(
        cls,
        server_address: str,
        table: str,
        max_in_flight_samples_per_worker: int = 100,
        num_workers_per_iterator: int = -1,
        max_samples_per_stream: int = -1,
        rate_limiter_timeout_ms: int = -1,
        get_signature_timeout_secs: int | None = None,
        max_samples: int = -1,
        **options: Any,
    ) -> "TrajectoryDataset":
        """Return one without dtypes, which items have themselves; the arguments are Reverb's."""
        return cls(
            server_address,
            table,
            max_in_flight_samples_per_worker=max_in_flight_samples_per_worker,
            rate_limiter_timeout_ms=rate_limiter_timeout_ms,
            max_samples=max_samples,
            **options,
        )

    def _samples(self) -> Iterator[ReplaySample]:
        with connect(self._address, self._options) as client:
            draws = Draws(client, self._table, at_once=self._at_once, wait_s=self._wait_s)
            try:
                for info, tree in draws(self._count):
                    yield from self._given(info, self._in_structure(tree))
            except DeadlineExceededError:
                if self._wait_s == math.inf:
                    raise

    def _given(self, info: SampleInfo, tree: Any) -> Iterator[ReplaySample]:
        yield ReplaySample(info, tree)

    def _in_structure(self, tree: Any) -> Any:
        if self._dtypes is None:
            return tree
        leaves = flatten(tree)
        wanted = [np.dtype(getattr(each, "as_numpy_dtype", each)) for each in flatten(self._dtypes)]
        got = [leaf.dtype for leaf in leaves]
        if wanted != got:
            raise ValueError(
                f"items of table {self._table!r} have dtypes {_listed(got)}, "
                f"and the dataset was made for {_listed(wanted)}"
            )
        return unflatten_as(self._dtypes, leaves)


class TimestepDataset(TrajectoryDataset):
    """The steps of items, one after the other; otherwise like `TrajectoryDataset`."""

    def _given(self, info: SampleInfo, tree: Any) -> Iterator[ReplaySample]:
        yield from as_timesteps(info, tree)


def _listed(dtypes: list[np.dtype[Any]]) -> str:
    return f"[{', '.join(map(str, dtypes))}]"
